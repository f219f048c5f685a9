"""The plan of one window, drawn anew in every epoch: which stratum's sample goes to which batch.

A window takes one sample of each stratum, none larger than the largest of its stratum in any column. So a plan that
holds the strata's largest samples, the worst case, holds whatever a window takes instead: one plan serves all windows
of an epoch, and the number of its batches is known before any window is drawn.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching._shared.random import fold_in
from headrace.size_aware_batching._validation import UNLIMITED
from headrace.size_aware_batching.planning.limits import CountLimits
from headrace.size_aware_batching.planning.packing import lower_bound, martello_toth, pack, pack_evenly
from headrace.size_aware_batching.planning.repair import by_batch, mix, rematch
from headrace.size_aware_batching.planning.shuffles import shuffle_groups
from headrace.size_aware_batching.planning.units import FINE

# Keys that are tried in an epoch, the last of them with shorter shuffles. 1, 2, 6: of 40 epochs of 3,000 molecules and
# crystals (budgets 400 nodes and 4,000 edges) 14, 5, 0 follow the worst case; of other sets at most 4, 0, 0.
TRIES = 6
# Padded batches of 1,000,000 lognormal sizes (median 360, sigma 0.8, longest 2048), budget 16384. "Again" is how often
# two samples of a batch share one again, over chance (co-occurrence).
# Candidate boundaries between groups. 100, 400, 1600: 30,440, 30,304, 30,304 batches, again 51, 89, 89.
CLASSES = 400
# Share of batches more than the fewest that grouping by length may cost. 0.001, 0.0035, 0.01: 30,240, 30,304, 30,496
# batches, again 174, 89, 43.
PADDING = 0.0035
# Where there are few batches: so many more, but no more than this share of them. A_FEW 0, 5, 20: 600, 603, 615 batches
# of 20,000 such sizes, again 74, 44, 18; 62, 63, 63 of 2,000, again 32, 14, 14. FEW_SHARE 0.01, 0.03, 0.1: of these
# 2,000 62, 63, 64, again 26, 14, 11.
A_FEW, FEW_SHARE = 5.0, 0.03
# Co-occurrence, with one shuffle, at which groups are wide enough. 5, 20, none: 30,240, 30,240, 30,184 batches, again
# 89, 89, 148.
RANDOM_ENOUGH = 20.0


@dataclass(frozen=True)
class WindowPlan:
    """Batches of strata: the strata batch by batch, and where each batch begins in them and the last one ends."""

    sequence: NDArray[np.int64]
    offsets: NDArray[np.int64]

    def without_last(self) -> WindowPlan:
        """Return the plan of a window without a sample of the last stratum, which shares its batch."""
        place = int(np.flatnonzero(self.sequence == len(self.sequence) - 1)[0])
        return WindowPlan(np.delete(self.sequence, place), self.offsets - (self.offsets > place))


@dataclass(frozen=True)
class Density:
    """How full batches are to be, and how random.

    The search for the number of batches begins at a fill of ``full`` and moves by that number over ``step``, or by 1.
    Blocks of like samples are shuffled: of each of the ``spreads`` times the number of batches, at least ``block``, the
    first that fits the target, else the last. Where none does, and there is one sum, the search begins ``loose`` above
    the bound on the number of batches.
    """

    full: float
    step: int
    spreads: tuple[float, ...]
    loose: float
    block: int = 128


# Of 3,000 and 30,000 lengths of which two fill a batch (normal, mean of half a budget, deviation of a sixteenth):
# ``loose`` 0, 0.005, 0.01: 1.0006, 1.006, 1.012 of the bound, and of 1,000 pairs 12, 6, 5 come again in the next epoch.
STRATIFIED = Density(full=0.998, step=400, spreads=(2.0, 1.0), loose=0.005)
PACKED = Density(full=1.0, step=4000, spreads=(1 / 32,), loose=0.001)
# The same for samples that are dealt anew: they come out random whatever they begin with.
NARROW = 1 / 32


class RandomPacking:
    """Batches of any samples within sums of k columns, as few as random packing reaches in most epochs.

    The number of batches is the smallest for which a random packing of the worst case was found, the largest of each
    stratum, shape ``[depth, k]``, descending. An epoch whose packings do not fit, whatever the key, follows that one. A
    ``key`` is that of a window that is planned only once.
    """

    def __init__(
        self, largest: NDArray[np.int64], budgets: NDArray[np.int64], density: Density, key: int | None = None
    ) -> None:
        unit = np.maximum(-(-budgets // FINE), 1)
        self._budgets = budgets // unit
        # What fits a batch of its own does so here, too: rounded up, nothing but zeros can join it then.
        self._sizes = np.minimum(-(-largest // unit), self._budgets)
        self._density = density
        self._once = key is not None
        self._one_sum = bool((self._sizes[:, 1:] == 1).all())  # alone, or beside a number of samples
        self._worst_case: NDArray[np.int64]
        self._spread: float
        self._needs_mixing = False
        self.n_batches = self._fewest(0 if key is None else key)
        self.last_shares = last_shares(self._worst_case)  # then it does in all epochs

    def plan(self, epoch_key: int) -> WindowPlan:
        """Return the plan of an epoch."""
        batches = self._worst_case
        for attempt in range(0 if self._once else TRIES + 1):
            key, last = int(fold_in(epoch_key, attempt)[0]), attempt == TRIES
            drawn = batches.copy() if last else self._pack(self.n_batches, key, 4 ** max(0, attempt - 2))
            if drawn is None:
                continue
            if self._needs_mixing or last:
                self._mix(drawn, key)
            if last_shares(drawn) or not self.last_shares:
                batches = drawn
                break
        counts = np.bincount(batches, minlength=self.n_batches)
        return WindowPlan(by_batch(batches, self.n_batches), np.append(0, np.cumsum(counts)))

    def _mix(self, batches: NDArray[np.int64], key: int) -> None:
        if self._one_sum:
            rematch(self._sizes[:, 0], int(self._budgets[0]), batches, self.n_batches, key)
        else:
            mix(self._sizes, self._budgets, batches, self.n_batches, key)

    def _pack(self, n_batches: int, key: int, shorter: int = 1) -> NDArray[np.int64] | None:
        if self._needs_mixing and self._one_sum:
            block = max(1, int(n_batches * NARROW) // shorter)
            found = pack_evenly(self._sizes, self._budgets, n_batches, key, block)
            if found is not None or self._sizes.shape[1] == 1:
                return found
        block = max(self._density.block, int(n_batches * self._spread)) // shorter
        return pack(self._sizes, self._budgets, n_batches, key, max(1, block))

    def _fits(self, n_batches: int, key: int) -> bool:
        """Return whether a packing fits; keep it."""
        batches = self._pack(n_batches, int(fold_in(key, n_batches)[0]))
        if batches is not None:
            self._worst_case = batches
        return batches is not None

    def _fewest(self, key: int) -> int:
        """Return the smallest number of batches that fits: with growing steps upwards, then by halving."""
        depth = len(self._sizes)
        volume = float((self._sizes.sum(axis=0) / np.maximum(self._budgets, 1)).max())
        least = lower_bound(self._sizes, self._budgets)
        aim = int(np.ceil(volume / self._density.full - 1e-9))
        if self._density.full < 1:  # rounded down where rounding up would cost as much again
            aim = min(aim, max(int(np.ceil(volume)), int(volume / (2 * self._density.full - 1))))
        count = min(depth, max(1, least, aim))
        exact = step = max(1, count // self._density.step)
        for spread in self._density.spreads:
            self._spread = spread
            if self._fits(count, key):
                return count
        fitted, self._needs_mixing = False, True
        if self._one_sum:
            bound, loose = martello_toth(self._sizes[:, 0], int(self._budgets[0])), self._density.loose
            # Dealt anew, as many may fit. Rounded down where rounding up would cost as much again.
            aim = min(int(np.ceil(bound * (1 + loose))), int(bound * (1 + 2 * loose)))
            count = max(count, bound, aim) - step
        while not fitted:
            low, count = count, min(depth, count + step)
            step *= 2
            fitted = self._fits(count, key)
        while count - low > exact:
            middle = (low + count) // 2
            if self._fits(middle, key):
                count = middle
            else:
                low = middle
        return count


def last_shares(batches: NDArray[np.int64]) -> bool:
    """Return whether the last stratum shares its batch."""
    return bool((batches[:-1] == batches[-1]).any())


class SortedPacking:
    """Batches cut from the strata in descending order, samples changing places inside groups of like size."""

    def __init__(self, offsets: NDArray[np.int64], groups: NDArray[np.int64]) -> None:
        self._offsets, self._groups = offsets, groups
        self.n_batches = len(offsets) - 1

    def plan(self, epoch_key: int) -> WindowPlan:
        """Return the plan of an epoch."""
        key = int(fold_in(epoch_key, TRIES)[0])  # a stream of its own: the strata are rotated by the epoch's
        return WindowPlan(shuffle_groups(key, self._groups), self._offsets)

    def without_last(self) -> SortedPacking:
        """Return plans for windows without a sample of the last stratum."""
        length = len(self._groups) - 1
        return SortedPacking(np.unique(np.minimum(self._offsets, length)), self._groups[:-1])


Packer: TypeAlias = RandomPacking | SortedPacking  # a plan of one window for every epoch, always of as many batches


def padded_packing(sizes: NDArray[Any], longest: NDArray[Any], limits: CountLimits, tight: bool) -> SortedPacking:
    """Cut batches of descending sizes by how many samples the cost allows where each is the largest.

    Groups are of like cost, also where ``limits.most_items`` allows fewer: padding is then no batch more, but takes
    time. ``longest`` are the sizes as they are padded by themselves. ``tight``: at no cost in batches.
    """
    most = limits.most_items
    counts = beyond_asked(replace(limits, most_items=UNLIMITED).counts(sizes), longest, limits.capacity.asked)
    groups = equal_groups(counts[:, None]) if tight else groups_from(wide_groups(counts, most), len(counts))
    begins = np.flatnonzero(np.append(True, groups[1:] != groups[:-1]))
    return SortedPacking(limits.cut_by_counts(np.minimum(counts[begins], most)[groups]), groups)


def beyond_asked(counts: NDArray[np.int64], longest: NDArray[Any], asked: int) -> NDArray[np.int64]:
    """Let counts that end where a cost was not asked further grow as the size falls, as those of padded costs do.

    >>> beyond_asked(np.array([2, 4, 4, 4]), np.array([50, 30, 20, 10]), 4).tolist()
    [2, 4, 6, 12]
    """
    capped = np.flatnonzero(counts >= asked)
    if not len(capped):
        return counts
    shorter = np.maximum(longest[capped] / max(longest[capped[0]], 1 / UNLIMITED), 1 / UNLIMITED)
    further = counts.copy()
    further[capped] = np.maximum(counts[capped], np.minimum(asked / shorter, UNLIMITED).astype(np.int64))
    return further


def groups_from(begins: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """Number the groups that begin at these places, in ascending order; returns shape ``[length]``.

    >>> groups_from(np.array([0, 2]), 5).tolist()
    [0, 0, 1, 1, 1]
    """
    groups = np.zeros(length, np.int64)
    groups[begins[1:]] = 1
    return np.cumsum(groups)


def equal_groups(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number the runs of equal rows of shape ``[n, k]``; returns shape ``[n]``.

    >>> equal_groups(np.array([[5], [5], [3], [1], [1]])).tolist()
    [0, 0, 1, 2, 2]
    """
    groups = np.zeros(len(sizes), np.int64)
    np.cumsum((sizes[1:] != sizes[:-1]).any(axis=1), out=groups[1:])
    return groups


