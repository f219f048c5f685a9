"""Epochs of a promised number of batches, over shards that hold what they hold."""

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import webdataset as wds

from headrace.webdatamodule.passes import CurrentPass, Pass, rank_and_world

_END = object()


class Tally:
    """Stage that counts the samples of one pass as they leave the workers."""

    def __init__(self) -> None:
        self.samples = 0

    def __call__(self, source: Iterator[Any]) -> Iterator[Any]:
        """The same samples."""
        self.samples = 0
        for sample in source:
            self.samples += 1
            yield sample


class Epoch:
    """Passes over a loader as one epoch of exactly the promised number of batches.

    Args:
        name: Name of the split, for messages.
        n_batches: The promise: batches an epoch on each rank.
        promise: The numbers behind it, for messages.
        begin_again: Whether to begin the shards again when they run dry, even on a single rank.
        endless: Whether the user made the samples endless, so that some always remain.
        tally: The stage of the loader that counts samples.
    """

    def __init__(
        self, name: str, n_batches: int, promise: str, *, begin_again: bool, endless: bool, tally: Tally
    ) -> None:
        self.name = name
        self.n_batches = n_batches
        self.promise = promise
        self.begin_again = begin_again
        self.endless = endless
        self.tally = tally
        self.warned: set[str] = set()

    def batches(self, one_pass: Callable[[int], Iterator[Any]], world: int) -> Iterator[Any]:
        """The batches of one epoch.

        Args:
            one_pass: Begins pass number `lap` of this epoch.
            world: Number of ranks. With more than one, every rank begins again when its shards run dry:
                a rank that stopped early would leave the others waiting.

        Yields:
            Batches; `n_batches` of them, unless shards that hold less are read once only.

        Raises:
            ValueError: No batch at all came out of the shards.
        """
        done = lap = 0
        while done < self.n_batches:
            before = done
            source = one_pass(lap)
            for batch in islice(source, self.n_batches - done):
                done += 1
                if done == self.n_batches and not lap:
                    self._look_for_more(source)
                yield batch
            if done == before:
                raise ValueError(self._nothing(lap))
            if done < self.n_batches:
                again = self.begin_again or world > 1
                self._warn_dry(done, again=again)
                if not again:
                    return
            lap += 1

    def _look_for_more(self, source: Iterator[Any]) -> None:
        # Asked in the first epoch only: the answer costs a batch. Asked before the last batch is handed
        # out, because a trainer that knows the length never comes back after it.
        if not self.endless and "more" not in self.warned:
            self.warned.add("more")
            if next(source, _END) is not _END:
                self._warn(
                    f"samples remain after the {self.n_batches} batches of an epoch ({self.promise}):"
                    " they are left out of it"
                )

    def _warn_dry(self, done: int, *, again: bool) -> None:
        if "dry" not in self.warned:
            self.warned.add("dry")
            what = "the shards are begun again, so samples repeat" if again else "the epoch ends early"
            self._warn(
                f"the shards ran dry after {self.tally.samples} samples in {done} batches, before the"
                f" {self.n_batches} batches of an epoch ({self.promise}): {what}"
            )

    def _warn(self, message: str) -> None:
        counts = f"n_samples[Split.{self.name}] and global_batch_size"
        cure = f"Set {counts} to what the shards and the batching give"
        warnings.warn(f"{self.name}: {message}. {cure}", UserWarning, stacklevel=2)

    def _nothing(self, lap: int) -> str:
        again = " when begun again" if lap else ""
        return (
            f"{self.name}: no batch came out of the shards{again} ({self.tally.samples} samples were read)."
            " Check that the shards hold samples and that the pipelines and the batching let some pass"
        )


class EpochLoader(wds.WebLoader):  # type: ignore[misc] # webdataset ships no types
    """A WebLoader that keeps to an epoch, and whose length says so.

    Args:
        dataset: What the workers iterate over.
        stages: Composables on the samples as they leave the workers, such as the batching.
        epoch: The promised epoch.
        current: The pass that the dataset's stages look at.
        first_epoch: Number of the first epoch.
        **kwargs: For torch's DataLoader.
    """

    def __init__(
        self,
        dataset: Any,
        stages: Sequence[Any],
        epoch: Epoch,
        current: CurrentPass,
        first_epoch: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, batch_size=None, **kwargs)
        self.pipeline += [epoch.tally, *stages]
        self.epoch = epoch
        self.current = current
        self.next_epoch = first_epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the number of the next epoch; iterating counts on from there."""
        self.next_epoch = epoch

    def iterator1(self) -> Iterator[Any]:
        """One epoch: webdataset calls this."""
        number, (rank, world) = self.next_epoch, rank_and_world()
        self.next_epoch += 1

        def one_pass(lap: int) -> Iterator[Any]:
            self.current.set(Pass(number, lap, rank, world))
            batches: Iterator[Any] = iter(super(EpochLoader, self).iterator1())
            return batches

        return self.epoch.batches(one_pass, world)

    def __len__(self) -> int:
        """Batches an epoch on each rank.

        Raises:
            TypeError: `with_epoch()` or `repeat()` made the loader endless.
        """
        repetitions, at_most = int(self.repetitions), int(self.nsamples)
        if repetitions == 1:
            return self.epoch.n_batches
        if repetitions == sys.maxsize and at_most < 1:
            raise TypeError("this loader is endless: give with_epoch() or repeat() a number of batches")
        most = repetitions * self.epoch.n_batches
        return min(most, at_most) if at_most > 0 else most
