"""Files of a directory, one or more per sample, to shards: copied, never unpickled."""

from __future__ import annotations

import errno
import secrets
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tarfile import TarError

from headrace.webdatamodule.shards.errors import ShardError
from headrace.webdatamodule.shards.format.files import directory_lock
from headrace.webdatamodule.shards.index.build import index_shard
from headrace.webdatamodule.shards.writing.executor import run
from headrace.webdatamodule.shards.writing.plan import find_shards, refuse_leftovers, shard_bounds, shard_paths
from headrace.webdatamodule.shards.writing.shard_task import Pair, ShardTask, check_key, members, remove_abandoned
from headrace.webdatamodule.shards.writing.write import only_manifest

Files = dict[str, Path]

Plan = dict[Path, list[tuple[str, Files]]]

_MOST_BYTES = 256 * 2**20  # of a shard, when the number of shards is left to us

_THREADS = 8  # they wait for the disk more than they work

_TICK = 0.02  # seconds that the clock of a file system may be behind


@dataclass(frozen=True)
class FileSamples:
    """Samples whose files are read when they are asked for.

    Args:
        samples: Pairs of a key and {suffix: path}.
    """

    samples: Sequence[tuple[str, Files]]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, position: int) -> Pair:
        key, files = self.samples[position]
        return key, {suffix: path.read_bytes() for suffix, path in files.items()}


