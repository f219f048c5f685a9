"""From targets to micro-batches that keep their budgets. Pure."""

from __future__ import annotations

from heapq import heappop, heappush, heapreplace

import numpy as np

from headrace.size_aware_batching.planning.micro_batches.samples import Ints, Samples
from headrace.size_aware_batching.planning.micro_batches.swaps import MicroBatches
from headrace.size_aware_batching.planning.packing import levels, pack
from headrace.size_aware_batching.planning.repair import repair


def packed(samples: Samples, n_batches: int, targets: Ints) -> MicroBatches | None:
    """Return samples in so many micro-batches that keep the budgets, near to their targets if possible, or None."""
    parts = samples.parts
    batches = fill_to_targets(samples, targets) if parts is None else fill_kinds(samples, parts, n_batches)
    if repair(samples.sizes, samples.budgets, batches, n_batches, 0):
        held = MicroBatches(samples, n_batches, batches)
        if held.fits():
            return held
    found = pack(samples.sizes, samples.budgets, n_batches, 0, 1)
    if found is not None:
        held = MicroBatches(samples, n_batches, found)
        if held.fits():
            return held
    held = dealt_in_rows(samples, n_batches)
    return held if held.fits() else None


def fill_to_targets(samples: Samples, targets: Ints) -> Ints:
    """Give samples, one by one, to the micro-batch that lacks most of its target and has room; some may be over.

    What fits nowhere goes to the emptiest micro-batch. As many samples as there are empty ones are kept for these.
    """
    fill = fill_one_budget if samples.sizes.shape[1] == 1 else fill_budgets
    return fill_empty(fill(samples, targets), targets)


def fill_empty(batches: Ints, targets: Ints) -> Ints:
    """Give the samples that have -1 to the empty micro-batches, the highest target first; in place."""
    kept = np.flatnonzero(batches < 0)
    empty = np.flatnonzero(np.bincount(batches[: len(batches) - len(kept)], minlength=len(targets)) == 0)
    batches[kept] = empty[np.argsort(-targets[empty], kind="stable")[: len(kept)]]
    return batches


def fill_one_budget(samples: Samples, targets: Ints) -> Ints:
    """Do so with one budget, by heaps; -1 for what is kept for empty micro-batches."""
    room = [int(samples.budgets[0])] * len(targets)
    lacking = sorted((-target, number) for number, target in enumerate(targets.tolist()))
    full: list[tuple[int, int, int]] = []  # without room for a sample as large as the last, the emptiest first
    empty, batches = set(range(len(targets))), np.full(len(samples), -1)
    for sample, (size, work) in enumerate(zip(samples.sizes[:, 0].tolist(), samples.work.tolist(), strict=True)):
        if len(empty) >= len(samples) - sample:
            break
        while full and -full[0][0] >= size:
            heappush(lacking, heappop(full)[1:])
        while lacking and room[lacking[0][1]] < size:
            lack, number = heappop(lacking)
            heappush(full, (-room[number], lack, number))
        number = lacking[0][1] if lacking else full[0][2]
        room[number] -= size
        if lacking:
            heapreplace(lacking, (lacking[0][0] + work, number))
        else:
            heapreplace(full, (-room[number], full[0][1] + work, number))
        empty.discard(number)
        batches[sample] = number
    return batches


def fill_budgets(samples: Samples, targets: Ints) -> Ints:
    """Do so with several budgets, comparing all micro-batches at once; -1 for what is kept for empty ones."""
    return fill_best(samples, targets[None].copy(), samples.work[:, None], np.ones((len(samples), 1), np.int64))


def fill_kinds(samples: Samples, parts: Ints, n_batches: int) -> Ints:
    """Give samples to micro-batches so that each has the mean of each kind of work, as far as there is room.

    A sample goes where the scalar product of its works and of what is lacking is largest: mostly where its largest
    work is lacking most. Dot products for vector bins: Panigrahy et al., "Heuristics for vector bin packing" (2011).
    """
    # Units so large that products are exact: all work of a kind is 2**28 of them.
    works = parts // np.maximum(parts.sum(axis=0) >> 28, 1)
    lack = np.repeat((works.sum(axis=0) // n_batches)[:, None], n_batches, axis=1)
    return fill_empty(fill_best(samples, lack, works, works), np.zeros(n_batches, np.int64))


def fill_best(samples: Samples, lack: Ints, works: Ints, weights: Ints) -> Ints:
    """Give each sample to the micro-batch with room whose ``lack`` ``[c, m]`` is largest, weighed by ``[n, c]``."""
    room = np.repeat(samples.budgets[:, None], lack.shape[1], axis=1)
    empty, batches = set(range(lack.shape[1])), np.full(len(samples), -1)
    for sample, (size, weight) in enumerate(zip(samples.sizes, weights, strict=True)):
        if len(empty) >= len(samples) - sample:
            break
        score = weight @ lack
        number = int(score.argmax())
        if (room[:, number] < size).any():
            fits = np.logical_and.reduce(room >= size[:, None])
            if not fits.any():
                smallest = room.min(axis=0)
                fits = smallest == smallest.max()
            number = int(np.where(fits, score, np.iinfo(np.int64).min).argmax())
        room[:, number] -= size
        lack[:, number] -= works[sample]
        empty.discard(number)
        batches[sample] = number
    return batches


def dealt_in_rows(samples: Samples, n_batches: int) -> MicroBatches:
    """Return samples dealt in rows, one to each micro-batch, the largest of a row to the lightest; some may be over.

    Fast, and as many samples in each, to within one; much room is needed only where samples are large.
    """
    level = levels(samples.sizes).sum(axis=1)
    descending = np.argsort(-level, kind="stable")
    load, batches = np.zeros(n_batches, np.int64), np.empty(len(samples), np.int64)
    for start in range(0, len(samples), n_batches):
        row = descending[start : start + n_batches]
        lightest = np.argsort(load, kind="stable")[: len(row)]
        load[lightest] += level[row]
        batches[row] = lightest
    return MicroBatches(samples, n_batches, batches)


def spread(batches: Ints, n_batches: int) -> Ints:
    """Give each empty micro-batch a sample that is not the first of its own; in place."""
    empty = np.flatnonzero(np.bincount(batches, minlength=n_batches) == 0)
    first = np.unique(batches, return_index=True)[1]
    others = np.setdiff1d(np.arange(len(batches)), first)
    batches[others[len(others) - len(empty) :]] = empty
    return batches
