"""The budget of a batch by measurement: the search for the batches that fill it, and their calibration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from headrace.size_aware_batching._shared.checks import checked_int
from headrace.size_aware_batching._shared.ranks import Ranks
from headrace.size_aware_batching._validation import log_info, real_number, whole_number
from headrace.size_aware_batching.distributed import DistributedSizeAwareBatchSampler
from headrace.size_aware_batching.memory.data_parallel import connect, unsynchronized
from headrace.size_aware_batching.memory.design import neighbours, padded_area, size_anchors
from headrace.size_aware_batching.memory.device import DeviceMemory
from headrace.size_aware_batching.memory.model import BatchMemoryModel, relative_errors
from headrace.size_aware_batching.memory.peaks import Peaks, batch_features
from headrace.size_aware_batching.memory.polynomial import PolynomialRegression
from headrace.size_aware_batching.memory.probes import Probes
from headrace.size_aware_batching.memory.snapshot import Optimizers, unchanged
from headrace.size_aware_batching.memory.terms import candidate_terms
from headrace.size_aware_batching.planning.costs import largest_count
from headrace.size_aware_batching.sizes.read import read_sizes

_EXPLORED = {1: (0.02, 0.5, 1.0), 2: (0.5, 1.0)}  # by columns of sizes: the same where counts are found by measuring
_SHARES = (0.125, 0.25, 0.5, 1.0)  # of the budget, at each of these sizes
_ERROR = 0.05  # of a curve that still follows the peaks
_CLEAR = 0.01  # of one curve of packed batches, at which another one may be better
_MIXED = 3  # samples of a batch that tells padded from packed, at least
_GROWTH = 4.0  # how many times the largest padded batch so far the next may be


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
    warm_up: int = 1,
    seed: int = 0,
    mesh: Any = None,
) -> BatchMemoryModel:
    """Measure training steps and return a model of their memory, for `DistributedSizeAwareBatchSampler`.

    About 18 steps with small, medium and large samples determine the curve; each batch is at most four times as large
    as the ones before it. Then ``calibration`` batches from the plan of an epoch determine the margin; its coverage
    holds if training batches are similar to them. A batch that runs out of memory counts as a bound, not as a failure.
    A progress bar appears after a second.

    Each batch is measured with an empty allocator cache (cold). Training keeps the cache: a batch reuses the cached
    blocks of the batches before it, and the unused rest of a block is lost to fragmentation (warm). To measure this,
    the calibration batches also run in a row without emptying the cache; a batch that then runs out of memory raises
    the margin as well. ``report()`` says how often the allocator had to release its whole cache.

    With a process group, every rank must call this function. All ranks measure the same batches and use the largest
    peak and the smallest memory, so that all get the same model.

    Args:
        step: Runs a training step with a batch: forward, backward, optimizer. It must clear the gradients at its
            beginning or at its end. Other changes are not undone: leave out schedules and moving averages of the
            weights, and use a separate ``GradScaler``.
        batches_of: Builds a batch, on the device, of the samples with these indices, int64, shape ``[n]``, such as
            ``lambda indices: collate([dataset[i] for i in indices])``. Indices may repeat.
        sizes: Size of each sample, as `DistributedSizeAwareBatchSampler` counts it: with its ``extra_per_sample``, at
            most its ``max_length`` and rounded up to its ``length_multiple``, if it has these.
        device: The CUDA device, or a ``SimulatedMemory``.
        target: Share of the device's memory for batches; the rest is ``reserve`` in the model's ``budget``.
        model: The model that ``step`` trains. If ``model`` and ``optimizer`` are given, weights, optimizer state and
            random state are restored afterwards. During the measurement ``DistributedDataParallel`` does not reduce
            gradients, so no rank waits for another that ran out of memory; ranks of sharded models (FSDP) do wait.
        optimizer: The optimizer of ``step``, or a sequence of optimizers.
        features: As for `BatchMemoryModel`. By default the measurements choose between ``n*L`` and ``n*L^2`` (padded
            batches), ``S`` and ``S^2``, and ``S`` and ``n`` (packed ones); ``report()`` and the log show the error of
            each.
        coverage: As for `BatchMemoryModel`; 0.99 needs ``calibration=99``.
        calibration: Number of batches of an epoch to measure.
        memory: As for `BatchMemoryModel`.
        max_items: Largest number of samples in a batch.
        warm_up: Number of runs of each batch before it is measured: compilation, CUDA graph capture and kernel
            selection take memory in the first step of a shape. 0 if you use none of them.
        seed: Seed of the epoch from which the calibration batches are drawn.
        mesh: A 1-D ``DeviceMesh`` of the data-parallel ranks, if these are not all ranks.

    Returns:
        The fitted model: ``model.cost()`` is the cost, ``model.budget()`` the budget.

    Raises:
        ValueError: If an argument has a value that is not allowed, too few batches fit into the memory, or other
            features fit the peaks far better than ``features``.
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
    >>> sampler = DistributedSizeAwareBatchSampler(lengths, found.budget(), cost=found.cost())
    >>> found.budget(), len(sampler)
    (3800000.0, 5)
    """
    if not 0 < real_number(target, "target") <= 1:
        raise ValueError(f"target must be greater than 0 and at most 1, got {target}")
    array = read_sizes(sizes)
    if len(array) < 2:
        raise ValueError(
            "sizes must hold at least two samples, as a curve is fitted to batches of different sizes, got "
            f"{len(array)}: give the sizes of the whole dataset"
        )
    calibration = whole_number("calibration", calibration) or 1
    warm_up = checked_int("warm_up", warm_up)
    connect(model)
    memory_model = BatchMemoryModel(features, coverage=coverage, memory=memory)
    with unchanged(model, optimizer) as before, unsynchronized(model):
        ranks = Ranks(mesh=mesh).mesh
        probes = Probes(lambda batch: step(batches_of(batch)), array, device, ranks, before, target, warm_up)
        anchors = size_anchors(array, _EXPLORED.get(array.reshape(len(array), -1).shape[1], (1.0,)))
        with tqdm(
            total=len(anchors) * (2 + len(_SHARES)) + 2 * calibration, desc="fit_budget", delay=1, leave=False
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
    memory_model.warm_steps, memory_model.alloc_retries = probes.warm_steps, probes.alloc_retries
    return memory_model


def _explore(memory_model: BatchMemoryModel, probes: Probes, anchors: Sequence[Any], most: int, bar: Any) -> Peaks:
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
    probes: Probes,
    wanted: int,
    max_items: int | None,
    seed: int,
    bar: Any,
) -> Peaks:
    """Measure batches, each of another shape, from epochs planned with the provisional model."""
    provisional = _provisional(memory_model, points)
    options: dict[str, Any] = {"oversize": "skip", "num_replicas": 1, "rank": 0, "max_items": max_items}
    cost, sizes = provisional.cost(), probes.sizes
    packed = cost.is_of_sums() or cost.is_of_samples()
    if not packed:
        options["cost"] = provisional.cost(extrapolate=True)
    shapes: dict[bytes, NDArray[np.int64]] = {}
    for attempts in range(8):  # other epochs, and slightly smaller ones, until there are enough different batches
        share = (1 - 0.02 * attempts) * probes.budget
        limit: Any = share
        if packed:
            sizes, limit = provisional.sample_costs(probes.sizes, share, extrapolate=True)
            limit = np.maximum(1.0, limit).tolist()
            limit = tuple(limit) if isinstance(limit, list) else limit
        plan = DistributedSizeAwareBatchSampler(sizes, limit, seed=seed + attempts, **options).plan()
        for batch in plan:
            count, largest, total = batch_features(probes.sizes[batch])
            shapes.setdefault(np.array([count, *(total if packed else largest)]).tobytes(), np.asarray(batch, np.int64))
        if len(shapes) >= 2 * wanted:
            break
    if not shapes:
        raise ValueError(f"sizes must have samples that fit into {probes.budget:,.0f} bytes, got none: see the log")
    batches = list(shapes.values())
    drawn = np.resize(np.random.default_rng(seed).permutation(len(batches)), 2 * wanted).tolist()
    bounds = probes.run_warm([batches[number] for number in drawn[:wanted]], bar)
    tested = points[:0]
    for place, number in enumerate(drawn):
        tested += probes.measure(batches[number], 0 if place < wanted else None)  # these shapes have run
        bar.update()
        if int(tested.fits.sum()) == wanted:
            break
    return tested + bounds if len(bounds) else tested


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
    padded, *packed = candidate_terms(points.largest.shape[1])
    fitting = points[points.fits]
    if len(fitting) < len(packed[0]) + 3:
        return padded

    def error(features: tuple[str, ...]) -> float:
        """Return the largest error: few of the batches tell the curves apart."""
        return float(relative_errors(features, fitting, fitting, memory_model.memory).max())

    best = packed[0]  # unless another one does far better, too
    for features in packed[1:]:
        best = features if error(best) > max(_CLEAR, 2 * error(features)) else best
    return best if error(padded) > max(_ERROR, 2 * error(best)) else padded


def _refuse_other_curve(fitted: BatchMemoryModel) -> None:
    """Refuse features that miss the peaks where others do not: planned batches would exceed the prediction."""
    report = fitted.report()
    best = min(report.alternatives, key=lambda name: report.alternatives[name], default=None)
    if best is not None and report.median_error > max(_ERROR, 2 * report.alternatives[best]):
        raise ValueError(
            f"features must follow the peaks, got {list(report.slopes)} that miss them by {report.median_error:.0%} in "
            f"the median, {report.alternatives[best]:.1%} with others: leave features= out, or give {best.split(' + ')}"
        )
