"""Which samples go to which shard, decided before the first one is written, and what an earlier run left of it."""

from __future__ import annotations

import glob
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Never

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from headrace.webdatamodule._shared.checks import checked_int
from headrace.webdatamodule._shared.digest import digest64
from headrace.webdatamodule._shared.display import counted
from headrace.webdatamodule.shards.errors import ManifestError, ShardError
from headrace.webdatamodule.shards.format.files import atomic_write, sync_directory
from headrace.webdatamodule.shards.format.pack import MOST_BYTES, MOST_TABLE, OVERHEAD, table_bytes
from headrace.webdatamodule.shards.format.tar import BLOCK, RECORD, padded
from headrace.webdatamodule.shards.index.consolidated import SET_INDEX_NAME
from headrace.webdatamodule.shards.index.container import INDEX_VERSION
from headrace.webdatamodule.shards.index.manifest import NAME, NOTE, Manifest, is_plain_name, read_note
from headrace.webdatamodule.shards.index.shard_index import SUFFIX, ShardIndex
from headrace.webdatamodule.shards.writing.shard_builder import Written, check_sample, member_bytes, no_sample
from headrace.webdatamodule.shards.writing.shard_task import MapStyle

EMPTY = "samples is empty: no shard may be empty, so there is nothing to write"
ShardSize = tuple[str, int]  # such as ("n_shards", 2)
CURE = "give overwrite=True, or another fingerprint=, which both delete what is there"


@dataclass(frozen=True)
class Plan:
    """How a set of samples becomes shards."""

    prefix: str
    samples: int  # 0 in a stream that has not ended
    shards: int
    bounds: str  # hexadecimal digits that stand for the bounds of all shards, or for the rule that makes them
    fingerprint: str  # what the caller says of the samples' version

    @classmethod
    def of(cls, prefix: str, bounds: Sequence[int], fingerprint: str, bytes_per_pack: int = 0) -> Plan:
        """The plan of some bounds: where each shard begins, and the end."""
        rule = [*bounds, bytes_per_pack] if bytes_per_pack else bounds
        digest = digest64(np.asarray(rule, "<i8").tobytes())
        return cls(prefix, bounds[-1], len(bounds) - 1, f"{digest:016x}", fingerprint)

    @classmethod
    def of_stream(cls, prefix: str, size: ShardSize, fingerprint: str, bytes_per_pack: int = 0) -> Plan:
        """The plan of samples whose number is unknown until they end."""
        rule = "{}={}".format(*size) + (f",bytes_per_pack={bytes_per_pack}" if bytes_per_pack else "")
        return cls(prefix, 0, 1, f"{digest64(rule.encode()):016x}", fingerprint)

    def save(self, directory: Path) -> None:
        """Note the plan beside the shards to be; who finds fewer than it says knows that the write was stopped."""
        note = {"format": "headrace-plan", "version": INDEX_VERSION, **asdict(self)}
        atomic_write(directory / f"{self.prefix}{NOTE}", (json.dumps(note, indent=1) + "\n").encode())

    def prepare(self, directory: Path, *, replaces: bool, anew: bool = False, stream: bool = False) -> bool:
        """Make a directory ready for this plan; whether all that is there is of this plan.

        Shards of another plan, such as one with another fingerprint, are stale: removed when the write `replaces` them,
        else refused; `anew` removes those of this plan as well. In a `stream` the number of samples is unknown. Tar
        files of other prefixes are refused: a manifest speaks for its whole directory.
        """
        before = read_note(directory / f"{self.prefix}{NOTE}")
        names = {path.name for path in shard_paths(directory, self.prefix, 0 if stream else self.shards)}
        own = re.compile(rf"{re.escape(self.prefix)}-[0-9]{{6,}}\.tar({re.escape(SUFFIX)})?")
        there = {path.name for ending in (".tar", f".tar{SUFFIX}") for path in directory.glob(f"*{ending}")}
        there = {name for name in there if not name.startswith(".")}
        ours = {name for name in there if name.removesuffix(SUFFIX) in names}
        if replaces or (stream and before):  # also those of a run that stopped
            ours |= {name for name in there if own.fullmatch(name)}
        if there - ours:
            message = f"{directory} holds {counted(len(there - ours), 'file')} beside the"
            message = f"{message} {counted(len(names), 'shard')} to be written"
            cure = "a manifest is for one set. Remove them, or choose another directory"
            raise FileExistsError(f"{message} (first: {min(there - ours)}): {cure}")
        differences = self._differences(before, stream)
        if not differences and not anew:
            return True
        shards = sorted(name for name in ours if name.endswith(".tar"))
        if shards and differences and not replaces:
            message = (
                f"{directory} holds {counted(len(shards), 'shard')} of another plan, first {shards[0]}: {differences}"
            )
            raise FileExistsError(f"{message}. Remove them, choose another directory, or {CURE}")
        clear(directory, ours)
        self.save(directory)
        return False

    def _differences(self, noted: dict[str, Any], stream: bool) -> str:
        if not noted:
            return "none is noted"
        unknown = ("samples", "shards") if stream else ()
        wanted = {name: value for name, value in asdict(self).items() if name not in unknown}
        unlike = {name: value for name, value in wanted.items() if noted.get(name) != value}
        return ", ".join(f"{name} is {value!r} now, was {noted.get(name)!r}" for name, value in unlike.items())


