"""Files of a directory, one or more per sample, to shards: copied, never unpickled."""

from __future__ import annotations

import errno
import secrets
import tarfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.webdatamodule.shards.errors import ShardError
from headrace.webdatamodule.shards.format.files import directory_lock
from headrace.webdatamodule.shards.index.build import index_shard
from headrace.webdatamodule.shards.writing.executor import run
from headrace.webdatamodule.shards.writing.plan import refuse_leftovers, shard_bounds, shard_paths, shards_of_prefix
from headrace.webdatamodule.shards.writing.shard_task import KeyedSample, ShardTask, check_key, remove_parts
from headrace.webdatamodule.shards.writing.write import save_only_manifest

Files = dict[str, Path]
Members = list[tuple[str, int]]
Convert = Callable[[str, dict[str, bytes]], Mapping[str, Any]]

_MOST_BYTES = 256 * 2**20  # of a shard, when the number of shards is left to us
_THREADS = 8  # they wait for the disk more than they work
_TICK = 0.02  # seconds that the clock of a file system may be behind


@dataclass(frozen=True)
class FileSamples:
    """Samples whose files are read when they are asked for."""

    samples: Sequence[tuple[str, Files]]
    convert: Convert | None = None

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, position: int) -> KeyedSample:
        key, files = self.samples[position]
        data = {suffix: path.read_bytes() for suffix, path in files.items()}
        if self.convert is None:
            return key, data
        sample = dict(self.convert(key, data))
        return sample.pop("__key__", key), sample


def pack_files(
    source: Path,
    names: Sequence[str],
    suffixes: Sequence[str],
    directory: Path,
    *,
    n_shards: int | None,
    prefix: str,
    convert: Convert | None = None,
) -> list[Path]:
    """Pack `{source}/{name}.{suffix}` into shards, and keep shards that are up to date.

    The bytes go into the shards as they are: nothing is unpickled while writing. A shard is kept when
    it holds the planned members, all of their sizes, and no file of it was saved since the shard was begun;
    after a run that was killed, the next one writes the rest. Each shard gets its name when it is on the disk,
    whole, and an index beside it, also one that was kept without. The manifest comes last; see
    `save_only_manifest` for directories that hold other tar files too.
    """
    samples = _find_files(source, names, suffixes)
    sizes = [sum(path.stat().st_size for path in files.values()) for _, files in samples]
    count = min(len(samples), n_shards or max(16, -(-sum(sizes) // _MOST_BYTES)))
    bounds = shard_bounds(len(samples), count)
    paths = shard_paths(directory, prefix, count)
    plan = {path: samples[a:b] for path, a, b in zip(paths, bounds, bounds[1:], strict=False)}
    directory.mkdir(parents=True, exist_ok=True)
    with directory_lock(directory):
        refuse_leftovers(directory, prefix, paths)
        there = {} if convert else {path: _members(path) for path in shards_of_prefix(directory, prefix)}
        for path, members in there.items():
            _refuse_others(path, members, plan[path], prefix)
        remove_parts(directory, prefix)
        token, begins = secrets.token_hex(4), dict(zip(paths, bounds, strict=False))
        old = [path for path, part in plan.items() if not _is_current(path, there.get(path), part)]
        tasks = [
            ShardTask(path, FileSamples(plan[path], convert), 0, len(plan[path]), begins[path], token) for path in old
        ]
        _write(tasks, prefix)
        with _unless_read_only() if not old else nullcontext():
            save_only_manifest(directory, [index_shard(path) for path in paths])
    return paths


def list_members(path: Path) -> Members:
    """Names and sizes in bytes of a tar file's members, in order, read from the headers alone."""
    with tarfile.open(path, mode="r:", encoding="utf-8") as tar:
        return [(header.name, header.size) for header in tar]


def _find_files(source: Path, names: Sequence[str], suffixes: Sequence[str]) -> list[tuple[str, Files]]:
    """Pairs of a sample's key and {suffix: path}, in the order of the names; all files are there."""
    if not names:
        raise ValueError("there are no names of samples to pack: name at least one")
    keys: dict[str, str] = {}
    for name in names:
        key = name.replace(".", "-")
        check_key(key)
        if key in keys:
            message = f"the names {keys[key]!r} and {name!r} get the same sample key {key!r}"
            raise ShardError(f"{message}: rename one, or name it once", sample=key)
        keys[key] = name
    samples = [(k, {s: source / f"{name}.{s}" for s in suffixes}) for k, name in keys.items()]
    missing = [path for _, files in samples for path in files.values() if not path.is_file()]
    if missing:
        raise FileNotFoundError(
            f"{len(missing)} of {len(samples) * len(suffixes)} files are missing, first {missing[0]}:"
            " correct the directory, the names or the suffixes. Nothing was written"
        )
    return samples


def _refuse_others(path: Path, members: Members | None, samples: Sequence[tuple[str, Files]], prefix: str) -> None:
    """Refuse to touch a shard that holds something else than planned."""
    if members is None or [name for name, _ in members] != [name for name, _ in _planned(samples)]:
        raise FileExistsError(
            f"{path} holds other samples than those to be written to it. If it is no longer needed, remove"
            f" {prefix}-*.tar there; otherwise choose another directory or prefix"
        )


def _is_current(path: Path, members: Members | None, samples: Sequence[tuple[str, Files]]) -> bool:
    """Whether a shard of these members holds the samples' files as they are now, by names, sizes and times."""
    if members != [(name, file.stat().st_size) for name, file in _planned(samples)]:
        return False
    begun = path.stat().st_mtime_ns  # when it was begun: a file that changed while it was packed is newer
    return all(file.stat().st_mtime_ns <= begun for _, file in _planned(samples))


def _write(tasks: Sequence[ShardTask], prefix: str) -> None:
    """Write shards and their indexes, in threads where the files have to be waited for."""
    if tasks:
        time.sleep(_TICK)  # so that files that were saved until now are older than what is written
    begin, worked = time.monotonic(), time.thread_time()
    run(tasks[:1], None, 1, prefix)
    waited = time.thread_time() - worked < (time.monotonic() - begin) / 2
    # No processes: scripts that train are seldom written so that these can start.
    with ThreadPoolExecutor(_THREADS) if waited else nullcontext() as threads:
        run(tasks[1:], threads, 1, prefix)


@contextmanager
def _unless_read_only() -> Iterator[None]:
    # Shards that are there can be read without an index, as they were before there was one.
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        message = f"the shards are up to date, but without index or manifest, which cannot be written: {error}"
        warnings.warn(message, UserWarning, stacklevel=5)


def _planned(samples: Sequence[tuple[str, Files]]) -> list[tuple[str, Path]]:
    return [(f"{key}.{suffix}", path) for key, files in samples for suffix, path in files.items()]


def _members(path: Path) -> Members | None:
    try:
        return list_members(path)
    except tarfile.TarError:
        return None
