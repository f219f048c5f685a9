"""A simulated device memory of any size, for tests without a GPU, and estimates of peaks without memory."""

import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from headrace.size_aware_batching._shared.display import never_raises
from headrace.size_aware_batching._validation import checked_flag, whole_number
from headrace.size_aware_batching.memory.caching import BLOCK, SEGMENT, CachingAllocator
from headrace.size_aware_batching.memory.peaks import Peaks, SizesOf, measure_peaks

Batch = TypeVar("Batch")


class SimulatedMemory(TorchDispatchMode):
    """A simulated device memory with a byte limit for the live CPU tensors inside its ``with`` block.

    It counts the storages that torch's operators read and write, rounded to 512 bytes as in CUDA's allocator: weights,
    gradients, optimizer state and tensors saved for the backward pass. An operator whose result does not fit raises
    ``torch.OutOfMemoryError`` in forward, backward or optimizer, so that memory models and rescues can be tested
    without a GPU. Workspaces inside an operator do not count. Tensors of a dataset count once they are used, so keep
    the dataset in numpy arrays. It can replace a device in `measure_peaks`, `fit_budget` and
    ``BatchMemoryModel.budget``.

    Args:
        limit: Size of the memory in bytes; None for one that never runs out.
        caching: Whether to place tensors as CUDA's caching allocator does: a freed block is kept and serves smaller
            tensors, so that fragments arise, more in one step after another than in a single one. It runs out where no
            such block is left, and ``alloc_retries`` counts how often all unused ones were released to go on.

    >>> with SimulatedMemory(limit=10_000) as memory:
    ...     kept = torch.zeros(1000)
    ...     try:
    ...         torch.zeros(2000)
    ...     except torch.OutOfMemoryError as error:
    ...         print(error)
    ...
    simulated out of memory: tried to allocate 8192 bytes, 4096 of 10000 bytes are in use
    >>> memory.peak(), memory.total()
    (4096, 10000)
    """

    def __init__(self, limit: int | None = None, *, caching: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own has no annotations
        self.limit = whole_number("limit", limit)
        self._cache = CachingAllocator(segment=self._segment()) if checked_flag("caching", caching) else None
        self._used = 0
        self._peak = 0
        self._alive: set[int] = set()
        self._lock = threading.RLock()  # a storage may die in any thread

    @never_raises
    def __repr__(self) -> str:
        limit = "no limit" if self.limit is None else f"limit {self.limit:,} bytes"
        return f"{type(self).__name__}({limit}, {self._used:,} in use, peak {self._peak:,})"

    @property
    def used(self) -> int:
        """Bytes in use now."""
        return self._used

    def start(self) -> None:
        """Collect recent garbage, release what is cached, and set the peak to the bytes in use now."""
        gc.collect(1)  # a whole collection takes longer than a small step
        self.empty_cache()
        self.reset_peak()

    def empty_cache(self) -> None:
        """Release what is cached."""
        with self._lock:
            if self._cache is not None:
                self._cache.empty_cache()

    def reset_peak(self) -> None:
        """Set the peak to the bytes in use now, and keep what is cached, as training does."""
        with self._lock:
            self._peak = self._used
            if self._cache is not None:
                self._cache.reset_peak()

    def alloc_retries(self) -> int:
        """Return how often all that was cached had to be released to serve a tensor."""
        return 0 if self._cache is None else self._cache.retries

    def peak(self) -> int:
        """Return the most bytes in use at once since ``start``."""
        return self._peak

    def reserved_peak(self) -> int:
        """Return the peak in whole segments: 2 MiB, or a thousandth of the limit if that is less."""
        if self._cache is not None:
            return self._cache.peak
        segment = self._segment()
        reserved = -(-self._peak // segment) * segment
        return reserved if self.limit is None else max(self._peak, min(reserved, self.limit))

    def _segment(self) -> int:
        return SEGMENT if self.limit is None else max(BLOCK, min(SEGMENT, self.limit // 1000 // BLOCK * BLOCK))

    def total(self) -> int:
        """Return the limit, or 2**62 bytes if there is none."""
        return 2**62 if self.limit is None else self.limit

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator and count the storages that it reads and writes."""
        kwargs = kwargs or {}
        for value in tree_iter((args, kwargs)):
            if isinstance(value, torch.Tensor):
                self._count(value, new=False)
        result = func(*args, **kwargs)
        for value in tree_iter(result):
            if isinstance(value, torch.Tensor):
                self._count(value, new=True)
        return result

    def _count(self, tensor: torch.Tensor, new: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        with self._lock:
            if key in self._alive:
                return
            size = -(-storage.nbytes() // BLOCK) * BLOCK
            place = self._place(size, new) if size else None
            if place is None and size:
                raise torch.OutOfMemoryError(
                    f"simulated out of memory: tried to allocate {size} bytes, {self._used} of {self.limit} bytes "
                    "are in use" + (f", {self._cache.reserved} are reserved" if self._cache is not None else "")
                )
            self._alive.add(key)
            self._used += size
            self._peak = max(self._peak, self._used)
        weakref.finalize(storage, self._release, key, size, place).atexit = False

    def _place(self, size: int, new: bool) -> int | None:
        """Return where a storage lies, None if it does not fit; one that there was before has to."""
        if self._cache is None:
            return None if new and self.limit is not None and self._used + size > self.limit else 0
        self._cache.limit = float("inf") if self.limit is None else self.limit
        return self._cache.allocate(size, beyond=not new)

    def _release(self, key: int, size: int, place: int | None) -> None:
        with self._lock:
            self._alive.discard(key)
            self._used -= size
            if self._cache is not None and place is not None:
                self._cache.free(place)


def estimate_peaks(
    make_step: Callable[[], Callable[[Batch], object]],
    batches: Iterable[Batch],
    sizes_of: SizesOf | None = None,
    warm_up: int = 2,
) -> Peaks:
    """Estimate the peaks of a step without a GPU and without memory: tensors have shapes but no contents.

    It runs under torch's ``FakeTensorMode`` on the CPU, which computes nothing, so that a model of any size fits. The
    estimate counts the tensors, and places them as CUDA's caching allocator does, but knows nothing of the workspaces
    of kernels or the CUDA context. A CPU kernel may save other tensors for the backward pass than a fused GPU kernel.
    So the estimate gives only the shape of the curve: ``estimate_peaks(...).scaled_to(measured)`` scales it to the
    level of a few points measured with `measure_peaks`.

    Args:
        make_step: Creates the model and the optimizer on the CPU, and returns the step: a function of a batch that
            creates the tensors itself. It is called inside the fake mode. The step must not read values (``.item()``,
            boolean masks), because there are none. Give modules their ``dtype=`` when they are constructed: in this
            mode torch cannot convert one, such as with ``.bfloat16()``.
        batches: As for `measure_peaks`.
        sizes_of: As for `measure_peaks`.
        warm_up: As for `measure_peaks`: optimizers allocate their state in the first steps.

    Returns:
        Bytes of the tensors of each batch; ``reserved`` is what a caching allocator holds for them, fragments included.

    Raises:
        ValueError: If the step depends on values of its tensors.

    >>> import numpy as np
    >>> def make_step():
    ...     layer = torch.nn.Linear(1000, 1000)
    ...     return lambda sizes: layer(torch.zeros(len(sizes), int(sizes.max()), 1000)).sum().backward()
    >>> peaks = estimate_peaks(make_step, [np.array([10]), np.array([20, 20])])
    >>> peaks.counts.tolist(), bool(peaks.allocated[1] > peaks.allocated[0] > 8e6)
    ([1, 2], True)
    """
    from torch._subclasses.fake_tensor import (  # slow to import
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensorMode,
    )

    class OneMode(FakeTensorMode):  # type: ignore[no-untyped-call]  # torch's own has no annotations
        """Stays the same in deep copies of its tensors, which models make of their layers."""

        def __deepcopy__(self, _: Any) -> "OneMode":
            return self

    memory = SimulatedMemory(caching=True)
    # Of oneDNN's LSTM nothing is seen but the result; without oneDNN it takes single operators, as other models do.
    without_one_dnn = torch.backends.mkldnn.flags(enabled=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TF32 acceleration on top of oneDNN")  # of the flags that it sets besides
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # torch's own deepcopy does
        try:
            with without_one_dnn, OneMode(), memory:
                return measure_peaks(make_step(), batches, memory, sizes_of=sizes_of, warm_up=warm_up)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise ValueError(
                f"the step must not depend on values of its tensors, such as .item(), masks or nonzero(), got "
                f"{error.func}: take a shape that the values cannot change (for a mixture of experts, the same number "
                "of tokens for each), or measure the step with measure_peaks"
            ) from error
