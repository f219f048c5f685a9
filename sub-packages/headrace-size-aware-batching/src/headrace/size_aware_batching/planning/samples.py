"""The samples of a dataset as batches are planned from them: sizes, pieces, work."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching.planning.groups import Groups
from headrace.size_aware_batching.planning.labels import Labels
from headrace.size_aware_batching.planning.options import SamplerOptions
from headrace.size_aware_batching.planning.pieces import Pieces, longest_piece, pieces_of
from headrace.size_aware_batching.planning.plan_cache import PlanCache
from headrace.size_aware_batching.planning.prepared import without
from headrace.size_aware_batching.planning.size_facts import SizeFacts
from headrace.size_aware_batching.sizes.read import (
    column_extras,
    column_limits,
    effective_sizes,
    read_sizes,
    work_vector,
)


@dataclass(frozen=True)
class Samples:
    """The samples of a dataset.

    Args:
        sizes: Checked, and safe from changes.
        work: What steps are balanced by, shape ``[n]``; None where it follows from the sizes.
        labels: Of which each batch holds one; None for no labels.
        groups: Of samples that stay together; None for none.
        max_length: Limit of each column.
        extra_per_sample: What a sample, or a piece of one, has beside its size in each column.
        pieces: Of long samples, with ``oversize="split"``.
        facts: Facts of all sizes.
        cache: Keeps sorted samples.
    """

    sizes: NDArray[Any]
    work: NDArray[np.float64] | None
    labels: Labels | None
    groups: Groups | None
    max_length: tuple[float | None, ...]
    extra_per_sample: tuple[float, ...]
    pieces: Pieces | None
    facts: SizeFacts
    cache: PlanCache | None

    @classmethod
    def read(
        cls, sizes: Any, options: SamplerOptions, work: Any, by: Any, group_by: Any, cache: PlanCache | None
    ) -> Samples:
        """Read the sizes, and the work, the labels and the groups if there are any, that users give."""
        sizes = frozen_copy(read_sizes(sizes))
        n_samples = len(sizes)
        labels = None if by is None else Labels.from_argument(by, n_samples, options.label_per == "step")
        groups = None if group_by is None else Groups.from_argument(group_by, n_samples)
        given_work = None if work is None else work_vector(work, n_samples)
        return cls.from_facts(SizeFacts(sizes), options, given_work, labels, groups, cache)

    @classmethod
    def from_facts(
        cls,
        facts: SizeFacts,
        options: SamplerOptions,
        work: NDArray[np.float64] | None,
        labels: Labels | None,
        groups: Groups | None,
        cache: PlanCache | None,
    ) -> Samples:
        """Return samples of sizes that were read before."""
        sizes = facts.sizes
        columns = 1 if sizes.ndim == 1 else sizes.shape[1]
        max_length = column_limits(options.max_length, columns)
        extras = column_extras(options.extra_per_sample, columns)
        pieces = None
        if options.oversize == "split":
            longest = longest_piece(sizes, options.max_total_size, options.batch_cost, max_length[0], extras[0])
            pieces = None if math.isinf(longest) else pieces_of(sizes, longest)
        return cls(sizes, work, labels, groups, max_length, extras, pieces, facts, cache)

    def __len__(self) -> int:
        return len(self.sizes)

    def first(self, n: int, options: SamplerOptions) -> Samples:
        """Return the first n samples with other options."""
        if n == len(self):
            return Samples.from_facts(self.facts, options, self.work, self.labels, self.groups, self.cache)
        work = None if self.work is None else self.work[:n]
        labels = None if self.labels is None else self.labels.first(n)
        groups = None if self.groups is None else self.groups.first(n)
        return Samples.from_facts(SizeFacts(self.sizes[:n]), options, work, labels, groups, self.cache)

    @property
    def units(self) -> Pieces | Groups | None:
        """What is planned in place of samples; None for samples."""
        return self.groups if self.pieces is None else self.pieces

    @property
    def to_plan(self) -> NDArray[Any]:
        """Sizes of what is planned, samples or pieces, as budgets count them; of groups those of their samples."""
        sizes = self.sizes if self.pieces is None else self.pieces.lengths
        return effective_sizes(sizes, self.extra_per_sample, self.max_length if self.pieces is None else (None,))

    @property
    def planned_work(self) -> NDArray[np.float64] | None:
        """Work of what is planned."""
        if self.work is None or self.units is None:
            return self.work
        if self.groups is not None:
            sums: NDArray[np.float64] = self.groups.summed(self.work)
            return sums
        pieces = cast(Pieces, self.pieces)
        work: NDArray[np.float64] = self.work[pieces.samples] * pieces.shares
        return work

    @property
    def planned_labels(self) -> NDArray[Any] | None:
        """Labels of what is planned, by number."""
        if self.labels is None:
            return None
        if self.groups is not None:
            return self.groups.labels(self.labels)
        return self.labels.numbers if self.pieces is None else self.labels.numbers[self.pieces.samples]

    def kept(self, kept: NDArray[Any] | None, excluded: Iterable[int]) -> NDArray[np.int64] | None:
        """Return the samples that are kept without those that are excluded; None for all."""
        return without(kept, len(self), np.array(list(excluded), np.int64))

    def kept_to_plan(self, kept: NDArray[Any] | None, excluded: Iterable[int]) -> NDArray[np.int64] | None:
        """Return the same of what is planned: samples, pieces, or groups of which no sample is excluded."""
        if (units := self.units) is None:
            return self.kept(kept, excluded)
        return without(kept, len(units), units.of_samples(np.array(list(excluded), np.int64)))


def frozen_copy(sizes: NDArray[Any]) -> NDArray[Any]:
    """Return sizes that nobody else can change."""
    if sizes.flags.writeable:
        sizes = sizes.copy()
        sizes.flags.writeable = False
    return sizes
