"""Planned batches: full, random, the same number on every rank, resumable at any position."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from copy import copy, deepcopy
from dataclasses import replace
from functools import partial
from itertools import islice
from numbers import Real
from typing import Any, Literal, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching._display import inner, never_raises
from headrace.size_aware_batching._keywords import explains_keywords
from headrace.size_aware_batching._validation import (
    checked_epoch,
    checked_int,
    checked_seed,
    counted,
    one_of,
    shortlist,
    shown,
    warn,
    whole_number,
)
from headrace.size_aware_batching.plan import BatchPlan, OptimizerSteps
from headrace.size_aware_batching.planning.as_sampler import refuse_as_sampler
from headrace.size_aware_batching.planning.costs import CostFunction
from headrace.size_aware_batching.planning.curriculum import Ramp, competence
from headrace.size_aware_batching.planning.cursor import level_behind_loader
from headrace.size_aware_batching.planning.distribution import (
    Steps,
    distribute_packed,
    distribute_steps,
    last_known,
    n_steps,
)
from headrace.size_aware_batching.planning.fingerprint import differing, fingerprint, of_such_parts
from headrace.size_aware_batching.planning.foreign_sampler import OF_A_MIXTURE, REWEIGHTED, SamplerOrder
from headrace.size_aware_batching.planning.known_sizes import KnownSizes
from headrace.size_aware_batching.planning.last_step import TAILS, Balance, Tail, balance_evenly
from headrace.size_aware_batching.planning.limits import plain_budget
from headrace.size_aware_batching.planning.optimizer_steps import Segment, StepPlanner, TokenSchedule, TokenSteps
from headrace.size_aware_batching.planning.options import (
    ADDED,
    Options,
    Oversize,
    Strategy,
    complete_record,
    default_cost,
)
from headrace.size_aware_batching.planning.order import ShuffledOrder, SliceOrder, natural_order
from headrace.size_aware_batching.planning.pieces import Pieces, longest_piece, pieces_of
from headrace.size_aware_batching.planning.plan_cache import PlanCache, Sorted
from headrace.size_aware_batching.planning.planner import (
    CurriculumPlanner,
    Planner,
    StrataPlanner,
    last_below,
    make_planner,
)
from headrace.size_aware_batching.planning.prepared import prepare, warn_of_skipped
from headrace.size_aware_batching.planning.random import fold_in
from headrace.size_aware_batching.planning.ranks import Mesh, Ranks, process_group, refuse_sharding_again
from headrace.size_aware_batching.planning.rest import RestPlanner
from headrace.size_aware_batching.planning.run_record import RunRecord, plain
from headrace.size_aware_batching.planning.strata import index_type
from headrace.size_aware_batching.report import CurriculumReport, PlanReport, batch_costs
from headrace.size_aware_batching.run_changes import CHANGEABLE, DATA, RunChanges
from headrace.size_aware_batching.sizes.read import capped_sizes, column_limits, read_sizes, work_vector

Batch = TypeVar("Batch")

VERSION = 2
READS = (1, 2)  # versions of states; those of 1 have no record of the run
STATE = ("version", "seed", "epoch", "position", "fingerprint")


class DistributedSizeAwareBatchSampler(RunChanges):
    """Batches that fill a budget and never exceed it, the same number of them on every rank.

    The list of batches is a function of the sizes, the options, the seed and the epoch alone. In step s, rank r gets
    the batch ``s * num_replicas + r`` of that list: the world size only decides which rank reads which batch. Any
    position is found without planning the batches before it.

    Usually four arguments are enough: ``sizes`` and ``max_total_size``, and for padded batches ``strategy`` and
    ``cost``.

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

    **Optimizer steps.** With ``tokens_per_step`` the list is divided into optimizer steps that hold the same samples at
    any world size; `optimizer_steps` yields the micro-batches of each. A state saved inside an optimizer step also
    records how that step was packed (``inside_step``). A resume delivers the rest of the step, packed for its ranks.

    **Long samples.** With ``oversize="split"`` a sample over the budget, or longer than ``max_length``, is cut into
    pieces of the largest size within both limits, and a remainder. Pieces are planned like samples: they are shuffled
    and balanced, and count as samples in positions, steps and reports. Batches hold an int for a whole sample and a
    `Piece` for each piece. Give the loader a `SplitDataset`: it reads both, and stores the start of each piece in its
    sample. `PackedCollate` counts positions from there.

    Args:
        sizes: Size of each sample in any unit: array, tensor, sequence or mapping of shape ``[n]`` (or ``[n, k]`` with
            k budgets, the nodes and edges of graphs for example), or a dataset with ``sizes`` or ``num_tokens(index)``.
            Writable arrays are copied, so later changes to them have no effect. Read-only arrays, such as memory maps
            with ``mmap_mode="r"``, are not copied.
        max_total_size: Budget of a batch, in the unit of the cost; for sizes of shape ``[n, k]`` a sequence of k.
        strategy: ``"stratified"``: random batches of nearly equal sum and count. ``"sequential"``: the samples in the
            order of the sampler or of the shuffle (with ``shuffle=False``, of the dataset); a batch ends where the next
            sample does not fit. ``"bucketed"``: samples of similar size, for padded batches. ``"packed"``: greedy (LPT)
            balancing with short shuffles, repaired by swaps, for packed attention; fuller and less random.
        cost: ``"sum"`` of the sizes, the default; ``"padded"``, count times largest, for padded batches; or ``f(n,
            largest)`` in any unit, which must not fall when n or the largest size grows. ``"bucketed"`` without
            ``cost`` gives a warning: batches that are filled by the sum exceed the budget after padding.
        sampler: Order of the samples, the same on every rank; indices may repeat. If it has ``take(start, stop)``, only
            the needed windows are read. Set its ``num_replicas`` and ``rank`` to those of this sampler, or to 1 and 0.
            States hold its ``epoch_fingerprint(epoch)``, or its ``fingerprint``. None: the order follows from
            ``shuffle`` and ``seed``.
        shuffle: Whether every epoch has a different order. False, without a ``sampler``: all epochs are the same; only
            ``"sequential"`` keeps the order of the samples.
        seed: Key of all randomness, 0 to 2**64 - 1.
        max_items: Largest number of samples in a batch.
        batch_size_multiple: The number of samples in a batch is a multiple of this, unless it is smaller
            (``"bucketed"`` and ``"sequential"``; except the last batch of a window).
        length_multiple: The length of a batch is rounded up to a multiple of this; not with ``cost="sum"``.
        shapes: Largest number of distinct (count, length) shapes that batches are padded to, the same in all epochs and
            on all ranks, for ``torch.compile`` and CUDA graphs. They are chosen for the least padding; pass the
            attribute `shapes` to `PaddedCollate`, which pads to them. Or the shapes themselves: a sequence of (count,
            length), such as the result of `fit_shapes`. Only for padded ``"bucketed"`` batches and whole sizes of shape
            ``[n]``, and not with ``oversize="own_batch"``. None: no limit.
        oversize: Policy for a sample that exceeds a budget by itself: ``"raise"`` an error in the constructor (the
            default here), ``"skip"`` the sample, give it its ``"own_batch"``, over the budget (samples of size 0 may
            share it), or ``"split"`` it into pieces, nothing lost (whole sizes of shape ``[n]``; its ``work`` is split
            by size; of a ``sampler`` the whole epoch is read). These samples are in ``oversize_indices`` and in the
            report.
        tail: Policy if the world size does not divide the number of batches: ``"split"`` the last batches into smaller
            ones of similar work (halves for ``"sequential"``, ``batch_size_multiple``, padded columns, padded
            ``work``), ``"pad"`` by repeating batches, or ``"drop"`` the rest. If there are too few samples to split,
            some are repeated; a warning names them.
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
        curriculum: Number of steps, from the beginning of epoch 0, in which short samples come first. After a share t
            of these steps, samples come from the shortest share ``sqrt(t)`` (by ``work``, if given); afterwards from
            all. Every epoch has all samples; long ones come later in it. A step is an optimizer step with
            ``tokens_per_step``, else one batch on each rank; in the second case states hold ``curriculum_ranks``, the
            number of ranks in epoch 0, so that another world size resumes exactly. Needs ``shuffle``; not with
            ``"sequential"`` or ``sampler``.
        window: Number of samples that are planned together. A larger window gives fuller batches, a smaller one more
            randomness. By default it depends on the strategy.
        balanced_ranks: Number of ranks for which steps have equal work; steps are also balanced for its divisors. This
            many batches of similar work form a group, and the groups come in random order: smaller groups make
            successive steps less similar. The smallest value that keeps steps balanced is your number of ranks; with 1,
            all batches come in random order. An epoch of few batches uses a divisor. With a ``sampler`` or
            ``shuffle=False``, groups restart in each window, so some steps straddle two groups: use a multiple of your
            number of ranks. Not with ``"sequential"`` or ``tokens_per_step``.
        work: Work of each sample, shape ``[n]``, in any unit. The work of a batch is the sum; steps are balanced by it
            over the ranks. By default it follows from sizes and cost, see ``PlanReport.imbalance``.
        tokens_per_step: Tokens of an optimizer step, in the unit of the sizes (of the first column), over all ranks and
            accumulated batches, to within the longest sample. A schedule ``[(first step, tokens), ...]`` varies it; its
            steps count over all epochs. The last step of an epoch is smaller. Needs ``"stratified"`` for sums and
            ``"bucketed"`` for other costs; not with ``window``, ``batch_size_multiple``, ``shapes`` or ``tail="pad"``.
            Planning an epoch takes about a second for a million samples.
        accumulate: Number of micro-batches in an optimizer step on each rank, for loops with a fixed number. By default
            the smallest number that holds every step of the epoch, or of a stage of ``tokens_per_step``.
        plan_cache: Directory for the sorted order of the samples, so that the ranks of a node and later runs read it
            instead of sorting. The batches are the same with and without it. For whole sizes below 2**20 of shape
            ``[n]``, and strategies that sort; best with ``sizes`` from ``numpy.load(..., mmap_mode="r")``, or the name
            of a column as ``sizes`` of a data module. Otherwise it has no effect, and a warning says so. None: every
            process sorts.

    Attributes:
        draws: For each sample of the latest batch, a number that distinguishes repeats of the same sample in the epoch;
            it is the same at any world size and after a resume. A loader uses it to give repeats different random
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

    @explains_keywords
    def __init__(
        self,
        sizes: Any,
        max_total_size: float | Sequence[float],
        *,
        strategy: Strategy = "stratified",
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
        curriculum: int | None = None,
        window: int | None = None,
        balanced_ranks: int = 64,
        work: Any = None,
        tokens_per_step: float | Sequence[tuple[int, float]] | None = None,
        accumulate: int | None = None,
        plan_cache: str | os.PathLike[str] | None = None,
    ) -> None:
        if cost is None:
            cost = default_cost(strategy)
        given = locals()
        self._arguments = {name: given[name] for name in (*CHANGEABLE, "seed", "work", "accumulate", "plan_cache")}
        self.options = Options(
            strategy,
            cost,
            shuffle,
            max_items,
            batch_size_multiple,
            length_multiple,
            oversize,
            window,
            shapes=shapes,
            curriculum=curriculum,
            balanced_ranks=balanced_ranks,
        )
        if curriculum is not None and sampler is not None:
            raise ValueError(
                f"curriculum={self.options.curriculum} and sampler were both given, but the sampler decides the order: "
                "leave out one"
            )
        one_of("tail", tail, TAILS)
        schedule = None if tokens_per_step is None else TokenSchedule.of(tokens_per_step)
        accumulate = whole_number("accumulate", accumulate)
        if schedule is not None:
            _refuse_beside_tokens(self.options, tail)
        elif accumulate is not None:
            raise ValueError(f"accumulate={accumulate} goes with tokens_per_step: give both, or neither")
        self.tail: Tail = tail
        self.seed = checked_seed(seed)
        self._plan_cache = None if plan_cache is None else PlanCache(plan_cache)
        if self._plan_cache is not None and self.options.strategy == "sequential":
            warn("plan_cache has no effect with strategy='sequential', which sorts nothing: leave it out")
        known = None if self._plan_cache is None else KnownSizes.noted(sizes, self._plan_cache.directory)
        self.sizes = _kept(read_sizes(sizes)) if known is None else known.sizes
        if self._plan_cache is not None:
            known = known or KnownSizes(self.sizes, self._plan_cache.directory)
        self._known = known
        self.max_total_size = plain_budget(max_total_size)
        self.max_length = column_limits(max_length, 1 if self.sizes.ndim == 1 else self.sizes.shape[1])
        self._of_all = isinstance(rank, str)
        if isinstance(rank, str):
            if rank != "all":
                raise ValueError(f'rank must be an int >= 0 or "all", got {shown(rank)}')
            if mesh is not None:
                raise ValueError("mesh and rank='all' were both given: give num_replicas=mesh.size() in place of mesh")
            rank = None
        self._ranks = Ranks(num_replicas, rank, mesh)
        self.work = None if work is None else work_vector(work, len(self.sizes))
        self._pieces = self._split() if self.options.oversize == "split" else None
        capped, pieces = self._sizes_to_plan(), self._pieces
        work = self.work if pieces is None or self.work is None else self.work[pieces.samples] * pieces.shares
        largest = known.largest if known is not None and capped is self.sizes else None
        self._prepare_changes(replace(prepare(capped, self.max_total_size, self.options, largest=largest), work=work))
        self._order = None if sampler is None else SamplerOrder(sampler, self._prepared.kept, len(self.sizes), pieces)
        self._steps: TokenSteps | None = None
        if schedule is not None:
            tokens = capped if capped.ndim == 1 else capped[:, 0]
            self._steps = TokenSteps(self._prepared, tokens, schedule, tail == "drop", accumulate)
            self._steps.refuse_short_steps()
        self._own_options = self._recorded_options()
        self._record.note(0, 0, self._settings())
        self._planner: tuple[SliceOrder | None, tuple[int, ...], Planner] | None = None  # and what it was made for
        self._firsts = [0]  # numbers of the first optimizer steps of epochs, as far as they were asked for
        self._began: _Beginning | None = None  # the latest iteration
        self._segments: list[Segment] = []  # of the position that was loaded, inside an optimizer step
        self._steps_asked = accumulate is not None  # whether a loop may know which batches belong to a step
        self._fingerprints: dict[str | None, str] = {}  # by that of the order
        self._ranks_of_run: int | None = None  # which the steps of a curriculum count; None before it begins
        self.draws: list[int] | None = None

    @property
    def sampler(self) -> EpochSetter:
        """Sets the epoch; not the ``sampler`` argument. Lightning calls ``batch_sampler.sampler.set_epoch``."""
        return EpochSetter(self)

    @property
    def batch_sampler(self) -> EpochSetter:
        """Sets the epoch: Hugging Face's ``Trainer`` calls ``loader.batch_sampler.batch_sampler.set_epoch``."""
        return EpochSetter(self)

    @property
    def epoch(self) -> int:
        """The epoch of the latest iteration, or of the next one."""
        return self._cursor.epoch

    @property
    def num_replicas(self) -> int:
        """Current number of data-parallel ranks."""
        return self._ranks.world_size()

    @property
    def rank(self) -> int | Literal["all"]:
        """Current rank of this process, or ``"all"``."""
        return "all" if self._of_all else self._ranks.current()[1]

    @property
    def tokens_per_step(self) -> Any:
        """Tokens of an optimizer step, or ``((first step, tokens), ...)``; None if not given."""
        return None if self._steps is None else self._steps.schedule.value

    @property
    def accumulate(self) -> int:
        """Number of micro-batches in the optimizer step of the latest batch, or of the next batch if none was yielded.

        1 without ``tokens_per_step``. With workers the latest batch is ahead of the loop, so in a schedule with stages
        use `optimizer_steps` or `accumulation`, which are always correct.
        """
        if self._steps is None:
            return 1
        self._steps_asked = True
        micro_batches, began, step = self._micro_batches(), self._began, 0
        if began is not None:
            first, position = began.position, max(self._cursor.position - 1, began.position)
            step = last_below(began.planner.starts, position) - last_below(began.planner.starts, first)
        return int(micro_batches[step]) if len(micro_batches) else 1

    @property
    def accumulation(self) -> NDArray[np.int64] | None:
        """Number of micro-batches in each optimizer step of the latest iteration; the sum is its number of batches.

        If a state was loaded or another epoch chosen since then, the numbers of the next iteration. None without
        ``tokens_per_step``.
        """
        self._steps_asked = True
        return None if self._steps is None else self._micro_batches()

    def _micro_batches(self) -> NDArray[np.int64]:
        if self._began is not None:
            return self._began.micro_batches
        return self._plan_steps().micro_batches(self._cursor.start, self._segments)

    def optimizer_steps(self, loader: Iterable[Batch]) -> Iterator[list[Batch]]:
        """Yield the micro-batches of each optimizer step, taken from a loader of this sampler.

        The loader's workers may prefetch. A checkpoint that is saved between two of these lists resumes at the
        beginning of a step.

        Args:
            loader: Yields the batches of this sampler in order: a ``DataLoader``, a ``ResumableLoader`` or the sampler
                itself.

        Raises:
            ValueError: If the sampler has no ``tokens_per_step``.
            RuntimeError: If the loader yields another number of batches.

        >>> sampler = DistributedSizeAwareBatchSampler([2, 3, 4, 1, 2, 4], 5, shuffle=False, tokens_per_step=8)
        >>> [[sampler.sizes[batch].tolist() for batch in step] for step in sampler.optimizer_steps(sampler)]
        [[[4], [3, 2]], [[4], [2, 1]]]
        """
        self._with_tokens()
        self._steps_asked = True
        return self._grouped(loader)

    def _grouped(self, loader: Iterable[Batch]) -> Iterator[list[Batch]]:
        batches = iter(loader)
        if not (group := list(islice(batches, 1))):
            return
        for count in self._micro_batches().tolist():  # known once the first batch is there
            group += islice(batches, count - len(group))
            if len(group) < count:
                raise RuntimeError(f"the loader must give the batches of this sampler, got {len(group)} of {count}")
            yield group
            group = []
        if next(batches, self) is not self:
            raise RuntimeError("the loader must give the batches of this sampler, got more of them")

    def tokens_at(self, step: int) -> float:
        """Return the tokens of an optimizer step, for learning rates; steps are numbered over all epochs."""
        return self._with_tokens().schedule.at(checked_int("step", step))

    def num_optimizer_steps(self, epoch: int | None = None) -> int:
        """Return the number of optimizer steps of a whole epoch, by default the current one, at any world size.

        Without a ``sampler`` argument it needs no planning.
        """
        steps, epoch = self._with_tokens(), self.epoch if epoch is None else checked_epoch(epoch)
        return self._n_steps(steps, self._first_step(epoch), epoch)

    @property
    def oversize_indices(self) -> NDArray[np.int64]:
        """Samples that exceed a budget by themselves, ascending: skipped, cut, or in batches of their own.

        With ``"split"`` also the samples that are only longer than ``max_length``.
        """
        return self._prepared.oversize if self._pieces is None else self._pieces.cut

    @property
    def skipped_indices(self) -> NDArray[np.int64]:
        """The samples that no epoch delivers: all of ``oversize_indices`` with ``oversize="skip"``, else none."""
        return self.oversize_indices[: None if self.options.oversize == "skip" else 0]

    @property
    def shapes(self) -> tuple[tuple[int, int], ...] | None:
        """Shapes that batches are padded to, (count, length) in order of length; their number is limited by ``shapes``.

        A batch has the shortest length that holds its samples. Nearly all batches have the count of their shape; none
        has more. Some of the last batches of an epoch, and one in each window, have fewer: `PaddedCollate` adds rows of
        padding. None if ``shapes`` was not given.
        """
        return None if self._prepared.shapes is None else self._prepared.shapes.pairs()

    @property
    def fingerprint(self) -> str:
        """Hex digest of the sizes, the options, the seed and the order of ``sampler``."""
        return self._fingerprint_with(None if self._order is None else self._order.fingerprint)

    @property
    def remaining(self) -> int:
        """Number of batches that each rank has yet to receive in the epoch, from the position of ``state_dict()``."""
        return self._left(self._cursor.position)

    def _left(self, position: int) -> int:
        """Return how many batches each rank gets from a position of the epoch on, or all ranks together."""
        if self._steps is not None:
            segments = self._current_segments(None if position == self._cursor.position else position)
            left = int(self._plan_steps().micro_batches(position, segments).sum())
            return left * self.num_replicas if self._of_all else left
        return self._n_batches(self._plan_epoch().count(self._key(self.epoch), position))

    def __len__(self) -> int:
        """Return the number of batches that each rank gets in the whole epoch, also after a resume.

        The number is exact; with ``rank="all"`` it counts the batches of all ranks. If it depends on the order
        (``"sequential"``, or a ``sampler``), the epoch is planned to count them; otherwise no planning is needed. See
        ``remaining`` for the rest of an epoch.
        """
        planner = self._plan_epoch()
        if isinstance(planner, RestPlanner):
            begun = self._record.step - self._record.starts[self.epoch]
            return begun * (self.num_replicas if self._of_all else 1) + self.remaining
        n_batches = planner.count(self._key(self.epoch), 0)
        self._refuse_empty(n_batches, self.num_replicas)
        return self._n_batches(n_batches)

    @never_raises
    def __repr__(self) -> str:
        ranks = "ranks unknown"
        with suppress(ValueError):  # of an environment that contradicts what was given
            ranks = counted(self.num_replicas, "rank")
        budget, (_, needed, planner) = self.max_total_size, self._planner or (None, (), None)
        if isinstance(planner, StrataPlanner):  # which knows without planning
            with suppress(ValueError):
                steps = n_steps(planner.count(0, 0), self.num_replicas, self.tail)
                ranks += f" x {counted(steps, 'step')}"
        figures = [
            counted(self._prepared.n_samples, "sample"),
            *([] if self._order is None else [f"ordered by {type(self._order.sampler).__name__}"]),
            f"budget {' and '.join(f'{one:,}' for one in (budget if isinstance(budget, list) else [budget]))}",
            self.options.strategy,
            f"all {ranks}" if self._of_all else ranks,
            f"epoch {self.epoch}",
            f"seed {self.seed}",
        ]
        if self._steps is not None:
            stages = " then ".join(f"{tokens:,}" for _, tokens in self._steps.schedule.stages)
            figures.append(f"{stages} tokens an optimizer step")
        if isinstance(planner, StepPlanner) and needed[0] == self.epoch:
            figures.append(counted(planner.n_steps, "optimizer step"))
        return f"{type(self).__name__}({', '.join(figures)})"

    def __iter__(self) -> Iterator[list[Any]]:
        """Yield this rank's batches, from the position that was loaded, else from the beginning of the epoch."""
        # All of this runs at the first ``next``: a DataLoader may make an iterator that it never uses.
        refuse_as_sampler(self)
        while (yield from self._deliver()):  # until no change interrupts it
            pass

    def _deliver(self) -> Generator[list[Any], None, bool]:
        """Yield this rank's batches of the epoch; return whether a change interrupted that."""
        refuse_sharding_again(None if self._of_all else 'rank="all"', uneven=True)
        of_all = self._of_all  # then a position may lie inside a step, so that its samples keep their order
        if of_all:
            replicas, rank = self._ranks.world_size(), (process_group() or (1, 0))[1]
        else:
            replicas, rank = self._ranks.current()
        if self._order is not None:
            self._order.refuse_other_ranks(replicas)
            if replicas > 1:
                self._order.refuse_different_orders(self._ranks.mesh)
        planner, epoch = self._plan_epoch(at=self._cursor.start), self.epoch
        if rank == 0 and len(self.skipped_indices):
            warn_of_skipped(self.skipped_indices, self.max_total_size)
        if self._cursor.start == 0 and self.tail == "drop":
            self._refuse_empty(planner.count(self._key(epoch), 0), replicas)
        self._ranks_of_run = self._curriculum_ranks(epoch)
        this, position = self._cursor.begin(), self._cursor.position
        begun = position
        if self._record.begin(epoch, position, self._settings(replicas)):
            self._plans = None
        step, given = self._record.step, 0
        if isinstance(planner, StepPlanner):
            tail, distributed = self._begin_steps(planner, position, replicas)
        else:
            batches = planner.batches(self._key(epoch), position)
            tail, distributed = self.tail, distribute_steps(batches, replicas, self.tail, self._balance())
        for steps, is_last in last_known(distributed) if tail == "drop" else ((steps, False) for steps in distributed):
            offsets = steps.offsets
            if steps.repeated and tail == "split":
                warn_of_repetition(self._keys(steps.indices[offsets[-1 - steps.repeated] :]), replicas, steps.repeated)
            repeated_from = len(offsets) - 1 - steps.repeated
            draws = None if self._order is None else steps.draws(position)
            for number in range(0 if of_all else rank, len(offsets) - 1, 1 if of_all else replicas):
                reached = number + (1 if of_all else replicas - rank)  # of this list of batches
                given += 1
                place = position + int(offsets[min(reached, repeated_from)])
                if is_last and reached >= repeated_from:
                    place = planner.n_samples  # what is dropped behind it has had its turn
                if self._cursor.move(this, place):
                    self._record.step = step + (given // replicas if of_all else given)
                span = slice(int(offsets[number]), int(offsets[number + 1]))
                self.draws = None if draws is None else draws[span].tolist()
                if place == planner.n_samples and begun == 0 and not self._steps_asked:
                    self._warn_of_single_batches()  # here, as Lightning does not ask for more than the last batch
                yield self._keys(steps.indices[span])
                if self._interrupted is this:  # and no other iteration has begun since
                    return self._cursor.iteration is None
            position += int(offsets[repeated_from])
        if self._cursor.move(this, planner.n_samples):
            self._finished = this
            if self._epochs_differ:
                self._cursor.finish(this, begun, self)
            if self._order is not None:
                self._order.finished()
        return False

    def _warn_of_single_batches(self) -> None:
        """Warn of a `DataLoader` of torch whose loop seems to step after every batch."""
        if self._began is None:  # without tokens_per_step
            return
        micro_batches = self._began.micro_batches
        if micro_batches.max(initial=1) == 1 or not level_behind_loader(self):
            return
        self._steps_asked = True  # one warning is enough
        warn(
            f"tokens_per_step: epoch {self.epoch} has {len(micro_batches):,} optimizer steps, and a loader read its "
            f"{micro_batches.sum():,} batches on each rank, but nothing asked which batches belong to a step: a loop "
            "that steps after every batch takes too many. Take the batches from sampler.optimizer_steps(loader), give "
            "Lightning the callback TokensPerStep() and a Hugging Face Trainer a TrainerGuard(sampler), or read "
            "sampler.accumulation before the epoch"
        )

    @property
    def _epochs_differ(self) -> bool:
        """Whether another epoch would have other batches, and none comes unasked for."""
        return self.options.shuffle and (self._order is None or self._order.epochs_differ)

    def batch(self, number: int) -> list[Any]:
        """Return batch ``number`` of the epoch's global list, whatever the rank.

        Raises:
            IndexError: If there is no such batch.
        """
        planner, key = self._plan_epoch(), self._key(self.epoch)
        count = planner.count(key, 0)
        if not 0 <= number < count:
            raise IndexError(f"number must be an int from 0 to {count - 1}, the batches of the epoch, got {number}")
        return self._keys(planner.batch(key, number))

    def plan(self, epoch: int | None = None) -> BatchPlan:
        """Return all batches of an epoch, for all ranks together; those of the current epoch by default.

        Raises:
            ValueError: If the order of another epoch is not known, because ``sampler`` has neither ``set_epoch`` nor
                ``take``.
        """
        epoch = self.epoch if epoch is None else checked_epoch(epoch)
        self._first_step(epoch)
        with nullcontext() if self._order is None else self._order.at_epoch(epoch, self.epoch):
            return self._planned(epoch, self._plan_epoch(epoch), self.shapes)

    def _planned(
        self, epoch: int, planner: Planner | RestPlanner, shapes: tuple[tuple[int, int], ...] | None
    ) -> BatchPlan:
        indices, offsets = _joined(planner, self._key(epoch), len(self._prepared.sizes))
        budget, pieces = self.max_total_size, self._pieces
        return BatchPlan(
            indices if pieces is None else pieces.samples[indices],
            offsets,
            self._sizes_to_plan() if pieces is None else self.sizes,
            tuple(budget) if isinstance(budget, list) else (budget,),
            cost=self.options.cost,
            oversize=self.oversize_indices,
            skipped=self.options.oversize == "skip",
            num_replicas=self.num_replicas,
            tail=self.tail,
            length_multiple=self.options.length_multiple,
            work=self.work,
            shapes=shapes,
            starts=None if pieces is None else pieces.starts[indices],
            lengths=None if pieces is None else pieces.lengths[indices],
            steps=self._steps_of(epoch, planner),
            curriculum=self._curriculum_of(epoch, planner, len(offsets) - 1),
            max_items=self.options.max_items,
        )

    def _steps_of(self, epoch: int, planner: Planner | RestPlanner) -> OptimizerSteps | None:
        if not isinstance(planner, StepPlanner):
            return None
        first = self._first_step(epoch)
        asked = [float(planner.steps.schedule.at(first + step)) for step in range(planner.n_steps)]
        return OptimizerSteps(planner.starts, asked)

    def _curriculum_of(self, epoch: int, planner: Planner | RestPlanner, n_batches: int) -> CurriculumReport | None:
        steps = self.options.curriculum
        if steps is None:
            return None
        if isinstance(planner, StepPlanner):
            ramp, passed, stop = steps, self._steps_before(epoch), self._steps_before(epoch + 1)
        elif isinstance(planner, StrataPlanner | CurriculumPlanner):
            ramp, passed = steps * self._curriculum_ranks(epoch), planner.passed
            stop = passed + n_batches
        else:  # no samples
            return None
        return CurriculumReport(steps, *competence(np.array([passed, stop]), ramp).tolist())

    def report(self, epoch: int | None = None) -> PlanReport:
        """Return figures about the batches of an epoch, compared with those of the epoch before.

        Epoch 0 is compared with epoch 1. Both epochs are planned. There is no comparison without ``shuffle``, or if the
        order of another epoch is not known. With ``shapes`` the epoch is also planned without them.

        Args:
            epoch: The current one by default.
        """
        epoch = self.epoch if epoch is None else checked_epoch(epoch)
        other = None
        if self.options.shuffle and (self._order is None or self._order.knows_epochs):
            other = self.plan(epoch - 1 if epoch else 1)
        return self.plan(epoch).report(other=other, without_shapes=self._plan_without_shapes(epoch))

    def _plan_without_shapes(self, epoch: int) -> BatchPlan | None:
        """Return the batches that there would be without ``shapes``; None where they are not limited."""
        if self.options.shapes is None:
            return None
        options = replace(self.options, shapes=None, curriculum=None)
        prepared = prepare(self._sizes_to_plan(), self.max_total_size, options)
        with nullcontext() if self._order is None else self._order.at_epoch(epoch, self.epoch):
            order = None if self._order is None else self._order.order()
            return self._planned(epoch, make_planner(prepared, options, order), None)

    def worst_batches(self, k: int = 4, epoch: int | None = None) -> list[list[Any]]:
        """Return the k most expensive batches of an epoch, over all ranks, the most expensive first.

        Batches are compared by their share of the budget. If a run can run out of memory in this epoch, it does so on
        one of these batches: `run_worst_batches` runs them before training.

        Args:
            k: Number of batches.
            epoch: The current one by default.
        """
        plan, most = self.plan(epoch), whole_number("k", k)
        shares = (batch_costs(plan) / np.array(plan.budget)).max(axis=1)
        return [plan.keys(int(number)) for number in np.argsort(-shares, kind="stable")[:most]]

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch to iterate over next; a loaded position of another epoch is discarded."""
        changed = self._cursor.choose(checked_epoch(epoch))
        if changed:
            self._began, self._segments = None, []
        if self._order is not None:
            self._order.set_epoch(self.epoch, changed)

    def state_dict(self, position: int | None = None) -> dict[str, Any]:
        """Return the state for a resume: version, seed, epoch, position, fingerprint and the record of the run.

        Args:
            position: Number of samples that the training loop has received in this epoch, on all ranks together. By
                default the position of this sampler, which with workers is ahead of the loop.
        """
        segments = self._current_segments(position)
        record = self._record.state(self.epoch, self._cursor.position, self._settings())
        if position is None:
            position = self._cursor.position
        elif (position := self._checked_position(position)) != self._cursor.position:
            further = self._left(self._cursor.position) - self._left(position)
            record = self._record.at(self.epoch, position, further // (self.num_replicas if self._of_all else 1))
        values = (VERSION, self.seed, self.epoch, position, self._epoch_fingerprint(self.epoch))
        state = dict(zip(STATE, values, strict=True)) | record
        # Present also where they say nothing: torch.distributed.checkpoint loads no key that the present state lacks.
        if self._counts_ranks:
            state["curriculum_ranks"] = self._curriculum_ranks(self.epoch) if position or self._ranks_of_run else None
        if self._steps is not None:
            state["inside_step"] = [list(segment) for segment in segments]
        return state

    def load_state_dict(self, state: dict[str, Any], accept: Collection[str] = ()) -> None:
        """Resume from a state, at any world size: the rest of the epoch is distributed over the present ranks.

        If ``set_epoch`` chose a later epoch that was not iterated yet, the state is ignored.

        Args:
            state: The result of ``state_dict()``.
            accept: Differences from the run that saved the state to accept: names of arguments, such as
                ``{"max_total_size"}``, and ``"data"`` for appended samples. The rest of the epoch is then planned anew
                with the new arguments; samples that ``tail="drop"`` has dropped at the end of an epoch stay dropped.
                Changes of a ``cost`` function, of ``work`` or of existing sizes cannot be accepted; changes of
                ``sampler``, ``curriculum`` or ``tokens_per_step`` only at the beginning of an epoch.

        Raises:
            TypeError: If ``state`` is not a mapping.
            ValueError: If ``state`` was saved with other sizes or options, or another seed, or is not a state of this
                class.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"state must be a dict that state_dict() returned, got {type(state).__name__}")
        for name in (accept := {accept} if isinstance(accept, str) else set(accept)):
            one_of("accept", name, (*CHANGEABLE, DATA))
        epoch = self._checked_epoch_of(state)
        state = {**state, "epoch": epoch, "position": checked_int("position", state["position"], end=2**62)}
        record, before, loaded = complete_record(RunRecord.of(state)), self._reweights, False
        try:  # a fingerprint is that of the weights there were
            self._set_reweights(record.settings(epoch, state["position"])["reweight"])
            loaded = self._load(state, record, accept)
        finally:
            if not loaded:
                self._set_reweights(before)

    def _load(self, state: dict[str, Any], record: RunRecord, accept: Collection[str]) -> bool:
        """Resume where a state was taken; return whether, as a later ``set_epoch`` may have chosen another epoch."""
        epoch = state["epoch"]
        accepted = self._checked_fingerprint(state, epoch, record, accept)
        if self._cursor.overrules(epoch):
            return False
        order, changed = self._order, epoch != self.epoch
        if order is not None:
            if state["position"]:
                order.refuse_resume()
            self._first_step(epoch)
            order.set_epoch(epoch, changed)
        segments: list[Segment] = []
        before, excluded = self._record, self._excluded
        ranks = None
        if self._counts_ranks and (state["position"] or state.get("curriculum_ranks") is not None):
            ranks = checked_int("state['curriculum_ranks']", state.get("curriculum_ranks"), 1)
        try:
            position = state["position"]
            recorded = bool(record.changes)
            left_out = record.settings(epoch, position)["exclude"] if recorded else excluded
            if max(left_out, default=0) >= max(1, len(self.sizes)):
                raise ValueError(f"state['run'] must leave out samples below {len(self.sizes)}: it was changed")
            self._set_record(record, left_out)
            if accepted or not recorded:
                self._change(epoch, position)
            position = self._checked_position(position, epoch)
            if self._steps is not None and position:
                segments = self._plan_steps(epoch).checked_segments(position, state.get("inside_step"))
        except (TypeError, ValueError):
            self._set_record(before, excluded)
            if order is not None:
                order.set_epoch(self.epoch, changed)
            raise
        self._cursor.resume(epoch, position)
        self._began, self._segments, self._ranks_of_run = None, segments, ranks
        return True

    def _split(self) -> Pieces | None:
        """Return the pieces that samples are cut into; None where none is."""
        longest = longest_piece(self.sizes, self.max_total_size, self.options.batch_cost, self.max_length[0])
        return None if math.isinf(longest) else pieces_of(self.sizes, longest)

    def _sizes_to_plan(self) -> NDArray[Any]:
        return capped_sizes(self.sizes, self.max_length) if self._pieces is None else self._pieces.lengths

    def _keys(self, planned: NDArray[Any]) -> list[Any]:
        """Return what was planned as batches name it: ints, and pieces where samples are cut."""
        if self._pieces is not None:
            return self._pieces.keys(planned)
        keys: list[int] = planned.tolist()
        return keys

    @staticmethod
    def _make(sizes: NDArray[Any], max_total_size: Any, **arguments: Any) -> DistributedSizeAwareBatchSampler:
        return DistributedSizeAwareBatchSampler(sizes, max_total_size, **arguments)

    def _key(self, epoch: int) -> int:
        return int(fold_in(self.seed, epoch if self.options.shuffle else 0)[0])

    def _plan_epoch(self, epoch: int | None = None, at: int | None = None) -> Planner | RestPlanner:
        """Return the planner of an epoch, by default the current one; it reads the order where a sampler gives it.

        Where the epoch has changed, that of the rest at a position: the current one, or 0 in another epoch.
        """
        if at is None:
            at = self._cursor.position if epoch in (None, self.epoch) else 0
        rests = [
            one.planner for one in self._planned_parts(self.epoch if epoch is None else epoch)[1:] if one.position <= at
        ]
        if rests:
            return rests[-1]
        order = None if self._order is None else self._order.order()
        epoch = self.epoch if epoch is None else epoch
        needed: tuple[int, ...] = ()
        ramp = None
        if self._steps is not None:
            needed = epoch, self.num_replicas
        elif self.options.curriculum is not None:
            needed = (self._curriculum_ranks(epoch),)
            ramp = Ramp(self.options.curriculum, *needed)
        if self._planner is None or self._planner[0] is not order or self._planner[1] != needed:
            made: Planner | None = self._make_step_planner(order, *needed) if self._steps else None
            made = made or make_planner(self._prepared, self.options, order, ramp, self._presorted)
            self._planner = order, needed, made
        planner = self._planner[2]
        if isinstance(planner, StrataPlanner | CurriculumPlanner):
            planner = planner.at_epoch(epoch)
            self._planner = order, needed, planner
        return planner

    def _presorted(self) -> Sorted | None:
        """Return the samples by size from the cache of plans; None where there is none.

        Samples that are excluded come one by one in a run: a file for each set of them would fill the disk.
        """
        if self._plan_cache is None or self._known is None or self._excluded:
            return None
        return self._plan_cache.sorted(self._prepared, self._known)

    def _recorded_options(self) -> dict[str, Any]:
        """Return the arguments that may change, in JSON; of a function that it is one."""
        own = {
            **vars(self.options),
            "max_total_size": self.max_total_size,
            "tail": self.tail,
            "max_length": self.max_length[0] if len(self.max_length) == 1 else self.max_length,
            "tokens_per_step": self.tokens_per_step,
        }
        return {name: plain("a function" if callable(own[name]) else own[name]) for name in CHANGEABLE}

    def _balance(self) -> Balance | None:
        """Return how the samples of a last step are dealt to the ranks; None where their order is kept."""
        if self._of_all or self.options.strategy == "sequential":
            return None
        return partial(balance_evenly, self._prepared)

    @property
    def _counts_ranks(self) -> bool:
        return self.options.curriculum is not None and self._steps is None

    def _curriculum_ranks(self, epoch: int) -> int:
        """Return the number of ranks whose batches are a step of the curriculum: of now, until the run begins."""
        if self._ranks_of_run is None or (not self._past and epoch == self.epoch == self._cursor.position == 0):
            return self.num_replicas
        return self._ranks_of_run

    def _make_step_planner(self, order: SliceOrder | None, epoch: int, replicas: int) -> StepPlanner:
        steps = self._with_tokens()
        own = (ShuffledOrder if self.options.shuffle else natural_order)(self._prepared.n_samples, self._prepared.kept)
        total, first, key = steps.total(order), self._first_step(epoch), self._key(epoch)
        if (ramp := self.options.curriculum) is not None:
            passed = self._steps_before(epoch)
            if passed < ramp:
                own = steps.short_first(key, Ramp(ramp, 1), passed, first)
        return StepPlanner(steps, order or own, key, first, total, replicas)

    def _begin_steps(self, planner: StepPlanner, position: int, replicas: int) -> tuple[Tail, Iterator[Steps]]:
        """Begin an iteration over optimizer steps, which are distributed to the ranks one by one."""
        micro_batches = planner.micro_batches(position, self._segments)
        batches, segments = planner.begin(position, self._segments)
        self._began, self._segments = _Beginning(planner, position, segments, micro_batches), []
        return "split", distribute_packed(batches, replicas)

    def _plan_steps(self, epoch: int | None = None) -> StepPlanner:
        self._with_tokens()
        return cast(StepPlanner, self._plan_epoch(epoch))

    def _with_tokens(self) -> TokenSteps:
        if self._steps is None:
            raise ValueError("the sampler must have tokens_per_step for that, got none: give it to the constructor")
        return self._steps

    def _n_steps(self, steps: TokenSteps, first: int, epoch: int) -> int:
        """Return the number of optimizer steps of an epoch, reading its order where a sampler gives it."""
        if self._order is None:
            return steps.n_steps(first, None)
        with self._order.at_epoch(epoch, self.epoch):
            return steps.n_steps(first, self._order.order())

    def _steps_before(self, epoch: int) -> int:
        """Return the number of optimizer steps of the epochs before one, for a curriculum, which has no ``sampler``."""
        return self._first_step(epoch) or epoch * self._with_tokens().n_steps(0, None)

    def _first_step(self, epoch: int) -> int:
        """Return the number of the first optimizer step of an epoch; 0 where all steps are alike."""
        if self._steps is None or len(self._steps.schedule.stages) == 1:
            return 0
        while len(self._firsts) <= epoch:
            first = self._firsts[-1]
            self._firsts.append(first + self._n_steps(self._steps, first, len(self._firsts) - 1))
        return self._firsts[epoch]

    def _current_segments(self, position: int | None = None) -> list[Segment]:
        """Return how the optimizer step at the current position, or at another one, was packed so far."""
        if self._steps is None or (position is None and self._began is None):
            return self._segments
        position = self._cursor.position if position is None else self._checked_position(position)
        planner, began, segments = self._plan_steps(), self._cursor.start, self._segments
        if self._began is not None:
            planner, began, segments = self._began[:3]
        elif segments:
            segments = planner.begin(began, segments)[1]
        return planner.segments(position, began, segments)

    def _n_batches(self, n_batches: int) -> int:
        """Return how many of a list of batches are this rank's, or those of all ranks."""
        steps = n_steps(n_batches, self.num_replicas, self.tail)
        return steps * self.num_replicas if self._of_all else steps

    def _refuse_empty(self, n_batches: int, replicas: int) -> None:
        if self.tail == "drop" and 0 < n_batches < replicas:
            raise ValueError(
                f"tail='drop' must leave each of {replicas} ranks at least one batch, got {n_batches} batches: "
                "use tail='split' or 'pad', fewer ranks, or a smaller budget"
            )

    def _epoch_fingerprint(self, epoch: int) -> str:
        """What states hold: a sampler's schedule may change behind their epoch."""
        return self._fingerprint_with(None if self._order is None else self._order.epoch_fingerprint(epoch))

    def _fingerprint_with(self, order: str | None) -> str:
        if order not in self._fingerprints:
            self._fingerprints[order] = fingerprint(self._fingerprint_parts(order))
        return self._fingerprints[order]

    def _fingerprint_parts(self, order: str | None) -> dict[str, Any]:
        """Return all that decides the batches, by the names of the arguments."""
        return {
            "sizes": self.sizes if self._known is None else self._known.fingerprint,
            "max_total_size": self.max_total_size,
            **self.options.parts,
            "cost": self._prepared.cost.digest(
                self.sizes if self._pieces is None else self._pieces.lengths, self._prepared.limits.capacity
            ),
            "shapes": self.shapes,
            "sampler": order,
            "seed": self.seed,
            "tail": self.tail,
            "max_length": self.max_length[0] if len(self.max_length) == 1 else self.max_length,
            "work": self.work,
            "tokens_per_step": self.tokens_per_step,
        }

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
            if state[name] != value and not (name == "version" and state[name] in READS):
                raise ValueError(
                    f"state[{name!r}] must be {value!r} for this sampler, got {shown(state[name])}: {cures[name]}"
                )
        return checked_epoch(state["epoch"])

    def _checked_fingerprint(
        self, state: Mapping[str, Any], epoch: int, record: RunRecord, accept: Collection[str]
    ) -> bool:
        """Refuse a state of other sizes or options than may differ; return whether any of these do."""
        if (other := state["fingerprint"]) == (own := self._epoch_fingerprint(epoch)):
            return False
        message = "state['fingerprint'] must be that of the same sizes, budget, options and sampler, got "
        parts = self._fingerprint_parts(None)
        if not of_such_parts(parts, other):
            raise ValueError(f"{message}that of another class or version of headrace: load it where it was saved")
        held = record.settings(epoch, state["position"])
        n_samples = held.get("n", len(self.sizes))
        if (accept and record.changes) and (DATA in accept or n_samples == len(self.sizes)):
            before = {name: value for name, value in held["options"].items() if name in accept}
            if n_samples <= len(self.sizes):
                then = self._with({"options": {**self._own_options, **before}, "n": n_samples}, epoch)
                if (own := then._epoch_fingerprint(epoch)) == other:
                    return True
                parts = then._fingerprint_parts(None)
        names = differing(parts, own, other)
        plain = [name.split(" ")[0] for name in names]
        # A function is compared by what it allows at these sizes within the budget.
        other_function = "cost" in plain and "sizes" not in plain and callable(self.options.cost)
        if other_function:
            changed = {name: value for name, value in held["options"].items() if name in CHANGEABLE and name != "cost"}
            then = self._with({"options": {**self._own_options, **changed}, "n": n_samples}, epoch)
            left = differing(then._fingerprint_parts(None), then._epoch_fingerprint(epoch), other)
            if not (other_function := "cost" in left):
                names.remove("cost")
                plain.remove("cost")
        grown = plain == ["sizes"] and n_samples < len(self.sizes)
        may = {DATA} if grown else {*plain} if {*plain} <= {*CHANGEABLE} and not other_function else set()
        cure = f", go on with accept={shown(sorted({*accept, *may}))}" if may and record.changes else ""
        if "sizes" in names and "n" in held:
            count = f"{n_samples:,} samples, here {len(self.sizes):,}"
            others = "others, or in another order" if n_samples == len(self.sizes) else count
            names[names.index("sizes")] = f"sizes ({others})"
        reweighted = ""
        if "sampler" in names and self._order is not None and self._order.mixes:
            names[names.index("sampler")] = f"sampler ({OF_A_MIXTURE})"
            if held["reweight"]:
                reweighted = f"; {REWEIGHTED.format(draw=held['reweight'][-1][0])}"
        if other_function:
            names[names.index("cost")] = "cost (another function, which cannot be accepted: give that of the run)"
        saved = {name: held["options"][name] for name in plain if name in held["options"]}
        saved = {name: value for name, value in saved.items() if value is None or isinstance(value, Real)}
        as_saved = f" ({', '.join(f'{name}={value!r}' for name, value in saved.items())})" if saved else ""
        raise ValueError(
            f"{message}one that differs in {', '.join(names)}: construct the sampler as in the run that saved it"
            f"{as_saved}{cure}, or start a new run{reweighted}"
        )

    def _checked_position(self, position: Any, epoch: int | None = None) -> int:
        n_samples = self._plan_epoch(epoch, checked_int("position", position)).n_samples
        return checked_int("position", position, end=n_samples + 1, noun=", the samples of the epoch")

    def __getstate__(self) -> dict[str, Any]:
        # A planner is large and is made again when it is needed.
        segments = {"_began": None, "_segments": self._current_segments()}
        own = {"_planner": None, "_plans": None, "_cursor": copy(self._cursor), "_record": deepcopy(self._record)}
        return self.__dict__ | own | {"_interrupted": None, "_finished": None} | segments


