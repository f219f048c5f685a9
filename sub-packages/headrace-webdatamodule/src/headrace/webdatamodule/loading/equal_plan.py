"""Plans of epochs in batches of equal size."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.webdatamodule._shared.digest import text_digest
from headrace.webdatamodule._shared.display import counted
from headrace.webdatamodule._shared.epoch_plan import NO_LIMIT, Place, Steps
from headrace.webdatamodule._shared.mixture import NOT_MIXED, Mixed
from headrace.webdatamodule._shared.record import RECORD
from headrace.webdatamodule._shared.run import History
from headrace.webdatamodule._shared.state_mismatch import StateMismatchError
from headrace.webdatamodule.loading.permutation import Shuffle
from headrace.webdatamodule.loading.state_dict import DATA, STATE_VERSION, check_state
from headrace.webdatamodule.loading.user_sampler import NoUserSampler, UserSampler

_AHEAD = 2**14  # places of the order that are worked out together
_CHANGED = "state['run'] must be as state_dict() returned it: it was changed"
# What the fingerprint of a mixture covers, as it says itself, and the usual cause of another one.
_OTHER_RUN = (
    "it was saved with other samples, sizes, weights, batch size or budget; use those, or start without the checkpoint"
)
_OF_A_MIXTURE = "its data, weights, semantics, sizes, epoch_length, drop_last and the earlier part of its schedule"
_ONE_MIXTURE = "; only one of checkpoint and sampler is of a mixture: give sampler= as in the run that saved it"
_REWEIGHTED = (
    "the state holds a reweight of its run at draw {draw:,} and applies it by itself: construct the mixture with "
    "the weights of the run's beginning"
)
Samples = npt.NDArray[np.int64]
Take = Callable[[int, int], Samples]  # from two positions to the samples between them


@dataclass(frozen=True)
class EqualOptions:
    """The arguments of `DistributedBatchSampler` that a run may change."""

    batch_size: int
    drop_last: bool
    shuffle: bool


@dataclass(frozen=True, eq=False)
class EqualPlan:
    """Places of an epoch, from a change on, whose samples come in one order and in batches of one size.

    Args:
        start: The position where it begins.
        end: The position where it ends.
        samples: Returns the samples between two positions.
        options: With which it was made.
        n: Number of samples of the dataset.
        has_draws: Whether samples have draws: a user's sampler gave the order.
        reweights: Changes of a mixture's weights with which it was made.
        draws: For each position from `start` on, its place in the user's order; None: the position itself.
    """

    start: int
    end: int
    samples: Take
    options: EqualOptions
    n: int
    has_draws: bool = False
    reweights: Sequence[Any] = ()
    draws: Samples | None = None

    def steps(self, place: Place, world: int, _all_ranks: bool) -> Iterator[Steps]:
        """Yield the steps from a place on."""
        count = self.n_steps(place, world)
        together = max(1, _AHEAD // (self.options.batch_size * world))
        for first in range(0, count, together):
            stop = min(first + together, count)
            spans = np.array([self._span(place, step, world) for step in range(first, stop)])
            begin, end = int(spans[0, 0]), int(spans[-1, 1])
            ends = np.repeat(spans[:, 1], world)
            warning, positions = "", np.arange(begin, end)
            begins, _ = equal_share(spans[:, :1], spans[:, 1:], np.arange(world), world)
            offsets = np.append(begins.ravel() - begin, end - begin)
            samples = np.asarray(self.samples(begin, end), np.int64)
            if stop == count:
                ends[-world:] = self.end  # what is dropped after the last step counts as delivered
                if (few := int(spans[-1, 1] - spans[-1, 0])) < world:  # each rank gets a sample that others have, too
                    whole = len(positions) - few
                    again = whole + np.arange(world) % few
                    offsets = np.append(offsets[: -world - 1], np.arange(whole, whole + world + 1))
                    warning = _repetition(samples[again[few:]].tolist(), few, world)
                    positions = np.append(positions[:whole], positions[again])
                    samples = np.append(samples[:whole], samples[again])
            yield Steps(samples, offsets, ends, positions if self.has_draws else None, warning)

    def _span(self, place: Place, step: int, world: int) -> tuple[int, int]:
        size, drop_last = self.options.batch_size, self.options.drop_last
        return step_span(step, place.position, self.end, size, world, drop_last=drop_last)

    def n_steps(self, place: Place, world: int, most: int = NO_LIMIT) -> int:
        """The number of steps from a place on."""
        left = max(0, self.end - place.position)
        return min(most, n_steps(left, self.options.batch_size, world, drop_last=self.options.drop_last))

    def seek(self, place: Place, world: int, steps: int) -> tuple[int, Place]:
        """Return a step and its place; the last two steps may share their samples, and are one."""
        steps = max(0, min(steps, self.n_steps(place, world) - 2))
        return steps, Place(self._span(place, steps, world)[0]) if steps else place

    def place(self, position: int, _began: Place, _world: int) -> Place:
        """Return the place of a position."""
        return Place(position)

    def loaded_place(self, state: Mapping[str, Any]) -> Place:
        """Return the place of a state."""
        return Place(state["position"])

    def refuse_empty(self, world: int) -> None:
        """Refuse a number of ranks that leaves them no batch."""
        if self.end and not self.n_steps(Place(0), world):
            raise ValueError(
                f"drop_last=True leaves no batch: {self.end} samples do not fill {world} batches of "
                f"{self.options.batch_size}; use a smaller batch_size, or drop_last=False"
            )

    def keys(self, samples: Samples) -> list[Any]:
        """Return the samples as ints."""
        keys: list[int] = samples.tolist()
        return keys

    def delivered(self, start: int, stop: int) -> Samples:
        """Return the samples between two positions."""
        return self.samples(start, stop)

    def draws_from(self, position: int) -> Samples:
        """Return the places in the user's order from a position on."""
        return np.arange(position, self.end) if self.draws is None else self.draws[position - self.start :]

    def first_unread(self, position: int) -> int:
        """Return the place in the user's order of a position."""
        return position if self.draws is None else int(self.draws[position - self.start])

    def position_of_draw(self, draw: int) -> int:
        """Return the first position that has this place of the user's order, or a later one."""
        return draw if self.draws is None else self.start + int(np.searchsorted(self.draws, draw))


