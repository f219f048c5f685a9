"""The shapes of padded batches by measurement: each of them has run, so that none needs a margin."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from headrace.size_aware_batching._files import write_atomically
from headrace.size_aware_batching._shared.checks import checked_int
from headrace.size_aware_batching._shared.display import counted, never_raises
from headrace.size_aware_batching._shared.ranks import Ranks
from headrace.size_aware_batching._validation import log_info, one_of, real_number
from headrace.size_aware_batching.memory.data_parallel import connect, unsynchronized
from headrace.size_aware_batching.memory.design import neighbours
from headrace.size_aware_batching.memory.device import DeviceMemory
from headrace.size_aware_batching.memory.model import BatchMemoryModel
from headrace.size_aware_batching.memory.probes import Probes
from headrace.size_aware_batching.memory.snapshot import Optimizers, unchanged
from headrace.size_aware_batching.memory.terms import MemoryCost
from headrace.size_aware_batching.planning.costs import largest_count
from headrace.size_aware_batching.planning.limits import Limits
from headrace.size_aware_batching.planning.options import Options
from headrace.size_aware_batching.planning.prepared import prepare
from headrace.size_aware_batching.planning.shapes import checked_shapes
from headrace.size_aware_batching.sizes.read import read_sizes

_FORMAT = 1  # of a saved file
_LOWERED = 0.97  # of its rows a shape keeps that ran out after others
_PASSES = 20  # over all shapes, until none runs out


@dataclass(frozen=True, repr=False)
class MeasuredShapes:
    """Shapes of padded batches that have run on the device, and their bytes. `fit_shapes` returns it.

    It is the ``cost=`` of `DistributedSizeAwareBatchSampler`: called with a number of samples and the largest size, it
    returns the bytes of their shape, infinite where there is none. It is picklable.

    Args:
        shapes: (count, length) of each, by length; the argument ``shapes=`` of the sampler and of `PaddedCollate`.
        peaks: Bytes of each in an emptied allocator, at most ``budget``.
        budget: Bytes that a batch may need; the argument ``max_total_size``.
        memory: Which bytes: ``"reserved"`` or ``"allocated"``, as in `BatchMemoryModel`.
        warm_steps: Steps that ran one after another, each shape several times, after which none ran out.
        alloc_retries: How often the allocator had to release all that it had cached meanwhile.
    """

    shapes: tuple[tuple[int, int], ...]
    peaks: tuple[int, ...]
    budget: float
    memory: Literal["reserved", "allocated"]
    warm_steps: int
    alloc_retries: int

    def __call__(self, count: int, largest: Any) -> float:
        """Return the bytes of a batch of so many samples with this largest size."""
        size = largest.tolist() if isinstance(largest, np.ndarray | np.generic | torch.Tensor) else largest
        size = size[0] if isinstance(size, Sequence) else size
        place = bisect_left(self.shapes, size, key=lambda shape: shape[1])
        if place == len(self.shapes) or count > self.shapes[place][0]:
            return math.inf
        return float(max(self.peaks[: place + 1]))  # a cost must not fall where the largest size grows

    @never_raises
    def __repr__(self) -> str:
        ends = [" x ".join(f"{number:,}" for number in self.shapes[place]) for place in (0, -1)]
        figures = [counted(len(self.shapes), "shape"), " to ".join(ends), f"budget {self.budget:,.0f} bytes"]
        return f"{type(self).__name__}({', '.join(figures)})"

    def __str__(self) -> str:
        return "\n".join(f"{name:14}{text}" for name, text in self._cells().items())

    def _cells(self) -> dict[str, str]:
        cells = {
            f"{count:,} x {length:,}": f"{peak:,} bytes, {peak / self.budget:.1%} of the budget"
            for (count, length), peak in zip(self.shapes, self.peaks, strict=True)
        }
        warm = f"{counted(self.warm_steps, 'step')} one after another, allocator retries: {self.alloc_retries:,}"
        return cells | {"warm": warm}

    def save(self, path: str | Path) -> None:
        """Write the shapes atomically to a JSON file, for the resume: another measurement may find others."""
        write_atomically(Path(path), [json.dumps({"format": _FORMAT, **asdict(self)}, indent=1).encode()])

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read shapes that ``save`` wrote.

        Raises:
            ValueError: If the file does not contain saved shapes.
        """
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
            if found["format"] != _FORMAT:
                raise ValueError(f"format {found['format']}")
            shapes, peaks = checked_shapes(found["shapes"], 1), [checked_int("peak", peak) for peak in found["peaks"]]
            if not shapes or len(shapes) != len(peaks):
                raise ValueError(f"{len(shapes)} shapes and {len(peaks)} peaks")
            one_of("memory", found["memory"], ("reserved", "allocated"))
            budget, counts = real_number(found["budget"], "budget"), (found["warm_steps"], found["alloc_retries"])
            warm_steps, retries = (checked_int("count", count) for count in counts)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{path} must be a file that MeasuredShapes.save wrote: {error!r}") from None
        return cls(shapes, tuple(peaks), float(budget), found["memory"], warm_steps, retries)


