"""One shard: written, indexed and published by one call, in whatever process it is made."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt
import xxhash

from headrace.webdatamodule.shards.errors import ShardError
from headrace.webdatamodule.shards.format import ustar
from headrace.webdatamodule.shards.format.files import lock, publish, sync_directory
from headrace.webdatamodule.shards.format.tar import BLOCK, RESERVED, Samples
from headrace.webdatamodule.shards.index.build import pack_index
from headrace.webdatamodule.shards.index.container import GAPS_PER_CHECKSUM
from headrace.webdatamodule.shards.index.manifest import ShardEntry
from headrace.webdatamodule.shards.index.shard_index import ShardIndex, index_path


class StoppedError(Exception):
    """A file under a temporary name was removed by those who do not want it any more."""


class Part:
    """A file on its way to its final name.

    Removed at the end of a `with` block, unless it was published.

    Args:
        path: The final name; its directory exists.
        run: Hexadecimal digits that tell all parts of one run from others.

    Raises:
        OSError: It cannot be made.
    """

    def __init__(self, path: Path, run: str) -> None:
        self.path = path
        self.temporary = path.with_name(f".{path.name}.{run}-{secrets.token_hex(4)}.part")
        self.stream = _locked(self.temporary)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # What was published is on the disk already; what was not may fail once more while it is closed.
        with contextlib.suppress(OSError):
            self.stream.close()
        self.temporary.unlink(missing_ok=True)

    def write(self, data: bytes) -> None:
        """Append bytes.

        Raises:
            StoppedError: The part was removed.
        """
        self.check()
        self.stream.write(data)

    def read(self, begin: int, end: int) -> bytes:
        """The bytes between two positions."""
        self.stream.seek(begin)
        return self.stream.read(end - begin)

    def check(self) -> None:
        """See whether the part is wanted.

        Raises:
            StoppedError: It was removed.
        """
        if not os.fstat(self.stream.fileno()).st_nlink:
            raise StoppedError(f"{self.temporary} was removed while it was written")

    def sync(self) -> None:
        """Bring all bytes to the disk."""
        self.stream.flush()
        os.fsync(self.stream.fileno())

    def publish(self) -> None:
        """Give the file its final name, in place of what has it.

        Raises:
            StoppedError: The part was removed.
        """
        try:
            self.temporary.replace(self.path)
        except FileNotFoundError as error:
            raise StoppedError(f"{self.temporary} was removed before it was whole") from error


def remove_run(directory: Path, prefix: str, run: str) -> None:
    """Remove the parts of one run; who writes them stops at the next piece.

    Args:
        directory: Where they lie.
        prefix: Begin of their final names.
        run: As of `Part`.
    """
    for path in _parts(directory, prefix, re.escape(run)):
        path.unlink(missing_ok=True)


def remove_abandoned(directory: Path, prefix: str) -> None:
    """Remove the parts that nobody writes any more, because the writer was killed.

    Args:
        directory: Where they lie.
        prefix: Begin of their final names.
    """
    for path in _parts(directory, prefix, "[0-9a-f]+"):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise FileExistsError(f"{path} lies where a writer's own files go, and is no file: remove it")
        with contextlib.suppress(FileNotFoundError), path.open("r+b") as stream:
            if lock(stream):
                path.unlink()


def write_locked(path: Path, data: bytes) -> None:
    """Write a small file to the disk, whole; what a killed writer leaves of it is found by `remove_abandoned`.

    Args:
        path: Its final name; the directory exists.
        data: Its bytes.
    """
    with Part(path, "0") as part:
        part.write(data)
        part.sync()
        part.publish()
    sync_directory(path.parent)


def _parts(directory: Path, prefix: str, run: str) -> list[Path]:
    of_set = rf"{re.escape(prefix)}(-[0-9]+\.tar(\.hri)?|\.plan\.json)"
    name = re.compile(rf"\.({of_set}|manifest\.json)\.{run}-[0-9a-f]+\.part")
    return [path for path in directory.iterdir() if name.fullmatch(path.name)]


def _locked(path: Path) -> BinaryIO:
    while True:
        stream = path.open("w+b")
        lock(stream)
        if os.fstat(stream.fileno()).st_nlink:
            return stream
        stream.close()  # taken for abandoned between these lines


def check_key(key: str, *, shard: str | None = None) -> bytes:
    r"""Refuse a sample key that readers of tar shards would not give back as it is.

    Args:
        key: The sample's key. Readers cut a member's name at its first dot, and skip names that begin
            with two underscores.
        shard: Named in the error.

    Returns:
        The key in UTF-8.

    Raises:
        ShardError: The key is empty, holds a dot or a NUL, is an absolute path, begins with "__", or is no UTF-8.

    >>> check_key("ü/1")
    b'\xc3\xbc/1'
    """
    if not key or "." in key or "\0" in key or key.startswith(("/", "__")) or key.endswith("/"):
        message = f"the sample key {key!r} cannot be stored: give a text without dots, not empty,"
        raise ShardError(f"{message} not beginning with '/' or '__', not ending with '/'", shard=shard)
    return _encoded(key, key, shard)


def member_endings(suffixes: Iterable[object], *, sample: str, shard: str) -> list[bytes]:
    """What follows the sample's key in the names of its members, checked.

    Args:
        suffixes: The member keys of one sample.
        sample: The sample's key, named in errors.
        shard: Named in errors.

    Returns:
        A dot and the member's key in UTF-8, for each.

    Raises:
        ShardError: Names that readers would skip, split elsewhere or take for one or for their own; or there are none.

    >>> member_endings(["txt", "seg.png"], sample="a", shard="a-000000.tar")
    [b'.txt', b'.seg.png']
    """
    endings: dict[str, bytes] = {}  # readers fold the case of member keys
    for suffix in suffixes:
        if not isinstance(suffix, str) or not re.fullmatch(r"[^/\0]+", suffix) or suffix.lower() in endings:
            allowed = "a text without '/', unlike the sample's other member keys even in lower case"
            raise ShardError(f"the member key {suffix!r} cannot be stored: give {allowed}", shard=shard, sample=sample)
        if suffix.lower() in RESERVED:
            message = "the member has a key that readers use for themselves: rename it"
            raise ShardError(message, shard=shard, sample=sample, member=f"{sample}.{suffix}")
        endings[suffix.lower()] = _encoded(f".{suffix}", sample, shard)
    if not endings:
        raise ShardError("the sample has no members: give at least one", shard=shard, sample=sample)
    return list(endings.values())


def member_bytes(data: object, *, sample: str, member: str, shard: str | None = None) -> bytes:
    r"""The bytes of a member.

    Args:
        data: Bytes, a bytearray, or a memory view of anything.
        sample: The sample's key, named in errors.
        member: The member's name, named in errors.
        shard: Named in errors.

    Raises:
        ShardError: It is something else; the error says how to make bytes of it.

    >>> member_bytes(memoryview(np.arange(2, dtype="<i2")), sample="a", member="a.bin")
    b'\x00\x00\x01\x00'
    """
    if isinstance(data, bytes | bytearray | memoryview):
        return bytes(data)
    message = f"a member must be bytes, got {type(data).__name__}: {_how_to_encode(data)}"
    raise ShardError(message, shard=shard, sample=sample, member=member)


def _how_to_encode(data: object) -> str:
    if isinstance(data, str):
        return "encode it, such as with text.encode()"
    if isinstance(data, np.ndarray | np.generic):
        cure = "numpy.save it into an io.BytesIO as a member 'npy' and give its getvalue()"
        return f"{cure}, or use safetensors.numpy.save for a member 'safetensors'"
    if type(data).__module__.partition(".")[0] == "torch":
        return "use safetensors.torch.save for a member 'safetensors', or torch.save it into an io.BytesIO as a 'pt'"
    return "encode it, such as with json.dumps(value).encode() for a member 'json'"


def _encoded(text: str, sample: str, shard: str | None) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ShardError(f"{text!r} cannot be written as UTF-8: {error.reason}", shard=shard, sample=sample) from error


CHUNK = 1 << 20  # bytes that are worth a write


class Layout(NamedTuple):
    """What samples with the same member keys have in common.

    Args:
        number: In the order of their first samples.
        endings: For each member what follows the sample's key in its name, and the sum of these bytes.
    """

    number: int
    endings: tuple[tuple[bytes, int], ...]


class Recording:
    """Takes samples, gives the bytes of their tar file piece by piece, and remembers what the index says of them.

    Args:
        shard: Path of the tar file, named in errors.

    Attributes:
        samples: What was taken.
        checksums: `checksum32` of each member's data.
        pending: How many bytes wait to be taken away.
    """

    def __init__(self, shard: str) -> None:
        self.shard, self.samples, self.pending = shard, Samples(), 0
        self.checksums: list[int] = []
        self._pieces: list[bytes] = []
        self._gaps: list[bytes] = []
        self._gap_checksums: list[int] = []
        self._layouts: dict[tuple[str, ...], Layout] = {}
        self._padding = b""

    def add(self, key: Any, sample: Any) -> None:
        """Take one sample.

        Args:
            key: The sample's key.
            sample: {member key: bytes}.

        Raises:
            ShardError: No reader could find it again, or a tar file cannot hold it.
        """
        if not isinstance(key, str) or not isinstance(sample, Mapping):
            message = f"a sample must be a pair of a text and {{member key: bytes}}, got {key!r:.80} and {sample!r:.80}"
            raise ShardError(message, shard=self.shard)
        begin = check_key(key, shard=self.shard)
        layout = self._layouts.get(tuple(sample)) or self._new_layout(key, sample)
        begin_sum = sum(begin)
        samples, pieces, padding, at = self.samples, self._pieces, self._padding, self.samples.end
        for (ending, ending_sum), data in zip(layout.endings, sample.values(), strict=True):
            if type(data) is not bytes:
                data = member_bytes(data, shard=self.shard, sample=key, member=(begin + ending).decode())
            name, size = begin + ending, len(data)
            if len(name) <= ustar.NAME and size <= ustar.MOST_BYTES:
                gap = padding + ustar.header(name, begin_sum + ending_sum, size)
            else:
                gap = padding + self._rare(key, name, size)
            padding = ustar.PADDING[size % BLOCK]
            pieces += gap, data
            at += BLOCK
            samples.offsets.append(at)
            samples.sizes.append(size)
            at += size + len(padding)
            self._gap(gap)
            self.checksums.append(xxhash.xxh3_64_intdigest(data) & 0xFFFFFFFF)
        # Padding waits with the next header: this many bytes are a little more than those in `pieces`.
        self.pending += at - samples.end
        self._padding, samples.end = padding, at
        samples.keys.append(key)
        samples.layout_of.append(layout.number)

    def take(self) -> bytes:
        """The bytes that wait; they do not wait any more."""
        taken = b"".join(self._pieces)
        self._pieces.clear()
        self.pending = 0
        return taken

    def finish(self) -> bytes:
        """The last bytes of the tar file.

        Raises:
            ShardError: A key occurs twice.
        """
        if len(set(self.samples.keys)) < len(self.samples.keys):
            seen: set[str] = set()
            key = next(key for key in self.samples.keys if key in seen or seen.add(key))  # type: ignore[func-returns-value] # add returns None
            raise ShardError(f"the sample key {key!r} occurs twice: make keys unique", shard=self.shard, sample=key)
        last = self._padding + ustar.end(self.samples.end)
        self._pieces.append(last)
        self._gap(last)
        self._gap_checksums.append(xxhash.xxh3_64_intdigest(b"".join(self._gaps))) if self._gaps else None
        return self.take()

    def index(self, nbytes: int, read: Callable[[int, int], bytes]) -> bytes:
        """The bytes of the index: the same as `build_index` makes of the tar file, without reading it again.

        Args:
            nbytes: Bytes of the tar file.
            read: Gives its bytes between begin and end; asked for three short pieces.
        """
        return pack_index(self.samples, nbytes, self.checksums, self._gap_checksums, read)

    def _gap(self, gap: bytes) -> None:
        self._gaps.append(gap)
        if len(self._gaps) == GAPS_PER_CHECKSUM:
            self._gap_checksums.append(xxhash.xxh3_64_intdigest(b"".join(self._gaps)))
            self._gaps.clear()

    def _new_layout(self, key: str, sample: Mapping[str, bytes]) -> Layout:
        endings = member_endings(sample, shard=self.shard, sample=key)
        layout = Layout(len(self._layouts), tuple((ending, sum(ending)) for ending in endings))
        self._layouts[tuple(sample)] = layout
        self.samples.layouts[tuple(sample)] = layout.number
        return layout

    def _rare(self, key: str, name: bytes, size: int) -> bytes:
        made = ustar.long_header(name, size) if size <= ustar.MOST_BYTES else None
        if made is None:
            hint = "a USTAR header holds names to 100 bytes (255 with directories) and members to 8 GiB"
            message = f"the member of {size} bytes with a name of {len(name)} does not fit: {hint}"
            raise ShardError(message, shard=self.shard, sample=key, member=name.decode())
        return made


Sample = tuple[str, Mapping[str, bytes]]


def write_tar(path: Path, samples: Iterable[Sample]) -> None:
    """Write one shard: a plain USTAR file whose bytes depend on the samples only.

    Under `path` there is either the whole shard, what was there before, or nothing.

    Args:
        path: Final name of the shard. Its directory exists.
        samples: Pairs of a sample's key and its members, {member key: bytes}.

    Raises:
        ShardError: A sample that no reader could find again, or that a tar file cannot hold; it names the sample.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> write_tar(folder / "a-000000.tar", [("one", {"txt": b"1"}), ("two", {"txt": b"22"})])
    >>> list(members(folder / "a-000000.tar"))
    [('one.txt', 1), ('two.txt', 2)]
    """
    publish({path: stage_tar(path, samples)})


def stage_tar(path: Path, samples: Iterable[Sample]) -> Path:
    """Write a shard, to the disk, under a temporary name beside its final one.

    Args:
        path: Final name of the shard.
        samples: As for `write_tar`.

    Returns:
        The temporary name, which no reader's glob finds. Nothing is left behind when an error occurs.
    """
    # The token keeps two writers apart, also on two hosts; the leading dot keeps readers' globs away.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with temporary.open("wb") as stream:
            _write(stream, samples, shard=str(path))
            stream.flush()
            os.fsync(stream.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def _write(stream: BinaryIO, samples: Iterable[Sample], *, shard: str) -> None:
    recording = Recording(shard)
    for key, sample in samples:
        recording.add(key, sample)
        if recording.pending >= CHUNK:
            stream.write(recording.take())
    stream.write(recording.finish())


def members(path: Path) -> Iterator[tuple[str, int]]:
    """Names and sizes in bytes of a shard's members, in order, read from the headers alone.

    Args:
        path: A tar file.

    Yields:
        (member name, size).
    """
    with tarfile.open(path, mode="r:", encoding="utf-8") as tar:
        for header in tar:
            yield header.name, header.size


_SECONDS = 0.2

Pair = tuple[str, Mapping[str, bytes]]

Shown = Callable[[int], object]


class MapStyle(Protocol):
    """Samples by their positions; a list of pairs is one."""

    def __len__(self) -> int: ...

    def __getitem__(self, position: int, /) -> Pair: ...


class Written(NamedTuple):
    """What came of one shard.

    Args:
        entry: For the manifest.
        members: The member keys that occur, in lower case.
        hashes: 64 bits of each sample's key, shape [n_samples].
    """

    entry: ShardEntry
    members: tuple[str, ...]
    hashes: npt.NDArray[np.uint64]


@dataclass(frozen=True)
class ShardTask:
    """Writes one shard; can be pickled when its samples can.

    Args:
        path: Its final name.
        samples: What gives the samples, by their positions in it, or a function that gives that.
        start: Position of the first sample.
        stop: The one after the last.
        first: Number of the first sample in the whole set.
        run: Hexadecimal digits that tell this run's files from others.
    """

    path: Path
    samples: MapStyle | Callable[[], MapStyle]
    start: int
    stop: int
    first: int
    run: str

    def __len__(self) -> int:
        return self.stop - self.start

    def __call__(self, shown: Shown | None = None) -> Written:
        """Write the shard.

        Args:
            shown: Called now and then with the number of samples since the last call.

        Raises:
            ShardError: A sample cannot be had or stored; it names shard and sample.
            OSError: The shard cannot be written; it names the shard.
            StoppedError: Its parts were removed.
        """
        try:
            return self._write(shown or _nothing)
        except OSError as error:
            raise _named(error, self.path) from error

    def _write(self, shown: Shown) -> Written:
        recording = Recording(str(self.path))
        with Part(self.path, self.run) as tar:
            begin = os.fstat(tar.stream.fileno()).st_mtime_ns
            self._fill(tar, recording, shown)
            nbytes = tar.stream.tell()
            data = recording.index(nbytes, tar.read)
            # What was read and is saved again meanwhile is newer than this, even when the clock did not move between.
            with contextlib.suppress(PermissionError):  # who may write need not be the owner, on some disks
                os.utime(tar.stream.fileno(), ns=(begin - 1, begin - 1))
            tar.sync()
            # Opened when the tar file is finished: an index that is older than its shard counts as stale.
            with Part(index_path(self.path), self.run) as index:
                index.write(data)
                index.sync()
                tar.publish()
                index.publish()
        sync_directory(self.path.parent)
        return result(ShardIndex(data, shard=str(self.path)), recording.samples.keys)

    def _fill(self, tar: Part, recording: Recording, shown: Shown) -> None:
        samples = opened(self.samples)
        add, looked, told = recording.add, time.monotonic(), self.start
        for position in range(self.start, self.stop):
            add(*self.sample(samples, position))
            now = time.monotonic()
            if recording.pending >= CHUNK or now > looked + _SECONDS:
                tar.write(recording.take())
                shown(position + 1 - told)
                looked, told = now, position + 1
        tar.write(recording.finish())
        tar.stream.flush()
        shown(self.stop - told)

    def sample(self, samples: MapStyle, position: int) -> Pair:
        """One of the task's samples.

        Args:
            samples: As of `opened`.
            position: Its position in them.

        Raises:
            ShardError: It cannot be had.
        """
        try:
            key, sample = samples[position]
        except Exception as error:
            number = self.first + position - self.start
            message = f"sample number {number} cannot be had: {type(error).__name__}: {error}"
            raise ShardError(message, shard=str(self.path), sample=f"number {number}") from error
        return key, sample


def opened(samples: Any) -> MapStyle:
    """The samples themselves, where a function gives them.

    Args:
        samples: A sequence, or a function without arguments that gives one.
    """
    known = hasattr(samples, "__getitem__") and not isinstance(samples, type)
    made: MapStyle = samples if known else samples()
    return made


def result(index: ShardIndex, keys: Sequence[str] | None = None) -> Written:
    """What a shard is to the set.

    Args:
        index: Of the shard.
        keys: Of its samples; those of the index when None.
    """
    hashes = key_hashes(index.keys if keys is None else keys)
    return Written(ShardEntry.of(index), index.member_keys, hashes)


def key_hashes(keys: Sequence[str]) -> npt.NDArray[np.uint64]:
    """64 bits of each key.

    Args:
        keys: Of samples.

    Returns:
        Shape [n_samples].
    """
    hashed = (xxhash.xxh3_64_intdigest(key.encode("utf-8", "surrogateescape")) for key in keys)
    return np.fromiter(hashed, np.uint64, len(keys))


def _nothing(_: int) -> None:
    pass


def _named(error: OSError, path: Path) -> OSError:
    # "No space left on device" alone does not say which of a hundred shards, or which device.
    if error.errno is None:
        return error
    reason = error.strerror or errno.errorcode.get(error.errno, "")
    return OSError(error.errno, f"{reason}: the shard was not written", str(path))
