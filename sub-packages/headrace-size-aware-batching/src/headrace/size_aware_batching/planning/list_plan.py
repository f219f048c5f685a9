"""The plan of an epoch that is one list of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, islice
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching._shared.display import counted
from headrace.size_aware_batching._shared.epoch_plan import NO_LIMIT, Place, Steps
from headrace.size_aware_batching.planning.batch_list import BatchList
from headrace.size_aware_batching.planning.costs import columns_of
from headrace.size_aware_batching.planning.distribution import (
    Dealt,
    autocorrelation,
    distribute_steps,
    last_known,
    n_steps,
)
from headrace.size_aware_batching.planning.groups import Groups
from headrace.size_aware_batching.planning.last_step import Balance, Batches, balance_evenly
from headrace.size_aware_batching.planning.options import Tail
from headrace.size_aware_batching.planning.pieces import Pieces
from headrace.size_aware_batching.planning.prepared import PreparedSizes

# Steps are correlated above this autocorrelation. That of fewer random steps may be so high by chance.
MOST_ALIKE, FEWEST_STEPS = 0.5, 64
ACCEPTED = "with accept={'balanced_ranks'}"  # how a run changes the number of balanced ranks


@dataclass(frozen=True, eq=False)
class ListPlan:
    """The plan of a list of batches.

    Args:
        batch_list: The batches.
        first_world: Number of ranks with which the run began.
        sized: The sizes that the list was made from; the last steps are balanced by them.
        units: What is planned in place of samples: pieces of long ones, or groups; None for samples.
        tail: Policy for the last batches.
        keeps_order: Whether the last steps leave their samples in order.
        balanced_ranks: Number of ranks for which steps are balanced.
        warns_of_correlation: Whether to warn of correlated steps: a user did not decide which steps follow one another.
        has_draws: Whether samples have draws: a user's sampler gave the order.
        start: Position where the list begins.
        retired: Samples that came before in the epoch, shape ``[n]``; None if there are none.
        reweights: Changes of a mixture's weights that the list was made with.
        warning_once: A warning at the first steps, for one rank.
    """

    batch_list: BatchList
    first_world: int
    sized: PreparedSizes
    units: Pieces | Groups | None
    tail: Tail
    keeps_order: bool
    balanced_ranks: int
    warns_of_correlation: bool
    has_draws: bool
    start: int = 0
    retired: NDArray[np.bool_] | None = None
    reweights: Sequence[Any] = ()
    warning_once: str = ""

    @property
    def end(self) -> int:
        """The position where the list ends."""
        return self.start + self.batch_list.n_samples

    def _inside(self, position: int) -> int:
        return max(0, position - self.start)

    def steps(self, place: Place, world: int, all_ranks: bool) -> Iterator[Steps]:
        """Yield the steps from a place on."""
        dealt, warning_once = self._distributed(self._inside(place.position), world, all_ranks), self.warning_once
        if self.warns_of_correlation:
            dealt, correlated = with_warning_of_correlation(
                dealt, self.sized.sizes.__getitem__, self.balanced_ranks, world, ACCEPTED
            )
            warning_once = "\n".join(filter(None, (warning_once, correlated)))
        yield from as_steps(self, dealt, place.position, world, self.tail, warning_once=warning_once)

    def _distributed(self, position: int, world: int, all_ranks: bool) -> Iterator[Dealt]:
        """Yield the steps of the list from a position on."""
        return distribute_steps(self.batch_list.batches(position), world, self.tail, self._balance(all_ranks))

    def _balance(self, all_ranks: bool) -> Balance | None:
        return None if all_ranks or self.keeps_order else partial(balance_evenly, self.sized)

    def n_steps(self, place: Place, world: int, most: int = NO_LIMIT) -> int:
        """Return the number of steps from a place on."""
        return min(most, n_steps(self.batch_list.count(self._inside(place.position)), world, self.tail))

    def seek(self, place: Place, world: int, steps: int) -> tuple[int, Place]:
        """Return a step and its place: the latest, at most ``steps`` after a place, that is found without planning.

        All steps before it consist of complete batches of the list. Near the end of an epoch batches are split, so
        there the step is an earlier one.
        """
        count, before = self._count(place)
        if self.batch_list.position_of(before) != self._inside(
            place.position
        ):  # inside a batch: other ranks stopped there
            return 0, place
        steps = self._whole_steps(before, count, world, steps)
        return steps, self._place_of(before + steps * world) if steps else place

    def _count(self, place: Place) -> tuple[int, int]:
        """Return the number of batches of the list, and of those before a place."""
        count = self.batch_list.count()
        return count, count - self.batch_list.count(self._inside(place.position))

    def _place_of(self, number: int) -> Place:
        """Return the place where a batch begins, by its number."""
        return Place(self.start + self.batch_list.position_of(number))

    def _whole_steps(self, first: int, stop: int, world: int, most: int) -> int:
        """Return a number of steps, at most so many, that hold complete batches from one on and leave enough samples.

        ``first`` and ``stop`` are numbers of batches, of which the steps are made.
        """
        batches, end, left = self.batch_list, self.batch_list.position_of(stop), stop - first
        steps, back = min(most, left // world), 1
        while steps > 0:
            spare = (end - batches.position_of(first + steps * world)) - (left - steps * world)
            if self.tail != "split" or spare >= world - 1:
                return steps
            steps, back = steps - back, 2 * back
        return 0

    def place(self, position: int, _began: Place, _world: int) -> Place:
        """Return the place of a position."""
        return Place(position)

    def loaded_place(self, state: Mapping[str, Any]) -> Place:
        """Return the place of a state."""
        return Place(state["position"])

    def batches(self, _world: int) -> BatchList:
        """Return the list."""
        return self.batch_list

    optimizer_steps = None  # a step is one batch on each rank

    def refuse_change_within_epoch(self) -> None:
        """Any part of the list may be planned anew."""

    def refuse_empty(self, world: int) -> None:
        """Refuse a number of ranks that leaves them no batch."""
        n_batches = self.batch_list.count() if self.tail == "drop" else 0
        if 0 < n_batches < world:
            refuse_empty(world, f"{n_batches} batches")

    def keys(self, samples: NDArray[Any]) -> list[Any]:
        """Return what batches hold: ints, or pieces of long samples."""
        if self.units is not None:
            return self.units.keys(samples)
        keys: list[int] = samples.tolist()
        return keys

    def delivered(self, start: int, stop: int) -> NDArray[Any]:
        """Return the samples of the dataset between two positions."""
        samples = self.batch_list.samples(stop - self.start)[start - self.start :]
        return samples if self.units is None else self.units.samples_of(samples)

    def retired_at(self, position: int, n: int) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Return the samples of the list before a position, and which of n samples came before it in the epoch."""
        delivered = self.batch_list.samples(position - self.start)
        retired = np.zeros(n, bool)
        if self.retired is not None:
            retired[: len(self.retired)] = self.retired
        retired[delivered] = True
        return delivered, retired

    def first_unread(self, position: int) -> int:
        """Return the first draw of a user's order that nothing before a position has read."""
        return self.batch_list.first_unread(position - self.start)

    def position_of_draw(self, draw: int) -> int:
        """Return the first position that may hold a draw of a user's order, or a later one."""
        return self.start + self.batch_list.position_of_draw(draw)