@dataclass(frozen=True, eq=False)
class EqualPlanner:
    """Plans epochs of batches of equal size.

    Args:
        name: Class of the sampler, for messages.
        n: Number of samples of the dataset.
        options: The arguments that a run may change.
        user_sampler: The user's sampler, which gives the order.
        seed: Seed of the built-in order.
        excluded: Samples that are left out.
        mixed: Settings of the mixture.
    """

    name: str
    n: int
    options: EqualOptions
    user_sampler: UserSampler | NoUserSampler
    seed: int
    excluded: tuple[int, ...] = ()
    mixed: Mixed = NOT_MIXED
    _latest: dict[int, tuple[Any, EqualPlan]] = field(default_factory=dict, init=False, repr=False)

    version = STATE_VERSION

    @property
    def settings(self) -> dict[str, Any]:
        """The settings, as the record stores them."""
        return {
            "n": self.n,
            "options": dict(vars(self.options)),
            "exclude": list(self.excluded),
            "mixture": self.mixed.mixture,
            "reweight": list(self.mixed.reweights),
        }

    @property
    def epochs_differ(self) -> bool:
        """Whether epochs differ and need `set_epoch`."""
        return self.options.shuffle if self.user_sampler.epochs_differ is None else self.user_sampler.epochs_differ

    def at(self, settings: Mapping[str, Any]) -> EqualPlanner:
        """Return the planner for recorded settings."""
        own = vars(self.options)
        options = {name: settings["options"].get(name, value) for name, value in own.items()}
        n, excluded = settings.get("n", self.n), tuple(settings["exclude"])
        if type(n) is not int or n > self.n or type(options["batch_size"]) is not int or options["batch_size"] < 1:
            raise ValueError(_CHANGED)
        if not all(type(index) is int and 0 <= index < n for index in excluded):
            raise ValueError(_CHANGED)
        mixed = Mixed(settings.get("mixture", self.mixed.mixture), tuple(settings["reweight"]))
        if mixed.reweights and not self.user_sampler.is_mixture:
            self.user_sampler.set_mixture(settings)  # which refuses them
        made = replace(self, n=n, options=EqualOptions(**options), excluded=excluded, mixed=mixed)
        return self if made.settings == self.settings else made

    def plan(self, epoch: int, _history: History) -> EqualPlan:
        """Return the plan of a complete epoch."""
        order = self.user_sampler.of_epoch(epoch, self.mixed)
        if epoch not in self._latest or self._latest[epoch][0] is not order:
            self._latest.clear()
            self._latest[epoch] = order, self._made_plan(epoch, order)
        return self._latest[epoch][1]

    def _made_plan(self, epoch: int, order: tuple[int, Take] | None) -> EqualPlan:
        left_out = np.array(sorted(self.excluded), np.int64)
        if order is None:
            count = self.n - len(left_out)
            # A shuffle of an epoch is worked out in microseconds, or in no more than a sort of 65,536 words.
            own: Take = Shuffle(count, self.seed, epoch).take if self.options.shuffle else np.arange
            return self._made(0, count, partial(_without, left_out, own) if len(left_out) else own)
        end, take = order
        if not len(left_out):
            return self._made(0, end, take)
        listed = np.asarray(take(0, end), np.int64)
        draws = np.flatnonzero(~np.isin(listed, left_out))
        return self._made(0, len(draws), partial(_part, 0, listed[draws]), draws)

    def _made(self, start: int, end: int, samples: Take, draws: Samples | None = None) -> EqualPlan:
        has_draws, reweights = self.user_sampler.is_given, self.mixed.reweights
        return EqualPlan(start, end, samples, self.options, self.n, has_draws, reweights, draws)

    def rest(self, epoch: int, before: EqualPlan, position: int) -> EqualPlan:
        """Return what another plan leaves of an epoch, in the same order; in a new one if samples or `shuffle` are."""
        begin = min(position, before.end)
        left, draws = np.asarray(before.samples(begin, before.end), np.int64), before.draws_from(begin)
        if changed := [draw for draw, weights in self.mixed.reweights if [draw, weights] not in before.reweights]:
            left, draws = self._reweighted(epoch, left, draws, changed[0])
        new = np.arange(
            before.n, before.n if self.user_sampler.is_given else self.n
        )  # a sampler has no new samples here
        left, draws = np.concatenate([left, new]), np.concatenate([draws, new])
        kept = ~np.isin(left, self.excluded)
        left, draws = left[kept], draws[kept]
        if not self.user_sampler.is_given and (len(new) or self.options.shuffle != before.options.shuffle):
            mixed = Shuffle(len(left), self.seed, epoch, position).take(0, len(left))
            left = left[mixed] if self.options.shuffle else np.sort(left)
        return self._made(position, position + len(left), partial(_part, position, left), draws)

    def _reweighted(self, epoch: int, left: Samples, draws: Samples, draw: int) -> tuple[Samples, Samples]:
        """Return the rest of an epoch, and its draws, with other weights from a draw of the run on."""
        order = self.user_sampler.of_epoch(epoch, self.mixed)
        if order is None or (low := draw - epoch * order[0]) >= order[0]:
            return left, draws
        if not len(draws) or low < draws[0]:
            raise ValueError(_CHANGED)
        length, cut = order[0], int(np.searchsorted(draws, low))
        coming = np.asarray(order[1](low, length), np.int64)
        return np.concatenate([left[:cut], coming]), np.concatenate([draws[:cut], np.arange(low, length)])

    def refuse_change_within_epoch(self) -> None:
        """Any part of an epoch may be planned anew."""

    # States.

    @property
    def fingerprint(self) -> str:
        """Digest of the samples, the batch size, the order and the seed."""
        return self._fingerprint_with(self.user_sampler.fingerprint)

    def fingerprint_at(self, epoch: int) -> str:
        """Return the fingerprint that states of an epoch hold: a sampler's schedule may change after their epoch."""
        return self._fingerprint_with(self.user_sampler.epoch_fingerprint(epoch, self.mixed))

    def _fingerprint_with(self, inner: str | None) -> str:
        options = self.options
        order = f"shuffle {options.shuffle}" if inner is None else inner
        parts = f"{self.n} {options.batch_size} {options.drop_last} {order} {self.seed}"
        return text_digest(parts)[:16]

    def check_state(self, state: Any) -> Mapping[str, Any]:
        """Refuse what is no state, or one of another version or seed."""
        own = {"version": STATE_VERSION, "seed": self.seed}
        check_state(state, self.name, own, ("epoch", "position"), ("fingerprint", *RECORD))
        checked: Mapping[str, Any] = state
        return checked

    def settings_changed(self, state: Mapping[str, Any], recorded: Mapping[str, Any], accept: Collection[str]) -> bool:
        """Return whether a state is of other settings, all of them accepted; refuse those that are not."""
        epoch: int = state["epoch"]
        own, saved = self.fingerprint_at(epoch), state["fingerprint"]
        if saved == own:
            return False
        options = vars(self.options)
        n, then = recorded.get("n", self.n), {**options, **recorded["options"]}
        changed = {name: then[name] for name in options if then[name] != options[name]}
        if n < self.n or (n == self.n and self.user_sampler.has_other_sources(recorded)):
            changed[DATA] = n
        accepted = {name: value for name, value in changed.items() if name in accept}
        if accepted:
            others = {name: accepted.get(name, value) for name, value in options.items()}
            old = {name: recorded[name] for name in ("mixture", "reweight") if DATA in accepted and name in recorded}
            old |= {"options": others, "n": accepted.get(DATA, self.n), "exclude": ()}
            if self.at({**self.settings, **old}).fingerprint_at(epoch) == saved:
                return True
        cure = _OTHER_RUN
        if (recorded.get("mixture") is None) != (self.mixed.mixture is None):
            cure += _ONE_MIXTURE
        elif changed and not changed.keys() <= {*accept}:
            here = {**options, DATA: f"{self.n} samples"}
            differs = ", ".join(f"{name} ({value}, here {here[name]})" for name, value in changed.items())
            cure += f"; it differs in {differs}: go on with accept={sorted({*changed, *accept})}"
        elif self.user_sampler.is_mixture:
            cure += f"; of the mixture it covers {_OF_A_MIXTURE}"
            if recorded["reweight"]:
                cure += f"; {_REWEIGHTED.format(draw=recorded['reweight'][-1][0])}"
        reason = f"{self.name}: checkpoint has fingerprint={saved!r}, got fingerprint={own!r}"
        raise StateMismatchError(reason, cure, [*changed] or ["fingerprint"], changed)

    def state_of(self, _epoch: int, _place: Place) -> dict[str, Any]:
        """Return nothing: the position and the record tell all."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_latest": {}, "user_sampler": self.user_sampler.copied()}


def _part(start: int, listed: Samples, first: int, stop: int) -> Samples:
    """Places of a list that begins at a position."""
    return listed[first - start : stop - start]


def _without(left_out: Samples, take: Take, start: int, stop: int) -> Samples:
    """An order of the samples that are left, by their numbers among these."""
    numbers = take(start, stop)
    return numbers + np.searchsorted(left_out - np.arange(len(left_out)), numbers, "right")


def _repetition(again: list[int], few: int, world: int) -> str:
    """Name the samples of a step that come twice, as it has fewer of them than ranks."""
    message = f"the last step has {counted(few, 'sample')} for {counted(world, 'rank')}, and repeats"
    return f"{message} {counted(len(again), 'sample')}: {again[:10]}{' ...' if len(again) > 10 else ''}"


def n_steps(left: int, batch_size: int, world: int, *, drop_last: bool = False) -> int:
    """How many steps `left` samples make."""
    return left // (batch_size * world) if drop_last else -(-left // (batch_size * world))


def step_span(
    step: int, start: int, end: int, batch_size: int, world: int, *, drop_last: bool = False
) -> tuple[int, int]:
    """The places of a step, counted from `start`: the first, and the one after the last.

    All steps but the last hold `batch_size * world` samples. Where the last one would leave ranks without a sample, the
    last two share theirs.
    """
    whole = batch_size * world
    begin = start + step * whole
    if drop_last:
        return begin, begin + whole
    steps = n_steps(end - start, batch_size, world)
    rest = end - start - (steps - 1) * whole
    if rest < world and steps > 1 and batch_size > 1 and step >= steps - 2:
        first = start + (steps - 2) * whole
        middle = first + (end - first) // 2
        return (first, middle) if step == steps - 2 else (middle, end)
    return begin, min(begin + whole, end)


def equal_share(start: Any, stop: Any, number: Any, count: int) -> tuple[Any, Any]:
    """The share of one of `count` readers in a range, or of arrays of them; equal up to one, some of them empty.

    >>> equal_share(0, 5, 1, 2)
    (2, 5)
    """
    n = stop - start
    return start + n * number // count, start + n * (number + 1) // count
