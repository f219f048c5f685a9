"""What ``headrace-shards pack`` reads samples from, one kind a module."""
