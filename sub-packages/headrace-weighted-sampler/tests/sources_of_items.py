"""Sources of streams for the tests: with a state, without one, with a state of their iterators, with both."""

from collections.abc import Iterator, Sequence
from typing import Any, Generic, Literal, TypeVar

import pytest
from torch.utils.data import IterableDataset

from headrace.weighted_sampler import InterleavedDataset, Stopping

T = TypeVar("T")
Item = tuple[str, int]
Kind = Literal["plain", "iterator", "dataset", "both"]

KINDS: list[Kind] = ["plain", "iterator", "dataset", "both"]
IGNORE_SKIPS = pytest.mark.filterwarnings("ignore:.*are reread and discarded:UserWarning")


class Plain(IterableDataset[Item]):
    """Items ``(name, number)``; no state. The epoch it is told moves the numbers by 1,000."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size, self.epoch, self.begun = name, size, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Item]:
        self.begun += 1
        return (self._item(number, self.epoch) for number in range(self.size))

    def _item(self, number: int, epoch: int) -> Item:
        return self.name, epoch * 1000 + number


class Cursor(Iterator[Item]):
    """An iterator over a ``Plain`` source."""

    def __init__(self, source: Plain, start: int = 0) -> None:
        self.source, self.epoch, self.at = source, source.epoch, start

    def __next__(self) -> Item:
        if self.at >= self.source.size:
            raise StopIteration
        self.at += 1
        return self.source._item(self.at - 1, self.epoch)


class StatefulCursor(Cursor):
    """An iterator that says where it stands."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.at = state_dict["at"]


class WithStatefulIterator(Plain):
    """Its iterators say where they stand."""

    def __iter__(self) -> Iterator[Item]:
        self.begun += 1
        return StatefulCursor(self)


class StatefulSource(Plain):
    """The source says where its latest iterator stands."""

    cursor: Cursor | None = None
    start = 0

    def __iter__(self) -> Iterator[Item]:
        self.begun += 1
        self.cursor = self.make(self.start)
        self.start = 0
        return self.cursor

    def make(self, start: int) -> Cursor:
        return Cursor(self, start)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.cursor.at if self.cursor else self.start}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.start = state_dict["at"]


class StatefulBoth(StatefulSource):
    """The source and its iterators say where they stand."""

    def make(self, start: int) -> Cursor:
        return StatefulCursor(self, start)


CLASSES: dict[Kind, type[Plain]] = {
    "plain": Plain,
    "iterator": WithStatefulIterator,
    "dataset": StatefulSource,
    "both": StatefulBoth,
}


class Again(Generic[T]):
    """An iterable that is no sequence, with nothing else to it."""

    def __init__(self, items: Sequence[T]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[T]:
        return iter(self.items)


def make(
    kinds: Sequence[Kind], sizes: Sequence[int], weights: Sequence[int], stopping: Stopping, seed: int = 0
) -> InterleavedDataset[Item]:
    names = [f"s{place}" for place in range(len(sizes))]
    sources = {name: CLASSES[kind](name, size) for name, kind, size in zip(names, kinds, sizes, strict=True)}
    return InterleavedDataset(sources, dict(zip(names, weights, strict=True)), seed=seed, stopping=stopping)
