"""The bytes of shards: one shard, and a set of them. Those of other machines are read through the same classes."""
