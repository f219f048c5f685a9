"""Tar shards as a Lightning data module: safe, whole and exact."""

from typing import TYPE_CHECKING, Any

from headrace.webdatamodule.shards import (
    DamagedIndexError,
    DamagedShardError,
    DecodeError,
    Fault,
    GroupingError,
    IndexedShards,
    Manifest,
    ManifestError,
    RefusedMemberError,
    ShardError,
    ShardIndex,
    SkippedMembersWarning,
    StaleIndexError,
    UnsafePickleError,
    add_column,
    decode_member,
    export_dali,
    import_dali,
    import_energon,
    index_shards,
    open_column,
    restricted_loads,
    verify_shards,
    write_tars,
)

if TYPE_CHECKING:
    from headrace.webdatamodule.datamodule import PickledDataWDS, Split, WebDataModule
    from headrace.webdatamodule.shards import Remote

__all__ = [
    "DamagedIndexError",
    "DamagedShardError",
    "DecodeError",
    "Fault",
    "GroupingError",
    "IndexedShards",
    "Manifest",
    "ManifestError",
    "PickledDataWDS",
    "RefusedMemberError",
    "Remote",
    "ShardError",
    "ShardIndex",
    "SkippedMembersWarning",
    "Split",
    "StaleIndexError",
    "UnsafePickleError",
    "WebDataModule",
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

_NEED_LIGHTNING = ("PickledDataWDS", "Split", "WebDataModule")


def __getattr__(name: str) -> Any:
    # Who only reads or writes shards waits for neither torch nor lightning.
    if name in _NEED_LIGHTNING:
        from headrace.webdatamodule import datamodule

        return getattr(datamodule, name)
    if name == "Remote":
        from headrace.webdatamodule import shards

        return shards.Remote
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
