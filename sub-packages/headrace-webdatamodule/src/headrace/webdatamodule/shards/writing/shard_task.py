"""One shard: written, indexed and published by one call, in whatever process it is made."""

from __future__ import annotations

import contextlib
import errno
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt
import xxhash

from headrace.webdatamodule.shards.errors import ShardError
from headrace.webdatamodule.shards.format.files import StagedFile, StoppedError, sync_directory
from headrace.webdatamodule.shards.format.pack import MOST_TABLE, OVERHEAD, pack_head, pack_name, table_bytes
from headrace.webdatamodule.shards.format.tar import (
    BLOCK,
    MOST_MEMBER_BYTES,
    NAME,
    PADDING,
    RESERVED,
    Samples,
    is_key,
    long_ustar_header,
    padded,
    tar_end,
    ustar_header,
)
from headrace.webdatamodule.shards.index.build import pack_index
from headrace.webdatamodule.shards.index.checksums import GAPS_PER_CHECKSUM, MEMBER_BITS, digest64
from headrace.webdatamodule.shards.index.container import index_checksum
from headrace.webdatamodule.shards.index.manifest import ShardEntry
from headrace.webdatamodule.shards.index.shard_index import ShardIndex, index_path

CHUNK = 1 << 20  # bytes that are worth a write
_SECONDS = 0.2
# Shards that are published together, and threads that bring them to the disk. On ext4 this took hardly longer than no
# fsync at all; more of both did not help.
TOGETHER, _THREADS = 16, 4
_SHORTEST = b".x"  # that follows a key in the name of a member
KeyedSample = tuple[str, Mapping[str, bytes]]
OnProgress = Callable[[int], object]


class MapStyle(Protocol):
    """Samples by their positions; a list of pairs is one."""

    def __len__(self) -> int: ...

    def __getitem__(self, position: int, /) -> KeyedSample: ...


class Written(NamedTuple):
    """What came of one shard."""

    entry: ShardEntry
    members: tuple[str, ...]
    hashes: npt.NDArray[np.uint64]  # of the samples' keys, shape [n_samples]


@dataclass(frozen=True)
class ShardTask:
    """Writes one shard; can be pickled when its samples can."""

    path: Path
    samples: MapStyle | Callable[[], MapStyle]
    start: int  # position of the first sample in `samples`
    stop: int
    first: int  # number of the first sample in the whole set
    run: str  # hexadecimal digits that tell this run's files from others
    bytes_per_pack: int = 0  # 0: without packs

    def __len__(self) -> int:
        return self.stop - self.start

    def __call__(self) -> Written:
        """Write the shard."""
        [written] = write_each([self])
        return written

    def write(self, publisher: Publisher, progress: OnProgress) -> Written:
        """Write the shard; it is published with the next ones, or when the publisher ends."""
        samples = load(self.samples)
        reported, now = self.start, time.monotonic()
        shard = publisher.begin(self.path, self.run, self.bytes_per_pack)
        add, builder, shift = shard.add, shard.builder, self.first - self.start
        for position in range(self.start, self.stop):
            add(*read_sample(samples, position, position + shift, self.path))
            if builder.pending >= CHUNK or time.monotonic() > now + _SECONDS:
                shard.flush()
                progress(position + 1 - reported)
                reported, now = position + 1, time.monotonic()
        written = publisher.finish(shard)
        progress(self.stop - reported)
        return written

    def sample(self, samples: MapStyle, position: int) -> KeyedSample:
        """One of the task's samples."""
        return read_sample(samples, position, self.first + position - self.start, self.path)


def write_each(tasks: Iterable[ShardTask], progress: OnProgress = lambda _: None) -> Iterator[Written]:
    """Write some shards; when this ends, those that were finished have their names, also after an error."""
    with Publisher() as publisher:
        for task in tasks:
            yield task.write(publisher, progress)


