"""An epoch's batches, window by window, from samples sorted by size: counts and places are known beforehand."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching.cost import Limits
from headrace.size_aware_batching.planning.arrange import arranged, group_length
from headrace.size_aware_batching.planning.keyed import Words, derive, shuffle_blocks
from headrace.size_aware_batching.planning.strata import Strata
from headrace.size_aware_batching.planning.template import Template
from headrace.size_aware_batching.strategies.stratified import MAX_BATCHES, deal

Chunk = tuple[NDArray[Any], NDArray[np.int64]]  # samples batch by batch, and where each batch begins
SHUFFLED = 128  # samples of like size among which stratified batches draw at random
TRIES = (128, 64, 16, 4)  # ever shorter shuffles, should the batches of a window not fit at first


@dataclass(frozen=True)
class Windowed:
    """The batches of any epoch over samples that are sorted by size.

    Args:
        order: Samples by size, largest first, shape ``[n]``.
        falling: Their sizes, shape ``[n]``.
        strata: How the samples are dealt to windows.
        templates: For a window with a sample of every stratum, and for one without a sample of the last.
        limits: The budgets.
        units: Maps sizes to the units that batches are dealt in; None for batches that follow the template.
        together: Windows that are dealt in lock-step and listed together, their batches arranged as one list.
    """

    order: NDArray[Any]
    falling: NDArray[Any]
    strata: Strata
    templates: tuple[Template, Template]
    limits: Limits
    units: Callable[[NDArray[Any]], NDArray[Any]] | None
    together: int = 1
    listed: dict[tuple[int, int], Chunk] = field(default_factory=dict, repr=False, compare=False)

    @property
    def n_samples(self) -> int:
        """Samples in an epoch."""
        return len(self.order)

    def n_batches_before(self, window: int) -> int:
        """Return the number of batches in the windows before this one."""
        full, short = (template.n_batches for template in self.templates)
        return min(window, self.strata.n_full) * full + max(0, window - self.strata.n_full) * short

    def unit(self, window: int) -> tuple[int, int]:
        """Return the first window, and one past the last, of those that are listed together with this one."""
        begin, end = (
            (0, self.strata.n_full) if window < self.strata.n_full else (self.strata.n_full, self.strata.n_windows)
        )
        first = begin + (window - begin) // self.together * self.together
        return first, min(first + self.together, end)

    def count_from(self, epoch_key: int, position: int) -> int:
        """Return the number of batches from a position on, a batch that is begun counted as one."""
        if position in (0, self.n_samples):  # known without a look at any window
            return self.n_batches_before(self.strata.n_windows) if position < self.n_samples else 0
        first, _ = self.unit(self.strata.window_of(position))
        _, offsets = self.list_unit(epoch_key, first)
        inside = int(np.searchsorted(offsets, position - self.strata.start(first), side="right")) - 1
        return self.n_batches_before(self.strata.n_windows) - self.n_batches_before(first) - inside

    def batch(self, epoch_key: int, number: int) -> NDArray[Any]:
        """Return the samples of one batch of the epoch, by its number."""
        full = self.strata.n_full * self.templates[0].n_batches
        if number < full:
            window = number // self.templates[0].n_batches
        else:
            window = self.strata.n_full + (number - full) // self.templates[1].n_batches
        first, _ = self.unit(window)
        indices, offsets = self.list_unit(epoch_key, first)
        inside = number - self.n_batches_before(first)
        return indices[offsets[inside] : offsets[inside + 1]]

    def chunks(self, epoch_key: int, position: int) -> Iterator[Chunk]:
        """Yield the batches from a position on; the first may be the rest of a batch.

        Args:
            epoch_key: Key of the epoch.
            position: Samples of the epoch that come before.
        """
        if position >= self.n_samples:
            return
        first, stop = self.unit(self.strata.window_of(position))
        skip = position - self.strata.start(first)
        indices, offsets = self.list_unit(epoch_key, first)
        yield indices[skip:], np.concatenate([[0], offsets[offsets > skip] - skip])
        while stop < self.strata.n_windows:
            first, stop = self.unit(stop)
            yield self.list_unit(epoch_key, first)

    def list_unit(self, epoch_key: int, first: int) -> Chunk:
        """Return the batches of the windows that are listed together, by the first of them.

        The last ones are kept: their number, a batch of them and what follows a position are often asked in a row.
        """
        if (epoch_key, first) not in self.listed:
            self.listed.clear()
            self.listed[epoch_key, first] = self.planned_unit(epoch_key, first)
        return self.listed[epoch_key, first]

    def planned_unit(self, epoch_key: int, first: int) -> Chunk:
        """Plan these windows."""
        stop = self.unit(first)[1]
        template = self.templates[0 if first < self.strata.n_full else 1]
        keys = derive(epoch_key, np.arange(first, stop, dtype=np.uint64))
        places = self.strata.places(first, stop, self.strata.shifts(epoch_key))[:, : len(template.batches)]
        if self.units is None:
            batches, work = follow(template, keys)
        else:
            batches, work = self.dealt(self.falling[places], template, keys)
        goes_to = arranged(work.ravel(), int(keys[0]), self.n_batches_before(first), group_length(work.size))
        rows = np.arange(stop - first)[:, None] * template.n_batches
        numbers = goes_to[(batches + rows).ravel()]
        by_batch = np.argsort(numbers.astype(np.uint16 if len(goes_to) < 2**16 else np.uint32), kind="stable")
        counts = np.bincount(numbers, minlength=len(goes_to))
        return self.order[places.ravel()[by_batch]], np.concatenate([[0], np.cumsum(counts)])

    def dealt(
        self, sizes: NDArray[Any], template: Template, keys: Words
    ) -> tuple[NDArray[np.uint32], NDArray[np.float64]]:
        """Deal windows at random; one that does not fit, not even with a shorter shuffle, follows the template."""
        units = sizes if self.units is None else self.units(sizes)
        n_batches, budget = template.n_batches, self.limits.budgets[0]
        batches = np.broadcast_to(template.batches, sizes.shape).copy()
        open_rows = np.arange(len(sizes)) if n_batches <= MAX_BATCHES else np.zeros(0, int)
        rows = np.arange(len(sizes))[:, None] * n_batches
        for attempt, block in enumerate(TRIES):
            if not len(open_rows):
                break
            dealt, fits = deal(units[open_rows], n_batches, budget, derive(keys[open_rows], attempt), block)
            flat = dealt + np.arange(len(open_rows))[:, None] * n_batches
            counts = np.bincount(flat.ravel(), minlength=len(open_rows) * n_batches).reshape(-1, n_batches)
            fits &= (counts.min(axis=1) > 0) & (counts.max(axis=1) <= self.limits.most_items)
            batches[open_rows[fits]] = dealt[fits]
            open_rows = open_rows[~fits]
        work: NDArray[Any] = np.bincount(
            (batches + rows).ravel(), self.limits.work(units).ravel(), minlength=len(sizes) * n_batches
        )
        return batches, work.reshape(len(sizes), n_batches)


def follow(template: Template, keys: Words) -> tuple[NDArray[np.uint32], NDArray[np.float64]]:
    """Give windows the template's batches, samples of like size changing places."""
    depth = len(template.batches)
    places = shuffle_blocks(keys, depth, template.block)
    if template.free is not None:
        fixed = ~np.repeat(template.free, template.block)[:depth]
        places[:, fixed] = np.flatnonzero(fixed)
    work = np.broadcast_to(template.work, (len(keys), template.n_batches))
    return template.batches[places], work
