"""Memory of a training step: measurement, model, budget, and recovery from running out."""

from headrace.size_aware_batching.memory.device import (
    CudaMeter,
    DeviceMemory,
    Meter,
    device_memory,
    free_memory,
    is_out_of_memory,
    out_of_memory,
)
from headrace.size_aware_batching.memory.peaks import (
    Peaks,
    collect_cuda_peak_alloc,
    collect_peaks,
    measure_peaks,
)

__all__ = [
    "CudaMeter",
    "DeviceMemory",
    "Meter",
    "Peaks",
    "collect_cuda_peak_alloc",
    "collect_peaks",
    "device_memory",
    "free_memory",
    "is_out_of_memory",
    "measure_peaks",
    "out_of_memory",
]
