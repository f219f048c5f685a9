"""The plan of one optimizer step: which rank runs which samples in which micro-batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching._shared.checks import checked_int, shown
from headrace.size_aware_batching._shared.display import counted, never_raises
from headrace.size_aware_batching._shared.ranks import Mesh, Ranks
from headrace.size_aware_batching._validation import checked_flag, one_of, whole_number
from headrace.size_aware_batching.planning.costs import CostFunction, SumCost, columns_of
from headrace.size_aware_batching.planning.labels import names_of_samples
from headrace.size_aware_batching.planning.limits import Budget, CountLimits, plain_budget
from headrace.size_aware_batching.planning.micro_batches.balancing import assign_ranks, lockstep
from headrace.size_aware_batching.planning.micro_batches.bounds import least_value, rank_bound
from headrace.size_aware_batching.planning.micro_batches.contexts import plan_contexts
from headrace.size_aware_batching.planning.micro_batches.groups import GroupOn, plan_groups
from headrace.size_aware_batching.planning.micro_batches.padded import largest_first as padded_largest_first
from headrace.size_aware_batching.planning.micro_batches.padded import plan_padded
from headrace.size_aware_batching.planning.micro_batches.samples import (
    Assignment,
    Meet,
    NoPlanError,
    Samples,
    largest_first,
    whole_work,
    work_exponent,
)
from headrace.size_aware_batching.planning.micro_batches.sums import plan_sums
from headrace.size_aware_batching.planning.options import Options
from headrace.size_aware_batching.planning.pieces import Pieces, longest_piece, pieces_of
from headrace.size_aware_batching.planning.prepared import PreparedSizes, prepare
from headrace.size_aware_batching.planning.units import whole_units
from headrace.size_aware_batching.sizes.read import read_sizes, work_vector

__all__ = ["StepPlan", "StepReport", "plan_step"]

CURE = "cut the samples, choose oversize='own_batch' or 'split', or let several ranks run them with contexts="
MEET: tuple[Meet, ...] = ("micro_batch", "step")
GROUP_ON: tuple[GroupOn, ...] = ("rank", "micro_step")
Oversize = Literal["raise", "own_batch", "split"]
OVERSIZE: tuple[Oversize, ...] = ("raise", "own_batch", "split")


@dataclass(frozen=True, repr=False)
class StepReport:
    """Figures about the plan of one optimizer step; ``print`` shows one per line.

    Args:
        samples: Number of samples.
        num_replicas: Number of ranks.
        num_micro_batches: Micro-batches of each rank.
        fewest: Lower bound of this number: no plan has fewer.
        budget: Budget of a micro-batch; with several budgets, the one that is filled most.
        largest: Largest cost of a micro-batch, against that budget.
        fill: Mean cost of a micro-batch as a share of the budget.
        meet: Where ranks wait for one another.
        lockstep: For each kind of work, the sum over the micro-steps of the largest rank's work, divided by the mean
            rank's work.
        totals: For each kind, the largest rank's work of the whole step, divided by the mean rank's work.
        bounds: For each kind, a lower bound of what ``meet`` minimises, for all plans with this many micro-batches.
        repeated: Samples that are repeated to fill micro-batches that would be empty.
        oversize: Samples that exceed a budget by themselves.
    """

    samples: int
    num_replicas: int
    num_micro_batches: int
    fewest: int
    budget: float
    largest: float
    fill: float
    meet: Meet
    lockstep: dict[str, float]
    totals: dict[str, float]
    bounds: dict[str, float]
    repeated: int
    oversize: int

    def __str__(self) -> str:
        return "\n".join(f"{name:22}{text}" for name, text in self._cells().items())

    @never_raises
    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({counted(self.samples, 'sample')}: {counted(self.num_replicas, 'rank')} x "
            f"{counted(self.num_micro_batches, 'micro-batch')}, fill {self.fill:.2%} of {self.budget:,.10g}, lockstep "
            f"{self._shown(self.lockstep, False)}, totals {self._shown(self.totals, False)})"
        )

    def _cells(self) -> dict[str, str]:
        return {
            "samples": f"{self.samples:,}",
            "ranks": f"{self.num_replicas:,}",
            "micro-batches a rank": f"{self.num_micro_batches:,}  (at least {self.fewest:,})",
            "budget": f"{self.budget:,.10g}",
            "largest": f"{self.largest:,.10g}",
            "fill": f"{self.fill:.2%}",
            "lockstep": self._shown(self.lockstep, self.meet == "micro_batch"),
            "totals": self._shown(self.totals, self.meet == "step"),
            "repeated": f"{self.repeated:,}",
            "oversize": f"{self.oversize:,}",
        }

    def _shown(self, values: dict[str, float], bounded: bool) -> str:
        several = len(values) > 1
        return ", ".join(
            f"{f'{name} ' * several}{value:.4f}{f'  (at least {self.bounds[name]:.4f})' * bounded}"
            for name, value in values.items()
        )


@dataclass(frozen=True, repr=False)
class StepPlan:
    """Ranks and micro-batches of the samples of one optimizer step, made by `plan_step`.

    Args:
        micro_batches: ``micro_batches[rank][k]`` are the samples of a rank's micro-batch k, ascending. Every rank has
            the same number of micro-batches, and none is empty. With ``meet="micro_batch"`` micro-step 0 has the most
            work.
        starts: Start of each entry of ``micro_batches`` in its sample: 0, unless ``oversize="split"`` cut the sample.
        lengths: Size of each entry, of its sample or its piece: shape ``[samples]`` or ``[samples, k]`` in each
            micro-batch.
        contexts: Number of ranks that run a micro-batch together, shape ``[ranks, k]``: 1, unless ``contexts`` allowed
            more. The first of these ranks is a multiple of the number.
        cost: Cost of each micro-batch, shape ``[ranks, k]``, or ``[ranks, k, budgets]`` with several budgets. If ranks
            share a micro-batch, each has its part.
        works: For each kind of work, the work of each micro-batch, shape ``[ranks, k]``: ``{"work": ...}``, or under
            the names of the ``work`` mapping.
        imbalances: For each kind, the minimised quantity divided by the mean rank's work; 1 is perfect. With
            ``meet="micro_batch"`` the quantity is the sum over the micro-steps of the largest rank's work, with
            ``"step"`` the largest rank's work of the whole step.
        bounds: For each kind, a lower bound for all plans with this many micro-batches, see `plan_step`.
        fewest: Lower bound of the number of micro-batches on each rank.
        restore: Permutation that restores the order of the samples: concatenate all outputs rank by rank and
            micro-batch by micro-batch; ``joined[restore]`` is then in the order of ``sizes``, with the pieces of a
            sample in a row.
        repeated: Samples that are repeated (``pad=True``), one entry per repeat.
        oversize: Samples that exceed a budget by themselves.
        budget: Budgets of a micro-batch.
        meet: Where ranks wait for one another.
    """

    micro_batches: tuple[tuple[NDArray[np.int64], ...], ...]
    starts: tuple[tuple[NDArray[np.int64], ...], ...]
    lengths: tuple[tuple[NDArray[Any], ...], ...]
    contexts: NDArray[np.int64]
    cost: NDArray[np.float64]
    works: dict[str, NDArray[np.float64]]
    imbalances: dict[str, float]
    bounds: dict[str, float]
    fewest: int
    restore: NDArray[np.int64]
    repeated: NDArray[np.int64]
    oversize: NDArray[np.int64]
    budget: tuple[float, ...]
    meet: Meet

    @property
    def num_replicas(self) -> int:
        """Number of ranks."""
        return len(self.micro_batches)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of each rank."""
        return len(self.micro_batches[0])

    @property
    def work(self) -> NDArray[np.float64]:
        """Work of each micro-batch, shape ``[ranks, k]``; of several kinds, their sum as shares of their totals."""
        if len(self.works) == 1:
            return next(iter(self.works.values()))
        shares = [work / total for work in self.works.values() if (total := float(work.sum()))]
        return np.sum(shares, axis=0) if shares else np.zeros(self.contexts.shape)

    @property
    def imbalance(self) -> float:
        """The largest of ``imbalances``."""
        return max(self.imbalances.values())

    @property
    def bound(self) -> float:
        """The largest of ``bounds``."""
        return max(self.bounds.values())

    def report(self) -> StepReport:
        """Return figures about the plan; ``print`` shows them line by line."""
        costs = self.cost.reshape(self.contexts.size, -1)
        fills = costs.mean(axis=0) / np.array(self.budget)
        column = int(fills.argmax())
        return StepReport(
            samples=len(self.restore),
            num_replicas=self.num_replicas,
            num_micro_batches=self.num_micro_batches,
            fewest=self.fewest,
            budget=float(self.budget[column]),
            largest=float(costs[:, column].max()),
            fill=float(fills[column]),
            meet=self.meet,
            lockstep={name: imbalance(work, "micro_batch") for name, work in self.works.items()},
            totals={name: imbalance(work, "step") for name, work in self.works.items()},
            bounds=self.bounds,
            repeated=len(self.repeated),
            oversize=len(self.oversize),
        )

    @never_raises
    def __repr__(self) -> str:
        more = {"repeated": self.repeated, "oversize": self.oversize}
        counts = [f"{len(found)} {name}" for name, found in more.items() if len(found)]
        several = len(self.works) > 1
        values = ", ".join(
            f"{f'{name} ' * several}{value:.4f} (at least {self.bounds[name]:.4f})"
            for name, value in self.imbalances.items()
        )
        samples = ", ".join([counted(len(self.restore), "sample"), *counts])
        shape = f"{counted(self.num_replicas, 'rank')} x {counted(self.num_micro_batches, 'micro-batch')}"
        return f"StepPlan({samples}: {shape}, imbalance {values})"


