"""One shard: written, indexed and published by one call, in whatever process it is made."""

from __future__ import annotations

import contextlib
import errno
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Protocol, Self

from headrace.webdatamodule.shards.errors import ShardError
from headrace.webdatamodule.shards.format.files import StagedFile, StoppedError, sync_directory
from headrace.webdatamodule.shards.index.shard_index import index_path
from headrace.webdatamodule.shards.writing.shard_builder import PIECE, ShardBuilder, Written

_MANY = 256  # samples that are taken together, where they are in memory
_SECONDS = 0.2
# Shards that are published together, and threads that bring them to the disk. On ext4 this took hardly longer than no
# fsync at all; more of both did not help.
TOGETHER, _THREADS = 16, 4
KeyedSample = tuple[str, Mapping[str, bytes]]
OnProgress = Callable[[int], object]


class MapStyle(Protocol):
    """Samples by their positions; a list of pairs is one."""

    def __len__(self) -> int: ...

    def __getitem__(self, position: int, /) -> KeyedSample: ...


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
        shard, reported = publisher.begin(self.path, self.run, self.bytes_per_pack), self.start
        for taken in self._give(samples, shard.builder):
            if shard.is_due:
                shard.flush()
                progress(taken - reported)
                reported = taken
        written = publisher.finish(shard)
        progress(self.stop - reported)
        return written

    def _give(self, samples: Any, builder: ShardBuilder) -> Iterator[int]:
        """Give all samples to a builder; yields how far that is, after each, or after many that are in memory."""
        many = _MANY if type(samples) in (list, tuple) else 1  # a subclass may make them when they are asked for
        for first in range(self.start, self.stop, many):
            end = min(first + many, self.stop)
            if many > 1 and builder.add_plain(samples[first:end]):
                yield end
                continue
            for position in range(first, end):
                builder.add(*self.sample(samples, position))
                yield position + 1

    def sample(self, samples: MapStyle, position: int) -> KeyedSample:
        """One of the task's samples; a ShardError that says its number in the set when it cannot be read."""
        try:
            key, sample = samples[position]
        except Exception as error:
            raise unreadable(error, self.first + position - self.start, self.path) from error
        return key, sample


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
        many = len(self._waiting) == TOGETHER or self._nbytes >= TOGETHER * PIECE
        if many or monotonic() > self._published + _SECONDS:
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
        self._nbytes, self._published = 0, monotonic()


class ShardFile:
    """A shard and its index on their way to their final names; what is closed before that leaves nothing."""

    def __init__(self, path: Path, run: str = "", bytes_per_pack: int = 0) -> None:
        self.path, self._run, self.builder = path, run, ShardBuilder(str(path), bytes_per_pack)
        self.add, self._due = self.builder.add, monotonic() + _SECONDS
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

    @property
    def is_due(self) -> bool:
        """Whether what waits is worth a write, or has waited for long."""
        return self.builder.pending >= PIECE or monotonic() > self._due

    def flush(self) -> None:
        """Write what waits; a StoppedError when the file is not wanted any more."""
        with _named(self.path):
            self._files[0].write(self.builder.take())
        self._due = monotonic() + _SECONDS

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


def load(samples: Any) -> MapStyle:
    """The samples themselves, where a function gives them."""
    known = hasattr(samples, "__getitem__") and not isinstance(samples, type)
    made: MapStyle = samples if known else samples()
    return made


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
