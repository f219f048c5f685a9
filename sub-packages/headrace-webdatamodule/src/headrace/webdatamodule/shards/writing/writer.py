"""Samples to a set of shards."""

import glob
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Never

from tqdm import tqdm

from headrace.webdatamodule.shards.errors import ShardError
from headrace.webdatamodule.shards.format.files import expanded, publish
from headrace.webdatamodule.shards.index.manifest import is_plain_name
from headrace.webdatamodule.shards.writing.tar import Sample, stage_tar


def write_tars(
    samples: Sequence[tuple[str, Mapping[str, bytes]]],
    directory: str | Path,
    *,
    n_shards: int,
    prefix: str = "wdshards",
) -> list[Path]:
    """Write samples, in order, to `{directory}/{prefix}-000000.tar` and so on.

    The shards hold equally many samples, give or take one. They get their names once all of them are
    on the disk, whole; their bytes depend on the samples only. Shards of the same names are replaced.

    Args:
        samples: Pairs of a key and the sample's members, {member key: bytes}. Keys are unique and hold
            no dot. Anything with `len()` and integer indexing will do; each sample is asked for once.
        directory: Where to write; made if need be.
        n_shards: Number of shards, 1 to `len(samples)`.
        prefix: Begin of the file names.

    Returns:
        The paths of the shards, in order.

    Raises:
        ValueError: `n_shards` or `prefix` is not allowed.
        FileExistsError: The directory holds further shards of this prefix, which readers would take for
            a part of the new set.
        ShardError: A key that occurs twice or cannot be stored, or a member that is no bytes.

    >>> import tempfile
    >>> samples = [(f"sample{i}", {"txt": b"%d" % i}) for i in range(5)]
    >>> paths = write_tars(samples, tempfile.mkdtemp(), n_shards=2)
    >>> [path.name for path in paths]
    ['wdshards-000000.tar', 'wdshards-000001.tar']
    """
    bounds = shard_bounds(len(samples), n_shards)
    target = expanded(directory)
    paths = shard_paths(target, prefix, n_shards)
    target.mkdir(parents=True, exist_ok=True)
    refuse_leftovers(target, prefix, paths)
    seen: dict[str, Path] = {}
    staged: dict[Path, Path] = {}
    try:
        with progress(len(samples), target) as bar:
            for path, start, stop in zip(paths, bounds, bounds[1:], strict=False):
                staged[path] = stage_tar(path, _take(samples, start, stop, path, seen, bar))
        publish(staged)
    finally:
        for temporary in staged.values():
            temporary.unlink(missing_ok=True)
    return paths


def shard_bounds(n_samples: int, n_shards: int) -> list[int]:
    """Where each shard begins, and the end: shards of equal size, give or take one sample.

    Args:
        n_samples: Number of samples.
        n_shards: Number of shards, 1 to `n_samples`.

    Returns:
        `n_shards + 1` increasing positions from 0 to `n_samples`.

    Raises:
        ValueError: A shard would be empty.

    >>> shard_bounds(10, 4)
    [0, 2, 5, 7, 10]
    """
    if not 1 <= n_shards <= n_samples:
        message = f"n_shards must be 1 to the number of samples, {n_samples}, got {n_shards}:"
        raise ValueError(f"{message} no shard may be empty")
    return [n_samples * shard // n_shards for shard in range(n_shards + 1)]


def shard_paths(directory: Path, prefix: str, n_shards: int) -> list[Path]:
    """The names of a set of shards.

    Args:
        directory: Where they lie.
        prefix: Begin of the file names.
        n_shards: How many.

    Returns:
        `{directory}/{prefix}-{number, six digits}.tar`.

    Raises:
        ValueError: The prefix is empty, hidden, or leads elsewhere.
    """
    if not is_plain_name(prefix) or prefix.startswith("."):
        raise ValueError(f"prefix must be the begin of a plain file name, got {prefix!r}")
    return [directory / f"{prefix}-{shard:06d}.tar" for shard in range(n_shards)]


def find_shards(directory: Path, prefix: str) -> list[Path]:
    """The shards of a prefix that lie in a directory, sorted by name.

    Args:
        directory: Where to look.
        prefix: Begin of the file names; taken literally.

    Returns:
        The paths of `{prefix}-*.tar`.
    """
    return sorted(directory.glob(f"{glob.escape(prefix)}-*.tar"))


def refuse_leftovers(directory: Path, prefix: str, paths: Sequence[Path]) -> None:
    """Refuse to write beside shards that are no part of the set.

    Args:
        directory: Where the set is to lie.
        prefix: Begin of the file names.
        paths: The set.

    Raises:
        FileExistsError: Naming what lies there.
    """
    strangers = sorted(set(find_shards(directory, prefix)) - set(paths))
    if strangers:
        raise FileExistsError(
            f"{directory} holds {len(strangers)} shards of prefix {prefix!r} beside the {len(paths)} to be"
            f" written (first: {strangers[0].name}): readers would take them for a part of the new set."
            " Remove them, or choose another directory or prefix"
        )


def progress(n_samples: int, directory: Path) -> "tqdm[Never]":
    """A bar over samples on the terminal; silent where the output is not a terminal."""
    bar: tqdm[Never] = tqdm(total=n_samples, desc=f"writing {directory.name}", unit="sample", disable=None)
    return bar


def _take(
    samples: Sequence[Sample], start: int, stop: int, path: Path, seen: dict[str, Path], bar: "tqdm[Never]"
) -> Iterator[Sample]:
    for position in range(start, stop):
        try:
            key, sample = samples[position]
        except Exception as error:
            message = f"sample number {position} cannot be had: {type(error).__name__}: {error}"
            raise ShardError(message, shard=str(path), sample=f"number {position}") from error
        yield key, sample
        if key in seen:  # a text: who took the sample has seen to that
            message = f"the sample key {key!r} occurs twice, first in {seen[key].name}: make keys unique"
            raise ShardError(message, shard=str(path), sample=key)
        seen[key] = path
        bar.update()
