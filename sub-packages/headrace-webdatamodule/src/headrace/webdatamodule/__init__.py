"""Tar shards as a Lightning data module: safe, whole and exact."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from headrace.webdatamodule.shards import (
    ChangedShardWarning,
    DamagedIndexError,
    DamagedShardError,
    DecodeError,
    Fault,
    GroupingError,
    IndexedShards,
    IndexVersionError,
    LostColumnsError,
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
    index_shards,
    open_column,
    restricted_loads,
    verify_shards,
    write_tars,
)

if TYPE_CHECKING:
    from headrace.webdatamodule.datamodule import PickledDataWDS, WebDataModule
    from headrace.webdatamodule.indexed_datamodule import IndexedWebDataModule, SharedShardsWarning
    from headrace.webdatamodule.loader import ResumableLoader
    from headrace.webdatamodule.loading.batch_reading import DamagedSampleWarning
    from headrace.webdatamodule.loading.batch_sampler import DistributedBatchSampler
    from headrace.webdatamodule.loading.distributed import RankMismatchError
    from headrace.webdatamodule.loading.factories import BatchSamplerFactory, SamplerFactory
    from headrace.webdatamodule.loading.sample_random import sample_rng
    from headrace.webdatamodule.loading.sizes import SizesInMemoryWarning
    from headrace.webdatamodule.loading.stage_report import LoaderReport
    from headrace.webdatamodule.map_datamodule import MapDataModule
    from headrace.webdatamodule.shards import Remote, RetryPolicy, Store, write_shards
    from headrace.webdatamodule.split_names import Split

__all__ = [
    "BatchSamplerFactory",
    "ChangedShardWarning",
    "DamagedIndexError",
    "DamagedSampleWarning",
    "DamagedShardError",
    "DecodeError",
    "DistributedBatchSampler",
    "Fault",
    "GroupingError",
    "IndexVersionError",
    "IndexedShards",
    "IndexedWebDataModule",
    "LoaderReport",
    "LostColumnsError",
    "Manifest",
    "ManifestError",
    "MapDataModule",
    "PickledDataWDS",
    "RankMismatchError",
    "RefusedMemberError",
    "Remote",
    "ResumableLoader",
    "RetryPolicy",
    "SamplerFactory",
    "ShardError",
    "ShardIndex",
    "SharedShardsWarning",
    "SizesInMemoryWarning",
    "SkippedMembersWarning",
    "Split",
    "StaleIndexError",
    "Store",
    "UnsafePickleError",
    "WebDataModule",
    "add_column",
    "decode_member",
    "index_shards",
    "open_column",
    "restricted_loads",
    "sample_rng",
    "verify_shards",
    "write_shards",
    "write_tars",
]

__version__: str  # of the distribution, which is looked up when it is asked for
_HOME = "headrace.webdatamodule"
# Who only reads or writes shards waits for neither torch nor lightning: these are imported when they are asked for.
_LATER = {
    "BatchSamplerFactory": "loading.factories",
    "DamagedSampleWarning": "loading.batch_reading",
    "DistributedBatchSampler": "loading.batch_sampler",
    "IndexedWebDataModule": "indexed_datamodule",
    "LoaderReport": "loading.stage_report",
    "MapDataModule": "map_datamodule",
    "PickledDataWDS": "datamodule",
    "RankMismatchError": "loading.distributed",
    "Remote": "shards",
    "RetryPolicy": "shards",
    "Store": "shards",
    "ResumableLoader": "loader",
    "SamplerFactory": "loading.factories",
    "SharedShardsWarning": "indexed_datamodule",
    "SizesInMemoryWarning": "loading.sizes",
    "Split": "split_names",
    "WebDataModule": "datamodule",
    "sample_rng": "loading.sample_random",
    "write_shards": "shards",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("headrace-webdatamodule")
    if name in _LATER:
        return getattr(import_module(f"{_HOME}.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
