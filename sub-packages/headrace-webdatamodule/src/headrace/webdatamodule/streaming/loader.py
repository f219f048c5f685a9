"""The loader of a stream: epochs of a promised length that resume where they were left, by skipping."""

from __future__ import annotations

import logging
import operator
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from itertools import count, islice
from typing import Any

import torch
import webdataset as wds

from headrace.webdatamodule.indexed.agreement import agree
from headrace.webdatamodule.streaming.pipeline import (
    StreamDataset,
    apply_stages,
    call_methods,
    check_readers,
    describe_options,
)
from headrace.webdatamodule.streaming.sources import IndexedSource, Pass
from headrace.webdatamodule.trainer.following import Follows

VERSION = 1
_MAX = 2**48  # of any number in a state: no run gets there, and what is derived of them fits into 64 bits
_STAGES = ("pipeline_wds", "pipeline_prebatch_wld", "invoke_wds", "invoke_wld")
_FIELDS = ("version", "seed", "epoch", "position", "num_replicas", "num_workers", "fingerprint", "options")
_INDEXED = "IndexedWebDataModule resumes with any numbers"
_END = object()
_logger = logging.getLogger(__name__)


class _Run:
    """One iteration of a loader.

    Attributes:
        epoch: What it delivers.
        start: Batches of the epoch that were delivered before it.
        position: Batches of the epoch that were delivered up to now.
        samples: Samples that left the workers in the present pass.
        lap: Number of the next pass over the shards.
    """

    def __init__(self, epoch: int, start: int) -> None:
        self.epoch, self.start, self.position = epoch, start, start
        self.samples = self.lap = 0


