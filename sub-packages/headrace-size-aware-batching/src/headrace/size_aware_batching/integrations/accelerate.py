"""Batches of all ranks for accelerate's ``prepare``, resumable on any number of processes."""

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any, TypeVar

from torch.utils.data import Sampler

from headrace.size_aware_batching._shared.display import inner, never_raises
from headrace.size_aware_batching.size_aware_sampler import EpochSetter

Batch = TypeVar("Batch")

_BETWEEN = ("accelerate.", "torch.utils.data.", "torchdata.")  # modules between a sampler and a loop


class PreparedBatchSampler(Sampler[list[Any]]):
    """Batch sampler of a loader that accelerate prepares; its state is the position of the training loop.

    A prepared loader prefetches, so its sampler is ahead of the training loop. This class records the position after
    each batch that it yields, and counts the batches that the loop receives through `delivered`. Register it with
    ``accelerator.register_for_checkpointing``. A state resumes on any number of processes: the prepared loader delivers
    the rest of the epoch. ``skip_first_batches`` and ``use_stateful_dataloader=True``, which would skip the delivered
    batches once more, are refused when a loop begins.

    Args:
        sampler: A `DistributedSizeAwareBatchSampler` with ``rank="all"``, the batches of all ranks step by step.

    Raises:
        ValueError: If ``sampler`` has another ``rank``.

    Example:
        >>> from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
        >>> batches = PreparedBatchSampler(DistributedSizeAwareBatchSampler([4, 1, 3, 2], 5, rank="all"))
        >>> # loader = accelerator.prepare(DataLoader(data, batch_sampler=batches))
        >>> # accelerator.register_for_checkpointing(batches)
        >>> # for epoch in range(batches.epoch, epochs):
        >>> #     loader.set_epoch(epoch)
        >>> #     for batch in batches.delivered(loader): ...
    """

    def __init__(self, sampler: Any) -> None:
        if getattr(sampler, "rank", None) != "all":
            raise ValueError(
                f'sampler must have rank="all", the batches of all ranks, got {type(sampler).__name__} with '
                f'rank={getattr(sampler, "rank", None)!r}: construct it with rank="all"'
            )
        self._sampler = sampler
        self._read: deque[int] = deque()  # positions after the batches that were read ahead
        self._delivered: int | None = None  # position of the loop; None where it is that of the sampler
        self._is_counted = self._counts_next = False  # whether the latest iteration goes through `delivered`

    @never_raises
    def __repr__(self) -> str:
        return f"{type(self).__name__}({inner(self._sampler)})"

    @property
    def sampler(self) -> EpochSetter:
        """Sets the epoch: a prepared loader calls ``batch_sampler.sampler.set_epoch``."""
        return EpochSetter(self)

    @property
    def epoch(self) -> int:
        """The epoch of the latest iteration, or of the next one."""
        epoch: int = self._sampler.epoch
        return epoch

    @property
    def run_steps(self) -> int:
        """Number of steps that the loop has received in this run, over all epochs and numbers of processes."""
        steps: int = self.state_dict()["step"]
        return steps

    def __len__(self) -> int:
        """Return the number of batches of the whole epoch, of all ranks together."""
        return len(self._sampler)

    def __iter__(self) -> Iterator[list[Any]]:
        """Yield the batches of all ranks, from the position that was loaded, else from the beginning of the epoch."""
        _refuse_two_resumes()
        self._read = read = deque[int]()
        self._delivered = self._sampler.start
        self._is_counted, self._counts_next = self._counts_next, False
        for batch in self._sampler:
            read.append(self._sampler.position)
            yield batch

    def delivered(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches of the prepared loader, and count them for the state.

        Args:
            loader: The result of ``prepare`` for a loader with this batch sampler.
        """
        self._counts_next = True
        prepared = getattr(loader, "batch_sampler", None)
        # accelerate's own sampler knows its processes; one process reads this sampler itself; a wrapper knows neither
        processes = 1 if prepared is self else getattr(prepared, "num_processes", self._sampler.num_replicas)
        for batch in loader:
            for _ in range(processes):
                self._delivered = self._read.popleft()
            yield batch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch to iterate over next; a loaded position of another epoch is dropped."""
        if epoch != self.epoch:
            self._delivered = None
        self._sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last batch that `delivered` has yielded; it is the same on every process.

        Raises:
            RuntimeError: If the loop iterates over the loader itself instead of `delivered`.
        """
        if self._delivered is not None and not self._is_counted:
            raise RuntimeError(
                "the loop must iterate over delivered(loader), got a loop over the loader itself: its batches "
                "are not counted, and a resume would repeat them"
            )
        state: dict[str, Any] = self._sampler.state_dict(self._delivered)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume where a state was taken, on any number of processes.

        Args:
            state: The result of ``state_dict()``.

        Raises:
            TypeError: If ``state`` is not a mapping.
            ValueError: If ``state`` was saved with other sizes or options, or another seed.
        """
        self._sampler.load_state_dict(state)
        self._delivered = None


def _refuse_two_resumes() -> None:
    """Refuse what skips batches by itself, when it reads a `PreparedBatchSampler`; only the frames below show it."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals["__name__"].startswith(_BETWEEN):
        if frame.f_globals["__name__"].startswith("torchdata."):
            raise RuntimeError(
                "use_stateful_dataloader must be False for a PreparedBatchSampler, got True: both would resume, and "
                "samples would be lost or repeated"
            )
        if type(frame.f_locals.get("self")).__name__ == "SkipBatchSampler":
            raise RuntimeError(
                "the loader must be the result of prepare(), got one of skip_first_batches(): after load_state_dict "
                "the prepared loader delivers the rest of the epoch by itself, so leave skip_first_batches out"
            )
        frame = frame.f_back
