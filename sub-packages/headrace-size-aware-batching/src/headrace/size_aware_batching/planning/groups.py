"""Groups of samples that stay together in one batch, such as pairs: each is planned as one sample."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching._shared.checks import shown
from headrace.size_aware_batching._shared.display import counted
from headrace.size_aware_batching._validation import UNLIMITED
from headrace.size_aware_batching.planning.costs import CountedCost, Work, columns_of, not_fitting
from headrace.size_aware_batching.planning.labels import Labels, numbers_of_names
from headrace.size_aware_batching.planning.limits import Budget, Capacity, CountLimits, Limits
from headrace.size_aware_batching.planning.options import Oversize, SamplerOptions
from headrace.size_aware_batching.planning.prepared import PreparedSizes, prepare
from headrace.size_aware_batching.planning.units import round_up


@dataclass(frozen=True, eq=False)
class Groups:
    """The group of each sample.

    Args:
        numbers: The group of each sample, shape ``[n]``; groups are numbered in the order of their first samples.
    """

    numbers: NDArray[np.int64]

    OTHERS: ClassVar[str] = (
        "group_by must leave the groups of an epoch that has begun as they are, got appended samples that join them: "
        "give these groups of their own, or append them between two epochs"
    )

    @classmethod
    def from_argument(cls, group_by: Any, n_samples: int) -> Groups:
        """Read the groups that users give.

        >>> groups = Groups.from_argument(["b", "a", "b"], 3)
        >>> groups.numbers.tolist(), groups.keys(np.array([1, 0]))
        ([0, 1, 0], [1, 0, 2])
        """
        return cls(numbers_of_names(group_by, n_samples, "group_by")[1])

    def first(self, n: int) -> Groups:
        """Return the groups of the first n samples."""
        return Groups(self.numbers[:n])

    def continues(self, before: Any) -> bool:
        """Return whether these are the groups of fewer samples, and more."""
        if not isinstance(before, Groups):
            return False
        n, known = len(before.numbers), len(before)
        return np.array_equal(before.numbers, self.numbers[:n]) and int(self.numbers[n:].min(initial=known)) >= known

    @cached_property
    def members(self) -> NDArray[np.int64]:
        """The samples, group by group."""
        return np.argsort(self.numbers, kind="stable")

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """Where each group begins in ``members`` and, last, where the last one ends."""
        return np.concatenate([[0], np.cumsum(np.bincount(self.numbers))]).astype(np.int64)

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def counts(self) -> NDArray[np.int64]:
        """Number of samples of each group."""
        return np.diff(self.starts)

    def samples_of(self, groups: NDArray[Any]) -> NDArray[np.int64]:
        """Return the samples of some groups, one group after another."""
        lengths = self.counts[groups]
        places = np.arange(lengths.sum()) + np.repeat(self.starts[:-1][groups] - np.cumsum(lengths) + lengths, lengths)
        samples: NDArray[np.int64] = self.members[places]
        return samples

    def of_samples(self, samples: NDArray[Any]) -> NDArray[np.int64]:
        """Return the groups of some samples."""
        return np.unique(self.numbers[samples])

    def keys(self, groups: NDArray[Any]) -> list[Any]:
        """Return groups as batches name them: by their samples."""
        keys: list[int] = self.samples_of(groups).tolist()
        return keys

    def in_samples(
        self, groups: NDArray[Any], offsets: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return batches of groups as batches of samples."""
        return self.samples_of(groups), np.concatenate([[0], np.cumsum(self.counts[groups])])[offsets]

    def summed(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the sum of the values of each group's samples."""
        if not len(self):
            return values[:0]
        kind = np.float64 if values.dtype.kind == "f" else np.int64
        sums: NDArray[Any] = np.add.reduceat(values[self.members], self.starts[:-1], axis=0, dtype=kind)
        return sums

    def longest(self, sizes: NDArray[Any]) -> NDArray[Any]:
        """Return the largest size of each group."""
        if not len(self):
            return sizes[:0]
        largest: NDArray[Any] = np.maximum.reduceat(sizes[self.members], self.starts[:-1])
        return largest

    def labels(self, labels: Labels) -> NDArray[Any]:
        """Return the label of each group; refuse one of several."""
        of_groups = labels.numbers[self.members[self.starts[:-1]]]
        if len(other := np.flatnonzero(of_groups[self.numbers] != labels.numbers)):
            first = self.members[self.starts[self.numbers[other[0]]]]
            raise ValueError(
                "by must give the samples of a group one label, got "
                f"{labels.names[labels.numbers[first]]!r} for sample {first} and "
                f"{labels.names[labels.numbers[other[0]]]!r} for sample {other[0]}, which group_by keeps together"
            )
        return of_groups

    def prepared(self, sizes: NDArray[Any], options: SamplerOptions) -> PreparedSizes:
        """Return groups ready for planning: their sums, or where batches are padded their counts and largest sizes.

        A limit on the number of samples is one more column of sums.
        """
        cost, budget, most = options.batch_cost, options.max_total_size, options.max_items
        refused: Oversize = "own_batch" if options.oversize == "raise" else options.oversize
        of_groups = replace(options, max_items=None, oversize=refused)  # max_items counts samples
        if isinstance(cost, CountedCost):
            if sizes.ndim > 1:
                raise ValueError(
                    f"group_by goes with sizes of shape [n] where batches are padded, got {sizes.shape}: give one "
                    "column, or cost='sum'"
                )
            counts, longest = self.counts, self.longest(sizes)
            equal = int(counts[0]) if len(counts) and not np.ptp(counts) else None
            table = longest if equal else np.stack([counts.astype(longest.dtype), longest], axis=1)
            prepared = prepare(table, budget, of_groups, cost=GroupedCost(inner=cost, most=most, count=equal))
            self._refuse_oversize(prepared.oversize, options)
            return prepared
        table = self.summed(sizes)
        if most is not None:
            whole = table.dtype.kind != "f"
            table = np.concatenate([columns_of(table), self.counts[:, None].astype(table.dtype)], axis=1)
            # Real sizes are rounded up to a small part of the budget, and counts with them.
            budget = [*(budget if isinstance(budget, list) else [budget]), most if whole else most + 0.5]
        prepared = prepare(table, budget, of_groups)
        self._refuse_oversize(prepared.oversize, options)
        each, limits, _ = cost.prepare(sizes, options.max_total_size)
        return replace(prepared, work=self.summed(cost.sample_work(each, limits)))

    def _refuse_oversize(self, over: NDArray[np.int64], options: SamplerOptions) -> None:
        """Refuse groups that exceed a budget by themselves, if that is what was asked for."""
        if not len(over) or options.oversize != "raise":
            return
        most = "" if options.max_items is None else f" or max_items={options.max_items}"
        some = ", ".join(f"{self.counts[group]} with sample {self.members[self.starts[group]]}" for group in over[:3])
        raise ValueError(
            f"the samples of a group must not exceed max_total_size={shown(options.max_total_size)}{most} together, "
            f"got {len(over)} of {counted(len(self), 'group')} that do so ({some}{', ...' if len(over) > 3 else ''}): "
            "raise the budget, or choose oversize='skip' or 'own_batch'"
        )


@dataclass(frozen=True)
class GroupedCost(CountedCost):
    """A cost of the count and the largest size of all samples in a batch of groups.

    A group has its count and its largest size, shape ``[n, 2]``, or, where all have the same ``count``, its largest
    size. ``most`` limits the samples of a batch.
    """

    inner: CountedCost = field(kw_only=True)
    most: int | None = field(kw_only=True)
    count: int | None = field(kw_only=True)

    name = "grouped"

    def prepare(
        self,
        sizes: NDArray[Any],
        budget: Budget,
        _max_items: int | None = None,
        _largest: int | None = None,
        /,
    ) -> tuple[NDArray[Any], Limits, NDArray[np.int64]]:
        """Return the sizes, and how many groups fit one budget."""
        longest = sizes if sizes.ndim == 1 else sizes[:, 1]
        _, limits, _ = self.inner.prepare(longest, budget, self.most)
        capacity = Capacity(partial(self._groups_in, cast(CountLimits, limits).capacity))
        return sizes, CountLimits(quadratic=limits.quadratic, capacity=capacity), not_fitting(sizes, capacity)

    def _groups_in(self, capacity: Capacity, sizes: NDArray[Any]) -> NDArray[np.int64]:
        """Return how many groups fit where each is the largest, in both."""
        rows = capacity.counts(sizes if sizes.ndim == 1 else sizes[:, 1])
        rows = np.minimum(rows, self.most or UNLIMITED)
        groups: NDArray[np.int64] = rows // (self.count or sizes[:, 0].astype(np.int64))
        return groups

    def counted(self, counts: NDArray[np.int64], longest: NDArray[Any]) -> NDArray[np.float64]:
        """Return the cost of so many groups."""
        largest, size = (self.count or 1, longest) if longest.ndim == 1 else (longest[:, 0], longest[:, 1])
        return self.inner.counted(counts * np.asarray(largest), round_up(size, self.inner.length_multiple))

    def work(self, sizes: NDArray[Any], limits: Limits) -> Work:
        """Return a function to the number of samples times the work of the largest."""
        if sizes.ndim == 1:
            return super().work(sizes, limits)

        def padded(places: NDArray[np.int64], offsets: NDArray[np.int64]) -> NDArray[np.float64]:
            rows = np.add.reduceat(sizes[:, 0][places], offsets[:-1], axis=1, dtype=np.float64)
            longest = np.maximum.reduceat(sizes[:, 1][places], offsets[:-1], axis=1)
            return np.asarray(rows * limits.work(longest))

        return padded

    def digest(self, sizes: NDArray[Any], budget: Budget, max_items: int | None, /) -> Any:
        """Return what stands for the cost of samples."""
        return self.inner.digest(sizes, budget, max_items)
