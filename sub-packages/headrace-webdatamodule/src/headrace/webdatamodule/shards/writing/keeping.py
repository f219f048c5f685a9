"""Which shards of an earlier run stay."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headrace.webdatamodule.shards.errors import ShardError
from headrace.webdatamodule.shards.index.build import fitting_index
from headrace.webdatamodule.shards.index.shard_index import ShardIndex
from headrace.webdatamodule.shards.reading.mapped import Mapped
from headrace.webdatamodule.shards.reading.shard_reader import OpenShard
from headrace.webdatamodule.shards.writing.recording import Recording
from headrace.webdatamodule.shards.writing.task import MapStyle, ShardTask, Written, opened, result


def kept(task: ShardTask, hashes: npt.NDArray[np.uint64] | None = None) -> Written | None:
    """What an earlier run of the same plan made of a shard, when that is whole and holds the same samples.

    Its index has to fit it. All keys are compared where they are known, and the first, the middle and the last
    sample are made again and compared byte by byte, as is what the shard holds of them.

    Args:
        task: What would write the shard.
        hashes: Of the keys of its samples, shape [n_samples]; None when they are not known.

    Returns:
        None when the shard is to be written.

    Raises:
        FileExistsError: The shard is whole, but holds other samples.
        ShardError: A sample cannot be had, or could not be stored.
    """
    index = fitting_index(task.path) if task.path.exists() else None
    if index is None:
        return None
    found = result(index)
    if index.n_samples != len(task):
        raise _other(task.path, f"{index.n_samples} samples instead of {len(task)}")
    if hashes is not None and not np.array_equal(hashes, found.hashes):
        raise _other(task.path, f"the key {index.key(int((hashes != found.hashes).argmax()))!r}")
    samples = opened(task.samples)
    numbers = sorted({0, len(task) // 2, len(task) - 1})
    for number in numbers:
        if not _same(index, number, task, samples):
            raise _other(task.path, f"the sample {index.key(number)!r}")
    return found if _whole(index, numbers) else None


def _whole(index: ShardIndex, numbers: list[int]) -> bool:
    """Whether some samples are read as they were written."""
    try:
        OpenShard(index, Mapped(index), None, verify=True, max_bytes=2**63 - 1).some(numbers, [])
    except ShardError:
        return False
    return True


def repeated(written: Sequence[Written], directory: Path) -> tuple[str, str, str] | None:
    """A key that occurs twice in a set.

    Args:
        written: The shards.
        directory: Where they lie.

    Returns:
        The key and the names of the two shards; None when there is no such key.
    """
    hashes = np.concatenate([one.hashes for one in written])
    order = np.argsort(hashes, kind="stable")
    twins = np.flatnonzero(hashes[order][1:] == hashes[order][:-1])
    ends = np.cumsum([one.hashes.size for one in written])
    for twin in twins.tolist():
        (key, name), (other, again) = (_key(int(order[at]), ends, written, directory) for at in (twin, twin + 1))
        if key == other:
            return key, name, again
    return None


def _key(sample: int, ends: npt.NDArray[np.int64], written: Sequence[Written], directory: Path) -> tuple[str, str]:
    shard = int(np.searchsorted(ends, sample, "right"))
    entry = written[shard].entry
    index = ShardIndex.open(directory / entry.name)
    return index.key(sample - int(ends[shard]) + entry.samples), entry.name


def _same(index: ShardIndex, number: int, task: ShardTask, samples: MapStyle) -> bool:
    again = Recording(str(task.path))
    again.add(*task.sample(samples, task.start + number))
    [layout] = again.samples.layouts
    start, stop = index.span(number)
    return (
        again.samples.keys == [index.key(number)]
        and tuple(suffix.lower() for suffix in layout) == index.layout(number)
        and again.samples.sizes == index.sizes[start:stop].tolist()
        and again.checksums == index.checksums[start:stop].tolist()
    )


def _other(path: Path, what: str) -> FileExistsError:
    message = f"{path} is whole, but holds other samples than those to be written: it has {what}"
    return FileExistsError(f"{message}. If it is no longer needed, remove it; otherwise choose another directory")