@dataclass(frozen=True)
class TaskGroup:
    """Tasks that one process is sent together."""

    tasks: Sequence[ShardTask]

    def __len__(self) -> int:
        return sum(map(len, self.tasks))

    def __call__(self) -> list[Written]:
        """Write the shards."""
        return list(write_each(self.tasks))


class Publisher:
    """Brings finished shards to the disk, a few at the same time, and gives them their names.

    A file system that is asked for one small file after another writes its journal for each. This order keeps the
    promise that a file under its name is complete, and a manifest that of a complete set, also after a power loss:

    1. `fsync` of the tar file and of its index, both under temporary names;
    2. the names: the tar file's, then that of the index;
    3. `fsync` of the directory, once, at the end of the `with` block;
    4. only then the caller writes the manifest: `fsync`, its name, `fsync` of the directory.

    Before 3 the disk may keep some of the names and lose others. Each file that has its name is complete, there is no
    manifest, and the next run writes what is missing. A kill loses what was made in `_SECONDS`, at the most.
    """

    def __init__(self) -> None:
        self._begun: list[ShardFile] = []  # and not finished; at most one
        self._waiting: list[ShardFile] = []  # to be published
        self._nbytes, self._published = 0, 0.0  # the first shard does not wait: a disk that fails says so at once
        self._folders: set[Path] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            with contextlib.suppress(OSError, StoppedError) if kind else contextlib.nullcontext():
                self._publish()
                for folder in self._folders:
                    sync_directory(folder)
        finally:
            for shard in self._begun:
                shard.close()

    def begin(self, path: Path, run: str, bytes_per_pack: int = 0) -> ShardFile:
        """Begin a shard; it is removed unless it is finished."""
        self._begun = [ShardFile(path, run, bytes_per_pack)]
        return self._begun[0]

    def finish(self, shard: ShardFile) -> Written:
        """Write the end of a shard and its index; it gets its name now or later."""
        written = shard.seal()
        self._begun = []
        self._waiting.append(shard)
        self._nbytes += written.entry.nbytes
        many = len(self._waiting) == TOGETHER or self._nbytes >= TOGETHER * CHUNK
        if many or time.monotonic() > self._published + _SECONDS:
            self._publish()
        return written

    def _publish(self) -> None:
        shards, self._waiting = self._waiting, []
        self._folders.update(shard.path.parent for shard in shards)
        try:
            # No threads between two calls: samples may be read in processes that are forked.
            with ThreadPoolExecutor(_THREADS) if len(shards) > 1 else contextlib.nullcontext() as pool:
                synced = map(ShardFile.sync, shards) if pool is None else pool.map(ShardFile.sync, shards)
                for shard, _ in zip(shards, synced, strict=True):
                    shard.publish()
        finally:
            for shard in shards:
                shard.close()
        self._nbytes, self._published = 0, time.monotonic()


class ShardFile:
    """A shard and its index on their way to their final names; what is closed before that leaves nothing."""

    def __init__(self, path: Path, run: str = "", bytes_per_pack: int = 0) -> None:
        self.path, self._run, self.builder = path, run, ShardBuilder(str(path), bytes_per_pack)
        self.add = self.builder.add
        with _named(path):
            self._files = [StagedFile(path, run).begin()]

    def close(self) -> None:
        """Remove what was not published."""
        for file in self._files:
            file.__exit__()

    def __len__(self) -> int:
        return len(self.builder)

    @property
    def nbytes(self) -> int:
        """Bytes of the samples so far, at most."""
        return self.builder.nbytes

    def flush(self) -> None:
        """Write what waits; a StoppedError when the file is not wanted any more."""
        with _named(self.path):
            self._files[0].write(self.builder.take())

    def seal(self) -> Written:
        """Write the end and the index, both under temporary names."""
        with _named(self.path):
            tar = self._files[0].stream
            self._files[0].write(self.builder.finish())
            tar.flush()
            nbytes = tar.tell()
            data = self.builder.index(nbytes, self._read)
            # Opened when the tar file is finished: an index that is older than its shard counts as stale.
            self._files.append(StagedFile(index_path(self.path), self._run).begin())
            self._files[1].write(data)
            self._files[1].stream.flush()
            return self.builder.written(data, nbytes)

    def sync(self) -> None:
        """Bring the files to the disk."""
        with _named(self.path):
            for file in self._files:
                file.sync()

    def publish(self) -> None:
        """Give the files, which are on the disk already, their names."""
        with _named(self.path):
            for file in self._files:
                file.publish()

    def _read(self, begin: int, end: int) -> bytes:
        self._files[0].stream.seek(begin)
        return self._files[0].stream.read(end - begin)


