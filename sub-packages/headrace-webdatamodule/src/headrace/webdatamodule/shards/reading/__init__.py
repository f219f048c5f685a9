"""Reading samples of indexed shards."""
