"""The plan of one optimizer step: which rank runs which samples in which micro-batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching._validation import UNLIMITED, checked_flag, one_of, whole_number
from headrace.size_aware_batching.planning.costs import CostFunction, SumCost, columns_of, given_work
from headrace.size_aware_batching.planning.limits import Budget, Capacity, plain_budget
from headrace.size_aware_batching.planning.micro_batches import (
    Assignment,
    Meet,
    NoPlanError,
    Samples,
    binding_columns,
    lockstep,
    plan_sums,
    rank_bound,
    seat,
    whole_work,
    work_exponent,
)
from headrace.size_aware_batching.planning.options import Options
from headrace.size_aware_batching.planning.padded_micro_batches import PaddedSamples, plan_padded
from headrace.size_aware_batching.planning.prepared import PreparedSizes, prepare
from headrace.size_aware_batching.planning.ranks import Mesh, Ranks
from headrace.size_aware_batching.planning.units import whole_units
from headrace.size_aware_batching.sizes.read import read_sizes, work_vector

__all__ = ["StepPlan", "StepReport", "plan_step"]

MEET: tuple[Meet, ...] = ("micro_batch", "step")
Oversize = Literal["raise", "own_batch"]
OVERSIZE: tuple[Oversize, ...] = ("raise", "own_batch")


@dataclass(frozen=True)
class StepReport:
    """Figures about the plan of one optimizer step; printed, a line each.

    Args:
        samples: Number of samples.
        num_replicas: Number of ranks.
        num_micro_batches: Micro-batches of each rank.
        fewest: A number of them that no plan goes below.
        budget: Budget of a micro-batch; of several that which is filled most.
        largest: Largest cost of a micro-batch, against that budget.
        fill: Mean cost of a micro-batch as a share of the budget.
        meet: Where ranks wait for one another.
        lockstep: Sum over the micro-steps of the largest rank's work, over the mean rank's work.
        totals: Largest rank's work of the whole step, over the mean rank's.
        bound: The one of these that ``meet`` asks for is at least this in every plan of as many micro-batches.
        repeated: Samples that are there once more, for micro-batches that would be empty.
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
    lockstep: float
    totals: float
    bound: float
    repeated: int
    oversize: int

    def __str__(self) -> str:
        least = f"  (at least {self.bound:.4f})"
        rows = {
            "samples": f"{self.samples:,}",
            "ranks": f"{self.num_replicas:,}",
            "micro-batches a rank": f"{self.num_micro_batches:,}  (at least {self.fewest:,})",
            "budget": f"{self.budget:,.10g}",
            "largest": f"{self.largest:,.10g}",
            "fill": f"{self.fill:.2%}",
            "lockstep": f"{self.lockstep:.4f}{least if self.meet == 'micro_batch' else ''}",
            "totals": f"{self.totals:.4f}{least if self.meet == 'step' else ''}",
            "repeated": f"{self.repeated:,}",
            "oversize": f"{self.oversize:,}",
        }
        return "\n".join(f"{name:22}{text}" for name, text in rows.items())


