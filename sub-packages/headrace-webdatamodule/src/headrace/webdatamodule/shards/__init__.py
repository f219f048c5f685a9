"""Shards: reading, writing, indexing and decoding tar files. Importing this loads neither torch nor lightning."""

import importlib
from typing import TYPE_CHECKING, Any

from headrace.webdatamodule.shards.decoding.decode import decode_member, restricted_loads
from headrace.webdatamodule.shards.errors import (
    DamagedIndexError,
    DamagedShardError,
    DecodeError,
    GroupingError,
    IndexVersionError,
    LostColumnsError,
    ManifestError,
    RefusedMemberError,
    ShardError,
    StaleIndexError,
    UnsafePickleError,
)
from headrace.webdatamodule.shards.index.build import ChangedShardWarning, SkippedMembersWarning, index_shards
from headrace.webdatamodule.shards.index.manifest import Manifest, add_column, open_column
from headrace.webdatamodule.shards.index.shard_index import ShardIndex
from headrace.webdatamodule.shards.index.verify import Fault, verify_shards
from headrace.webdatamodule.shards.indexed_shards import IndexedShards
from headrace.webdatamodule.shards.writing.write import write_tars

if TYPE_CHECKING:
    from headrace.webdatamodule.shards.remote.remote import Remote
    from headrace.webdatamodule.shards.stores.retries import RetryPolicy
    from headrace.webdatamodule.shards.stores.store import Store
    from headrace.webdatamodule.shards.writing.write import write_shards

__all__ = [
    "ChangedShardWarning",
    "DamagedIndexError",
    "DamagedShardError",
    "DecodeError",
    "Fault",
    "GroupingError",
    "IndexVersionError",
    "IndexedShards",
    "LostColumnsError",
    "Manifest",
    "ManifestError",
    "RefusedMemberError",
    "Remote",
    "RetryPolicy",
    "ShardError",
    "ShardIndex",
    "SkippedMembersWarning",
    "StaleIndexError",
    "Store",
    "UnsafePickleError",
    "add_column",
    "decode_member",
    "index_shards",
    "open_column",
    "restricted_loads",
    "verify_shards",
    "write_shards",
    "write_tars",
]


# Imported when they are first used: reading local shards does not wait for what writing and remote shards need.
_LATER = {
    "Remote": "headrace.webdatamodule.shards.remote.remote",
    "RetryPolicy": "headrace.webdatamodule.shards.stores.retries",
    "Store": "headrace.webdatamodule.shards.stores.store",
    "write_shards": "headrace.webdatamodule.shards.writing.write",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