def imbalance(work: NDArray[np.float64], meet: Meet) -> float:
    """Return what ``meet`` asks for from the work ``[ranks, k]``, over the mean rank's work."""
    mean = float(work.sum()) / len(work)
    value = float(work.max(axis=0).sum() if meet == "micro_batch" else work.sum(axis=1).max())
    return value / mean if mean else 1.0


def plan_step(
    sizes: Any,
    max_total_size: float | Sequence[float],
    *,
    num_replicas: int | None = None,
    mesh: Mesh | None = None,
    cost: Literal["sum", "padded"] | CostFunction = "sum",
    max_items: int | None = None,
    length_multiple: int = 1,
    work: Any = None,
    meet: Meet = "micro_batch",
    multiple_of: int = 1,
    pad: bool = False,
    group_by: Any = None,
    group_on: GroupOn = "rank",
    oversize: Oversize = "raise",
    contexts: Sequence[int] | None = None,
) -> StepPlan:
    """Plan one optimizer step: which rank runs which samples in which micro-batch.

    Use it for samples that are known only when the step begins, such as answers that a model has just generated. Every
    rank gets the same number of micro-batches, the smallest for which a packing is found. No micro-batch is empty or
    exceeds a budget, and each sample comes once. Then the work is balanced. No process group is needed: only integers
    are compared, so the same arguments give the same plan on every rank and platform.

    **The bound.** Let there be K micro-batches on each of R ranks. Sort all of them by descending work. The j-th has at
    least work ``low[j]``, because the largest samples need several micro-batches, and at most ``up[j]``, the most work
    that fits into the budget. With ``meet="micro_batch"`` it is best to put R neighbours into each micro-step k, whose
    duration is that of its first one, M[k]. The total work is then at most the sum of min(M[k], up[kR + i]) over all k
    and i < R. The bound is the smallest sum of M >= low that allows this. With ``meet="step"`` the work of the largest
    rank has three bounds: the mean; for any q, the q + 1 lightest of the qR + 1 heaviest samples, because some rank
    gets q + 1 of these; and the heaviest sample plus what must join it on its rank: the K - 1 lightest samples, for the
    other micro-batches, or, if it is more, the work for which the other ranks have no room.

    Args:
        sizes: Size of each sample, in any form that `DistributedSizeAwareBatchSampler` takes; shape ``[n]``, or ``[n,
            k]`` for k budgets.
        max_total_size: Budget of a micro-batch, in the unit of the cost; for sizes of shape ``[n, k]`` a sequence of
            k.
        num_replicas: Number of data-parallel ranks. By default that of ``torch.distributed``, else ``WORLD_SIZE`` of
            the environment, else 1.
        mesh: In place of ``num_replicas``: a 1-D ``DeviceMesh`` of the data-parallel ranks, or an object with
            ``size()`` and ``get_local_rank()``.
        cost: ``"sum"`` of the sizes; ``"padded"``, count times largest; or ``f(n, largest)`` in any unit, which
            must not fall when n or the largest size grows.
        max_items: Largest number of samples in a micro-batch.
        length_multiple: The length of a micro-batch is rounded up to a multiple of this; not with ``cost="sum"``.
        work: Work of each sample, shape ``[n]``, in any unit; the work of a micro-batch is the sum. By default it
            follows from sizes and cost, as in `PlanReport`. With a mapping of names to works, for example of an encoder
            and a decoder, all of them are balanced together (``cost="sum"`` only).
        meet: Where ranks wait for one another. ``"micro_batch"``: at each micro-batch (FSDP, pipelines); minimises the
            sum over the micro-steps of the largest rank's work. ``"step"``: once, at the end of the step (gradient
            accumulation under ``no_sync``); minimises the largest rank's work of the whole step.
        multiple_of: The number of micro-batches is a multiple of this, such as the virtual stages of a pipeline.
        pad: Whether to repeat the sample with the least work in each empty micro-batch if there are fewer samples than
            micro-batches; ``repeated`` lists the repeats. False: raise an error.
        group_by: Group of each sample, shape ``[n]``, ints or strings, as an array, a list or a column like ``sizes``:
            samples of one group, such as the answers to one prompt, stay together (``cost="sum"`` only).
        group_on: Where a group stays together: on one ``"rank"``, or in one ``"micro_step"``, which is micro-batch k of
            all ranks.
        oversize: Policy for a sample that exceeds a budget by itself: ``"raise"`` an error; give it its
            ``"own_batch"``, over the budget (samples of size 0 may share it); or ``"split"`` it into full pieces and a
            remainder, as `DistributedSizeAwareBatchSampler` does (whole sizes of shape ``[n]``, ``cost="sum"``), see
            ``StepPlan.starts``. Its ``work`` is split in proportion.
        contexts: Powers of two up to the number of ranks, such as ``(1, 2, 4, 8)``: a sample that exceeds the budget of
            one rank is run by the smallest group of consecutive ranks whose budgets together hold it (dynamic context
            parallelism; ``cost="sum"`` only). Each rank of a group has its part of the cost and of the work. With
            ``meet="step"`` each rank runs its largest groups first. The ranks of a group then come from one larger
            group or begin with it, and no rank waits before the end of the step; there may be more micro-batches than
            needed, for ranks without a long sample.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument has a value that is not allowed, a sample is too large and ``oversize="raise"``,
            there are fewer samples than micro-batches and ``pad=False``, or no plan keeps the groups together.

    Example:
        >>> plan = plan_step([5, 3, 4, 4, 2, 6, 1, 7], 8, num_replicas=2, work=[5, 3, 4, 4, 2, 6, 1, 7])
        >>> plan
        StepPlan(8 samples: 2 ranks x 2 micro-batches, imbalance 1.0000 (at least 1.0000))
        >>> plan.cost.tolist()
        [[8.0, 8.0], [8.0, 8.0]]
        >>> joined = np.concatenate([batch for rank in plan.micro_batches for batch in rank])
        >>> joined[plan.restore].tolist()
        [0, 1, 2, 3, 4, 5, 6, 7]
    """
    one_of("meet", meet, MEET)
    one_of("oversize", oversize, OVERSIZE)
    one_of("group_on", group_on, GROUP_ON)
    multiple = whole_number("multiple_of", multiple_of) or 1
    pad = checked_flag("pad", pad)
    n_ranks = Ranks(num_replicas, None, mesh).world_size()
    table, budget = read_sizes(sizes), plain_budget(max_total_size)
    if not len(table):
        raise ValueError("sizes must hold at least one sample, got none: a step without samples has no plan")
    options_of_sums = {"group_by": group_by, "contexts": contexts, "oversize": "split" if oversize == "split" else None}
    for name, given in options_of_sums.items():
        if given is not None and cost != "sum":
            raise ValueError(
                f"{name}={shown(given)} needs cost='sum', got {shown(cost)}: leave {name} out for padded micro-batches"
            )
    if contexts is not None and (group_by is not None or oversize != "raise"):
        raise ValueError("contexts goes with neither group_by nor oversize, which say otherwise where a sample runs")
    works = work_columns(work, len(table), cost)
    groups = None if group_by is None else group_numbers(group_by, len(table))
    widths = None if contexts is None else checked_contexts(contexts, n_ranks)
    pieces = pieces_of(table, longest_piece(table, budget, SumCost()) if oversize == "split" else math.inf)
    policy: Literal["raise", "own_batch"] = "own_batch" if widths or oversize != "raise" else "raise"
    options = Options("sequential", cost, max_items=max_items, length_multiple=length_multiple, oversize=policy)
    prepared = prepare(pieces.lengths, budget, options, CURE)
    parts = {name: of[pieces.samples] * pieces.shares for name, of in works.items()}
    step = _Step(pieces, budget, prepared, options, parts)
    again = np.zeros(0, np.int64)
    try:
        if widths is not None:
            assignment = step.assign_contexts(widths, n_ranks, multiple, meet)
        elif groups is not None:
            assignment = step.assign_groups(groups[pieces.samples], n_ranks, multiple, meet, group_on)
        else:
            assignment = step.assign(n_ranks, multiple, meet)
    except NoPlanError as error:
        count = error.n_micro_batches
        if groups is not None:
            raise ValueError(
                f"group_by must leave samples for {counted(count, 'micro-batch')} or more on each of "
                f"{counted(n_ranks, 'rank')}, got {counted(int(groups.max()) + 1, 'group')} of "
                f"{counted(len(table), 'sample')}, for which no plan was found: give more or smaller groups, fewer "
                "num_replicas, or a larger max_total_size"
            ) from None
        if widths is not None:
            raise ValueError(
                f"sizes must hold a sample for each micro-batch, got {counted(len(table), 'sample')} for "
                f"{counted(count, 'micro-batch')} on each of {counted(n_ranks, 'rank')}, some of which share long "
                "samples: give more short samples, fewer num_replicas, or a smaller multiple_of"
            ) from None
        if not pad:
            raise ValueError(
                f"sizes must hold a sample for each micro-batch, got {counted(len(step.sizes), 'sample')} for "
                f"{counted(count, 'micro-batch')} on each of {counted(n_ranks, 'rank')}: give at least "
                f"{counted(count * n_ranks, 'sample')}, fewer num_replicas, a smaller multiple_of, or pad=True, which "
                "repeats the sample with least work"
            ) from None
        assignment, again = step.assign_alone(n_ranks, count, meet)
    return step.plan(assignment, again, n_ranks, meet)


