"""The batches of an epoch as two arrays, and what there is to say about them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching.planning.report import PlanReport


@dataclass(frozen=True)
class BatchPlan:
    """All batches of an epoch.

    Args:
        indices: Samples, batch by batch; int32 where that holds them, shape ``[samples]``.
        offsets: Where each batch begins in ``indices`` and where the last one ends, shape ``[batches + 1]``.
        sizes: Size of every sample of the dataset, shape ``[n]`` or ``[n, k]``, in the user's unit.
        budget: What a batch may cost, in the unit of the cost; one entry a column of sizes.
        cost: ``"sum"``, ``"padded"``, or the name of a cost function.
        oversize: Samples that exceed the budget by themselves.
        skipped: Whether these are left out (or else have batches of their own).
        n_ranks: World size for what the report says of steps.
        tail: What happens to batches beyond a multiple of the world size.
        length_multiple: What the length of a padded batch is rounded up to.

    ``len(plan)`` is the number of batches, ``plan[k]`` the samples of batch k, and a slice is a plan again.
    """

    indices: NDArray[Any]
    offsets: NDArray[np.int64]
    sizes: NDArray[Any]
    budget: tuple[float, ...]
    cost: str = "sum"
    oversize: NDArray[np.int64] | None = None
    skipped: bool = False
    n_ranks: int = 1
    tail: str = "split"
    length_multiple: int = 1

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, batch: int) -> NDArray[Any]: ...
    @overload
    def __getitem__(self, batch: slice) -> "BatchPlan": ...
    def __getitem__(self, batch: int | slice) -> "NDArray[Any] | BatchPlan":
        if isinstance(batch, slice):
            return self._part(range(len(self))[batch])
        number = range(len(self))[batch]
        return self.indices[self.offsets[number] : self.offsets[number + 1]]

    def _part(self, numbers: range) -> "BatchPlan":
        parts = [self[number] for number in numbers]
        offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts], dtype=np.int64)]).astype(np.int64)
        indices = np.concatenate(parts) if parts else self.indices[:0]
        fields = {**self.__dict__, "indices": indices, "offsets": offsets}
        return BatchPlan(**fields)

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return (self[number] for number in range(len(self)))

    def report(self, n_ranks: int | None = None) -> PlanReport:
        """Return what the plan is worth: fill, padding, largest batch, balance of the steps, what is left out.

        Args:
            n_ranks: World size; the sampler's by default.
        """
        return PlanReport.of(self, self.n_ranks if n_ranks is None else n_ranks)
