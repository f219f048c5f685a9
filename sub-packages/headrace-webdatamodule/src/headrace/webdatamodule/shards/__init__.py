"""Shards: reading, writing, indexing and decoding tar files. Importing this loads neither torch nor lightning."""

from typing import TYPE_CHECKING, Any

from headrace.webdatamodule.shards.columns import add_column, open_column
from headrace.webdatamodule.shards.dali import export_dali, import_dali
from headrace.webdatamodule.shards.decode import decode_member
from headrace.webdatamodule.shards.energon import import_energon
from headrace.webdatamodule.shards.errors import (
    DamagedIndexError,
    DamagedShardError,
    DecodeError,
    GroupingError,
    ManifestError,
    RefusedMemberError,
    ShardError,
    StaleIndexError,
    UnsafePickleError,
)
from headrace.webdatamodule.shards.index import ShardIndex
from headrace.webdatamodule.shards.indexing import SkippedMembersWarning, index_shards
from headrace.webdatamodule.shards.manifest import Manifest
from headrace.webdatamodule.shards.reader import IndexedShards
from headrace.webdatamodule.shards.unpickle import restricted_loads
from headrace.webdatamodule.shards.verify import Fault, verify_shards
from headrace.webdatamodule.shards.writer import write_tars

if TYPE_CHECKING:
    from headrace.webdatamodule.shards.remote import Remote

__all__ = [
    "DamagedIndexError",
    "DamagedShardError",
    "DecodeError",
    "Fault",
    "GroupingError",
    "IndexedShards",
    "Manifest",
    "ManifestError",
    "RefusedMemberError",
    "Remote",
    "ShardError",
    "ShardIndex",
    "SkippedMembersWarning",
    "StaleIndexError",
    "UnsafePickleError",
    "add_column",
    "decode_member",
    "export_dali",
    "import_dali",
    "import_energon",
    "index_shards",
    "open_column",
    "restricted_loads",
    "verify_shards",
    "write_tars",
]


def __getattr__(name: str) -> Any:
    # Who reads local shards does not wait for what remote ones need.
    if name == "Remote":
        from headrace.webdatamodule.shards.remote import Remote

        return Remote
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
