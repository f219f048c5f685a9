"""Batches that are measured on all ranks at once, each by itself or one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching._shared.ranks import Mesh
from headrace.size_aware_batching._validation import log_info
from headrace.size_aware_batching.memory.device import alloc_retries, device_memory, device_size
from headrace.size_aware_batching.memory.peaks import Peaks, attempt, batch_features, describe
from headrace.size_aware_batching.memory.snapshot import TrainingState
from headrace.size_aware_batching.planning.gather import gather_json


class Probes:
    """Measures batches on all ranks; a batch that does not fit on one rank is a bound for all.

    ``before`` is the state to restore after a step that failed half-way.
    """

    def __init__(
        self,
        work: Callable[[Any], object],
        sizes: NDArray[Any],
        device: Any,
        mesh: Mesh | None,
        before: TrainingState,
        target: float,
        warm_up: int,
    ) -> None:
        self.warm_up, self.warm_steps, self.alloc_retries = warm_up, 0, 0
        self.work, self.sizes, self.mesh, self.before, self.target = work, sizes, mesh, before, target
        self.memory = device_memory(device)
        self.capacity: int = min(gather_json(self.memory.total(), mesh))
        self.device_bytes: int = min(gather_json(device_size(self.memory), mesh))
        self._too_large: list[NDArray[np.float64]] = []
        self._warm = False

    @property
    def budget(self) -> float:
        """Bytes that a batch may need."""
        return self.target * self.capacity

    def measure(self, batch: NDArray[np.int64], warm_up: int | None = None) -> Peaks:
        """Return the peaks of one batch: the largest over the ranks."""
        sizes = self.sizes[batch]
        count, largest, total = batch_features(sizes)
        features = np.concatenate([[count], largest, total])
        fits, allocated, reserved = False, self.capacity, self.capacity
        if not any((features >= other).all() for other in self._too_large):
            # Libraries and optimizers allocate their state in the first steps.
            runs = (self.warm_up if warm_up is None else warm_up) if self._warm else max(2, self.warm_up)
            for _ in range(runs + 1):
                failed, *peaks = attempt(self.work, batch, self.memory, None)
            self._warm = True
            answers = gather_json([failed, *peaks, self.memory.total()], self.mesh)
            # Kernels and buffers of libraries take memory outside torch's allocator, most of it in the first steps.
            self.capacity = min(self.capacity, *(answer[3] for answer in answers))
            failed = next((answer[0] for answer in answers if answer[0] is not None), None)
            if failed is None:
                fits, allocated, reserved = True, *(max(answer[at] for answer in answers) for at in (1, 2))
            else:
                self._restore()
                self._too_large.append(features)
                log_info(f"a batch of {describe(sizes)} runs out of memory: {failed}")
        return Peaks.of([sizes], [allocated], [reserved], [fits])

    def run_warm(self, batches: Sequence[NDArray[np.int64]], bar: Any) -> Peaks:
        """Run batches one after another, as training does; return those that run out of memory so, as bounds."""
        bounds = []
        retries = alloc_retries(self.memory)
        for batch in batches:
            failed, *_ = attempt(self.work, batch, self.memory, None, warm=True)
            if (lost := next((each for each in gather_json(failed, self.mesh) if each is not None), None)) is not None:
                self._restore()
                bounds.append(self.sizes[batch])
                log_info(f"a batch of {describe(bounds[-1])} runs out of memory after other batches: {lost}")
            bar.update()
        self.warm_steps += len(batches)
        self.alloc_retries += max(gather_json(alloc_retries(self.memory) - retries, self.mesh))
        full = [self.capacity] * len(bounds)
        return Peaks.of(bounds, full, full, [False] * len(bounds))

    def _restore(self) -> None:
        """Undo a step that failed half-way; where the optimizer had no state before, the next batch warms up again."""
        self.before.restore()
        self._warm = False
