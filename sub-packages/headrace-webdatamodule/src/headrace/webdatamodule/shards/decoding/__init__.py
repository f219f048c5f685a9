"""Bytes of members to values, without running code from them."""