class OneLabelPlan(ListPlan):
    """The plan of a list in which all batches of a step have one label: steps begin anew where the label changes."""

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        """Number of batches up to the end of each run of batches of one label."""
        labels = self.batch_list.labels_of_batches(cast(NDArray[Any], self.sized.labels))
        return np.append(np.flatnonzero(labels[1:] != labels[:-1]) + 1, len(labels))

    def _ends_after(self, number: int) -> NDArray[np.int64]:
        """Return the ends of the runs from a batch on."""
        return self._ends[np.searchsorted(self._ends, number, side="right") :]

    def steps(self, place: Place, world: int, all_ranks: bool) -> Iterator[Steps]:
        """Yield the steps from a place on; the first of those that repeat samples says so for all."""
        warning = (
            f"label_per='step': the last batches of some labels hold too few samples for one on each of {world} ranks, "
            "so some samples are repeated: leave out such labels, or choose label_per='batch'"
        )
        for steps in super().steps(place, world, all_ranks):
            yield steps._replace(warning=warning) if steps.warning else steps
            warning = "" if steps.warning else warning

    def _distributed(self, position: int, world: int, all_ranks: bool) -> Iterator[Dealt]:
        """Yield the steps of each run by themselves."""
        balance, (_, before) = self._balance(all_ranks), self._count(Place(self.start + position))
        counts = np.diff(self._ends_after(before), prepend=before)
        for run in in_runs(self.batch_list.batches(position), counts.tolist()):
            yield from distribute_steps([run], world, self.tail, balance)

    def n_steps(self, place: Place, world: int, most: int = NO_LIMIT) -> int:
        """Return the number of steps from a place on."""
        _, before = self._count(place)
        counts = np.diff(self._ends_after(before), prepend=before)
        return min(most, int((-(-counts // world)).sum()))

    def seek(self, place: Place, world: int, steps: int) -> tuple[int, Place]:
        """Return a step and its place, near the latest one that is at most ``steps`` after a place."""
        _, before = self._count(place)
        ends = self._ends_after(before)
        passed = np.cumsum(-(-np.diff(ends, prepend=before) // world))
        run = int(np.searchsorted(passed, steps, side="right"))
        if not run:
            return 0, place
        first, done = int(ends[run - 1]), int(passed[run - 1])
        more = self._whole_steps(first, int(ends[run]), world, steps - done) if run < len(ends) else 0
        return done + more, self._place_of(first + more * world)


def in_runs(batches: Iterable[Batches], counts: Iterable[int]) -> Iterator[Batches]:
    """Yield batches again, so many at a time.

    >>> parts = [(np.array([7, 8]), np.array([0, 1, 2])), (np.array([9]), np.array([0, 1]))]
    >>> [samples.tolist() for samples, _ in in_runs(parts, [1, 2])]
    [[7], [8, 9]]
    """
    parts, samples, offsets = iter(batches), np.zeros(0, np.int64), np.zeros(1, np.int64)
    for count in counts:
        while len(offsets) <= count:
            more, begins = next(parts)
            samples = np.concatenate([samples, more])
            offsets = np.concatenate([offsets, offsets[-1] + begins[1:]])
        end = offsets[count]
        yield samples[:end], offsets[: count + 1]
        samples, offsets = samples[end:], offsets[count:] - end


def with_warning_of_correlation(
    dealt: Iterator[Dealt],
    sizes_of: Callable[[NDArray[Any]], NDArray[Any]],
    balanced_ranks: int,
    world: int,
    where: str,
) -> tuple[Iterator[Dealt], str]:
    """Return the steps, and a warning if the first of them rise and fall in size; else an empty one."""
    if balanced_ranks <= world:  # a group of batches of like work is no more than a step
        return dealt, ""
    some = list(islice(dealt, 1))
    sizes = columns_of(sizes_of(some[0].indices))[:, 0] if some else np.zeros(0)
    steps = some[0].offsets[::world] if some else np.zeros(1, np.int64)
    warning_once = correlation_warning(
        autocorrelation(sizes[: steps[-1]], steps), len(steps) - 1, balanced_ranks, world, where
    )
    return chain(some, dealt), warning_once


def correlation_warning(correlation: float, n_steps: int, balanced_ranks: int, world: int, where: str) -> str:
    """Return a warning of steps that are correlated because a run began with more ranks than it has; else an empty one.

    ``where`` says in which case the number of ranks may change.
    """
    if balanced_ranks <= world or n_steps < FEWEST_STEPS or not correlation > MOST_ALIKE:
        return ""
    return (
        f"successive steps hold samples of similar size: they are balanced for {balanced_ranks} ranks, with which the "
        f"run began, but now it has {counted(world, 'rank')}. balanced_ranks={world} makes their order random, "
        f"{where}"
    )


class _Numbered(Protocol):
    """A plan, as `as_steps` reads it."""

    @property
    def end(self) -> int: ...
    @property
    def has_draws(self) -> bool: ...
    def keys(self, samples: NDArray[Any], /) -> list[Any]: ...


def as_steps(
    plan: _Numbered,
    dealt_steps: Iterator[Dealt],
    position: int,
    world: int,
    tail: Tail,
    *,
    position_after: Callable[[int], int] | None = None,
    warning_once: str = "",
) -> Iterator[Steps]:
    """Yield what was distributed to the ranks from a position on, with the position after each batch.

    ``position_after`` returns it from the number of samples, if positions also count others. One rank gives
    ``warning_once``.
    """
    for dealt, is_last in last_known(dealt_steps) if tail == "drop" else ((dealt, False) for dealt in dealt_steps):
        offsets, n_own = dealt.offsets, len(dealt.offsets) - 1 - dealt.repeated
        ends = position + offsets[np.minimum(np.arange(1, len(offsets)), n_own)]
        if position_after is not None:
            ends = np.array([position_after(end) for end in ends.tolist()], np.int64)
        if is_last:
            ends[-1] = plan.end  # dropped samples count as delivered
        repeats = ""
        if dealt.repeated and tail == "split":
            again = plan.keys(dealt.indices[offsets[n_own] :])
            more = " ..." if len(again) > 10 else ""
            repeats = (
                f"tail='split': the last batches hold too few samples for one on each of {world} ranks; "
                f"samples are repeated on {counted(dealt.repeated, 'rank')}: {again[:10]}{more}"
            )
        yield Steps(
            dealt.indices,
            offsets,
            ends,
            dealt.draws(position) if plan.has_draws else None,
            warning=repeats,
            warning_once=warning_once,
        )
        position, warning_once = position + int(offsets[n_own]), ""
    if warning_once:  # no batch is left
        nothing = np.zeros(0, np.int64)
        yield Steps(nothing, np.zeros(1, np.int64), nothing, warning_once=warning_once)


def refuse_empty(world: int, got: str) -> None:
    """Refuse an epoch of which ``tail="drop"`` leaves nothing."""
    raise ValueError(
        f"tail='drop' must leave each of {world} ranks at least one batch, got {got}: use tail='split' or 'pad', fewer "
        "ranks, or a smaller budget"
    )
