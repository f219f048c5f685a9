"""Mixtures whose data grew in a run: what each source had drawn there, and its passes from there on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.weighted_sampler._arguments import MAX_POSITION
from headrace.weighted_sampler._permutation import Indices, SourceEpochs
from headrace.weighted_sampler._shared.checks import checked_int
from headrace.weighted_sampler._shared.random import fold_in

DRAWS = 1  # purpose of the keys of passes


class GrownPasses(SourceEpochs):
    """The passes over a source that grew: the pass under way ends with its old samples, later ones have all of them.

    Draws are numbered as if the source had always had its present size. The pass under way keeps its number, and its
    remaining samples are its last draws. The earlier numbers of that pass stand for the other samples, and are never
    drawn again, so every pass has each sample once.

    Args:
        size: Number of samples.
        key: Of the passes that come.
        before: The passes up to here.
        drawn: Draws of them up to here.

    >>> before = SourceEpochs(4, key=0)
    >>> passes = GrownPasses(6, 1, before, drawn=7)
    >>> passes.first, passes(np.arange(11, 12)).tolist() == before(np.arange(7, 8)).tolist()
    (11, True)
    >>> sorted(passes(np.arange(12, 18)).tolist())
    [0, 1, 2, 3, 4, 5]
    """

    def __init__(self, size: int, key: int, before: SourceEpochs, drawn: int) -> None:
        super().__init__(size, key)
        self._before, self._drawn = before, drawn
        self._number, self._done = divmod(drawn, before.size) if before.size else (0, 0)
        self._left = before.size - self._done if self._done else 0  # of the pass under way

    @property
    def first(self) -> int:
        """Number of the next draw."""
        return self._number * self.size + (self.size - self._left if self._left else 0)

    def size_of(self, number: int) -> int:
        """Number of samples of a pass."""
        is_new = number > self._number or (number == self._number and not self._left)
        return self.size if is_new else self._before.size_of(number)

    def count(self, draws: int) -> int:
        """How many draws there were before one of this number."""
        return self._before.count(self._drawn) + draws - self.first

    def seen(self, draws: int) -> int:
        """How many distinct samples there were before a draw of this number."""
        if self._left and draws // self.size == self._number:
            return self._before.seen(self._drawn + draws - self.first)
        return super().seen(draws)

    def __call__(self, draws: Indices) -> Indices:
        """Return the elements of some draws, shape ``[m]``."""
        if not self._left:
            return super().__call__(draws)
        under_way = draws // self.size == self._number
        found = np.empty_like(draws)
        found[~under_way] = super().__call__(draws[~under_way])
        found[under_way] = self._under_way(draws[under_way] - self._number * self.size)
        return found

    def _under_way(self, places: Indices) -> Indices:
        """Return the samples of the pass that was under way: those that came, the new ones, those that are left."""
        begin = self.size - self._left
        found = places - self._done + self._before.size  # the new ones
        old = (places < self._done) | (places >= begin)
        earlier = np.where(places < self._done, places, places - begin + self._done)[old]
        found[old] = self._before(self._number * self._before.size + earlier)
        return found


def changed(error: object) -> ValueError:
    """Return the error of a recorded mixture that no state has."""
    return ValueError(f"state['mixture'] must be as state_dict() returned it: it was changed ({error})")


@dataclass(frozen=True)
class Growth:
    """Where the data of a mixture grew last.

    Attributes:
        epoch: The first epoch of the present data.
        first: Number of each source's next draw there.
        earlier: For each source the sizes that it had before, each with its draws up to its end.
    """

    epoch: int
    first: tuple[int, ...]
    earlier: tuple[tuple[tuple[int, int], ...], ...]

    def plain(self) -> dict[str, Any]:
        """Return the same in JSON."""
        sources = [
            [first, *([size, drawn] for size, drawn in sizes)]
            for first, sizes in zip(self.first, self.earlier, strict=True)
        ]
        return {"epoch": self.epoch, "sources": sources}

    @classmethod
    def of(cls, plain: Mapping[str, Any] | None, ranges: Sequence[tuple[int, int]]) -> Growth | None:
        """Return what a state says of the growth of these sources; None if they have not grown.

        Raises:
            ValueError: If it was changed.
        """
        if plain is None:
            return None
        try:
            first = tuple(checked_int("draw", source[0], 0, MAX_POSITION) for source in plain["sources"])
            earlier = tuple(
                tuple((checked_int("size", size, 0), checked_int("draw", drawn, 0)) for size, drawn in source[1:])
                for source in plain["sources"]
            )
            growth = cls(checked_int("epoch", plain["epoch"], 0, MAX_POSITION), first, earlier)
            sizes = [
                [*(size for size, _ in own), end - begin] for own, (begin, end) in zip(earlier, ranges, strict=True)
            ]
            fits = all(own == sorted(own) for own in sizes)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise changed(error) from None
        if not fits:
            raise changed("sources that shrank")
        return growth


def source_epochs(seed: int, ranges: Sequence[tuple[int, int]], growth: Growth | None = None) -> list[SourceEpochs]:
    """The passes over each source; the bounds are in the keys, so that other sources change nothing."""
    begins, ends = np.array(ranges, np.uint64).T
    keys = fold_in(seed, DRAWS, begins, ends).tolist()
    passes = [SourceEpochs(end - begin, key) for (begin, end), key in zip(ranges, keys, strict=True)]
    for place, sizes in enumerate(() if growth is None else growth.earlier):
        if sizes:
            passes[place] = _grown_passes(seed, *ranges[place], sizes)
    return passes


def _grown_passes(seed: int, begin: int, end: int, earlier: Sequence[tuple[int, int]]) -> GrownPasses:
    """The passes over a source that had other sizes before, each up to a number of draws."""
    *before, (size, drawn) = earlier
    if before:
        passes: SourceEpochs = _grown_passes(seed, begin, begin + size, before)
    else:
        passes = SourceEpochs(size, _key(seed, begin, begin + size))
    return GrownPasses(end - begin, _key(seed, begin, end), passes, drawn)


def _key(seed: int, begin: int, end: int) -> int:
    return int(fold_in(seed, DRAWS, begin, end)[0])


def grown(
    before: Growth | None,
    old: Sequence[tuple[int, int]],
    new: Sequence[tuple[int, int]],
    drawn: Sequence[int],
    epoch: int,
    seed: int,
) -> Growth:
    """Return what there is to know of a mixture that grows at the beginning of an epoch.

    Args:
        before: Of its data up to here.
        old: The ranges of the sources up to here.
        new: The ranges from here on; each begins with an old one, or is new.
        drawn: Draws of each old source.
        epoch: Where it grows.
        seed: Of the passes.
    """
    known = {
        begin: (end - begin, count, before.earlier[place] if before else ())
        for place, ((begin, end), count) in enumerate(zip(old, drawn, strict=True))
        if end > begin
    }
    first, earlier = [], []
    for begin, end in new:
        size, count, sizes = known.get(begin, (0, 0, ())) if end > begin else (0, 0, ())
        if size and size < end - begin:
            sizes = (*sizes, (size, count))
            count = _grown_passes(seed, begin, end, sizes).first
        first.append(count)
        earlier.append(tuple(sizes))
    return Growth(epoch, tuple(first), tuple(earlier))
