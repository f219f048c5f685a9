"""Peak memory of steps on a device, measured batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from headrace.size_aware_batching._shared.checks import checked_int
from headrace.size_aware_batching._shared.display import counted, never_raises
from headrace.size_aware_batching._shared.warnings import warn
from headrace.size_aware_batching._validation import log_info, shortlist
from headrace.size_aware_batching.memory.device import (
    CudaMeter,
    DeviceMemory,
    Meter,
    cuda_device,
    device_memory,
    free_memory,
    is_out_of_memory,
    out_of_memory,
    reset_peak,
)

Data = TypeVar("Data")
Feature = TypeVar("Feature")
SizesOf: TypeAlias = Callable[[Any], Any]  # a batch -> the sizes of its samples, [n] or [n, k]

_FAR = 10  # times the largest measured batch, up to which an estimate is scaled without a warning
_SPREAD = 2  # of measured batches, from which on they determine an offset, too
_NAMED = 10  # items that the closing message names; each has had a warning of its own


def collect_cuda_peak_alloc(
    dataset: Iterable[Data],
    work: Callable[[Data], Feature],
    device: torch.device | str,
    cleanup: Callable[[], None] | None = None,
) -> tuple[list[Feature], list[int]]:
    """Measure the CUDA memory of a step for each item of a dataset.

    The peak counts all tensors on the device: weights, other existing tensors, and the allocations of ``work``. The
    first items may need less than later ones, because optimizers and libraries allocate their state in the first
    steps; leave these items out of a fit. An item that runs out of memory is left out of both lists, with a warning
    that names its position. A progress bar appears after a second.

    Args:
        dataset: The items. Keep them on the host and let ``work`` move them: tensors of the dataset on the device count
            in every peak.
        work: The step to measure. Its result should be plain numbers or host tensors, for the same reason.
        device: The CUDA device that ``work`` uses.
        cleanup: Runs after each item, before memory is measured again; removes leftovers of ``work``.

    Returns:
        The results of ``work``, and the peaks in bytes; both in the order of the dataset. Pass them directly to
        `PolynomialRegression.fit`.

    Raises:
        TypeError: If ``work`` or ``cleanup`` is not callable, or ``device`` is not a device.
        ValueError: If ``device`` is not a CUDA device.
        RuntimeError: If CUDA is not available.

    >>> collect_cuda_peak_alloc([], work=len, device="cpu")
    Traceback (most recent call last):
        ...
    ValueError: device must be a CUDA device such as torch.device("cuda:0"), got cpu: only CUDA counts peaks
    """
    meter = CudaMeter(cuda_device(device))
    for name, value in (("work", work), ("cleanup", cleanup)):
        if not callable(value) and (name == "work" or value is not None):
            raise TypeError(f"{name} must be callable, got {type(value).__name__}")
    return collect_peaks(dataset, work, meter, cleanup)


def collect_peaks(
    dataset: Iterable[Data],
    work: Callable[[Data], Feature],
    meter: Meter,
    cleanup: Callable[[], None] | None = None,
) -> tuple[list[Feature], list[int]]:
    """Run ``work`` on each item; return its results and the peaks in bytes, as `collect_cuda_peak_alloc` does.

    ``cleanup`` runs after each item, also after one that failed.
    """
    features: list[Feature] = []
    peaks: list[int] = []
    skipped: list[int] = []
    for position, data in enumerate(tqdm(dataset, desc="peak memory", delay=1, leave=False)):
        try:
            meter.start()
            feature = work(data)
            peak = meter.peak()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            skipped.append(position)
            warn(f"the item at position {position} does not fit into memory and is left out: {error}")
        else:
            features.append(feature)
            peaks.append(peak)
        finally:
            if cleanup is not None:
                cleanup()
    if len(skipped) > 1:
        named = shortlist(skipped[:_NAMED], len(skipped))
        warn(f"{len(skipped)} of {len(skipped) + len(peaks)} items did not fit into memory: positions {named}")
    return features, peaks


@dataclass(frozen=True, repr=False)
class Peaks:
    """Measured peaks of batches; each array has one row for each of m batches.

    Args:
        counts: Samples in the batch, int64, shape ``[m]``.
        largest: Largest size in each column of sizes, float64, shape ``[m, k]``.
        sums: Sum of the sizes in each column, float64, shape ``[m, k]``.
        allocated: Peak bytes of tensors, int64, shape ``[m]``.
        reserved: Peak bytes of the allocator, int64, shape ``[m]``.
        fits: False if the batch ran out of memory; both peaks are then the size of the memory, a lower bound of its
            need. Shape ``[m]``.

    ``peaks[mask]`` selects rows and ``peaks + other`` concatenates the rows of both.
    """

    counts: NDArray[np.int64]
    largest: NDArray[np.float64]
    sums: NDArray[np.float64]
    allocated: NDArray[np.int64]
    reserved: NDArray[np.int64]
    fits: NDArray[np.bool_]

    def __post_init__(self) -> None:
        if len(lengths := {getattr(self, field.name).shape[:1] for field in fields(self)}) > 1:
            found = ", ".join(str(*length) for length in sorted(lengths))
            raise ValueError(f"peaks must have as many rows in every field, got {found}")

    @never_raises
    def __repr__(self) -> str:
        fit = int(self.fits.sum())
        most = f", up to {self.allocated[self.fits].max():,} bytes allocated" if fit else ""
        failed = f", {len(self.fits) - fit:,} out of memory" if fit < len(self.fits) else ""
        return f"{type(self).__name__}({counted(len(self.fits), 'batch')}{most}{failed})"

    @classmethod
    def of(
        cls, batches: Iterable[Any], allocated: Sequence[int], reserved: Sequence[int] | None = None, fits: Any = None
    ) -> Peaks:
        """Return the peaks of batches that are given by their samples' sizes, each of shape ``[n]`` or ``[n, k]``.

        >>> Peaks.of([[3, 5], [4]], [100, 70]).sums.tolist()
        [[8.0], [4.0]]
        """
        features = [batch_features(sizes) for sizes in batches]
        columns = len(features[0][1]) if features else 1
        peaks = np.array(allocated, np.int64)
        return cls(
            np.array([count for count, _, _ in features], np.int64),
            np.array([largest for _, largest, _ in features], np.float64).reshape(-1, columns),
            np.array([total for _, _, total in features], np.float64).reshape(-1, columns),
            peaks,
            peaks if reserved is None else np.array(reserved, np.int64),
            np.ones(len(peaks), np.bool_) if fits is None else np.array(fits, np.bool_),
        )

    @classmethod
    def of_lists(cls, found: dict[str, Any], columns: int) -> Peaks:
        """Return the peaks whose fields were turned into lists, for sizes of so many columns."""
        kinds: dict[str, Any] = {"largest": np.float64, "sums": np.float64, "fits": np.bool_}
        arrays = {field.name: np.array(found[field.name], kinds.get(field.name, np.int64)) for field in fields(cls)}
        arrays |= {name: arrays[name].reshape(-1, columns) for name in ("largest", "sums")}
        return cls(**arrays)

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, rows: Any) -> Peaks:
        return Peaks(*(getattr(self, field.name)[rows] for field in fields(self)))

    def __add__(self, other: Peaks) -> Peaks:
        names = [field.name for field in fields(self)]
        return Peaks(*(np.concatenate([getattr(self, name), getattr(other, name)]) for name in names))

    def scaled_to(self, measured: Peaks) -> Peaks:
        """Return estimated peaks, scaled to the level of a few measured peaks.

        Reserved bytes follow the scaled allocated ones and the estimated share of fragments, or the allocated ones
        alone where that is nearer to the measured batches: ``expandable_segments`` leaves hardly any fragments.

        Args:
            measured: Peaks of some of these batches, matched by count, largest sizes and sums. They determine
                a factor, and an offset if the largest takes at least twice as much as the smallest, by relative least
                squares. Measure batches of different sizes, the largest ones that fit among them.

        Raises:
            ValueError: If none of the measured batches that fit is among these, or one of them took no bytes.

        Warns:
            UserWarning: If the largest estimate is more than ten times the largest measured batch.
        """
        places = {self._key(row): row for row in range(len(self))}
        pairs = [
            (places[key], row) for row in np.flatnonzero(measured.fits) if (key := measured._key(int(row))) in places
        ]
        if not pairs:
            raise ValueError("measured must share batches with the estimate, got none: measure some of the same")
        own_rows, measured_rows = (np.array(rows) for rows in zip(*pairs, strict=True))
        for side, peaks in (("measured", measured[measured_rows]), ("the estimate", self[own_rows])):
            for name, least in (("allocated", peaks.allocated.min()), ("reserved", peaks.reserved.min())):
                if least <= 0:
                    raise ValueError(
                        f"{side} must have {name} bytes > 0 in the shared batches, got {least}: measure a step that "
                        "takes memory; Peaks.of takes the allocated bytes for reserved ones that are left out"
                    )
        if (times := float(self.allocated.max() / self.allocated[own_rows].max())) > _FAR:
            warn(
                f"the largest estimate is {times:.0f} times the largest measured batch, and a small error there is a "
                "large one here: measure larger batches, and leave out estimates far beyond the device, as in "
                "estimated[estimated.allocated < 2 * device_bytes]"
            )
        x, y = self.allocated[own_rows] / 1.0, measured.allocated[measured_rows] / 1.0
        factor, offset = _factor(x / y), 0.0
        if x.max() >= _SPREAD * x.min():
            factor, offset = np.linalg.lstsq(np.stack([x / y, 1 / y], axis=1), np.ones(len(x)), rcond=None)[0]
        allocated = factor * self.allocated + offset
        fragments = allocated * (self.reserved / np.maximum(self.allocated, 1))
        y = measured.reserved[measured_rows] / 1.0
        fits = [_factor(each[own_rows] / y) * each for each in (fragments, allocated)]
        errors = [float(((each[own_rows] / y - 1) ** 2).sum()) for each in fits]
        reserved = np.maximum(fits[errors[1] < errors[0] - 1e-9], allocated)  # both fit a single batch
        return replace(self, allocated=np.rint(allocated).astype(np.int64), reserved=np.rint(reserved).astype(np.int64))

    def _key(self, row: int) -> tuple[float, ...]:
        return (float(self.counts[row]), *self.largest[row].tolist(), *self.sums[row].tolist())


def _factor(ratios: NDArray[np.float64]) -> float:
    """Return the factor that takes ratios of estimates to measured values nearest to 1, by least squares."""
    return float(ratios.sum() / (ratios**2).sum())


def batch_features(sizes: Any) -> tuple[int, NDArray[np.float64], NDArray[np.float64]]:
    """Return the count, the largest sizes and the sums of the sizes of a batch, ``[n]`` or ``[n, k]``.

    >>> batch_features([3, 5])
    (2, array([5.]), array([8.]))
    """
    array = np.asarray(sizes, np.float64)
    if array.ndim not in (1, 2) or not len(array):
        raise ValueError(
            f"the sizes of a batch must have shape [n] or [n, k] with n >= 1, got {array.shape}: give sizes_of=, a "
            "function from a batch to the sizes of its samples"
        )
    array = array.reshape(len(array), -1)
    return len(array), array.max(axis=0), array.sum(axis=0)


def measure_peaks(
    work: Callable[[Data], object],
    batches: Iterable[Data],
    device: torch.device | str | DeviceMemory,
    *,
    sizes_of: SizesOf | None = None,
    warm_up: int = 2,
    cleanup: Callable[[], None] | None = None,
) -> Peaks:
    """Measure the peaks of allocated and of reserved memory for each batch, including batches that do not fit.

    A batch that runs out of memory, in torch's allocator or in cuBLAS or cuDNN, becomes a bound: see ``Peaks.fits``. A
    batch that is at least as large as such a batch in count, largest size and sum is not tried; so order the batches
    from small to large, as `design_batches` does. A progress bar appears after a second.

    Args:
        work: The step to measure: forward, backward and optimizer, as in training.
        batches: The arguments of ``work``, one per batch.
        device: The CUDA device that ``work`` uses, or a ``SimulatedMemory``.
        sizes_of: Returns the sizes of the samples in a batch, shape ``[n]`` or ``[n, k]``. By default the batch is
            these sizes.
        warm_up: Number of runs of the first batch before the measurements: libraries and optimizers allocate their
            state in the first steps.
        cleanup: Runs after each batch, also after one that failed.

    Returns:
        Features and peaks, in the order of the batches.

    Raises:
        ValueError: If ``device`` is not a CUDA device, or the sizes of a batch are not an array of numbers.

    >>> from headrace.size_aware_batching import SimulatedMemory
    >>> with SimulatedMemory(limit=100_000) as memory:
    ...     peaks = measure_peaks(lambda sizes: torch.zeros(sum(sizes)), [[1000], [9000, 9000], [20_000]], memory)
    >>> peaks.allocated.tolist(), peaks.fits.tolist()
    ([4096, 72192, 80384], [True, True, True])
    """
    memory = device_memory(device)
    warm_up = checked_int("warm_up", warm_up)
    rows: list[tuple[Any, int, int, bool]] = []
    too_large: list[NDArray[np.float64]] = []
    for batch in tqdm(batches, desc="peak memory", delay=1, leave=False):
        sizes = batch if sizes_of is None else sizes_of(batch)
        count, largest, total = batch_features(sizes)
        features = np.concatenate([[count], largest, total])
        for _ in range(warm_up):
            attempt(work, batch, memory, cleanup)
        warm_up = 0
        failed: str | None = "a smaller batch did"
        if not any((features >= other).all() for other in too_large):
            failed, allocated, reserved = attempt(work, batch, memory, cleanup)
        if failed is not None:
            too_large.append(features)
            allocated = reserved = memory.total()
            log_info(f"a batch of {describe(sizes)} runs out of memory: {failed}")
        rows.append((sizes, allocated, reserved, failed is None))
    batch_sizes, allocated_peaks, reserved_peaks, fits = zip(*rows, strict=True) if rows else ((), (), (), ())
    return Peaks.of(batch_sizes, allocated_peaks, reserved_peaks, fits)


def describe(sizes: Any) -> str:
    """Return the features of a batch as text.

    >>> describe([3, 5])
    '2 samples, largest 5, sum 8'
    """
    count, largest, total = batch_features(sizes)
    numbers = [" x ".join(f"{value:g}" for value in column) for column in (largest, total)]
    return f"{counted(count, 'sample')}, largest {numbers[0]}, sum {numbers[1]}"


def attempt(
    work: Callable[[Data], object],
    batch: Data,
    memory: DeviceMemory,
    cleanup: Callable[[], None] | None,
    warm: bool = False,
) -> tuple[str | None, int, int]:
    """Run the work once; return the out-of-memory error or None, and the allocated and the reserved peak.

    With ``warm`` the allocator keeps what it has cached, as in training.
    """
    try:
        if warm:
            reset_peak(memory)
        else:
            memory.start()
        failed = out_of_memory(lambda: work(batch))
        allocated, reserved = memory.peak(), memory.reserved_peak()
    finally:
        if cleanup is not None:
            cleanup()
    if failed is not None:
        free_memory()
    return failed, allocated, reserved
