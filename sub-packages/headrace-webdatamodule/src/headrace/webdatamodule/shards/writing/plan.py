"""Which samples go to which shard, decided before the first one is written, and noted beside the shards."""

from __future__ import annotations

import glob
import json
import operator
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Never

import numpy as np
import numpy.typing as npt
import xxhash
from tqdm import tqdm

from headrace.webdatamodule.shards.errors import ManifestError, ShardError
from headrace.webdatamodule.shards.format.files import read_plain
from headrace.webdatamodule.shards.format.tar import BLOCK
from headrace.webdatamodule.shards.format.ustar import RECORD
from headrace.webdatamodule.shards.index.build import fitting_index
from headrace.webdatamodule.shards.index.manifest import NOTE, is_plain_name
from headrace.webdatamodule.shards.index.shard_index import SUFFIX, ShardIndex
from headrace.webdatamodule.shards.reading.shard_reader import ShardReader, map_shard
from headrace.webdatamodule.shards.writing.shard_task import (
    MapStyle,
    Recording,
    ShardTask,
    Written,
    member_bytes,
    opened,
    result,
    write_locked,
)


def stored_bytes(nbytes: int) -> int:
    """Bytes that a member takes in a tar file, its header and padding included.

    >>> stored_bytes(0), stored_bytes(1), stored_bytes(512)
    (512, 1024, 1024)
    """
    return nbytes + -nbytes % BLOCK + BLOCK


def measure(samples: MapStyle) -> tuple[npt.NDArray[np.int64], list[str]]:
    """Ask for each sample once, with a progress bar.

    Args:
        samples: All of them.

    Returns:
        Bytes of each in a tar file, shape [n_samples], and the keys.

    Raises:
        ShardError: A sample cannot be had, or its members are no bytes.
    """
    keys: list[str] = []
    sizes = np.empty(len(samples), np.int64)
    bar: tqdm[Never]
    with tqdm(total=len(samples), desc="measuring", unit="sample", disable=None) as bar:
        for number in range(len(samples)):
            try:
                key, sample = samples[number]
                sizes[number] = sum(stored_bytes(_length(key, one, data)) for one, data in sample.items())
            except Exception as error:
                message = f"sample number {number} cannot be measured: {type(error).__name__}: {error}"
                raise ShardError(message, sample=f"number {number}") from error
            keys.append(key)
            bar.update()
    return sizes, keys


def _length(key: str, suffix: str, data: object) -> int:
    # The length of a memory view, or of an array, counts numbers of several bytes each.
    return len(data if type(data) is bytes else member_bytes(data, sample=key, member=f"{key}.{suffix}"))


def given_sizes(sizes: Any, n_samples: int) -> npt.NDArray[np.int64]:
    """Check the sizes that a caller gives.

    Args:
        sizes: Bytes of each sample.
        n_samples: How many there have to be.

    Raises:
        ValueError: They are no whole numbers of 0 or more, shape [n_samples].
    """
    array = np.asarray(sizes)
    if array.shape != (n_samples,) or array.dtype.kind not in "iu" or (array < 0).any():
        allowed = f"whole numbers of bytes, 0 or more, shape [{n_samples}]"
        raise ValueError(f"sizes must be {allowed}, got {array.dtype} of shape {list(array.shape)}")
    return array.astype(np.int64)


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


VERSION = 1

_MOST_NOTE = 1 << 20


@dataclass(frozen=True)
class Plan:
    """How a set of samples becomes shards.

    Args:
        prefix: Begin of the shards' names.
        samples: Number of samples.
        shards: Number of shards.
        bounds: 16 hexadecimal digits that stand for the bounds of all shards.
        fingerprint: What the caller says of the samples' version.
    """

    prefix: str
    samples: int
    shards: int
    bounds: str
    fingerprint: str

    @classmethod
    def of(cls, prefix: str, bounds: Sequence[int], fingerprint: str) -> Plan:
        """The plan of some bounds.

        Args:
            prefix: Begin of the shards' names.
            bounds: Where each shard begins, and the end.
            fingerprint: What the caller says of the samples' version.
        """
        digest = xxhash.xxh3_64_hexdigest(np.asarray(bounds, "<i8").tobytes())
        return cls(prefix, bounds[-1], len(bounds) - 1, digest, fingerprint)

    def to_json(self) -> str:
        """The text of the note."""
        return json.dumps({"format": "headrace-plan", "version": VERSION, **asdict(self)}, indent=1) + "\n"

    def prepare(self, directory: Path) -> None:
        """Note the plan beside the shards to be, and refuse to write beside anything of another plan.

        Args:
            directory: Where the shards are to lie.

        Raises:
            FileExistsError: There are other tar files, or shards of another plan.
        """
        names = {path.name for path in shard_paths(directory, self.prefix, self.shards)}
        _refuse_others(directory, names)
        note = directory / f"{self.prefix}{NOTE}"
        before = read_plain(note, ManifestError, most=_MOST_NOTE) if note.exists() else b""
        if before == self.to_json().encode():
            return
        there = sorted(name for name in names if (directory / name).exists())
        if there:
            message = f"{directory} holds {len(there)} shards of another plan, first {there[0]}: {self._unlike(before)}"
            raise FileExistsError(f"{message}. Remove them, or choose another directory")
        write_locked(note, self.to_json().encode())

    def _unlike(self, before: bytes) -> str:
        try:
            noted = json.loads(before or b"{}")
        except ValueError:
            noted = None
        if not noted or not isinstance(noted, dict):
            return "none is noted"
        unlike = {name: value for name, value in asdict(self).items() if noted.get(name) != value}
        return ", ".join(f"{name} is {value!r} now, was {noted.get(name)!r}" for name, value in unlike.items())


