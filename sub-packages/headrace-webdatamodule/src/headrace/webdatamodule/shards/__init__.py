"""Shards: reading, writing and decoding tar files. Importing this loads neither torch nor lightning."""

from headrace.webdatamodule.shards.decode import decode_member
from headrace.webdatamodule.shards.errors import DecodeError, ShardError, UnsafePickleError
from headrace.webdatamodule.shards.unpickle import restricted_loads
from headrace.webdatamodule.shards.writer import write_tars

__all__ = [
    "DecodeError",
    "ShardError",
    "UnsafePickleError",
    "decode_member",
    "restricted_loads",
    "write_tars",
]
