"""Which shards of a write that was killed are kept, so that the next one makes the rest."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from headrace.webdatamodule.shards.errors import ShardError
from headrace.webdatamodule.shards.index.build import fitting_index
from headrace.webdatamodule.shards.index.manifest import NOTE, read_note
from headrace.webdatamodule.shards.index.shard_index import ShardIndex
from headrace.webdatamodule.shards.reading.shard_reader import ShardReader, map_shard
from headrace.webdatamodule.shards.writing.plan import CURE
from headrace.webdatamodule.shards.writing.shard_builder import ShardBuilder, Written, result
from headrace.webdatamodule.shards.writing.shard_task import MapStyle, ShardTask, load


def noted_fingerprint(directory: Path, prefix: str) -> str | None:
    """The fingerprint that is noted in a directory; None when there is none."""
    found = read_note(directory / f"{prefix}{NOTE}").get("fingerprint")
    return found if isinstance(found, str) else None


def kept(task: ShardTask, hashes: npt.NDArray[np.uint64] | None, *, same: bool) -> Written | None:
    """What an earlier run of the same plan made of a shard, when that is whole and holds the same samples.

    Its index has to fit it. Where no fingerprint says that the samples are the same, all keys are compared where they
    are known, and the first, the middle and the last sample are made again and compared byte by byte.
    """
    index = fitting_index(task.path) if task.path.exists() else None
    if index is None:
        return None
    if index.n_samples != len(task):
        raise _others(task.path, f"{index.n_samples} samples instead of {len(task)}")
    found = result(index)
    if hashes is not None and not np.array_equal(hashes, found.hashes):
        raise _others(task.path, f"the key {index.key(int((hashes != found.hashes).argmax()))!r}")
    numbers = sorted({0, len(task) // 2, len(task) - 1})
    if not same:
        samples = load(task.samples)
        for number in numbers:
            if not _is_same(index, number, task, samples):
                raise _others(task.path, f"the sample {index.key(number)!r}")
    try:  # whether these are read as they were written
        ShardReader(index, map_shard(index), None, verify=True, max_bytes=2**63 - 1).read_many(numbers)
    except ShardError:
        return None
    return found


def _is_same(index: ShardIndex, number: int, task: ShardTask, samples: MapStyle) -> bool:
    again = ShardBuilder(str(task.path))
    again.add(*task.sample(samples, task.start + number))
    again.take()
    [layout] = again.samples.layouts
    start, stop = index.span(number)
    return (
        again.samples.keys == [index.key(number)]
        and tuple(member.lower() for member in layout) == index.layout(number)
        and again.samples.sizes == index.sizes[start:stop].tolist()
        and again.checksums == index.checksums[start:stop].tolist()
    )


def _others(path: Path, what: str) -> FileExistsError:
    message = f"{path} is whole, but holds other samples than those to be written: it has {what}"
    return FileExistsError(f"{message}. Remove it, choose another directory, or {CURE}")
