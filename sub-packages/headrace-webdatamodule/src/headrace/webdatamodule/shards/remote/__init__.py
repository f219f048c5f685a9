"""Shards on other machines."""
