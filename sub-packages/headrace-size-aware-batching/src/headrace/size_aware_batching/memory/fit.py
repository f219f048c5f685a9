"""The budget of a batch by measurement: the design of batches, and the search for the budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from headrace.size_aware_batching._validation import log_info, real_number, whole_number
from headrace.size_aware_batching.distributed import DistributedSizeAwareBatchSampler
from headrace.size_aware_batching.memory.data_parallel import connect, unsynchronized
from headrace.size_aware_batching.memory.device import DeviceMemory, device_memory, device_size
from headrace.size_aware_batching.memory.model import BatchMemoryModel, relative_errors
from headrace.size_aware_batching.memory.peaks import Peaks, attempt, batch_features, describe
from headrace.size_aware_batching.memory.polynomial import PolynomialRegression
from headrace.size_aware_batching.memory.snapshot import Optimizers, TrainingState, unchanged
from headrace.size_aware_batching.memory.terms import candidate_terms
from headrace.size_aware_batching.planning.costs import largest_count
from headrace.size_aware_batching.planning.gather import gather_json
from headrace.size_aware_batching.planning.ranks import Mesh, Ranks
from headrace.size_aware_batching.sizes.read import read_sizes

_LEVELS = (0.02, 0.25, 0.5, 0.75, 1.0)  # of the sorted sizes, at which batches are measured
_EXPLORED = {1: (0.02, 0.5, 1.0), 2: (0.5, 1.0)}  # by columns of sizes: the same where counts are found by measuring
_SHARES = (0.125, 0.25, 0.5, 1.0)  # of the budget, at each of these sizes
_ERROR = 0.05  # of a curve that still follows the peaks
_MIXED = 3  # samples of a batch that tells padded from packed, at least
_GROWTH = 4.0  # how many times the largest padded batch so far the next may be


def design_batches(sizes: Any, points: int = 30, max_items: int = 64) -> list[NDArray[np.int64]]:
    """Choose batches to measure: real samples of similar size, over a grid of counts and largest sizes.

    The largest sizes are at 2, 25, 50, 75 and 100 % of the sorted sizes (of each column); the counts are a geometric
    series from 1 to ``max_items``. A batch has the samples just below its largest one, repeated if there are too few.

    Args:
        sizes: Size of each sample, as for `DistributedSizeAwareBatchSampler`.
        points: Approximate number of batches; 20 to 40 suffice.
        max_items: Samples in the largest batch. `fit_budget` determines the number that fits itself.

    Returns:
        Indices of the samples of each batch, the smallest batch first.

    >>> [batch.tolist() for batch in design_batches([10, 20, 30], points=4, max_items=2)]
    [[0], [0, 0], [1], [2], [1, 0], [2, 1]]
    """
    array = read_sizes(sizes)
    points, max_items = whole_number("points", points) or 1, whole_number("max_items", max_items) or 1
    if not len(array):
        raise ValueError("sizes must hold at least one sample, got none")
    anchors = size_anchors(array)
    steps = min(max_items, max(2, -(-points // len(anchors)))) if max_items > 1 else 1
    counts = np.unique(np.rint(np.geomspace(1, max_items, steps)).astype(int))
    batches = [neighbours(order, place, int(count)) for order, place in anchors for count in counts]
    chosen = {tuple(batch.tolist()): batch for batch in batches}
    ordered = sorted(chosen.values(), key=lambda batch: padded_area(array, batch))
    if len(ordered) > points + len(anchors):
        ordered = [ordered[place] for place in np.unique(np.linspace(0, len(ordered) - 1, points).astype(int))]
    return ordered


def size_anchors(sizes: NDArray[Any], levels: Sequence[float] = _LEVELS) -> list[tuple[NDArray[np.int64], int]]:
    """Return, for each column and level, the samples by size and the place of the level's sample among them."""
    places = dict.fromkeys(int(level * (len(sizes) - 1)) for level in levels)
    orders = [np.argsort(column, kind="stable") for column in sizes.reshape(len(sizes), -1).T]
    return [(order, place) for order in orders for place in places]


def neighbours(order: NDArray[np.int64], place: int, count: int) -> NDArray[np.int64]:
    """Return ``count`` samples whose largest is at ``place`` of the sorted ones, the largest first."""
    return np.resize(order[max(0, place + 1 - count) : place + 1][::-1], count)


