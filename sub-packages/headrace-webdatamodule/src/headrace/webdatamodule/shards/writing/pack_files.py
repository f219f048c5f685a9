"""Files of a directory, one or more per sample, to shards: copied, never unpickled."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.webdatamodule.shards.errors import LostColumnsError, ManifestError, ShardError
from headrace.webdatamodule.shards.format.files import directory_lock
from headrace.webdatamodule.shards.index.manifest import Manifest, added, refuse_foreign
from headrace.webdatamodule.shards.writing.plan import (
    Plan,
    refuse_leftovers,
    shard_bounds,
    shard_paths,
)
from headrace.webdatamodule.shards.writing.resume import noted_fingerprint
from headrace.webdatamodule.shards.writing.sample_sources import Files, FilesOfSample, stamps_fingerprint
from headrace.webdatamodule.shards.writing.shard_builder import check_key, key_hashes
from headrace.webdatamodule.shards.writing.shard_task import KeyedSample
from headrace.webdatamodule.shards.writing.write import NEW_COLUMNS, save_set, write_set

FileSample = tuple[str, FilesOfSample]
Convert = Callable[[str, dict[str, bytes]], Mapping[str, Any]]

_MOST_BYTES = 256 * 2**20  # of a shard, when the number of shards is left to us
# They wait for the disk more than they work: 8 threads packed files of 200 kB in half the time of one, those of 1 kB
# in the page cache in 4/3 of it. No processes: scripts that train are seldom written so that these can start.
_THREADS = 8


@dataclass(frozen=True)
class _Converted:
    """Samples that a function makes of files."""

    files: Files
    convert: Convert

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, position: int) -> KeyedSample:
        key, data = self.files[position]
        sample = dict(self.convert(key, dict(data)))
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
    """Pack `{source}/{name}.{suffix}` into shards, as `write_shards` does, unless they are there and not stale.

    The fingerprint of the set is that of the files' sizes and times. What differs from `write_shards`: shards of other
    samples are refused even so.
    """
    samples = _find_files(source, names, suffixes)
    files = Files(samples)
    if convert is None:
        files.check()
    stamps = list(files.stamps())
    count = min(len(samples), n_shards or max(16, -(-sum(nbytes for nbytes, _ in stamps) // _MOST_BYTES)))
    bounds = shard_bounds(len(samples), count)
    paths = shard_paths(directory, prefix, count)
    plan = Plan.of(prefix, bounds, "" if convert else stamps_fingerprint(stamps))
    directory.mkdir(parents=True, exist_ok=True)
    with directory_lock(directory), ThreadPoolExecutor(_THREADS) as threads:
        refuse_foreign(directory)
        refuse_leftovers(directory, prefix, paths)
        if convert is None:
            for path, start, stop in zip(paths, bounds, bounds[1:], strict=False):
                _refuse_others(path, samples[start:stop], prefix)
        if convert or noted_fingerprint(directory, prefix) != plan.fingerprint:
            _refuse_lost_columns(directory)
        written = write_set(
            files if convert is None else _Converted(files, convert),
            directory,
            plan,
            bounds,
            hashes=None if convert else key_hashes([key for key, _ in samples]),
            replaces=True,
            anew=convert is not None,
            executor=threads,
        )
        save_set(directory, written, {})
    return paths


def list_members(path: Path) -> list[tuple[str, int]]:
    """Names and sizes in bytes of a tar file's members, in order."""
    with tarfile.open(path, mode="r:", encoding="utf-8") as tar:
        return [(header.name, header.size) for header in tar]


def _find_files(source: Path, names: Sequence[str], suffixes: Sequence[str]) -> list[FileSample]:
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
    samples = [(k, {s: str(source / f"{name}.{s}") for s in suffixes}) for k, name in keys.items()]
    missing = [path for _, files in samples for path in files.values() if not Path(path).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{len(missing)} of {len(samples) * len(suffixes)} files are missing, first {missing[0]}:"
            " correct the directory, the names or the suffixes. Nothing was written"
        )
    return samples


def _refuse_others(path: Path, samples: Sequence[FileSample], prefix: str) -> None:
    """Refuse to touch a shard that holds other samples than those planned."""
    if not path.exists():
        return
    found = None
    with suppress(tarfile.TarError, ShardError):
        found = [name for name, _ in list_members(path)]
    if found != [f"{key}.{suffix}" for key, files in samples for suffix in files]:
        raise FileExistsError(
            f"{path} holds other samples than those to be written to it. If it is no longer needed, remove"
            f" {prefix}-*.tar there; otherwise choose another directory or prefix"
        )


def _refuse_lost_columns(directory: Path) -> None:
    """Refuse to write shards anew that columns belong to."""
    lost = list[str]()
    with suppress(ManifestError):
        lost = added(Manifest.load(directory))
    if lost:
        message = f"the shards of {str(directory)!r} would be others than when these columns were made"
        error = LostColumnsError(f"{message}: {', '.join(lost)}. {NEW_COLUMNS}")
        error.columns = tuple(lost)
        raise error
