"""Shards on this machine: one, and a set of them. Those of other machines are read through the same classes."""
