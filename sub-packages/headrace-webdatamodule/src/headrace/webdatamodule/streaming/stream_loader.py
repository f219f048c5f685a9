"""The loader of a stream: epochs of a promised length, resumed by skipping what was delivered."""

from __future__ import annotations

import copy
import logging
import sys
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import count, islice
from typing import Any

import torch
import webdataset as wds
from torch.utils.data import DataLoader

from headrace.webdatamodule._shared.digest import text_digest
from headrace.webdatamodule._shared.display import counted, never_raises
from headrace.webdatamodule._shared.ranks import Mesh
from headrace.webdatamodule.loading.distributed import batches_before_comparing, compare_plans
from headrace.webdatamodule.loading.epoch_loader import EpochLoader
from headrace.webdatamodule.loading.position import Iteration, Position, Progress
from headrace.webdatamodule.loading.state_dict import STATE_VERSION, check_state
from headrace.webdatamodule.loading.worker import end_workers, start_workers
from headrace.webdatamodule.streaming.pipeline import (
    StreamDataset,
    apply_stages,
    call_methods,
    describe_options,
)
from headrace.webdatamodule.streaming.stream_sources import Pass

_STAGES = ("pipeline_wds", "pipeline_prebatch_wld", "invoke_wds", "invoke_wld")
_END = object()
_logger = logging.getLogger(__name__)


class StreamIteration(Iteration):
    """One iteration of a loader.

    Attributes:
        loader: What starts its workers.
        persists: Whether the workers persist when it is over.
        samples: The iterator of `loader` in the present pass.
        n_samples: Samples that left the workers in it.
    """

    def __init__(self, epoch: int, start: Position, loader: DataLoader[Any], *, persists: bool) -> None:
        super().__init__(epoch, start)
        self.loader, self.persists = loader, persists
        self.samples: Any = None
        self.n_samples = 0


