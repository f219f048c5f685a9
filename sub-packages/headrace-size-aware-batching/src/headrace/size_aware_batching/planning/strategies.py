"""Strategies: which kind of list makes the batches of an epoch, and in which windows."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching._validation import UNLIMITED
from headrace.size_aware_batching.planning.batch_list import (
    BatchList,
    ChainedList,
    OrderedList,
    PlanWindow,
    SortedStrata,
    StrataList,
    WindowedList,
)
from headrace.size_aware_batching.planning.costs import Work, columns_of, given_work
from headrace.size_aware_batching.planning.curriculum import Ramp, Stage, draw_stages, shortest_first
from headrace.size_aware_batching.planning.last_step import Batches
from headrace.size_aware_batching.planning.limits import CountLimits, Limits
from headrace.size_aware_batching.planning.options import Options
from headrace.size_aware_batching.planning.order import Order, SliceOrder, built_in_order
from headrace.size_aware_batching.planning.prepared import PreparedSizes, left_of
from headrace.size_aware_batching.planning.strata import Strata, kd_order, sort_samples
from headrace.size_aware_batching.planning.units import round_up
from headrace.size_aware_batching.planning.windows import (
    PACKED,
    STRATIFIED,
    Density,
    Packer,
    RandomPacking,
    SortedPacking,
    equal_groups,
    padded_packing,
)

# Measured on 1,000,000 lognormal sizes (median 360, sigma 0.8, longest 2048), budget 16384, epoch 1 of 8 ranks; the
# milliseconds are those to its first batch.
# Batches of a window, about. 128, 256, 512, 2048: fill 0.9918, 0.9961, 0.9972, 0.9976 in 4, 11, 30, 36 ms.
WINDOW_BATCHES = 512
# Samples of a window of padded batches. 2**15, 2**17, 2**19: 30,411, 30,304, 30,296 batches in 14, 11, 62 ms.
BUCKETED_WINDOW = 2**17
# Batches of a window in which samples do not change places. 8, 32, 128: fill 0.889, 0.969, 0.977, and two samples of a
# batch share one again 4, 16, 78 times as often as by chance.
SHORT_WINDOW_BATCHES = 32
# Samples of a window of packed batches, the shortest first. All, 2**17 alone, 2**19 alone: 29,493, 29,493, 29,492
# batches, and two samples of a batch share one again 1.2, 2.5, 4.0 times as often as by chance.
PACKED_WINDOWS = (2**15, 2**16, 2**17, 2**18, 2**19)
PACKED_WINDOW = 2**17  # samples: with several columns, and of a user's order
PACKED_RAMP = 0.999  # fill that the samples of a packed window of a curriculum are drawn for
# Share of the budgets that may be wasted: fill is to be 0.9999. 0, 9.5e-5, 1e-3: 29,491, 29,493, 29,493 batches; two
# samples of a batch share one again 3.6, 1.2, 1.2 times as often as by chance; the first takes twice as long to plan.
PACKED_WASTE = 9.5e-5


# Samples by size, and their sizes: arrays, or what is read like arrays from a file.
Presorted: TypeAlias = Callable[[], tuple[Any, Any] | None]


@dataclass(frozen=True)
class StrataStrategy:
    """How a strategy forms batches of samples that are sorted into strata: a row of `STRATA_STRATEGIES`.

    Args:
        packer: Returns how a window is planned, from the largest sizes of its strata.
        n_windows: Returns the number of windows for sizes in descending order, before it is rounded.
        order_window: Returns how many samples of a user's order make a window, about.
        ramp_fill: Fill of a window of a curriculum; None if long samples only come later, in batches as they are.
    """

    packer: Callable[[NDArray[Any], Limits, Options, int | None], Packer]
    n_windows: Callable[[NDArray[Any], Limits], float]
    order_window: Callable[[PreparedSizes], int]
    ramp_fill: float | None


class BatchLists:
    """Makes the list of each epoch of some samples; what the epochs share is made once.

    Args:
        sized: Sizes ready for planning.
        options: Of the sampler.
        ramp: Steps of a curriculum.
        presorted: Returns the samples as `sort_samples` would, where somebody has sorted them, else None.
    """

    def __init__(
        self, sized: PreparedSizes, options: Options, ramp: Ramp | None = None, presorted: Presorted | None = None
    ) -> None:
        self.sized, self.options, self.ramp, self.presorted = sized, options, ramp, presorted
        self._fill = None if ramp is None or not options.sorts else STRATA_STRATEGIES[options.strategy].ramp_fill

    @property
    def is_sorted(self) -> bool:
        """Whether the samples are sorted into strata, so that the number of batches is the same in every epoch."""
        return self.options.sorts and self.sized.n_samples > 0

    @cached_property
    def sorted_strata(self) -> SortedStrata:
        """The samples in strata."""
        ramp, presorted = (self.ramp, self.presorted) if self._fill is None else (None, None)
        n_windows = given_windows(self.options, self.sized.n_samples)
        return build_strata(self.sized, self.options, self.sized.kept, n_windows, ramp=ramp, presorted=presorted)

    def known_count(self) -> int | None:
        """Return the number of batches of every epoch, if it is known without planning or sorting."""
        return self.sorted_strata.n_batches if "sorted_strata" in vars(self) and self._fill is None else None

    def batches_before(self, epoch: int) -> int:
        """Return about how many batches come before an epoch."""
        return epoch * self.sorted_strata.n_batches if epoch else 0

    def of_epoch(self, key: int, balanced_ranks: int, epoch: int = 0, order: Order | None = None) -> BatchList:
        """Return the batches of an epoch; ``order`` is that of a user's sampler, None for one of our own."""
        sized, options = self.sized, self.options
        if order is None:
            if self.is_sorted:
                passed = 0 if self.ramp is None else self.batches_before(epoch)
                if self.ramp is None or self._fill is None or passed >= self.ramp.batches:
                    return StrataList(self.sorted_strata, key, balanced_ranks, passed)
                return self._with_ramp(key, balanced_ranks, self.ramp, passed, self._fill)
            order = built_in_order(key if options.shuffle else None, sized.n_samples, sized.kept)
        n_samples = order.n_samples
        if options.strategy == "sequential" or not n_samples:
            return OrderedList(order, sized.sizes, sized.limits)
        starts = window_starts(sized, options, n_samples)
        return WindowedList(order, starts, whole_window(sized, options, balanced_ranks), key)

    def _with_ramp(self, key: int, balanced_ranks: int, ramp: Ramp, passed: int, fill: float) -> BatchList:
        """Return the batches of an epoch that begins with short samples: windows of those that may come, then the rest.

        A window of the ramp takes samples for a whole number of batches, and is planned like any other. So its batches
        are as full, and the number of them is known once the window is planned.
        """
        sized, options = self.sized, self.options

        def amounts_and_budgets(samples: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
            sizes = columns_of(sized.sizes[samples]).astype(np.int64)
            return sized.limits.with_counts(sizes, sized.n_samples)

        _, budgets = amounts_and_budgets(np.zeros(0, np.int64))
        stages = (
            Stage(share, np.minimum(fill * np.multiply.outer(counts, budgets), UNLIMITED))
            for share, counts in ramp.stages(passed)
        )
        by_size = shortest_first(sized)
        parts = list(draw_stages(by_size, stages, lambda samples: amounts_and_budgets(samples)[0], key))
        samples, starts = np.concatenate(parts), np.cumsum([0, *map(len, parts)])
        head = SliceOrder(len(samples), lambda start, stop: samples[start:stop])

        def behind() -> BatchList:
            rest = left_of(sized, samples)
            n_windows = given_windows(options, len(rest))
            before = ramp.batches - passed
            return StrataList(build_strata(sized, options, rest, n_windows, batches_before=before), key, balanced_ranks)

        windows = WindowedList(head, starts, whole_window(sized, options, balanced_ranks), key)
        return ChainedList(windows, sized.n_samples, behind)


def whole_window(sized: PreparedSizes, options: Options, balanced_ranks: int) -> PlanWindow:
    """Return a function that plans the samples of a window by themselves."""

    def plan_window(samples: NDArray[Any], key: int) -> Batches:
        return StrataList(build_strata(sized, options, samples, n_windows=1, key=key), key, balanced_ranks).group(0)

    return plan_window


def window_starts(sized: PreparedSizes, options: Options, n_samples: int) -> NDArray[np.int64]:
    """Return where the windows of a user's order begin and the last one ends."""
    length = options.window or STRATA_STRATEGIES[options.strategy].order_window(sized)
    n_windows = max(1, round(n_samples / length))
    return np.arange(n_windows + 1) * n_samples // n_windows


def given_windows(options: Options, n_samples: int) -> int | None:
    """Return the number of windows where their length is given."""
    return None if options.window is None else max(1, round(n_samples / options.window))


def batches_of_window(columns: int) -> int:
    """Return how many batches make a window: more where strata of several columns are less alike."""
    return WINDOW_BATCHES * (1, 2, 8)[min(columns, 3) - 1]


def build_strata(
    sized: PreparedSizes,
    options: Options,
    samples: NDArray[Any] | None,
    n_windows: int | None,
    key: int | None = None,
    ramp: Ramp | None = None,
    batches_before: int = 0,
    presorted: Presorted | None = None,
) -> SortedStrata:
    """Plan over some samples in strata, or over all; ``key`` is that of a window that is planned only once.

    ``presorted`` returns the samples as `sort_samples` would, where somebody has sorted them, else None.
    """
    strategy = STRATA_STRATEGIES[options.strategy]
    found: tuple[Any, Any] | None = None if presorted is None else presorted()
    if found is None and sized.sizes.ndim == 1:
        found = sort_samples(sized.sizes, samples)
    if found is not None:
        order, descending = found
        strata = Strata(len(order), n_windows or strategy_windows(descending, sized.limits, options))
        largest = descending[strata.firsts()][:, None]
    else:
        sizes = sized.sizes if samples is None else sized.sizes[samples]
        strata = Strata(len(sizes), n_windows or strategy_windows(sizes, sized.limits, options))
        by_function = not sized.limits.budgets  # of all columns together
        scale = sizes.max(axis=0).tolist() if by_function else sized.limits.budgets
        order, largest = kd_order(sizes, scale, strata, ranked=not by_function)
        descending = sizes[order]
        order = order if samples is None else samples[order].astype(order.dtype)
    full = strategy.packer(largest, sized.limits, options, key)
    short: Packer | None = full
    if isinstance(full, RandomPacking) and full.last_shares:
        short = None
    elif strata.n_full < strata.n_windows and strata.depth > 1:
        if isinstance(full, SortedPacking):
            short = full.without_last()
        else:
            short = strategy.packer(largest[:-1], sized.limits, options, key)
    if sized.work is None:
        work = sized.cost.work(descending, sized.limits)
    elif isinstance(order, np.ndarray):
        work = given_work(sized.work[order])
    else:  # in a file that all processes share: a list of their work would be each one's own
        work = work_of_stored(sized.work, order)
    kept = descending if sized.sizes.ndim == 1 else None
    ramp_batches = ramp.batches if ramp else 0
    return SortedStrata(order, strata, full, short, work, ramp_batches, batches_before, kept)


def work_of_stored(work: NDArray[np.float64], samples: NDArray[Any]) -> Work:
    """Return a function to the work of batches of places in a list of samples, by the work of each sample."""
    return lambda places, offsets: np.add.reduceat(work[samples[places]], offsets[:-1], axis=1)


def random_packing(density: Density) -> Callable[[NDArray[Any], Limits, Options, int | None], Packer]:
    """Return how batches of nearly equal sum and count are packed at random."""

    def packer(largest: NDArray[Any], limits: Limits, _options: Options, key: int | None) -> Packer:
        columns, budgets = limits.with_counts(largest.astype(np.int64), len(largest))
        return RandomPacking(columns, budgets, density, key)

    return packer


def sorted_packing(largest: NDArray[Any], limits: Limits, options: Options, _key: int | None) -> Packer:
    """Return how samples of similar size are cut into batches, in descending order."""
    sizes = largest[:, 0] if largest.shape[1] == 1 else largest
    if not isinstance(limits, CountLimits):
        return SortedPacking(limits.next_fit(sizes), equal_groups(largest))
    if options.shapes is not None:  # a group for each
        return SortedPacking(limits.cut(sizes), equal_groups(largest))
    if sizes.ndim > 1:
        # The largest values of a stratum's columns are those of no sample; each of its samples fits by itself.
        return SortedPacking(limits.with_each().next_fit(sizes), equal_groups(largest))
    longest = round_up(sizes, options.length_multiple)
    return padded_packing(sizes, longest, limits, tight=options.window is not None)


def strategy_windows(sizes: NDArray[Any], limits: Limits, options: Options) -> int:
    """Return the number of windows that suits a strategy, for sizes in descending order."""
    return max(1, min(round(STRATA_STRATEGIES[options.strategy].n_windows(sizes, limits)), len(sizes)))


def stratified_windows(sizes: NDArray[Any], limits: Limits) -> float:
    """Return how many windows hold enough batches each."""
    return limits.volume(sizes) / batches_of_window(1 if sizes.ndim == 1 else sizes.shape[1])


def stratified_order_window(sized: PreparedSizes) -> int:
    """Return how many samples make enough batches."""
    share = (sized.sizes.mean(axis=0, dtype=np.float64) / np.maximum(sized.limits.budgets[: sized.columns], 1)).max()
    return int(np.clip(batches_of_window(sized.columns) / max(share, 1e-9), 2**10, 2**17))


def bucketed_windows(sizes: NDArray[Any], limits: Limits) -> float:
    """Return the number of windows of batches that are cut in descending order.

    If no shuffle inside groups varies the batches, windows are short: two samples of a batch share one again as often
    as by chance, times the batches of a window.
    """
    if limits.budgets:
        return limits.volume(sizes) / SHORT_WINDOW_BATCHES
    if sizes.ndim == 1 or sizes.shape[1] == 1:
        return len(sizes) / BUCKETED_WINDOW
    # Neighbours in several columns need more of them to be alike in all.
    return limits.volume(sizes) / (8 * SHORT_WINDOW_BATCHES)


def packed_windows(descending: NDArray[Any], limits: Limits) -> int:
    """Return the number of windows, of the shortest length that wastes little, that wastes least.

    A window wastes what its last batch leaves empty and what its samples are smaller than the strata's largest.
    """
    length = len(descending)
    if descending.ndim > 1:
        return max(1, round(length / PACKED_WINDOW))
    fewest = limits.volume(descending)
    best, least = 1, np.inf
    for window in PACKED_WINDOWS:
        middle = max(1, round(length / window))
        for count in np.unique(np.linspace(0.8 * middle, 1.25 * middle + 1, 48).astype(int)).tolist():
            if count < -(-length // PACKED_WINDOWS[-1]):
                continue
            filled = float(descending[::count].sum(dtype=np.float64)) / max(limits.budgets[0], 1)
            waste = count * np.ceil(filled) / max(fewest, 1e-9) - 1
            if waste < least or (waste == least and best > 1):  # of equal ones the shorter window
                best, least = count, waste
        if least <= PACKED_WASTE or middle == 1:
            break
    return best


# Every strategy but "sequential", which keeps the order of the samples.
STRATA_STRATEGIES: dict[str, StrataStrategy] = {
    "stratified": StrataStrategy(
        random_packing(STRATIFIED), stratified_windows, stratified_order_window, STRATIFIED.full
    ),
    "packed": StrataStrategy(random_packing(PACKED), packed_windows, lambda _: PACKED_WINDOW, PACKED_RAMP),
    "bucketed": StrataStrategy(sorted_packing, bucketed_windows, lambda _: BUCKETED_WINDOW, None),
}