def fit_shapes(
    step: Callable[[Any], object],
    batches_of: Callable[[NDArray[np.int64]], Any],
    sizes: Any,
    device: torch.device | str | DeviceMemory,
    memory: BatchMemoryModel,
    shapes: int = 16,
    *,
    model: torch.nn.Module | None = None,
    optimizer: Optimizers = None,
    max_items: int | None = None,
    batch_size_multiple: int = 1,
    length_multiple: int = 1,
    rounds: int = 2,
    warm_up: int = 1,
    seed: int = 0,
    mesh: Any = None,
) -> MeasuredShapes:
    """Choose a few shapes of padded batches and measure each of them before the training.

    A memory model predicts batches that were not measured, and so needs a margin. Where all batches have one of a few
    shapes, each shape can run: ``memory`` without its margin says how many samples to begin with, and a shape that
    exceeds the budget gets fewer. Then all shapes run one after another, as in training, several times and in random
    order; one that runs out of memory gets fewer samples, until none does. A progress bar appears after a second.

    With a process group, every rank must call it, as for `fit_budget`.

    Args:
        step: As for `fit_budget`; compiled, if the training is.
        batches_of: As for `fit_budget`. The batch of n samples must have n rows, padded to the longest sample, rounded
            up to ``length_multiple``.
        sizes: Length of each sample, whole numbers of shape ``[n]``, as for `fit_budget`.
        device: The device that trains.
        memory: A model of padded batches, which `fit_budget` fitted for this step and device.
        shapes: Largest number of shapes.
        model: As for `fit_budget`.
        optimizer: As for `fit_budget`.
        max_items: As for the sampler.
        batch_size_multiple: As for the sampler.
        length_multiple: As for the sampler.
        rounds: How often each shape runs after others.
        warm_up: As for `fit_budget`.
        seed: Seed of the order in which they run.
        mesh: As for `fit_budget`.

    Returns:
        The shapes with their bytes: ``cost=`` and ``shapes=`` of the sampler.

    Raises:
        ValueError: If an argument has a value that is not allowed, or a sample does not fit by itself.
        torch.OutOfMemoryError: If there are no such shapes.

    >>> from headrace.size_aware_batching import DistributedSizeAwareBatchSampler, SimulatedMemory, fit_budget
    >>> layer, lengths = torch.nn.Linear(16, 64), np.arange(10, 210)
    >>> def step(batch):
    ...     layer(batch).relu().sum().backward()
    >>> def batches_of(indices):
    ...     return torch.ones(len(indices), int(lengths[indices].max()), 16)
    >>> with SimulatedMemory(limit=4_000_000) as device:
    ...     memory = fit_budget(step, batches_of, lengths, device, memory="allocated")
    ...     found = fit_shapes(step, batches_of, lengths, device, memory, shapes=4)
    >>> sampler = DistributedSizeAwareBatchSampler(lengths, found.budget, cost=found, shapes=found.shapes)
    >>> found.shapes, len(sampler)
    (((115, 57), (62, 106), (41, 160), (31, 209)), 5)
    """
    array = read_sizes(sizes)
    if not len(array):
        raise ValueError("sizes must hold at least one sample, got none")
    cost = replace(memory.cost(extrapolate=True), factor=1.0)
    if cost.is_of_sums() or cost.is_of_samples():
        raise ValueError(
            f"memory must be a model of padded batches, got one of {' + '.join(term.name for term in cost.terms)}: "
            "batches that are not padded have no shape; or give fit_budget features=('n*L', 'n*L^2')"
        )
    budget = memory.budget()
    options = Options(
        "bucketed",
        cost,
        max_items=max_items,
        batch_size_multiple=batch_size_multiple,
        length_multiple=length_multiple,
        shapes=checked_int("shapes", shapes, 1),
    )
    prepared = prepare(array, budget, options)
    rounds, warm_up = checked_int("rounds", rounds, 1), checked_int("warm_up", warm_up)
    pairs = prepared.shapes.pairs() if prepared.shapes is not None else ()
    connect(model)
    with unchanged(model, optimizer) as before, unsynchronized(model):
        ranks = Ranks(mesh=mesh).mesh
        probes = Probes(
            lambda batch: step(batches_of(batch)), array, device, ranks, before, 1 - memory.reserve, warm_up
        )
        fitting = _Fitting(probes, cost, memory.memory, budget, prepared.limits)
        with tqdm(total=len(pairs) * (1 + rounds), desc="fit_shapes", delay=1, leave=False) as bar:
            for count, length in pairs:
                fitting.add(count, length)
                bar.update()
            fitting.run_warm(rounds, seed, bar)
    return MeasuredShapes(
        tuple(fitting.pairs),
        tuple(fitting.peaks),
        budget,
        memory.memory,
        probes.warm_steps,
        probes.alloc_retries,
    )


