"""Peak memory of a step on a CUDA device; nothing else here touches CUDA."""

import gc
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from headrace.size_aware_batching.peaks import collect_peaks

Data = TypeVar("Data")
Feature = TypeVar("Feature")


class CudaMeter:
    """Reads the statistics of torch's caching allocator.

    Args:
        device: A CUDA device.
    """

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


def collect_cuda_peak_alloc(
    dataset: Iterable[Data],
    work: Callable[[Data], Feature],
    device: torch.device | str,
    cleanup: Callable[[], None] | None = None,
) -> tuple[list[Feature], list[int]]:
    """Measure how much CUDA memory a step needs for each item of a dataset.

    The peak counts everything in tensors on the device at once: the weights and whatever else lives there as
    well as what ``work`` allocates. The first items may need less than later ones, since optimizers and
    libraries allocate their state in the first steps; leave these out of a fit. An item that runs out of
    memory is left out of both lists, with a warning that names its position. A progress bar appears when it
    takes longer than a second.

    Args:
        dataset: The items. Keep them on the host and let ``work`` move them: what an iterable holds on the
            device counts in every peak.
        work: The step to measure. Its result should be plain numbers or host tensors, for the same reason.
        device: The CUDA device that ``work`` uses.
        cleanup: Runs after each item, before memory is measured again; drops what ``work`` left behind.

    Returns:
        What ``work`` returned, and the peaks in bytes; both in the order of the dataset.

    Raises:
        TypeError: If ``work`` or ``cleanup`` is not callable, or ``device`` is no device.
        ValueError: If ``device`` is not a CUDA device.
        RuntimeError: If CUDA is not available here.

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


def _cuda_device(device: torch.device | str) -> torch.device:
    try:
        found = torch.device(device)
    except (TypeError, RuntimeError) as error:
        raise TypeError(f'device must be a torch.device such as "cuda:0", got {device!r}: {error}') from None
    if found.type != "cuda":
        raise ValueError(
            f'device must be a CUDA device such as torch.device("cuda:0"), got {found}: only CUDA counts peaks'
        )
    if not torch.cuda.is_available():
        raise RuntimeError(f"device is {found}, but torch.cuda.is_available() is False here; use a GPU machine")
    return found