def _refuse_others(directory: Path, names: set[str]) -> None:
    lying = {path.name for ending in (".tar", f".tar{SUFFIX}") for path in directory.glob(f"*{ending}")}
    others = sorted(name for name in lying if not name.startswith(".") and name.removesuffix(SUFFIX) not in names)
    if others:
        message = f"{directory} holds {len(others)} files beside the {len(names)} shards to be written"
        cure = "a manifest is for one set. Remove them, or choose another directory"
        raise FileExistsError(f"{message} (first: {others[0]}): {cure}")


def bounds_of(
    n_samples: int,
    sizes: npt.NDArray[np.int64] | None,
    *,
    samples_per_shard: int | None,
    bytes_per_shard: int | None,
    n_shards: int | None,
) -> list[int]:
    """Where each shard begins, and the end.

    Args:
        n_samples: Number of samples.
        sizes: Bytes of each one in a tar file, shape [n_samples]; needed for `bytes_per_shard`.
        samples_per_shard: Most samples of a shard, in equal shares.
        bytes_per_shard: Most bytes of a shard; a larger sample has one of its own.
        n_shards: Number of shards, equal up to one sample.

    Raises:
        ValueError: They are not exactly one positive number, or a shard would be empty.

    >>> bounds_of(5, None, samples_per_shard=2, bytes_per_shard=None, n_shards=None)
    [0, 1, 3, 5]
    """
    given = {"samples_per_shard": samples_per_shard, "bytes_per_shard": bytes_per_shard, "n_shards": n_shards}
    some = {name: number for name, number in given.items() if number is not None}
    numbers = [whole_number(number) for number in some.values()]
    if len(some) != 1 or numbers[0] is None or numbers[0] < 1:
        allowed = "give one of samples_per_shard, bytes_per_shard and n_shards, a whole number of 1 or more"
        raise ValueError(f"{allowed}, got {some or 'none of them'}")
    if not n_samples:
        raise ValueError("samples is empty: no shard may be empty, so there is nothing to write")
    number = numbers[0]
    if n_shards is not None:
        return shard_bounds(n_samples, number)
    if samples_per_shard is not None:
        return shard_bounds(n_samples, -(-n_samples // number))
    if sizes is None:
        raise ValueError("bytes_per_shard needs sizes")
    return bounds_by_bytes(sizes, number)


def whole_number(value: object) -> int | None:
    """An integer of Python's or of numpy's as one of Python's; None for anything else.

    >>> whole_number(np.int32(3)), whole_number(3.0), whole_number(True)
    (3, None, None)
    """
    try:
        return None if isinstance(value, bool | np.bool_) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def bounds_by_bytes(sizes: npt.NDArray[np.int64], most: int) -> list[int]:
    """Where each shard begins, and the end, when each one holds as many samples as fit.

    Args:
        sizes: Bytes of each sample in a tar file, shape [n_samples].
        most: Bytes of a tar file, its end included; a sample that is larger gets one of its own.

    >>> bounds_by_bytes(np.array([4096, 4096, 4096, 20480, 512]), 10240)
    [0, 2, 3, 4, 5]
    """
    room = most // RECORD * RECORD - 2 * BLOCK
    ends = np.cumsum(sizes)
    bounds = [0]
    while bounds[-1] < sizes.size:
        start = bounds[-1]
        before = int(ends[start - 1]) if start else 0
        bounds.append(max(start + 1, int(np.searchsorted(ends, before + room, "right"))))
    return bounds


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
        ShardReader(index, map_shard(index), None, verify=True, max_bytes=2**63 - 1).read_many(numbers)
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
