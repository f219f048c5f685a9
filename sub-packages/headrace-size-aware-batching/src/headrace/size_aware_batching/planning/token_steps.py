"""Optimizer steps of so many tokens: an epoch's list is cut at tokens, and each step packed for the ranks there are.

A step is a run of the list. Its end is the place whose cumulated tokens are nearest to its target, so that no step is
off by more than the longest sample, and errors never add up. Which samples a step holds depends on the order, the sizes
and the schedule alone. The world size decides into how many micro-batches the samples of a step are packed, and that is
one function, `pack_step`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching._shared.checks import checked_int, shown
from headrace.size_aware_batching._shared.display import counted
from headrace.size_aware_batching._shared.epoch_plan import NO_LIMIT, Place, Steps
from headrace.size_aware_batching._validation import Number
from headrace.size_aware_batching.planning.batch_list import GroupedList, index_at
from headrace.size_aware_batching.planning.curriculum import (
    MOST_STAGES,
    Ramp,
    Stage,
    competence,
    draw_stages,
    shortest_first,
)
from headrace.size_aware_batching.planning.distribution import distribute_packed
from headrace.size_aware_batching.planning.last_step import Batches
from headrace.size_aware_batching.planning.limits import CountLimits, SumLimits
from headrace.size_aware_batching.planning.list_plan import as_steps
from headrace.size_aware_batching.planning.micro_batches.filling import dealt_in_rows
from headrace.size_aware_batching.planning.micro_batches.padded import PaddedSamples, plan_padded
from headrace.size_aware_batching.planning.micro_batches.padded import largest_first as padded_largest_first
from headrace.size_aware_batching.planning.micro_batches.samples import NoPlanError, Samples, largest_first, whole_work
from headrace.size_aware_batching.planning.micro_batches.sums import fitted, plan_exactly
from headrace.size_aware_batching.planning.options import change_within_epoch_error
from headrace.size_aware_batching.planning.order import Order, ShuffledOrder, SliceOrder
from headrace.size_aware_batching.planning.packing import lower_bound
from headrace.size_aware_batching.planning.pieces import Pieces
from headrace.size_aware_batching.planning.prepared import PreparedSizes, left_of
from headrace.size_aware_batching.planning.token_schedule import OptimizerSteps, TokenSchedule

AT_ONCE = 2**20  # samples of an order that are looked at together


class Segment(NamedTuple):
    """What was delivered of a step's samples while they were packed for so many ranks and micro-batches."""

    num_replicas: int
    accumulate: int
    samples: int


