"""Indexes, manifests and columns of shards."""