def padded_area(sizes: NDArray[Any], batch: NDArray[np.int64]) -> float:
    """Return count times largest, the sum over the columns."""
    return float(len(batch) * sizes[batch].reshape(len(batch), -1).max(axis=0).sum())


def fit_budget(
    step: Callable[[Any], object],
    batches_of: Callable[[NDArray[np.int64]], Any],
    sizes: Any,
    device: torch.device | str | DeviceMemory,
    target: float = 0.95,
    *,
    model: torch.nn.Module | None = None,
    optimizer: Optimizers = None,
    features: Sequence[str] | PolynomialRegression | None = None,
    coverage: float = 0.95,
    calibration: int = 22,
    memory: Literal["reserved", "allocated"] = "reserved",
    max_items: int | None = None,
    seed: int = 0,
    mesh: Any = None,
) -> BatchMemoryModel:
    """Measure training steps and return a model of their memory, ready for `DistributedSizeAwareBatchSampler`.

    Some 18 steps with small, usual and large samples determine the curve; each batch is at most four times as large as
    the previous ones. Then ``calibration`` batches from the plan of an epoch determine the margin: its coverage relies
    on their similarity to the batches of training. A batch that runs out of memory counts as a bound, not as a failure.
    A progress bar appears after a second.

    With a process group, every rank must call it. All ranks measure the same batches and use the largest peak and the
    smallest memory, so that all get the same model.

    Args:
        step: A training step with a batch: forward, backward, optimizer. It must leave no gradients behind, or clear
            them at its beginning. Other changes are not undone: leave schedules and moving averages of the weights out
            of it, and use a separate ``GradScaler``.
        batches_of: Builds a batch, on the device, of the samples with these indices, int64, shape ``[n]``, such as
            ``lambda indices: collate([dataset[i] for i in indices])``. Indices may repeat.
        sizes: Size of each sample, as `DistributedSizeAwareBatchSampler` counts it: at most its ``max_length`` and
            rounded up to its ``length_multiple``, if it has these.
        device: The CUDA device, or a ``SimulatedMemory``.
        target: Share of the device's memory for batches; the rest is ``reserve`` in the model's ``budget``.
        model: The model that ``step`` trains. With it and ``optimizer``, weights, optimizer state and random state are
            restored afterwards. Meanwhile a ``DistributedDataParallel`` does not reduce its gradients, so that no rank
            waits for another one that ran out of memory; ranks of sharded models (FSDP) do wait.
        optimizer: The optimizer of ``step``, or several.
        features: As for `BatchMemoryModel`. By default the measurements choose between ``n*L`` and ``n*L^2`` (padded
            batches) and ``S`` and ``S^2`` (packed ones); ``report()`` and the log say how well each follows them.
        coverage: As for `BatchMemoryModel`; 0.99 needs ``calibration=99``.
        calibration: Number of batches of an epoch to measure.
        memory: As for `BatchMemoryModel`.
        max_items: Largest number of samples in a batch.
        seed: Seed of the epoch from which these batches are drawn.
        mesh: A 1-D ``DeviceMesh`` of the data-parallel ranks, if these are not all ranks.

    Returns:
        The fitted model: ``model.cost()`` is the cost, ``model.budget()`` the budget.

    Raises:
        ValueError: If an argument has a value that is not allowed, too few batches fit into the memory, or
            ``features`` miss the peaks and others do not.
        torch.OutOfMemoryError: If no batch fits at all.

    >>> from headrace.size_aware_batching import SimulatedMemory
    >>> layer, lengths = torch.nn.Linear(16, 64), np.arange(10, 210)
    >>> with SimulatedMemory(limit=4_000_000) as device:
    ...     found = fit_budget(
    ...         lambda batch: layer(batch).relu().sum().backward(),
    ...         lambda indices: torch.ones(len(indices), int(lengths[indices].max()), 16),
    ...         lengths,
    ...         device,
    ...         memory="allocated",
    ...     )
    >>> sampler = DistributedSizeAwareBatchSampler(lengths, found.budget(), cost=found.cost(), strategy="bucketed")
    >>> found.budget(), len(sampler)
    (3800000.0, 5)
    """
    if not 0 < real_number(target, "target") <= 1:
        raise ValueError(f"target must be greater than 0 and at most 1, got {target}")
    array = read_sizes(sizes)
    if not len(array):
        raise ValueError("sizes must hold at least one sample, got none")
    calibration = whole_number("calibration", calibration) or 1
    connect(model)
    memory_model = BatchMemoryModel(features, coverage=coverage, memory=memory)
    with unchanged(model, optimizer) as before, unsynchronized(model):
        probes = _Probes(lambda batch: step(batches_of(batch)), array, device, Ranks(mesh=mesh).mesh, before, target)
        anchors = size_anchors(array, _EXPLORED.get(array.reshape(len(array), -1).shape[1], (1.0,)))
        with tqdm(
            total=len(anchors) * (2 + len(_SHARES)) + calibration, desc="fit_budget", delay=1, leave=False
        ) as bar:
            points = _explore(memory_model, probes, anchors, whole_number("max_items", max_items) or 2**31, bar)
            tested = _calibrate(memory_model, points, probes, calibration, max_items, seed, bar)
    given, memory_model.features = memory_model.features, memory_model.features or _chosen(memory_model, points)
    memory_model.fit(points, tested)
    if given is not None:
        _refuse_other_curve(memory_model)
    else:
        others = [f"{error:.1%} with {name}" for name, error in memory_model.report().alternatives.items()]
        log_info(
            f"the peaks follow {' + '.join(memory_model.features)}: median error "
            f"{memory_model.report().median_error:.1%}, {', '.join(others)}"
        )
    memory_model.capacity, memory_model.device_bytes = probes.capacity, probes.device_bytes
    memory_model.reserve = 1 - target
    return memory_model


