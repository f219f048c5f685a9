"""The index of one shard: where the data of each member lie, how many bytes they are, and their checksums."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import repeat, starmap
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.webdatamodule._shared.display import counted, never_raises
from headrace.webdatamodule.shards.errors import Damage, DamagedIndexError, ShardError, StaleIndexError
from headrace.webdatamodule.shards.format.files import read_or_map
from headrace.webdatamodule.shards.format.tar import BLOCK, compression, padded
from headrace.webdatamodule.shards.index.checksums import checksum64, content_fingerprint, fingerprint_ranges
from headrace.webdatamodule.shards.index.container import unpack
from headrace.webdatamodule.shards.index.keys import Keys, read_keys

Integers = npt.NDArray[Any]
SUFFIX = ".hri"
# To read a file takes as long as to map it up to here; larger ones are shared by all processes that map them.
READ_BYTES = 1 << 18
_CURE = ": index the shard again"


def index_path(shard: str | Path) -> Path:
    """Where the index of a shard lies: beside it."""
    return Path(f"{shard}{SUFFIX}")


class ShardIndex:
    """The index of one shard, read where it lies.

    Samples are numbered in the order of the tar file. The members of all samples stand in flat arrays, those of
    sample `i` at the positions `starts` to `stops` that `span(i)` gives, in the order of `layout(i)`. Opening
    compares head and description with their checksum, `check_self` the arrays with theirs; what fits is trusted.

    Args:
        data: The bytes of an index file, or a memory map of them.
        shard: Path or URL of the tar file, named in errors.
        end: Where the index ends in the file that is mapped, when that holds others too.

    Attributes:
        data: The bytes.
        shard: The path or URL.
        n_samples: Number of samples.
        n_members: Number of members in all samples.
        shard_bytes: Bytes of the tar file.
        checksum: 64 bits that stand for the whole index, and through it for each byte of the shard.
        layouts: The different tuples of member keys that samples have, in lower case.
        suffixes: The same as they are written in the tar file.
        begins: Where each member's data begin, in bytes, shape [n_members], in 32 or 64 bits.
        packs: Number of packs.
        split_at: "first" or "last": the dot of a member's name where the member's key begins.
        sizes: Bytes of data of each member, shape [n_members].
        checksums: `checksum32` of the data of each member, shape [n_members].
        gap_checksums: Checksums over all other bytes of the shard, one for 64 of the `gaps` between members.
        skipped: How many entries of the tar file are no part of a sample, by reason; see `skip_reason`.
        skipped_names: Names of the first of them, directories and volume labels aside.
        keys: The keys of the samples; a `Keys`.

    Raises:
        DamagedIndexError: The bytes are no index, or were cut or changed.
        IndexVersionError: They have the format of another release.
    """

    def __init__(self, data: bytes | mmap.mmap | memoryview, *, shard: str = "", end: int | None = None) -> None:
        self.shard = shard
        self.data, self._from_file = memoryview(data), False
        # The memory map, if there is one, and the length that it must keep.
        self._map = self.data.obj if isinstance(self.data.obj, mmap.mmap) else None
        self._mapped_bytes = len(self.data) if end is None else end
        # What tells the file's size now, and the size that is looked for first.
        self.mapped = () if self._map is None else ((self._map.size, max(self._map.size(), self._mapped_bytes)),)
        try:
            description, arrays, self.checksum, self._body, self._body_checksum = unpack(self.data)
            self._read(description, arrays)
        except ShardError as error:
            error.shard = shard
            raise
        except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
            message = f"the index does not fit together ({type(error).__name__}: {error})"
            raise DamagedIndexError(message, shard=shard) from error

    @classmethod
    def open(cls, shard: str | Path, *, mapped: bool = True) -> ShardIndex:
        """Open the index that lies beside a shard.

        Args:
            shard: Path of the tar file.
            mapped: Whether a large one may be mapped: shared by all processes, but to be seen to with `check_size`.

        Raises:
            FileNotFoundError: There is no index.
            DamagedIndexError: It is no index, or was cut or changed.
            IndexVersionError: It has the format of another release.
        """
        most = READ_BYTES if mapped else sys.maxsize
        data = read_or_map(index_path(shard), DamagedIndexError, most_read=most)
        try:
            made = cls(data, shard=str(shard))
        except DamagedIndexError as error:
            error.message += _CURE
            raise
        made._from_file = True
        return made

    def _read(self, description: Mapping[str, Any], arrays: Mapping[str, Integers]) -> None:
        self.n_samples: int = description["samples"]
        self.shard_bytes: int = description["shard_bytes"]
        self._end, self._content = description["end"], description["content"]
        self.skipped: dict[str, int] = description["skipped"]
        self.skipped_names: tuple[str, ...] = tuple(description["skipped_names"])
        self.suffixes = tuple(tuple(suffixes) for suffixes in description["layouts"])
        self.layouts = tuple(tuple(suffix.lower() for suffix in suffixes) for suffixes in self.suffixes)
        self.begins, self.sizes = arrays["offsets"], arrays["sizes"]
        self.packs: int = description["packs"]
        self.split_at: str = description["split_at"]
        self.checksums, self.gap_checksums = arrays["checksums"], arrays["gap_checksums"]
        self.n_members: int = self.begins.size
        self._layout_of, self._starts = arrays.get("layout_of"), arrays.get("starts")
        self._width = 0 if self._starts is not None else len(self.layouts[0]) if self.layouts else 0
        self.keys: Keys = read_keys(self.n_samples, description["keys"], arrays)

    @never_raises
    def __repr__(self) -> str:
        layout = ", ".join(self.layouts[0]) + (f" and {len(self.layouts) - 1} more layouts" * (len(self.layouts) > 1))
        counts = f"{counted(self.n_samples, 'sample')}, {counted(self.n_members, 'member')}"
        return f"{type(self).__name__}({self.shard or 'no path'}: {counts} ({layout}), {self.shard_bytes:,} bytes)"

    def __len__(self) -> int:
        return self.n_samples

    def __reduce__(self) -> tuple[Any, ...]:
        data = b"" if self._from_file else bytes(self.data)
        return _again, (type(self), data, self.shard, self.checksum)

    @property
    def n_skipped(self) -> int:
        """How many members are no part of a sample, directories and volume labels aside."""
        return sum(count for reason, count in self.skipped.items() if reason not in ("directory", "label"))

    @cached_property
    def member_keys(self) -> tuple[str, ...]:
        """The member keys that occur, in lower case, sorted."""
        return tuple(sorted({key for layout in self.layouts for key in layout}))

    @cached_property
    def _columns(self) -> dict[str, list[tuple[int, int]]]:
        """For each member key the numbers of layouts that have it, and where."""
        found: dict[str, list[tuple[int, int]]] = {}
        for number, layout in enumerate(self.layouts):
            for place, member in enumerate(layout):
                found.setdefault(member, []).append((number, place))
        return found

    @cached_property
    def ends(self) -> npt.NDArray[np.int64]:
        """Where each member ends, the padding after it included, in bytes, shape [n_members]."""
        offsets = self.offsets
        ends = padded(offsets + self.sizes.astype(np.int64))
        ends[:-1] = np.minimum(ends[:-1], offsets[1:])  # in a pack there is none
        return ends

    @property
    def offsets(self) -> npt.NDArray[np.int64]:
        """Where each member's data begin, in bytes, shape [n_members]; made anew at each call."""
        return self.begins.astype(np.int64)

    def place(self, position: int) -> int:
        """The byte that errors name of a member: where its header begins, or its data in a shard with packs."""
        return int(self.begins[position]) - (0 if self.packs else BLOCK)

    def span(self, sample: int) -> tuple[int, int]:
        """Where the members of sample `sample`, 0 to `n_samples - 1`, begin and end in the flat arrays."""
        self.check_size()
        start = self._width * sample if self._starts is None else int(self._starts[sample])
        return start, start + len(self.layout(sample))

    def layout(self, sample: int) -> tuple[str, ...]:
        """The member keys of sample `sample`, 0 to `n_samples - 1`, in lower case, in the order of the tar file."""
        self.check_size()
        return self.layouts[0 if self._layout_of is None else int(self._layout_of[sample])]

    @property
    def layout_numbers(self) -> Integers:
        """The number of each sample's layout in `layouts`, shape [n_samples]."""
        return np.zeros(self.n_samples, np.uint16) if self._layout_of is None else self._layout_of

    def starts_of(self, samples: Sequence[int]) -> Iterable[int]:
        """Where the members of some samples begin in the flat arrays, fast."""
        return map(self._width.__mul__ if self._starts is None else self._starts.data.__getitem__, samples)

    def layouts_of(self, samples: Sequence[int]) -> Iterable[int]:
        """The numbers in `layouts` of some samples' layouts, fast."""
        if self._layout_of is None:
            return repeat(0, len(samples))
        return map(self._layout_of.data.__getitem__, samples)

    def key(self, sample: int) -> str:
        """The key of sample `sample`, 0 to `n_samples - 1`."""
        self.check_size()
        return self.keys[sample]

    def find(self, key: str) -> int:
        """The number of the sample with a key; a KeyError when no sample has it."""
        self.check_size()
        return self.keys.find(key)

    def positions(self, member: str, samples: npt.ArrayLike | None = None) -> npt.NDArray[np.int64]:
        """Where a member of some samples stands in the flat arrays.

        Args:
            member: Its key, in lower case.
            samples: Numbers of samples, shape [n]; all when None.

        Returns:
            Positions, shape [n]; -1 where a sample does not have the member.
        """
        self.check_size()
        chosen = np.arange(self.n_samples) if samples is None else np.asarray(samples, np.int64)
        if not chosen.size:
            return np.empty(0, np.int64)
        columns = np.full(len(self.layouts), -1)
        for layout, place in self._columns.get(member, ()):
            columns[layout] = place
        column = columns[0] if self._layout_of is None else columns[self._layout_of[chosen]]
        starts = chosen * self._width if self._starts is None else self._starts[chosen].astype(np.int64)
        return np.where(column >= 0, starts + column, -1)

    def locate(self, position: int) -> tuple[int, str]:
        """Whose member stands at a position of the flat arrays: the sample's number, and the name in the tar file."""
        self.check_size()
        if self._starts is None:
            sample = position // self._width
        else:
            sample = int(np.searchsorted(self._starts, position, "right")) - 1
        [start], [layout] = self.starts_of((sample,)), self.layouts_of((sample,))
        return sample, f"{self.key(sample)}.{self.suffixes[layout][position - start]}"

    def fingerprint_ranges(self) -> list[tuple[int, int]]:
        """Which bytes of the shard `check_shard` looks at: pairs of begin and end."""
        return fingerprint_ranges(self.shard_bytes, self._end)

    def check_shard(self, shard_bytes: int, read: Callable[[int, int], bytes | memoryview]) -> None:
        """Check by its size and three short pieces whether a shard is the one that was indexed.

        Args:
            shard_bytes: Its size.
            read: Gives the bytes between begin and end.

        Raises:
            StaleIndexError: It is another one.
        """
        if shard_bytes != self.shard_bytes:
            message = f"the shard has {shard_bytes} bytes, but {self.shard_bytes} when it was indexed"
        elif content_fingerprint(shard_bytes, starmap(read, self.fingerprint_ranges())) != self._content:
            message = "the shard has the size that it had when it was indexed, but other content"
        else:
            return
        if program := compression(bytes(read(0, min(BLOCK, shard_bytes)))):
            raise StaleIndexError(f"{message}: {Damage.COMPRESSED.format(program=program)}", shard=self.shard)
        cure = "it was replaced, cut or damaged: call verify_shards, which names the damage, and restore it;"
        cure += " index it again only if you changed it on purpose"
        raise StaleIndexError(f"{message}: {cure}", shard=self.shard)

    def check_size(self) -> None:
        """Check whether the file was cut since it was mapped: to read past its end would kill the process.

        A cut between this check and the read, some microseconds later, is not seen. It needs someone who writes into
        the file itself: replacing it under its name leaves the map as it was.

        Raises:
            DamagedIndexError: It was cut.
        """
        if self._map is not None and self._map.size() < self._mapped_bytes:
            message = f"the index had {self._mapped_bytes} bytes when it was opened, and has {self._map.size()} now"
            raise DamagedIndexError(message + _CURE, shard=self.shard)

    def check_self(self) -> None:
        """Read all of the index, and check it against its checksum; a DamagedIndexError when it was changed."""
        self.check_size()
        if checksum64(self._body) != self._body_checksum:
            message = "the arrays of the index are damaged: their checksum does not fit"
            raise DamagedIndexError(message + (_CURE if self._from_file else ""), shard=self.shard)


def _again(kind: type[ShardIndex], data: bytes, shard: str, checksum: int) -> ShardIndex:
    made = kind(data, shard=shard) if data else kind.open(shard)
    if made.checksum != checksum:
        raise StaleIndexError("the index was replaced while a process was being started", shard=shard)
    return made
