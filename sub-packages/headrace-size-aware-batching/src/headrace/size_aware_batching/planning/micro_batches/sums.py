"""One optimizer step whose sizes add up in a micro-batch: the steps in order. Pure."""

from __future__ import annotations

import numpy as np

from headrace.size_aware_batching.planning.micro_batches.balancing import (
    assign_ranks,
    even_parts,
    level,
    near,
    objective,
    polish,
)
from headrace.size_aware_batching.planning.micro_batches.bounds import fewest, least_value, row_targets
from headrace.size_aware_batching.planning.micro_batches.filling import packed, spread
from headrace.size_aware_batching.planning.micro_batches.samples import Assignment, Ints, Meet, NoPlanError, Samples
from headrace.size_aware_batching.planning.micro_batches.search import SMALL, search
from headrace.size_aware_batching.planning.micro_batches.swaps import MicroBatches
from headrace.size_aware_batching.planning.packing import first_fit, lower_bound


def plan_sums(samples: Samples, n_ranks: int, multiple: int, meet: Meet, least: int = 1) -> Assignment:
    """Plan one step of samples, the largest first, whose sizes add up in a micro-batch; ``least`` so many on a rank.

    Raises:
        NoPlanError: If there are fewer samples than micro-batches.
    """
    at_once = n_ranks * multiple
    few = max(least, -(-fewest(samples) // at_once) * multiple)
    most = len(samples) // at_once * multiple
    if few > most:
        raise NoPlanError(few)
    aims: dict[int, tuple[Ints, int]] = {}

    def attempt(count: int) -> MicroBatches | None:
        aims[count] = row_targets(samples, count, n_ranks)
        return packed(samples, count * n_ranks, aims[count][0].repeat(n_ranks))

    count, held = few, attempt(few)
    if held is None:  # a slower bound may be a better one
        better = max(few, -(-lower_bound(samples.sizes, samples.budgets) // at_once) * multiple)
        if better > few:
            few = better
            if few > most:
                raise NoPlanError(few)
            count, held = few, attempt(few)
    if held is None:
        bins = first_fit(samples.sizes, samples.budgets)
        last = -(-(int(bins.max()) + 1) // at_once) * multiple
        low, count = few, min(last, most)
        if last <= most:
            held = MicroBatches(samples, last * n_ranks, spread(bins, last * n_ranks))
            aims[last] = row_targets(samples, last, n_ranks)
            held = attempt(last) or held
        else:
            held = attempt(most)
        if held is None:
            raise NoPlanError(last)
        while count - low > multiple:
            middle = (low + count) // (2 * multiple) * multiple
            middle = max(low + multiple, middle)
            if found := attempt(middle):
                count, held = middle, found
            else:
                low = middle
    return balanced(held, n_ranks, few, aims[count], meet)


def plan_exactly(samples: Samples, n_ranks: int, count: int) -> Assignment:
    """Plan so many micro-batches on each rank, which meet at each; there are samples for all of them.

    Raises:
        NoPlanError: If no packing is found.
    """
    held = fitted(samples, n_ranks, count)
    if held is None:
        raise NoPlanError(count)
    return balanced(held, n_ranks, count, row_targets(samples, count, n_ranks), "micro_batch")


def fitted(samples: Samples, n_ranks: int, count: int) -> MicroBatches | None:
    """Return samples in so many micro-batches on each rank, or None where no packing is found.

    One is sure to be found where first fit needs no more, and where this found one for a smaller count.
    """
    n_batches, least = count * n_ranks, fewest(samples)

    def attempt(rows: int) -> MicroBatches | None:
        return packed(samples, rows * n_ranks, row_targets(samples, rows, n_ranks)[0].repeat(n_ranks))

    if least > n_batches:
        return None
    if (held := attempt(count)) is not None:
        return held
    bins = first_fit(samples.sizes, samples.budgets)
    if bins.max() < n_batches:
        return MicroBatches(samples, n_batches, spread(bins, n_batches))
    fewer = (attempt(rows) for rows in range(count - 1, -(-least // n_ranks) - 1, -1))
    batches = next((found.batches for found in fewer if found is not None), None)
    return None if batches is None else MicroBatches(samples, n_batches, spread(batches, n_batches))


def balanced(held: MicroBatches, n_ranks: int, few: int, aims: tuple[Ints, int], meet: Meet) -> Assignment:
    """Return the assignment of samples that fit, their work balanced; ``aims`` are those of `row_targets`."""
    samples, count = held.samples, held.n_batches // n_ranks
    targets, bound = aims[0], least_value(samples, count, n_ranks, meet, aims[1])
    seats = assign_ranks(held.work, n_ranks)
    if samples.parts is not None:
        return assigned(even_parts(held, seats, n_ranks, meet), seats, count, few, bound)
    if near(objective(held.work, seats, n_ranks, meet), bound):
        return assigned(held, seats, count, few, bound)
    if meet == "micro_batch":
        held = polish(held, n_ranks, targets, bound)
        seats = assign_ranks(held.work, n_ranks)
    else:
        held = level(held, seats, n_ranks, bound)
    value = objective(held.work, seats, n_ranks, meet)
    small = len(samples) <= SMALL and not near(value, bound)
    if small and (batches := search(samples, count, n_ranks, meet)) is not None:
        other = held.moved(batches)
        places = np.divmod(np.arange(other.n_batches), count)
        if meet == "micro_batch":
            places = assign_ranks(other.work, n_ranks)
        if objective(other.work, places, n_ranks, meet) < value:
            held, seats = other, places
    return assigned(held, seats, count, few, bound)


def assigned(held: MicroBatches, seats: tuple[Ints, Ints], count: int, few: int, bound: int) -> Assignment:
    """Return the assignment of samples from that of their micro-batches."""
    return Assignment(seats[0][held.batches], seats[1][held.batches], count, few, bound)