class StreamLoader(EpochLoader[StreamIteration], wds.WebLoader):  # type: ignore[misc] # webdataset ships no types
    """A WebLoader whose epochs have a promised number of batches on every rank, and that can be resumed.

    A completed epoch is followed by the next one, unless `set_epoch` chose another. After a `break`, a new iteration
    restarts the epoch. Validation, test and predict loaders deliver the same order every time, and ignore `set_epoch`.
    Iterations over one loader are independent; the state is that of the latest one, or of the trainer's. `ranks`
    returns the number of data-parallel ranks and this rank when an epoch begins.
    """

    def __init__(self, dataset: StreamDataset, ranks: Callable[[], tuple[int, int]], mesh: Mesh | None = None) -> None:
        options = dataset.options
        # Without a generator of its own, torch would draw from that of the process.
        self._torch_options = {"batch_size": None, "generator": torch.Generator(), **options.kwargs_wld}
        self.samples, self.options, self.ranks = dataset, options, ranks
        self._mesh = mesh
        self._begin(options.stages_wld)
        self.n_batches = options.n_batches
        self._name, self._fixed = options.name, not options.training
        self._described = describe_options(dataset)
        self._progress = Progress[StreamIteration]()
        self._replicas = 0  # of the loaded state; then that of the latest iteration
        self._runs: set[StreamIteration] = set()  # those that are not over
        self._warned: set[str] = set()

    def _begin(self, stages: Sequence[Any]) -> None:
        super().__init__(copy.copy(self.samples), **self._torch_options)
        if self._torch_options.get("persistent_workers"):
            self.pipeline[0].dataset.share()
        self.pipeline += stages

    def __getstate__(self) -> dict[str, Any]:
        """What a copy has: all but what is under way. It continues at the position, outside of a trainer."""
        kept = {name: value for name, value in vars(self).items() if name not in ("_loop", "_runs")}
        progress = kept["_progress"] = copy.copy(self._progress)
        if self._progress.iteration is not None:
            progress.put(self.epoch, Position(self.steps), resumed=True)
        return {**kept, "pipeline": self.pipeline[1:], "_warned": set(self._warned)}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        stages, others = kept["pipeline"], {name: value for name, value in kept.items() if name != "pipeline"}
        self.__dict__.update(others)
        self._begin(stages)
        self.__dict__.update(others, _runs=set())  # which the user's methods may have set

    @never_raises
    def __repr__(self) -> str:
        samples, batches = counted(self.options.n_samples, "sample"), counted(self.n_batches, "batch")
        delivered = f"epoch {self.epoch}, {counted(self.steps, 'batch')} delivered"
        return f"{type(self).__name__}({self._name}: {samples}, {batches} an epoch, {delivered})"

    def _end_iteration(self) -> None:
        super()._end_iteration()
        self._runs.discard(self._progress.iteration)

    @property
    def fingerprint(self) -> str:
        """Digest of the shards, the options and the seed, in hexadecimal digits."""
        return text_digest(repr(sorted(self._described.items())))

    @property
    def steps(self) -> int:
        """Number of delivered batches of the current epoch; in a trainer, of those that counted."""
        steps, run, done = self._progress.position, self._progress.iteration, self._loop.steps_done()
        return steps if run is None or done is None else max(run.start.steps, min(done, steps))

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last delivered batch; in a trainer, after the last one that counted.

        A batch whose training step failed comes again, and so do batches whose accumulated gradients have not reached
        the optimizer. Batches that workers have read ahead do not count.

        Returns:
            "version", "seed", "epoch", "position" (delivered batches of the epoch on each rank),
            "num_replicas", "num_workers", "fingerprint" and "options"; the same on all ranks.
        """
        return {
            "version": STATE_VERSION,
            "seed": self.options.seed,
            "epoch": self.epoch,
            "position": self.steps,
            "num_replicas": self._replicas or self.ranks()[0],
            "num_workers": self.options.num_workers,
            "fingerprint": self.fingerprint,
            "options": dict(self._described),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume where a state was saved: the batches before it are read again and skipped.

        Args:
            state: As `state_dict` returned it.

        Raises:
            TypeError: The state is not one of a stream.
            ValueError: It is of other shards, options or another seed; or it stands in the middle of an epoch of
                other stages, or of other numbers of ranks or workers.
        """
        if self._trainer is None:  # else the module's copy decides
            self._restore(state)

    def _restore(self, state: Mapping[str, Any]) -> None:
        self._check_state(state)
        if not self._is_joined and self._progress.overrules(state["epoch"]):
            return
        self._progress.load(state["epoch"], Position(state["position"]))
        self._replicas = state["num_replicas"]

    def _check_state(self, state: Any) -> None:
        name = self.options.name
        counts = ("epoch", "position", "num_replicas", "num_workers")
        check_state(state, name, {"version": STATE_VERSION}, counts, ("seed", "fingerprint", "options"))
        if not isinstance(state["options"], Mapping):
            raise TypeError(f"{name}: state['options'] must be a mapping, got {state['options']!r}")
        length, steps = self._length(), state["position"]
        # At the end of an epoch, runs may continue with other numbers of ranks, and with other batches to suit these.
        within = steps not in (0, length)
        for part in [*self._described, *state["options"]]:
            was, now = (options.get(part, "nothing") for options in (state["options"], self._described))
            if was != now and (within or part not in _STAGES):
                cure = "resume with what the checkpoint was saved with, or begin without it"
                raise ValueError(f"{name}: checkpoint has {part}={was}, got {part}={now}: {cure}")
        if length is not None and steps > length:
            raise ValueError(
                f"{name}: checkpoint is at batch {steps} of an epoch of {length}: give the trainer and the loader"
                " the length that they had"
            )
        # One worker reads in the same order as none.
        if within and max(1, state["num_workers"]) != max(1, self.options.num_workers):
            was, now = state["num_workers"], self.options.num_workers
            raise ValueError(f"{name}: checkpoint has num_workers={was}, got num_workers={now}: {self._cure(steps)}")

    def _check_replicas(self, start: int, num_replicas: int) -> None:
        """Refuse to resume in the middle of an epoch with another number of ranks."""
        if start not in (0, self._length()) and num_replicas != self._replicas:
            message = f"checkpoint has num_replicas={self._replicas}, got num_replicas={num_replicas}"
            raise ValueError(f"{self._name}: {message}: {self._cure(start)}")

    @staticmethod
    def _cure(steps: int) -> str:
        return (
            f"it is at batch {steps} of an epoch, where a stream resumes with the same numbers of ranks and workers"
            " only. Use those, or a checkpoint of the end of an epoch; IndexedWebDataModule resumes with any numbers"
        )

    def _count(self) -> Iterator[Any]:
        progress = self._progress
        if not progress.begun and progress.place.steps == self._length() and not progress.chosen:
            self._begin_at(progress.epoch + 1)  # the state of the end of an epoch
        self._begin_next()
        run = self._run_from(progress.place)
        progress.begin(run)
        yield from self._read(run, checked=True)

    @contextmanager
    def _independent(self, start: Position, *, checked: bool) -> Iterator[tuple[StreamIteration, Iterator[Any]]]:
        run = self._run_from(start)
        with closing(self._read(run, checked=checked)) as batches:
            yield run, batches

    def _run_from(self, start: Position) -> StreamIteration:
        """An iteration of the present epoch."""
        persists = bool(self._torch_options.get("persistent_workers")) and not any(run.persists for run in self._runs)
        run = StreamIteration(self.epoch, start, self._torch_loader(persists=persists), persists=persists)
        run.under_way = True
        self._runs.add(run)
        return run

    def _read(self, run: StreamIteration, *, checked: bool) -> Generator[Any, None, None]:
        """The batches of an iteration. `checked` says whether the ranks compare their plans."""
        start, (num_replicas, rank) = run.start.steps, self.ranks()
        try:
            self.samples.check_ranks(num_replicas, rank)
            self._check_replicas(start, num_replicas)
            now = Pass(run.epoch, 0, rank, num_replicas)
            first = self._one_lap(run, now)  # starts the workers, before the first collective
            compares_after = batches_before_comparing(in_trainer=self._trainer is not None, evaluates=self._fixed)
            if not checked:
                compares_after = None
            else:
                self._replicas = num_replicas
            if compares_after == 0:
                self._compare(run, num_replicas)
            if start:
                message = "%s: resuming at batch %d of epoch %d: the batches before it are read again and skipped"
                _logger.info(message, self._name, start, run.epoch)
            for number, batch in enumerate(islice(self._repeated(run, now, first), start, self._length()), 1):
                run.positions.append(Position(start + number))
                self._progress.move(run, run.position.steps)
                if run.position.steps == self._length():
                    self._finish(run)
                yield batch
                if number == compares_after:
                    self._compare(run, num_replicas)
            self._finish(run)
            if self._progress.iteration is run:
                self._begin_next()
        finally:
            self._end(run)

    def _compare(self, run: StreamIteration, num_replicas: int) -> None:
        ours = {
            "epoch": run.epoch,
            "steps done": run.start.steps,
            "batches": self.n_batches,
            "num_replicas": num_replicas,
        }
        compare_plans({**ours, **self._described}, self._name, num_replicas, self._mesh)

    def _torch_loader(self, *, persists: bool) -> DataLoader[Any]:
        """The torch loader of an iteration: workers that persist serve one at a time, so that others have their own."""
        if persists or not self._torch_options.get("persistent_workers"):
            loader: DataLoader[Any] = self.pipeline[0]
            return loader
        return DataLoader(copy.copy(self.samples), **{**self._torch_options, "persistent_workers": False})

    def _finish(self, run: StreamIteration) -> None:
        """The epoch was delivered."""
        self._runs.discard(run)
        run.under_way, run.finished = False, True

    def _end(self, run: StreamIteration) -> None:
        """End the workers of an iteration, unless they persist."""
        self._runs.discard(run)
        run.under_way = False
        if not run.persists:
            end_workers(run.samples)
        run.samples = None

    def close(self) -> None:
        """End all workers; they are started again when they are needed."""
        for run in list(self._runs):
            self._end(run)
        iterator, self.pipeline[0]._iterator = self.pipeline[0]._iterator, None
        end_workers(iterator)

    def _repeated(self, run: StreamIteration, now: Pass, first: Iterator[Any]) -> Iterator[Any]:
        """The batches of the promised epoch, as often as the user has it repeated."""
        laps = (first if lap == 0 else self._one_lap(run, now._replace(lap=lap)) for lap in count())
        for _ in range(int(self.repetitions)):
            yield from self._promised(run, laps, now.num_replicas)

    def _promised(self, run: StreamIteration, laps: Iterator[Iterator[Any]], num_replicas: int) -> Iterator[Any]:
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
                again = " when read again" if number else ""
                raise ValueError(
                    f"{self._name}: no batch came out of the shards{again} ({run.n_samples} samples were read)."
                    " Check that the shards hold samples and that the pipelines and the batching let some pass"
                )
            if done == self.n_batches:
                return
            # A rank that stopped early would leave the others waiting.
            repeats = self.options.training or num_replicas > 1
            self._warn_of_less(run, done, again=repeats)
            if not repeats:
                self.n_batches = done  # so that len() is right from now on
                return

    def _one_lap(self, run: StreamIteration, now: Pass) -> Iterator[Any]:
        """The batches of one pass over the shards; the workers are started at once."""
        if not run.persists:
            end_workers(run.samples)
        run.loader.dataset.begin(now)  # type: ignore[attr-defined] # it is a StreamDataset
        run.samples, run.n_samples = start_workers(run.loader), 0
        return apply_stages(self.pipeline[1:], self._samples_of(run), now, f"{self.options.seed}/outside")

    def _samples_of(self, run: StreamIteration) -> Iterator[Any]:
        for sample in run.samples:
            run.n_samples += 1
            yield sample
        if run.samples is None and self.options.num_workers:  # else what is missing would be read from the beginning
            raise RuntimeError(f"the {self._name} loader was closed while it was iterated: iterate it again")

    def _warn_of_more(self, batches: Iterator[Any]) -> None:
        # In the first epoch only: the answer costs a batch. Before the last batch is delivered, because a trainer
        # that knows the length never comes back after it.
        if self._is_first("more") and next(batches, _END) is not _END:
            self._warn(f"samples remain after the {self._promise}: they are left out")

    def _warn_of_less(self, run: StreamIteration, done: int, *, again: bool) -> None:
        if self._is_first("less"):
            what = "the shards are read again, so samples repeat" if again else "the epoch ends early"
            ran_out = f"the shards ran out after {run.n_samples} samples in {done} batches"
            self._warn(f"{ran_out}, before the {self._promise}: {what}")

    def _is_first(self, warning: str) -> bool:
        if self.samples.endless or warning in self._warned:
            return False
        self._warned.add(warning)
        return True

    @property
    def _promise(self) -> str:
        given = f"n_samples={self.options.n_samples}, global_batch_size={self.options.global_batch_size}"
        return f"{self.n_batches} batches of an epoch ({given})"

    def _warn(self, message: str) -> None:
        totals = f"{self.options.argument('n_samples')} and global_batch_size"
        cure = f"Set {totals} to what the shards and the batching give"
        warnings.warn(f"{self._name}: {message}. {cure}", UserWarning, stacklevel=2)

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


def open_loader(dataset: StreamDataset, ranks: Callable[[], tuple[int, int]], mesh: Mesh | None = None) -> StreamLoader:
    """A loader of a split, with the methods that the user has called on it."""
    options = dataset.options
    loader = StreamLoader(dataset, ranks, mesh)
    invoked: StreamLoader = call_methods(options.argument("invoke_wld"), loader, options.invoke_wld)
    return invoked
