"""Short samples first: which share of the batches, or of the samples, may come after how many steps."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching.planning.order import ShuffledOrder
from headrace.size_aware_batching.planning.prepared import PreparedSizes
from headrace.size_aware_batching.planning.random import Words, fold_in
from headrace.size_aware_batching.planning.strata import sorted_by_size

Competence = Callable[[NDArray[np.int64]], NDArray[np.float64]]  # batches before -> share of the batches that may come
Amounts = Callable[[NDArray[Any]], NDArray[Any]]  # samples -> what they take of each limit, shape ``[n, k]``

FIRST = 0.01  # the share at the beginning, as in the paper
WINDOWS, WINDOW = 16, (32, 512)  # windows of a ramp, about, and the fewest and most batches of one
MOST_STAGES = 64  # of a ramp: for each of them all samples are looked at
PIECE = 2**12  # samples that are looked at together, at first
TOGETHER = 2  # ramps' worth of batches that are planned together: the long ones that wait come by their end


def competence(passed: NDArray[np.int64], ramp: int) -> NDArray[np.float64]:
    """Return the share of all, the shortest ones, that may come after so many since the first epoch.

    The square root of Platanios et al., "Competence-based curriculum learning for neural machine translation" (NAACL
    2019): longer ones come in at a rate that falls as there are more to choose from.

    >>> competence(np.array([0, 250, 1000, 5000]), 1000).round(2).tolist()
    [0.01, 0.5, 1.0, 1.0]
    """
    return np.sqrt(FIRST**2 + (1 - FIRST**2) * np.minimum(passed / ramp, 1))


def turns(words: Words, shares: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return when each of some things comes: each turn draws one of those left in the first share of all.

    Where a share holds nothing any more, the next one comes. Shares do not fall.

    >>> turns(np.array([5, 5, 5], np.uint64), np.array([0.1, 0.1, 1.0])).tolist()
    [0, 1, 2]
    """
    count = len(words)
    stops = np.maximum(np.ceil(shares * count).astype(np.int64), np.arange(1, count + 1)).tolist()
    found = np.empty(count, np.int64)
    left: list[int] = []
    known = 0
    for turn, (stop, word) in enumerate(zip(stops, (words >> np.uint64(1)).tolist(), strict=True)):
        left.extend(range(known, stop))
        known = max(known, stop)
        drawn = word % len(left)
        left[drawn], left[-1] = left[-1], left[drawn]
        found[left.pop()] = turn
    return found


@dataclass(frozen=True)
class Ramp:
    """The steps of a curriculum, and the number of ranks that take a batch in each of them."""

    steps: int
    num_replicas: int

    @property
    def batches(self) -> int:
        """Number of batches of all ranks together."""
        return self.steps * self.num_replicas

    def stages(self, passed: int) -> Iterator[tuple[float, NDArray[np.int64]]]:
        """Yield the share that may come, and the batches of each of some windows, from a number of batches on."""
        length = int(np.clip(self.batches // WINDOWS, *WINDOW))
        length = -(-length // self.num_replicas) * self.num_replicas
        together = -(-self.batches // (MOST_STAGES * length))
        while passed < self.batches:
            stop = min(passed + together * length, self.batches)
            counts = np.minimum(length, stop - np.arange(passed, stop, length))
            yield float(competence(np.array(passed), self.batches)), counts
            passed = stop


class Stage(NamedTuple):
    """A part of a curriculum: each of its ``targets`` is filled with samples from the ``share`` that may come.

    A target is a number for each limit that samples count against, shape ``[targets, k]``.
    """

    share: float
    targets: NDArray[Any]


def shortest_first(sized: PreparedSizes) -> NDArray[Any]:
    """Return the samples that are planned by their work, the least first."""
    sizes = sized.sizes if sized.kept is None else sized.sizes[sized.kept]
    if sized.work is not None:
        order = np.argsort(sized.work if sized.kept is None else sized.work[sized.kept], kind="stable")
    elif sizes.ndim == 1:
        order = sorted_by_size(sizes)[0][::-1]
    else:
        alone = np.arange(len(sizes))
        work = sized.cost.work(sizes, sized.limits)(alone[None], np.append(alone, len(alone)))[0]
        order = np.argsort(work, kind="stable")
    return order if sized.kept is None else sized.kept[order]


def draw_stages(ascending: NDArray[Any], stages: Iterable[Stage], amounts: Amounts, key: int) -> Iterator[NDArray[Any]]:
    """Yield the samples for each target of some stages, drawn from those left of the shortest that may come.

    Where these are too few, the next longer ones come. Ends with the samples.

    Args:
        ascending: The samples, the shortest first.
        stages: What is to be filled, one after the other.
        amounts: What samples take of the limits.
        key: Of the epoch.

    >>> stages = [Stage(0.5, np.array([[4]])), Stage(1.0, np.array([[9]]))]
    >>> [sorted(part.tolist()) for part in draw_stages(np.arange(4), stages, lambda part: part[:, None], key=0)]
    [[0, 1, 2], [3]]
    """
    left = np.ones(len(ascending), bool)
    n_left = len(ascending)
    for number, (share, targets) in enumerate(stages):
        pool = Pool(left, int(np.ceil(share * len(ascending))), int(fold_in(key, number, 5)[0]))
        start = 0
        for target in targets:
            ranks = pool.filling(target, start, lambda ranks: amounts(ascending[ranks]))
            if not len(ranks):
                break
            start += len(ranks)
            yield ascending[ranks]
        left[pool.read(0, start)] = False
        n_left -= start
        if not n_left:
            return


class Pool:
    """Ranks of the samples that are left: those that may come in random order, then the others, the shortest first."""

    def __init__(self, left: NDArray[np.bool_], allowed: int, key: int) -> None:
        self.left, self.allowed, self.key = left, allowed, key
        may_come = np.flatnonzero(left[:allowed])
        self.shuffled = ShuffledOrder(len(may_come), may_come)
        self.others: NDArray[np.int64] | None = None

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Return the ranks at these places."""
        first = self.shuffled.n_samples
        taken = self.shuffled.take(self.key, start, stop)
        if stop <= first:
            return taken
        if self.others is None:
            self.others = np.flatnonzero(self.left[self.allowed :]) + self.allowed
        return np.concatenate([taken, self.others[max(0, start - first) : stop - first]])

    def filling(self, target: Sequence[float], start: int, amounts: Amounts) -> NDArray[Any]:
        """Return the ranks from a place on that fill a target and do not exceed it; one at least, if there is any."""
        parts: list[NDArray[Any]] = []
        done, length = np.zeros(1, np.int64), PIECE
        while len(piece := self.read(start, start + length)):
            running = done + np.cumsum(amounts(piece), axis=0)
            over = (running > target).any(axis=1)
            if over.any():
                parts.append(piece[: max(int(over.argmax()), 0 if parts else 1)])
                break
            parts.append(piece)
            done, start, length = running[-1], start + length, 2 * length
        return np.concatenate([self.left[:0].astype(np.int64), *parts])
