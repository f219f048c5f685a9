"""Bytes of files, wherever they lie."""