def clear(directory: Path, names: set[str]) -> None:
    """Remove a set: its manifest and columns first, so that the remaining shards are never taken for the whole set."""
    try:
        columns = [entry.file for entry in Manifest.load(directory).columns if entry.file.endswith(".npy")]
    except ManifestError:
        columns = []
    (directory / NAME).unlink(missing_ok=True)
    sync_directory(directory)
    for name in (SET_INDEX_NAME, *columns, *sorted(names)):
        (directory / name).unlink(missing_ok=True)


def refuse_finished(directory: Path) -> None:
    """Refuse to write over a finished set when nothing says whether its samples are the same."""
    if (directory / NAME).exists():
        raise FileExistsError(
            f"{directory} holds a finished set, with a {NAME}: write new samples into another directory, or {CURE}"
        )


# Bounds


def bounds_of(
    n_samples: int, sizes: npt.NDArray[np.int64] | None, size: ShardSize, *, with_packs: bool = False
) -> list[int]:
    """Where each shard begins, and the end; `sizes` are the samples' bytes in a tar file, for `bytes_per_shard`."""
    name, number = size
    if not n_samples:
        raise ValueError(EMPTY)
    if sizes is not None and name == "bytes_per_shard":
        return bounds_by_bytes(sizes, number - (OVERHEAD if with_packs else 0))  # of the first pack
    return shard_bounds(n_samples, number if name == "n_shards" else -(-n_samples // number))


def shard_size(samples_per_shard: object, bytes_per_shard: object, n_shards: object) -> ShardSize:
    """Which of the three was given, and its value; a ValueError unless it is one positive integer."""
    options = {"samples_per_shard": samples_per_shard, "bytes_per_shard": bytes_per_shard, "n_shards": n_shards}
    given = {name: number for name, number in options.items() if number is not None}
    if len(given) != 1:
        message = "give one of samples_per_shard, bytes_per_shard and n_shards, a whole number of 1 or more"
        raise ValueError(f"{message}, got {given or 'none of them'}")
    [(name, number)] = given.items()
    return name, checked_int(name, number, 1)


def pack_size(bytes_per_pack: object) -> int:
    """The most bytes of data of a pack; 0 for no packs."""
    if bytes_per_pack is None:
        return 0
    number = checked_int("bytes_per_pack", bytes_per_pack, 1, cure="None writes each member for itself")
    if number > MOST_BYTES:
        cure = "a pack is made in memory, and more than some 100,000 bytes save hardly any"
        raise ValueError(f"bytes_per_pack must be an int from 1 to {MOST_BYTES}, got {number}: {cure}")
    return number


def bounds_by_bytes(sizes: npt.NDArray[np.int64], most: int) -> list[int]:
    """Where each shard begins, and the end, when each one holds as many samples as fit."""
    room = samples_bytes(most)
    ends = np.cumsum(sizes)
    bounds = [0]
    while bounds[-1] < sizes.size:
        start = bounds[-1]
        before = int(ends[start - 1]) if start else 0
        bounds.append(max(start + 1, int(np.searchsorted(ends, before + room, "right"))))
    return bounds


def samples_bytes(most: int) -> int:
    """How many bytes of samples fit into a tar file of at most so many bytes."""
    return most // RECORD * RECORD - 2 * BLOCK


def shard_bounds(n_samples: int, n_shards: object) -> list[int]:
    """Where each shard begins, and the end: shards of equal size, give or take one sample."""
    count = checked_int("n_shards", n_shards, 1, cure="no shard may be empty")
    if count > n_samples:
        message = f"n_shards must be an int from 1 to the number of samples, {n_samples}, got {count}"
        raise ValueError(f"{message}: no shard may be empty")
    return [n_samples * shard // count for shard in range(count + 1)]


# Names


def shard_paths(directory: Path, prefix: str, n_shards: int) -> list[Path]:
    """The paths of a set's shards; a ValueError when the prefix is empty, hidden, or leads elsewhere."""
    if not is_plain_name(prefix) or prefix.startswith("."):
        raise ValueError(f"prefix must be the first part of a plain file name, got {prefix!r}")
    return [directory / f"{prefix}-{shard:06d}.tar" for shard in range(n_shards)]


def shards_of_prefix(directory: Path, prefix: str) -> list[Path]:
    """The shards of a prefix that lie in a directory, sorted by name."""
    return sorted(directory.glob(f"{glob.escape(prefix)}-*.tar"))


def refuse_leftovers(directory: Path, prefix: str, paths: Sequence[Path]) -> None:
    """Refuse to write beside shards of this prefix that are no part of the set."""
    others = sorted(set(shards_of_prefix(directory, prefix)) - set(paths))
    if others:
        raise FileExistsError(
            f"{directory} holds {counted(len(others), 'shard')} of prefix {prefix!r} beside the {len(paths)} to be"
            f" written (first: {others[0].name}): readers would take them for a part of the new set."
            " Remove them, or choose another directory or prefix"
        )


# Bytes of samples


def stored_bytes(nbytes: int) -> int:
    """Bytes that a member takes in a tar file, its header and padding included."""
    return BLOCK + padded(nbytes)


def sample_bytes(key: str, sample: Any, bytes_per_pack: int = 0) -> int:
    """Bytes that a sample takes in a tar file; see `packed_bytes`."""
    if not isinstance(sample, Mapping):
        raise no_sample(key, sample)
    # The length of a memory view, or of an array, counts numbers of several bytes each.
    sizes = {}
    for member, data in sample.items():
        plain = data if type(data) is bytes else member_bytes(data, sample=key, member=f"{key}.{member}")
        sizes[member] = len(plain)
    return packed_bytes(key, sizes, bytes_per_pack) if bytes_per_pack else sum(map(stored_bytes, sizes.values()))


def packed_bytes(key: str, sizes: Mapping[str, int], bytes_per_pack: int) -> int:
    """Bytes that a sample with members of such sizes takes in a tar file with packs, at most.

    It bears its part of what packs take beside table and data. A pack is closed by a sample that it has no room for, so
    that two in a row are more than full. Samples too large for a pack end one, and bear all of what the next one takes.
    """
    data, table = sum(sizes.values()), table_bytes(key, tuple(sizes))
    if data > bytes_per_pack or table > MOST_TABLE:
        return sum(map(stored_bytes, sizes.values())) + OVERHEAD
    return data + table + math.ceil(2 * OVERHEAD * (data / bytes_per_pack + table / MOST_TABLE))


def measure(samples: MapStyle, bytes_per_pack: int = 0) -> tuple[npt.NDArray[np.int64], list[str]]:
    """Ask for each sample once, with a progress bar."""
    keys: list[str] = []
    sizes = np.empty(len(samples), np.int64)
    bar: tqdm[Never]
    with tqdm(total=len(samples), desc="measuring", unit="sample", disable=None) as bar:
        for number in range(len(samples)):
            try:
                key, sample = samples[number]
                sizes[number] = sample_bytes(key, sample, bytes_per_pack)
            except Exception as error:
                message = f"failed to measure sample {number}: {type(error).__name__}: {error}"
                raise ShardError(message, sample=f"number {number}") from error
            check_sample(key, sample)
            keys.append(key)
            bar.update()
    return sizes, keys


def given_sizes(sizes: Any, n_samples: int) -> npt.NDArray[np.int64]:
    """Check the sizes that a caller gives."""
    array = np.asarray(sizes)
    if array.shape != (n_samples,) or array.dtype.kind not in "iu" or (array < 0).any():
        allowed = f"whole numbers of bytes, 0 or more, shape [{n_samples}]"
        raise ValueError(f"sizes must be {allowed}, got {array.dtype} of shape {list(array.shape)}")
    return array.astype(np.int64)


def repeated_key(written: Sequence[Written], directory: Path) -> tuple[str, str, str] | None:
    """A key that occurs twice in a set, and the names of the two shards; None when there is no such key."""
    hashes = np.concatenate([one.hashes for one in written])
    order = np.argsort(hashes, kind="stable")
    equal = np.flatnonzero(hashes[order][1:] == hashes[order][:-1])
    ends = np.cumsum([one.hashes.size for one in written])
    for place in equal.tolist():
        (key, name), (other, again) = (_key(int(order[at]), ends, written, directory) for at in (place, place + 1))
        if key == other:
            return key, name, again
    return None


def _key(sample: int, ends: npt.NDArray[np.int64], written: Sequence[Written], directory: Path) -> tuple[str, str]:
    shard = int(np.searchsorted(ends, sample, "right"))
    entry = written[shard].entry
    index = ShardIndex.open(directory / entry.name)
    return index.key(sample - int(ends[shard]) + entry.samples), entry.name
