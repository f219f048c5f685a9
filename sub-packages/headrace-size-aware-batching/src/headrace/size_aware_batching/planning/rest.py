"""The rest of an epoch, planned anew after a change: everything that was not delivered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching.planning.last_step import Batches, Tail
from headrace.size_aware_batching.planning.order import SliceOrder
from headrace.size_aware_batching.planning.planner import Planner, StrataPlanner, WindowPlanner, last_below
from headrace.size_aware_batching.planning.prepared import PreparedSizes
from headrace.size_aware_batching.planning.strata import narrowed


class RestPlanner:
    """The batches of the rest of an epoch: a planner whose list begins at a position of the epoch.

    Args:
        origin: That position.
        inner: Plans the samples of the rest.
        key: The rest's own key of randomness: the epoch's would deal like samples as the epoch did.
    """

    def __init__(self, origin: int, inner: Planner | RestPlanner, key: int) -> None:
        self.origin, self.inner, self.key = origin, inner, key
        self.n_samples: int = origin + inner.n_samples

    def batches(self, epoch_key: int, position: int) -> Iterator[Batches]:  # noqa: ARG002  # it has its own key
        """Yield the batches from a position of the epoch on."""
        yield from self.inner.batches(self.key, max(0, position - self.origin))

    def count(self, epoch_key: int, position: int) -> int:  # noqa: ARG002  # it has its own key
        """Return the number of batches from a position on."""
        return self.inner.count(self.key, max(0, position - self.origin))

    def batch(self, epoch_key: int, number: int) -> NDArray[Any]:  # noqa: ARG002  # it has its own key
        """Return the samples of one batch of the rest."""
        return self.inner.batch(self.key, number)


def delivered(planner: Planner | RestPlanner, epoch_key: int, position: int) -> NDArray[Any]:
    """Return the samples of a list up to a position, in the order of the list; only their windows are planned."""
    origin = planner.origin if isinstance(planner, RestPlanner) else 0
    missing, parts = position - origin, [np.zeros(0, np.int64)]
    for indices, _ in planner.batches(epoch_key, origin) if missing else ():
        parts.append(indices[:missing])
        missing -= len(parts[-1])
        if not missing:
            break
    return np.concatenate(parts)


def rest_of_order(planner: Planner | RestPlanner, epoch_key: int, position: int) -> SliceOrder:
    """Return the samples of a user's order that are left: first those of the current window, then the next windows."""
    if isinstance(planner, RestPlanner):
        return rest_of_order(planner.inner, planner.key, position - planner.origin)
    order: SliceOrder = planner.order  # type: ignore[union-attr,assignment]  # an order has no strata
    begun = np.zeros(0, np.int64)
    behind = windows_begun(planner, position)
    if behind > position:
        indices, _ = planner.group(epoch_key, int(np.searchsorted(planner.starts, position)) - 1)  # type: ignore[union-attr]  # has windows
        begun = indices[len(indices) - (behind - position) :]
    left, read = len(begun), first_unread(planner, position)

    def give(start: int, stop: int) -> NDArray[Any]:
        own = begun[start:stop]
        if stop <= left:
            return own
        taken = order.take(epoch_key, behind + max(start - left, 0), behind + stop - left)
        return np.concatenate([own, taken]) if len(own) else taken

    def draw(place: int) -> int:
        return read - 1 if place < left else order.draw(behind + place - left)

    return SliceOrder(left + order.n_samples - behind, give, draw=draw, read=read)


def windows_begun(planner: Planner, position: int) -> int:
    """Return where the windows end that have begun before a position of a list."""
    if isinstance(planner, WindowPlanner):
        return int(planner.starts[np.searchsorted(planner.starts, position)])
    return position


def first_unread(planner: Planner | RestPlanner, position: int) -> int:
    """Return the first draw of a user's order that no list has read for what comes before a position."""
    if isinstance(planner, RestPlanner):
        return first_unread(planner.inner, position - planner.origin)
    order: SliceOrder = planner.order  # type: ignore[union-attr,assignment]  # an order has no strata
    behind = windows_begun(planner, position)
    return order.draw(behind - 1) + 1 if behind else order.read


def place_of_draw(planner: Planner | RestPlanner, draw: int) -> int:
    """Return the first position of a list that may hold a draw of a user's order: where its window begins."""
    if isinstance(planner, RestPlanner):
        return planner.origin + place_of_draw(planner.inner, draw)
    place: int = planner.order.place_of(draw)  # type: ignore[union-attr]  # an order has no strata
    if isinstance(planner, WindowPlanner) and place < planner.n_samples:
        return int(planner.starts[last_below(planner.starts, place)])
    return place


