"""Epochs of a promised number of batches, over shards that hold what they hold."""

import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

_END = object()


class Tally:
    """Stage that counts the samples of one pass as they leave the workers."""

    def __init__(self) -> None:
        self.samples = 0
        self.begin = 0  # samples of the next pass that came before

    def __call__(self, source: Iterator[Any]) -> Iterator[Any]:
        """The same samples."""
        self.samples, self.begin = self.begin, 0
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

    def batches(
        self, one_pass: Callable[[int], Iterator[Any]], world: int, *, done: int = 0, lap: int = 0
    ) -> Iterator[Any]:
        """The batches of one epoch.

        Args:
            one_pass: Begins pass number `lap` of this epoch.
            world: Number of ranks. With more than one, every rank begins again when its shards run dry:
                a rank that stopped early would leave the others waiting.
            done: Batches that were given before,
            lap: and how often the shards were begun again for them.

        Yields:
            Batches; `n_batches` of them, unless shards that hold less are read once only.

        Raises:
            ValueError: No batch at all came out of the shards.
        """
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
                    self.n_batches = done  # from now on the length is what comes
                    return
            lap += 1

    def promise_at_most(self, n_batches: int, n_samples: int) -> None:
        """Shorten the epoch to what comes, and say so.

        Args:
            n_batches: Batches that come,
            n_samples: and samples.
        """
        if n_batches < self.n_batches:
            self.warned.add("dry")
            self._warn(
                f"the shards hold {n_samples} samples for {n_batches} batches, not the {self.n_batches} batches of an"
                f" epoch ({self.promise}): the epoch has {n_batches}"
            )
            self.n_batches = n_batches

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