def work_columns(work: Any, n_samples: int, cost: object) -> dict[str, NDArray[np.float64]]:
    """Return the works of all samples by name, none where they follow from the sizes."""
    if work is None:
        return {}
    if not isinstance(work, Mapping):
        return {"work": work_vector(work, n_samples)}
    if not work or not all(isinstance(name, str) for name in work):
        raise ValueError(f"work must be numbers, or a mapping of names to numbers, got {shown(work)}")
    if len(work) > 1 and cost != "sum":
        raise ValueError(f"work must be one number for each sample, unless cost='sum', got {len(work)} names")
    return {name: work_vector(values, n_samples, f"work[{name!r}]") for name, values in work.items()}


def group_numbers(group_by: Any, n_samples: int) -> NDArray[np.int64]:
    """Return the number of each sample's group, from 0 on; ``0`` and ``"0"`` are two groups."""
    names = names_of_samples(group_by, n_samples, "group_by")
    numbers = {name: number for number, name in enumerate(sorted(set(names), key=lambda name: (str(type(name)), name)))}
    return np.array([numbers[name] for name in names], np.int64)


def checked_contexts(contexts: Any, n_ranks: int) -> tuple[int, ...]:
    """Return the numbers of ranks that may share a micro-batch, ascending, 1 among them."""
    given = [checked_int("contexts", number, 1) for number in contexts] if isinstance(contexts, Sequence) else []
    if not given or any(number & (number - 1) or number > n_ranks for number in given):
        raise ValueError(
            f"contexts must be powers of two up to num_replicas={n_ranks}, such as (1, 2), got {shown(contexts)}"
        )
    return tuple(sorted({1, *given}))