class _Probes:
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
    ) -> None:
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

    def measure(self, batch: NDArray[np.int64]) -> Peaks:
        """Return the peaks of one batch: the largest over the ranks."""
        sizes = self.sizes[batch]
        count, largest, total = batch_features(sizes)
        features = np.concatenate([[count], largest, total])
        fits, allocated, reserved = False, self.capacity, self.capacity
        if not any((features >= other).all() for other in self._too_large):
            for _ in range(1 if self._warm else 3):  # libraries and optimizers allocate their state in the first steps
                failed, *peaks = attempt(self.work, batch, self.memory, None)
            self._warm = True
            answers = gather_json([failed, *peaks, self.memory.total()], self.mesh)
            # Kernels and buffers of libraries take memory outside torch's allocator, most of it in the first steps.
            self.capacity = min(self.capacity, *(answer[3] for answer in answers))
            failed = next((answer[0] for answer in answers if answer[0] is not None), None)
            if failed is None:
                fits, allocated, reserved = True, *(max(answer[at] for answer in answers) for at in (1, 2))
            else:
                self.before.restore()  # drops the optimizer's state where there was none before: warm up again
                self._warm = False
                self._too_large.append(features)
                log_info(f"a batch of {describe(sizes)} runs out of memory: {failed}")
        return Peaks.of([sizes], [allocated], [reserved], [fits])


def _explore(memory_model: BatchMemoryModel, probes: _Probes, anchors: Sequence[Any], most: int, bar: Any) -> Peaks:
    """Measure one and two samples of each size, then the counts that increasing shares of the budget seem to fit."""
    small = [neighbours(order, place, count) for count in (1, 2)[:most] for order, place in anchors]
    small.sort(key=lambda batch: padded_area(probes.sizes, batch))
    points = probes.measure(small[0])
    for batch in small[1:]:
        points += probes.measure(batch)
        bar.update()
    if not points.fits.any():
        raise torch.OutOfMemoryError(
            f"no batch of one or two samples fits into {probes.capacity:,} bytes: use a smaller model, or cut samples"
        )
    for share in _SHARES:
        for order, place in anchors:
            cost = _provisional(memory_model, points).cost(extrapolate=True)
            one = np.asarray(probes.sizes[order[place]], np.float64)
            areas = points.counts * points.largest.sum(axis=1)
            alike = 2 * points.sums.sum(axis=1) >= areas  # a mixed batch that is packed is small
            area = _GROWTH * float(areas[alike].max()) / max(float(one.sum()), 1e-9)
            count = largest_count(cost, share * probes.budget, one if one.ndim else one.item(), min(most, int(area)))
            if count and not ((points.counts == count) & (points.largest == one).all(axis=1)).any():
                batch = neighbours(order, place, count)
                if memory_model.features is None and place == len(order) - 1 and share < 1 and count >= _MIXED:
                    batch[1:] = order[0]  # a batch of equal sizes is the same padded and packed
                points += probes.measure(batch)
            bar.update()
    return points