def reordered(order: SliceOrder, other: SliceOrder, draw: int) -> SliceOrder:
    """Return an order whose samples from a draw on are those of another one."""
    cut, begin = order.place_of(draw), other.place_of(draw)

    def give(start: int, stop: int) -> NDArray[Any]:
        parts = [order.take(0, start, min(stop, cut))] if start < cut else []
        if stop > cut:
            parts.append(other.take(0, begin + max(start - cut, 0), begin + stop - cut))
        return np.concatenate([np.zeros(0, np.int64), *parts])

    def place(at: int) -> int:
        return order.draw(at) if at < cut else other.draw(begin + at - cut)

    return SliceOrder(cut + other.n_samples - begin, give, draw=place, read=order.read)


def filtered(order: SliceOrder, kept: NDArray[Any], n_samples: int) -> SliceOrder:
    """Return the positions of an order whose samples are kept; the order is read for that."""
    listed, known = order.take(0, 0, order.n_samples), np.zeros(n_samples, bool)
    known[kept] = True
    places = np.flatnonzero(known[listed])
    left = listed[places]
    return SliceOrder(
        len(left),
        lambda start, stop: left[start:stop],
        draw=lambda place: order.draw(int(places[place])),
        read=order.read,
    )


FEW = 64  # times as many samples there are as are taken away, where these are looked up one by one


def still_sorted(
    planner: Planner | RestPlanner, sized: PreparedSizes, gone: NDArray[Any], n_samples: int
) -> tuple[NDArray[Any], NDArray[Any]] | None:
    """Return what a planner has sorted by size without some samples; None where that is not all there is to plan.

    Args:
        planner: Plans more of the same sizes.
        sized: The sizes, of one column.
        gone: Samples to leave out, in any order; some may come twice, or be out already.
        n_samples: How many are left.
    """
    inner = planner.inner if isinstance(planner, RestPlanner) else planner
    if not isinstance(inner, StrataPlanner) or (descending := inner.descending) is None:
        return None
    by_size = np.asarray(inner.by_size)
    if isinstance(descending, np.ndarray) and FEW * len(gone) < len(descending):
        there = np.ones(len(descending), bool)
        there[_places_by_size(by_size, descending, gone, sized.sizes[gone])] = False
    else:
        known = np.ones(len(sized.sizes), bool)
        known[gone] = False
        there = known[by_size]
    found: NDArray[Any] = by_size[there]
    if len(found) != n_samples:
        return None
    # Those of a file are not in one array.
    return found, narrowed(descending[there] if isinstance(descending, np.ndarray) else sized.sizes[found])


def _places_by_size(
    by_size: NDArray[Any], descending: NDArray[Any], samples: NDArray[Any], sizes: NDArray[Any]
) -> NDArray[np.int64]:
    """Return the places of those samples that are there, by halving: largest first, equal ones in their order."""
    low, high = np.zeros(len(samples), np.int64), np.full(len(samples), len(by_size), np.int64)
    for _ in range(len(by_size).bit_length()):
        middle = np.minimum((low + high) // 2, len(by_size) - 1)
        before = descending[middle] > sizes
        before |= (descending[middle] == sizes) & (by_size[middle] < samples)
        before &= low < high
        low, high = np.where(before, middle + 1, low), np.where(before, high, np.minimum(middle, high))
    inside = low < len(by_size)
    places: NDArray[np.int64] = low[inside][by_size[low[inside]] == samples[inside]]
    return places


def place_of_step(
    planner: Planner | RestPlanner, epoch_key: int, position: int, steps: int, replicas: int, tail: Tail
) -> tuple[int, int]:
    """Return a step no later than the one so many steps behind a position, and where it begins in the epoch.

    The steps up to it hold whole batches of the list, so that it is found without planning them. Near the end of an
    epoch, where batches are split, it is an earlier one.

    Args:
        planner: Its list of batches.
        epoch_key: The key of the epoch.
        position: Where a step begins.
        steps: How many steps behind that.
        replicas: Number of ranks.
        tail: Policy for the last batches.
    """
    if isinstance(planner, RestPlanner):
        step, place = place_of_step(planner.inner, planner.key, position - planner.origin, steps, replicas, tail)
        return step, planner.origin + place
    left = planner.count(epoch_key, position)
    before = planner.count(epoch_key, 0) - left
    if planner.position_of(epoch_key, before) != position:  # inside a batch: the list of the next ranks begins there
        return 0, position
    steps, back = min(steps, left // replicas), 1
    while steps > 0:
        place = planner.position_of(epoch_key, before + steps * replicas)
        spare = (planner.n_samples - place) - (left - steps * replicas)
        if tail != "split" or spare >= replicas - 1:
            return steps, place
        steps, back = steps - back, 2 * back
    return 0, position
