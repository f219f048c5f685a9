"""Samples to whole, indexed shards, one task a shard."""
