"""A source of samples to indexed shards: one task a shard, all published at the end."""

from __future__ import annotations

import filecmp
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, as_completed
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headrace.webdatamodule.commands.sources.source import Sample, Source
from headrace.webdatamodule.shards.errors import ShardError
from headrace.webdatamodule.shards.indexing import index_shards
from headrace.webdatamodule.shards.manifest import Manifest
from headrace.webdatamodule.shards.tar import check_key, publish, stage_tar
from headrace.webdatamodule.shards.writer import progress, shard_paths


def write_source(
    source: Source, directory: Path, bounds: Sequence[int], *, prefix: str, executor: Executor | None = None
) -> Manifest:
    """Write samples, in order, to shards that get their names once all of them are on the disk.

    Shards of the same content that lie there stay; other tar files are refused, since the manifest would list them.

    Args:
        source: The samples; can be pickled when the executor is one of processes.
        directory: Where to write; made if need be.
        bounds: Where each shard begins, and the end.
        prefix: Begin of the shards' names.
        executor: Where to write shards in parallel; here when None.

    Returns:
        The manifest.

    Raises:
        FileExistsError: The directory holds other tar files.
        ShardError: A key occurs twice or cannot be stored; nothing was published.
        ValueError: The prefix is not allowed.
    """
    paths = shard_paths(directory, prefix, len(bounds) - 1)
    check_keys(source.keys())
    _refuse({path for path in directory.glob("*.tar") if path not in set(paths)}, directory)
    directory.mkdir(parents=True, exist_ok=True)
    parts = {path: (start, stop) for path, (start, stop) in zip(paths, pairwise(bounds), strict=True)}
    staged: dict[Path, Path] = {}
    try:
        if executor is None:
            _stage_here(source, parts, staged)
        else:
            _stage_there(source, parts, staged, executor)
        _refuse({path for path, new in staged.items() if path.exists() and not _same(path, new)}, directory)
        publish({path: new for path, new in staged.items() if not path.exists()})
    finally:
        for temporary in staged.values():
            temporary.unlink(missing_ok=True)
    return index_shards(directory)


def check_keys(keys: Iterable[str]) -> None:
    """Refuse keys that occur twice or cannot be stored, before anything is written.

    Args:
        keys: Of all samples.

    Raises:
        ShardError: Naming the first one.
    """
    seen: set[str] = set()
    for key in keys:
        check_key(key)
        if key in seen:
            raise ShardError(f"the sample key {key!r} occurs twice: make keys unique", sample=key)
        seen.add(key)


def bounds_by_count(n_samples: int, most: int) -> list[int]:
    """Where each shard begins, and the end, when all but the last one hold equally many samples.

    Args:
        n_samples: Number of samples.
        most: Samples in a shard.

    >>> bounds_by_count(5, 2)
    [0, 2, 4, 5]
    """
    return [*range(0, n_samples, most), n_samples]


def bounds_by_bytes(sizes: npt.NDArray[np.int64], most: int) -> list[int]:
    """Where each shard begins, and the end, when each holds as many samples as fit.

    Args:
        sizes: Bytes of each sample, shape [n_samples].
        most: Bytes of a shard; a sample that is larger gets one of its own.

    >>> bounds_by_bytes(np.array([3, 3, 9, 1, 1]), 6)
    [0, 2, 3, 5]
    """
    ends = np.cumsum(sizes)
    bounds = [0]
    while bounds[-1] < sizes.size:
        start = bounds[-1]
        before = int(ends[start - 1]) if start else 0
        bounds.append(max(start + 1, int(np.searchsorted(ends, before + most, "right"))))
    return bounds


Parts = dict[Path, tuple[int, int]]


def _stage_here(source: Source, parts: Parts, staged: dict[Path, Path]) -> None:
    with progress(len(source), next(iter(parts)).parent) as bar:

        def shown(samples: Iterable[Sample]) -> Iterator[Sample]:
            for sample in samples:
                yield sample
                bar.update()

        for path, (start, stop) in parts.items():
            staged[path] = stage_tar(path, shown(source.part(start, stop)))


def _stage_there(source: Source, parts: Parts, staged: dict[Path, Path], executor: Executor) -> None:
    futures: dict[Future[Path], Path] = {}
    try:
        for path, (start, stop) in parts.items():
            futures[executor.submit(stage_tar, path, source.part(start, stop))] = path
        with progress(len(source), next(iter(parts)).parent) as bar:
            for future in as_completed(futures):
                future.result()
                start, stop = parts[futures[future]]
                bar.update(stop - start)
    finally:
        # What has begun is waited for, so that its temporary file can be removed.
        for future in futures:
            future.cancel()
        done = {path: future for future, path in futures.items() if not future.cancelled()}
        staged.update({path: future.result() for path, future in done.items() if future.exception() is None})


def _same(path: Path, other: Path) -> bool:
    return filecmp.cmp(path, other, shallow=False)


def _refuse(others: set[Path], directory: Path) -> None:
    if others:
        message = f"{directory} holds {len(others)} other tar files, such as {min(others).name}"
        raise FileExistsError(f"{message}: remove them, or choose another directory")
