"""Outputs of a trainer's `predict`, sorted by sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def in_order(outputs: Sequence[Any], batches: Sequence[Sequence[int]]) -> list[tuple[int, Any]]:
    """Split the outputs of batches into rows, and sort these by sample, of which each comes once.

    >>> in_order([["c", "a"], ["b"]], [[2, 0], [1]])
    [(0, 'a'), (1, 'b'), (2, 'c')]
    """
    if len(outputs) != len(batches):
        raise ValueError(
            f"outputs must be what Trainer.predict returned last, one for each of its {len(batches)} batches, "
            f"got {len(outputs)}"
        )
    found: dict[int, Any] = {}
    for output, indices in zip(outputs, batches, strict=True):
        for index, row in zip(indices, rows(output, len(indices)), strict=True):
            if not hasattr(index, "__index__"):
                raise ValueError(
                    f"predictions are of whole samples, got {index!r}: give the predict split a batch_sampler without "
                    "oversize='split', or join the outputs of pieces yourself"
                )
            found.setdefault(int(index), row)
    return sorted(found.items(), key=lambda pair: pair[0])


def rows(output: Any, count: int) -> Iterator[Any]:
    """One row for each of the `count` samples of a batch.

    >>> list(rows({"score": [1, 2], "name": ["x", "y"]}, 2))
    [{'score': 1, 'name': 'x'}, {'score': 2, 'name': 'y'}]
    """
    if isinstance(output, Mapping) and output:
        columns = [list(rows(column, count)) for column in output.values()]
        return (dict(zip(output, row, strict=True)) for row in zip(*columns, strict=True))
    if isinstance(output, tuple) and output:
        columns = [list(rows(column, count)) for column in output]
        make = getattr(type(output), "_make", tuple)
        return (make(row) for row in zip(*columns, strict=True))
    try:
        got = f"{len(output)} rows"
    except TypeError:  # a tensor without dimensions has __len__, which raises
        got = f"a single {type(output).__name__}"
    if got != f"{count} rows" or isinstance(output, Mapping | tuple):
        raise ValueError(f"outputs must have one row for each of the {count} samples of a batch, got {got}")
    return iter(output)