def remove_parts(directory: Path, prefix: str, run: str = "") -> None:
    """Remove the temporary files of a set that nobody writes any more."""
    of_set = rf"{re.escape(prefix)}(-[0-9]+\.tar(\.hri)?|\.plan\.json)"
    of_any = r"manifest\.(json|hrs)|.+\.[0-9a-f]{8}\.npy"
    _remove_parts(directory, rf"({of_set}|{of_any})", run)


def stop_parts(directory: Path, prefix: str, run: str) -> None:
    """Remove the temporary tar files of a run: who writes one stops at the next piece, and removes its index.

    The index stays here: a shard whose tar file has its name already is given that of the index next.
    """
    _remove_parts(directory, rf"{re.escape(prefix)}-[0-9]+\.tar", run)


def _remove_parts(directory: Path, names: str, run: str) -> None:
    name = re.compile(rf"\.{names}\.({re.escape(run) or '[0-9a-f]+'}-)?[0-9a-f]+\.part")
    for path in directory.iterdir():
        if name.fullmatch(path.name):
            with contextlib.suppress(FileNotFoundError):
                if not stat.S_ISREG(path.lstat().st_mode):
                    raise FileExistsError(f"{path} lies where a writer's own files go, and is no file: remove it")
                path.unlink()


class _Waiting(NamedTuple):
    """A sample that waits for its pack."""

    key: str
    members: tuple[str, ...]
    begin: bytes  # its key in UTF-8
    data: tuple[bytes, ...]


