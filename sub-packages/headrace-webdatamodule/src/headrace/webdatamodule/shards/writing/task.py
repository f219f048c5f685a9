"""One shard: written, indexed and published by one call, in whatever process it is made."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from headrace.webdatamodule.shards.errors import ShardError
from headrace.webdatamodule.shards.format.files import sync_directory
from headrace.webdatamodule.shards.index.manifest import ShardEntry
from headrace.webdatamodule.shards.index.shard_index import ShardIndex, index_path
from headrace.webdatamodule.shards.writing.parts import Part
from headrace.webdatamodule.shards.writing.recording import CHUNK, Recording

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
