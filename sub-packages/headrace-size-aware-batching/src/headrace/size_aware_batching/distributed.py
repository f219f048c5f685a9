"""Planned batches: full, random, the same number on every rank, resumable at any position."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, Literal, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching._shared.checks import checked_int
from headrace.size_aware_batching._shared.cursor import level_behind_loader
from headrace.size_aware_batching._shared.display import never_raises
from headrace.size_aware_batching._shared.epoch_plan import PlannedBatch
from headrace.size_aware_batching._shared.keywords import explains_keywords
from headrace.size_aware_batching._shared.ranks import Mesh
from headrace.size_aware_batching._validation import checked_epoch, checked_seed, counted, one_of, warn, whole_number
from headrace.size_aware_batching.plan import BatchPlan
from headrace.size_aware_batching.planning.costs import CostFunction
from headrace.size_aware_batching.planning.distribution import n_steps
from headrace.size_aware_batching.planning.foreign_sampler import OwnOrder, SamplerOrder
from headrace.size_aware_batching.planning.list_plan import ACCEPTED, notice_of_waves
from headrace.size_aware_batching.planning.optimizer_steps import TokenPlan
from headrace.size_aware_batching.planning.options import CHANGEABLE, DATA, Oversize, SamplerOptions, Strategy, Tail
from headrace.size_aware_batching.planning.plan_cache import PlanCache
from headrace.size_aware_batching.planning.planner import SizeAwarePlan, SizeAwarePlanner
from headrace.size_aware_batching.planning.samples import Samples
from headrace.size_aware_batching.report import CurriculumReport, PlanReport, batch_costs
from headrace.size_aware_batching.run_sampler import SizeAwareSampler, budget_in_words

Batch = TypeVar("Batch")


class DistributedSizeAwareBatchSampler(SizeAwareSampler):
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
            ``tokens_per_step``, else one batch on each of the ranks with which the run began; states hold their number,
            so that another world size resumes exactly. Needs ``shuffle``; not with ``"sequential"`` or ``sampler``.
        window: Number of samples that are planned together. A larger window gives fuller batches, a smaller one more
            randomness. By default it depends on the strategy.
        balanced_ranks: Number of ranks for which steps have equal work; steps are also balanced for its divisors. This
            many batches of similar work form a group, and the groups come in random order: larger groups make
            successive steps similar. By default the number of ranks with which the run begins; states hold it, so that
            a resume on other ranks keeps the order. An epoch of few batches uses a divisor. With a ``sampler`` or
            ``shuffle=False``, groups restart in each window, so some steps straddle two groups: a multiple of your
            number of ranks balances them better. Not with ``"sequential"`` or ``tokens_per_step``.
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

    @explains_keywords
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
        curriculum: int | None = None,
        window: int | None = None,
        balanced_ranks: int | None = None,
        work: Any = None,
        tokens_per_step: float | Sequence[tuple[int, float]] | None = None,
        accumulate: int | None = None,
        plan_cache: str | os.PathLike[str] | None = None,
    ) -> None:
        options = SamplerOptions.of(locals())
        if curriculum is not None and sampler is not None:
            raise ValueError(
                f"curriculum={options.curriculum} and sampler were both given, but the sampler decides the order: "
                "leave out one"
            )
        seed = checked_seed(seed)
        cache = None if plan_cache is None else PlanCache(plan_cache)
        if cache is not None and options.strategy == "sequential":
            warn("plan_cache has no effect with strategy='sequential', which sorts nothing: leave it out")
        samples = Samples.read(sizes, options, work, cache)
        order = OwnOrder() if sampler is None else SamplerOrder(sampler, len(samples))
        planner = SizeAwarePlanner.of(type(self).__name__, samples, options, order, seed)
        super().__init__(planner, num_replicas, rank, mesh)
        self._steps_asked = accumulate is not None  # whether a loop may know which batches belong to a step
        self._waves_named = False  # one warning is enough
        self.draws: list[int] | None = None

    @property
    def _planner(self) -> SizeAwarePlanner:
        return cast(SizeAwarePlanner, self._run.planner)

    @property
    def sizes(self) -> NDArray[Any]:
        """Sizes of the samples, read-only."""
        return self._planner.samples.sizes

    @property
    def work(self) -> NDArray[np.float64] | None:
        """What steps are balanced by, if it was given."""
        return self._planner.samples.work

    @property
    def options(self) -> SamplerOptions:
        """The arguments that decide which batches there are."""
        return self._planner.options

    @property
    def max_total_size(self) -> Any:
        """Budget of a batch."""
        return self._planner.options.max_total_size

    @property
    def max_length(self) -> tuple[float | None, ...]:
        """Limit of each column of sizes."""
        return self._planner.samples.max_length

    @property
    def tail(self) -> Tail:
        """Policy for the last batches."""
        return self._planner.options.tail

    @property
    def seed(self) -> int:
        """Key of all randomness."""
        return self._planner.seed

    @property
    def tokens_per_step(self) -> Any:
        """Tokens of an optimizer step, or ``((first step, tokens), ...)``; None if not given."""
        return self._planner.options.tokens_per_step

    @property
    def accumulate(self) -> int:
        """Number of micro-batches in the optimizer step of the latest batch, or of the next batch if none was yielded.

        1 without ``tokens_per_step``. With workers the latest batch is ahead of the loop, so in a schedule with stages
        use `optimizer_steps` or `accumulation`, which are always correct.
        """
        if self.tokens_per_step is None:
            return 1
        self._steps_asked = True
        micro_batches, step, run = self._micro_batches(), 0, self._run
        if (latest := run.iteration) is not None:
            plan, first = cast(TokenPlan, latest.plan), latest.began.position
            step = plan.step_of(max(run.position - 1, first)) - plan.step_of(first)
        return int(micro_batches[step]) if len(micro_batches) else 1

    @property
    def accumulation(self) -> NDArray[np.int64] | None:
        """Number of micro-batches in each optimizer step of the latest iteration; the sum is its number of batches.

        If a state was loaded or another epoch chosen since then, the numbers of the next iteration. None without
        ``tokens_per_step``.
        """
        self._steps_asked = True
        return None if self.tokens_per_step is None else self._micro_batches()

    def _micro_batches(self) -> NDArray[np.int64]:
        run = self._run
        if (latest := run.iteration) is not None:
            return cast(TokenPlan, latest.plan).micro_batches(latest.began, latest.world)
        return cast(TokenPlan, run.current_plan()).micro_batches(run.start, run.world)

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
        self._planner.cutter_for("optimizer_steps")
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
        return self._planner.cutter_for("tokens_at").schedule.at(checked_int("step", step))

    def num_optimizer_steps(self, epoch: int | None = None) -> int:
        """Return the number of optimizer steps of a whole epoch, by default the current one, at any world size.

        Without a ``sampler`` argument it needs no planning.
        """
        epoch = self.epoch if epoch is None else checked_epoch(epoch)
        return self._planner.n_optimizer_steps(epoch, self._run.history)

    @property
    def oversize_indices(self) -> NDArray[np.int64]:
        """Samples that exceed a budget by themselves, ascending: skipped, cut, or in batches of their own.

        With ``"split"`` also the samples that are only longer than ``max_length``.
        """
        return self._planner.oversize

    @property
    def skipped_indices(self) -> NDArray[np.int64]:
        """The samples that no epoch delivers: all of ``oversize_indices`` with ``oversize="skip"``, else none."""
        return self._planner.skipped

    @property
    def shapes(self) -> tuple[tuple[int, int], ...] | None:
        """Shapes that batches are padded to, (count, length) in order of length; their number is limited by ``shapes``.

        A batch has the shortest length that holds its samples. Nearly all batches have the count of their shape; none
        has more. Some of the last batches of an epoch, and one in each window, have fewer: `PaddedCollate` adds rows of
        padding. None if ``shapes`` was not given.
        """
        shapes = self._planner.all_prepared.shapes
        return None if shapes is None else shapes.pairs()

    @property
    def fingerprint(self) -> str:
        """Hex digest of the sizes, the options, the seed and the order of ``sampler``."""
        return self._planner.fingerprint

    @never_raises
    def __repr__(self) -> str:
        planner, ranks = self._planner, self._ranks_in_words()
        with suppress(ValueError):  # of an environment that contradicts what was given
            if (n_batches := planner.known_count()) is not None:
                ranks += f" x {counted(n_steps(n_batches, self.num_replicas, self.tail), 'step')}"
        figures = [
            counted(planner.prepared.n_samples, "sample"),
            *([f"ordered by {type(planner.order.sampler).__name__}"] if planner.order.is_given else []),
            budget_in_words(self.max_total_size),
            self.options.strategy,
            ranks,
        ]
        steps = []
        if (schedule := planner.options.schedule) is not None:
            stages = " then ".join(f"{tokens:,}" for _, tokens in schedule.stages)
            steps.append(f"{stages} tokens an optimizer step")
        if (n_optimizer_steps := planner.known_optimizer_steps(self.epoch)) is not None:
            steps.append(counted(n_optimizer_steps, "optimizer step"))
        return self._in_words(figures, steps)

    def _delivered(self, batch: PlannedBatch) -> None:
        """Note a batch before it is yielded."""
        self.draws = batch.draws
        if not self._steps_asked:
            self._warn_of_single_batches()  # here, as Lightning does not ask for more than the last batch

    def _warn_of_single_batches(self) -> None:
        """Warn of a `DataLoader` of torch whose loop seems to step after every batch."""
        latest = self._run.iteration
        if latest is None or self.tokens_per_step is None or latest.began.position:
            return
        plan = cast(TokenPlan, latest.plan)
        if self.position < plan.end:
            return
        micro_batches = plan.micro_batches(latest.began, latest.world)
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

    def batch(self, number: int) -> list[Any]:
        """Return batch ``number`` of the epoch's global list, whatever the rank.

        Raises:
            IndexError: If there is no such batch.
        """
        plan = cast(SizeAwarePlan, self._run.current_plan())
        batches = plan.batches(self.num_replicas)
        if not 0 <= number < (count := batches.count()):
            raise IndexError(f"number must be an int from 0 to {count - 1}, the batches of the epoch, got {number}")
        return plan.keys(batches.batch(number))

    def plan(self, epoch: int | None = None) -> BatchPlan:
        """Return all batches of an epoch, for all ranks together; those of the current epoch by default.

        Raises:
            ValueError: If the order of another epoch is not known, because ``sampler`` has neither ``set_epoch`` nor
                ``take``.
        """
        epoch, run = self.epoch if epoch is None else checked_epoch(epoch), self._run
        plan = cast(SizeAwarePlan, run.current_plan() if epoch == self.epoch else run.plan(epoch))
        return self._batch_plan(self._planner, plan, epoch)

    def _batch_plan(self, planner: SizeAwarePlanner, plan: SizeAwarePlan, epoch: int) -> BatchPlan:
        world, samples, options, pieces = self.num_replicas, planner.samples, planner.options, planner.samples.pieces
        indices, offsets = plan.batches(world).joined(len(planner.prepared.sizes))
        budget, shapes = options.max_total_size, planner.all_prepared.shapes
        shares = planner.curriculum_shares(epoch, len(offsets) - 1, self._run.history)
        return BatchPlan(
            indices if pieces is None else pieces.samples[indices],
            offsets,
            samples.to_plan if pieces is None else samples.sizes,
            tuple(budget) if isinstance(budget, list) else (budget,),
            cost=options.cost,
            oversize=planner.oversize,
            skipped=options.oversize == "skip",
            num_replicas=world,
            tail=options.tail,
            length_multiple=options.length_multiple,
            work=samples.work,
            shapes=None if shapes is None else shapes.pairs(),
            starts=None if pieces is None else pieces.starts[indices],
            lengths=None if pieces is None else pieces.lengths[indices],
            steps=plan.optimizer_steps,
            curriculum=None if shares is None else CurriculumReport(options.curriculum or 0, *shares),
            max_items=options.max_items,
            balanced_ranks=None if options.strategy == "sequential" else plan.balanced_ranks,
        )

    def report(self, epoch: int | None = None) -> PlanReport:
        """Return figures about the batches of an epoch, compared with those of the epoch before.

        Epoch 0 is compared with epoch 1. Both epochs are planned. There is no comparison without ``shuffle``, or if the
        order of another epoch is not known. With ``shapes`` the epoch is also planned without them. One warning says
        if successive steps hold samples of similar size, because the run began with more ranks than it has now.

        Args:
            epoch: The current one by default.
        """
        epoch = self.epoch if epoch is None else checked_epoch(epoch)
        planner, other, without_shapes = self._planner, None, None
        if self.options.shuffle and planner.order.knows_epochs:
            other = self.plan(epoch - 1 if epoch else 1)
        if self.options.shapes is not None:
            unlimited = planner.without_shapes()
            without_shapes = self._batch_plan(unlimited, unlimited.plan(epoch, self._run.history), epoch)
        plan = self.plan(epoch)
        report = plan.report(other=other, without_shapes=without_shapes)
        if plan.balanced_ranks is None or self.options.chooses_order or self._waves_named:
            return report
        alike, ranks = report.autocorrelation, plan.balanced_ranks
        if notice := notice_of_waves(alike, report.steps, ranks, plan.num_replicas, ACCEPTED):
            self._waves_named = True
            warn(notice)
        return report

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

    def reweight(self, weights: Any, draw: int | None = None) -> tuple[int, int]:
        """Change the weights of the mixture that is the ``sampler``; not with ``tokens_per_step``."""
        self._planner.refuse_reweight()
        return super().reweight(weights, draw)

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
        for name in (accept := {accept} if isinstance(accept, str) else set(accept)):
            one_of("accept", name, (*CHANGEABLE, DATA))
        self._run.load(state, accept)