class ShardBuilder:
    """Takes samples, gives the bytes of their tar file piece by piece, and then those of its index.

    With `bytes_per_pack`, samples of at most so many bytes that follow one another are written together, in a pack of
    at most so many; but as members of their own where a pack of them would not be smaller.
    """

    def __init__(self, shard: str, bytes_per_pack: int = 0) -> None:
        self.shard, self.samples, self.pending = shard, Samples(), 0
        self.checksums: list[int] = []
        self._pieces: list[bytes] = []
        self._gaps: list[bytes] = []
        self._gap_checksums: list[int] = []
        # For each member of a layout: what follows the sample's key in its name, and the sum of these bytes.
        self._endings: dict[tuple[str, ...], list[tuple[bytes, int]]] = {}
        self._padding = b""
        self._bytes_per_pack = bytes_per_pack
        self._empty_pack()

    def __len__(self) -> int:
        return len(self.samples.keys) + len(self._waiting)

    @property
    def nbytes(self) -> int:
        """Bytes of the samples so far, at most: of those that wait it is not known yet how they are written."""
        if not self._waiting:
            return self.samples.end
        together = padded(OVERHEAD + self._table_bytes + self._data_bytes)
        return self.samples.end + min(together, self._plain_bytes)

    def add(self, key: Any, sample: Any) -> None:
        """Take one sample; a ShardError when no reader could find it again, or a tar file cannot hold it."""
        if not isinstance(key, str) or not isinstance(sample, Mapping):
            raise no_sample(key, sample, shard=self.shard)
        begin = check_key(key, shard=self.shard)
        members = tuple(sample)
        if members not in self._endings:
            self._new_layout(key, members)
        if self._bytes_per_pack:
            self._add_to_pack(key, members, begin, sample)
        else:
            self._add_members(key, members, begin, sample.values())

    def _add_members(self, key: str, members: tuple[str, ...], begin: bytes, values: Iterable[Any]) -> None:
        """Write a sample as members of its own."""
        begin_sum = sum(begin)
        samples, pieces, padding, at = self.samples, self._pieces, self._padding, self.samples.end
        for (ending, ending_sum), data in zip(self._endings[members], values, strict=True):
            if type(data) is not bytes:
                data = member_bytes(data, shard=self.shard, sample=key, member=(begin + ending).decode())
            name, size = begin + ending, len(data)
            if len(name) <= NAME and size <= MOST_MEMBER_BYTES:
                gap = padding + ustar_header(name, begin_sum + ending_sum, size)
            else:
                gap = padding + self._long_header(key, name, size)
            padding = PADDING[size % BLOCK]
            pieces += gap, data
            at += BLOCK
            samples.offsets.append(at)
            samples.sizes.append(size)
            at += size + len(padding)
            self._add_gap(gap)
            self.checksums.append(digest64(data) & MEMBER_BITS)
        # Padding waits with the next header: this many bytes are a little more than those in `pieces`.
        self.pending += at - samples.end
        self._padding, samples.end = padding, at
        samples.keys.append(key)
        samples.layout_of.append(samples.layouts[members])

    def _add_to_pack(self, key: str, members: tuple[str, ...], begin: bytes, sample: Mapping[str, Any]) -> None:
        """Let a sample wait for its pack, or write it where it is too large for one."""
        names = [begin + ending for ending, _ in self._endings[members]]
        data = tuple(
            one if type(one) is bytes else member_bytes(one, shard=self.shard, sample=key, member=name.decode())
            for one, name in zip(sample.values(), names, strict=True)
        )
        sizes = list(map(len, data))
        nbytes, in_table = sum(sizes), table_bytes(key, members)
        if nbytes > self._bytes_per_pack or in_table > MOST_TABLE:
            self._close_pack()
            self._add_members(key, members, begin, data)
            return
        for name, size in zip(names, sizes, strict=True):
            if len(name) > NAME:
                self._long_header(key, name, size)  # whether a sample can be stored does not depend on packs
        if self._data_bytes + nbytes > self._bytes_per_pack or self._table_bytes + in_table > MOST_TABLE:
            self._close_pack()
        self._waiting.append(_Waiting(key, members, begin, data))
        self._data_bytes += nbytes
        self._table_bytes += in_table
        self._plain_bytes += sum(BLOCK + padded(size) for size in sizes)

    def _close_pack(self) -> None:
        """Write what waits, as one member of the tar file if that takes fewer bytes."""
        waiting, plain = self._waiting, self._plain_bytes
        self._empty_pack()
        if not waiting:
            return
        head = pack_head([(one.key, one.members, list(map(len, one.data))) for one in waiting])
        size = len(head) + sum(len(data) for one in waiting for data in one.data)
        if BLOCK + padded(size) >= plain:
            for one in waiting:
                self._add_members(*one)
            return
        name, samples = pack_name(waiting[0].key), self.samples
        gap = self._padding + ustar_header(name, sum(name), size) + head
        self._pieces.append(gap)
        at = samples.end + BLOCK + len(head)
        for one in waiting:
            for data in one.data:
                samples.offsets.append(at)
                samples.sizes.append(len(data))
                at += len(data)
                self._add_gap(gap)
                self.checksums.append(digest64(data) & MEMBER_BITS)
                gap = b""
            self._pieces += one.data
            samples.keys.append(one.key)
            samples.layout_of.append(samples.layouts[one.members])
        self._padding = PADDING[size % BLOCK]
        self.pending += at + len(self._padding) - samples.end
        samples.end = at + len(self._padding)
        samples.packs += 1

    def _empty_pack(self) -> None:
        self._waiting: list[_Waiting] = []
        self._data_bytes = self._table_bytes = self._plain_bytes = 0

    def take(self) -> bytes:
        """The bytes that wait; they do not wait any more."""
        taken = b"".join(self._pieces)
        self._pieces.clear()
        self.pending = 0
        return taken

    def finish(self) -> bytes:
        """The last bytes of the tar file; a ShardError when a key occurs twice."""
        self._close_pack()
        if len(set(self.samples.keys)) < len(self.samples.keys):
            seen: set[str] = set()
            key = next(key for key in self.samples.keys if key in seen or seen.add(key))  # type: ignore[func-returns-value] # add returns None
            raise ShardError(f"the sample key {key!r} occurs twice: make keys unique", shard=self.shard, sample=key)
        last = self._padding + tar_end(self.samples.end)
        self._pieces.append(last)
        self._add_gap(last)
        if self._gaps:
            self._gap_checksums.append(digest64(b"".join(self._gaps)))
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

    def _add_gap(self, gap: bytes) -> None:
        self._gaps.append(gap)
        if len(self._gaps) == GAPS_PER_CHECKSUM:
            self._gap_checksums.append(digest64(b"".join(self._gaps)))
            self._gaps.clear()

    def _new_layout(self, key: str, members: tuple[str, ...]) -> None:
        endings = [(ending, sum(ending)) for ending in member_endings(members, shard=self.shard, sample=key)]
        self._endings[members] = endings
        self.samples.layouts[members] = len(self.samples.layouts)

    def _long_header(self, key: str, name: bytes, size: int) -> bytes:
        if size > MOST_MEMBER_BYTES:
            message = f"the member of {size} bytes does not fit: a USTAR header holds members to 8 GiB"
            raise ShardError(message, shard=self.shard, sample=key, member=name.decode())
        made = long_ustar_header(name, size)
        if made is None:
            raise _too_long(name, sample=key, shard=self.shard)
        return made


