"""Peak memory of a step on a CUDA device; no other module touches CUDA."""

import gc
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

import torch
from tqdm import tqdm

from headrace.size_aware_batching._validation import shortlist, shown, warn

Data = TypeVar("Data")
Feature = TypeVar("Feature")

_NAMED = 10  # items that the closing message names; each has had a warning of its own


def collect_cuda_peak_alloc(
    dataset: Iterable[Data],
    work: Callable[[Data], Feature],
    device: torch.device | str,
    cleanup: Callable[[], None] | None = None,
) -> tuple[list[Feature], list[int]]:
    """Measure how much CUDA memory a step needs for each item of a dataset.

    The peak counts all tensors on the device: the weights and whatever else is there as well as what ``work``
    allocates. The first items may need less than later ones, since optimizers and libraries allocate their state in the
    first steps; leave these out of a fit. An item that runs out of memory is left out of both lists, with a warning
    that names its position. A progress bar appears when it takes longer than a second.

    Args:
        dataset: The items. Keep them on the host and let ``work`` move them: tensors that an iterable holds on the
            device count in every peak.
        work: The step to measure. Its result should be plain numbers or host tensors, for the same reason.
        device: The CUDA device that ``work`` uses.
        cleanup: Runs after each item, before memory is measured again; drops what ``work`` left behind.

    Returns:
        The results of ``work``, and the peaks in bytes; both in the order of the dataset. `PolynomialRegression.fit`
        takes them as they are.

    Raises:
        TypeError: If ``work`` or ``cleanup`` is not callable, or ``device`` is not a device.
        ValueError: If ``device`` is not a CUDA device.
        RuntimeError: If CUDA is not available.

    >>> collect_cuda_peak_alloc([], work=len, device="cpu")
    Traceback (most recent call last):
        ...
    ValueError: device must be a CUDA device such as torch.device("cuda:0"), got cpu: only CUDA counts peaks
    """
    meter = CudaMeter(_cuda_device(device))
    for name, value in (("work", work), ("cleanup", cleanup)):
        if not callable(value) and (name == "work" or value is not None):
            raise TypeError(f"{name} must be callable, got {type(value).__name__}")
    return collect_peaks(dataset, work, meter, cleanup)


class Meter(Protocol):
    """Measures the memory of one device."""

    def start(self) -> None:
        """Free unused memory and set the peak to what is in use now."""

    def peak(self) -> int:
        """Return the most bytes in use at once since ``start``."""


class CudaMeter:
    """Reads the statistics of torch's caching allocator."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def start(self) -> None:
        """Drop garbage and cached blocks, wait for the device, set the peak to what is in use now."""
        gc.collect()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()  # fragments left by one item must not fail the next
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> int:
        """Return the most bytes in tensors at once since ``start``."""
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device)


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
        except torch.cuda.OutOfMemoryError as error:
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


def _cuda_device(device: torch.device | str) -> torch.device:
    try:
        found = torch.device(device)
    except (TypeError, RuntimeError):
        raise TypeError(f'device must be a torch.device such as "cuda:0", got {shown(device)}') from None
    if found.type != "cuda":
        raise ValueError(
            f'device must be a CUDA device such as torch.device("cuda:0"), got {found}: only CUDA counts peaks'
        )
    if not torch.cuda.is_available():
        raise RuntimeError(f"device is {found}, but torch.cuda.is_available() is False here: use a GPU machine")
    return found