def pack_files(
    source: Path,
    names: Sequence[str],
    suffixes: Sequence[str],
    directory: Path,
    *,
    n_shards: int | None,
    prefix: str,
) -> list[Path]:
    """Pack `{source}/{name}.{suffix}` into shards, and keep shards that are up to date.

    The bytes go into the shards as they are: nothing is unpickled while writing. A shard is kept when
    it holds the planned members, all of their sizes, and no file of it was saved since the shard was begun;
    after a run that was killed, the next one writes the rest. Each shard gets its name when it is on the disk,
    whole, and an index beside it, also one that was kept without. The manifest comes last; see
    `only_manifest` for directories that hold other tar files too.

    Args:
        source: Directory of the files.
        names: One name per sample; its dots become dashes in the sample's key.
        suffixes: Suffixes of the files, also the member keys in the shards.
        directory: Where to write; made if need be.
        n_shards: Number of shards; fewer when there are fewer samples. None: 16, or as many as keep
            shards below 256 MiB.
        prefix: Begin of the shards' names.

    Returns:
        The paths of all shards, in order.

    Raises:
        FileNotFoundError: Files are missing; raised before anything is written.
        FileExistsError: Shards of the same prefix that hold other samples lie there.
        ShardError: Two names get the same key, a key cannot be stored, or a file cannot be read any more.
        OSError: The disk is full or the like; it names the shard.
        ManifestError: Shards were renewed to which columns of a manifest belong.
    """
    samples = find_files(source, names, suffixes)
    sizes = [sum(path.stat().st_size for path in files.values()) for _, files in samples]
    count = min(len(samples), n_shards or max(16, -(-sum(sizes) // _MOST_BYTES)))
    bounds = shard_bounds(len(samples), count)
    paths = shard_paths(directory, prefix, count)
    plan = {path: samples[a:b] for path, a, b in zip(paths, bounds, bounds[1:], strict=False)}
    directory.mkdir(parents=True, exist_ok=True)
    with directory_lock(directory):
        refuse_strangers(directory, prefix, plan)
        remove_abandoned(directory, prefix)
        old = {path: part for path, part in plan.items() if not up_to_date(path, part)}
        write_plan(old, prefix)
        with _readable_only() if not old else nullcontext():
            only_manifest(directory, [index_shard(path) for path in paths])
    return paths


def find_files(source: Path, names: Sequence[str], suffixes: Sequence[str]) -> list[tuple[str, Files]]:
    """The files of each sample.

    Args:
        source: Directory of the files.
        names: One name per sample.
        suffixes: One file per suffix.

    Returns:
        Pairs of a sample's key and {suffix: path}, in the order of `names`.

    Raises:
        ValueError: No names.
        FileNotFoundError: Files are missing.
        ShardError: Two names get the same key, or a key cannot be stored.
    """
    if not names:
        raise ValueError("names_subset has a split without names: name its samples, or leave the split out")
    keys: dict[str, str] = {}
    for name in names:
        key = name.replace(".", "-")
        check_key(key)
        if key in keys:
            cure = "rename one, or name it once"
            raise ShardError(
                f"the names {keys[key]!r} and {name!r} get the same sample key {key!r}: {cure}", sample=key
            )
        keys[key] = name
    samples = [(k, {s: source / f"{name}.{s}" for s in suffixes}) for k, name in keys.items()]
    missing = [path for _, files in samples for path in files.values() if not path.is_file()]
    if missing:
        raise FileNotFoundError(
            f"{len(missing)} of {len(samples) * len(suffixes)} files are missing, first {missing[0]}:"
            " correct dir_pickles, names_subset or suffix_keys_wds. Nothing was written"
        )
    return samples


def refuse_strangers(directory: Path, prefix: str, plan: Plan) -> None:
    """Refuse to touch or to lie beside shards that hold something else than planned.

    Args:
        directory: Where the shards are to lie.
        prefix: Begin of their names.
        plan: What they are to hold.

    Raises:
        FileExistsError: Naming the first such shard.
    """
    refuse_leftovers(directory, prefix, list(plan))
    for path in find_shards(directory, prefix):
        if (held := _held(path)) is None or [name for name, _ in held] != [name for name, _ in _wanted(plan[path])]:
            raise FileExistsError(
                f"{path} holds other samples than those to be written to it. If it is no longer needed, remove"
                f" {prefix}-*.tar there; otherwise choose another directory or prefix_tars_wds"
            )


def up_to_date(path: Path, samples: Sequence[tuple[str, Files]]) -> bool:
    """Whether a shard holds the samples' files as they are now, by names, sizes and times.

    A shard has the time when it was begun, so that a file that changed while it was packed is newer.

    Args:
        path: The shard; may be missing.
        samples: What it is to hold.
    """
    if not path.is_file() or _held(path) != [(n, file.stat().st_size) for n, file in _wanted(samples)]:
        return False
    begun = path.stat().st_mtime_ns
    return all(file.stat().st_mtime_ns <= begun for _, file in _wanted(samples))


def write_plan(plan: Plan, prefix: str) -> None:
    """Write shards and their indexes, in threads where the files have to be waited for.

    Args:
        plan: {shard: its samples}.
        prefix: Begin of the shards' names.
    """
    if plan:
        time.sleep(_TICK)  # so that files that were saved until now are older than what is written
    token, first, tasks = secrets.token_hex(4), 0, []
    for path, samples in plan.items():
        tasks.append(ShardTask(path, FileSamples(samples), 0, len(samples), first, token))
        first += len(samples)
    begin, worked = time.monotonic(), time.thread_time()
    run(tasks[:1], None, 1, prefix)
    waited = time.thread_time() - worked < (time.monotonic() - begin) / 2
    if not waited:
        run(tasks[1:], None, 1, prefix)
        return
    # No processes: scripts that train are seldom written so that these can start.
    with ThreadPoolExecutor(_THREADS) as threads:
        run(tasks[1:], threads, None, prefix)


@contextmanager
def _readable_only() -> Iterator[None]:
    # Shards that are there can be read without an index, as they were before there was one.
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        message = f"the shards are up to date, but without index or manifest, which cannot be written: {error}"
        warnings.warn(message, UserWarning, stacklevel=5)


def _wanted(samples: Sequence[tuple[str, Files]]) -> list[tuple[str, Path]]:
    return [(f"{key}.{suffix}", path) for key, files in samples for suffix, path in files.items()]


def _held(path: Path) -> list[tuple[str, int]] | None:
    try:
        return list(members(path))
    except TarError:
        return None
