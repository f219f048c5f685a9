"""Planned batches of a dataset whose sizes do not fit into a process: block by block."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching._shared.checks import checked_int, shown
from headrace.size_aware_batching._shared.display import counted, never_raises
from headrace.size_aware_batching._shared.ranks import Mesh
from headrace.size_aware_batching._validation import UNLIMITED, checked_seed, one_of
from headrace.size_aware_batching.planning.block_planner import BlockPlanner
from headrace.size_aware_batching.planning.costs import CostFunction
from headrace.size_aware_batching.planning.options import (
    STREAM_OVERSIZE,
    SamplerOptions,
    Strategy,
    StreamOversize,
    Tail,
)
from headrace.size_aware_batching.planning.plan_cache import PlanCache
from headrace.size_aware_batching.size_aware_sampler import SizeAwareSampler, budget_in_words
from headrace.size_aware_batching.sizes.read import size_vector


class BlockwiseSizeAwareBatchSampler(SizeAwareSampler):
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
    ``work``, ``oversize="split"``, ``exclude`` and ``accept=``, and has ``plan``, ``report``, ``batch`` and
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
        extra_per_sample: What each sample has in the model beside its size, such as special tokens, as in
            `DistributedSizeAwareBatchSampler`.
        window: Samples that are planned together.
        balanced_ranks: Number of ranks for which steps have equal work, as in `DistributedSizeAwareBatchSampler`.
            Groups restart in each block, so some steps straddle two groups: a multiple of your number of ranks balances
            them better.
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

    def __init__(
        self,
        sizes: Callable[[int], Any] | Sequence[Any],
        max_total_size: float | Sequence[float],
        *,
        lengths: Any = None,
        block: int = 100_000_000,
        strategy: Strategy | None = None,
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
        extra_per_sample: float | Sequence[float] | None = None,
        window: int | None = None,
        balanced_ranks: int | None = None,
        plan_cache: str | os.PathLike[str] | None = None,
    ) -> None:
        options = SamplerOptions.from_arguments(locals())
        one_of("oversize", oversize, STREAM_OVERSIZE)
        seed, block = checked_seed(seed), checked_int("block", block, 1)
        sizes_of, shard_lengths = _shards(sizes, lengths)
        cache = None if plan_cache is None else PlanCache(plan_cache)
        planner = BlockPlanner(type(self).__name__, sizes_of, shard_lengths, block, options, seed, cache)
        super().__init__(planner, num_replicas, rank, mesh)
        if not self._run.all_ranks:
            planner.count_with(self._run.ranks)

    @property
    def _planner(self) -> BlockPlanner:
        return cast(BlockPlanner, self._run.planner)

    @property
    def n_samples(self) -> int:
        """Number of samples of the dataset."""
        return self._planner.n_samples

    @property
    def options(self) -> SamplerOptions:
        """The arguments that decide which batches there are."""
        return self._planner.options

    @property
    def max_total_size(self) -> Any:
        """Budget of a batch."""
        return self._planner.options.max_total_size

    @property
    def tail(self) -> Tail:
        """Policy for the last batches."""
        return self._planner.options.tail

    @property
    def seed(self) -> int:
        """Key of all randomness."""
        return self._planner.seed

    @property
    def n_blocks(self) -> int:
        """Number of blocks."""
        return len(self._planner.blocks)

    @property
    def fingerprint(self) -> str:
        """Hex string that stands for the lengths of the shards, the options and the seed; not for the sizes."""
        return self._planner.fingerprint

    @property
    def skipped_indices(self) -> NDArray[np.int64]:
        """The samples that no epoch delivers, ascending, of the blocks that this process has planned or counted."""
        return np.sort(np.concatenate([np.zeros(0, np.int64), *self._planner.skipped.values()]))

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

    @never_raises
    def __repr__(self) -> str:
        figures = [
            counted(self.n_samples, "sample"),
            counted(len(self._planner.blocks.lengths), "shard"),
            counted(self.n_blocks, "block"),
            budget_in_words(self.max_total_size),
            self.options.strategy,
            self._ranks_in_words(),
        ]
        return self._in_words(figures)

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
        self._run.load(state)


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
