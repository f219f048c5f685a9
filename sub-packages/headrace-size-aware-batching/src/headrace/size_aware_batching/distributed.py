"""Planned batches: full, random, the same number on every rank, resumable at any position."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from headrace.size_aware_batching._shared.ranks import Mesh
from headrace.size_aware_batching.planned_sampler import PlannedSampler
from headrace.size_aware_batching.planning.costs import CostFunction
from headrace.size_aware_batching.planning.options import LabelPer, Oversize, SamplerOptions, Strategy, Tail


class DistributedSizeAwareBatchSampler(PlannedSampler):
    """Batches that fill a budget and never exceed it, the same number of them on every rank.

    The list of batches is a function of the sizes, the options, the seed and the epoch, and its order also of the
    number of ranks with which the run began. In step s, rank r gets the batch ``s * num_replicas + r`` of that list:
    the current world size only decides which rank reads which batch. Any position is found without planning the batches
    before it.

    The budget counts the sum of the sizes. Batches that ``collate_fn`` pads exceed it silently: for these give
    ``cost="padded"``. Usually these three arguments are enough.

    **Epochs.** ``set_epoch(e)`` chooses the epoch. Without it, the next iteration repeats the same epoch from its
    beginning, also after a ``break``. The exception is a ``sampler`` without ``set_epoch`` and ``take``, such as a
    ``RandomSampler``: it is read again after a complete iteration; after a ``break`` its order is kept until the epoch
    changes.

    **Resuming.** ``state_dict()`` returns the position of the latest iteration, at any time; ``plan()``, ``report()``,
    ``batch()``, ``len()`` and ``remaining`` do not move it. ``load_state_dict(state)`` resumes there, at any world
    size, and ``set_epoch`` of the same epoch keeps the position. If ``set_epoch(e)`` was called before and epoch e was
    not iterated yet, a state of an older epoch is ignored: epoch e starts at its beginning. (torchdata's
    ``StatefulDataLoader`` loads its state only when it is iterated.)

    **Changes in a run.** A state also holds a short record of the run: the step at which each epoch began, and each
    change. ``step(n)`` returns the samples of any past or future step. A run can change in the middle of an epoch:
    ``load_state_dict(state, accept={"max_total_size"})`` resumes with another budget, ``exclude`` removes samples,
    ``skip`` skips steps, ``reshard`` changes the number of ranks, and ``reweight`` the weights of a mixture. The
    remaining samples of the epoch are then planned anew: none is lost, none is repeated. Call these methods on all
    ranks at the same step.

    **Long samples.** With ``oversize="split"`` a sample over the budget, or longer than ``max_length``, is cut into
    pieces of the largest size within both limits, and a remainder. Pieces are planned like samples: they are shuffled
    and balanced, and count as samples in positions, steps and reports. Batches hold an int for a whole sample and a
    `Piece` for each piece. Give the loader a `SplitDataset`: it reads both, and stores the start of each piece in its
    sample. `PackedCollate` counts positions from there.

    Args:
        sizes: Size of each sample in any unit: array, tensor, sequence or mapping of shape ``[n]``, or a dataset with
            ``sizes`` or ``num_tokens(index)``. With k budgets, such as nodes and edges of graphs, of shape ``[n, k]``.
            Writable arrays are copied, so later changes to them have no effect. Read-only arrays, such as memory maps
            with ``mmap_mode="r"``, are not copied.
        max_total_size: Budget of a batch, in the unit of the cost; for sizes of shape ``[n, k]`` a sequence of k.
        strategy: ``"stratified"``: random batches of nearly equal sum and count. ``"sequential"``: the samples in the
            order of the sampler or of the shuffle (with ``shuffle=False``, of the dataset); a batch ends where the next
            sample does not fit. ``"bucketed"``: samples of similar size, for padded batches. ``"packed"``: greedy (LPT)
            balancing with short shuffles, repaired by swaps, for packed attention; fuller and less random. By default
            it follows from ``cost``: ``"stratified"`` for sums, else ``"bucketed"``.
        cost: ``"sum"`` of the sizes; ``"padded"``, count times largest, for padded batches; or ``f(n, largest)`` in any
            unit, which must not fall when n or the largest size grows. By default it follows from ``strategy``:
            ``"padded"`` for ``"bucketed"``, else ``"sum"``.
        sampler: Order of the samples, the same on every rank; indices may repeat. If it has ``take(start, stop)``, only
            the needed windows are read. Set its ``num_replicas`` and ``rank`` to those of this sampler, or to 1 and 0.
            States hold its ``epoch_fingerprint(epoch)``, or its ``fingerprint``. None: the order follows from
            ``shuffle`` and ``seed``.
        shuffle: Whether every epoch has a different order. False, without a ``sampler``: all epochs are the same; only
            ``"sequential"`` keeps the order of the samples.
        seed: Key of all randomness, 0 to 2**64 - 1.
        max_items: Largest number of samples in a batch.
        batch_size_multiple: The number of samples in a batch is a multiple of this, unless it is smaller. The last
            batch of a window is an exception. For ``"bucketed"`` and ``"sequential"``.
        length_multiple: The length of a batch is rounded up to a multiple of this; not with ``cost="sum"``.
        shapes: Largest number of distinct (count, length) shapes that batches are padded to, the same in all epochs and
            on all ranks, for ``torch.compile`` and CUDA graphs. They are chosen for the least padding; pass the
            attribute `shapes` to `PaddedCollate`, which pads to them. Or the shapes themselves: a sequence of (count,
            length), such as the result of `fit_shapes`. Only for padded ``"bucketed"`` batches and whole sizes of shape
            ``[n]``, and not with ``oversize="own_batch"``. None: no limit.
        oversize: Policy for a sample that exceeds a budget by itself: ``"raise"`` an error in the constructor, the
            default here; ``"skip"`` the sample; give it its ``"own_batch"``, over the budget, which samples of size 0
            may share; or ``"split"`` it into pieces, so that nothing is lost. Splitting needs whole sizes of shape
            ``[n]``, splits the ``work`` by size, and reads the whole epoch of a ``sampler``. Samples over a budget are
            in ``oversize_indices`` and in the report.
        tail: Policy if the world size does not divide the number of batches: ``"split"`` the last batches into smaller
            ones of similar work, ``"pad"`` by repeating batches, or ``"drop"`` the rest. If there are too few samples
            to split, some are repeated; a warning names them. Splitting makes halves with ``"sequential"``, with
            ``batch_size_multiple``, and for padded batches with several columns or ``work``.
        num_replicas: Number of data-parallel ranks. By default that of ``torch.distributed``, read when an epoch begins
            or ``len()`` is called, so the sampler can be constructed before the process group.
        rank: Rank of this process; by default likewise. ``"all"``: the batches of all ranks, step by step, for code
            that distributes batches itself, such as accelerate's ``prepare``. ``tail="split"`` then halves the last
            batches, those with the most samples first, until there is one for each rank.
        mesh: In place of both: a 1-D ``DeviceMesh`` of the data-parallel ranks, or an object with ``size()`` and
            ``get_local_rank()``. Ranks that share data (tensor parallelism) then get the same batches.
        max_length: Sizes are capped at this; the collate function must truncate the samples. For sizes of shape ``[n,
            k]`` a sequence with a number or None for each column, such as ``(512, None)``. With ``oversize="split"`` it
            is the length of the longest piece, such as the context of a model; nothing is truncated.
        extra_per_sample: What each sample has in the model beside its size, such as the special tokens of a tokenizer,
            ``tokenizer.num_special_tokens_to_add()``. It is added to each size, and ``max_length`` caps the sum: it
            includes them, as in a tokenizer. With ``oversize="split"`` each piece has it. For sizes of shape ``[n, k]``
            a number for each column.
        curriculum: Number of steps, from the beginning of epoch 0, in which short samples come first. After a share t
            of these steps, samples come from the shortest share ``sqrt(t)`` (by ``work``, if given); afterwards from
            all. Every epoch has all samples; long ones come later in it. A step is one batch on each of the ranks with
            which the run began; states hold their number, so that another world size resumes exactly. Needs
            ``shuffle``; not with ``"sequential"`` or ``sampler``.
        window: Number of samples that are planned together. A larger window gives fuller batches, a smaller one more
            randomness. By default it depends on the strategy.
        balanced_ranks: Number of ranks for which steps have equal work; steps are also balanced for its divisors. This
            many batches of similar work form a group, and the groups come in random order: larger groups make
            successive steps similar. By default the number of ranks with which the run begins; states hold it, so that
            a resume on other ranks keeps the order. An epoch of few batches uses a divisor. With a ``sampler`` or
            ``shuffle=False``, groups restart in each window, so some steps straddle two groups: a multiple of your
            number of ranks balances them better. Not with ``"sequential"``.
        work: Work of each sample, shape ``[n]``, in any unit. The work of a batch is the sum; steps are balanced by it
            over the ranks. By default it follows from sizes and cost, see ``PlanReport.imbalance``.
        by: Label of each sample, such as its source, task, modality or language, shape ``[n]``, ints or strings, as an
            array, a list or a column like ``sizes``: every batch holds samples of one label. The samples of a label are
            planned by themselves, so that each label has at most one batch or two that are not full; each label has its
            share of any part of the epoch. With a ``sampler`` every window has such batches of each label: a larger
            ``window`` gives fuller ones. Not with ``"sequential"`` or ``curriculum``.
        label_per: ``"batch"``: the ranks of a step get batches of like work, of any labels. ``"step"``: all ranks get
            batches of one label in every step. Then steps begin anew where the label changes, every ``balanced_ranks``
            batches or so: another number of ranks that does not divide it has steps that are less full. ``tail`` is the
            policy for the last batches of each label; not ``"drop"``.
        group_by: Group of each sample, shape ``[n]``, ints or strings in the forms of ``by``: the samples of a group
            come in one batch, such as the two of a pair, the answers to one prompt or the pieces of a document. A group
            is planned as one sample of their summed size, or, where batches are padded, of their number times the
            largest; it is never split, and one over the budget follows ``oversize``. Positions count groups. Not with
            ``sampler``, ``shapes``, ``batch_size_multiple`` and ``oversize="split"``.
        plan_cache: Directory for the sorted order of the samples, so that the ranks of a node and later runs read it
            instead of sorting. The batches are the same with and without it. For whole sizes below 2**20 of shape
            ``[n]``, and strategies that sort; best with ``sizes`` from ``numpy.load(..., mmap_mode="r")``, or the name
            of a column as ``sizes`` of a data module. Otherwise it has no effect, and a warning says so. None: every
            process sorts.

    Attributes:
        draws: For each sample of the latest batch, a number that distinguishes repeats of the same sample in the epoch;
            it is the same after a resume, also on other ranks. A loader uses it to give repeats different random
            numbers. None without ``sampler``, because then no sample repeats.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument has a value that is not allowed, or a sample is too large and
            ``oversize="raise"``.

    Example:
        >>> sampler = DistributedSizeAwareBatchSampler([4, 1, 3, 2], 5, strategy="sequential", shuffle=False)
        >>> list(sampler)
        [[0, 1], [2, 3]]
        >>> list(DistributedSizeAwareBatchSampler([7, 1], 5, strategy="sequential", shuffle=False, oversize="split"))
        [[Piece(index=0, start=0, stop=5, size=7)], [Piece(index=0, start=5, stop=7, size=7), 1]]
    """

    def __init__(
        self,
        sizes: Any,
        max_total_size: float | Sequence[float],
        *,
        strategy: Strategy | None = None,
        cost: Literal["sum", "padded"] | CostFunction | None = None,
        sampler: Iterable[int] | None = None,
        shuffle: bool = True,
        seed: int = 0,
        max_items: int | None = None,
        batch_size_multiple: int = 1,
        length_multiple: int = 1,
        shapes: int | Sequence[tuple[int, int]] | None = None,
        oversize: Oversize = "raise",
        tail: Tail = "split",
        num_replicas: int | None = None,
        rank: int | Literal["all"] | None = None,
        mesh: Mesh | None = None,
        max_length: float | Sequence[float | None] | None = None,
        extra_per_sample: float | Sequence[float] | None = None,
        curriculum: int | None = None,
        window: int | None = None,
        balanced_ranks: int | None = None,
        work: Any = None,
        by: Any = None,
        label_per: LabelPer = "batch",
        group_by: Any = None,
        plan_cache: str | os.PathLike[str] | None = None,
    ) -> None:
        options = SamplerOptions.from_arguments(locals())
        super().__init__(options, sizes, work, by, group_by, sampler, seed, plan_cache, num_replicas, rank, mesh)

    @property
    def shapes(self) -> tuple[tuple[int, int], ...] | None:
        """Shapes that batches are padded to, (count, length) in order of length; their number is limited by ``shapes``.

        A batch has the shortest length that holds its samples. Nearly all batches have the count of their shape; none
        has more. Some of the last batches of an epoch, and one in each window, have fewer: `PaddedCollate` adds rows of
        padding. None if ``shapes`` was not given.
        """
        shapes = self._planner.all_prepared.shapes
        return None if shapes is None else shapes.pairs()
