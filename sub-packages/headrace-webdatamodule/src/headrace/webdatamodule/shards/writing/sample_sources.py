"""Samples that are read from files when they are written, and the fingerprint that tells when these have changed."""

# What the methods of a source do, `SampleSource` says.
# ruff: noqa: D102

from __future__ import annotations

import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headrace.webdatamodule.shards.index.checksums import checksum64
from headrace.webdatamodule.shards.writing.plan import packed_bytes, stored_bytes
from headrace.webdatamodule.shards.writing.shard_builder import check_sample
from headrace.webdatamodule.shards.writing.shard_task import KeyedSample

FilesOfSample = dict[str, str]  # {member key: path}
_TICK = 0.02  # seconds that the clock of a file system may be behind


class SampleSource(ABC):
    """Samples that are read when they are asked for; can be pickled for worker processes."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int, /) -> KeyedSample: ...

    def __iter__(self) -> Iterator[KeyedSample]:
        return map(self.__getitem__, range(len(self)))

    @abstractmethod
    def names(self) -> Iterable[tuple[str, Iterable[str]]]:
        """The keys of all samples and of their members, without reading these."""

    def keys(self) -> Iterable[str]:
        """The keys of all samples."""
        return (key for key, _ in self.names())

    def check(self) -> None:
        """Refuse what cannot be stored before anything is written."""
        for key, members in self.names():
            check_sample(key, members)

    @abstractmethod
    def sizes(self) -> npt.NDArray[np.int64]:
        """Bytes of each sample in a tar file, headers and padding included, shape [n_samples]; at most."""

    @abstractmethod
    def member_bytes(self) -> Iterable[Mapping[str, int]]:
        """Bytes of the members of each sample, {member key: bytes}; of all of them together, at most."""

    def packed_sizes(self, bytes_per_pack: int) -> npt.NDArray[np.int64]:
        """Bytes of each sample in a tar file with packs, shape [n_samples]; see `packed_bytes`."""
        pairs = zip(self.keys(), self.member_bytes(), strict=True)
        return np.fromiter((packed_bytes(key, sizes, bytes_per_pack) for key, sizes in pairs), np.int64, len(self))

    @abstractmethod
    def stamps(self) -> Iterable[tuple[int, int]]:
        """Bytes of each file that is read, and the time of its last change, in nanoseconds."""

    @abstractmethod
    def part(self, start: int, stop: int) -> SampleSource:
        """Samples `start` to `stop - 1`, small enough to be sent to a worker process."""


class Files(SampleSource):
    """Samples of one or more files each. Bytes are copied as they are: nothing is unpickled."""

    def __init__(self, samples: Sequence[tuple[str, FilesOfSample]]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int, /) -> KeyedSample:
        key, members = self._samples[index]
        return key, {member: Path(path).read_bytes() for member, path in members.items()}

    def names(self) -> Iterable[tuple[str, Iterable[str]]]:
        return self._samples

    def stamps(self) -> Iterable[tuple[int, int]]:
        return (stamp(path) for _, members in self._samples for path in members.values())

    def sizes(self) -> npt.NDArray[np.int64]:
        return np.array([sum(map(stored_bytes, sizes.values())) for sizes in self.member_bytes()], np.int64)

    def member_bytes(self) -> Iterable[Mapping[str, int]]:
        return ({key: Path(path).stat().st_size for key, path in members.items()} for _, members in self._samples)

    def part(self, start: int, stop: int) -> SampleSource:
        return Files(self._samples[start:stop])


def stamps_fingerprint(stamps: Iterable[tuple[int, int]]) -> str:
    """16 hexadecimal digits that change with the sizes and times of files: shards with other ones are stale.

    Take it before the files are read: one that is saved while it is packed then makes its shards stale.
    """
    digest = checksum64(*(struct.pack("<qq", *each) for each in stamps))
    time.sleep(_TICK)  # so that a file that is saved from now on has another time
    return f"{digest:016x}"


def stamp(path: str | Path) -> tuple[int, int]:
    """Bytes of a file, and the time of its last change, in nanoseconds."""
    state = Path(path).stat()
    return state.st_size, state.st_mtime_ns
