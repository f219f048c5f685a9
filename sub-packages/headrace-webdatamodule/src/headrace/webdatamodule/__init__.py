"""Tar shards as a Lightning data module: safe, whole and exact."""

from typing import TYPE_CHECKING, Any

from headrace.webdatamodule.shards import (
    DecodeError,
    ShardError,
    UnsafePickleError,
    decode_member,
    restricted_loads,
    write_tars,
)

if TYPE_CHECKING:
    from headrace.webdatamodule.datamodule import PickledDataWDS, Split, WebDataModule

__all__ = [
    "DecodeError",
    "PickledDataWDS",
    "ShardError",
    "Split",
    "UnsafePickleError",
    "WebDataModule",
    "decode_member",
    "restricted_loads",
    "write_tars",
]

_NEED_LIGHTNING = ("PickledDataWDS", "Split", "WebDataModule")


def __getattr__(name: str) -> Any:
    # Who only reads or writes shards waits for neither torch nor lightning.
    if name in _NEED_LIGHTNING:
        from headrace.webdatamodule import datamodule

        return getattr(datamodule, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