def _calibrate(
    memory_model: BatchMemoryModel,
    points: Peaks,
    probes: _Probes,
    wanted: int,
    max_items: int | None,
    seed: int,
    bar: Any,
) -> Peaks:
    """Measure batches, each of another shape, from epochs planned with the provisional model."""
    provisional = _provisional(memory_model, points)
    options: dict[str, Any] = {"oversize": "skip", "num_replicas": 1, "rank": 0, "max_items": max_items}
    packed = provisional.cost().is_of_sums()
    if not packed:
        options |= {"cost": provisional.cost(extrapolate=True), "strategy": "bucketed"}
    shapes: dict[bytes, NDArray[np.int64]] = {}
    for attempts in range(8):  # other epochs, and slightly smaller ones, until there are enough different batches
        share = (1 - 0.02 * attempts) * probes.budget
        limit: Any = np.maximum(1.0, provisional.max_total(share, extrapolate=True)).tolist() if packed else share
        limit = tuple(limit) if isinstance(limit, list) else limit
        plan = DistributedSizeAwareBatchSampler(probes.sizes, limit, seed=seed + attempts, **options).plan()
        for batch in plan:
            count, largest, total = batch_features(probes.sizes[batch])
            shapes.setdefault(np.array([count, *(total if packed else largest)]).tobytes(), np.asarray(batch, np.int64))
        if len(shapes) >= 2 * wanted:
            break
    if not shapes:
        raise ValueError(f"sizes must have samples that fit into {probes.budget:,.0f} bytes, got none: see the log")
    batches = list(shapes.values())
    drawn = np.resize(np.random.default_rng(seed).permutation(len(batches)), 2 * wanted)
    tested = points[:0]
    for number in drawn.tolist():
        tested += probes.measure(batches[number])
        bar.update()
        if int(tested.fits.sum()) == wanted:
            break
    return tested


def _provisional(memory_model: BatchMemoryModel, points: Peaks) -> BatchMemoryModel:
    """Fit a model whose margin covers the larger half of the points so far; small ones have larger rounding errors."""
    fitting = points[points.fits]
    larger = fitting[fitting.allocated >= np.median(fitting.allocated)] if len(fitting) else fitting
    features = memory_model.features or _chosen(memory_model, points)
    model = BatchMemoryModel(features, coverage=len(larger) / (len(larger) + 2) or 0.5, memory=memory_model.memory)
    model.fit(points, larger)
    return model


def _chosen(memory_model: BatchMemoryModel, points: Peaks) -> tuple[str, ...]:
    """Return the features that follow the peaks: those of padded batches, unless those of packed ones do far better."""
    padded, packed = candidate_terms(points.largest.shape[1])
    fitting = points[points.fits]
    if len(fitting) < len(packed) + 3:
        return padded
    # The largest error counts: few of the batches tell the two apart.
    errors = [
        float(relative_errors(features, fitting, fitting, memory_model.memory).max()) for features in (padded, packed)
    ]
    return packed if errors[0] > max(_ERROR, 2 * errors[1]) else padded


def _refuse_other_curve(fitted: BatchMemoryModel) -> None:
    """Refuse features that miss the peaks where others do not: planned batches would exceed the prediction."""
    report = fitted.report()
    best = min(report.alternatives, key=lambda name: report.alternatives[name], default=None)
    if best is not None and report.median_error > max(_ERROR, 2 * report.alternatives[best]):
        raise ValueError(
            f"features must follow the peaks, got {list(report.slopes)} that miss them by {report.median_error:.0%} in "
            f"the median, {report.alternatives[best]:.1%} with others: leave features= out, or give {best.split(' + ')}"
        )