class _Fitting:
    """Shapes by length, each with as many rows as fit; a longer one has no more rows than a shorter one."""

    def __init__(
        self, probes: Probes, cost: MemoryCost, memory: Literal["reserved", "allocated"], budget: float, limits: Limits
    ) -> None:
        self.probes, self.cost, self.memory, self.budget, self.limits = probes, cost, memory, budget, limits
        self.order = np.argsort(probes.sizes, kind="stable")
        self.pairs: list[tuple[int, int]] = []
        self.peaks: list[int] = []

    def add(self, count: int, length: int) -> None:
        """Add a shape that is longer than those before, with so many rows or fewer."""
        self.pairs.append((count, length))
        self.peaks.append(0)
        self._measure(len(self.pairs) - 1)

    def run_warm(self, rounds: int, seed: int, bar: Any) -> None:
        """Run all shapes one after another; one that runs out gets fewer rows, until none does."""
        rng = np.random.default_rng(seed)
        for _ in range(_PASSES):
            order = np.concatenate([rng.permutation(len(self.pairs)) for _ in range(rounds)]).tolist()
            bounds = self.probes.run_warm([self._batch(*self.pairs[place]) for place in order], bar)
            if not len(bounds):
                return
            bar.total += len(order)
            for count in {int(count) for count in bounds.counts}:
                for place in [place for place, pair in enumerate(self.pairs) if pair[0] == count]:
                    self.pairs[place] = self._fewer(count, int(_LOWERED * count)), self.pairs[place][1]
                    self._measure(place)
            for place in range(1, len(self.pairs)):
                if self.pairs[place][0] > self.pairs[place - 1][0]:
                    self._measure(place)
        raise torch.OutOfMemoryError(
            f"shapes must run one after another, got some that run out of memory after {_PASSES} passes: give "
            "fit_budget a smaller target"
        )

    def _measure(self, place: int) -> None:
        """Lower the rows of a shape until it fits into the budget."""
        count, length = self.pairs[place]
        if place:
            count = min(count, self.pairs[place - 1][0])
        while True:
            measured = self.probes.measure(self._batch(count, length))
            peak = int(getattr(measured, self.memory)[0])
            if measured.fits[0] and peak <= self.budget:
                break
            above = peak / self.cost(count, length)  # what the curve does not know of this shape
            lower = self._fewer(count, largest_count(self.cost, self.budget / above, length, count - 1))
            log_info(f"{count} x {length} takes {peak:,} of {self.budget:,.0f} bytes: {lower} x {length} is next")
            count = lower
        self.pairs[place], self.peaks[place] = (count, length), peak

    def _fewer(self, count: int, wanted: int) -> int:
        """Return the allowed number of rows up to ``wanted``, and below ``count``."""
        if not (lower := self.limits.floor(min(wanted, count - 1))):
            raise torch.OutOfMemoryError("a sample by itself does not fit into the budget: cut long samples")
        return lower

    def _batch(self, count: int, length: int) -> NDArray[np.int64]:
        """Return samples whose longest is the one that this length was made for, repeated if there are too few."""
        place = int(np.searchsorted(self.probes.sizes, length, "right", sorter=self.order)) - 1
        return neighbours(self.order, place, count)
