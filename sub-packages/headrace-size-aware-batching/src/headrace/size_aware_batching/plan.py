"""The batches of an epoch as two arrays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching._shared.display import counted, described, never_raises
from headrace.size_aware_batching._validation import whole_number
from headrace.size_aware_batching.planning.costs import CostFunction
from headrace.size_aware_batching.planning.labels import Labels
from headrace.size_aware_batching.planning.pieces import keys_of
from headrace.size_aware_batching.planning.token_schedule import OptimizerSteps
from headrace.size_aware_batching.report import CurriculumReport, LabelReport, OptimizerStepsReport, PlanReport

__all__ = [
    "BatchPlan",
    "CurriculumReport",
    "LabelReport",
    "Labels",
    "OptimizerSteps",
    "OptimizerStepsReport",
    "PlanReport",
]


@dataclass(frozen=True, repr=False)
class BatchPlan:
    """All batches of an epoch.

    Args:
        indices: Samples, batch by batch; int32 where that holds them, shape ``[samples]``. With ``oversize="split"`` a
            sample comes once for each of its pieces, which count as samples in all figures.
        offsets: Where each batch begins in ``indices`` and, last, where the last one ends, shape ``[batches + 1]``.
        sizes: Size of every sample of the dataset as the budget counts it, shape ``[n]`` or ``[n, k]``, in the user's
            unit: with ``extra_per_sample`` and up to ``max_length``. Where samples are cut, the sizes that were given.
        budget: Largest cost of a batch; one entry for each column of sizes (a single one for a cost function).
        cost: ``"sum"``, ``"padded"`` or ``f(n, largest)``.
        oversize: Samples that exceed a budget by themselves.
        skipped: Whether these are left out (or else have batches of their own, or are cut).
        num_replicas: World size that the report is for.
        tail: Policy for batches beyond a multiple of the world size.
        length_multiple: Multiple to which the length of a padded batch is rounded up.
        work: Work of every sample of the dataset, shape ``[n]``; None where it follows from sizes and cost.
        shapes: The (count, length) shapes that batches are padded to, by length; None where they are padded to their
            longest sample.
        starts: Where each entry of ``indices`` begins in its sample; None where no sample is cut.
        lengths: How much of its sample it is, likewise.
        extra: What each piece has beside its length, as do samples that are not cut; 0 where ``starts`` is None.
        steps: The optimizer steps of an `OptimizerStepBatchSampler`, else None.
        curriculum: Where a curriculum stands; None without one.
        max_items: Largest number of samples in a batch; None for no limit.
        balanced_ranks: Number of ranks for which the order of the batches balances the steps; None for none.
        labels: The label of every sample of the dataset, of which each batch holds one; None for no labels.

    ``len(plan)`` is the number of batches, ``plan[k]`` the samples of batch k, and a slice is a plan again.

    >>> plan = BatchPlan(np.array([2, 0, 1]), np.array([0, 1, 3]), np.array([3, 4, 8]), (8,))
    >>> [batch.tolist() for batch in plan], plan.report().fill
    ([[2], [0, 1]], 0.9375)
    """

    indices: NDArray[Any]
    offsets: NDArray[np.int64]
    sizes: NDArray[Any]
    budget: tuple[float, ...]
    cost: str | CostFunction = "sum"
    oversize: NDArray[np.int64] | None = None
    skipped: bool = False
    num_replicas: int = 1
    tail: str = "split"
    length_multiple: int = 1
    work: NDArray[np.float64] | None = None
    shapes: tuple[tuple[int, int], ...] | None = None
    starts: NDArray[np.int64] | None = None
    lengths: NDArray[Any] | None = None
    extra: float = 0
    steps: OptimizerSteps | None = None
    curriculum: CurriculumReport | None = None
    max_items: int | None = None
    balanced_ranks: int | None = None
    labels: Labels | None = None

    @never_raises
    def __repr__(self) -> str:
        budget = " and ".join(f"{one:,.10g}" for one in self.budget)
        cost = self.cost if isinstance(self.cost, str) else described(self.cost)
        figures = [
            f"{counted(len(self), 'batch')} of {counted(len(self.indices), 'sample')}",
            f"budget {budget}",
            f"cost {cost}",
            counted(self.num_replicas, "rank"),
        ]
        if self.steps is not None:
            figures.append(counted(len(self.steps.asked), "optimizer step"))
        if self.oversize is not None and len(self.oversize):
            figures.append(f"{len(self.oversize):,} oversize")
        return f"{type(self).__name__}({', '.join(figures)})"

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, batch: int) -> NDArray[Any]: ...
    @overload
    def __getitem__(self, batch: slice) -> BatchPlan: ...
    def __getitem__(self, batch: int | slice) -> NDArray[Any] | BatchPlan:
        if isinstance(batch, slice):
            places = [self._places(number) for number in range(len(self))[batch]]
            offsets = np.cumsum([0, *(len(each) for each in places)], dtype=np.int64)
            joined = np.concatenate([np.zeros(0, np.int64), *places])
            starts = None if self.starts is None else self.starts[joined]
            lengths = None if self.lengths is None else self.lengths[joined]
            return replace(
                self, indices=self.indices[joined], offsets=offsets, starts=starts, lengths=lengths, steps=None
            )
        number = range(len(self))[batch]
        return self.indices[self.offsets[number] : self.offsets[number + 1]]

    def _places(self, number: int) -> NDArray[np.int64]:
        return np.arange(self.offsets[number], self.offsets[number + 1])

    def keys(self, batch: int) -> list[Any]:
        """Return a batch as the sampler yields it: ints, and a `Piece` for each piece of a sample that is cut."""
        places = self._places(range(len(self))[batch])
        samples = self.indices[places]
        if self.starts is None or self.lengths is None:
            keys: list[Any] = samples.tolist()
            return keys
        return keys_of(samples, self.starts[places], self.lengths[places], self.sizes[samples])

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return (self[number] for number in range(len(self)))

    def report(
        self,
        num_replicas: int | None = None,
        *,
        other: BatchPlan | None = None,
        without_shapes: BatchPlan | None = None,
    ) -> PlanReport:
        """Return figures about the plan: fill, padding, largest batch, balance of the steps, samples left out.

        Args:
            num_replicas: World size; that of the sampler by default.
            other: Plan of another epoch of the same samples, for ``co_occurrence``.
            without_shapes: Plan of the same samples with as many shapes as come, for ``shapes_cost``.
        """
        replicas = whole_number("num_replicas", num_replicas) or self.num_replicas
        return PlanReport.from_plan(self, replicas, other, without_shapes)