def load(samples: Any) -> MapStyle:
    """The samples themselves, where a function gives them."""
    known = hasattr(samples, "__getitem__") and not isinstance(samples, type)
    made: MapStyle = samples if known else samples()
    return made


def result(index: ShardIndex) -> Written:
    """What a shard is to the set."""
    return Written(ShardEntry.of(index), index.member_keys, key_hashes(index.keys))


def key_hashes(keys: Sequence[str]) -> npt.NDArray[np.uint64]:
    """64 bits of each key, shape [n_samples]."""
    hashed = (xxhash.xxh3_64_intdigest(key.encode("utf-8", "surrogateescape")) for key in keys)
    return np.fromiter(hashed, np.uint64, len(keys))


def read_sample(samples: MapStyle, position: int, number: int, path: Path) -> KeyedSample:
    """A sample for a shard; a ShardError that says its number in the set when it cannot be read."""
    try:
        key, sample = samples[position]
    except Exception as error:
        raise unreadable(error, number, path) from error
    return key, sample


def unreadable(error: Exception, number: int, path: Path) -> ShardError:
    """The error of a sample that its source failed to give."""
    message = f"failed to read sample {number}: {type(error).__name__}: {error}"
    return ShardError(message, shard=str(path), sample=f"number {number}")


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    # "No space left on device" alone does not say which of a hundred shards, or which device.
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        reason = error.strerror or errno.errorcode.get(error.errno, "")
        raise OSError(error.errno, f"{reason}: the shard was not written", str(path)) from error


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
    if len(begin) + len(_SHORTEST) > NAME and long_ustar_header(begin + _SHORTEST, 0) is None:
        raise _too_long(begin + _SHORTEST, sample=key, shard=shard)
    return begin


def check_sample(key: str, members: Iterable[object]) -> None:
    """Refuse a sample that readers would not give back as it is, or no header holds, before its data are read."""
    begin = check_key(key)
    for ending in member_endings(members, sample=key, shard=None):
        if len(begin) + len(ending) > NAME and long_ustar_header(begin + ending, 0) is None:
            raise _too_long(begin + ending, sample=key, shard=None)


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