class StreamLoader(wds.WebLoader):  # type: ignore[misc] # webdataset ships no types
    """A WebLoader whose epochs have a promised number of batches on every rank, and that can be resumed.

    After an epoch that was delivered to its end the next one follows, unless `set_epoch` chose another. After a
    `break`, iterating again begins that epoch anew. Validation, test and predict loaders deliver the same order every
    time, and ignore `set_epoch`. An iteration is independent of others over the same loader; the state is that of the
    latest. With `persistent_workers`, which serve one iteration at a time, an older one raises.

    Args:
        dataset: What the workers iterate over.
        ranks: Returns the number of data-parallel ranks and this rank, when an epoch begins.
        first_epoch: Number of the first epoch.
    """

    batch_sampler = None  # a trainer asks a loader that has a sampler for this, too

    def __init__(self, dataset: StreamDataset, ranks: Callable[[], tuple[int, int]], first_epoch: int) -> None:
        options = dataset.options
        given = dict(options.kwargs_wld)
        given.setdefault("generator", torch.Generator())  # else torch would draw from the generator of the process
        super().__init__(dataset, batch_size=None, **given)
        self.pipeline += options.stages_wld
        self.persistent = bool(given.get("persistent_workers"))
        if self.persistent:
            dataset.share()
        self.samples, self.options, self.ranks = dataset, options, ranks
        self.n_batches = options.n_batches
        self.follows: Follows | None = None
        self._described = describe_options(dataset)
        self._epoch = first_epoch  # of the next iteration
        self._resumed: tuple[int, int] | None = None  # epoch and position of a loaded state
        self._chosen = False  # whether set_epoch was called since the last iteration began
        self._latest: _Run | None = None
        self._warned: set[str] = set()

    @property
    def sampler(self) -> StreamLoader:
        """Itself: a trainer passes each epoch's number to the `sampler` of a loader."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration.

        Args:
            epoch: 0 to 2**48. That of a loaded state keeps its position, another one begins at its beginning.

        Raises:
            ValueError: Another number.
        """
        epoch = operator.index(epoch)
        if not 0 <= epoch <= _MAX:
            raise ValueError(f"{self.options.name}: epoch must be an int from 0 to {_MAX}, got {epoch}")
        if not self.options.training:
            return
        if self.follows is not None:
            epoch = self.follows.which_epoch(epoch)
        if self._latest is not None and self._latest.epoch != epoch:
            self._latest = None
        self._epoch, self._chosen = epoch, True
        if self.follows is not None:
            self.follows.on_epoch()

    @property
    def fingerprint(self) -> str:
        """Hexadecimal digits that stand for the shards, the options and the seed."""
        return blake2b(repr(sorted(self._described.items())).encode(), digest_size=16).hexdigest()

    @property
    def at(self) -> tuple[int, int]:
        """The epoch, and the batches of it that were delivered."""
        if self._latest is not None:
            return self._latest.epoch, self._latest.position
        if self._resumed is not None and self._resumed[0] == self._epoch:
            return self._resumed
        return self._epoch, 0

    @property
    def resumed(self) -> bool:
        """Whether a state was loaded, and nothing delivered since."""
        return self._resumed is not None

    def rewind(self) -> None:
        """Forget the position that was loaded."""
        self._resumed = self._latest = None

    def state_dict(self) -> dict[str, Any]:
        """Where the loop is that takes the batches: what workers have read ahead does not count.

        Returns:
            "version", "seed", "epoch", "position" (batches of the epoch that were delivered on each rank),
            "num_replicas", "num_workers", "fingerprint" and "options"; the same on all ranks.
        """
        epoch, position = self.at
        done = None if self.follows is None or self._latest is None else self.follows.steps_done()
        # A trainer has a batch on hand before its step, and one more when it does not know the length.
        if self._latest is not None and done is not None and max(self._latest.start, position - 2) <= done < position:
            position = done
        return {
            "version": VERSION,
            "seed": self.options.seed,
            "epoch": epoch,
            "position": position,
            "num_replicas": self.ranks()[0],
            "num_workers": self.options.num_workers,
            "fingerprint": self.fingerprint,
            "options": dict(self._described),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume where a state was taken: the batches before it are read again and skipped.

        Args:
            state: As `state_dict` returned it.

        Raises:
            TypeError: It is no such state.
            ValueError: It is of other shards, options or another seed; or it stands in the middle of an epoch of
                other stages, or of other numbers of ranks or workers.
        """
        epoch, position = self._check_state(state)
        if self._chosen and self._epoch > epoch:
            return  # an epoch that was chosen after the state was saved
        self._epoch, self._resumed, self._latest, self._chosen = epoch, (epoch, position), None, False

    def _check_state(self, state: Any) -> tuple[int, int]:
        name = self.options.name
        if not isinstance(state, Mapping) or set(state) != set(_FIELDS):
            got = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise TypeError(f"{name}: state must be what state_dict() returned, with {', '.join(_FIELDS)}, got {got}")
        for field in ("version", "epoch", "position", "num_replicas", "num_workers"):
            if type(state[field]) is not int or not 0 <= state[field] <= _MAX:
                message = f"{name}: state[{field!r}] must be an int from 0 to {_MAX}, got {state[field]!r}"
                raise ValueError(f"{message}: the checkpoint was damaged or changed; take another one")
        if not isinstance(state["options"], Mapping):
            raise TypeError(f"{name}: state['options'] must be a mapping, got {state['options']!r}")
        if state["version"] != VERSION:
            raise ValueError(f"{name}: state has version {state['version']}, this release reads version {VERSION}")
        length, position = self._length(), state["position"]
        # At the end of an epoch, runs may go on with other numbers of ranks, and with other batches to suit these.
        within = position not in (0, length)
        for part in [*self._described, *state["options"]]:
            was, now = (held.get(part, "nothing") for held in (state["options"], self._described))
            if was != now and (within or part not in _STAGES):
                cure = "resume with what the checkpoint was saved with, or begin without it"
                raise ValueError(f"{name}: checkpoint has {part}={was}, got {part}={now}: {cure}")
        if length is not None and position > length:
            raise ValueError(
                f"{name}: checkpoint is at batch {position} of an epoch of {length}: give the trainer and the loader"
                " the length that they had"
            )
        saved, own = (state["num_replicas"], state["num_workers"]), (self.ranks()[0], self.options.num_workers)
        # One worker reads in the same order as none.
        if within and (saved[0], max(1, saved[1])) != (own[0], max(1, own[1])):
            raise ValueError(
                f"{name}: checkpoint is at batch {position} of epoch {state['epoch']} with {saved[0]} ranks and"
                f" num_workers={saved[1]}, got {own[0]} ranks and num_workers={own[1]}: within an epoch a stream"
                f" resumes with the same numbers only. Use those, or a checkpoint of the end of an epoch. {_INDEXED}"
            )
        return state["epoch"], position

    def __iter__(self) -> Iterator[Any]:
        """One epoch, from its beginning or from where a loaded state stands.

        Raises:
            RuntimeError: The workers persist, and another iteration took them over.
        """
        if self.follows is not None:
            self.follows.before_epochs()
        # The rest happens at the first `next`: trainers make an iterator before they set the epoch.
        return self._deliver()

    def _deliver(self) -> Iterator[Any]:
        epoch, start = self.at if self._latest is None else (self._epoch, 0)
        if start == self._length() and not self._chosen:
            epoch, start = epoch + 1, 0  # the state of the end of an epoch
        run = self._latest = _Run(epoch, start)
        self._epoch, self._resumed, self._chosen = epoch, None, False
        num_replicas, rank = self.ranks()
        check_readers(self.options, self.samples, num_replicas)
        now = Pass(epoch, 0, rank, num_replicas)
        # Workers are started before the first collective: gloo's threads, which run after one, do not survive a fork.
        first = self._one_lap(run, now)
        plan = {"epoch": epoch, "position": start, "batches": self.n_batches, **self._described}
        agree(plan, self.options.name)
        if start:
            message = "%s: resuming at batch %d of epoch %d: the batches before it are read again and skipped"
            _logger.info(message, self.options.name, start, epoch)
        batches = islice(self._turns(run, now, first), start, self._length())
        while True:
            if self.persistent and self._latest not in (None, run):
                raise RuntimeError(
                    f"{self.options.name}: another iteration of this loader took over its workers, which persist:"
                    " finish one iteration before the next, or leave out persistent_workers"
                )
            batch = next(batches, _END)
            if batch is _END:
                break
            run.position += 1
            if run.position == self._length():
                self._advance(run)
            yield batch
        self._advance(run)
        if self._latest is run:
            self._latest = None

    def _advance(self, run: _Run) -> None:
        """The epoch was delivered: the next iteration is the next epoch."""
        if self._latest is run and not self._chosen and self.options.training:
            self._epoch = run.epoch + 1

    def _turns(self, run: _Run, now: Pass, first: Iterator[Any]) -> Iterator[Any]:
        """The batches of the promised epoch, as often as the user has it repeated."""
        laps = (first if lap == 0 else self._one_lap(run, now._replace(lap=lap)) for lap in count())
        for _ in range(int(self.repetitions)):
            yield from self._promised(run, laps, now.num_replicas)

    def _promised(self, run: _Run, laps: Iterator[Iterator[Any]], num_replicas: int) -> Iterator[Any]:
        """The promised number of batches, from as many passes over the shards as it takes."""
        done = 0
        for number, batches in enumerate(laps):
            before = done
            for batch in islice(batches, self.n_batches - done):
                done += 1
                if done == self.n_batches and number == 0:
                    self._warn_of_more(batches)
                yield batch
            if done == before:
                again = " when begun again" if number else ""
                raise ValueError(
                    f"{self.options.name}: no batch came out of the shards{again} ({run.samples} samples were read)."
                    " Check that the shards hold samples and that the pipelines and the batching let some pass"
                )
            if done == self.n_batches:
                return
            # A rank that stopped early would leave the others waiting.
            again_ = self.options.training or num_replicas > 1
            self._warn_of_less(run, done, again=again_)
            if not again_:
                self.n_batches = done  # from now on the length is what comes
                return

    def _one_lap(self, run: _Run, now: Pass) -> Iterator[Any]:
        """The batches of one pass over the shards; the workers are started at once."""
        self.samples.begin(now)
        with warnings.catch_warnings():
            # Python 3.12 and newer warn of every fork beside threads; the workers touch none of their locks.
            warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
            samples = iter(self.pipeline[0])
        return apply_stages(self.pipeline[1:], self._counted(run, samples), now, f"{self.options.seed}/outside")

    @staticmethod
    def _counted(run: _Run, samples: Iterator[Any]) -> Iterator[Any]:
        run.samples = 0
        for sample in samples:
            run.samples += 1
            yield sample

    def _warn_of_more(self, batches: Iterator[Any]) -> None:
        # In the first epoch only: the answer costs a batch. Before the last batch is delivered, because a trainer
        # that knows the length never comes back after it.
        if self.samples.endless or "more" in self._warned:
            return
        self._warned.add("more")
        if next(batches, _END) is not _END:
            self._warn(
                f"samples remain after the {self.n_batches} batches of an epoch ({self._promise}): they are left out"
            )

    def _warn_of_less(self, run: _Run, done: int, *, again: bool) -> None:
        if "less" in self._warned or self.samples.endless:
            return
        self._warned.add("less")
        what = "the shards are begun again, so samples repeat" if again else "the epoch ends early"
        self._warn(
            f"the shards ran dry after {run.samples} samples in {done} batches, before the {self.n_batches} batches"
            f" of an epoch ({self._promise}): {what}"
        )

    @property
    def _promise(self) -> str:
        return f"n_samples={self.options.n_samples}, global_batch_size={self.options.global_batch_size}"

    def _warn(self, message: str) -> None:
        cure = (
            f"Set {self.options.argument('n_samples')} and global_batch_size to what the shards and the batching give"
        )
        warnings.warn(f"{self.options.name}: {message}. {cure}", UserWarning, stacklevel=2)

    def _length(self) -> int | None:
        """Batches per epoch on each rank; None: the loader never ends."""
        repetitions, at_most = int(self.repetitions), int(self.nsamples)
        if repetitions == 1:
            return self.n_batches
        if repetitions == sys.maxsize and at_most < 1:
            return None
        length = repetitions * self.n_batches
        return min(length, at_most) if at_most > 0 else length

    def __len__(self) -> int:
        """Batches per epoch on each rank, also after a resume.

        Raises:
            TypeError: `with_epoch()` or `repeat()` made the loader endless.
        """
        length = self._length()
        if length is None:
            raise TypeError("this loader is endless: give with_epoch() or repeat() a number of batches")
        return length

    @property
    def remaining(self) -> int:
        """Batches that are left of the present epoch."""
        return max(0, len(self) - self.at[1])


def open_loader(dataset: StreamDataset, ranks: Callable[[], tuple[int, int]], first_epoch: int = 0) -> StreamLoader:
    """A loader of a split.

    Args:
        dataset: Of the split.
        ranks: Returns the number of data-parallel ranks and this rank.
        first_epoch: Number of the first epoch.

    Raises:
        ValueError: More ranks than shards, or a method in `invoke_wld` that does not exist.
    """
    options = dataset.options
    loader = StreamLoader(dataset, ranks, first_epoch)
    invoked: StreamLoader = call_methods(options.argument("invoke_wld"), loader, options.invoke_wld)
    num_replicas, rank = ranks()
    source = dataset.sources.get("")
    if rank == 0 and isinstance(source, IndexedSource) and (more := -len(source) % num_replicas):
        n = len(source)
        warnings.warn(
            f"{options.name}: {n} samples cannot be shared equally by {num_replicas} ranks: {more} of them come twice"
            f" in each pass. With {n + more} or {n - num_replicas + more} none would",
            UserWarning,
            stacklevel=2,
        )
    return invoked
