"""Planned batches of optimizer steps that hold so many tokens, and the same samples at any world size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Literal, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching._shared.checks import checked_int, shown
from headrace.size_aware_batching._shared.display import counted, never_raises
from headrace.size_aware_batching._shared.epoch_plan import PlannedBatch
from headrace.size_aware_batching._shared.ranks import Mesh
from headrace.size_aware_batching._shared.warnings import is_behind_loader, warn
from headrace.size_aware_batching._validation import checked_epoch, one_of
from headrace.size_aware_batching.planned_sampler import PlannedSampler
from headrace.size_aware_batching.planning.costs import CostFunction
from headrace.size_aware_batching.planning.options import Oversize, SamplerOptions
from headrace.size_aware_batching.planning.planner import SizeAwarePlanner
from headrace.size_aware_batching.planning.token_schedule import TokenSchedule
from headrace.size_aware_batching.planning.token_steps import TokenPlan

Batch = TypeVar("Batch")


class OptimizerStepBatchSampler(PlannedSampler):
    """Micro-batches of optimizer steps that hold so many tokens, the same number of them on every rank.

    An optimizer step holds ``tokens_per_step`` tokens, over all ranks and accumulated micro-batches, and the same
    samples at any world size: its samples are a random part of the epoch, packed into micro-batches within the budget
    for the ranks that there are, of like work on all of them. `optimizer_steps` yields the micro-batches of each step.

    Epochs, resuming, changes and long samples are those of `DistributedSizeAwareBatchSampler`, with these differences.
    A state that is saved inside an optimizer step records how that step was packed (``inside_step``); a resume delivers
    the rest of the step, packed for its ranks. ``step(n)`` counts micro-batches, one on each rank, as there, and
    ``skip`` skips whole optimizer steps. ``exclude`` and ``load_state_dict(state, accept=...)`` change the run at the
    beginning of an epoch only, and ``reweight`` never: give the weights to the mixture's ``schedule``.

    Planning an epoch takes about a second for a million samples.

    Args:
        sizes: Size of each sample, as for `DistributedSizeAwareBatchSampler`.
        max_total_size: Budget of a micro-batch; for sizes of shape ``[n, k]`` a sequence of k.
        tokens_per_step: Tokens of an optimizer step, in the unit of the sizes (of the first column), to within the
            longest sample. A schedule ``[(first step, tokens), ...]`` varies it; its steps count over all epochs.
        accumulate: Number of micro-batches in an optimizer step on each rank, for loops with a fixed number. By default
            the smallest number that holds every step of the epoch, or of a stage of ``tokens_per_step``.
        cost: ``"sum"`` of the sizes; ``"padded"``, count times largest, for padded batches; or ``f(n, largest)`` in any
            unit, which must not fall when n or the largest size grows.
        sampler: Order of the samples, the same on every rank, as for `DistributedSizeAwareBatchSampler`.
        shuffle: Whether every epoch has a different order.
        seed: Key of all randomness, 0 to 2**64 - 1.
        max_items: Largest number of samples in a micro-batch.
        length_multiple: The length of a batch is rounded up to a multiple of this; not with ``cost="sum"``.
        oversize: Policy for a sample that exceeds a budget by itself: ``"raise"`` an error in the constructor (the
            default here), ``"skip"`` the sample, give it its ``"own_batch"``, over the budget, or ``"split"`` it into
            pieces.
        tail: Policy for the last optimizer step of an epoch, which is smaller: ``"split"`` keeps it, ``"drop"`` leaves
            it out.
        num_replicas: Number of data-parallel ranks, by default that of ``torch.distributed``.
        rank: Rank of this process, likewise. ``"all"``: the batches of all ranks, micro-batch by micro-batch.
        mesh: In place of both: a 1-D ``DeviceMesh`` of the data-parallel ranks, or an object with ``size()`` and
            ``get_local_rank()``.
        max_length: Sizes are capped at this; the collate function must truncate the samples. For sizes of shape ``[n,
            k]`` a sequence with a number or None for each column. With ``oversize="split"`` it is the length of the
            longest piece.
        extra_per_sample: What each sample, or piece of one, has in the model beside its size, such as special tokens;
            ``tokens_per_step`` counts it. See `DistributedSizeAwareBatchSampler`.
        curriculum: Number of optimizer steps, from the beginning of epoch 0, in which short samples come first. Needs
            ``shuffle``; not with ``sampler``.
        work: Work of each sample, shape ``[n]``, in any unit, by which micro-batches are balanced over the ranks.

    Attributes:
        draws: For each sample of the latest batch, a number that distinguishes repeats of the same sample in the epoch,
            as in `DistributedSizeAwareBatchSampler`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument has a value that is not allowed, a sample is too large and ``oversize="raise"``, or a
            step is no larger than the longest sample.

    Example:
        >>> sampler = OptimizerStepBatchSampler([2, 3, 4, 1, 2, 4], 5, tokens_per_step=8, shuffle=False)
        >>> list(sampler), sampler.accumulation.tolist()
        ([[2], [1, 0], [5], [4, 3]], [2, 2])
    """

    def __init__(
        self,
        sizes: Any,
        max_total_size: float | Sequence[float],
        *,
        tokens_per_step: float | Sequence[tuple[int, float]],
        accumulate: int | None = None,
        cost: Literal["sum", "padded"] | CostFunction = "sum",
        sampler: Iterable[int] | None = None,
        shuffle: bool = True,
        seed: int = 0,
        max_items: int | None = None,
        length_multiple: int = 1,
        oversize: Oversize = "raise",
        tail: Literal["split", "drop"] = "split",
        num_replicas: int | None = None,
        rank: int | Literal["all"] | None = None,
        mesh: Mesh | None = None,
        max_length: float | Sequence[float | None] | None = None,
        extra_per_sample: float | Sequence[float] | None = None,
        curriculum: int | None = None,
        work: Any = None,
    ) -> None:
        one_of("tail", tail, ("split", "drop"))
        tokens_per_step = TokenSchedule.from_argument(tokens_per_step).value
        options = SamplerOptions.from_arguments(locals())
        super().__init__(options, sizes, work, None, None, sampler, seed, None, num_replicas, rank, mesh)
        self._steps_asked = accumulate is not None  # whether a loop may know which batches belong to a step

    @property
    def tokens_per_step(self) -> Any:
        """Tokens of an optimizer step, or ``((first step, tokens), ...)``."""
        return self.options.tokens_per_step

    @property
    def accumulate(self) -> int:
        """Number of micro-batches in the optimizer step of the latest batch, or of the next batch if none was yielded.

        With the workers of torch's `DataLoader` the latest batch is ahead of the loop, so in a schedule with stages
        use `optimizer_steps` or `accumulation`, which are always correct.
        """
        self._steps_asked = True
        micro_batches, step, run = self._micro_batches(), 0, self._run
        if (latest := run.iteration) is not None:
            plan, first = cast(TokenPlan, latest.plan), latest.began.position
            step = plan.step_of(max(run.position - 1, first)) - plan.step_of(first)
        return int(micro_batches[step]) if len(micro_batches) else 1

    @property
    def accumulation(self) -> NDArray[np.int64]:
        """Number of micro-batches in each optimizer step of the latest iteration; the sum is its number of batches.

        If a state was loaded or another epoch chosen since then, the numbers of the next iteration.
        """
        self._steps_asked = True
        return self._micro_batches()

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
            RuntimeError: If the loader yields another number of batches.

        >>> sampler = OptimizerStepBatchSampler([2, 3, 4, 1, 2, 4], 5, tokens_per_step=8, shuffle=False)
        >>> [[sampler.sizes[batch].tolist() for batch in step] for step in sampler.optimizer_steps(sampler)]
        [[[4], [3, 2]], [[4], [2, 1]]]
        """
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
        return TokenSchedule.from_argument(self.tokens_per_step).at(checked_int("step", step))

    def num_optimizer_steps(self, epoch: int | None = None) -> int:
        """Return the number of optimizer steps of a whole epoch, by default the current one, at any world size.

        A past epoch is counted with the data and options with which it began. Without a ``sampler`` argument it needs
        no planning.
        """
        epoch = self.epoch if epoch is None else checked_epoch(epoch)
        planner = cast(SizeAwarePlanner, self._run.planner_of(epoch))
        return planner.n_optimizer_steps(epoch, self._run.history)

    def reweight(self, weights: Any, draw: int | None = None) -> tuple[int, int]:
        """Refuse to change the weights of a mixture in the middle of a run: optimizer steps depend on them.

        Raises:
            TypeError: If there is no mixture.
            ValueError: If there is one.
        """
        self._planner.user_sampler.require_mixture()
        draws = "from the next draw" if draw is None else f"from draw {draw}"
        raise ValueError(
            f"reweight() must leave the weights of optimizer steps, got {shown(weights)} {draws} on: give them to the "
            "mixture's schedule=, and resume from a state of the beginning of an epoch"
        )

    @never_raises
    def __repr__(self) -> str:
        stages = " then ".join(f"{tokens:,}" for _, tokens in TokenSchedule.from_argument(self.tokens_per_step).stages)
        steps = [f"{stages} tokens an optimizer step"]
        if (n_optimizer_steps := self._planner.known_optimizer_steps(self.epoch)) is not None:
            steps.append(counted(n_optimizer_steps, "optimizer step"))
        return self._in_words(self._figures(), steps)

    def _note(self, batch: PlannedBatch) -> None:
        super()._note(batch)
        if not self._steps_asked:
            self._warn_of_single_batches()  # here, as Lightning does not ask for more than the last batch

    def _warn_of_single_batches(self) -> None:
        """Warn of a `DataLoader` of torch whose loop seems to step after every batch."""
        latest = self._run.iteration
        if latest is None or latest.began.position:
            return
        plan = cast(TokenPlan, latest.plan)
        if self.position < plan.end:
            return
        micro_batches = plan.micro_batches(latest.began, latest.world)
        if micro_batches.max(initial=1) == 1 or not is_behind_loader(self):
            return
        self._steps_asked = True  # one warning is enough
        warn(
            f"tokens_per_step: epoch {self.epoch} has {len(micro_batches):,} optimizer steps, and a loader read its "
            f"{micro_batches.sum():,} batches on each rank, but nothing asked which batches belong to a step: a loop "
            "that steps after every batch takes too many. Take the batches from sampler.optimizer_steps(loader), give "
            "Lightning the callback TokensPerStep(), use a SizeAwareTrainerMixin in a Hugging Face Trainer, or read "
            "sampler.accumulation before the epoch",
            self,
        )
