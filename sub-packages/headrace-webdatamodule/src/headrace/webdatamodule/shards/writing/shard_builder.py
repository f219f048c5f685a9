"""The bytes of one shard and of its index, from samples that are given one after another; and what a sample may be."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.webdatamodule._shared.digest import digest64
from headrace.webdatamodule.shards.errors import ShardError
from headrace.webdatamodule.shards.format.pack import MOST_TABLE, OVERHEAD, pack_head, pack_name, table_bytes
from headrace.webdatamodule.shards.format.tar import (
    BLOCK,
    MOST_MEMBER_BYTES,
    NAME,
    PADDING,
    RESERVED,
    Samples,
    fits_header,
    is_key,
    padded,
    split_name,
    tar_end,
    ustar_headers,
)
from headrace.webdatamodule.shards.index.build import pack_index
from headrace.webdatamodule.shards.index.checksums import GAPS_PER_CHECKSUM, checksums64, member_checksums
from headrace.webdatamodule.shards.index.container import index_checksum
from headrace.webdatamodule.shards.index.manifest import ShardEntry
from headrace.webdatamodule.shards.index.shard_index import ShardIndex

PIECE = 1 << 20  # bytes that are worth a write
_SHORTEST = b".x"  # that follows a key in the name of a member
_NO_KEY = (".", "\0/", "/\0", "\0__", "\0\0")  # parts of keys between zeros, of which some are none: see `is_key`


class Written(NamedTuple):
    """What came of one shard."""

    entry: ShardEntry
    members: tuple[str, ...]
    hashes: npt.NDArray[np.uint64]  # of the samples' keys, shape [n_samples]


class _Waiting(NamedTuple):
    """A sample that waits for its pack."""

    key: str
    members: tuple[str, ...]
    data: list[bytes]


class ShardBuilder:
    """Takes samples, gives the bytes of their tar file piece by piece, and then those of its index.

    Samples wait until the next piece, whose headers and checksums are made together. With `bytes_per_pack`, samples of
    at most so many bytes that follow one another are written together, in a pack of at most so many; but as members of
    their own where a pack of them would not be smaller.

    Attributes:
        shard: The path of the shard.
        samples: Those that do not wait.
        pending: How many bytes the next piece has, at most one header for each member too few.
    """

    def __init__(self, shard: str, bytes_per_pack: int = 0) -> None:
        self.shard, self.samples, self.pending = shard, Samples(), 0
        self.checksums: list[int] = []
        # Samples that wait to be written as members of their own.
        self._keys: list[str] = []
        self._members: list[tuple[str, ...]] = []
        self._data: list[bytes] = []
        self._stored, self._counted = 0, 0  # what the first members of `_data` take in the tar file, and how many
        self._pieces: list[bytes] = []
        self._gaps: list[bytes] = []
        self._gap_checksums: list[int] = []
        # For each member of a layout, what follows the sample's key in its name.
        self._endings: dict[tuple[str, ...], list[bytes]] = {}
        self._padding = b""
        self._bytes_per_pack = bytes_per_pack
        self._empty_pack()

    def __len__(self) -> int:
        return len(self.samples.keys) + len(self._keys) + len(self._waiting)

    @property
    def nbytes(self) -> int:
        """Bytes of the samples so far, at most: of those that wait it is not known yet how they are written."""
        self._stored += sum(BLOCK + padded(len(data)) for data in self._data[self._counted :])
        self._counted = len(self._data)
        end = self.samples.end + self._stored
        if not self._waiting:
            return end
        return end + min(padded(OVERHEAD + self._table_bytes + self._data_bytes), self._plain_bytes)

    def add(self, key: Any, sample: Any) -> None:
        """Take one sample. A ShardError, here or at the next piece, when no reader could find it again."""
        if not isinstance(key, str) or not (type(sample) is dict or isinstance(sample, Mapping)):
            raise no_sample(key, sample, shard=self.shard)
        members, values = tuple(sample), list(sample.values())
        if members not in self._endings:
            check_key(key, shard=self.shard)
            self._new_layout(key, members)
        nbytes = 0
        for data in values:
            if type(data) is not bytes:
                values = [
                    member_bytes(data, shard=self.shard, sample=key, member=f"{key}.{member}")
                    for member, data in sample.items()
                ]
                nbytes = sum(map(len, values))
                break
            nbytes += len(data)
        if self._bytes_per_pack and self._goes_into_pack(key, members, values, nbytes):
            return
        self._keys.append(key)
        self._members.append(members)
        self._data += values
        self.pending += nbytes + BLOCK * len(members)

    def add_plain(self, samples: Sequence[Any]) -> bool:
        """`add` many samples at a third of its cost: texts and dictionaries of bytes, which are small.

        False where one of them is something else, or has members that no sample had before; then none was taken.
        """
        if self._bytes_per_pack:
            return False
        try:
            keys, dictionaries = zip(*samples, strict=True)
        except (TypeError, ValueError):
            return False
        if {*map(type, keys)} != {str} or {*map(type, dictionaries)} != {dict}:
            return False
        members = [*map(tuple, dictionaries)]
        data = [*chain.from_iterable(map(dict.values, dictionaries))]
        if not self._endings.keys() >= {*members} or {*map(type, data)} != {bytes}:
            return False
        nbytes = sum(map(len, data))
        if nbytes > PIECE:
            return False
        self._keys += keys
        self._members += members
        self._data += data
        self.pending += nbytes + BLOCK * len(data)
        return True

    def _write_members(self) -> None:
        """Write the samples that wait as members of their own."""
        keys, data = self._keys, self._data
        if not keys:
            return
        samples, layouts = self.samples, self._members
        begins = _checked_keys(keys, shard=self.shard)
        if layouts.count(layouts[0]) == len(layouts):  # as most shards have it
            names = [begin + ending for begin in begins for ending in self._endings[layouts[0]]]
        else:
            pairs = zip(begins, map(self._endings.__getitem__, layouts), strict=True)
            names = [begin + ending for begin, endings in pairs for ending in endings]
        sizes = list(map(len, data))
        if len(max(names, key=len)) > NAME or max(sizes) > MOST_MEMBER_BYTES:
            self._check_headers(names, sizes)
        stored = BLOCK + padded(np.array(sizes, np.int64))
        ends = samples.end + np.cumsum(stored)
        samples.keys += keys
        samples.layout_of += map(samples.layouts.__getitem__, layouts)
        samples.offsets += (ends - stored + BLOCK).tolist()
        samples.sizes += sizes
        samples.end = int(ends[-1])
        padding = [self._padding, *(PADDING[size % BLOCK] for size in sizes)]
        self._padding = padding.pop()
        self._write(padding, ustar_headers(names, sizes), data)
        self._keys, self._members, self._data = [], [], []
        self._stored = self._counted = 0

    def _write(self, padding: Sequence[bytes], headers: Sequence[bytes], data: Sequence[bytes]) -> None:
        """Write members: the padding before the header of each, which are the gap before its data, and these."""
        self._pieces += chain.from_iterable(zip(padding, headers, data, strict=True))
        self.checksums += member_checksums(data).tolist()
        self._gaps += chain.from_iterable(zip(padding, headers, strict=True))
        each = 2 * GAPS_PER_CHECKSUM
        whole = len(self._gaps) - len(self._gaps) % each
        for begin in range(0, whole, each):
            self._gap_checksums.append(digest64(b"".join(self._gaps[begin : begin + each])))
        del self._gaps[:whole]

    def _goes_into_pack(self, key: str, members: tuple[str, ...], data: list[bytes], nbytes: int) -> bool:
        """Let a sample wait for its pack; False where it is too large for one, and follows those that waited."""
        in_table = table_bytes(key, members)
        if nbytes > self._bytes_per_pack or in_table > MOST_TABLE:
            self._close_pack()
            return False
        begin = check_key(key, shard=self.shard)  # whether a sample can be stored does not depend on packs
        self._check_headers([begin + ending for ending in self._endings[members]], map(len, data))
        if self._data_bytes + nbytes > self._bytes_per_pack or self._table_bytes + in_table > MOST_TABLE:
            self._close_pack()
        self._waiting.append(_Waiting(key, members, data))
        self._data_bytes += nbytes
        self._table_bytes += in_table
        self._plain_bytes += sum(BLOCK + padded(len(one)) for one in data)
        return True

    def _close_pack(self) -> None:
        """Write what waits, as one member of the tar file if that takes fewer bytes."""
        waiting, plain = self._waiting, self._plain_bytes
        self._empty_pack()
        if not waiting:
            return
        head = pack_head(
            (f"{one.key}.{name}", len(data))
            for one in waiting
            for name, data in zip(one.members, one.data, strict=True)
        )
        size = len(head) + sum(len(data) for one in waiting for data in one.data)
        if BLOCK + padded(size) >= plain:
            for one in waiting:
                self._keys.append(one.key)
                self._members.append(one.members)
                self._data += one.data
            self.pending += plain
            return
        self._write_members()
        [header], samples = ustar_headers([pack_name(waiting[0].key)], [size]), self.samples
        data = [member for one in waiting for member in one.data]
        nothing = [b""] * (len(data) - 1)
        self._write([self._padding, *nothing], [header + head, *nothing], data)
        sizes = list(map(len, data))
        samples.offsets += accumulate(sizes[:-1], initial=samples.end + BLOCK + len(head))
        samples.sizes += sizes
        samples.keys += (one.key for one in waiting)
        samples.layout_of += (samples.layouts[one.members] for one in waiting)
        self._padding = PADDING[size % BLOCK]
        self.pending += BLOCK + padded(size)
        samples.end += BLOCK + padded(size)
        samples.packs += 1

    def _empty_pack(self) -> None:
        self._waiting: list[_Waiting] = []
        self._data_bytes = self._table_bytes = self._plain_bytes = 0

    def take(self) -> bytes:
        """The bytes that wait; they do not wait any more."""
        self._write_members()
        taken = b"".join(self._pieces)
        self._pieces.clear()
        self.pending = 0
        return taken

    def finish(self) -> bytes:
        """The last bytes of the tar file; a ShardError when a key occurs twice."""
        self._close_pack()
        self._write_members()
        if len(set(self.samples.keys)) < len(self.samples.keys):
            seen: set[str] = set()
            key = next(key for key in self.samples.keys if key in seen or seen.add(key))  # type: ignore[func-returns-value] # add returns None
            raise ShardError(f"the sample key {key!r} occurs twice: make keys unique", shard=self.shard, sample=key)
        last = self._padding + tar_end(self.samples.end)
        self._pieces.append(last)
        self._gap_checksums.append(digest64(b"".join([*self._gaps, last])))
        return self.take()

    def index(self, nbytes: int, read: Callable[[int, int], bytes]) -> bytes:
        """The bytes of the index: the same as `build_index` makes of the tar file, without reading it again."""
        return pack_index(self.samples, nbytes, self.checksums, self._gap_checksums, read)

    def written(self, index: bytes, nbytes: int) -> Written:
        """What the shard is to the set, with its index; the same as `result` finds out from that."""
        keys, layouts = self.samples.keys, self.samples.layouts
        entry = ShardEntry(Path(self.shard).name, nbytes, len(keys), f"{index_checksum(index):016x}")
        members = {member.lower() for layout in layouts for member in layout}
        return Written(entry, tuple(sorted(members)), key_hashes(keys))

    def _new_layout(self, key: str, members: tuple[str, ...]) -> None:
        self._endings[members] = member_endings(members, shard=self.shard, sample=key)
        self.samples.layouts[members] = len(self.samples.layouts)

    def _check_headers(self, names: Iterable[bytes], sizes: Iterable[int]) -> None:
        """Refuse names and sizes that headers do not hold."""
        for name, size in zip(names, sizes, strict=True):
            if size > MOST_MEMBER_BYTES:
                message = f"the member of {size} bytes does not fit: a USTAR header holds members to 8 GiB"
                raise ShardError(message, shard=self.shard, member=name.decode())
            if not fits_header(name):
                raise _too_long(name, sample=split_name(name.decode())[0], shard=self.shard)


def result(index: ShardIndex) -> Written:
    """What a shard is to the set."""
    return Written(ShardEntry.of(index), index.member_keys, key_hashes(index.keys))


def key_hashes(keys: Sequence[str]) -> npt.NDArray[np.uint64]:
    """64 bits of each key, shape [n_samples]."""
    texts = "\0".join(keys).encode("utf-8", "surrogateescape").split(b"\0")[: len(keys)]  # no key has a zero
    return checksums64(texts)


# What a sample may consist of, so that readers of tar shards give it back as it is


def no_sample(key: object, sample: object, *, shard: str | None = None) -> ShardError:
    """The error of something else than a key and its members."""
    message = f"a sample must be a pair of a text and {{member key: bytes}}, got {key!r:.80} and {sample!r:.80}"
    return ShardError(message, shard=shard)


def check_key(key: str, *, shard: str | None = None) -> bytes:
    r"""Refuse a sample key that readers of tar shards would not give back as it is; its UTF-8 is returned.

    Readers cut a member's name at its first dot, and skip names that begin with two underscores.
    """
    if not isinstance(key, str):
        raise ShardError(f"a sample key must be a text, got {key!r:.80}", shard=shard, sample=repr(key))
    if not is_key(key):
        message = f"the sample key {key!r} cannot be stored: give a text without dots, not empty,"
        raise ShardError(f"{message} not beginning with '/' or '__', not ending with '/'", shard=shard)
    begin = _encoded(key, key, shard)
    if not fits_header(begin + _SHORTEST):
        raise _too_long(begin + _SHORTEST, sample=key, shard=shard)
    return begin


def check_sample(key: str, members: Iterable[object]) -> None:
    """Refuse a sample that readers would not give back as it is, or no header holds, before its data are read."""
    begin = check_key(key)
    for ending in member_endings(members, sample=key, shard=None):
        if not fits_header(begin + ending):
            raise _too_long(begin + ending, sample=key, shard=None)


def _checked_keys(keys: Sequence[str], *, shard: str) -> list[bytes]:
    """What `check_key` does with many keys, in a tenth of the time."""
    text = "\0".join(keys)
    whole = f"\0{text}\0"
    if whole.count("\0") == len(keys) + 1 and not any(part in whole for part in _NO_KEY):
        with suppress(UnicodeEncodeError):
            return text.encode().split(b"\0")
    return [check_key(key, shard=shard) for key in keys]


def _too_long(name: bytes, *, sample: str, shard: str | None) -> ShardError:
    message = f"the name of {len(name)} bytes is too long: a USTAR header holds 100 bytes (255 with directories)"
    return ShardError(f"{message}: shorten the key", shard=shard, sample=sample, member=name.decode())


def member_endings(members: Iterable[object], *, sample: str, shard: str | None) -> list[bytes]:
    """What follows the sample's key in the names of its members: a dot and the member's key, checked."""
    endings: dict[str, bytes] = {}  # readers fold the case of member keys
    for member in members:
        if not isinstance(member, str) or not re.fullmatch(r"[^/\0]+", member) or member.lower() in endings:
            allowed = "a text without '/', unlike the sample's other member keys even in lower case"
            raise ShardError(f"the member key {member!r} cannot be stored: give {allowed}", shard=shard, sample=sample)
        if member.lower() in RESERVED:
            message = "the member has a key that readers use for themselves: rename it"
            raise ShardError(message, shard=shard, sample=sample, member=f"{sample}.{member}")
        endings[member.lower()] = _encoded(f".{member}", sample, shard)
    if not endings:
        raise ShardError("the sample has no members: give at least one", shard=shard, sample=sample)
    return list(endings.values())


def member_bytes(data: object, *, sample: str, member: str, shard: str | None = None) -> bytes:
    """The bytes of a member; a ShardError says how to make bytes of something else."""
    if isinstance(data, bytes | bytearray | memoryview):
        return bytes(data)
    cure = "encode it, such as with json.dumps(value).encode() for a member 'json'"
    if isinstance(data, str):
        cure = "encode it, such as with text.encode()"
    elif isinstance(data, np.ndarray | np.generic):
        cure = "numpy.save it into an io.BytesIO as a member 'npy' and give its getvalue()"
        cure += ", or use safetensors.numpy.save for a member 'safetensors'"
    elif type(data).__module__.partition(".")[0] == "torch":
        cure = "use safetensors.torch.save for a member 'safetensors', or torch.save it into an io.BytesIO as a 'pt'"
    message = f"a member must be bytes, got {type(data).__name__}: {cure}"
    raise ShardError(message, shard=shard, sample=sample, member=member)


def _encoded(text: str, sample: str, shard: str | None) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ShardError(f"{text!r} cannot be written as UTF-8: {error.reason}", shard=shard, sample=sample) from error