@dataclass(frozen=True, repr=False)
class StepPlan:
    """Who runs what in one optimizer step, made by `plan_step`.

    Args:
        micro_batches: ``micro_batches[rank][k]`` are the samples of a rank's micro-batch k, ascending; as many on every
            rank, none empty. Micro-step 0 has most work.
        cost: Cost of each micro-batch, shape ``[ranks, k]``, or ``[ranks, k, budgets]`` where there are several.
        work: Work of each micro-batch, shape ``[ranks, k]``.
        imbalance: What was minimised, over the mean rank's work; 1 is perfect. With ``meet="micro_batch"`` the sum over
            the micro-steps of the largest rank's work, with ``"step"`` the largest rank's work of the whole step.
        bound: No plan of as many micro-batches has a smaller ``imbalance``, see `plan_step`.
        fewest: No plan has fewer micro-batches on each rank.
        restore: Permutation that puts outputs back: with all outputs joined rank by rank and micro-batch by
            micro-batch, ``joined[restore]`` is in the order of ``sizes``.
        repeated: Samples that are there once more (``pad=True``), an entry for each time.
        oversize: Samples that exceed a budget by themselves, each in a micro-batch of its own.
        budget: Budgets of a micro-batch.
        meet: Where ranks wait for one another.
    """

    micro_batches: tuple[tuple[NDArray[np.int64], ...], ...]
    cost: NDArray[np.float64]
    work: NDArray[np.float64]
    imbalance: float
    bound: float
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

    def report(self) -> StepReport:
        """Return figures about the plan; ``print`` shows them line by line."""
        mean = float(self.work.sum()) / self.num_replicas
        lockstep, totals = (float(self.work.max(axis=0).sum()), float(self.work.sum(axis=1).max()))
        costs = self.cost.reshape(self.cost.shape[0] * self.cost.shape[1], -1)
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
            lockstep=lockstep / mean if mean else 1.0,
            totals=totals / mean if mean else 1.0,
            bound=self.bound,
            repeated=len(self.repeated),
            oversize=len(self.oversize),
        )

    def __repr__(self) -> str:
        more = [f"{len(found)} {name}" for name, found in self._unusual().items() if len(found)]
        return (
            f"StepPlan({', '.join([f'{len(self.restore)} samples', *more])}: {self.num_replicas} ranks x "
            f"{self.num_micro_batches} micro-batches, imbalance {self.imbalance:.4f}, at least {self.bound:.4f})"
        )

    def _unusual(self) -> dict[str, NDArray[np.int64]]:
        return {"repeated": self.repeated, "oversize": self.oversize}


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
    oversize: Oversize = "raise",
) -> StepPlan:
    """Plan one optimizer step: which rank runs which samples in which micro-batch.

    For samples that are only known when the step begins, such as the answers that a model has just written. Every rank
    gets the same number of micro-batches, the fewest for which a packing is found; no micro-batch exceeds a budget and
    none is empty; each sample comes once. Then the work is balanced. No process group is needed: the same arguments
    give the same plan on every rank and platform, since all that is compared are integers.

    **The bound.** A micro-batch with the j-th most work has at least ``low[j]``, as the largest samples need several,
    and at most ``up[j]``, what the densest samples that fit the budget make. For ``meet="micro_batch"``: in the best
    order micro-step k holds R neighbours by work and ends with its first, M[k]; so the whole work is at most the sum
    of min(M[k], up[kR + i]) over all k and i < R, and the least sum of M >= low that allows this is the bound. For
    ``meet="step"``: the largest rank has at least the mean; some rank gets q + 1 of the qR + 1 heaviest samples; and
    the rank of the heaviest has K - 1 other micro-batches, and all that the other ranks have no room for.

    Args:
        sizes: Size of each sample, in any form that `DistributedSizeAwareBatchSampler` takes; shape ``[n]``, or
            ``[n, k]`` with k budgets.
        max_total_size: Budget of a micro-batch, in the unit of the cost; for sizes of shape ``[n, k]`` a sequence of
            k.
        num_replicas: Number of data-parallel ranks. By default that of ``torch.distributed``, else ``WORLD_SIZE`` of
            the environment, else 1.
        mesh: In its place a 1-D ``DeviceMesh`` of the data-parallel ranks, or anything with ``size()`` and
            ``get_local_rank()``.
        cost: ``"sum"`` of the sizes; ``"padded"``, count times largest; or ``f(n, largest)`` in any unit, which
            must not fall when n or the largest size grows.
        max_items: Largest number of samples in a micro-batch.
        length_multiple: The length of a micro-batch is rounded up to a multiple of this; not with ``cost="sum"``.
        work: Work of each sample, shape ``[n]``, in any unit: that of a micro-batch is the sum. By default it follows
            from sizes and cost, as in `PlanReport`.
        meet: Where ranks wait for one another. ``"micro_batch"``: at each micro-batch (FSDP, pipelines), so the sum
            over the micro-steps of the largest rank's work is minimised. ``"step"``: once, at the end of the step
            (gradient accumulation under ``no_sync``), so the largest rank's work of the whole step is.
        multiple_of: The number of micro-batches is a multiple of this, such as the virtual stages of a pipeline.
        pad: Whether too few samples are repeated: the one with least work, for each micro-batch that would be empty.
            They are in ``repeated``. Else too few are an error.
        oversize: Policy for a sample that exceeds a budget by itself: ``"raise"`` an error, or give it its
            ``"own_batch"``, over the budget (samples of size 0 may share it).

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument has a value that is not allowed, a sample is too large and ``oversize="raise"``, or
            there are fewer samples than micro-batches and ``pad=False``.

    Example:
        >>> plan = plan_step([5, 3, 4, 4, 2, 6, 1, 7], 8, num_replicas=2, work=[5, 3, 4, 4, 2, 6, 1, 7])
        >>> plan
        StepPlan(8 samples: 2 ranks x 2 micro-batches, imbalance 1.0000, at least 1.0000)
        >>> plan.cost.tolist()
        [[8.0, 8.0], [8.0, 8.0]]
        >>> joined = np.concatenate([batch for rank in plan.micro_batches for batch in rank])
        >>> joined[plan.restore].tolist()
        [0, 1, 2, 3, 4, 5, 6, 7]
    """
    one_of("meet", meet, MEET)
    one_of("oversize", oversize, OVERSIZE)
    multiple = whole_number("multiple_of", multiple_of) or 1
    pad = checked_flag("pad", pad)
    n_ranks = Ranks(num_replicas, None, mesh).world_size()
    table, budget = read_sizes(sizes), plain_budget(max_total_size)
    if not len(table):
        raise ValueError("sizes must hold at least one sample, got none: a step without samples has no plan")
    options = Options("sequential", cost, max_items=max_items, length_multiple=length_multiple, oversize=oversize)
    prepared = prepare(table, budget, options, "'own_batch'")
    works = None if work is None else work_vector(work, len(table))
    step = _Step(table, budget, prepared, options, works)
    try:
        assignment = step.assign(n_ranks, multiple, meet)
        again = np.zeros(0, np.int64)
    except NoPlanError as error:
        count = error.n_micro_batches
        if not pad:
            raise ValueError(
                f"sizes must hold a sample for each micro-batch, got {len(table)} samples for {count} micro-batches on "
                f"each of {n_ranks} ranks: give at least {count * n_ranks} samples, fewer num_replicas, a smaller "
                "multiple_of, or pad=True, which repeats the sample with least work"
            ) from None
        assignment, again = step.assign_alone(n_ranks, count, meet)
    return step.plan(assignment, again, n_ranks, meet)


