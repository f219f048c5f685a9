"""What is common to all sources: samples by their position, and their bytes beforehand."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import overload

import numpy as np
import numpy.typing as npt

Sample = tuple[str, Mapping[str, bytes]]


class Source(Sequence[Sample]):
    """Samples that are read when they are asked for; can be pickled for worker processes."""

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        where = range(len(self))[index]
        return self._sample(where) if isinstance(where, int) else [self._sample(one) for one in where]

    @abstractmethod
    def _sample(self, index: int) -> Sample: ...

    @abstractmethod
    def keys(self) -> Iterable[str]:
        """The keys of all samples, without reading these."""

    @abstractmethod
    def sizes(self) -> npt.NDArray[np.int64]:
        """Bytes of each sample in a tar file, headers and padding included, shape [n_samples]; at most."""

    @abstractmethod
    def stamps(self) -> Iterable[tuple[int, int]]:
        """Bytes of each file that is read, and the time of its last change, in nanoseconds."""

    @abstractmethod
    def part(self, start: int, stop: int) -> Source:
        """Some samples in a row, small enough to be sent to a worker process.

        Args:
            start: The first one.
            stop: The one after the last.
        """


def stamp(path: str | Path) -> tuple[int, int]:
    """Bytes of a file, and the time of its last change, in nanoseconds.

    Args:
        path: The file.
    """
    state = Path(path).stat()
    return state.st_size, state.st_mtime_ns


class Chain(Source):
    """Several sources, one after another.

    Args:
        sources: At least one.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._ends = list(accumulate(map(len, sources)))

    def __len__(self) -> int:
        return self._ends[-1]

    def _sample(self, index: int) -> Sample:
        number = bisect_right(self._ends, index)
        return self._sources[number][index - (self._ends[number] - len(self._sources[number]))]

    def keys(self) -> Iterable[str]:
        """As of `Source`."""
        return chain.from_iterable(source.keys() for source in self._sources)

    def stamps(self) -> Iterable[tuple[int, int]]:
        """As of `Source`."""
        return chain.from_iterable(source.stamps() for source in self._sources)

    def part(self, start: int, stop: int) -> Source:
        """As of `Source`."""
        begins = [end - len(source) for end, source in zip(self._ends, self._sources, strict=True)]
        cuts = [
            (source, max(start - begin, 0), min(stop - begin, len(source)))
            for begin, source in zip(begins, self._sources, strict=True)
        ]
        return Chain([source.part(first, last) for source, first, last in cuts if first < last])

    def sizes(self) -> npt.NDArray[np.int64]:
        """As of `Source`."""
        return np.concatenate([source.sizes() for source in self._sources])
