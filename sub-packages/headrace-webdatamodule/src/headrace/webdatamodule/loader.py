"""The resumable loader: an iterable over torch's `DataLoader` that knows which batches it has delivered."""

from __future__ import annotations

import copy
import operator
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, islice
from typing import Any

import numpy.typing as npt
import torch
from torch.utils.data import DataLoader

from headrace.webdatamodule.loading.batch_reading import BatchDataset, OnError, Skipped, warn_of_skipped
from headrace.webdatamodule.loading.concat_shards import ConcatShards, describe_sample
from headrace.webdatamodule.loading.distributed import batches_before_comparing, compare_plans
from headrace.webdatamodule.loading.fingerprint import fingerprint_of
from headrace.webdatamodule.loading.foreign_batch_sampler import (
    check_batch_sampler,
    has_state,
    length_of,
    load_state,
    ranks_of,
    resume,
    rewind,
    set_epoch,
)
from headrace.webdatamodule.loading.options import check_loading, seed_int
from headrace.webdatamodule.loading.permutation import derive
from headrace.webdatamodule.loading.position import Iteration, Position, Requests, requested
from headrace.webdatamodule.loading.ranks import Mesh, Ranks
from headrace.webdatamodule.loading.states import VERSION, check_loader_state
from headrace.webdatamodule.loading.stats import DeliveryStats, LoaderReport
from headrace.webdatamodule.loading.trainer_epochs import EpochLoader
from headrace.webdatamodule.loading.worker import WorkerTimeout, end_with_parent, end_workers, start_workers
from headrace.webdatamodule.shards import IndexedShards

State = dict[str, Any]


