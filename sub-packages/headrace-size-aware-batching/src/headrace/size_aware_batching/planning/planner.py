"""The planner of size-aware batches: from settings to the plan of any epoch, or of what a change leaves of one."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching._shared.epoch_plan import Place
from headrace.size_aware_batching._shared.mixture import NOT_MIXED, Mixed
from headrace.size_aware_batching._shared.random import fold_in
from headrace.size_aware_batching._shared.run import History
from headrace.size_aware_batching.planning.batch_list import BatchList
from headrace.size_aware_batching.planning.curriculum import Ramp, competence
from headrace.size_aware_batching.planning.fingerprint import fingerprint
from headrace.size_aware_batching.planning.groups import Groups
from headrace.size_aware_batching.planning.labelled_lists import LabelledLists
from headrace.size_aware_batching.planning.list_plan import ListPlan, OneLabelPlan
from headrace.size_aware_batching.planning.options import (
    CHANGEABLE,
    RECORDED_IF_GIVEN,
    SamplerOptions,
    change_within_epoch_error,
)
from headrace.size_aware_batching.planning.order import SliceOrder, built_in_order
from headrace.size_aware_batching.planning.pieces import Pieces
from headrace.size_aware_batching.planning.prepared import (
    PreparedSizes,
    all_are_skipped,
    prepare,
    skipped_warning,
    without,
)
from headrace.size_aware_batching.planning.samples import Samples
from headrace.size_aware_batching.planning.states import STATE_VERSION, checked_state, settings_changed
from headrace.size_aware_batching.planning.strategies import BatchLists, Presorted
from headrace.size_aware_batching.planning.token_steps import TokenPlan, TokenSteps
from headrace.size_aware_batching.planning.user_sampler import (
    NoUserSampler,
    UserSampler,
    planned_order,
)

CACHE_SIZE = 2  # plans of a planner, as a report compares two epochs; and planners of other settings
ABSENT: dict[str, Any] = dict.fromkeys(RECORDED_IF_GIVEN)
SizeAwarePlan: TypeAlias = ListPlan | TokenPlan
Lists: TypeAlias = BatchLists | LabelledLists


@dataclass(frozen=True, eq=False)
class SizeAwarePlanner:
    """Plans epochs of size-aware batches.

    Args:
        name: Class of the sampler, for messages.
        samples: The samples of the dataset.
        options: The arguments that decide which batches there are.
        all_prepared: Sizes ready for planning, before any sample is excluded.
        user_sampler: The user's sampler, which gives the order.
        seed: Key of all randomness.
        excluded: Samples that are left out.
        mixed: Settings of the mixture.
    """

    name: str
    samples: Samples
    options: SamplerOptions
    all_prepared: PreparedSizes
    user_sampler: UserSampler | NoUserSampler
    seed: int
    excluded: tuple[int, ...] = ()
    mixed: Mixed = NOT_MIXED
    # Caches. Planners of other settings share the first: what one has sorted serves the epoch before a change, too.
    _others: dict[Any, SizeAwarePlanner] = field(default_factory=dict, repr=False)
    _fingerprints: dict[str | None, str] = field(default_factory=dict, repr=False)
    _plans: dict[Any, tuple[Any, SizeAwarePlan]] = field(default_factory=dict, init=False, repr=False)
    _lists: dict[Ramp | None, Lists] = field(default_factory=dict, init=False, repr=False)
    _counts: dict[tuple[int, int], int] = field(default_factory=dict, init=False, repr=False)  # optimizer steps

    version = STATE_VERSION

    @classmethod
    def from_samples(
        cls,
        name: str,
        samples: Samples,
        options: SamplerOptions,
        user_sampler: UserSampler | NoUserSampler,
        seed: int,
    ) -> SizeAwarePlanner:
        """Prepare the sizes; refuse those that are too large, and steps of tokens that are too short."""
        to_plan = samples.to_plan
        largest = samples.facts.largest if to_plan is samples.sizes else None
        if samples.groups is None:
            prepared = prepare(to_plan, options.max_total_size, options, largest=largest)
        else:
            prepared = samples.groups.prepared(to_plan, options)
        if len(prepared.sizes) and not prepared.n_samples:
            raise all_are_skipped(len(prepared.sizes), options.max_total_size)
        work = prepared.work if samples.work is None else samples.planned_work
        prepared = replace(prepared, work=work, labels=samples.planned_labels)
        made = cls(name, samples, options, prepared, user_sampler, seed, mixed=user_sampler.mixed)
        if made.token_steps is not None:
            made.token_steps.refuse_short_steps()
        return made

    # Settings.

    @property
    def max_length(self) -> Any:
        """Limit of the sizes, or of each column."""
        lengths = list(self.samples.max_length)
        return lengths[0] if len(lengths) == 1 else lengths

    @cached_property
    def recorded_options(self) -> dict[str, Any]:
        """The arguments that may change, in JSON."""
        return self.options.recorded(self.max_length)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings, as the record stores them."""
        return {
            "n": len(self.samples),
            "options": self.recorded_options,
            "exclude": list(self.excluded),
            "mixture": self.mixed.mixture,
            "reweight": list(self.mixed.reweights),
            "accumulate": self.options.accumulate,
        }

    def at(self, settings: Mapping[str, Any]) -> SizeAwarePlanner:
        """Return the planner for recorded settings."""
        options = {**self._arguments, **ABSENT, **_known(settings["options"]), "accumulate": settings.get("accumulate")}
        n, excluded = settings.get("n", len(self.samples)), tuple(settings.get("exclude", ()))
        mixed = Mixed(settings.get("mixture", self.mixed.mixture), tuple(settings.get("reweight", ())))
        if n > len(self.samples) or max(excluded, default=0) >= max(1, len(self.samples)):
            raise ValueError(f"state['run'] must name samples below {len(self.samples)}: it was changed")
        if mixed.reweights and not self.user_sampler.is_mixture:
            self.user_sampler.set_mixture(settings)  # which refuses them
        key = _settings_key(n, options, excluded, mixed)
        if key == self._key_of_settings:
            return self
        self._others[self._key_of_settings] = self
        if key not in self._others:
            self._others[key] = self._made_at(n, options, excluded, mixed)
        made = self._others[key]
        for old in [key for key, other in self._others.items() if other is not self and other is not made][
            :-CACHE_SIZE
        ]:
            del self._others[old]
        return made

    def _made_at(self, n: int, options: dict[str, Any], excluded: tuple[int, ...], mixed: Mixed) -> SizeAwarePlanner:
        changed = {name: value for name, value in options.items() if self._arguments[name] != value}
        base = self
        if changed or n != len(self.samples):
            other = self.options.changed(changed) if changed else self.options
            base = self.from_samples(self.name, self.samples.first(n, other), other, self.user_sampler, self.seed)
        return replace(base, excluded=excluded, mixed=mixed, _others=self._others)

    @cached_property
    def _key_of_settings(self) -> Any:
        return _settings_key(len(self.samples), self._arguments, self.excluded, self.mixed)

    @cached_property
    def _arguments(self) -> dict[str, Any]:
        return {**ABSENT, **self.recorded_options, "accumulate": self.options.accumulate}

    # Plans.

    @cached_property
    def prepared(self) -> PreparedSizes:
        """Sizes ready for planning, without what is excluded."""
        if not self.excluded:
            return self.all_prepared
        return replace(self.all_prepared, kept=self.samples.kept_to_plan(self.all_prepared.kept, self.excluded))

    @property
    def epochs_differ(self) -> bool:
        """Whether epochs differ and need ``set_epoch``."""
        return self.options.shuffle and self.user_sampler.epochs_differ

    def key(self, epoch: int) -> int:
        """Return the key of an epoch."""
        return int(fold_in(self.seed, epoch if self.options.shuffle else 0)[0])

    def plan(self, epoch: int, history: History) -> SizeAwarePlan:
        """Return the plan of a complete epoch."""
        first = self.steps_before(epoch, history)
        world = 1 if self.token_steps is not None else history.first_world  # optimizer steps are the same for any
        order = self._order_of(epoch)  # the same object until the sampler is read again
        known = self._plans.get((epoch, first, world))
        if known is None or known[0] is not order:
            known = order, self._made_plan(epoch, first, world, None if order is None else self._narrowed(order))
            for old in list(self._plans)[: 1 - CACHE_SIZE]:
                del self._plans[old]
            self._plans[epoch, first, world] = known
        return known[1]

    def _made_plan(self, epoch: int, first: int, world: int, order: SliceOrder | None) -> SizeAwarePlan:
        if self.token_steps is not None:
            return self._token_plan(self.token_steps, epoch, first, order)
        lists, ranks = self.lists(self._ramp(world)), self.options.balanced_for(world)
        return self._list_plan(lists.of_epoch(self.key(epoch), ranks, epoch, order), world)

    def _list_plan(self, batches: BatchList, first_world: int, **rest: Any) -> ListPlan:
        labels = self.samples.labels
        kind = ListPlan if labels is None or not labels.per_step else OneLabelPlan
        return kind(
            batches,
            first_world,
            self.prepared,
            self.samples.units,
            self.options.tail,
            keeps_order=self.options.strategy == "sequential",
            balanced_ranks=self.options.balanced_for(first_world),
            warns_of_correlation=not self.options.chooses_order,
            has_draws=self.user_sampler.is_given,
            reweights=self.mixed.reweights,
            warning_once=self.warning_once,
            **rest,
        )

    @property
    def warning_once(self) -> str:
        """What to warn of at the first batch."""
        return skipped_warning(self.skipped, self.options.max_total_size) if len(self.skipped) else ""

    def _ramp(self, world: int) -> Ramp | None:
        """Return the curriculum in batches; None if there is none, or its steps are optimizer steps."""
        steps = None if self.token_steps is not None else self.options.curriculum
        return None if steps is None else Ramp(steps, world)

    def lists(self, ramp: Ramp | None) -> Lists:
        """Return what makes the list of each epoch."""
        if ramp not in self._lists:
            self._lists[ramp] = self._made_lists(self.prepared, ramp, self._presorted)
        return self._lists[ramp]

    def _made_lists(self, prepared: PreparedSizes, ramp: Ramp | None, presorted: Presorted | None) -> Lists:
        if prepared.labels is not None:
            return LabelledLists(prepared, self.options)
        return BatchLists(prepared, self.options, ramp, presorted)

    def known_count(self) -> int | None:
        """Return the number of batches of every epoch, if it is known without planning."""
        lists = None if self.user_sampler.is_given else next(iter(self._lists.values()), None)
        return None if lists is None else lists.known_count()

    def known_optimizer_steps(self, epoch: int) -> int | None:
        """Return the number of optimizer steps of an epoch, if it was planned before."""
        steps = [plan.optimizer_steps for (planned, *_), (_, plan) in self._plans.items() if planned == epoch]
        return len(steps[0].asked) if steps and steps[0] is not None else None

    @property
    def _presorted(self) -> Presorted | None:
        """Reads the samples by size from the cache of plans; None if there is none.

        Samples are excluded one by one in a run: a file for each set of them would fill the disk.
        """
        cache = self.samples.cache
        # Not a method of the planner: one that refers to itself keeps its large arrays until a full collection.
        return None if cache is None or self.excluded else partial(cache.sorted, self.prepared, self.samples.facts)

    def _order_of(self, epoch: int) -> SliceOrder | None:
        return self.user_sampler.of_epoch(epoch, len(self.samples), self.mixed)

    def _narrowed(self, order: SliceOrder) -> SliceOrder:
        """Return what is planned of a user's order: without samples that are left out, or the pieces."""
        kept = self.samples.kept(self.all_prepared.kept, self.excluded)
        return planned_order(order, kept, self.samples.pieces, len(self.samples))

    @property
    def oversize(self) -> NDArray[np.int64]:
        """Samples that exceed a budget by themselves."""
        samples, over = self.samples, self.all_prepared.oversize
        if samples.groups is not None:
            return np.sort(samples.groups.samples_of(over))
        return over if samples.pieces is None else samples.pieces.cut

    @property
    def skipped(self) -> NDArray[np.int64]:
        """Samples that no epoch delivers."""
        return self.oversize[: None if self.options.oversize == "skip" else 0]

    def without_shapes(self) -> SizeAwarePlanner:
        """Return the planner without a limit on the shapes of batches."""
        options = replace(self.options, shapes=None, curriculum=None)
        prepared = prepare(self.samples.to_plan, options.max_total_size, options)
        prepared = replace(prepared, labels=self.samples.planned_labels)
        return replace(self, options=options, all_prepared=prepared, _others={}, _fingerprints={})

    # Optimizer steps.

    @cached_property
    def token_steps(self) -> TokenSteps | None:
        """Cuts epochs into optimizer steps; None without ``tokens_per_step``."""
        if (schedule := self.options.schedule) is None:
            return None
        sizes = self.samples.to_plan
        tokens = sizes if sizes.ndim == 1 else sizes[:, 0]
        return TokenSteps(self.prepared, tokens, schedule, self.options.tail == "drop", self.options.accumulate)

    def _token_plan(self, token_steps: TokenSteps, epoch: int, first: int, order: SliceOrder | None) -> TokenPlan:
        key, total = self.key(epoch), token_steps.total(order)
        sized, ramp = self.prepared, self.options.curriculum
        built_in = built_in_order(key if self.options.shuffle else None, sized.n_samples, sized.kept)
        if ramp is not None and first < ramp:
            built_in = token_steps.short_first(key, Ramp(ramp, 1), first, first)
        return TokenPlan(
            token_steps,
            order or built_in,
            first,
            total,
            self.samples.pieces,
            self.user_sampler.is_given,
            self.warning_once,
        )

    def n_optimizer_steps(self, epoch: int, history: History) -> int:
        """Return the number of optimizer steps of an epoch; the order of a user's sampler is read for it."""
        return self._n_steps_from(self.steps_before(epoch, history), epoch)

    def _n_steps_from(self, first: int, epoch: int) -> int:
        if (epoch, first) not in self._counts:
            order = self._order_of(epoch)
            narrowed = None if order is None else self._narrowed(order)
            self._counts[epoch, first] = cast(TokenSteps, self.token_steps).n_steps(first, narrowed)
        return self._counts[epoch, first]

    def steps_before(self, epoch: int, history: History) -> int:
        """Return the number of optimizer steps before an epoch, as far as they are counted.

        Past epochs are counted with the settings that they had. Behind the last stage of ``tokens_per_step`` and the
        end of a curriculum all steps are alike, so it is not counted further.
        """
        if self.token_steps is None:
            return 0
        enough, steps = max(self.token_steps.schedule.stages[-1][0], self.options.curriculum or 0), 0
        for past in range(epoch):
            if steps >= enough:
                break
            settings = history.settings_of(past)
            planner = self if settings is None else self.at(settings)
            if planner.token_steps is not None:  # an earlier epoch may have had none
                steps += planner._n_steps_from(steps, past)
        return steps

    def curriculum_shares(self, epoch: int, n_batches: int, history: History) -> list[float] | None:
        """Return the shares of the samples that an epoch of so many batches may have, at its beginning and its end.

        None without a curriculum.
        """
        if (steps := self.options.curriculum) is None or not n_batches:
            return None
        if (ramp := self._ramp(history.first_world)) is None:  # optimizer steps
            passed, stop, total = self.steps_before(epoch, history), self.steps_before(epoch + 1, history), steps
        else:
            passed, total = self.lists(ramp).batches_before(epoch), ramp.batches
            stop = passed + n_batches
        shares: list[float] = competence(np.array([passed, stop]), total).tolist()
        return shares

    # The rest of an epoch.

    def rest(self, epoch: int, before: SizeAwarePlan, position: int) -> ListPlan:
        """Return the plan of what another one leaves of an epoch from a position on.

        It has a separate key, so that the epoch's batches do not recur.
        """
        self.refuse_change_within_epoch()
        before.refuse_change_within_epoch()
        before = cast(ListPlan, before)
        if position > before.end:
            raise ValueError(
                f"position must be an int from 0 to {before.end}, the samples of the epoch, got {position}"
            )
        _refuse_other_units(before.units, self.samples.units)
        prepared, presorted, order, retired = self.prepared, None, None, None
        if not self.user_sampler.is_given:
            delivered, retired = before.retired_at(position, len(prepared.sizes))
            by_size = self._still_sorted(before, delivered, retired)
            if by_size is None:
                prepared = replace(prepared, kept=without(prepared.kept, len(prepared.sizes), np.flatnonzero(retired)))
            else:  # in another order, of which only the number of samples is read
                prepared, presorted = replace(prepared, kept=by_size[0]), (lambda: by_size)
        else:
            order = self._reweighted(before.batch_list.rest_of_order(position - before.start), epoch, before)
            if prepared.kept is not None:
                order = order.kept(prepared.kept, len(prepared.sizes))
        key = int(fold_in(self.seed, epoch, position)[0])
        ranks = self.options.balanced_for(before.first_world)
        batches = self._made_lists(prepared, None, presorted).of_epoch(key, ranks, order=order)
        return self._list_plan(batches, before.first_world, start=position, retired=retired)

    def _reweighted(self, rest: SliceOrder, epoch: int, before: ListPlan) -> SliceOrder:
        """Return the rest of a mixture's order, with other weights from the draw on where they have changed."""
        changed = [draw for draw, weights in self.mixed.reweights if [draw, weights] not in before.reweights]
        order = self._order_of(epoch) if changed else None
        if order is None or changed[0] >= (epoch + 1) * order.n_samples:
            return rest
        draw = changed[0] - epoch * order.n_samples
        if draw < rest.read:
            raise ValueError("state['run'] must have weights from a later draw on: it was changed")
        return rest.switched(self._narrowed(order), draw)

    def _still_sorted(
        self, before: ListPlan, delivered: NDArray[Any], retired: NDArray[np.bool_]
    ) -> tuple[NDArray[Any], NDArray[Any]] | None:
        """Return the remaining samples and their sizes, largest first; None unless the plan before has sorted them."""
        sizes = self.prepared.sizes
        if sizes is not before.sized.sizes or sizes.ndim > 1 or not self.options.sorts:
            return None
        if self.all_prepared.kept is not None or self.samples.units is not None:
            return None
        excluded = np.array(self.excluded, np.int64)
        n_left = len(sizes) - np.count_nonzero(retired) - np.count_nonzero(~retired[np.unique(excluded)])
        return before.batch_list.sorted_without(np.concatenate([delivered, excluded]), sizes, int(n_left))

    def refuse_change_within_epoch(self) -> None:
        """Refuse a change in the middle of an epoch, if its plan depends on what came before."""
        for name in ("tokens_per_step", "curriculum"):
            if (value := self.recorded_options[name]) is not None:
                raise change_within_epoch_error(name, value)

    # States.

    @property
    def has_cost_function(self) -> bool:
        """Whether the cost is a function of the user."""
        return callable(self.options.cost)

    @property
    def is_mixture(self) -> bool:
        """Whether the order comes from a mixture."""
        return self.user_sampler.is_mixture

    def fingerprint_parts(self, order: str | None = None) -> dict[str, Any]:
        """Return all that decides the batches, by the names of the arguments."""
        samples, prepared = self.samples, self.all_prepared
        lengths = samples.sizes if samples.pieces is None else samples.pieces.lengths
        return {
            "sizes": samples.facts.digest,
            "max_total_size": self.options.max_total_size,
            **self.options.fingerprint_parts,
            "cost": prepared.cost.digest(lengths, self.options.max_total_size, self.options.max_items),
            "shapes": None if prepared.shapes is None else prepared.shapes.pairs(),
            "sampler": order,
            "seed": self.seed,
            "tail": self.options.tail,
            "max_length": self.max_length,
            "work": samples.work,
            "tokens_per_step": self.options.tokens_per_step,
            "extra_per_sample": self.options.extra_per_sample,
            "by": None if samples.labels is None else samples.labels.numbers,
            "label_per": self.options.label_per,
            "group_by": None if samples.groups is None else samples.groups.numbers,
        }

    @property
    def fingerprint(self) -> str:
        """Digest of the sizes, the options, the seed and the order."""
        return self._fingerprint_with(self.user_sampler.fingerprint)

    def fingerprint_at(self, epoch: int) -> str:
        """Return what states of an epoch hold: a sampler's schedule may change after their epoch."""
        return self._fingerprint_with(self.user_sampler.epoch_fingerprint(epoch, self.mixed))

    def _fingerprint_with(self, order: str | None) -> str:
        if order not in self._fingerprints:
            self._fingerprints[order] = fingerprint(self.fingerprint_parts(order))
        return self._fingerprints[order]

    def check_state(self, state: Any) -> Mapping[str, Any]:
        """Refuse what is no state, or one of another version or seed; return it with plain ints."""
        return checked_state(state, self.name, self.version, self.seed)

    def settings_changed(self, state: Mapping[str, Any], recorded: Mapping[str, Any], accept: Collection[str]) -> bool:
        """Return whether a state is of other settings, all of them accepted; refuse those that are not."""
        return settings_changed(self, state, recorded, accept)

    def state_of(self, _epoch: int, place: Place) -> dict[str, Any]:
        """Return what states hold beside the position and the record, always with the same keys.

        torch.distributed.checkpoint loads no key that the present state lacks.
        """
        return {} if self.token_steps is None else {"inside_step": [list(segment) for segment in place.plan_state]}

    def __getstate__(self) -> dict[str, Any]:
        # Plans are large and are made again when they are needed. An order has an epoch of its own.
        own = {name: value for name, value in vars(self).items() if name not in ("prepared", "token_steps")}
        empty: dict[str, Any] = {name: {} for name in ("_plans", "_lists", "_others", "_counts")}
        return own | empty | {"user_sampler": copy(self.user_sampler)}


def _known(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in CHANGEABLE}


def _settings_key(n: int, options: Mapping[str, Any], excluded: tuple[int, ...], mixed: Mixed) -> Any:
    return n, json.dumps([options, mixed.mixture, mixed.reweights], sort_keys=True), excluded


def _refuse_other_units(before: Pieces | Groups | None, now: Pieces | Groups | None) -> None:
    """Refuse other pieces or groups than an epoch began with; those of appended samples come after them."""
    if now is None and before is not None:
        raise ValueError(before.OTHERS)
    if now is not None and before is not now and not now.continues(before):
        raise ValueError(now.OTHERS)