class _Step:
    """The samples of one step, or their pieces, ready for planning."""

    def __init__(
        self,
        pieces: Pieces,
        budget: Budget,
        prepared: PreparedSizes,
        options: Options,
        works: dict[str, NDArray[np.float64]],
    ) -> None:
        self.pieces, self.sizes, self.prepared, self.options = pieces, pieces.lengths, prepared, options
        self.budgets = tuple(budget) if isinstance(budget, list) else (budget,)
        self.padded_work = not works and prepared.cost.pads
        self.works = works or {"work": self._own_work()}
        totals = [max(math.fsum(work), 1e-300) for work in self.works.values()]
        self.shares = [work / total for work, total in zip(self.works.values(), totals, strict=True)]
        self.own_work = next(iter(self.works.values())) if len(self.works) == 1 else np.sum(self.shares, axis=0)

    def _own_work(self) -> NDArray[np.float64]:
        """Return the work of each sample by itself, that of oversize ones in full."""
        prepared, cost = self.prepared, self.prepared.cost
        units = prepared.sizes
        if isinstance(cost, SumCost) and len(prepared.oversize):
            units = whole_units(self.sizes, self.budgets)[0]
        if cost.pads:
            return self._padded_work(np.arange(len(units)), np.arange(len(units) + 1))
        return cost.sample_work(units, prepared.limits).astype(np.float64)

    def _padded_work(self, places: NDArray[np.int64], offsets: NDArray[np.int64]) -> NDArray[np.float64]:
        work = self.prepared.cost.work(self.prepared.sizes, self.prepared.limits)
        return np.asarray(work(places[None], offsets)[0], np.float64)

    def assign(self, n_ranks: int, multiple: int, meet: Meet) -> Assignment:
        """Return rank and micro-batch of each sample, in the order of the sizes."""
        prepared, cost = self.prepared, self.prepared.cost if self.padded_work else None
        if isinstance(prepared.limits, CountLimits):
            order, padded = padded_largest_first(prepared.sizes, prepared.limits, self.own_work, cost)
            return unsorted(order, plan_padded(padded, n_ranks, multiple, meet))
        order, samples = self._samples()
        return unsorted(order, plan_sums(samples, n_ranks, multiple, meet))

    def assign_groups(
        self, groups: NDArray[np.int64], n_ranks: int, multiple: int, meet: Meet, group_on: GroupOn
    ) -> Assignment:
        """Return the same where samples of a group stay together."""
        order, samples = self._samples()
        return unsorted(order, plan_groups(samples, groups[order], n_ranks, multiple, meet, group_on))

    def assign_contexts(self, widths: tuple[int, ...], n_ranks: int, multiple: int, meet: Meet) -> Assignment:
        """Return the same where samples over a budget are run by several ranks."""
        order, samples = self._samples(unclipped=True)
        need = (-(-samples.sizes // samples.budgets)).max(axis=1)
        if need.max() > widths[-1]:
            over = np.sort(order[need > widths[-1]])
            raise ValueError(
                f"contexts must hold every sample, got up to {widths[-1]} ranks of "
                f"max_total_size={shown(self.budgets)} and {counted(len(over), 'sample')} over these together "
                f"(sample {over[0]} has size {shown(self.sizes[over[0]].tolist())}): "
                "allow more ranks, or raise the budget"
            )
        most_items = self.prepared.limits.most_items
        width = np.array(widths)[np.searchsorted(np.array(widths), np.maximum(need, 1))]
        return unsorted(order, plan_contexts(samples, width, n_ranks, multiple, most_items, meet))

    def _samples(self, unclipped: bool = False) -> tuple[NDArray[np.int64], Samples]:
        """Return the samples, the largest first, and their order."""
        sizes = whole_units(self.sizes, self.budgets)[0] if unclipped else self.prepared.sizes
        work, parts = whole_work(self.own_work), None
        if len(self.works) > 1:
            parts = np.stack([np.rint(np.ldexp(of, work_exponent(self.own_work))) for of in self.shares], axis=1)
            parts = parts.astype(np.int64)
            work = parts.sum(axis=1)
        return largest_first(sizes, self.prepared.limits, work, parts)

    def assign_alone(self, n_ranks: int, count: int, meet: Meet) -> tuple[Assignment, NDArray[np.int64]]:
        """Give each sample a micro-batch of its own, and each of the others the sample with least work."""
        n_batches = count * n_ranks
        work = whole_work(self.own_work)
        cheapest = np.lexsort((columns_of(self.prepared.sizes).max(axis=1), work))[0]
        again = np.full(n_batches - len(work), cheapest, np.int64)
        works = np.append(work, work[again])
        samples = Samples(np.zeros((n_batches, 1), np.int64), np.ones(1, np.int64), works)
        bound = rank_bound(samples, count, n_ranks)
        if meet == "micro_batch":
            bound = max(bound, lockstep(works, n_ranks))  # there is no better order
        return Assignment(*assign_ranks(works, n_ranks), count, count, bound), again

    def plan(self, found: Assignment, again: NDArray[np.int64], n_ranks: int, meet: Meet) -> StepPlan:
        """Return the plan of an assignment; ``again`` are the samples that come once more."""
        count, n_items = found.n_micro_batches, len(self.sizes)
        items = np.append(np.arange(n_items), again)
        ranks, rows = found.rank, found.micro_batch
        context = np.ones((n_ranks, count), np.int64)
        if found.width is not None:  # once more for each further rank of the group
            further = np.repeat(np.arange(n_items), found.width - 1)
            number = np.arange(len(further)) - np.repeat(np.cumsum(found.width - 1) - found.width + 1, found.width - 1)
            items = np.append(items, further)
            ranks, rows = np.append(ranks, ranks[further] + number + 1), np.append(rows, rows[further])
            context[ranks, rows] = found.width[items]
        number = ranks * count + rows
        order = np.lexsort((items, number))
        offsets = np.append(0, np.cumsum(np.bincount(number, minlength=n_ranks * count)))
        joined = items[order]
        restore = np.empty(len(order), np.int64)
        restore[order] = np.arange(len(order))
        cost = self.prepared.cost.of(self.sizes[joined].astype(np.float64), offsets) / context.reshape(-1, 1)
        if self.padded_work:
            works = {"work": self._padded_work(joined, offsets).reshape(context.shape)}
        else:
            works = {
                name: np.add.reduceat(work[joined], offsets[:-1]).reshape(context.shape) / context
                for name, work in self.works.items()
            }
        imbalances = {name: imbalance(work, meet) for name, work in works.items()}
        bounds = self._bounds(found, works, n_ranks, meet)

        def nested(values: NDArray[Any]) -> tuple[tuple[NDArray[Any], ...], ...]:
            batches = [values[start:stop] for start, stop in pairwise(offsets.tolist())]
            return tuple(tuple(batches[rank * count : (rank + 1) * count]) for rank in range(n_ranks))

        return StepPlan(
            micro_batches=nested(self.pieces.samples[joined]),
            starts=nested(self.pieces.starts[joined]),
            lengths=nested(self.sizes[joined]),
            contexts=context,
            cost=cost.reshape(context.shape if len(self.budgets) == 1 else (*context.shape, -1)),
            works=works,
            imbalances=imbalances,
            bounds={name: min(bound, imbalances[name]) for name, bound in bounds.items()},  # whole works are rounded
            fewest=found.fewest,
            restore=restore[:n_items],
            repeated=self.pieces.samples[again],
            oversize=self.prepared.oversize,
            budget=self.budgets,
            meet=meet,
        )

    def _bounds(
        self, found: Assignment, works: dict[str, NDArray[np.float64]], n_ranks: int, meet: Meet
    ) -> dict[str, float]:
        """Return the least imbalance of each kind of work."""
        means = {name: float(work.sum()) / n_ranks for name, work in works.items()}
        if len(works) == 1:
            least = {name: math.ldexp(found.bound, -work_exponent(self.own_work)) for name in works}
        elif found.width is not None or len(found.rank) != len(self.sizes):
            least = means
        else:
            order, samples = self._samples()
            least = {}
            for name, work in self.works.items():
                own = replace(samples, work=whole_work(work)[order], parts=None)
                bound = least_value(own, found.n_micro_batches, n_ranks, meet)
                least[name] = math.ldexp(bound, -work_exponent(work))
        return {name: least[name] / mean if mean else 1.0 for name, mean in means.items()}


def unsorted(order: NDArray[np.int64], found: Assignment) -> Assignment:
    """Return an assignment of samples in some order in that of the sizes."""
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    width = None if found.width is None else found.width[place]
    return replace(found, rank=found.rank[place], micro_batch=found.micro_batch[place], width=width)