class _Beginning(NamedTuple):
    """Where the latest iteration over optimizer steps began."""

    planner: StepPlanner
    position: int
    segments: list[Segment]
    micro_batches: NDArray[np.int64]


class EpochSetter:
    """Passes ``set_epoch`` on to the batch sampler that it belongs to."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    @never_raises
    def __repr__(self) -> str:
        return f"{type(self).__name__} of {inner(self._owner)}"

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch to iterate over next."""
        self._owner.set_epoch(epoch)


def _refuse_beside_tokens(options: Options, tail: Tail) -> None:
    """Refuse options that mean nothing where optimizer steps are packed by their tokens."""
    allowed = "stratified" if options.batch_cost.name == "sum" else "bucketed"
    if options.strategy != allowed:
        kind = "cost='sum'" if allowed == "stratified" else "padded batches"
        cure = ", or cost='padded'" if options.strategy == "bucketed" else ""
        raise ValueError(
            f"strategy must be {allowed!r} for {kind} with tokens_per_step{cure}, got {options.strategy!r}: the "
            "samples of a step come in the order of the list, and are packed for all ranks together"
        )
    if tail == "pad":
        raise ValueError("tail must be 'split' or 'drop' with tokens_per_step, got 'pad': a step has no repeats")
    for name, usual in (("window", None), ("batch_size_multiple", 1), ("shapes", None), *ADDED.items()):
        if (value := getattr(options, name)) != usual:
            raise ValueError(f"{name} must be {usual} with tokens_per_step, whose steps are packed whole, got {value}")


def _kept(sizes: NDArray[Any]) -> NDArray[Any]:
    """Return sizes that nobody else can change."""
    if sizes.flags.writeable:
        sizes = sizes.copy()
        sizes.flags.writeable = False
    return sizes


def _joined(planner: Planner | RestPlanner, epoch_key: int, n_samples: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return all batches of an epoch as indices and offsets, written in place as they are planned."""
    indices = np.empty(planner.n_samples, index_type(n_samples))
    counts, filled = [np.zeros(0, np.int32)], 0
    for part, offsets in planner.batches(epoch_key, 0):
        indices[filled : filled + len(part)] = part
        counts.append(np.diff(offsets).astype(np.int32))
        filled += len(part)
    return indices[:filled], np.concatenate([[0], np.cumsum(np.concatenate(counts), dtype=np.int64)])


def warn_of_repetition(again: list[Any], replicas: int, repeated: int) -> None:
    """Name the samples that the last step repeats because there are too few to split."""
    warn(
        f"tail='split': the last batches hold too few samples for one on each of {replicas} ranks; {repeated} "
        f"ranks repeat samples {again[:10]}{' ...' if len(again) > 10 else ''}"
    )
