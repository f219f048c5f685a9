"""Tar shards as a Lightning data module: safe, whole and exact."""

from importlib import import_module
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
    from headrace.webdatamodule.indexed.agreement import DifferentPlanError
    from headrace.webdatamodule.indexed.delivering import DamagedSampleWarning
    from headrace.webdatamodule.indexed.protocols import Batching, Ordering
    from headrace.webdatamodule.indexed.sizes import SizesInMemoryWarning
    from headrace.webdatamodule.indexed.tally import LoaderReport
    from headrace.webdatamodule.indexed_module import IndexedWebDataModule, SharedShardsWarning
    from headrace.webdatamodule.loader import ResumableLoader
    from headrace.webdatamodule.shards import InProcessWarning, Remote, write_shards

__all__ = [
    "Batching",
    "DamagedIndexError",
    "DamagedSampleWarning",
    "DamagedShardError",
    "DecodeError",
    "DifferentPlanError",
    "Fault",
    "GroupingError",
    "InProcessWarning",
    "IndexedShards",
    "IndexedWebDataModule",
    "LoaderReport",
    "Manifest",
    "ManifestError",
    "Ordering",
    "PickledDataWDS",
    "RefusedMemberError",
    "Remote",
    "ResumableLoader",
    "ShardError",
    "ShardIndex",
    "SharedShardsWarning",
    "SizesInMemoryWarning",
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
    "write_shards",
    "write_tars",
]

_HOME = "headrace.webdatamodule"
# Who only reads or writes shards waits for neither torch nor lightning: these are imported when they are asked for.
_LATER = {
    "Batching": "indexed.protocols",
    "DamagedSampleWarning": "indexed.delivering",
    "DifferentPlanError": "indexed.agreement",
    "InProcessWarning": "shards",
    "IndexedWebDataModule": "indexed_module",
    "LoaderReport": "indexed.tally",
    "Ordering": "indexed.protocols",
    "PickledDataWDS": "datamodule",
    "Remote": "shards",
    "ResumableLoader": "loader",
    "SharedShardsWarning": "indexed_module",
    "SizesInMemoryWarning": "indexed.sizes",
    "Split": "datamodule",
    "WebDataModule": "datamodule",
    "write_shards": "shards",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(f"{_HOME}.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
