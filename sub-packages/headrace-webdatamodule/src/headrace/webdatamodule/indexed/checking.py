"""What `IndexedWebDataModule` refuses before anything is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from headrace.webdatamodule.indexed.arguments import PerSplit, named_sources
from headrace.webdatamodule.indexed.waiting import Wait
from headrace.webdatamodule.shards.reading.dataset import Check
from headrace.webdatamodule.shards.writing.plan import whole_number
from headrace.webdatamodule.splits import Split

BATCHING = (
    "what makes batches is given as a callable, such as "
    "functools.partial(DistributedSizeAwareBatchSampler, max_total_size=16384)"
)
_ORDER = (
    "what makes the order is given as a callable, such as "
    "functools.partial(WeightedDistributedSampler, weights={'web': 3, 'books': 1})"
)


def check_arguments(given: Mapping[str, PerSplit], check: str) -> None:
    """Refuse arguments that cannot be meant.

    Args:
        given: "shards", "batching", "sizes", "order", "transform", "collate_fn", "num_workers" and "damaged".
        check: When checksums are compared.

    Raises:
        TypeError: An argument of the wrong kind.
        ValueError: An argument that is not allowed.
    """
    if check not in get_args(Check):
        raise ValueError(f"check must be one of {', '.join(map(repr, get_args(Check)))}, got {check!r}")
    used = [split for split in Split if split in given["shards"]]
    for split in used:
        named_sources(f"shards[{split}]", given["shards"][split], split.name)
        _check_batching(split, given["batching"], given["sizes"][split])
        _check_rest(split, given)
    by_size = any(callable(given["batching"][split]) for split in used)
    if not by_size and any(given["sizes"][split] is not None for split in used):
        raise ValueError(
            f"sizes is for a batching by size, and batching={given['batching'].given!r} is not; {BATCHING}"
        )


def check_loading(timeout: Any, prefetch_factor: Any) -> None:
    """Refuse what no loader waits or reads ahead for.

    Args:
        timeout: Seconds to wait for a batch, 0 for no limit.
        prefetch_factor: Batches that a worker reads ahead, or None.

    Raises:
        ValueError: They are not allowed.
    """
    Wait(timeout)
    ahead = whole_number(prefetch_factor)
    if prefetch_factor is not None and (ahead is None or ahead < 1):
        raise ValueError(f"prefetch_factor must be None, or 1 or more batches, got {prefetch_factor!r}")


def _check_batching(split: Split, given: PerSplit, sizes: Any) -> None:
    if split not in given:
        raise ValueError(f"batching lacks {split}, of which there are shards: add batching[{split}]")
    batching = given[split]
    count = whole_number(batching)
    if count is None and not callable(batching):
        raise TypeError(f"batching must be the samples of a batch, or {BATCHING}; got {batching!r} for {split}")
    if count is not None and count < 1:
        raise ValueError(f"batching must be 1 or more samples a batch, got {batching} for {split}")
    if callable(batching) and sizes is None:
        raise ValueError(
            f"batching makes batches by size, and {split} has no sizes: pass sizes= a column, a member key, or a "
            "function of the sample"
        )


def _check_rest(split: Split, given: Mapping[str, PerSplit]) -> None:
    if given["damaged"][split] not in ("raise", "skip"):
        raise ValueError(f"damaged must be 'raise' or 'skip', got {given['damaged'][split]!r} for {split}")
    workers = whole_number(given["num_workers"][split])
    if workers is None or workers < 0:
        raise ValueError(f"num_workers must be 0 or more processes, got {given['num_workers'][split]!r} for {split}")
    for name in ("transform", "collate_fn", "order"):
        function = given[name][split]
        if function is not None and not callable(function):
            hint = f"; {_ORDER}" if name == "order" else ""
            raise TypeError(f"{name} must be a function, got {function!r} for {split}{hint}")
