"""What batch samplers have in common that plan an epoch at once, from the sizes of all samples."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import SequentialSampler

from headrace.size_aware_batching._shared.checks import checked_int
from headrace.size_aware_batching._shared.display import counted, never_raises
from headrace.size_aware_batching._shared.epoch_plan import PlannedBatch
from headrace.size_aware_batching._shared.ranks import Mesh
from headrace.size_aware_batching._shared.warnings import warn
from headrace.size_aware_batching._validation import checked_epoch, checked_seed, one_of, whole_number
from headrace.size_aware_batching.plan import BatchPlan
from headrace.size_aware_batching.planning.distribution import n_steps
from headrace.size_aware_batching.planning.list_plan import ACCEPTED, correlation_warning
from headrace.size_aware_batching.planning.options import CHANGEABLE, DATA, SamplerOptions, Tail
from headrace.size_aware_batching.planning.plan_cache import PlanCache
from headrace.size_aware_batching.planning.planner import SizeAwarePlan, SizeAwarePlanner
from headrace.size_aware_batching.planning.samples import Samples
from headrace.size_aware_batching.planning.user_sampler import NoUserSampler, UserSampler
from headrace.size_aware_batching.report import CurriculumReport, PlanReport, batch_costs
from headrace.size_aware_batching.size_aware_sampler import SizeAwareSampler, budget_in_words


class PlannedSampler(SizeAwareSampler):
    """Base class of batch samplers that plan an epoch at once, from the sizes of all samples.

    Args:
        options: The arguments that decide which batches there are.
        sizes: Size of each sample.
        work: Work of each sample; None where it follows from the sizes.
        by: Label of each sample; None for no labels.
        group_by: Group of each sample; None for no groups.
        sampler: Order of the samples; None for one of our own.
        seed: Key of all randomness.
        plan_cache: Directory for the sorted order of the samples.
        num_replicas: Number of data-parallel ranks; by default that of ``torch.distributed``.
        rank: Rank of this process, or ``"all"``.
        mesh: In place of both.
    """

    def __init__(
        self,
        options: SamplerOptions,
        sizes: Any,
        work: Any,
        by: Any,
        group_by: Any,
        sampler: Iterable[int] | None,
        seed: int,
        plan_cache: str | os.PathLike[str] | None,
        num_replicas: int | None,
        rank: int | Literal["all"] | None,
        mesh: Mesh | None,
    ) -> None:
        if options.curriculum is not None and sampler is not None:
            raise ValueError(
                f"curriculum={options.curriculum} and sampler were both given, but the sampler decides the order: "
                "leave out one"
            )
        seed = checked_seed(seed)
        cache = None if plan_cache is None else PlanCache(plan_cache)
        if cache is not None and options.strategy == "sequential":
            warn("plan_cache has no effect with strategy='sequential', which sorts nothing: leave it out")
        if cache is not None and by is not None:
            warn("plan_cache has no effect with by, which sorts the samples of each label by themselves: leave it out")
        if group_by is not None and isinstance(sampler, SequentialSampler):  # as data modules give for evaluation
            sampler, options = None, replace(options, shuffle=False)
        if group_by is not None and sampler is not None:
            raise ValueError(
                "group_by and sampler were both given, but the sampler names samples one by one: leave out one"
            )
        samples = Samples.read(sizes, options, work, by, group_by, cache)
        user_sampler = NoUserSampler() if sampler is None else UserSampler(sampler, len(samples))
        super().__init__(
            SizeAwarePlanner.from_samples(type(self).__name__, samples, options, user_sampler, seed),
            num_replicas,
            rank,
            mesh,
        )
        self._correlation_named = False  # one warning is enough
        self.draws: list[int] | None = None

    @property
    def _planner(self) -> SizeAwarePlanner:
        return cast(SizeAwarePlanner, self._run.planner)

    @property
    def sizes(self) -> NDArray[Any]:
        """Sizes of the samples as they were given, read-only."""
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
    def extra_per_sample(self) -> tuple[float, ...]:
        """What each sample has beside its size, in each column of sizes."""
        return self._planner.samples.extra_per_sample

    @property
    def tail(self) -> Tail:
        """Policy for the last batches."""
        return self._planner.options.tail

    @property
    def seed(self) -> int:
        """Key of all randomness."""
        return self._planner.seed

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
    def fingerprint(self) -> str:
        """Hex digest of the sizes, the options, the seed and the order of ``sampler``."""
        return self._planner.fingerprint

    @never_raises
    def __repr__(self) -> str:
        return self._in_words(self._figures())

    def _figures(self) -> list[str]:
        """Return the figures of a representation."""
        planner, ranks = self._planner, self._ranks_in_words()
        with suppress(ValueError):  # of an environment that contradicts what was given
            if (n_batches := planner.known_count()) is not None:
                ranks += f" x {counted(n_steps(n_batches, self.num_replicas, self.tail), 'step')}"
        return [
            counted(planner.prepared.n_samples, "sample" if planner.samples.groups is None else "group"),
            *([f"ordered by {type(planner.user_sampler.sampler).__name__}"] if planner.user_sampler.is_given else []),
            budget_in_words(self.max_total_size),
            self.options.strategy,
            ranks,
        ]

    def _note(self, batch: PlannedBatch) -> None:
        """Note a batch before it is yielded."""
        self.draws = batch.draws

    def exclude(self, indices: Iterable[int]) -> None:
        """Exclude samples from now on, in every epoch; call it on every rank at the same step.

        Batches that were already yielded keep them, also those that workers of torch's `DataLoader` have read ahead.
        States record the excluded samples. With ``group_by`` the other samples of their groups are excluded, too.

        Args:
            indices: Samples of the dataset, from 0 on.

        Raises:
            TypeError: If an index is not an int.
            ValueError: If an index is out of range, or the rest of the epoch cannot be planned anew.
        """
        samples = self._planner.samples
        checked = [checked_int("indices", index, high=len(samples) - 1) for index in indices]
        if samples.groups is not None:
            checked = samples.groups.keys(samples.groups.of_samples(np.array(checked, np.int64)))
        super().exclude(checked)

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
        if samples.groups is not None:
            indices, offsets = samples.groups.in_samples(indices, offsets)
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
            extra=0 if pieces is None else samples.extra_per_sample[0],
            steps=plan.optimizer_steps,
            curriculum=None if shares is None else CurriculumReport(options.curriculum or 0, *shares),
            max_items=options.max_items,
            balanced_ranks=None if options.strategy == "sequential" else plan.balanced_ranks,
            labels=samples.labels,
        )

    def report(self, epoch: int | None = None) -> PlanReport:
        """Return figures about the batches of an epoch, compared with those of the epoch before.

        Epoch 0 is compared with epoch 1, as is the first epoch after the data of a mixture grew with the next one. Both
        epochs are planned. There is no comparison without ``shuffle``, or if the order of another epoch is not known.
        With ``shapes`` the epoch is also planned without them. One warning says if successive steps hold samples of
        similar size, because the run began with more ranks than it has now.

        Args:
            epoch: The current one by default; where the data of a mixture grew after it, the next one.
        """
        planner, other, without_shapes = self._planner, None, None
        first = planner.user_sampler.first_epoch
        epoch = max(self.epoch, first) if epoch is None else checked_epoch(epoch)
        if self.options.shuffle and planner.user_sampler.knows_epochs:
            other = self.plan(epoch - 1 if epoch > first else epoch + 1)
        if self.options.shapes is not None:
            unlimited = planner.without_shapes()
            without_shapes = self._batch_plan(unlimited, unlimited.plan(epoch, self._run.history), epoch)
        plan = self.plan(epoch)
        report = plan.report(other=other, without_shapes=without_shapes)
        if plan.balanced_ranks is None or self.options.chooses_order or self._correlation_named:
            return report
        alike, ranks = report.autocorrelation, plan.balanced_ranks
        if warning := correlation_warning(alike, report.steps, ranks, plan.num_replicas, ACCEPTED):
            self._correlation_named = True
            warn(warning)
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
