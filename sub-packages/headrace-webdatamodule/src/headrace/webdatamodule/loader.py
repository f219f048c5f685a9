"""The resumable loader: an iterable over torch's `DataLoader` that knows which batches it has delivered."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from headrace.webdatamodule._shared.display import counted, described, inner, kind_of, never_raises
from headrace.webdatamodule._shared.random import fold_in
from headrace.webdatamodule._shared.ranks import Mesh, Ranks, process_group
from headrace.webdatamodule.loading import batch_plans
from headrace.webdatamodule.loading.batch_plans import BatchAt, BatchPlan, NodeUses, batch_plan
from headrace.webdatamodule.loading.batch_reading import (
    BatchDataset,
    BatchReader,
    Keys,
    Request,
    SkippedSample,
    warn_of_skipped,
)
from headrace.webdatamodule.loading.distributed import batches_before_comparing, compare_plans
from headrace.webdatamodule.loading.epoch_loader import EpochLoader
from headrace.webdatamodule.loading.fingerprint import dataset_fingerprint, prefix_fingerprint
from headrace.webdatamodule.loading.iteration import PlannedIteration
from headrace.webdatamodule.loading.options import Loading, OnError, SeedPer, seed_int
from headrace.webdatamodule.loading.padding import padded_beyond
from headrace.webdatamodule.loading.position import BEGINNING, Position, Progress
from headrace.webdatamodule.loading.sample_places import describe_sample, sample_place
from headrace.webdatamodule.loading.sample_random import epoch_key
from headrace.webdatamodule.loading.stage_report import LATE, DeliveryStats, LoaderReport, Resumed
from headrace.webdatamodule.loading.state_dict import DATA, check_loader_state, loader_state
from headrace.webdatamodule.loading.worker import WorkerTimeoutError
from headrace.webdatamodule.shards import IndexedShards

State = dict[str, Any]


class ResumableLoader(EpochLoader[PlannedIteration]):
    """Load batches of a map-style dataset, resumable at any position.

    The loader counts the batches that reached the training loop, independent of prefetching: `state_dict()` stores the
    position after the last one. `load_state_dict()` resumes there, with any number of workers and, if the batch sampler
    supports it (headrace's do), any number of ranks. A resume rereads no batch.

    After a complete epoch, a new iteration delivers the next epoch, unless `set_epoch` chose another. After a `break`,
    a new iteration restarts the epoch. After a state from the end of an epoch, the first loop ends at once, and the
    next loop delivers the next epoch. So `for epoch in range(loader.epoch, epochs)` is correct for every state.
    Iterations of one loader are independent. During a loop, `next(iter(loader))` only peeks at a batch and does not
    count; a new iteration that takes a second batch restarts the epoch, and the state then follows it. In Lightning's
    `fit` the state always follows the trainer.

    The ranks compare their plans before the first batch of a trainer's loop, and before the second batch of your own
    training loop. So in your own loop a single rank may peek at a batch or evaluate.

    With a batch sampler of headrace, a run can change at any step, and its steps can be looked up: `exclude`, `skip`,
    `reshard`, `reweight`, `load_state_dict(state, accept=...)`, `step`, `samples_of_step`, `replay`. A change takes
    effect at the loop's position: prefetched batches are dropped, and a running loop continues with the new ones. All
    ranks must make a change at the same step; they compare their plans before the next batch. If only one rank makes a
    change in mid-epoch, all ranks wait until the process group's timeout.

    The class is not a `DataLoader`, because trainers would rebuild a `DataLoader` with their own sampler.

    Args:
        dataset: Any object with `len()` and integer indices: a list, a torch or Hugging Face `Dataset`,
            `IndexedShards`. If it has `__getitems__`, it is read a batch at a time; `__getitems__` must return one
            sample for each index, in the order of the indices. The number of samples is checked; their order is
            checked if the samples are mappings with `__key__` and the dataset has `key(index)`. `names` and
            `cumulative_sizes` define its sources in reports.
        batch_sampler: The batches of this rank, with a length: lists of indices, or of other keys that the dataset
            accepts, such as pieces of long samples; `int(key)` must be the sample's index. With `begin`, `delivered`,
            `go_to` and `batches_from`, as headrace's have them, it is always at the position of the loop. With
            `state_dict` and `load_state_dict` it can resume, and with `remaining` also on another number of ranks; each
            iteration then reads a copy of it. Otherwise its batches are counted. Or a function of `num_replicas` and
            `rank` that returns a batch sampler; it is called again if the ranks change between epochs. A batch sampler
            that repeats samples may have an attribute `draws`, a number for each sample of its latest batch; with
            `seed_per="sample"` the random numbers also depend on it.
        collate_fn: Converts a list of samples to a batch, in the worker; None: torch's `default_collate`.
        num_workers: Number of worker processes; they persist across epochs.
        prefetch_factor: Batches that each worker prefetches; None: 2.
        pin_memory: Whether batches are copied to pinned memory; None: if there is a GPU.
        timeout: Seconds to wait for a batch of the workers before an error; 0 for no limit.
        multiprocessing_context: Start method of workers: "fork", "forkserver" or "spawn"; see torch.
        on_error: "raise" the error of a damaged sample (a `DamagedShardError` or `DecodeError`), or "skip" the sample,
            count it and warn. An `UnsafePickleError` is always raised.
        seed_per: What the random numbers of `random`, numpy and torch's CPU depend on. "step": on the seed, name,
            epoch, step and rank, in workers; without workers, the process's generators are not touched. "sample": on
            the seed, the epoch and the sample, and on the draw if the sample repeats in an epoch. The numbers are then
            the same with any number of ranks and workers; without workers, the process's generators are restored after
            each batch. With "sample", `__getitems__` is called for one sample at a time, except for `IndexedShards` and
            for data that are known to draw nothing: lists, tensors, and shards and Hugging Face datasets without a
            transform. The random numbers of `collate_fn` depend on the samples of the batch. "sample" costs 10 to 40
            microseconds per sample. See `sample_rng`.
        sizes: Size of each sample, shape [n] or [n, k], for `report` and `metrics`; by default those of a size-aware
            batch sampler of headrace. Sizes are capped at the batch sampler's `max_length`.
        seed: Seed of the random numbers that transforms draw; see `seed_per`.
        fingerprint: Identifies the dataset in states; None: the dataset's own `fingerprint`, else its length and, for
            lists, arrays, tensors and Hugging Face datasets, some samples.
        num_replicas: Number of data-parallel ranks. By default the batch sampler's, if it has one, else the process
            group's, else WORLD_SIZE of the environment, read at the start of an epoch.
        rank: This rank, with the same defaults.
        mesh: In place of both, a 1-D `DeviceMesh` of the data-parallel ranks, which then compare their plans.
        name: Name of the split, for messages.
        fixed_epoch: Whether every epoch is the same, as for validation: `set_epoch` is ignored.
        check_ranks: Whether the ranks compare their plans in each epoch. This needs a `DeviceMesh` as mesh, or all
            ranks of the process group.

    Attributes:
        dataset: The samples.
        indices: Indices of the samples in the latest delivered batch.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument has a value that is not allowed.

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
        pin_memory: bool | None = False,
        timeout: float = 600.0,
        multiprocessing_context: Any = None,
        on_error: OnError = "raise",
        seed_per: SeedPer = "step",
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
        self._loading = Loading(
            collate_fn=collate_fn,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            pin_memory=pin_memory,
            timeout=timeout,
            multiprocessing_context=multiprocessing_context,
            on_error=on_error,
            seed_per=seed_per,
        )
        self._given_ranks = Ranks(num_replicas, rank, mesh)
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise TypeError(f"dataset must have len() and integer indices, got {type(dataset).__name__}")
        is_factory = callable(batch_sampler) and not hasattr(batch_sampler, "__iter__")
        self._factory: Callable[[int, int], Any] | None = batch_sampler if is_factory else None
        self._factory_ranks: tuple[int, int] | None = None  # that it was called with
        self.dataset, self._name = dataset, name
        self._fingerprint = dataset_fingerprint(dataset) if fingerprint is None else str(fingerprint)
        self._seed = seed_int(seed)
        self._fixed, self._check_ranks = fixed_epoch, check_ranks
        self._batch_dataset = BatchDataset(dataset, collate_fn, on_error, seed_per)
        self._stats = DeliveryStats(name, dataset, sizes)
        self._reader = BatchReader(self._batch_dataset, self._loading)
        self._node_uses = NodeUses()
        self._progress = Progress[PlannedIteration]()
        self._resumed_at: tuple[int, int] | None = None  # epoch and steps
        self._counted_before = False  # batches from before that
        self._padding_was_named = False  # in a warning
        self.indices: Sequence[int] = ()
        self._plan: BatchPlan | None = None if is_factory else self._plan_of(batch_sampler)

    def _plan_of(self, batch_sampler: Any, make: Callable[[], Any] | None = None) -> BatchPlan:
        """How the batches of a batch sampler are read, which are counted in reports from now on."""
        repeats = None if self._loading.seed_per == "step" else len(self.dataset)
        plan = batch_plan(batch_sampler, self.dataset, self._name, make, repeats)
        self._stats.count_as(batch_sampler)
        return plan

    def __getstate__(self) -> dict[str, Any]:
        """What a copy has: all but what is under way. It continues at the position, outside of a trainer."""
        left_out = ("_reader", "_progress", "_loop", "_shown_batch_sampler", "_node_uses", "_plan")
        kept = {name: value for name, value in vars(self).items() if name not in left_out}
        sampler = None if self._factory is not None or self._plan is None else self._plan.sampler
        more = {"sampler": sampler, "state": self.state_dict(), "flags": self._progress.flags()}
        return kept | {"_stats": self._stats.emptied()} | more

    def __setstate__(self, kept: dict[str, Any]) -> None:
        vars(self).update({name: kept[name] for name in kept if name not in ("sampler", "state", "flags")})
        self._factory_ranks = None
        self._plan = None if kept["sampler"] is None else self._plan_of(kept["sampler"])
        self._reader = BatchReader(self._batch_dataset, self._loading)
        self._progress = Progress[PlannedIteration]()
        self._node_uses = NodeUses()
        self._restore(kept["state"])
        at = self._progress.place
        done = PlannedIteration(self._batches(), self.epoch, at, at.steps, self.ranks, {})
        self._progress.restore_flags(kept["flags"], done)

    def __copy__(self) -> ResumableLoader:
        other, kept = object.__new__(type(self)), self.__getstate__()
        if self._factory is None:
            kept["sampler"] = copy.deepcopy(kept["sampler"], {id(self.dataset): self.dataset})
        other.__setstate__(kept)
        return other

    @never_raises
    def __repr__(self) -> str:
        shown = inner(self._present_sampler) if self._factory is None else described(self._factory)
        return (
            f"{type(self).__name__}({self._name}: {kind_of(self.dataset)}, epoch {self.epoch}, "
            f"{counted(self.steps, 'batch')} delivered, num_workers={self.num_workers}, seed {self._seed},\n  {shown})"
        )

    def __len__(self) -> int:
        """Number of batches in the whole epoch on this rank, including those before a resumed position."""
        plan, latest = self._batches(), self._progress.iteration
        if latest is not None and (latest.under_way or latest.ranks == self.ranks):
            return latest.length
        return plan.length(self.epoch, self._progress.place if latest is None else BEGINNING)

    @property
    def batch_sampler(self) -> Any:
        """The batch sampler; with a factory, the current one."""
        return self._batches().sampler if self._shown_batch_sampler is None else self._shown_batch_sampler

    @batch_sampler.setter
    def batch_sampler(self, shown: Any) -> None:
        self._shown_batch_sampler = shown  # where a trainer looks for another one, to predict

    @property
    def num_workers(self) -> int:
        """Number of worker processes."""
        return self._loading.num_workers

    @property
    def ranks(self) -> tuple[int, int]:
        """The current number of data-parallel ranks, and this rank.

        Raises:
            ValueError: The batch sampler has other ranks than the loader.
        """
        own = None if self._factory else batch_plans.ranks_of(self._present_sampler)
        if own is None:
            return self._given_ranks.current()
        if self._given_ranks.given and (given := self._given_ranks.current()) != own:
            raise ValueError(
                f"the {self._name} loader is for rank {given[1]} of {given[0]}, and its "
                f"{type(self._present_sampler).__name__} for rank {own[1]} of {own[0]}: give num_replicas, rank or "
                "mesh to the batch sampler, and leave them out of the loader"
            )
        return own

    @property
    def accumulation(self) -> Any:
        """Number of batches in each optimizer step, from the start of the iteration; None if it is not known.

        `OptimizerStepBatchSampler` knows it.
        """
        return batch_plans.accumulation_of(self._batches().sampler)

    @property
    def _present_sampler(self) -> Any:
        """The batch sampler; None where a function makes it, and has not done so yet."""
        return None if self._plan is None else self._plan.sampler

    @property
    def steps(self) -> int:
        """Number of batches delivered in the current epoch."""
        return self._progress.position

    def _begin_at(self, epoch: int) -> None:
        super()._begin_at(epoch)
        if self._plan is not None:  # whose record one for other ranks takes over
            self._plan.go_to(epoch, BEGINNING)
        self._batches().go_to(epoch, BEGINNING)

    def state_dict(self) -> State:
        """Return the position after the last delivered batch; in a trainer, after the last batch that counted.

        A resume repeats the batch of a failed training step, and batches whose accumulated gradients have not reached
        the optimizer.

        Returns:
            A dict, the same on every rank: "version", "seed", "epoch", "steps" delivered in the epoch, "fingerprint" of
            the dataset, "seed_per", "batch_sampler" (its state), and "order" (digest of an order that this state does
            not name; else "").
        """
        self._follow_changes()
        plan, position = self._batches(), self._progress.last_counted(self._loop.steps_done())
        batches, order = plan.state(self.epoch, position, self.ranks), plan.order_digest if position.steps else ""
        seed, seed_per, steps = self._seed, self._loading.seed_per, position.steps
        return loader_state(seed, self.epoch, steps, self._fingerprint, batches, order, seed_per)

    def load_state_dict(self, state: Mapping[str, Any], accept: Collection[str] = ()) -> None:
        """Resume from a state.

        A state is ignored if a later `set_epoch` chose a newer epoch, and while a trainer fits with a data module,
        which has its own state.

        Args:
            state: The result of `state_dict`, on any rank.
            accept: Differences from the run that saved the state to accept: names of arguments of the batch sampler,
                such as {"batch_size"} or {"max_total_size"}, and "data" for samples appended to the dataset. The rest
                of the epoch, including new samples, is delivered with the new arguments.

        Raises:
            TypeError: The state is not a mapping, or the batch sampler accepts no changes.
            ValueError: The state was saved with another dataset, other sizes or options, or another seed; or with
                another number of ranks, and the batch sampler has no state.
        """
        if self._trainer is None:
            self._restore(state, accept)

    def _restore(self, state: Mapping[str, Any], accept: Collection[str] = ()) -> None:
        names = {accept} if isinstance(accept, str) else set(accept)
        prefix = self._prefix if DATA in names else None
        check_loader_state(state, self._fingerprint, self._seed, self._name, self._loading.seed_per, prefix)
        if not self._is_joined and self._progress.overrules(state["epoch"]):
            return
        self._progress.load(state["epoch"], self._batches().load(state, self.epoch, self.ranks, names))
        self._resumed_at = (state["epoch"], state["steps"]) if state["epoch"] or state["steps"] else None
        self._counted_before = self._stats.report().batches > 0

    def _prefix(self, n_samples: int) -> str | None:
        """The fingerprint of the first samples; None if the loader was given one of its own."""
        derived = self._fingerprint == dataset_fingerprint(self.dataset)
        return prefix_fingerprint(self.dataset, n_samples) if derived else None

    @property
    def excluded_indices(self) -> npt.NDArray[np.int64]:
        """The samples that `exclude` left out, ascending."""
        return batch_plans.excluded_by(self._present().sampler)

    def exclude(self, indices: Iterable[int | str]) -> None:
        """Exclude samples from now on, in every epoch; call it on every rank at the same step.

        Args:
            indices: Samples, by index, or by key if the dataset has `find(key)`, as `IndexedShards` does.

        Raises:
            TypeError: A sample is given as neither, or the batch sampler cannot exclude samples.
            ValueError: A sample does not exist, or the batch sampler cannot exclude samples in the middle of an epoch.

        >>> from headrace.webdatamodule import DistributedBatchSampler
        >>> loader = ResumableLoader(list("abcdef"), DistributedBatchSampler(6, 2, shuffle=False), collate_fn=list)
        >>> for batch in loader:
        ...     print(batch)
        ...     loader.exclude([2, 3])
        ['a', 'b']
        ['e', 'f']
        """
        if isinstance(indices, str) or not isinstance(indices, Iterable):
            raise TypeError(
                f"indices must be a list of keys or indices, got the {type(indices).__name__} {indices!r}: write "
                f"exclude([{indices!r}])"
            )
        numbers = [self._index_of(index) for index in indices]
        self._change("exclude", lambda batches: batches.exclude(numbers))

    def _index_of(self, index: int | str) -> Any:
        if not isinstance(index, str):
            return index
        if not callable(find := getattr(self.dataset, "find", None)):
            raise TypeError(
                f"indices must be ints, as {type(self.dataset).__name__} has no find(key), got the key {index!r}"
            )
        try:
            return find(index)
        except KeyError:
            raise ValueError(
                f"indices must be samples of the {self._name} data: no sample has the key {index!r}"
            ) from None

    def skip(self, steps: int) -> npt.NDArray[np.int64]:
        """Skip the next steps of this epoch, once; call it on every rank at the same step.

        Args:
            steps: Number of steps; at most the rest of the epoch is skipped. Skipped steps are not counted as steps.

        Returns:
            The skipped samples of all ranks.
        """
        skipped: npt.NDArray[np.int64] = self._change("skip", lambda batches: batches.skip(steps))
        return skipped

    def reweight(self, weights: Any) -> tuple[int, int]:
        """Change the weights of the mixture from here on; call it on every rank at the same step.

        For a batch sampler whose `sampler` is a `WeightedDistributedSampler`. The new weights begin at the next draw
        that is a multiple of 1,024 and in no window of batches that has begun. Passes over the sources continue, and
        shares are exact before and after. Every state that is saved afterwards holds the change: construct the mixture
        of a resumed run with the weights that the run began with.

        Args:
            weights: As the mixture was given them, for the same sources.

        Returns:
            The draw where the new weights begin, counted over all epochs and ranks, and the first step of the run that
            they affect (see `run_steps`).

        Raises:
            TypeError: The batch sampler has no mixture, or a weight has the wrong type.
            ValueError: The weights are not allowed, the run has not begun, or the mixture's schedule has a change that
                is still to come.
        """
        found: tuple[int, int] = self._change("reweight", lambda batches: batches.reweight(weights))
        return found

    def reshard(self, num_replicas: int | None = None, rank: int | None = None, mesh: Mesh | None = None) -> None:
        """Continue with another number of ranks in the running process: the rest of the epoch is distributed to them.

        Call it on every rank at the same step, after a launcher has made the new process group. A rank that joins
        constructs a loader and loads the state of the others. The ranks compare their plans as at the beginning of an
        epoch.

        Args:
            num_replicas: Number of data-parallel ranks; as in the constructor.
            rank: This rank.
            mesh: In place of both.
        """
        ranks = Ranks(num_replicas, rank, mesh)

        def change(batches: Any) -> None:
            batches.reshard(num_replicas, rank, mesh)
            if self._factory is not None or self._given_ranks.given or mesh is not None:
                self._given_ranks = ranks
            self._factory_ranks = self.ranks

        self._change("reshard", change)
        if (latest := self._progress.under_way) is not None:
            latest.reset_check()

    @property
    def run_steps(self) -> int | None:
        """Number of delivered steps of the run, over all epochs: the number of the next step.

        None if the batch sampler keeps no record of the run.
        """
        found: int | None = self._run_state().get("step")
        return found

    def _run_state(self) -> dict[str, Any]:
        """The batch sampler's state at the position."""
        return self._batches().state(self.epoch, self._progress.last_counted(), self.ranks)

    def step(self, number: int, *, num_replicas: int | None = None, rank: int | None = None) -> Any:
        """Return the samples of any step of the run, past or future, rank by rank.

        Steps are numbered from the start of the run, over all epochs; `run_steps` is the number of the next step. Past
        steps are returned as they were delivered, whatever changed since.

        Args:
            number: Number of the step.
            num_replicas: Number of ranks for a future step; by default the current one. In a single process without a
                process group and a trainer, such as a notebook, it is that of the loaded state, until the first batch.
                A past step has the number that it ran with.
            rank: Rank whose samples to return; None: all ranks.

        Returns:
            A list of indices for each rank, or the list of `rank`.

        Raises:
            IndexError: The run has no such step.
            TypeError: The batch sampler keeps no record of the run.
            ValueError: The step ran with too few ranks for `rank`.
        """
        batches = self._present().changing("step")
        world = self._ranks_of_state() if num_replicas is None else num_replicas
        return batches.step(number, num_replicas=world, rank=rank)

    def _ranks_of_state(self) -> int | None:
        """The number of ranks that saved the loaded state, for a process that only looks at the run."""
        looks = self.resumed and self._trainer is None and process_group() is None and self.ranks[0] == 1
        return batch_plans.recorded_ranks(self._run_state()) if looks else None

    def samples_of_step(self, number: int) -> list[dict[str, Any]]:
        """Return one row per sample of any step of the run: "step", "rank", "index", and what the dataset knows.

        A dataset with `key(index)` adds "key". Shards also add "shard", "offset" (of the data in the shard, in bytes)
        and, if there are several sources, "source". `pandas.DataFrame(rows)` makes a table of the rows.

        Args:
            number: Number of the step; see `step`.
        """
        return [
            {"step": number, "rank": rank, "index": int(index), **sample_place(self.dataset, int(index))}
            for rank, indices in enumerate(self.step(number))
            for index in indices
        ]

    def replay(self, number: int, *, rank: int | None = None) -> Any:
        """Return the batch of any step of the run, read and collated in this process; the position does not change.

        With `seed_per="sample"` it is bit-equal to the batch that was trained on, augmentation included; only samples
        that the order repeats get other random numbers. With "step" all samples do.

        Args:
            number: Number of the step; see `step`.
            rank: Rank of the batch; by default this rank.
        """
        rank = self.ranks[1] if rank is None else rank
        indices = self.step(number, rank=rank)
        epoch = self.epoch
        if self._loading.seed_per == "sample":
            epoch = self._present().changing("epoch_of_step").epoch_of_step(number, self._ranks_of_state())
        keys = self._keys(epoch, rank)
        read = self._batch_dataset.__getitems__(Request(indices, keys, number))
        made = self._batch_dataset.collate(read)
        if made.error is not None:
            raise made.error
        return made.batch

    def _present(self) -> BatchPlan:
        """The batches of the latest iteration, or of the next one."""
        latest = self._progress.iteration
        return self._batches() if latest is None else latest.plan

    def _change(self, method: str, change: Callable[[Any], Any]) -> Any:
        """Change the batches from the position of the loop on; what was read ahead is dropped."""
        plan, progress = self._present(), self._progress
        result = change(plan.changing(method))
        if progress.iteration is None:
            position = Position(progress.place.steps, plan.place())
            progress.put(progress.epoch, position, resumed=progress.resumed)
        else:
            self._request_anew(progress.iteration)
        return result

    def _follow_changes(self) -> None:
        """Request batches anew where somebody has changed or read the batch sampler itself."""
        latest = self._progress.under_way
        if latest is not None and latest.plan.has_moved():
            self._request_anew(latest)

    def _request_anew(self, latest: PlannedIteration) -> None:
        """Let the latest iteration continue where its run is after a change."""
        plan = latest.plan
        position = latest.positions[-1] = plan.settled(latest.epoch, latest.position)
        if latest.under_way:
            latest.in_flight.clear()
            latest.ranks = self._stats.rank = self.ranks
            latest.length, latest.compared = self._planned(plan, latest.epoch, position)
            latest.changed = latest.compared["changed"] = True
            self._loop.resize(latest.length)
            latest.batches = _begun(plan, latest.epoch, position)
            self._start(latest, latest.reader)

    def report(self) -> LoaderReport:
        """Return statistics of the delivered batches; after a resume also the progress of the epoch."""
        sampler, latest = self._present_sampler, self._progress.iteration
        resumed, (cost, _) = None, batch_plans.budgets_of(sampler)
        if self._resumed_at is not None:
            length, counted = None if latest is None else latest.length, self._counted_before
            resumed = Resumed(*self._resumed_at, self.epoch, self.steps, length, counted)
        packed = isinstance(cost, str) and cost == "sum"
        over_budget, asked = batch_plans.skipped_by(sampler), batch_plans.asked_shares(sampler)
        return self._stats.report(over_budget, packed=packed, resumed=resumed, asked=asked)

    def metrics(self) -> dict[str, float]:
        """Return figures of the batches that this loader has delivered since the last call, for a logger.

        Returns:
            "data/samples_per_second". With sizes (of the loader or the batch sampler): "data/tokens_per_second" (from
            the sum of the sizes), "data/padding" (share of padded batches that is padding) and, if the batch sampler
            has a budget, "data/fill" (share of the budget that is used, of several that which is used most). With
            several sources: "data/share/NAME" (share
            of the samples) and, with sizes, "data/token_share/NAME" (share of the tokens); of a mixture also
            "data/asked_share/NAME" or, where its shares refer to tokens, "data/asked_token_share/NAME".
            "data/wait_seconds" and "data/wait_share": the time that the loop waited for data, and its share of the
            total. All figures are those of this rank. Empty if there was no batch.

        >>> loader = ResumableLoader(list("abcdef"), [[0, 1], [2, 3], [4, 5]])
        >>> batches = list(loader)
        >>> sorted(loader.metrics())
        ['data/samples_per_second', 'data/wait_seconds', 'data/wait_share']
        """
        asked = partial(batch_plans.asked_shares, self._present_sampler)
        return self._stats.metrics(*batch_plans.budgets_of(self._present_sampler), asked)

    def close(self) -> None:
        """End the workers and close the files of `IndexedShards`; both are restored when needed."""
        self._reader.close()
        if isinstance(self.dataset, IndexedShards):  # others may stay closed
            self.dataset.close()

    @property
    def _iterator(self) -> Any:
        # Where trainers look for workers to end after an error.
        return self._reader.iterator

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        self._reader.iterator = iterator

    def _batches(self) -> BatchPlan:
        """The batches of the ranks there are now, at the present position."""
        before = self._plan
        if before is not None and (self._factory is None or self.ranks == self._factory_ranks):
            return before
        ranks, progress = self.ranks, self._progress
        mid_epoch = progress.place.steps > 0 and not progress.begun
        state = None if before is None else before.state(self.epoch, progress.last_counted(), ranks)
        if mid_epoch and (before is None or not batch_plans.has_state(before.sampler)):
            raise ValueError(f"the number of ranks changed in the middle of an epoch, to {ranks[0]}")
        make = partial(cast(Callable[[int, int], Any], self._factory), *ranks)  # without one there is a plan
        self._plan = plan = self._plan_of(make(), make)
        self._factory_ranks = ranks
        plan.go_to(self.epoch, BEGINNING)
        place = None if state is None else plan.take_over(state, self.epoch, within_epoch=mid_epoch)
        if not progress.begun:
            progress.put(progress.epoch, Position(progress.place.steps, place), resumed=progress.resumed)
        return plan

    def _count(self) -> Iterator[Any]:
        iteration = self._begin()
        yield from self._read(iteration, self._reader, checked=True)
        if iteration.finished:
            return
        # A later iteration has the workers and the position.
        if not self._progress.begun and iteration.position.steps < iteration.length:
            warnings.warn(
                f"an iteration of epoch {iteration.epoch} of the {self._name} loader continues after set_epoch or "
                "load_state_dict: no state counts its batches. Call these before the loop",
                stacklevel=3,
            )
        if (rest := iteration.plan.rest(iteration.epoch, iteration.position)) is not None:
            iteration.in_flight.clear()
            iteration.batches = rest
        with self._other_reader() as reader:
            self._start(iteration, reader)
            yield from self._read(iteration, reader, checked=False)

    def _begin(self) -> PlannedIteration:
        """Start the iteration that counts, its workers included."""
        self._batches()
        self._begin_next()
        plan, progress = self._batches(), self._progress
        last_positions = 2 if self._trainer is None else self._trainer.accumulate_grad_batches + 1
        plan.go_to(progress.epoch, progress.place)
        length, compared = self._planned(plan, progress.epoch, progress.place)
        iteration = self._iteration(plan, progress.place, length, compared, last_positions)
        iteration.batches = _begun(plan, progress.epoch, progress.place)
        if iteration.ranks[0] > 1 and not (
            self._factory or self._given_ranks.given or batch_plans.ranks_of(plan.sampler)
        ):
            warnings.warn(
                f"the {self._name} loader has {iteration.ranks[0]} ranks, and its {plan.kind} names none, "
                "so every rank may read the same samples: give it a DistributedBatchSampler or a DistributedSampler. "
                "If these batches are one rank's part already, give the loader num_replicas and rank; if every rank is "
                "to read all of them, num_replicas=1 and rank=0",
                stacklevel=4,
            )
        progress.begin(iteration)
        self._stats.rank = iteration.ranks
        self._start(iteration, self._reader)
        return iteration

    def _iteration(
        self, plan: BatchPlan, start: Position, length: int, compared: dict[str, Any], last_positions: int = 2
    ) -> PlannedIteration:
        world, rank = self.ranks
        if world > 1 and batch_plans.gives_all_ranks(plan.sampler):
            raise ValueError(
                f"batch_sampler must give the batches of this rank, got one with rank={plan.sampler.rank!r}, so that "
                f"each of {world} ranks would train on all of them: leave out rank"
            )
        return PlannedIteration(plan, self.epoch, start, length, (world, rank), compared, last_positions)

    def _planned(
        self, plan: BatchPlan, epoch: int, start: Position, length: int | None = None
    ) -> tuple[int, dict[str, Any]]:
        """The length of an epoch, and what the ranks compare of an iteration from a position on."""
        length, state = plan.length(epoch, start) if length is None else length, plan.state(epoch, start, self.ranks)
        return length, {
            "epoch": epoch,
            "steps done": start.steps,
            "steps": length,
            "order and batches": state.get("fingerprint"),
            "order": plan.order_digest,
            "shards": self._fingerprint,
            "seed_per": self._loading.seed_per,
            **plan.compared(state),
        }

    def _start(self, iteration: PlannedIteration, reader: BatchReader) -> None:
        """Request the first batches; the workers are started before the ranks compare their plans."""
        iteration.reader, next_uses = reader, None
        if self._batch_dataset.keeps_samples:
            next_uses = self._node_uses.of(iteration.plan.sampler, iteration.ranks, iteration.epoch)
        reader.start(iteration.requests(self._keys(iteration.epoch, iteration.ranks[1]), next_uses))

    def _keys(self, epoch: int, rank: int) -> Keys:
        """The keys of the random numbers of an epoch."""
        name = int.from_bytes(self._name.encode()[:7], "big")
        return Keys(int(fold_in(self._seed, epoch, rank, name)[0]), epoch_key(self._seed, epoch))

    def _read(self, iteration: PlannedIteration, reader: BatchReader, *, checked: bool) -> Iterator[Any]:
        """The batches of an iteration, which are noted while it is the latest one.

        With the workers of the loader it stops as soon as another one has them. `checked` says whether the ranks
        compare their plans.
        """
        compares_after = batches_before_comparing(in_trainer=self._trainer is not None, evaluates=self._fixed)
        iteration.under_way, sum_budget = True, self._sum_budget()
        try:
            while True:
                if self._progress.under_way is iteration:
                    self._follow_changes()
                compares = iteration.batches_since_check == compares_after or (
                    iteration.changed and compares_after is not None
                )
                if compares and checked and self._check_ranks:
                    iteration.changed = False
                    compare_plans(iteration.compared, self._name, iteration.ranks[0], self._given_ranks.mesh)
                if reader is self._reader and self._progress.under_way is not iteration:
                    return
                if self._progress.under_way is iteration:
                    self._loop.log(self.metrics)
                asked = time.perf_counter()
                if (delivered := reader.next()) is None:
                    break
                late = (came := time.perf_counter()) - asked > LATE
                batch, skipped, error, traffic = delivered
                if error is not None:
                    iteration.in_flight.popleft()
                    raise error
                planned = iteration.deliver(skipped)
                if self._progress.move(iteration, iteration.position.steps):
                    iteration.plan.delivered(planned)
                    self._stats.wait(asked, came)
                    self._note(planned.samples, skipped)
                    if traffic is not None:
                        self._stats.add_remote(traffic, late=late)
                    if sum_budget is not None and not self._padding_was_named:
                        self._warn_if_padded(batch, sum_budget)
                iteration.batches_since_check += 1
                yield batch
            if iteration.in_flight:
                raise RuntimeError(f"the workers of the {self._name} loader ended before its batches did")
            iteration.finished = True
        except Exception as error:
            self._explain(error, iteration)
            if reader is not self._reader or self._progress.under_way is iteration:
                reader.close()  # left to the garbage collection, it takes 5 seconds a worker
            raise
        finally:
            iteration.under_way = False

    def _adopt(self, iteration: PlannedIteration) -> None:
        planned, skipped = iteration.delivered
        iteration.plan.adopt(iteration.epoch, iteration.start, planned)
        super()._adopt(iteration)
        self._note(planned.samples, skipped)

    @contextmanager
    def _independent(self, start: Position, *, checked: bool) -> Iterator[tuple[PlannedIteration, Iterator[Any]]]:
        plan = self._batches()
        length, batches = plan.beside(self.epoch, start)
        length, compared = self._planned(plan, self.epoch, start, length)
        iteration = self._iteration(plan, start, length, compared)
        iteration.batches = batches
        with self._other_reader() as reader:
            self._start(iteration, reader)
            yield iteration, self._read(iteration, reader, checked=checked)

    @contextmanager
    def _other_reader(self) -> Iterator[BatchReader]:
        """Workers beside those of the loader."""
        reader = BatchReader(self._batch_dataset, self._loading)
        try:
            yield reader
        finally:
            reader.close()

    def _note(self, indices: Sequence[int], skipped: list[SkippedSample]) -> None:
        if skipped:
            without = {sample[0] for sample in skipped}
            indices = [index for index in indices if int(index) not in without]
        self.indices = indices
        if not self._loop.counts():
            return
        self._stats.add(indices)
        self._loop.on_batch(indices)
        for sample in skipped:
            if self._stats.skip(SkippedSample(*sample)):
                warn_of_skipped(sample, len(self._stats.skipped))

    def _sum_budget(self) -> float | None:
        """The budget of batches that counts the sum of the sizes; None without one."""
        cost, budgets = batch_plans.budgets_of(self._present_sampler)
        return budgets[0] if isinstance(cost, str) and cost == "sum" and budgets else None

    def _warn_if_padded(self, batch: Any, budget: float) -> None:
        """Warn once of a batch that is padded beyond a budget which counts the sum of the sizes."""
        found = padded_beyond(batch, len(self.indices), partial(self._stats.longest_of, self.indices), budget)
        if found is None:
            return
        self._padding_was_named = True
        count, length = found
        warnings.warn(
            f"a batch of the {self._name} loader is padded to {count} x {length:,} = {count * length:,}, and its "
            f"budget max_total_size={budget:,.0f} counts the sum of the sizes: give the batch sampler cost='padded', "
            "or concatenate the samples in collate_fn instead of padding them",
            stacklevel=5,
        )

    def _explain_if_own(self, error: BaseException) -> None:
        """Explain the error of a killed worker, which may interrupt a training step, outside of an iteration."""
        pids = [str(worker.pid) for worker in getattr(self._iterator, "_workers", ())]
        iteration = self._progress.under_way
        if iteration is not None and isinstance(error, RuntimeError) and any(pid in str(error) for pid in pids):
            self._explain(error, iteration)

    def _explain(self, error: Exception, iteration: PlannedIteration) -> None:
        """Add a note to the error of a worker that died or was too late: the samples that were waited for."""
        # A killed worker is told by torch's own text alone.
        died = isinstance(error, RuntimeError) and "DataLoader worker" in str(error)
        if iteration.in_flight and (died or isinstance(error, WorkerTimeoutError)):
            indices = iteration.in_flight[0].samples
            shown = ", ".join(describe_sample(self.dataset, int(index)) for index in indices[:3])
            rest = f" and {len(indices) - 3} more" if len(indices) > 3 else ""
            batch = f"batch {iteration.position.steps} of epoch {iteration.epoch}"
            error.add_note(f"the {self._name} loader waited for {batch}: {shown}{rest}")


def _begun(plan: BatchPlan, epoch: int, position: Position) -> Iterator[BatchAt]:
    """Batches from a position on; the iteration begins with the first, when the workers have started."""
    yield from plan.begin(epoch, position)