@dataclass(frozen=True)
class TokenSteps:
    """Cuts epochs into optimizer steps.

    Args:
        sized: Sizes ready for planning, and what limits a batch.
        tokens: Tokens of each sample, shape ``[n]``.
        schedule: Tokens of each step.
        drops: Whether a shorter step at the end of an epoch is left out.
        accumulate: Micro-batches of a step on each rank, None for the fewest that hold every step of a stage.
    """

    sized: PreparedSizes
    tokens: NDArray[Any]
    schedule: TokenSchedule
    drops: bool
    accumulate: int | None

    @cached_property
    def planned(self) -> NDArray[Any]:
        """Tokens of the samples that are planned."""
        return self.tokens if self.sized.kept is None else self.tokens[self.sized.kept]

    @cached_property
    def longest(self) -> Number:
        """Tokens of the longest sample."""
        longest: Number = self.planned.max(initial=0).item()
        return longest

    def refuse_short_steps(self) -> None:
        """Refuse steps that a single sample would fill."""
        for _, tokens in self.schedule.stages:
            if tokens <= self.longest:
                raise ValueError(
                    f"tokens_per_step must be more than {self.longest}, the size of the longest sample, got {tokens}"
                )

    def total(self, order: Order | None) -> Number:
        """Return the tokens of an epoch; ``order`` is that of a user's sampler, None for all samples once."""
        if order is None:
            return summed(self.planned)
        pieces = range(0, order.n_samples, AT_ONCE)
        return sum(summed(self.tokens[order.take(start, start + AT_ONCE)]) for start in pieces)

    def ends(self, first: int, total: Number) -> NDArray[Any]:
        """Return the cumulated tokens at the ends of an epoch's steps, without a shorter one that is left out."""
        ends = self.schedule.ends(first, total, self.longest)
        if self.drops:
            last = ends[-1] - (ends[-2] if len(ends) > 1 else 0)
            if 2 * last < 2 * self.schedule.at(first + len(ends) - 1) - self.longest:
                ends = ends[:-1]
        return ends

    def n_steps(self, first: int, order: Order | None) -> int:
        """Return how many steps an epoch has that begins with this one."""
        n_samples = self.sized.n_samples if order is None else order.n_samples
        return len(self.ends(first, self.total(order))) if n_samples else 0

    def short_first(self, epoch_key: int, ramp: Ramp, passed: int, first: int) -> SliceOrder:
        """Return the order of an epoch that begins after so many steps of a curriculum, with the step ``first``."""
        ends = self.ends(first, self.total(None))[: ramp.steps - passed]
        targets = np.diff(ends, prepend=ends[:1] * 0)[:, None]
        together = -(-ramp.steps // MOST_STAGES)
        stages = (
            Stage(float(competence(np.array(passed + start), ramp.steps)), targets[start : start + together])
            for start in range(0, len(targets), together)
        )

        def amounts(samples: NDArray[Any]) -> NDArray[Any]:
            tokens: NDArray[Any] = self.tokens[samples, None]
            return tokens.astype(wide(tokens))

        parts = list(draw_stages(shortest_first(self.sized), stages, amounts, epoch_key))
        head = np.concatenate([np.zeros(0, np.int64), *parts])
        rest = left_of(self.sized, head)
        behind = ShuffledOrder(epoch_key, len(rest), rest)

        def give(start: int, stop: int) -> NDArray[Any]:
            later = max(0, start - len(head)), max(0, stop - len(head))
            return np.concatenate([head[start:stop], behind.take(*later)])

        return SliceOrder(self.sized.n_samples, give)

    def starts(self, order: Order, first: int, total: Number) -> NDArray[np.int64]:
        """Return the position at which each step of an epoch begins and, last, where the last one ends."""
        ends = self.ends(first, total) if order.n_samples else np.zeros(0, np.int64)
        found = [np.zeros(1, np.int64)]
        done: Number = 0
        for start in range(0, order.n_samples, AT_ONCE):
            tokens = self.tokens[order.take(start, start + AT_ONCE)]
            running = np.concatenate([[done], done + np.cumsum(tokens, dtype=wide(tokens))])
            inside = ends[(ends > done) & (ends <= running[-1])]
            above = np.searchsorted(running, inside)
            found.append(start + above - (inside - running[above - 1] <= running[above] - inside))
            done = running[-1].item()
        starts = np.concatenate(found)
        if len(ends) and ends[-1] >= total:  # samples without tokens at the end belong to the last step, too
            starts = np.append(starts[: len(ends)], order.n_samples)
        return starts


def wide(tokens: NDArray[Any]) -> type[np.generic]:
    """Return the type to sum tokens in."""
    return np.float64 if tokens.dtype.kind == "f" else np.int64


def summed(tokens: NDArray[Any]) -> Number:
    """Return the sum of tokens; floats are added one after the other, as they are where the list is cut."""
    total: Number = np.cumsum(tokens, dtype=wide(tokens))[-1].item() if len(tokens) else 0
    return total


class TokenPlan:
    """The plan of an epoch in optimizer steps of so many tokens. Each is packed for the ranks that there are.

    A place inside an optimizer step holds the `Segment`s in which that step was packed so far.

    Args:
        token_steps: Cuts epochs into steps.
        order: The samples of the epoch, in order.
        first: Number of its first step, over all epochs.
        total: Tokens of the epoch.
        pieces: The pieces of long samples.
        has_draws: Whether samples have draws: a user's sampler gave the order.
        warning_once: A warning at the first steps, for one rank.
    """

    start = 0
    balanced_ranks = None  # each step is packed for its ranks

    def __init__(
        self,
        token_steps: TokenSteps,
        order: Order,
        first: int,
        total: Number,
        pieces: Pieces | None,
        has_draws: bool,
        warning_once: str,
    ) -> None:
        self.token_steps, self.order, self.first = token_steps, order, first
        self.pieces, self.has_draws = pieces, has_draws
        self.warning_once, self.starts = warning_once, token_steps.starts(order, first, total)
        self.end, self.n_optimizer_steps = int(self.starts[-1]), len(self.starts) - 1
        if token_steps.drops and not self.n_optimizer_steps and order.n_samples:
            raise ValueError(
                f"tail='drop' must leave a whole step, got an epoch of {total} tokens and steps of "
                f"{token_steps.schedule.at(first)}: use tail='split', or a smaller tokens_per_step"
            )
        self._packed: PackedSteps | None = None  # for the latest number of ranks

    def batches(self, world: int) -> PackedSteps:
        """Return the batches, as they are packed for so many ranks."""
        return self.packed(world)

    @property
    def optimizer_steps(self) -> OptimizerSteps:
        """Where the optimizer steps begin, and the tokens that each is to have."""
        return OptimizerSteps(self.starts, self.tokens_asked())

    def refuse_change_within_epoch(self) -> None:
        """Refuse to plan a part of the epoch anew: its steps depend on what came before."""
        raise change_within_epoch_error("tokens_per_step", self.token_steps.schedule.value)

    def packed(self, world: int) -> PackedSteps:
        """Return the optimizer steps as they are packed for so many ranks."""
        if self._packed is None or self._packed.num_replicas != world:
            self._packed = PackedSteps(self.token_steps, self.order, self.starts, self.first, world)
        return self._packed

    def tokens_asked(self) -> list[float]:
        """Return the tokens that each optimizer step is to have."""
        return [float(self.token_steps.schedule.at(self.first + step)) for step in range(self.n_optimizer_steps)]

    def step_of(self, position: int) -> int:
        """Return the number in the epoch of the optimizer step that a position is in."""
        return index_at(self.starts, position)

    def micro_batches(self, place: Place, world: int) -> NDArray[np.int64]:
        """Return the micro-batches on each rank of each optimizer step from a place on."""
        packed, step = self.packed(world), self.step_of(place.position)
        if place.position == self.starts[step]:
            return packed.accumulate[step:]
        (_, offsets), _ = packed.rest(step, self._segments(place))
        return np.concatenate([[-(-(len(offsets) - 1) // world)], packed.accumulate[step + 1 :]])

    def steps(self, place: Place, world: int, _all_ranks: bool) -> Iterator[Steps]:
        """Yield the steps from a place on: the micro-batches of one optimizer step after the other."""
        packed, step, parts = self.packed(world), self.step_of(place.position), list[Batches]()
        if place.position > self.starts[step]:
            rest, _ = packed.rest(step, self._segments(place))
            parts, step = [rest], step + 1
        later = (packed.group(number) for number in range(step, self.n_optimizer_steps))
        dealt = distribute_packed(chain(parts, later), world)
        yield from as_steps(self, dealt, place.position, world, "split", warning_once=self.warning_once)

    def n_steps(self, place: Place, world: int, most: int = NO_LIMIT) -> int:
        """Return the number of micro-batches on each rank from a place on."""
        return min(most, int(self.micro_batches(place, world).sum()))

    def seek(self, place: Place, world: int, steps: int) -> tuple[int, Place]:
        """Return the last micro-batch, up to ``steps`` after a place, that begins an optimizer step; and its place."""
        before = np.cumsum(self.micro_batches(place, world))
        passed = int(np.searchsorted(before, steps, side="right"))  # optimizer steps
        if not passed:
            return 0, place
        return int(before[passed - 1]), Place(int(self.starts[self.step_of(place.position) + passed]))

    def place(self, position: int, began: Place, world: int) -> Place:
        """Return the place of a position, for an iteration that began at ``began`` with so many ranks."""
        step, segments = self.step_of(position), list[Segment]()
        left = position - int(self.starts[step])
        if not left:
            return Place(position)
        if self.step_of(began.position) == step and began.position > self.starts[step]:
            segments = self.packed(world).rest(step, self._segments(began))[1]
        else:
            segments = [Segment(world, int(self.packed(world).accumulate[step]), 0)]
        delivered = []
        for number, segment in enumerate(segments, 1):
            taken = left if number == len(segments) else min(left, segment.samples)
            left -= taken
            delivered += [segment._replace(samples=taken)] * (taken > 0)
        return Place(position, tuple(delivered))

    def loaded_place(self, state: Mapping[str, Any]) -> Place:
        """Return the place of a state."""
        position = state["position"]
        if position == self.starts[self.step_of(position)]:
            return Place(position)
        saved = Place(position, state.get("inside_step") or ())
        return Place(position, tuple(self._segments(saved, "state['inside_step']", "load the state as state_dict()")))

    def _segments(
        self, place: Place, name: str = "place", cure: str = "give a place as batches_from()"
    ) -> list[Segment]:
        """Return how the optimizer step of a place was packed so far; refuse what does not say that of all samples."""
        left = place.position - int(self.starts[self.step_of(place.position)])
        try:
            segments = [Segment(*(checked_int(name, number, 1) for number in entry)) for entry in place.plan_state]
        except (TypeError, ValueError):
            segments = []
        if sum(segment.samples for segment in segments) != left:
            raise ValueError(
                f"{name} must tell how the {left} samples were packed that were delivered of an optimizer step, got "
                f"{shown(place.plan_state)}: {cure} returned it"
            )
        return segments

    def refuse_empty(self, _world: int) -> None:
        """Refuse nothing: with ``tail="drop"`` there is a complete step."""

    def keys(self, samples: NDArray[Any]) -> list[Any]:
        """Return what batches hold: ints, or pieces of long samples."""
        keys: list[Any] = samples.tolist() if self.pieces is None else self.pieces.keys(samples)
        return keys

    def delivered(self, start: int, stop: int) -> NDArray[Any]:
        """Return the samples of the dataset between two positions, between which whole optimizer steps lie."""
        if not {start, stop} <= {*self.starts.tolist()}:
            raise ValueError(
                "skip() must begin and end between two optimizer steps, got one that divides a step of "
                "tokens_per_step: give the micro-batches that whole steps have on a rank, as accumulation says"
            )
        samples = self.order.take(start, stop)
        return samples if self.pieces is None else self.pieces.samples[samples]

    def first_unread(self, _position: int) -> int:
        """Refuse."""
        raise self._refused()

    def position_of_draw(self, _draw: int) -> int:
        """Refuse."""
        raise self._refused()

    def _refused(self) -> ValueError:
        return ValueError(f"tokens_per_step must be None for that, got {shown(self.token_steps.schedule.value)}")


class PackedSteps(GroupedList):
    """The optimizer steps of an epoch as groups of batches, for one number of ranks.

    The batches of a step come micro-batch by micro-batch: the first of every rank, then the second of every rank, ...
    """

    def __init__(
        self, token_steps: TokenSteps, order: Order, starts: NDArray[np.int64], first: int, num_replicas: int
    ) -> None:
        super().__init__(starts)
        self.starts: NDArray[np.int64] = starts
        self.token_steps, self.samples_of, self.num_replicas = token_steps, order, num_replicas
        self._rest: tuple[tuple[Any, ...], Batches, list[Segment]] | None = None  # the latest one
        self.stages = np.array([token_steps.schedule.stage(first + step) for step in range(len(starts) - 1)], np.int64)
        self._short = len(starts) > 1 and not token_steps.drops  # the last one may be shorter than the others

    def step_samples(self, step: int) -> NDArray[Any]:
        """Return the samples of a step, in the order of the list."""
        return self.samples_of.take(*self.starts[step : step + 2].tolist())

    @cached_property
    def before(self) -> NDArray[np.int64]:
        """Number of batches before each step."""
        counts = self.accumulate * self.num_replicas
        if self._short:  # samples that are too few for all ranks are given to some of them once more
            counts[-1] = min(counts[-1], self.starts[-1] - self.starts[-2])
        return np.concatenate([[0], np.cumsum(counts)])

    def plan_group(self, group: int) -> Batches:
        """Pack a step."""
        return self.pack(self.step_samples(group), self.num_replicas, int(self.accumulate[group]))

    def pack(self, samples: NDArray[Any], num_replicas: int, accumulate: int) -> Batches:
        """Pack samples of a step that are known to fit."""
        packed = pack_step(self.token_steps.sized, samples, num_replicas, accumulate)
        if packed is None:
            raise RuntimeError(f"{len(samples)} samples do not fit into {accumulate} micro-batches of a step")
        return packed

    def rest(self, step: int, segments: Sequence[Segment]) -> tuple[Batches, list[Segment]]:
        """Return the batches that are left of a step of which some samples were delivered, and the segments to go on.

        On as many ranks these are the batches of the packing that it was stopped in. On others, or between the batches
        of a micro-batch, the samples that are left are packed anew.
        """
        if self._rest is None or self._rest[0] != (step, *segments):
            self._rest = (step, *segments), *self._left_of(step, segments)
        return self._rest[1:]

    def _left_of(self, step: int, segments: Sequence[Segment]) -> tuple[Batches, list[Segment]]:
        samples, offsets, left = self.step_samples(step), np.zeros(1, np.int64), 0
        for segment in segments:
            samples, offsets = self.pack(samples[left:], segment.num_replicas, segment.accumulate)
            left = segment.samples
        if segments[-1].num_replicas == self.num_replicas and left in offsets[:: self.num_replicas]:
            return (samples[left:], offsets[offsets >= left] - left), list(segments)
        samples = samples[left:]
        accumulate = fewest_micro_batches(self.token_steps.sized, [samples], self.num_replicas)
        return self.pack(samples, self.num_replicas, accumulate), [
            *segments,
            Segment(self.num_replicas, accumulate, 0),
        ]

    @cached_property
    def accumulate(self) -> NDArray[np.int64]:
        """Micro-batches of each step on each rank: as many in all whole steps of a stage that have the samples."""
        found = np.ones(len(self.stages), np.int64)
        whole, counts = len(self.stages) - self._short, np.diff(self.starts)
        for stage in np.unique(self.stages[:whole]).tolist():
            of_stage = np.flatnonzero(self.stages[:whole] == stage)
            found[of_stage] = fewest = max(self._fewest(of_stage), self.token_steps.accumulate or 1)
            for step in of_stage[counts[of_stage] < self.num_replicas * fewest]:  # of a few large samples
                found[step] = counts[step] // self.num_replicas
                if found[step] < (least := self._fewest(np.array([step]))):
                    raise ValueError(
                        f"tokens_per_step={self.token_steps.schedule.stages[stage][1]} gives a step of "
                        f"{counted(int(counts[step]), 'sample')}, too few for {counted(least, 'micro-batch')} on each "
                        f"of {counted(self.num_replicas, 'rank')}: raise it, or max_total_size"
                    )
        if self._short:
            fewest = self._fewest(np.array([whole]))
            found[-1] = max(fewest, min(self.token_steps.accumulate or 1, counts[-1] // self.num_replicas))
        return found

    def _fewest(self, of_stage: NDArray[np.int64]) -> int:
        """Return the fewest micro-batches that hold each of some steps of a stage."""
        fewest = fewest_micro_batches(
            self.token_steps.sized, map(self.step_samples, of_stage.tolist()), self.num_replicas
        )
        if (given := self.token_steps.accumulate) is not None and fewest > given:
            raise ValueError(
                f"accumulate={given} must be at least {fewest} for steps of "
                f"{self.token_steps.schedule.stages[self.stages[of_stage[0]]][1]} tokens on "
                f"{counted(self.num_replicas, 'rank')}: raise it or max_total_size, or leave it out"
            )
        return fewest


def fewest_micro_batches(sized: PreparedSizes, steps: Iterable[NDArray[Any]], num_replicas: int) -> int:
    """Return how many micro-batches on each rank hold every one of some steps.

    A number that is sure to be enough is known without packing. Fewer are tried where fewer might do, the fast
    way first: a step that cannot be packed into them ends that for all steps.
    """
    fewest = 1
    for samples in steps:
        _, step = by_size(sized, samples)
        sure = -(-sure_batches(step) // num_replicas)
        if sure > fewest and isinstance(step, Samples):
            if packs_in_rows(step, fewest * num_replicas):
                continue
            least = max(fewest, -(-lower_bound(step.sizes, step.budgets) // num_replicas))
            tried = (fewer for fewer in range(least, sure) if fewer * num_replicas <= len(samples))
            sure = next((fewer for fewer in tried if packs(step, num_replicas, fewer)), sure)
        fewest = max(fewest, sure)
    return fewest


def packs(step: Samples, num_replicas: int, accumulate: int) -> bool:
    """Return whether a step is packed into so many micro-batches on each rank."""
    return packs_in_rows(step, accumulate * num_replicas) or fitted(step, num_replicas, accumulate) is not None


def packs_in_rows(step: Samples, n_batches: int) -> bool:
    """Return whether the fastest way fits, which packing a step tries last: then it is sure to succeed."""
    return len(step) >= n_batches and dealt_in_rows(step, n_batches).fits()


def pack_step(sized: PreparedSizes, samples: NDArray[Any], num_replicas: int, accumulate: int) -> Batches | None:
    """Pack the samples of an optimizer step into ``accumulate`` micro-batches on each rank; None where they do not fit.

    The batches come micro-batch by micro-batch, those of all ranks together being alike in work. No batch is empty;
    where there are fewer samples than batches, each is a batch.
    """
    order, step = by_size(sized, samples)
    n_batches = num_replicas * accumulate
    if len(samples) < n_batches:
        own = step.work if isinstance(step, Samples) else step.own_work
        return samples[order[np.argsort(-own, kind="stable")]], np.arange(len(samples) + 1)
    try:
        if isinstance(step, Samples):
            found = plan_exactly(step, num_replicas, accumulate)
        else:
            found = plan_padded(step, num_replicas, accumulate, "micro_batch")
    except NoPlanError:
        return None
    if found.n_micro_batches > accumulate:
        return None
    number = found.micro_batch * num_replicas + found.rank
    counts = np.bincount(number, minlength=n_batches)
    return samples[order[np.argsort(number, kind="stable")]], np.concatenate([[0], np.cumsum(counts)])


def by_size(sized: PreparedSizes, samples: NDArray[Any]) -> tuple[NDArray[np.int64], Samples | PaddedSamples]:
    """Return the samples of a step, the largest first, ready for planning, and their order."""
    sizes, limits, cost = sized.sizes[samples], sized.limits, sized.cost
    if not isinstance(limits, CountLimits):
        work = cost.sample_work(sizes, limits) if sized.work is None else sized.work[samples]
        return largest_first(sizes, limits, whole_work(work))
    if sized.work is not None:
        return padded_largest_first(sizes, limits, sized.work[samples], None)
    alone = np.arange(len(samples))
    own = np.asarray(cost.work(sizes, limits)(alone[None], np.append(alone, len(alone)))[0], np.float64)
    return padded_largest_first(sizes, limits, own, cost)


def sure_batches(step: Samples | PaddedSamples) -> int:
    """Return a number of batches into which `pack_step` is sure to pack a step's samples, as first fit does.

    One sum: first fit opens a batch for a sample only if those before it have no room. With m of them, the larger
    samples fill more than m * (budget - size); and each holds as many as would fit if all were as large as the largest.
    Several sums: first fit needs no more batches than next fit does.

    >>> sure_batches(Samples(np.array([[5], [4], [4], [2], [1]]), np.array([8]), np.ones(5, np.int64)))
    2
    """
    if isinstance(step, PaddedSamples):
        return len(step.cuts) - 1
    if step.sizes.shape[1] > 1:
        return len(SumLimits(tuple(step.budgets.tolist())).next_fit(step.sizes)) - 1
    descending, budget = step.sizes[:, 0], int(step.budgets[0])
    by_sum = int(((np.cumsum(descending) - descending) // (budget - descending + 1)).max(initial=0)) + 1
    each = max(1, budget // max(1, int(descending.max(initial=0))))
    return min(by_sum, -(-len(descending) // each))