class ResumableLoader(EpochLoader):
    """Batches of a map-style dataset, from any position on.

    It knows which batches reached the training loop, whatever its workers have read ahead: `state_dict()` holds the
    position behind the last one. `load_state_dict()` resumes there, with any number of workers and, if the batch
    sampler can (those of headrace can), of ranks. No batch is read twice for that.

    After an epoch that was delivered to its end, iterating again delivers the next one, unless `set_epoch` chose
    another. After a `break`, it begins that epoch anew. The state of an epoch's end leaves nothing of it: the first
    iteration is empty, the second the next epoch; `for epoch in range(loader.epoch, epochs)` is right for every state.
    Two iterations of one loader are independent. `next(iter(loader))` while a loop is under way is a look, which counts
    for nothing; who takes a second batch has begun anew, and the state is that of this iteration. In a fit with a data
    module it is always the trainer's.

    The ranks compare their plans where all of them are: before the first batch of a trainer's loop, and before the
    second one in a training loop of your own. So one rank alone may look at a batch, and evaluate.

    It is no `DataLoader`, which trainers would rebuild with a sampler of their own.

    Args:
        dataset: Anything with `len()` and integer indices: a list, a torch or Hugging Face `Dataset`, `IndexedShards`.
            Read with `__getitems__`, a batch at a time, where it has that: a list with one sample for each index, in
            their order. The number is checked; the order where samples are mappings with `__key__` and the dataset
            has `key(index)`. `names` and `cumulative_sizes` tell its sources in reports.
        batch_sampler: This rank's batches: lists of indices, with a length. With `state_dict` and `load_state_dict` it
            is resumed, and with `remaining` at any number of ranks; else its batches are counted. Or a function of
            `num_replicas` and `rank` that makes it, called when an epoch begins with other ranks than before.
        collate_fn: Makes a batch of a list of samples, in the worker; torch's own when None.
        num_workers: Processes that read ahead; they stay from epoch to epoch.
        prefetch_factor: Batches that each of them reads ahead; 2 when None.
        pin_memory: Whether batches are copied to memory that a GPU reads directly.
        timeout: Seconds to wait for a batch of the workers before it is an error; 0 for no limit.
        multiprocessing_context: How workers are started: "fork", "forkserver" or "spawn"; see torch.
        on_error: "raise" the error of a sample that is damaged (a `DamagedShardError` or `DecodeError`), or "skip" the
            sample, count it and warn. An `UnsafePickleError` is always raised.
        sizes: Of each sample, shape [n] or [n, k], for the report on padding.
        seed: Of the random numbers of the workers, together with the name, the epoch, the step and the rank.
        fingerprint: Stands for the dataset in states; when None, the dataset's own `fingerprint`, else its length and,
            of lists, arrays, tensors and Hugging Face datasets, some samples.
        num_replicas: Number of data-parallel ranks. By default that of the batch sampler where it says one, else of the
            process group, else WORLD_SIZE of the environment, when an epoch begins.
        rank: This one; the same.
        mesh: Instead of both, a 1-D `DeviceMesh` of the data-parallel ranks, which compare their plans then.
        name: Of the split, for messages.
        fixed_epoch: Whether every epoch is the same, as for validation: `set_epoch` is ignored.
        check_ranks: Whether the ranks compare their plans in each epoch. They need a mesh that is a `DeviceMesh`, or to
            be all ranks of the process group.

    Attributes:
        dataset: The samples.
        indices: Of the samples in the batch that was delivered last.

    Raises:
        TypeError: An argument of the wrong kind.
        ValueError: An argument that is not allowed.

    >>> loader = ResumableLoader(list("abcdef"), [[0, 1], [2, 3], [4, 5]])
    >>> next(iter(loader))
    ['a', 'b']
    >>> state = loader.state_dict()
    >>> resumed = ResumableLoader(list("abcdef"), [[0, 1], [2, 3], [4, 5]])
    >>> resumed.load_state_dict(state)
    >>> len(resumed), resumed.remaining, list(resumed)
    (3, 2, [['c', 'd'], ['e', 'f']])
    """

    def __init__(
        self,
        dataset: Any,
        batch_sampler: Any,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        pin_memory: bool = False,
        timeout: float = 600.0,
        multiprocessing_context: Any = None,
        on_error: OnError = "raise",
        sizes: npt.ArrayLike | None = None,
        seed: int = 0,
        fingerprint: str | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        mesh: Mesh | None = None,
        name: str = "train",
        fixed_epoch: bool = False,
        check_ranks: bool = True,
    ) -> None:
        check_loading(num_workers, prefetch_factor, timeout, on_error)
        self._given_ranks = Ranks(num_replicas, rank, mesh)
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise TypeError(f"dataset must have len() and integer indices, got {type(dataset).__name__}")
        is_factory = callable(batch_sampler) and not hasattr(batch_sampler, "__iter__")
        self._factory: Callable[[int, int], Any] | None = batch_sampler if is_factory else None
        self._batch_sampler: Any = None if is_factory else check_batch_sampler(batch_sampler, dataset)
        self.dataset, self._name = dataset, name
        self._fingerprint = fingerprint_of(dataset) if fingerprint is None else str(fingerprint)
        self._seed = seed_int(seed)
        self._fixed, self._check_ranks = fixed_epoch, check_ranks
        self._timeout = WorkerTimeout(timeout)
        self._options: dict[str, Any] = {
            "num_workers": operator.index(num_workers),
            "prefetch_factor": prefetch_factor if num_workers else None,
            "pin_memory": pin_memory,
            "timeout": self._timeout.seconds if num_workers else 0,
            "multiprocessing_context": multiprocessing_context if num_workers else None,
            "persistent_workers": num_workers > 0,
        }
        self._batch_dataset = BatchDataset(dataset, collate_fn, on_error)
        self._stats = DeliveryStats(name, dataset, sizes)
        self._factory_ranks: tuple[int, int] | None = None  # that it was called with
        self._epoch = 0
        self._chosen = self._finished = False  # set_epoch was called since an iteration began; one came to its end
        self._on_batch: Callable[[Sequence[int]], None] | None = None
        self._counts: Callable[[], bool] | None = None
        self.indices: Sequence[int] = ()
        self._open()
        if self._batch_sampler is not None:
            self._restart(0)

    def _open(self) -> None:
        self._requests = Requests()
        self._inner: DataLoader[Any] = DataLoader(
            self._batch_dataset,
            batch_sampler=self._requests,  # type: ignore[arg-type]  # gives what the dataset's __getitems__ takes
            collate_fn=self._batch_dataset.collate,  # type: ignore[arg-type]  # of what its __getitems__ gives
            generator=torch.Generator(),  # else torch would draw from the process's own
            worker_init_fn=end_with_parent,
            **self._options,
        )
        self._current: weakref.ref[Iteration] | None = None
        self._positions: deque[Position] = deque([Position(0, None)])
        self._start = self._positions[0]  # of the iteration that began last
        self._steps_before = 0
        self._length: tuple[tuple[int, int], int] | None = None  # of the epoch that began: its ranks and batches
        self._begun = self._resumed = False

    def __getstate__(self) -> dict[str, Any]:
        """What a copy has: all but what is under way. It continues at the position, outside of a trainer."""
        own = ("_inner", "_requests", "_current", "_positions", "_fit_loop", "_on_batch", "_counts", "batch_sampler")
        kept = {name: value for name, value in vars(self).items() if name not in own}
        stats = DeliveryStats(self._name, self.dataset, self._stats._sizes, self._stats.rank)
        return {**kept, "_stats": stats, "state": self.state_dict()}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        kept = dict(kept)
        state = kept.pop("state")
        vars(self).update(kept, _on_batch=None, _counts=None, _chosen=False)
        if self._factory is not None:
            self._batch_sampler = self._factory_ranks = None
        self._open()
        self._restore(state)
        if kept["_finished"]:
            self._begun = self._finished = True
        if kept["_finished"] or not kept["_begun"]:
            self._resumed, self._chosen = kept["_resumed"], kept["_chosen"]

    def __copy__(self) -> ResumableLoader:
        other, kept = object.__new__(type(self)), self.__getstate__()
        if self._factory is None:
            kept["_batch_sampler"] = copy.deepcopy(self._batch_sampler, {id(self.dataset): self.dataset})
        other.__setstate__(kept)
        return other

    def __len__(self) -> int:
        """Batches of the whole epoch on this rank, those before a resumed position included."""
        batches = self._batches()
        if self._begun and self._length is not None and (self._latest() or self._length[0] == self.ranks):
            return self._length[1]
        return length_of(batches, self._steps_before)

    @property
    def num_workers(self) -> int:
        """Processes that read ahead."""
        return int(self._options["num_workers"])

    @property
    def ranks(self) -> tuple[int, int]:
        """The number of data-parallel ranks and this rank, as of now.

        Raises:
            ValueError: The batch sampler is for other ranks than were given to the loader.
        """
        own = None if self._factory else ranks_of(self._batch_sampler)
        if own is None:
            return self._given_ranks.current()
        if self._given_ranks.given and (given := self._given_ranks.current()) != own:
            raise ValueError(
                f"the {self._name} loader is for rank {given[1]} of {given[0]}, and its "
                f"{type(self._batch_sampler).__name__} for rank {own[1]} of {own[0]}: give num_replicas, rank or mesh "
                "to the batch sampler, and leave them out of the loader"
            )
        return own

    @property
    def epoch(self) -> int:
        """The present epoch."""
        return self._epoch

    @property
    def steps(self) -> int:
        """Batches of the present epoch that were delivered."""
        return self._positions[-1].steps

    @property
    def resumed(self) -> bool:
        """Whether a state was loaded, and nothing delivered since."""
        return self._resumed

    def _choose_epoch(self, epoch: int) -> None:
        if self._resumed and self._trainer is None and epoch < self._epoch:
            warnings.warn(
                f"the {self._name} loader has loaded a state of epoch {self._epoch}, and set_epoch({epoch}) drops it: "
                "samples come again; loop over range(loader.epoch, epochs)",
                stacklevel=3,
            )
        if epoch != self._epoch:
            self._go_to(epoch)
        self._chosen = True

    def _go_to(self, epoch: int) -> None:
        self._epoch = epoch
        set_epoch(self._batches(), epoch)
        self._restart(0)

    def _rewind(self) -> None:
        rewind(self._batches(), self._epoch)
        self._restart(0)

    def state_dict(self) -> State:
        """The position behind the last batch that was delivered; in a trainer, behind the last one that counted.

        A batch whose training step failed comes again, and so do batches whose accumulated gradients have not reached
        the optimizer.

        Returns:
            The same on every rank: "version", "seed", "epoch", "steps" delivered in it, "fingerprint" of the dataset,
            and "batch_sampler", its state.
        """
        batches = self._batches()
        done = None if self._fit_loop is None else self._fit_loop.steps_done()
        position = self._positions[-1]
        if done is not None and done < position.steps:
            position = next((one for one in reversed(self._positions) if one.steps <= done), self._positions[0])
        own = position.state
        if not has_state(batches):  # every rank has batches of its own
            own = dict(zip(("num_replicas", "rank"), self.ranks, strict=True)) | (own or {})
        order = getattr(batches, "order_digest", "") if position.steps else ""
        return {
            "version": VERSION,
            "seed": self._seed,
            "epoch": self._epoch,
            "steps": position.steps,
            "fingerprint": self._fingerprint,
            "batch_sampler": own,
            **({"order": order} if order else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume where a state was taken.

        A state of an older epoch than a later `set_epoch` chose is left alone, and so is any while a trainer fits with
        a data module: the module's copy decides.

        Args:
            state: As `state_dict` returned it, on any rank.

        Raises:
            TypeError: It is no mapping.
            ValueError: It is of another dataset, other sizes, options or another seed; or of another number of ranks,
                and the batch sampler has no state.
        """
        if self._trainer is None:
            self._restore(state)

    def _restore(self, state: Mapping[str, Any]) -> None:
        check_loader_state(state, self._fingerprint, self._seed, self._name)
        steps, epoch = state["steps"], state["epoch"]
        if self._chosen and self._epoch > epoch and self._fit_loop is None:
            return
        before = resume(self._batches(), state, self._epoch, self.ranks)
        self._epoch = epoch
        self._restart(steps, before)
        self._resumed, self._chosen = True, False

    def report(self) -> LoaderReport:
        """Statistics of the batches that were delivered so far, on this rank."""
        batches = self._batch_sampler
        cost = getattr(getattr(batches, "options", None), "cost", None)
        packed = isinstance(cost, str) and cost == "sum"
        return self._stats.report(getattr(batches, "skipped_indices", ()), packed=packed)

    def _explain_if_own(self, error: BaseException) -> None:
        """Explain the error of a killed worker, which may interrupt a training step, outside of an iteration."""
        pids = [str(worker.pid) for worker in getattr(self._iterator, "_workers", ())]
        iteration = self._latest()
        if iteration is not None and isinstance(error, RuntimeError) and any(pid in str(error) for pid in pids):
            self._explain(error, iteration)

    def close(self) -> None:
        """End the workers and close the files of `IndexedShards`; both come back when they are needed."""
        self._iterator = None
        if isinstance(self.dataset, ConcatShards | IndexedShards):  # others may stay closed
            self.dataset.close()

    @property
    def _iterator(self) -> Any:
        # Where trainers look for workers to end after an error.
        return self._inner._iterator

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        running = self._inner._iterator
        if iterator is None and running is not None:
            end_workers(running)
        self._inner._iterator = iterator

    def _batches(self) -> Any:
        """The batch sampler of the ranks there are now, at the present position."""
        if self._factory is None:
            return self._batch_sampler
        ranks = self.ranks
        if ranks != self._factory_ranks:
            position, resumed = self._positions[-1], self._resumed
            mid_epoch = position.steps > 0 and not self._begun
            if mid_epoch and not has_state(self._batch_sampler):
                raise ValueError(f"the number of ranks changed in the middle of an epoch, to {ranks[0]}")
            self._batch_sampler, self._factory_ranks = check_batch_sampler(self._factory(*ranks), self.dataset), ranks
            set_epoch(self._batch_sampler, self._epoch)
            if mid_epoch:
                load_state(self._batch_sampler, position.state or {}, self._epoch)
            if not self._begun:
                self._restart(position.steps)
                self._resumed = resumed
        return self._batch_sampler

    def _restart(self, steps: int, before: State | None = None) -> None:
        self._steps_before, self._begun, self._resumed, self._finished = steps, False, False, False
        state = self._batch_sampler.state_dict() if has_state(self._batch_sampler) else before
        if state is not None and not steps and "position" in state:
            state = {**state, "position": 0}  # an iteration that was abandoned has moved the batch sampler
        self._positions = deque([Position(steps, state)])

    def _deliver(self) -> Iterator[Any]:
        if self._is_beside_a_fit():
            # Whenever it begins, it leaves the trainer's position alone, and waits for no other rank.
            yield from self._beside(Position(0, None))
            return
        if self._trainer is None and self._latest() is not None and self._begun and not self._chosen:
            yield from self._beside_another()
            return
        iteration, inner, plan = self._begin()
        self._current = weakref.ref(iteration)
        compares_after = batches_before_comparing(in_trainer=self._trainer is not None, evaluates=self._fixed)
        try:
            for number in count():
                if number == compares_after and self._check_ranks:
                    compare_plans(plan, self._name, self._stats.rank[0], self._given_ranks.mesh)
                if self._latest() is not iteration:
                    yield from self._beside(iteration.position)  # a later one has the workers and the position
                    return
                delivered = self._timeout.next_of(inner)
                if delivered is None:
                    break
                indices, position = iteration.in_flight.popleft()
                batch, skipped, error = delivered
                if error is not None:
                    raise error
                self._positions.append(position)
                iteration.position = position
                self._note(indices, skipped)
                yield batch
            if iteration.in_flight:
                raise RuntimeError(f"the workers of the {self._name} loader ended before its batches did")
            self._finished = True
        except Exception as error:
            self._explain(error, iteration)
            if self._latest() is iteration:
                self._iterator = None  # left to the garbage collection, it takes 5 seconds a worker
            raise

    def _begin(self) -> tuple[Iteration, Iterator[Any], dict[str, Any]]:
        """Start an iteration, its workers included."""
        self._batches()
        if self._begun:
            if self._finished and not self._chosen and not self._fixed:
                self._go_to(self._epoch + 1)
            else:
                self._start_at(self._first())  # the same epoch once more
        batches, (world, rank) = self._batches(), self.ranks
        if world > 1 and isinstance(getattr(batches, "rank", None), str):
            raise ValueError(
                f"batch_sampler must give the batches of this rank, got one with rank={batches.rank!r}, so that each "
                f"of {world} ranks would train on all of them: leave out rank"
            )
        length, start = len(self), self._positions[-1]
        self._start = start
        plan = {
            "epoch": self._epoch,
            "steps done": start.steps,
            "steps": length,
            "order and batches": (start.state or {}).get("fingerprint"),
            "order": getattr(batches, "order_digest", ""),
            "shards": self._fingerprint,
            "position": repr(start.state if has_state(batches) else None),
        }
        name = int.from_bytes(self._name.encode()[:7], "big")
        iteration = Iteration(start)
        key = int(derive(self._seed, self._epoch, rank, name)[0])
        self._requests.next = requested(batches, iteration, length, key)
        self._length = (world, rank), length
        self._stats.rank = (world, rank)
        kept = 2 if self._trainer is None else self._trainer.accumulate_grad_batches + 1
        self._positions = deque(self._positions, kept)
        self._steps_before, self._begun, self._resumed, self._finished, self._chosen = 0, True, False, False, False
        return iteration, start_workers(self._inner), plan

    def _end_iteration(self) -> None:
        self._current = None

    def _latest(self) -> Iteration | None:
        return None if self._current is None else self._current()

    def _beside(self, position: Position) -> Iterator[Any]:
        """The rest of this epoch, beside the iteration that has the workers and the position."""
        other = self._copy(position)
        try:
            yield from other._deliver()
        finally:
            other._iterator = None

    def _beside_another(self) -> Iterator[Any]:
        """The epoch once more, while another iteration is under way.

        As long as one batch is taken it is a look, which counts for nothing. Who takes more has begun anew.
        """
        other = self._copy(self._first())
        other._check_ranks = self._check_ranks
        try:
            batches = other._deliver()
            yield from islice(batches, 1)
            if counts := self._begun and not self._chosen and self._epoch == other._epoch:
                self._finished, self._start = False, other._start
                self._positions, self._length, self._current = other._positions, other._length, other._current
                self._note(other.indices, [])
                other._counts, other._on_batch = self._counts, self._on_batch
            for batch in batches:
                if counts:
                    self.indices = other.indices
                yield batch
            self._finished = self._finished or self._positions is other._positions
        finally:
            other._iterator = None

    def _copy(self, position: Position) -> ResumableLoader:
        """A loader of its own at a position of this epoch, whose batches count for nothing."""
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        other._open()
        if self._factory is None:
            other._batch_sampler = _copied(self._batch_sampler, self.dataset, self._name)
        else:
            other._batch_sampler = self._factory(*(self._factory_ranks or self.ranks))
        other._start_at(position)
        other._fit_loop = other._on_batch = None
        other._check_ranks, other._counts = False, bool
        return other

    def _first(self) -> Position:
        """Where an epoch begins once more: a look at one batch leaves a position that was loaded."""
        looked = not self._finished and self._positions[-1].steps <= self._start.steps + 1
        return self._start if looked else Position(0, None)

    def _start_at(self, position: Position) -> None:
        """Put the batch sampler at a position of this epoch, from where the next iteration begins."""
        rewind(self._batch_sampler, self._epoch)
        if has_state(self._batch_sampler) and position.steps and position.state is not None:
            load_state(self._batch_sampler, position.state, self._epoch)
        self._restart(position.steps, position.state)

    def _note(self, indices: Sequence[int], skipped: list[Skipped]) -> None:
        if skipped:
            without = {sample[0] for sample in skipped}
            indices = [index for index in indices if int(index) not in without]
        self.indices = indices
        if self._counts is not None and not self._counts():
            return
        self._stats.add(indices)
        if self._on_batch is not None:
            self._on_batch(indices)
        for sample in skipped:
            if self._stats.skip(Skipped(*sample)):
                warn_of_skipped(sample, len(self._stats.skipped))

    def _explain(self, error: Exception, iteration: Iteration) -> None:
        """Add a note to the error of a worker that died or was too late: the samples that were waited for."""
        message = str(error) if isinstance(error, RuntimeError) else ""
        if iteration.in_flight and ("DataLoader worker" in message or "DataLoader timed out" in message):
            indices, position = iteration.in_flight[0]
            shown = ", ".join(describe_sample(self.dataset, int(index)) for index in indices[:3])
            more = f" and {len(indices) - 3} more" if len(indices) > 3 else ""
            batch = f"batch {position.steps - 1} of epoch {self._epoch}"
            error.add_note(f"the {self._name} loader waited for {batch}: {shown}{more}")


def _copied(batch_sampler: Any, dataset: Any, name: str) -> Any:
    """A batch sampler of the same order, for an iteration beside another one; the dataset stays the same."""
    try:
        return copy.deepcopy(batch_sampler, {id(dataset): dataset})
    except TypeError as error:
        kind = type(batch_sampler).__name__
        raise TypeError(
            f"a second iteration of the {name} loader, while one is under way, needs a copy of {kind}, and it cannot "
            f"be copied ({error}): keep no iterators in its attributes, give batch_sampler as a function of "
            "num_replicas and rank that makes it, or begin anew with set_epoch"
        ) from error
