"""The loader of a stream: epochs of the promised length that go on where they were left."""

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import webdataset as wds

from headrace.webdatamodule.epoch import Epoch
from headrace.webdatamodule.loading.distributed import compare_plans as agree
from headrace.webdatamodule.passes import CurrentPass, Pass, as_given, rank_and_world
from headrace.webdatamodule.streaming.counting import counted
from headrace.webdatamodule.streaming.position import Counting, Place
from headrace.webdatamodule.streaming.ranges import RangeSource
from headrace.webdatamodule.streaming.shares import rank_share
from headrace.webdatamodule.streaming.state import MOST, VERSION, Stream, StreamState, check_state
from headrace.webdatamodule.trainer.following import Follows


class EpochLoader(wds.WebLoader):  # type: ignore[misc] # webdataset ships no types
    """A WebLoader that keeps to an epoch, whose length says so, and that can be resumed.

    Args:
        dataset: What the workers iterate over.
        stages: Composables on the samples as they leave the workers, such as the batching.
        epoch: The promised epoch.
        current: The pass that the dataset's stages look at.
        first_epoch: Number of the first epoch.
        fingerprint: What decides the order, as texts by name.
        **kwargs: For torch's DataLoader.
    """

    batch_sampler = None  # a trainer asks a loader that has a sampler for this, too

    def __init__(
        self,
        dataset: Any,
        stages: Sequence[Any],
        epoch: Epoch,
        current: CurrentPass,
        first_epoch: int = 0,
        fingerprint: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, batch_size=None, **kwargs)
        self.pipeline += [epoch.tally, *stages]
        self.samples, self.workers = dataset, int(kwargs.get("num_workers", 0))
        self.epoch, self.current = epoch, current
        self.fingerprint = dict(fingerprint or {})
        self.next_epoch = first_epoch
        self.follows: Follows | None = None
        self._at: tuple[int, int] | None = None  # epoch and position of the iteration that goes on
        self._begun = 0  # where it began
        self._resumed: StreamState | None = None

    @property
    def sampler(self) -> "EpochLoader":
        """Itself: a trainer tells each epoch's number to the `sampler` of a loader."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Choose the number of the next epoch; iterating counts on from there.

        Raises:
            ValueError: It is below 0, or larger than numbers of epochs can be.
        """
        if not 0 <= epoch <= MOST:
            raise ValueError(f"{self.epoch.name}: epoch must be 0 to {MOST}, got {epoch}")
        if self.follows is not None:
            epoch = self.follows.which_epoch(epoch)
        if self._at is not None and self._at[0] != epoch:
            self._at = None
        self.next_epoch = epoch
        if self.follows is not None:
            self.follows.on_epoch()

    @property
    def at(self) -> tuple[int, int]:
        """The epoch, and the batches of it that were delivered."""
        if self._at is not None:
            return self._at
        resumed = self._resumed
        going_on = resumed is not None and resumed["epoch"] == self.next_epoch
        return self.next_epoch, resumed["position"] if resumed is not None and going_on else 0

    @property
    def resumed(self) -> bool:
        """Whether a state was loaded, and nothing delivered since."""
        return self._resumed is not None

    def rewind(self) -> None:
        """Forget the position that was loaded."""
        self._resumed = self._at = None

    def state_dict(self) -> StreamState:
        """Where the loop is that takes the batches: what workers have read ahead does not count.

        Nor does a batch whose training step failed or is still to come: it is delivered again.

        Returns:
            Numbers and short texts, the same on all ranks.
        """
        epoch, position = self.at
        done = None if self.follows is None or self._at is None else self.follows.steps_done()
        # A trainer has a batch on hand before its step, and one more when it does not know the length.
        if done is not None and max(self._begun, position - 2) <= done < position:
            position = done
        return {
            "version": VERSION,
            "epoch": epoch,
            "position": position,
            "ranks": rank_and_world()[1],
            "workers": self.workers,
            "dropped": self.current.dropped,
            "fingerprint": dict(self.fingerprint),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was saved, in the next iteration.

        Args:
            state: As `state_dict` made it.

        Raises:
            TypeError: It is no such state.
            ValueError: It is of other shards, another seed or other stages, or stands in the middle of an epoch of
                other numbers of ranks or workers.
        """
        most = None if self.endless else len(self)
        stream = Stream(self.epoch.name, most, rank_and_world()[1], self.workers, self.fingerprint)
        self._resumed = check_state(state, stream)
        self._at = None
        self.next_epoch = self._resumed["epoch"]
        self.current.dropped = self.current.dropped or self._resumed["dropped"]

    def counting(self) -> Counting | str:
        """What a pass gives on each rank; or what keeps it from being worked out."""
        source, *inside = self.samples.pipeline
        if not isinstance(source, RangeSource):
            return "the shards have no index, or are not split by samples"
        if self.samples.repetitions != 1:
            return "a method in invoke_wds repeats the samples"
        if self.current.dropped:
            return "a function of webdataset.map dropped samples"
        factors = [counted(map(as_given, inside[1:])), counted(map(as_given, self.pipeline[2:]))]
        for factor in factors:
            if isinstance(factor, str):
                return f"it is unknown how many samples the stage {factor!r} gives"
        start, stop = rank_share(source.n_samples, rank_and_world()[1], 0)
        return Counting(stop - start, max(1, self.workers), *factors)  # type: ignore[arg-type] # no text is left

    def shorten(self) -> None:
        """Promise no more batches than one pass gives, where that can be worked out, and say so."""
        counting = self.counting()
        if isinstance(counting, Counting) and int(self.repetitions) == 1 and counting.batches():
            self.epoch.promise_at_most(counting.batches(), counting.samples)

    def __iter__(self) -> Iterator[Any]:
        """One epoch, from its begin or from where a loaded state stands. Begins when the first batch is asked for.

        Raises:
            RankMismatchError: The ranks are about to read different epochs, shards or orders.
        """
        if self.follows is not None:
            self.follows.before_epochs()
        return self._deliver()

    def _deliver(self) -> Iterator[Any]:
        number, resumed = self.next_epoch, self._resumed
        start = resumed["position"] if resumed is not None and resumed["epoch"] == number else 0
        self.next_epoch, self._resumed = number + 1, None
        self._at, self._begun = (number, start), start
        agree(
            {"epoch": number, "position": start, "batches": self.epoch.n_batches, **self.fingerprint}, self.epoch.name
        )
        for position, batch in enumerate(self._batches(number, start), start + 1):
            self._at = (number, position)
            yield batch
        self._at = None

    def _batches(self, number: int, start: int) -> Iterator[Any]:
        most = int(self.nsamples) if int(self.repetitions) != 1 and int(self.nsamples) > 0 else None
        if start == 0:
            return islice(self._turns(number, Place()), most)
        counting = self.counting()
        if isinstance(counting, Counting):
            place = counting.place(start, self.epoch.n_batches)
            return islice(self._turns(number, place), None if most is None else most - start)
        warnings.warn(
            f"{self.epoch.name}: to go on at batch {start} of epoch {number}, the {start} batches before it are read"
            f" again and thrown away, because {counting}. Indexed shards (index_shards), stages of webdataset's that"
            " give one sample for one (map, map_tuple, ...) and one batched(n) need not read them",
            UserWarning,
            stacklevel=3,
        )
        return islice(self._turns(number, Place()), start, most)

    def _turns(self, number: int, place: Place) -> Iterator[Any]:
        """The promised epoch, as often as the user has it repeated."""
        rank, world = rank_and_world()
        laps, items = place.lap, place.items

        def one_pass(_: int) -> Iterator[Any]:  # laps are counted over all turns
            nonlocal laps, items
            self.epoch.tally.begin = items
            self.current.set(Pass(number, laps, rank, world, items))
            laps, items = laps + 1, 0
            batches: Iterator[Any] = iter(super(EpochLoader, self).iterator1())
            return batches

        yield from self.epoch.batches(one_pass, world, done=place.done, lap=place.lap and 1)
        for _ in range(place.turn + 1, int(self.repetitions)):
            yield from self.epoch.batches(one_pass, world)

    @property
    def endless(self) -> bool:
        """Whether `with_epoch()` or `repeat()` was given no number of batches."""
        return int(self.repetitions) == sys.maxsize and int(self.nsamples) < 1

    def __len__(self) -> int:
        """Batches an epoch on each rank.

        Raises:
            TypeError: `with_epoch()` or `repeat()` made the loader endless.
        """
        repetitions, at_most = int(self.repetitions), int(self.nsamples)
        if repetitions == 1:
            return self.epoch.n_batches
        if self.endless:
            raise TypeError("this loader is endless: give with_epoch() or repeat() a number of batches")
        most = repetitions * self.epoch.n_batches
        return min(most, at_most) if at_most > 0 else most