def wide_groups(counts: NDArray[np.int64], most_items: int) -> NDArray[np.int64]:
    """Return where groups of neighbours in size begin in which samples of a batch vary most for a few batches more.

    A group holds as many samples a batch as its largest allows, by the ascending ``counts``, and ``most_items`` where
    that is less: then batches are counted as the shares of a budget that they take. With N samples of a group and b of
    them in a batch, two of a batch share one again with probability ``(b - 1) / (N - 1)``, and the group takes
    ``N / b`` batches. The groups minimise the sum of both, by dynamic programming over their boundaries; the weight of
    the first is the largest for which the batches stay within ``1 + PADDING`` times the fewest, or a few more where
    there are few.
    """
    length = len(counts)
    begins = np.flatnonzero(np.append(True, counts[1:] != counts[:-1]))
    if len(begins) > CLASSES:  # candidates that part the batches evenly
        passed = np.cumsum(1 / counts)[begins]
        begins = begins[np.append(True, np.diff((passed * (CLASSES / passed[-1])).astype(np.int64)) > 0)]
    ends = np.append(begins, length).astype(np.float64)
    size = counts[begins].astype(np.float64)
    members = ends[None, :] - ends[:-1, None]  # [first class, one past the last class]
    # A group of fewer shares its batch with those after it.
    others = np.minimum(size, min(length, most_items))[:, None] - 1
    batches = np.where(members > 0, members / size[:, None], np.inf)
    again = np.where(members > 0, members * others * np.minimum(others / np.maximum(members - 1, 1), 1), 0)
    fewest = float((1 / counts).sum())
    most = fewest + max(PADDING * fewest, min(A_FEW, FEW_SHARE * fewest))
    low, high = -2.0, 7.0  # decades of the weight
    boundaries = np.arange(len(begins) + 1)
    for _ in range(10):
        middle = (low + high) / 2
        tried = best_boundaries(batches + again * (10**middle / length))
        first, stop = tried[:-1], tried[1:]
        pairs = float((members[first, stop] * others[first, 0]).sum())
        over_chance = float(again[first, stop].sum()) * (length / max(pairs, 1.0)) ** 2
        if float(batches[first, stop].sum()) <= most:
            low, boundaries = middle, tried
            if over_chance <= RANDOM_ENOUGH:
                break
        else:
            high = middle
    return begins[boundaries[:-1]]


def best_boundaries(cost: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the boundaries of least total cost; ``cost[i, j]``: of a group from class i to before class j."""
    classes = len(cost)
    total, back = np.zeros(classes + 1), np.zeros(classes + 1, np.int64)
    for stop in range(1, classes + 1):
        through = total[:stop] + cost[:stop, stop]
        back[stop] = through.argmin()
        total[stop] = through[back[stop]]
    boundaries = [classes]
    while boundaries[-1]:
        boundaries.append(int(back[boundaries[-1]]))
    return np.array(boundaries[::-1])