class _Step:
    """The samples of one step, ready for planning."""

    def __init__(
        self,
        sizes: NDArray[Any],
        budget: Budget,
        prepared: PreparedSizes,
        options: Options,
        work: NDArray[np.float64] | None,
    ) -> None:
        self.sizes, self.prepared, self.options, self.given_work = sizes, prepared, options, work
        self.budgets = tuple(budget) if isinstance(budget, list) else (budget,)
        self.own_work = self._own_work() if work is None else work

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
        if (capacity := self.prepared.limits.capacity) is None:
            order, found = self._assign_sums(n_ranks, multiple, meet)
        else:
            order, found = self._assign_padded(capacity, n_ranks, multiple, meet)
        rank, micro_batch = np.empty(len(order), np.int64), np.empty(len(order), np.int64)
        rank[order], micro_batch[order] = found.rank, found.micro_batch
        return replace(found, rank=rank, micro_batch=micro_batch)

    def _assign_sums(self, n_ranks: int, multiple: int, meet: Meet) -> tuple[NDArray[np.int64], Assignment]:
        sizes = columns_of(self.prepared.sizes).astype(np.int64)
        budgets = np.array([min(budget, UNLIMITED) for budget in self.prepared.limits.budgets], np.int64)
        if self.options.max_items is not None:  # one more column, of which each sample takes 1
            sizes = np.concatenate([sizes, np.ones((len(sizes), 1), np.int64)], axis=1)
            budgets = np.append(budgets, self.options.max_items)
        sizes, budgets = binding_columns(sizes, budgets)
        work = whole_work(self.own_work)
        order = np.lexsort((-work, -(sizes / budgets).max(axis=1)))
        return order, plan_sums(Samples(sizes[order], budgets, work[order]), n_ranks, multiple, meet)

    def _assign_padded(
        self, capacity: Capacity, n_ranks: int, multiple: int, meet: Meet
    ) -> tuple[NDArray[np.int64], Assignment]:
        units, limits = self.prepared.sizes, self.prepared.limits
        largest = units if units.ndim == 1 else (units / np.maximum(units.max(axis=0), 1)).max(axis=1)
        order = np.lexsort((-self.own_work, -largest.astype(np.float64)))
        units, own, additive = units[order], self.own_work[order], self.given_work is not None
        work = given_work(own) if additive else self.prepared.cost.work(units, limits)
        return order, plan_padded(PaddedSamples(units, limits, capacity, own, work, additive), n_ranks, multiple, meet)

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
        return Assignment(*seat(works, n_ranks), count, count, bound), again

    def plan(self, found: Assignment, again: NDArray[np.int64], n_ranks: int, meet: Meet) -> StepPlan:
        """Return the plan of an assignment; ``again`` are the samples that come once more."""
        number = found.rank * found.n_micro_batches + found.micro_batch
        order = np.argsort(number, kind="stable")
        shape = n_ranks, found.n_micro_batches
        offsets = np.append(0, np.cumsum(np.bincount(number, minlength=shape[0] * shape[1])))
        joined = np.append(np.arange(len(self.sizes)), again)[order]
        batches = [joined[start:stop] for start, stop in pairwise(offsets.tolist())]
        restore = np.empty(len(order), np.int64)
        restore[order] = np.arange(len(order))
        cost = self.prepared.cost.of(self.sizes[joined].astype(np.float64), offsets)
        if self.given_work is None and self.prepared.cost.pads:
            work = self._padded_work(joined, offsets).reshape(shape)
        else:
            work = np.add.reduceat(self.own_work[joined], offsets[:-1]).reshape(shape)
        mean = float(work.sum()) / n_ranks
        value = float(work.max(axis=0).sum() if meet == "micro_batch" else work.sum(axis=1).max())
        imbalance = value / mean if mean else 1.0
        bound = math.ldexp(found.bound, -work_exponent(self.own_work)) / mean if mean else 1.0
        return StepPlan(
            micro_batches=tuple(tuple(batches[rank * shape[1] : (rank + 1) * shape[1]]) for rank in range(n_ranks)),
            cost=cost.reshape(shape if len(self.budgets) == 1 else (*shape, -1)),
            work=work,
            imbalance=imbalance,
            bound=min(bound, imbalance),  # whole works are rounded
            fewest=found.fewest,
            restore=restore[: len(self.sizes)],
            repeated=again,
            oversize=self.prepared.oversize,
            budget=self.budgets,
            meet=meet,
        )
