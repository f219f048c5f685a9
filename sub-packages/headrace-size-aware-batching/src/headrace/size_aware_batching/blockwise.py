"""Planned batches of a dataset whose sizes do not fit into a process: block by block."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy, deepcopy
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from headrace.size_aware_batching._display import never_raises
from headrace.size_aware_batching._keywords import explains_keywords
from headrace.size_aware_batching._validation import (
    UNLIMITED,
    checked_epoch,
    checked_int,
    checked_seed,
    counted,
    one_of,
    shortlist,
    shown,
)
from headrace.size_aware_batching.distributed import EpochSetter, warn_of_repetition
from headrace.size_aware_batching.planning.as_sampler import refuse_as_sampler
from headrace.size_aware_batching.planning.block_counts import BlockCounts
from headrace.size_aware_batching.planning.blocks import (
    Blocks,
    before_each,
    counting_planner,
    read_block,
    shuffled,
)
from headrace.size_aware_batching.planning.costs import CostFunction
from headrace.size_aware_batching.planning.cursor import EpochCursor
from headrace.size_aware_batching.planning.distribution import distribute_steps, last_known, n_steps
from headrace.size_aware_batching.planning.fingerprint import WHOLE, differing, fingerprint, of_such_parts
from headrace.size_aware_batching.planning.last_step import TAILS, Balance, Batches, Tail, balance_evenly
from headrace.size_aware_batching.planning.limits import plain_budget
from headrace.size_aware_batching.planning.options import (
    STREAM_OVERSIZE,
    Options,
    Strategy,
    StreamOversize,
    complete_record,
    default_cost,
)
from headrace.size_aware_batching.planning.plan_cache import PlanCache
from headrace.size_aware_batching.planning.planner import Planner, last_below, make_planner
from headrace.size_aware_batching.planning.prepared import PreparedSizes, prepare, warn_of_skipped
from headrace.size_aware_batching.planning.random import fold_in
from headrace.size_aware_batching.planning.ranks import Mesh, Ranks, process_group, refuse_sharding_again
from headrace.size_aware_batching.planning.run_record import RunRecord, plain
from headrace.size_aware_batching.sizes.read import capped_sizes, column_limits, size_vector

VERSION = 1
STATE = ("version", "seed", "epoch", "position", "fingerprint", "sizes")
SHARDS, ORDER = 7, 8  # what keys are for: the order of all shards, and that of an epoch's blocks
CURE = "cut them in the collate function and count them so with max_length=, or choose oversize='skip' or 'own_batch'"


class PlannedBlock(NamedTuple):
    """A block that is planned: its number, its plan, and which of its samples are too large, by their places in it."""

    number: int
    planner: Planner
    sizes: NDArray[Any]
    oversize: NDArray[np.int64]


class BlockwiseSizeAwareBatchSampler(Sampler[list[int]]):
    """Batches that fill a budget, for so many samples that their sizes do not fit into the memory of a process.

    The dataset is a list of shards: consecutive ranges of samples, whose sizes a function returns. Shards are shuffled
    and grouped into blocks of about ``block`` samples. A block is planned as `DistributedSizeAwareBatchSampler` plans
    an epoch, and one block is in memory at a time.

    The batches of an epoch are those of its blocks, in order. In step s, rank r gets batch ``s * num_replicas + r``. A
    step may take the last batches of one block and the first batches of the next; only the last step of the epoch needs
    ``tail``. Each sample comes exactly once, no batch exceeds the budget, every rank has the same number of steps, and
    all ranks have the same plan.

    **Order.** Random on two levels: blocks come in another order in every epoch, and the samples of a block are
    shuffled as those of an epoch are. The shards of a block are a random choice of all shards, and the same in every
    epoch: samples of two blocks share no batch, except in the last step of an epoch.

    **Epochs, resuming, steps.** As in `DistributedSizeAwareBatchSampler`: ``set_epoch(e)`` chooses the epoch,
    ``state_dict()`` is the position of the latest iteration, and ``load_state_dict(state)`` resumes there, at any world
    size. ``step(n)`` returns the samples of any past or coming step. A resume plans one block, or two at the end of a
    block.

    **Length.** ``len()`` is exact, and depends on all sizes: the first call reads them once, a block at a time. With
    ``"stratified"``, ``"bucketed"`` and ``"packed"`` and whole sizes below 65,536 of one column, the sizes are only
    counted; otherwise each block is planned. The result holds for all epochs, but with a shuffled ``"sequential"`` for
    one epoch. With ``plan_cache`` ranks share the work. ``remaining`` needs the blocks that are left. Iterating needs
    neither.

    **What it does not have.** `DistributedSizeAwareBatchSampler` also takes ``sampler``, ``shapes``, ``curriculum``,
    ``work``, ``tokens_per_step``, ``accumulate`` and ``oversize="split"``, changes in the middle of a
    run (``exclude``, ``skip``, ``reshard``, ``accept=``), and has ``plan``, ``report``, ``batch`` and
    ``worst_batches``. None of these exist here: they need all sizes at once, or are not implemented yet. Shards cannot
    be appended in the middle of a run.

    Args:
        sizes: ``sizes(shard)`` returns the sizes of the samples of a shard, by its number: in any form that
            `DistributedSizeAwareBatchSampler` takes, shape ``[n]`` or ``[n, k]``, the same each time. Or a list with
            such sizes for each shard, such as memory maps.
        max_total_size: Budget of a batch, in the unit of the cost; for sizes of shape ``[n, k]`` a sequence of k.
        lengths: Number of samples of each shard, shape ``[shards]``, as a manifest has it; the samples of a shard
            follow those of the shard before. By default the lengths of a list of ``sizes``.
        block: Samples of a block, about: whole shards, at most the longest shard more than this. A process holds some 8
            bytes for each of them while it plans. More samples give a better shuffle.
        strategy: As in `DistributedSizeAwareBatchSampler`, within a block.
        cost: Likewise. If it is a function, states record only that.
        shuffle: Whether every epoch is another one. Without it the shards come in their order, and with
            ``"sequential"`` the samples, too.
        seed: Key of all randomness, 0 to 2**64 - 1.
        max_items: Largest number of samples in a batch.
        batch_size_multiple: As in `DistributedSizeAwareBatchSampler`.
        length_multiple: Likewise.
        oversize: Policy for a sample that exceeds a budget by itself: ``"raise"`` an error when its block is planned
            (the default), ``"skip"`` the sample, with a warning for each block, or give it its ``"own_batch"``, over
            the budget.
        tail: Policy for the last batches of an epoch, as in `DistributedSizeAwareBatchSampler`. If nearly every batch
            has a single sample, ``"split"`` reads to the end of the epoch before the first batch: use ``"pad"`` then.
        num_replicas: Number of data-parallel ranks, by default that of ``torch.distributed``.
        rank: Rank of this process, likewise. ``"all"``: the batches of all ranks, step by step.
        mesh: In place of both: a 1-D ``DeviceMesh`` of the data-parallel ranks.
        max_length: Sizes count as at most this; the collate function has to cut the samples.
        window: Samples that are planned together.
        balanced_ranks: Number of ranks for which steps have equal work, as in `DistributedSizeAwareBatchSampler`.
            Groups restart in each block, so some steps straddle two groups: give a multiple of your number of ranks.
        plan_cache: Directory that records the number of batches of each block. All ranks and later runs then share the
            counting for ``len()``: each begins with other blocks, and reuses the counts of the others. Best on a file
            system that all nodes share. Not for a shuffled ``"sequential"``. None: every process counts all.

    Attributes:
        n_samples: Number of samples of the dataset.
        n_blocks: Number of blocks.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument has a value that is not allowed. While iterating: if a sample is too large and
            ``oversize="raise"``, the sizes of a shard are not those that ``lengths`` or a loaded state says, or
            ``tail="drop"`` leaves nothing.

    Example:
        >>> shards = [[4, 1, 3], [2, 5], [1, 1, 1]]
        >>> sampler = BlockwiseSizeAwareBatchSampler(
        ...     shards.__getitem__, 5, lengths=[3, 2, 3], block=4, strategy="sequential", shuffle=False
        ... )
        >>> sampler.n_blocks, len(sampler), list(sampler)
        (2, 4, [[0, 1], [2, 3], [4], [5, 6, 7]])
    """

    @explains_keywords
    def __init__(
        self,
        sizes: Callable[[int], Any] | Sequence[Any],
        max_total_size: float | Sequence[float],
        *,
        lengths: Any = None,
        block: int = 100_000_000,
        strategy: Strategy = "stratified",
        cost: Literal["sum", "padded"] | CostFunction | None = None,
        shuffle: bool = True,
        seed: int = 0,
        max_items: int | None = None,
        batch_size_multiple: int = 1,
        length_multiple: int = 1,
        oversize: StreamOversize = "raise",
        tail: Tail = "split",
        num_replicas: int | None = None,
        rank: int | Literal["all"] | None = None,
        mesh: Mesh | None = None,
        max_length: float | Sequence[float | None] | None = None,
        window: int | None = None,
        balanced_ranks: int = 64,
        plan_cache: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        if cost is None:
            cost = default_cost(strategy)
        one_of("oversize", oversize, STREAM_OVERSIZE)
        one_of("tail", tail, TAILS)
        self.options = Options(
            strategy,
            cost,
            shuffle,
            max_items,
            batch_size_multiple,
            length_multiple,
            oversize,
            window,
            balanced_ranks=balanced_ranks,
        )
        self.tail: Tail = tail
        self.seed = checked_seed(seed)
        self.max_total_size = plain_budget(max_total_size)
        self.max_length = max_length
        self.block = checked_int("block", block, 1)
        self._of_all = isinstance(rank, str)
        if isinstance(rank, str):
            if rank != "all":
                raise ValueError(f'rank must be an int >= 0 or "all", got {shown(rank)}')
            if mesh is not None:
                raise ValueError("mesh and rank='all' were both given: give num_replicas=mesh.size() in place of mesh")
            rank = None
        self._ranks = Ranks(num_replicas, rank, mesh)
        self._sizes_of, found = _shards(sizes, lengths)
        self.n_samples = int(found.sum())
        key = int(fold_in(self.seed, SHARDS)[0]) if self.options.shuffle else None
        self._blocks = Blocks(found, -(-self.n_samples // self.block), key)
        self._cursor, self._record = EpochCursor(), RunRecord()  # positions count samples of the epoch's blocks
        self._planned: PlannedBlock | None = None  # the latest one, of any epoch
        self._counts: dict[tuple[int | None, int], int] = {}  # batches of each block, by the epoch where that matters
        self._checksums: dict[int, str] = {}  # of the sizes of each block that was read or noted
        self._loaded: tuple[int, str] | None = None  # the block of the latest state, and the checksum there
        self._skipped: dict[int, NDArray[np.int64]] = {}  # of each block that was planned
        self._sequences: tuple[int, NDArray[np.int64], NDArray[np.int64]] | None = None
        self._parts = {
            "lengths": found,
            "block": self.block,
            "max_total_size": self.max_total_size,
            **self.options.parts,
            "cost": self.options.batch_cost.name,
            "seed": self.seed,
            "tail": self.tail,
            "max_length": self.max_length,
        }
        self._fingerprint = fingerprint(self._parts)
        # Whether a block has as many batches in every epoch.
        self._even_counts = not self.options.shuffle or self.options.strategy != "sequential"
        self._noted: BlockCounts | None = None
        if plan_cache is not None and self._even_counts and not callable(cost):
            self._noted = BlockCounts(PlanCache(plan_cache).directory, self._fingerprint[:WHOLE])
        self._record.note(0, 0, self._settings())

    @property
    def sampler(self) -> EpochSetter:
        """Sets the epoch: Lightning calls ``batch_sampler.sampler.set_epoch``."""
        return EpochSetter(self)

    @property
    def batch_sampler(self) -> EpochSetter:
        """Sets the epoch: Hugging Face's ``Trainer`` calls ``loader.batch_sampler.batch_sampler.set_epoch``."""
        return EpochSetter(self)

    @property
    def n_blocks(self) -> int:
        """Number of blocks."""
        return len(self._blocks)

    @property
    def epoch(self) -> int:
        """The epoch of the latest iteration, or of the next one."""
        return self._cursor.epoch

    @property
    def num_replicas(self) -> int:
        """Number of data-parallel ranks, as it is now."""
        return self._ranks.world_size()

    @property
    def rank(self) -> int | Literal["all"]:
        """Rank of this process, as it is now, or ``"all"``."""
        return "all" if self._of_all else self._ranks.current()[1]

    @property
    def fingerprint(self) -> str:
        """Hex string that stands for the lengths of the shards, the options and the seed; not for the sizes."""
        return self._fingerprint

    @property
    def skipped_indices(self) -> NDArray[np.int64]:
        """The samples that no epoch delivers, ascending, of the blocks that this process has planned or counted."""
        return np.sort(np.concatenate([np.zeros(0, np.int64), *self._skipped.values()]))

    @property
    def excluded_indices(self) -> NDArray[np.int64]:
        """None: samples cannot be excluded here."""
        return np.zeros(0, np.int64)

    def exclude(self, indices: Iterable[int]) -> None:
        """Refuse to leave samples out in the middle of a run.

        Raises:
            ValueError: If there are any.
        """
        if len(found := list(indices)):
            raise ValueError(
                f"{type(self).__name__} cannot exclude samples, got {shown(found)}: leave them out where they are "
                "read, such as on_error='skip' of ResumableLoader, or begin a new run without their shards"
            )

    @property
    def remaining(self) -> int:
        """Batches of the epoch that each rank has not received yet; the sizes of all that is left are read for it."""
        return self._n_batches(self._count_from(self.epoch, self._cursor.position))

    def __len__(self) -> int:
        """Return the number of batches that each rank gets in the whole epoch; the first call reads all sizes."""
        n_batches = self._count_all(self.epoch, list(range(self.n_blocks)))
        if self.tail == "drop" and 0 < n_batches < self.num_replicas:
            self._refuse_empty(self.num_replicas)
        return self._n_batches(n_batches)

    @never_raises
    def __repr__(self) -> str:
        ranks = "ranks unknown"
        with suppress(ValueError):  # of an environment that contradicts what was given
            ranks = counted(self.num_replicas, "rank")
        budget = self.max_total_size
        figures = [
            counted(self.n_samples, "sample"),
            counted(len(self._blocks.lengths), "shard"),
            counted(self.n_blocks, "block"),
            f"budget {' and '.join(f'{one:,}' for one in (budget if isinstance(budget, list) else [budget]))}",
            self.options.strategy,
            f"all {ranks}" if self._of_all else ranks,
            f"epoch {self.epoch}",
            f"seed {self.seed}",
        ]
        return f"{type(self).__name__}({', '.join(figures)})"

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's batches, from the position that was loaded, else from the beginning of the epoch."""
        # All of this runs at the first ``next``: a DataLoader may make an iterator that it never uses.
        refuse_as_sampler(self)
        refuse_sharding_again(None if self._of_all else 'rank="all"', uneven=True)
        of_all = self._of_all
        if of_all:
            replicas, rank = self._ranks.world_size(), (process_group() or (1, 0))[1]
        else:
            replicas, rank = self._ranks.current()
        epoch = self.epoch
        self._plan_at(epoch, self._cursor.start)  # which may refuse it
        this, begun = self._cursor.begin(), self._cursor.position
        self._record.begin(epoch, begun, self._settings(replicas))
        step, given, done = self._record.step, 0, 0
        places = _Places(begun)
        lists = self._lists(epoch, begun, places, warns=rank == 0)
        distributed = distribute_steps(lists, replicas, self.tail, self._balance())
        for steps, is_last in (
            last_known(distributed) if self.tail == "drop" else ((steps, False) for steps in distributed)
        ):
            offsets = steps.offsets
            repeated_from = len(offsets) - 1 - steps.repeated
            if steps.repeated and self.tail == "split":
                again = self._blocks.samples(steps.indices[offsets[repeated_from] :]).tolist()
                warn_of_repetition(again, replicas, steps.repeated)
            for number in range(0 if of_all else rank, len(offsets) - 1, 1 if of_all else replicas):
                reached = number + (1 if of_all else replicas - rank)  # of this list of batches
                given += 1
                position = places.position(done + int(offsets[min(reached, repeated_from)]))
                if is_last and reached >= repeated_from:
                    position = self.n_samples  # what is dropped behind it has had its turn
                if self._cursor.move(this, position):
                    self._record.step = step + (given // replicas if of_all else given)
                span = slice(int(offsets[number]), int(offsets[number + 1]))
                yield self._blocks.samples(steps.indices[span]).tolist()
            done += int(offsets[repeated_from])
        if self.tail == "drop" and begun == given == 0 and places.listed:
            self._refuse_empty(replicas)
        if self._cursor.move(this, self.n_samples) and self.options.shuffle:
            self._cursor.finish(this, begun, self)

    def step(self, number: int, *, num_replicas: int | None = None, rank: int | None = None) -> Any:
        """Return the samples of any step of the run, past or coming, rank by rank.

        Steps are numbered from the start of the run over all epochs; ``"step"`` of a state is the one that comes next.
        The blocks between the position and the step are counted, where they were not yet, and one or two are planned.

        Args:
            number: The step.
            num_replicas: Number of ranks for a coming step; those there are by default. A past step had its own.
            rank: Of which rank; None for all of them.

        Returns:
            A list of samples for each rank, or that of one ``rank``.

        Raises:
            IndexError: If no epoch ever gets there, as all are empty.
            ValueError: If the run had a number of ranks that has no such ``rank``.
        """
        number = checked_int("number", number)
        world = self.num_replicas if num_replicas is None else checked_int("num_replicas", num_replicas, 1)
        record = self._record
        epoch, position, ahead, of_all = self.epoch, self._cursor.position, number - record.step, self._of_all
        if past := bool(record.starts) and record.starts[0] <= number < record.step:
            epoch = record.epoch_of(number)
            part = [part for part in record.parts(epoch) if part.step <= number][-1]
            position, ahead = part.position, number - part.step
            world, of_all = part.settings["world"], part.settings.get("all", False)
        empty = False
        while True:
            found, steps = self._step_behind(epoch, position, ahead, world, of_all)
            if found is not None:
                break
            if past or ahead < 0 or (empty and not steps):
                raise IndexError("number must be a step of the run, got one that it does not have")
            epoch, position, ahead, empty = epoch + 1, 0, ahead - steps, not steps
        if rank is None:
            return found
        return found[checked_int("rank", rank, end=len(found), noun=", the ranks of that step")]

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch to iterate over next; a loaded position of another epoch is dropped."""
        self._cursor.choose(checked_epoch(epoch))

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from.

        Version, seed, epoch, position, fingerprint, the record of the run, and "sizes", a checksum of the sizes of the
        block that the position is in; empty at the beginning of a block.
        """
        position = self._cursor.position
        place, inside = self._place(self.epoch, position)
        checksum = self._checksum(int(self._sequence(self.epoch)[0][place])) if inside else ""
        values = (VERSION, self.seed, self.epoch, position, self._fingerprint, checksum)
        record = self._record.state(self.epoch, position, self._settings())
        return dict(zip(STATE, values, strict=True)) | record

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume where a state was taken, at any world size: the rest of the epoch is distributed anew.

        A state of an older epoch than one that was set and not iterated yet changes nothing: ``set_epoch`` wins.

        Args:
            state: The result of ``state_dict()``.

        Raises:
            TypeError: If it is not a mapping.
            ValueError: If it is a state of other shards, options or another seed, or not such a state at all. Sizes are
                compared with those of the state when their block is planned.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"state must be a dict that state_dict() returned, got {type(state).__name__}")
        epoch = self._checked_epoch_of(state)
        position = checked_int("position", state["position"], end=self.n_samples + 1, noun=", the samples of the epoch")
        record = complete_record(RunRecord.of({**state, "epoch": epoch, "position": position}))
        if self._cursor.overrules(epoch):
            return
        place, inside = self._place(epoch, position)
        loaded = (int(self._sequence(epoch)[0][place]), str(state["sizes"])) if inside and state["sizes"] else None
        if loaded and self._checksums.get(loaded[0], loaded[1]) != loaded[1]:
            raise self._other_sizes(loaded[0])
        self._loaded, self._record = loaded, record
        self._cursor.resume(epoch, position)

    def _checked_epoch_of(self, state: Mapping[str, Any]) -> int:
        """Refuse a state that another sampler saved; its epoch."""
        if not set(state) >= set(STATE):
            keys = shortlist(list(map(str, islice(state, 10))), len(state))
            raise ValueError(
                f"state must be one of {type(self).__name__}.state_dict(), a dict of {', '.join(STATE)}, got a dict "
                f"with the keys {keys}"
            )
        cures = {
            "version": "it comes from another version of headrace or another class",
            "seed": f"construct the sampler with seed={shown(state['seed'])}, or start a new run",
        }
        for name, value in (("version", VERSION), ("seed", self.seed)):
            if state[name] != value:
                raise ValueError(
                    f"state[{name!r}] must be {value!r} for this sampler, got {shown(state[name])}: {cures[name]}"
                )
        if (other := state["fingerprint"]) != (own := self._fingerprint):
            message = "state['fingerprint'] must be that of the same shards, budget and options, got "
            if not of_such_parts(self._parts, other):
                raise ValueError(f"{message}that of another class or version of headrace: load it where it was saved")
            names = differing(self._parts, own, other)
            raise ValueError(
                f"{message}one that differs in {', '.join(names)}: construct the sampler as in the run that saved it, "
                "or start a new run"
            )
        return checked_epoch(state["epoch"])

    def _n_batches(self, n_batches: int) -> int:
        """Return how many of a list of batches are this rank's, or those of all ranks."""
        steps = n_steps(n_batches, self.num_replicas, self.tail)
        return steps * self.num_replicas if self._of_all else steps

    @staticmethod
    def _refuse_empty(replicas: int) -> None:
        raise ValueError(
            f"tail='drop' must leave each of {replicas} ranks at least one batch, got fewer batches: "
            "use tail='split' or 'pad', fewer ranks, or a smaller budget"
        )

    def _settings(self, replicas: int | None = None) -> dict[str, Any]:
        """Return what the record holds of the present."""
        own = {name: value for name, value in vars(self.options).items() if name not in ("shapes", "curriculum")}
        own |= {name: getattr(self, name) for name in ("block", "max_total_size", "tail", "max_length")}
        options = {name: plain("a function" if callable(value) else value) for name, value in own.items()}
        ranks = {} if replicas is None else {"world": replicas, "all": self._of_all}
        return {**ranks, "n": self.n_samples, "options": options}

    def _sequence(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the blocks of an epoch in their order, and the positions where they begin and the last one ends."""
        if self._sequences is None or self._sequences[0] != epoch:
            key = int(fold_in(self.seed, epoch, ORDER)[0]) if self.options.shuffle else None
            sequence = shuffled(key, self.n_blocks)
            self._sequences = epoch, sequence, before_each(np.diff(self._blocks.starts)[sequence])
        return self._sequences[1:]

    def _place(self, epoch: int, position: int) -> tuple[int, int]:
        """Return which block of an epoch a position is in, and how far; at the end the one behind the last."""
        _, starts = self._sequence(epoch)
        place = last_below(starts, position)
        return place, position - int(starts[place])

    def _key(self, epoch: int, number: int) -> int:
        return int(fold_in(self.seed, epoch if self.options.shuffle else 0, number, ORDER)[0])

    def _checksum(self, number: int) -> str:
        """Return the checksum of the sizes of a block, as far as it is known."""
        loaded = dict([self._loaded] if self._loaded else [])
        return self._checksums.get(number, loaded.get(number, ""))

    def _expect(self, number: int, checksum: str) -> None:
        """Refuse other sizes of a block than this process has read before, or the latest state has."""
        if self._checksum(number) not in ("", checksum):
            raise self._other_sizes(number)
        self._checksums[number] = checksum

    def _other_sizes(self, number: int) -> ValueError:
        shards = self._blocks.shards(number)
        notes = "" if self._noted is None else ", or delete the notes in plan_cache where they are of other sizes"
        return ValueError(
            f"sizes of block {number} (shards {shortlist(shards[:5].tolist(), len(shards))}) must be the same each "
            "time they are read, and those of the run that is resumed, got others: restore them, or start a new run"
            f"{notes}"
        )

    def _prepared(self, number: int) -> tuple[NDArray[Any], PreparedSizes]:
        """Read the sizes of a block."""
        sizes, checksum = read_block(self._blocks, number, self._sizes_of)
        self._expect(number, checksum)
        capped = capped_sizes(sizes, column_limits(self.max_length, 1 if sizes.ndim == 1 else sizes.shape[1]))
        options = replace(self.options, oversize="skip") if self.options.oversize == "raise" else self.options
        prepared = prepare(capped, self.max_total_size, options)
        over = self._blocks.samples(int(self._blocks.starts[number]) + prepared.oversize)
        if self.options.oversize == "raise" and len(over):
            sample, size = int(over[0]), capped[prepared.oversize[0]].tolist()
            raise ValueError(
                f"sizes must not exceed max_total_size={shown(self.max_total_size)}, got {len(over)} of "
                f"{len(capped):,} samples of a block that do so by themselves (sample {sample} has size "
                f"{shown(size)}{', ...' if len(over) > 1 else ''}): {CURE}"
            )
        if self.options.oversize == "skip":
            self._skipped[number] = np.sort(over)
        return capped, prepared

    def _plan(self, number: int) -> PlannedBlock:
        """Return the plan of a block; the one before makes way for it."""
        if self._planned is None or self._planned.number != number:
            self._planned = None
            sizes, prepared = self._prepared(number)
            planner = make_planner(prepared, self.options)
            self._planned = PlannedBlock(number, planner, sizes, prepared.oversize)
        return self._planned

    def _plan_at(self, epoch: int, position: int) -> None:
        """Plan the block that a position is in, and refuse one that no state has."""
        place, inside = self._place(epoch, position)
        if place < self.n_blocks and inside > self._plan(int(self._sequence(epoch)[0][place])).planner.n_samples:
            raise ValueError(f"state['position'] must be one of state_dict(), got {position}: it was changed")

    def _count(self, epoch: int, number: int) -> int:
        """Return how many batches a block has."""
        key = None if self._even_counts else epoch, number
        if key not in self._counts:
            noted = self._noted_count(number)
            self._counts[key] = self._found_count(epoch, number) if noted is None else noted
        return self._counts[key]

    def _noted_count(self, number: int) -> int | None:
        """Return how many batches others have noted for a block."""
        found = None if self._noted is None else self._noted.get(number)
        if found is None:
            return None
        self._expect(number, found[1])
        return found[0]

    def _found_count(self, epoch: int, number: int) -> int:
        """Count the batches of a block, and note them for others."""
        planned = self._planned
        if planned is not None and planned.number == number:
            planner = planned.planner
        else:
            planner = counting_planner(self._prepared(number)[1], self.options)
        found = planner.count(self._key(epoch, number), 0)
        if self._noted is not None:
            self._noted.add(number, found, self._checksums[number])
        return found

    def _count_all(self, epoch: int, numbers: list[int]) -> int:
        """Return how many batches some blocks have together; each rank begins with other ones, to share the work."""
        first = 0
        if self._noted is not None and not self._of_all:
            replicas, rank = self._ranks.current()
            first = rank * len(numbers) // replicas
        return sum(self._count(epoch, number) for number in numbers[first:] + numbers[:first])

    def _count_from(self, epoch: int, position: int) -> int:
        """Return how many batches an epoch has from a position on."""
        sequence, _ = self._sequence(epoch)
        place, inside = self._place(epoch, position)
        found = 0
        if inside:
            number = int(sequence[place])
            found, place = self._plan(number).planner.count(self._key(epoch, number), inside), place + 1
        return found + self._count_all(epoch, sequence[place:].tolist())

    def _lists(self, epoch: int, position: int, places: _Places, warns: bool = False) -> Iterator[Batches]:
        """Yield the batches of an epoch from a position on, by the places of their samples; note where blocks end."""
        sequence, starts = self._sequence(epoch)
        first, inside = self._place(epoch, position)
        self._plan_at(epoch, position)
        planned: PlannedBlock | None
        for place in range(first, len(sequence)):
            planned = None  # its memory is free before the next one is planned
            planned = self._plan(int(sequence[place]))
            if warns and self.options.oversize == "skip" and len(planned.oversize):
                warn_of_skipped(self._skipped[planned.number], self.max_total_size)
            places.add(planned.planner.n_samples - inside, int(starts[place + 1]))
            begin, key = int(self._blocks.starts[planned.number]), self._key(epoch, planned.number)
            for samples, offsets in planned.planner.batches(key, inside):
                yield samples + np.int64(begin), offsets
            inside = 0

    def _sizes_at(self, places: NDArray[np.int64]) -> NDArray[Any]:
        """Return the sizes of samples by their places; blocks other than the planned one are read for it."""
        number = np.searchsorted(self._blocks.starts, places, side="right") - 1
        parts = []
        for block in np.unique(number).tolist():
            planned = self._planned
            sizes = planned.sizes if planned is not None and planned.number == block else self._prepared(block)[0]
            parts.append(sizes[places[number == block] - self._blocks.starts[block]])
        found = np.empty((len(places), *parts[0].shape[1:]), np.result_type(*parts))
        for block, part in zip(np.unique(number).tolist(), parts, strict=True):
            found[number == block] = part
        return found

    def _balance(self, of_all: bool | None = None) -> Balance | None:
        """Return how the samples of a last step are dealt to the ranks; None where their order is kept."""
        if (self._of_all if of_all is None else of_all) or self.options.strategy == "sequential":
            return None
        options = self.options if self.options.oversize == "own_batch" else replace(self.options, oversize="skip")

        def balance(places: NDArray[Any], n_batches: int) -> Batches | None:
            sized = prepare(self._sizes_at(places), self.max_total_size, options)
            found = balance_evenly(sized, np.arange(len(places)), n_batches)
            return None if found is None else (places[found[0]], found[1])

        return balance

    def _step_behind(
        self, epoch: int, position: int, steps: int, world: int, of_all: bool
    ) -> tuple[list[list[int]] | None, int]:
        """Return the step that comes so many steps behind a position; where there is none, how many there are."""
        sequence, _ = self._sequence(epoch)
        first, inside = self._place(epoch, position)
        before = [0]  # batches from the position to the beginning of each further block
        for place in range(first, len(sequence)):
            number = int(sequence[place])
            key = self._key(epoch, number)
            here = self._plan(number).planner.count(key, inside) if place == first and inside else None
            before.append(before[-1] + (self._count(epoch, number) if here is None else here))
            if before[-1] > (steps + 1) * world:
                break
        else:
            if steps < 0 or steps >= n_steps(before[-1], world, self.tail):
                return None, n_steps(before[-1], world, self.tail)
        passed, back, found = steps, 1, None
        while passed > 0 and (found := self._sure_place(epoch, first, inside, before, passed, world)) is None:
            passed, back = passed - back, 2 * back
        if found is None:
            passed, found = 0, position
        lists = self._lists(epoch, found, _Places(found))
        wanted = steps - passed
        for dealt in distribute_steps(lists, world, self.tail, self._balance(of_all)):
            cuts = dealt.offsets.tolist()
            if wanted * world < len(cuts) - 1:
                cuts = cuts[wanted * world : (wanted + 1) * world + 1]
                return [self._blocks.samples(dealt.indices[a:b]).tolist() for a, b in pairwise(cuts)], 0
            wanted -= (len(cuts) - 1) // world
        return None, 0

    def _sure_place(self, epoch: int, first: int, inside: int, before: list[int], steps: int, world: int) -> int | None:
        """Return where a step begins that is so many steps behind a position; None where that is not sure.

        Sure is a step inside a block whose rest can be split into whole steps, whatever follows.
        """
        block = min(bisect_right(before, steps * world), len(before) - 1) - 1
        sequence, starts = self._sequence(epoch)
        number, batch = int(sequence[first + block]), steps * world - before[block]
        planner, key = self._plan(number).planner, self._key(epoch, number)
        begun, start = 0, int(starts[first + block])
        count = planner.count(key, 0)
        if block == 0 and inside:
            begun = count - before[1]
            if planner.position_of(key, begun) != inside:  # inside a batch: the list may go on with other ones
                return None
        place = planner.position_of(key, begun + batch)
        spare = (planner.n_samples - place) - (count - begun - batch)
        return start + place if self.tail != "split" or spare >= world - 1 else None

    def __getstate__(self) -> dict[str, Any]:
        # A plan is large and is made again when it is needed.
        own = {"_planned": None, "_cursor": copy(self._cursor), "_record": deepcopy(self._record)}
        return self.__dict__ | own | {"_checksums": dict(self._checksums), "_counts": dict(self._counts)}


class _Places:
    """From how many samples an iteration has listed to the position that this is: skipped samples have one, too."""

    def __init__(self, position: int) -> None:
        self.listed = 0  # samples of all blocks that were planned
        self._begins, self._positions = [0], [position]

    def add(self, n_samples: int, end: int) -> None:
        """Note that so many more samples are listed, behind which a position follows."""
        self.listed += n_samples
        self._begins.append(self.listed)
        self._positions.append(end)

    def position(self, listed: int) -> int:
        """Return the position behind so many of the samples."""
        place = bisect_right(self._begins, listed) - 1
        return self._positions[place] + listed - self._begins[place]


def _shards(sizes: Any, lengths: Any) -> tuple[Callable[[int], Any], NDArray[np.int64]]:
    """Return the function to the sizes of a shard, and the number of samples of each shard."""
    if isinstance(sizes, Sequence) and (lengths is not None or all(hasattr(part, "__len__") for part in sizes)):
        lengths = [len(part) for part in sizes] if lengths is None else lengths
        if len(lengths) != len(sizes):
            raise ValueError(f"lengths must have one number for each of {len(sizes)} shards, got {len(lengths)}")
        sizes = sizes.__getitem__
    if not callable(sizes):
        raise TypeError(
            "sizes must be a function from the number of a shard to the sizes of its samples, or a list with these for "
            f"each shard, got {type(sizes).__name__}: for one array use DistributedSizeAwareBatchSampler"
        )
    if lengths is None:
        raise ValueError("lengths must be given beside a function: the number of samples of each shard")
    found = size_vector(lengths, "lengths")
    if (wrong := np.flatnonzero((found != np.floor(found)) | (found >= UNLIMITED))).size:
        raise ValueError(f"lengths must be whole numbers, got {found[wrong[0]]} for shard {wrong[0]}")
    return sizes, found.astype(np.int64)
