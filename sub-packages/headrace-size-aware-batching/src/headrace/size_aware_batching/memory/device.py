"""The memory of a CUDA device, and its out-of-memory errors."""

import gc
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from headrace.size_aware_batching._shared.checks import shown

_OUT_OF_MEMORY = (
    "out of memory",  # CUDA, HIP and XPU, the driver and NCCL
    "alloc_failed",  # CUBLAS_STATUS_, CUDNN_STATUS_, CUSOLVER_STATUS_, CUFFT_
    "allocation_failed",  # CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ and _HOST_
    "cusparse_status_insufficient_resources",
    "can't allocate memory",  # torch's allocator on the CPU
    "not enough memory: you tried to allocate",  # and that of Windows
)
_MAYBE = (  # bugs are reported so, too
    "cublas_status_not_initialized",  # cublasCreate found no room for its workspace
    "cudnn_status_not_supported",  # and what torch says where no algorithm of cuDNN gets its workspace
    "unable to find an engine to execute this computation",
    "unable to find a valid cudnn algorithm",
)
_NEARLY_FULL = 0.05  # of a device is free: workspaces of cuBLAS and cuDNN may take more


class Meter(Protocol):
    """Measures the memory of one device."""

    def start(self) -> None:
        """Free unused memory and set the peak to what is in use now."""

    def peak(self) -> int:
        """Return the most bytes in use at once since ``start``."""


@runtime_checkable
class DeviceMemory(Meter, Protocol):
    """The memory of one device: its peaks and its size. ``SimulatedMemory`` is one, too."""

    def reserved_peak(self) -> int:
        """Return the most bytes that the allocator held at once since ``start``, fragments included."""

    def total(self) -> int:
        """Return the bytes available to this process."""


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

    def reset_peak(self) -> None:
        """Set the peaks to what is in use now, and keep what the allocator has cached, as training does."""
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)

    def alloc_retries(self) -> int:
        """Return how often the allocator has released all that it had cached, to serve a request."""
        return int(torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0))

    def peak(self) -> int:
        """Return the most bytes in tensors at once since ``start``."""
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device)

    def reserved_peak(self) -> int:
        """Return the most bytes that the allocator held at once since ``start``."""
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_reserved(self.device)

    def total(self) -> int:
        """Return the device's free bytes plus the allocator's bytes, without the memory of other processes."""
        free, whole = torch.cuda.mem_get_info(self.device)
        fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(self.device)  # torch 2.8
        return min(free + torch.cuda.memory_reserved(self.device), int(fraction * whole))

    def size(self) -> int:
        """Return the device's bytes, however many of them are free."""
        return torch.cuda.mem_get_info(self.device)[1]


def reset_peak(memory: DeviceMemory) -> None:
    """Set the peaks to what is in use now without emptying the allocator, if the memory can."""
    getattr(memory, "reset_peak", memory.start)()


def alloc_retries(memory: DeviceMemory | None = None) -> int:
    """Return how often the allocator has emptied its cache to serve a request: of a memory, or of this process."""
    if memory is not None:
        return int(getattr(memory, "alloc_retries", int)())
    of_cuda = int(torch.cuda.memory_stats().get("num_alloc_retries", 0)) if uses_cuda() else 0
    return of_cuda + sum(int(each.alloc_retries()) for each in _simulated())


def _simulated() -> list[Any]:
    """Return the simulated memories whose blocks this thread is in."""
    return [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, DeviceMemory)]


def device_size(memory: DeviceMemory) -> int:
    """Return the bytes that a memory has, free or not; of one that does not say so, those available."""
    return int(getattr(memory, "size", memory.total)())


def cuda_device(device: torch.device | str) -> torch.device:
    """Return a CUDA device with its number; refuse any other."""
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
    if found.index is None:
        # Some of torch's functions about memory refuse a device without a number.
        found = torch.device("cuda", torch.cuda.current_device())
    return found


def device_memory(device: torch.device | str | DeviceMemory) -> DeviceMemory:
    """Return the memory of a CUDA device; a `DeviceMemory`, such as a ``SimulatedMemory``, is returned as it is."""
    return device if isinstance(device, DeviceMemory) else CudaMeter(cuda_device(device))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device ran out of memory: torch's own, or that of cuBLAS, cuDNN and the like.

    Some codes of cuBLAS and cuDNN are those of bugs as well. They count if torch's allocator has run out of memory in
    this process, or the device is nearly full.

    >>> is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    True
    >>> is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
    False
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError)
        and (any(words in text for words in _OUT_OF_MEMORY) or (any(words in text for words in _MAYBE) and _short()))
    )


def _short() -> bool:
    """Whether the current device has too little memory, as the allocator or the driver says."""
    if not uses_cuda():
        return False
    free, whole = torch.cuda.mem_get_info()
    return free < _NEARLY_FULL * whole or torch.cuda.memory_stats().get("num_ooms", 0) > 0


def uses_cuda() -> bool:
    """Whether this process uses CUDA already; asking for more would initialise it."""
    return torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch's


def out_of_memory(work: Callable[[], object]) -> str | None:
    """Run ``work``; return the text of an out-of-memory error, or None. The error itself would keep tensors alive."""
    try:
        work()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return str(error)
    return None


def free_memory() -> None:
    """Collect garbage and release the allocator's unused blocks; skips CUDA if it was not used."""
    gc.collect()
    if uses_cuda():
        torch.cuda.empty_cache()
    for each in _simulated():
        each.empty_cache()
