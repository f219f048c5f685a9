"""In a worker: a batch read, whole or without its damaged samples, and collated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from torch.utils.data import Dataset, default_collate, get_worker_info

from headrace.webdatamodule.indexed.sending import check_sendable
from headrace.webdatamodule.indexed.sources import Sources
from headrace.webdatamodule.shards.errors import DamagedShardError, DecodeError, ShardError, UnsafePickleError

Damaged = Literal["raise", "skip"]
_DAMAGED = (DamagedShardError, DecodeError)


class DamagedSampleWarning(UserWarning):
    """A sample was left out because it is damaged."""


class Skipped(NamedTuple):
    """A sample that was left out.

    Args:
        position: Its position in the dataset.
        message: What is wrong with it, and where it lies.
    """

    position: int
    message: str


class Read(NamedTuple):
    """A batch before it is collated.

    Args:
        indices: Of the samples.
        samples: The samples.
        skipped: What was left out.
        error: What went wrong instead.
    """

    indices: Sequence[int]
    samples: list[Any]
    skipped: list[Skipped]
    error: ShardError | None = None


class Batches(Dataset[Any]):
    """What a `DataLoader` reads batches from: pairs of a batch and what was left out of it.

    Args:
        sources: The samples.
        collate_fn: Makes a batch of a list of samples; torch's own when None.
        damaged: "raise" the error of a sample that is damaged or cannot be decoded, or "skip" the sample.
    """

    def __init__(self, sources: Sources, collate_fn: Callable[[list[Any]], Any] | None, damaged: Damaged) -> None:
        self.sources, self.damaged = sources, damaged
        self._collate_fn = default_collate if collate_fn is None else collate_fn
        self._sent = False

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, index: int) -> Any:
        return self.sources[index]

    def __getitems__(self, indices: Sequence[int]) -> Read:
        try:
            return self._read(indices)
        except StopIteration as error:  # by which a loop would take the epoch for done
            raise _stopped("a transform", error) from error
        except ShardError as error:
            if get_worker_info() is None:
                raise
            # As a value it reaches the trainer as it is; what a worker raises is made anew from its text there.
            return Read(indices, [], [], error)

    def _read(self, indices: Sequence[int]) -> Read:
        try:
            return Read(indices, self.sources.__getitems__(indices), [])
        except _DAMAGED as error:
            if self.damaged == "raise" or isinstance(error, UnsafePickleError):
                raise
        return self._one_by_one(indices)

    def _one_by_one(self, indices: Sequence[int]) -> Read:
        read, samples = list[int](), list[Any]()
        skipped, last = list[Skipped](), ShardError("")
        for index in indices:
            try:
                samples += self.sources.__getitems__([index])
                read.append(index)
            except _DAMAGED as error:
                if isinstance(error, UnsafePickleError):
                    raise
                skipped.append(Skipped(int(index), f"{type(error).__name__}: {error}"))
                last = error
        if not read:
            message = f"all {len(skipped)} samples of a batch are damaged, and every rank needs a batch"
            last.message += f"; {message}: mend the shards, or leave those samples out of them"
            raise last
        return Read(read, samples, skipped)

    def collate(self, read: Read) -> tuple[Any, list[Skipped], ShardError | None]:
        """Make a batch of what was read; the `collate_fn` of the `DataLoader`."""
        if read.error is not None:
            return None, [], read.error
        try:
            batch = self._collate_fn(read.samples)
            if not self._sent and get_worker_info() is not None:
                check_sendable(batch)  # the first one of each worker; to pickle all twice would cost too much
                self._sent = True
            return batch, read.skipped, None
        except Exception as caught:
            error = _stopped("collate_fn", caught) if isinstance(caught, StopIteration) else caught
            shown = ", ".join(self.sources.place(int(index)) for index in read.indices[:5])
            more = " ..." if len(read.indices) > 5 else ""
            error.add_note(f"in collate_fn, of {len(read.indices)} samples: {shown}{more}")
            if error is caught:
                raise
            raise error from caught


def _stopped(where: str, error: StopIteration) -> RuntimeError:
    told = RuntimeError(f"{where} raised StopIteration, as next() does of an iterator that is used up")
    for note in getattr(error, "__notes__", ()):
        told.add_note(note)
    return told
