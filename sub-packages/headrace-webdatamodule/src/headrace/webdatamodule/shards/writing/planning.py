"""Which samples go to which shard, decided before the first one is written, and noted beside the shards."""

from __future__ import annotations

import json
import operator
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from headrace.webdatamodule.shards.errors import ManifestError
from headrace.webdatamodule.shards.format.files import read_plain
from headrace.webdatamodule.shards.format.tar import BLOCK, RECORD
from headrace.webdatamodule.shards.index.manifest import NOTE
from headrace.webdatamodule.shards.index.shard_index import SUFFIX
from headrace.webdatamodule.shards.writing.parts import write_locked
from headrace.webdatamodule.shards.writing.writer import shard_bounds, shard_paths

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
