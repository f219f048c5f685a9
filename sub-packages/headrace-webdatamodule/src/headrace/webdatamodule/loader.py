"""The resumable loader: a thin iterable over torch's `DataLoader` that counts what it delivered."""

from __future__ import annotations

import itertools
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, SequentialSampler

from headrace.webdatamodule.indexed.agreement import agree
from headrace.webdatamodule.indexed.arguments import seed_int
from headrace.webdatamodule.indexed.checking import check_loading
from headrace.webdatamodule.indexed.delivering import Batches, Damaged, DamagedSampleWarning, Skipped
from headrace.webdatamodule.indexed.recording import Beginning, Recorded, Taken
from headrace.webdatamodule.indexed.seeding import Steps
from headrace.webdatamodule.indexed.shuffling import derive
from headrace.webdatamodule.indexed.sources import Sources
from headrace.webdatamodule.indexed.tally import LoaderReport, Tally
from headrace.webdatamodule.indexed.waiting import Wait
from headrace.webdatamodule.trainer.following import Follows

VERSION = 1
_WARNED = 10  # skipped samples that get a warning each

State = dict[str, Any]


class Epochs(SequentialSampler):
    """What trainers take for the loader's sampler: it passes epochs on, and need not be replaced.

    Args:
        loader: What it belongs to.
    """

    def __init__(self, loader: ResumableLoader) -> None:
        super().__init__(loader.dataset)
        self._loader = loader

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the loader delivers next."""
        self._loader.set_epoch(epoch)


class ResumableLoader:
    """Batches of indexed shards, from any position on.

    It knows what reached the training loop, whatever its workers have fetched ahead: `state_dict()` holds the position
    behind the last batch that was delivered. `load_state_dict()` goes on there, with any number of workers and, when
    the batch sampler can (those of headrace can), of ranks. Nothing is read twice for that.

    It is no `DataLoader`, which trainers would take apart and rebuild with a sampler of their own.

    Args:
        sources: The samples.
        batch_sampler: This rank's batches. With `state_dict` and `load_state_dict` any position is found by it, at any
            number of ranks; else its batches are counted.
        collate_fn: Makes a batch of a list of samples, in the worker; torch's own when None.
        num_workers: Processes that read ahead; they stay from epoch to epoch.
        prefetch_factor: Batches that each of them reads ahead; 2 when None.
        pin_memory: Whether batches are copied to memory that a GPU reads directly.
        timeout: Seconds to wait for a batch of the workers before it is an error.
        multiprocessing_context: How workers are started; see torch.
        damaged: "raise" the error of a sample that is damaged, or "skip" the sample, count it and warn.
        sizes: Of each sample, for the report on padding.
        seed: Decides the random numbers of the workers, together with the name, the epoch, the step and the rank.
        world: (number of ranks, this rank) that the batch sampler deals to.
        name: For messages.
        check_ranks: Whether all ranks compare their plans before each epoch.

    >>> import tempfile
    >>> from headrace.webdatamodule import IndexedShards, index_shards, write_tars
    >>> folder = tempfile.mkdtemp()
    >>> _ = write_tars([(f"s{i}", {"json": b"%d" % i}) for i in range(6)], folder, n_shards=2)
    >>> _ = index_shards(folder)
    >>> sources = Sources({"numbers": IndexedShards(folder)})
    >>> loader = ResumableLoader(sources, [[0, 1], [2, 3], [4, 5]])
    >>> loader.load_state_dict(loader.state_dict() | {"steps": 2})
    >>> [batch["json"].tolist() for batch in loader]
    [[4, 5]]
    """

    batch_sampler = None  # trainers look for one beside `sampler`

    def __init__(
        self,
        sources: Sources,
        batch_sampler: Any,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        pin_memory: bool = False,
        timeout: float = 600.0,
        multiprocessing_context: Any = None,
        damaged: Damaged = "raise",
        sizes: npt.NDArray[Any] | None = None,
        seed: int = 0,
        world: tuple[int, int] = (1, 0),
        name: str = "train",
        check_ranks: bool = True,
    ) -> None:
        if damaged not in ("raise", "skip"):
            raise ValueError(f"damaged must be 'raise' or 'skip', got {damaged!r}")
        if not (hasattr(batch_sampler, "__len__") and hasattr(batch_sampler, "__iter__")):
            kind = type(batch_sampler).__name__
            raise TypeError(f"batch_sampler must give lists of positions in every epoch and have a length, got {kind}")
        check_loading(timeout, prefetch_factor)
        self._sources, self._batches, self._name = sources, batch_sampler, name
        self._world, self._seed, self._check_ranks = world, seed_int(seed), check_ranks
        self._recorded = Recorded(batch_sampler)
        self._wait = Wait(timeout)
        dataset = Batches(sources, collate_fn, damaged)
        self._inner: DataLoader[Any] = DataLoader(
            Steps(dataset),
            batch_sampler=self._recorded,  # type: ignore[arg-type]  # gives what the dataset's __getitems__ takes
            collate_fn=dataset.collate,  # type: ignore[arg-type]  # of what the dataset's __getitems__ gives
            num_workers=num_workers,
            prefetch_factor=prefetch_factor if num_workers else None,
            pin_memory=pin_memory,
            timeout=self._wait.seconds if num_workers else 0,
            multiprocessing_context=multiprocessing_context if num_workers else None,
            persistent_workers=num_workers > 0,
            generator=torch.Generator(),  # else torch would draw from the process's own
        )
        self._tally = Tally(name, sources, sizes, world)
        self._stateful = has_state(batch_sampler)
        self._epoch = 0
        self._begun: object = None
        self._length: int | None = None
        self._positions: list[tuple[int, State | None]] = []
        self._restart(0)
        self.follows: Follows | None = None
        self.on_batch: Callable[[Sequence[int]], None] | None = None
        self.counts: Callable[[], bool] | None = None

    def __len__(self) -> int:
        """How many batches the present epoch has on this rank, those before a resumed position included."""
        if self._length is None:
            before = self._before if self._stateful else 0
            self._length = before + len(self._batches)
        return self._length

    def __iter__(self) -> Iterator[Any]:
        """Deliver the epoch, from the position that was loaded, else from its beginning."""
        if self.follows is not None:
            self.follows.before_epochs()
        # The rest happens at the first `next`: trainers make an iterator before they set the epoch.
        return self._deliver()

    @property
    def dataset(self) -> Sources:
        """The samples."""
        return self._sources

    @property
    def sampler(self) -> Epochs:
        """Trainers call `loader.sampler.set_epoch`."""
        return Epochs(self)

    @property
    def epoch(self) -> int:
        """The present epoch."""
        return self._epoch

    @property
    def steps(self) -> int:
        """Batches of the present epoch that were delivered."""
        return self._positions[-1][0]

    @property
    def at(self) -> tuple[int, int]:
        """The present epoch, and the batches of it that were delivered."""
        return self._epoch, self.steps

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch to deliver next; a position that was loaded holds for its own epoch only."""
        epoch = operator.index(epoch)
        if epoch < 0:
            raise ValueError(f"epoch must be 0 or more, got {epoch}")
        if self.follows is not None:
            epoch = self.follows.which_epoch(epoch)
        if epoch != self._epoch:
            self._epoch = epoch
            self._set_epoch(epoch)
            self._restart(0)
        if self.follows is not None:
            self.follows.on_epoch()

    def state_dict(self) -> State:
        """What it takes to go on behind the last batch that was delivered.

        Returns:
            A few numbers, the same on every rank: "version", "epoch", "steps" delivered in it, "fingerprint" of the
            shards, and "batches", the state of the batch sampler.
        """
        done = None if self.follows is None else self.follows.steps_done()
        # The last batch is on hand, but the training step on it failed: it is to come again.
        before = len(self._positions) > 1 and done == self._positions[-2][0]
        steps, batches = self._positions[-2 if before else -1]
        own = {"ranks": self._world[0]} if batches is None else batches
        fingerprint = self._sources.fingerprint
        return {"version": VERSION, "epoch": self._epoch, "steps": steps, "fingerprint": fingerprint, "batches": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken.

        Args:
            state: What `state_dict` gave, on any rank.

        Raises:
            TypeError: It is no mapping.
            ValueError: It is of other shards, sizes, options or another seed; or of another number of ranks, and the
                batch sampler has no state.
        """
        steps, epoch = check_state(state, self._sources.fingerprint, self._name)
        own = state["batches"]
        if not isinstance(own, Mapping):
            raise TypeError(f"state['batches'] must be what state_dict() returned, got {type(own).__name__}")
        if own.get("epoch", epoch) != epoch:
            raise ValueError(f"state is of epoch {epoch}, but its batches are of {own['epoch']!r}: it was changed")
        position = own.get("position", steps)
        if type(position) is int and (position > 0) != (steps > 0):
            raise ValueError(f"state has steps {steps}, but its batches stand at {own['position']}: it was changed")
        if self._stateful:
            self._batches.load_state_dict(own)
        elif own.get("ranks") != self._world[0]:
            kind = type(self._batches).__name__
            raise ValueError(
                f"the state is of {own.get('ranks')} ranks, here are {self._world[0]}, and {kind} has no state_dict by "
                "which to deal the rest anew: resume with as many ranks, or give a batch sampler that has one"
            )
        else:
            self._set_epoch(epoch)
            if steps > len(self._batches):
                raise ValueError(f"state has {steps} steps, more than the {len(self._batches)} batches of its epoch")
        self._epoch = epoch
        self._restart(steps)
        self._resumed = True

    @property
    def resumed(self) -> bool:
        """Whether a state was loaded, and nothing delivered since."""
        return self._resumed

    def rewind(self) -> None:
        """Forget the position that was loaded: the epoch begins at its beginning."""
        self._set_epoch(self._epoch + 1)  # a batch sampler forgets its position with its epoch
        self._set_epoch(self._epoch)
        self._restart(0)

    def report(self) -> LoaderReport:
        """What was delivered so far, on this rank."""
        return self._tally.report()

    def explain(self, error: BaseException) -> None:
        """Note on an error of a worker what the loader waited for.

        Errors out of an iteration have that note. But that a worker was killed interrupts whatever the main thread is
        at, which may be a training step.

        Args:
            error: What was raised; left alone unless it is of one of this loader's workers.
        """
        pids = [str(worker.pid) for worker in getattr(self._iterator, "_workers", ())]
        if isinstance(error, RuntimeError) and any(pid in str(error) for pid in pids):
            self._explain(error)

    def close(self) -> None:
        """End the workers and let go of the shards; both come back when they are needed."""
        self._iterator = None
        self._sources.close()

    @property
    def _iterator(self) -> Any:
        # Where trainers look for workers to end after an error.
        return self._inner._iterator

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        running = self._inner._iterator
        if iterator is None and running is not None and hasattr(running, "_shutdown_workers"):
            running._shutdown_workers()
        self._inner._iterator = iterator

    def _set_epoch(self, epoch: int) -> None:
        owner = self._batches
        setter = getattr(owner, "set_epoch", None) or getattr(getattr(owner, "sampler", None), "set_epoch", None)
        if callable(setter):
            setter(epoch)

    def _restart(self, steps: int) -> None:
        self._before, self._length, self._begun, self._resumed = steps, None, None, False
        state = self._batches.state_dict() if self._stateful else None
        if state is not None and not steps and "position" in state:
            state = {**state, "position": 0}  # an iteration that was given up has moved the batch sampler
        self._positions = [(steps, state)]

    def _deliver(self) -> Iterator[Any]:
        steps = self._begin()
        self._resumed = False
        self._begun = mine = object()  # an iteration that another one replaced says no more where the loader stands
        try:
            inner = iter(self._inner)
            while (delivered := self._wait.next_of(inner)) is not None:
                taken = self._recorded.on_the_way.popleft()
                batch, skipped, error = delivered
                if error is not None:
                    raise error
                steps += 1
                if self._begun is mine:
                    self._positions = [self._positions[-1], (steps, taken.state)]
                self._note(taken, skipped)
                yield batch
            if self._recorded.on_the_way:
                raise RuntimeError(f"the workers of the {self._name} loader ended before its batches did")
        except Exception as error:
            self._explain(error)
            self._iterator = None  # left to the garbage collection, it takes 5 seconds a worker
            raise

    def _begin(self) -> int:
        """Make ready for an iteration; gives the number of steps of the epoch that were delivered before."""
        if self._begun is not None:  # the same epoch once more
            self._restart(0)
        steps = self._before
        position = self._positions[-1][1]
        if self._check_ranks and self._world[0] > 1:
            own = None if position is None else position.get("fingerprint")
            plan = {"epoch": self._epoch, "steps done": steps, "steps": len(self), "order and batches": own}
            agree({**plan, "shards": self._sources.fingerprint, "position": repr(position)}, self._name)
        length = len(self)  # before the sampler moves on
        key = int(derive(self._seed, self._epoch, self._world[1], int.from_bytes(self._name.encode()[:7], "big"))[0])
        if self._stateful:
            self._recorded.beginning = Beginning(0, length - steps, key, steps)
        else:
            self._recorded.beginning = Beginning(steps, length, key)
        self._before = 0
        return steps

    def _note(self, taken: Taken, skipped: list[Skipped]) -> None:
        if self.counts is not None and not self.counts():
            return
        indices = taken.indices
        if skipped:
            without = {one[0] for one in skipped}
            indices = [index for index in indices if int(index) not in without]
        self._tally.add(indices)
        if self.on_batch is not None:
            self.on_batch(indices)
        for one in skipped:
            if self._tally.skip(Skipped(*one)) and (count := len(self._tally.skipped)) <= _WARNED:
                more = "; further ones are counted in report()" if count == _WARNED else ""
                warnings.warn(f"skipped a sample: {one[1]}{more}", DamagedSampleWarning, stacklevel=3)

    def _explain(self, error: Exception) -> None:
        told = str(error) if isinstance(error, RuntimeError) else ""
        if "DataLoader worker" not in told and "DataLoader timed out" not in told:
            return
        for taken in itertools.islice(self._recorded.on_the_way, 1):
            shown = ", ".join(self._sources.place(int(index)) for index in taken.indices[:3])
            more = f" and {len(taken.indices) - 3} more" if len(taken.indices) > 3 else ""
            at = f"batch {self.steps} of epoch {self._epoch}"
            error.add_note(f"the {self._name} loader waited for {at}: {shown}{more}")


def has_state(batch_sampler: Any) -> bool:
    """Whether a batch sampler finds any position by itself."""
    return all(callable(getattr(batch_sampler, do, None)) for do in ("state_dict", "load_state_dict"))


def check_state(state: Any, fingerprint: str, name: str) -> tuple[int, int]:
    """Refuse a state of something else.

    Returns:
        The steps delivered, and their epoch.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"state must be what state_dict() returned, got {type(state).__name__}")
    missing = {"version", "epoch", "steps", "fingerprint", "batches"} - set(state)
    if missing:
        raise ValueError(f"state lacks {sorted(missing)}: pass what state_dict() returned")
    if state["version"] != VERSION:
        raise ValueError(f"state has version {state['version']!r}, this release reads {VERSION}: use the one it is of")
    if state["fingerprint"] != fingerprint:
        raise ValueError(
            f"state is of other {name} shards: it names {state['fingerprint']!r}, here they are {fingerprint!r}; "
            "resume with the shards it was saved with, or begin anew without the checkpoint"
        )
    numbers = [state["steps"], state["epoch"]]
    if not all(type(number) is int and 0 <= number < 2**62 for number in numbers):
        raise ValueError(f"state has steps {numbers[0]!r} and epoch {numbers[1]!r}: both are ints of 0 to 2**62")
    steps, epoch = numbers
    return steps, epoch
