"""A run over epochs: where it is, what changed in it, and every step that was or will be.

It knows nothing of samples and how they are batched: a `Planner` makes plans, and an `EpochPlan` gives the steps from
any place on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .cursor import EpochCursor
from .epoch_plan import EpochPlan, Place, PlannedBatch, Steps
from .ranks import Mesh, Ranks, process_group
from .record import RunRecord, Section
from .warnings import warn

REWEIGHT_INTERVAL = 1024  # draws; the weights of a mixture change at multiples of this
Settings = Mapping[str, Any]  # as the record has them: n, options, exclude, mixture, reweight


@dataclass(frozen=True)
class History:
    """What a plan may depend on of a run before its epoch.

    Attributes:
        first_world: Number of ranks with which the run began.
        settings_of: Returns the settings with which an earlier epoch began; None if they are not recorded.
    """

    first_world: int
    settings_of: Callable[[int], Settings | None]


class SamplerAdapter(Protocol):
    """A user's sampler, as a run handles it; `NoSampler` stands for none."""

    @property
    def is_given(self) -> bool:
        """Whether there is a sampler."""

    @property
    def epoch_length(self) -> int:
        """Draws of an epoch of a mixture."""

    def check(self, epoch: int, world: int, mesh: Mesh | None, /) -> None:
        """Refuse an order that is not that of all ranks."""

    def set_epoch(self, epoch: int, changed: bool, /) -> None:
        """Pass the epoch on to the sampler."""

    def finished(self) -> None:
        """Note that an iteration came to its end: the next one may read the sampler anew."""

    def refuse_resume(self) -> None:
        """Refuse to resume within an epoch whose order cannot be read again."""

    def require_mixture(self) -> None:
        """Refuse a sampler without weights that a run may change."""

    def reweighted(self, weights: Any, draw: int, /) -> list[Any]:
        """Return the changes of a mixture's weights, with another one from a draw on."""

    def has_other_sources(self, recorded: Settings, /) -> bool:
        """Return whether recorded settings are of a mixture of other sources."""

    def continuing(self, recorded: Settings, /) -> dict[str, Any]:
        """Return the settings of the mixture as it continues one of recorded settings."""

    def grown(self, recorded: Settings, epoch: int, /) -> dict[str, Any]:
        """Return the settings of the mixture as it continues one whose data have grown at the beginning of an epoch."""

    def asked_shares(self) -> Any:
        """Return what a mixture's shares refer to, and the requested share of each source; None without one."""

    def set_mixture(self, settings: Settings, /) -> None:
        """Let the mixture be as settings have it."""


class Planner(Protocol):
    """Makes plans from settings. It is frozen; only a user's sampler below it has an epoch."""

    @property
    def version(self) -> int:
        """Version of the states."""

    @property
    def seed(self) -> int:
        """Key of all randomness."""

    @property
    def user_sampler(self) -> SamplerAdapter:
        """The user's sampler, which gives the order."""

    @property
    def settings(self) -> dict[str, Any]:
        """The settings, as the record stores them."""

    @property
    def epochs_differ(self) -> bool:
        """Whether epochs differ and need ``set_epoch``."""

    def at(self, settings: Settings, /) -> Planner:
        """Return the planner for recorded settings."""

    def plan(self, epoch: int, history: History, /) -> EpochPlan:
        """Return the plan of a complete epoch."""

    def rest(self, epoch: int, before: Any, position: int, /) -> EpochPlan:
        """Return the plan of what another plan of this planner leaves of an epoch from a position on."""

    def refuse_change_within_epoch(self) -> None:
        """Refuse a change in the middle of an epoch, if its plan depends on what came before."""

    def check_state(self, state: Any, /) -> Mapping[str, Any]:
        """Refuse what is no state, or one of another version or seed; return it with plain ints."""

    def settings_changed(self, state: Mapping[str, Any], recorded: Settings, accept: Collection[str], /) -> bool:
        """Return whether a state is of other settings, all of them accepted; refuse those that are not."""

    def fingerprint_at(self, epoch: int, /) -> str:
        """Return the fingerprint that states of an epoch hold."""

    def state_of(self, epoch: int, place: Place, /) -> dict[str, Any]:
        """Return what states hold beside the position and the record."""


class NoSampler:
    """In place of a user's sampler: the planner has an order of its own, which is known in every epoch."""

    epoch_length = 0
    is_given = False

    def check(self, _epoch: int, _world: int, _mesh: Mesh | None) -> None:
        """All ranks have the same order."""

    def set_epoch(self, _epoch: int, _changed: bool) -> None:
        """There is no sampler that needs the epoch."""

    def finished(self) -> None:
        """There is no sampler to read."""

    def refuse_resume(self) -> None:
        """Every epoch is known."""

    def require_mixture(self) -> None:
        """Refuse: there is no mixture."""
        raise TypeError("sampler must mix sources by weight for that, got NoneType: give a WeightedDistributedSampler")

    def reweighted(self, _weights: Any, _draw: int) -> list[Any]:
        """Refuse: there is no mixture."""
        self.require_mixture()
        return []

    def has_other_sources(self, _recorded: Settings) -> bool:
        """There is no mixture."""
        return False

    def continuing(self, recorded: Settings) -> dict[str, Any]:
        """Return the changes of weights, which are refused."""
        return {"reweight": recorded["reweight"]}

    def grown(self, _recorded: Settings, _epoch: int) -> dict[str, Any]:
        """There is no mixture."""
        return {}

    def asked_shares(self) -> None:
        """There is no mixture."""

    def set_mixture(self, settings: Settings) -> None:
        """Refuse changes of weights: there is no mixture."""
        if settings.get("reweight"):
            raise ValueError(
                "state is of a run whose mixture got other weights, and sampler is None: give the "
                "WeightedDistributedSampler of that run"
            )


_GROWTH = (
    "accept={{'data'}} needs a state of {boundary} of an epoch where a sampler gives the order, got "
    "position={position}: resume with the data of the state, and append samples between two epochs"
)
_NO_STEP = "number must be a step of the run, got one that it does not have"


class Iteration:
    """An iteration over an epoch.

    Attributes:
        plan: Its plan.
        began: The place where it began.
        world: The number of ranks.
        batches: How many of its batches were delivered.
        finished: Whether it came to its end.
    """

    def __init__(self, plan: EpochPlan, began: Place, world: int) -> None:
        self.plan, self.began, self.world = plan, began, world
        self.batches, self.finished = 0, False


class Run:
    """The run of a sampler.

    A change in the middle of an epoch ends the current plan, and the rest is planned anew. Positions continue over all
    plans of an epoch.

    Args:
        planner: Makes the plans.
        ranks: The data-parallel ranks.
        all_ranks: Whether one process takes the batches of all ranks.
    """

    def __init__(self, planner: Planner, ranks: Ranks, all_ranks: bool = False) -> None:
        self.planner, self.ranks, self.all_ranks = planner, ranks, all_ranks
        self._cursor = EpochCursor()
        self._recorded = RunRecord().noted(0, 0, planner.settings)
        self._delivered = 0  # steps of the latest iteration since then
        self._start = Place(0)  # of the next iteration, unless it is the beginning of the epoch
        self._interrupted: Iteration | None = None  # a running one whose rest was planned anew
        self._timelines: dict[int, tuple[Any, list[EpochPlan]]] = {}  # by epoch, and what they were made for
        self._warned = set[str]()  # that were given

    # Where it is.

    @property
    def epoch(self) -> int:
        """The epoch of the latest iteration, or of the next one."""
        return self._cursor.epoch

    @property
    def position(self) -> int:
        """The position of the latest iteration, or where the next one begins."""
        return self._cursor.position

    @property
    def world(self) -> int:
        """Current number of data-parallel ranks."""
        return self.ranks.world_size()

    @property
    def record(self) -> RunRecord:
        """The record of the run, up to the current step."""
        recorded = self._recorded
        return replace(recorded, step=recorded.step + self._delivered) if self._delivered else recorded

    @record.setter
    def record(self, record: RunRecord) -> None:
        self._recorded, self._delivered = record, 0

    @property
    def iteration(self) -> Iteration | None:
        """The latest iteration; None if a state was loaded or another epoch was chosen since."""
        latest: Iteration | None = self._cursor.iteration
        return latest

    @property
    def start(self) -> Place:
        """Where the next iteration begins."""
        return self._start if self._cursor.start == self._start.position else Place(self._cursor.start)

    def place(self, position: int | None = None) -> Place:
        """Return the place of the latest iteration, or of another position of its epoch."""
        latest = self.iteration
        if position is None and latest is None:
            return self.start
        position = self.position if position is None else position
        if latest is not None:
            return latest.plan.place(position, latest.began, latest.world)
        return self.current_plan(position).place(position, self.start, self.world)

    # Plans.

    @property
    def history(self) -> History:
        """What a plan may depend on of the run so far."""
        return self._history(self.position)

    def _history(self, position: int, world: int | None = None) -> History:
        """Return the history of a position; where the run begins there, it does so with ``world`` ranks."""
        first_world = self.record.first_world(self.epoch, position) or world
        return History(first_world or self.world, self._settings_of)

    def _settings_of(self, epoch: int) -> Settings | None:
        """Return the settings with which an epoch before the present one began."""
        return self.record.settings(epoch, 0) if epoch < self.epoch else None

    def plan(self, epoch: int) -> EpochPlan:
        """Return the plan of a complete epoch with the present settings."""
        return self.planner.plan(epoch, self.history)

    def planner_of(self, epoch: int) -> Planner:
        """Return the planner of an epoch: with the settings of its beginning if it is past, else the present one."""
        settings = self._settings_of(epoch)
        return self.planner if settings is None else self._planner_at(settings)

    def current_plan(self, position: int | None = None, world: int | None = None) -> EpochPlan:
        """Return the plan that holds at a position of this epoch, by default the current one.

        If the run begins there, it does so with ``world`` ranks, by default as many as there are now.
        """
        position = self.position if position is None else position
        replanned = _plan_at(self._timeline(self.record, self.epoch)[1:], position)
        return replanned or self.planner.plan(self.epoch, self._history(position, world))

    def _timeline(self, record: RunRecord, epoch: int) -> list[EpochPlan]:
        """Return the plans of an epoch that has begun, each from a change on; none if it has no such change."""
        if record.start_of(epoch) is None:
            return []
        made_for = record.changes, self.planner
        if epoch not in self._timelines or self._timelines[epoch][0] != made_for:
            first, *later = record.sections(epoch)
            later = [section for section in later if section.change and record.replans(section.change)]
            plans = [self._first_plan(epoch, first.settings)] if later else []
            for section in later:
                position = section.change["position"] if section.change else 0
                plans.append(self._planner_at(section.settings).rest(epoch, plans[-1], position))
            self._timelines = {other: known for other, known in self._timelines.items() if other == self.epoch}
            self._timelines[epoch] = made_for, plans
        return self._timelines[epoch][1]

    def _first_plan(self, epoch: int, settings: Settings) -> EpochPlan:
        """Return the plan with which a recorded epoch began."""
        record = self.record
        history = History(record.first_world() or self.world, lambda past: record.settings(past, 0))
        return self._planner_at(settings).plan(epoch, history)

    def _planner_at(self, settings: Settings) -> Planner:
        """Return the planner for recorded settings."""
        try:
            return self.planner.at(settings)
        except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
            raise ValueError(
                f"state['run'] must hold settings as state_dict() returned them: it was changed ({error!r})"
            ) from error

    def _settings(self, world: int | None = None) -> dict[str, Any]:
        """Return the current settings, as the record stores them."""
        ranks = {} if world is None else {"world": world, "all": self.all_ranks}
        return {**ranks, **self.planner.settings}

    # Iterating.

    def deliver(self, owner: object) -> Iterator[PlannedBatch]:
        """Yield this rank's batches from the start on; ``owner`` is the sampler."""
        while (yield from self._deliver(owner)):  # until no change interrupts it
            pass

    def _deliver(self, owner: object) -> Generator[PlannedBatch, None, bool]:
        """Yield this rank's batches of the epoch; return whether a change interrupted that."""
        planner, batches = self.planner, self.begin()
        iteration: Iteration = self._cursor.iteration
        start, end, finished = iteration.began.position, iteration.plan.end, False
        for batch in batches:
            if self._cursor.move(iteration, batch.place.position, owner):
                self._count(iteration)
            if batch.place.position == end and not finished:
                # Here and not at the end: Lightning asks for no more than the last batch.
                finished = True
                self._cursor.finish(iteration, start, owner, differs=planner.epochs_differ)
            yield batch
            if self._interrupted is iteration:
                return self.iteration is None  # and no other iteration has begun since
        if self._cursor.move(iteration, end):
            iteration.finished = True
            if not finished:
                self._cursor.finish(iteration, start, owner, nothing=start == end)
            planner.user_sampler.finished()
        return False

    def begin(self) -> Iterator[PlannedBatch]:
        """Begin an iteration at the start; return its batches, which move the position when they are delivered."""
        world, rank = self._readers()
        epoch, began, planner = self.epoch, self.start, self.planner
        planner.user_sampler.check(epoch, world, self.ranks.mesh)
        with self._restored_if_refused():
            self.record = self.record.begun(epoch, began.position, self._settings(world), began.plan_state)
            plan = self.current_plan(began.position)
            if not began.position:
                plan.refuse_empty(world)
            steps = plan.steps(began, world, self.all_ranks)
            first = list(islice(steps, 1))  # which may raise an error: the position stays as it was
        iteration = Iteration(plan, began, world)
        self._cursor.begin(iteration)
        return self._batches_of(iteration, chain(first, steps), rank)

    def delivered(self, place: Place) -> None:
        """Move to the place after one more batch of the latest iteration."""
        if (iteration := self.iteration) is None:
            raise RuntimeError("batch must be of an iteration that begin() has begun, and there is none: call begin()")
        self._cursor.move(iteration, place.position)
        self._count(iteration)

    def _count(self, iteration: Iteration) -> None:
        iteration.batches += 1
        self._delivered = iteration.batches // iteration.world if self.all_ranks else iteration.batches

    def go_to(self, place: Place) -> None:
        """Let the next iteration begin at a place of this epoch that the run has passed."""
        if place.position and place.position != self.position:
            self.record = self._record_at(place)
        self._start = place
        self._cursor.go_to(self.epoch, place.position)

    def batches_from(self, place: Place | None = None) -> Iterator[PlannedBatch]:
        """Yield this rank's batches of the epoch from a place on, by default the next one. It moves nothing."""
        world, rank = self._readers()
        began = self.start if place is None else place
        plan = self._plan_from(began)
        if not plan.start <= began.position <= plan.end:
            raise ValueError(f"place must be at position {plan.start} to {plan.end} of the epoch, got {began.position}")
        yield from self._batches_of(Iteration(plan, began, world), plan.steps(began, world, self.all_ranks), rank)

    def n_batches_from(self, place: Place) -> int:
        """Return the number of batches of an iteration that begins at a place of this epoch."""
        return self._n_batches(self._plan_from(place).n_steps(place, self.world))

    def _plan_from(self, place: Place) -> EpochPlan:
        """Return the plan of an iteration that begins at a place of this epoch, with the present settings."""
        if not self.record.changes_after(self.epoch, place.position):
            return self.current_plan(place.position)
        replanned = _plan_at(self._timeline(self._record_at(place), self.epoch)[1:], place.position)
        return replanned or self.planner.plan(self.epoch, self._history(place.position))

    def _readers(self) -> tuple[int, int]:
        """Return the number of ranks and the rank of this process."""
        return (self.world, (process_group() or (1, 0))[1]) if self.all_ranks else self.ranks.current()

    def _batches_of(self, iteration: Iteration, steps: Iterator[Steps], rank: int) -> Iterator[PlannedBatch]:
        """Yield the batches of this rank, or of all ranks."""
        plan, began, world = iteration.plan, iteration.began, iteration.world
        first, stride = (0, 1) if self.all_ranks else (rank, world)
        for batches in steps:
            once = batches.warning_once if rank == 0 and batches.warning_once not in self._warned else ""
            self._warned.add(once)
            for text in filter(None, (batches.warning, once)):
                warn(text, self)
            # With all ranks a position lies after each batch, else after each step.
            ends = batches.ends if self.all_ranks else batches.ends[world - 1 :: world]
            begins, stops = batches.offsets[first:-1:stride].tolist(), batches.offsets[first + 1 :: stride].tolist()
            samples, draws = batches.samples, batches.draws
            for begin, stop, end in zip(begins, stops, ends.tolist(), strict=True):
                keys, place = plan.keys(samples[begin:stop]), plan.place(end, began, world)
                yield PlannedBatch(keys, place, None if draws is None else draws[begin:stop].tolist())

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch to iterate over next; a loaded position of another epoch is discarded."""
        self.planner.user_sampler.set_epoch(epoch, self._cursor.choose(epoch))

    # Counting.

    def __len__(self) -> int:
        plan = self.current_plan()
        if plan.start:
            record = self.record
            return self._n_batches(record.step - (record.start_of(self.epoch) or 0)) + self.remaining
        steps = plan.n_steps(Place(0), self.world)
        plan.refuse_empty(self.world)
        return self._n_batches(steps)

    @property
    def remaining(self) -> int:
        """Number of batches that are left in the epoch for each rank, or for all ranks together."""
        return self._n_batches(self.current_plan().n_steps(self.place(), self.world))

    def _n_batches(self, steps: int) -> int:
        return steps * self.world if self.all_ranks else steps

    # Looking up.

    def step(self, number: int, world: int | None = None) -> list[list[Any]]:
        """Return the samples of any step of the run, rank by rank; ``world`` is the number of ranks of coming steps."""
        record = self.record
        coming = record.step_at(self.epoch, self.position)
        if record.first_step <= number < coming:
            return self._past_step(number)
        return self._coming_step(number - coming, self.world if world is None else world)

    def _past_step(self, number: int) -> list[list[Any]]:
        record = self.record
        epoch = record.epoch_of(number)
        section = [section for section in record.sections(epoch) if section.step <= number][-1]
        world, all_ranks = section.settings["world"], section.settings.get("all", False)
        plan = self._plan_of_section(record, epoch, section)
        return _step_of(plan, section.place, world, number - section.step, all_ranks)

    def _plan_of_section(self, record: RunRecord, epoch: int, section: Section) -> EpochPlan:
        replanned = _plan_at(self._timeline(record, epoch), section.position)
        return replanned or self._first_plan(epoch, section.settings)

    def _coming_step(self, steps: int, world: int) -> list[list[Any]]:
        """Return a step of the rest of this epoch, or of one that comes."""
        plan, _, place, steps = self._find_coming(steps, world)
        return _step_of(plan, place, world, steps, self.all_ranks)

    def epoch_of_step(self, number: int, world: int | None = None) -> int:
        """Return the epoch of any step of the run; ``world`` is the number of ranks of coming steps."""
        record = self.record
        coming = record.step_at(self.epoch, self.position)
        if record.first_step <= number < coming:
            return record.epoch_of(number)
        return self._find_coming(number - coming, self.world if world is None else world)[1]

    def _find_coming(self, steps: int, world: int) -> tuple[EpochPlan, int, Place, int]:
        """Return the plan, the epoch and the place from which a coming step is so many steps away."""
        empty = False
        for plan, epoch, place in self._coming_plans(world) if steps >= 0 else ():
            if steps < (left := plan.n_steps(place, world, steps + 1)):
                return plan, epoch, place, steps
            if empty and not left:
                break
            steps, empty = steps - left, not left
        raise IndexError(_NO_STEP)

    def _coming_plans(self, world: int) -> Iterator[tuple[EpochPlan, int, Place]]:
        """Yield the plans of this epoch and of those that come, without end, with the epoch and the place in it.

        A run that has not begun begins with ``world`` ranks.
        """
        epoch, place, history = self.epoch, self.place(), self._history(self.position, world)
        plan = self.current_plan(world=world)
        while True:
            yield plan, epoch, place
            epoch, place = epoch + 1, Place(0)
            plan = self.planner.plan(epoch, history)

    # Changing.

    def exclude(self, indices: Sequence[int]) -> None:
        """Exclude samples from now on."""
        settings = self.planner.settings
        known = set(settings["exclude"])
        if new := [index for index in dict.fromkeys(indices) if index not in known]:
            with self._restored_if_refused():
                self._change({**settings, "exclude": [*settings["exclude"], *new]})
            self._apply_reweights()
            self._interrupt()

    def _change(self, settings: Settings) -> None:
        """Continue with other settings from here on."""
        self.planner = self.planner.at(settings)
        self._note(self.epoch, self.position)

    def _note(self, epoch: int, position: int) -> None:
        """Record the settings from a place on; refuse other ones where the epoch cannot change there."""
        before = self.record
        record = before.noted(epoch, position, self._settings())
        if record is not before and record.replans(record.changes[-1]) and position:
            self.planner.refuse_change_within_epoch()
        self.record = record

    def _apply_reweights(self) -> None:
        """Give the user's mixture the weights of the present settings."""
        self.planner.user_sampler.set_mixture(self.planner.settings)

    @contextmanager
    def _restored_if_refused(self) -> Iterator[None]:
        before = self.planner, self._recorded, self._delivered
        try:
            yield
        except BaseException:
            self.planner, self._recorded, self._delivered = before
            raise

    def skip(self, steps: int) -> NDArray[np.int64]:
        """Skip the next steps of this epoch; return their samples."""
        world, place = self.world, self.place()
        with self._restored_if_refused():
            self.record = self.record.begun(self.epoch, place.position, self._settings(world), place.plan_state)
            plan, start = self.current_plan(), place.position
            stop = passed = start
            for end, end_of_samples in islice(_step_ends(plan, place, world, self.all_ranks), steps):
                stop, passed = end, end_of_samples
            skipped = plan.delivered(start, passed)
        self.record = self.record.noted(self.epoch, start, {}, skip=stop - start)
        self._interrupt(stop)
        return skipped

    def reshard(self, ranks: Ranks) -> None:
        """Continue with other ranks."""
        self.ranks = ranks
        self._interrupt()

    def reweight(self, weights: Any, draw: int | None = None) -> tuple[int, int]:
        """Change the weights of the mixture from a draw on; return that draw and the first step that it affects."""
        sampler, first, waits = self.planner.user_sampler, draw, False
        sampler.require_mixture()
        length = sampler.epoch_length
        if first is None:
            plan, position = self.current_plan(), self.position
            unread = length if position >= plan.end else plan.first_unread(position)
            first = -(-(self.epoch * length + unread) // REWEIGHT_INTERVAL) * REWEIGHT_INTERVAL
            waits = position < plan.end and unread >= length
        settings = {**self.planner.settings, "reweight": sampler.reweighted(weights, first)}
        with self._restored_if_refused():
            self._change(settings)
            step = self._step_of_draw(first, length)
        self._apply_reweights()
        self._interrupt()
        if waits:
            warn(
                f"the weights change in epoch {first // length}, at step {step} of the run: the windows of batches "
                f"that have begun reach to the end of epoch {self.epoch}. With a smaller window=, or "
                "strategy='sequential', weights change earlier",
                self,
            )
        return first, step

    def _step_of_draw(self, draw: int, length: int) -> int:
        """Return the first step that may hold a draw or a later one: that of the window that has it."""
        world, number = self.world, self.record.step_at(self.epoch, self.position)
        for plan, epoch, place in self._coming_plans(world):
            position = plan.position_of_draw(draw - epoch * length)
            if position < plan.end:
                for step, (_, end) in enumerate(_step_ends(plan, place, world, self.all_ranks)):
                    if end > position:
                        return number + step
            left = plan.n_steps(place, world)
            if epoch * length >= draw and not left:  # epochs are empty
                break
            number += left
        return number

    def _interrupt(self, position: int | None = None) -> None:
        """Let the iteration that is running, or else the next one, continue with other batches from here on."""
        latest = self.iteration
        if latest is not None and latest.finished and position is None:
            return
        self._start = self.place() if position is None else Place(position)
        self._interrupted = latest or self._interrupted  # a change at the same step has interrupted it already
        self._cursor.go_to(self.epoch, self._start.position)

    # States.

    def state(self, place: Place | None = None) -> dict[str, Any]:
        """Return the state for a resume, at the current place or at another one of the epoch.

        The settings of an earlier place are the present ones: what was excluded since then does not come there either.
        """
        planner, epoch = self.planner, self.epoch
        place = self.place() if place is None else place
        record = self.record
        if place.position != self.position:
            record = self._record_at(place)
        elif (rewound := record.back_to(epoch, place.position)) is not record:
            record = rewound.noted(epoch, place.position, self._settings())
        return {
            "version": planner.version,
            "seed": planner.seed,
            "epoch": epoch,
            "position": place.position,
            "fingerprint": planner.fingerprint_at(epoch),
            **record.as_state(),
            **planner.state_of(epoch, place),
        }

    def _record_at(self, place: Place) -> RunRecord:
        """Return the record at another place of this epoch, with the present settings."""
        record, epoch, start = self.record, self.epoch, self.start
        if self.iteration is None:  # as if it had begun and delivered nothing
            record = record.begun(epoch, start.position, self._settings(self.world), start.plan_state)
        steps = self._steps_to(record, place)
        return record.at(epoch, place.position, steps).noted(epoch, place.position, self._settings())

    def _steps_to(self, record: RunRecord, place: Place) -> int:
        """Return how many steps another place of this epoch is after the current one, negative before it."""
        sections = record.sections(self.epoch) if record.start_of(self.epoch) is not None else []
        begun = [section for section in sections if section.position <= place.position]
        if len(begun) == len(sections):
            plan, world = self.current_plan(), self.world
            return plan.n_steps(self.place(), world) - plan.n_steps(place, world)
        if not begun:  # skipped at the beginning of the epoch
            return sections[0].step - record.step
        section = begun[-1]
        plan, world = self._plan_of_section(record, self.epoch, section), section.settings["world"]
        steps = plan.n_steps(section.place, world) - plan.n_steps(place, world)
        return section.step + steps - record.step

    def load(self, state: Any, accept: Collection[str] = ()) -> None:
        """Resume from a state, unless a later ``set_epoch`` has chosen another epoch."""
        planner = self.planner
        state = planner.check_state(state)
        epoch, position = state["epoch"], state["position"]
        record = RunRecord.from_state(state)
        recorded = record.settings(epoch, position)
        # The fingerprint is that of the recorded weights.
        planner = planner.at({**planner.settings, **planner.user_sampler.continuing(recorded)})
        accepted = planner.settings_changed(state, recorded, accept)
        n = planner.settings.get("n")
        has_grown = accepted and (recorded.get("n", n) != n or planner.user_sampler.has_other_sources(recorded))
        if has_grown:
            # An epoch that was over stays as it was.
            planner = planner.at({**planner.settings, **planner.user_sampler.grown(recorded, epoch + (position > 0))})
        if self._cursor.overrules(epoch):
            return
        with self._restored_if_refused():
            planner = planner.at({**planner.settings, "exclude": recorded["exclude"]})
            changed = epoch != self.epoch
            self.record, self.planner = record, planner
            if accepted:
                self._note(epoch, position)
            start = self._loaded_place(state, changed, has_grown)
        self._apply_reweights()
        self._cursor.resume(epoch, position)
        self._start = start

    def _loaded_place(self, state: Mapping[str, Any], changed: bool, has_grown: bool) -> Place:
        """Go to the epoch of a state; return its place there."""
        epoch, position, sampler = state["epoch"], state["position"], self.planner.user_sampler
        if position:
            sampler.refuse_resume()
        sampler.set_epoch(epoch, changed)
        if not position:
            return Place(0)
        try:
            if has_grown and sampler.is_given and self.planner.settings.get("mixture") is None:
                raise ValueError(_GROWTH.format(boundary="the beginning", position=position))
            replanned = _plan_at(self._timeline(self.record, epoch)[1:], position)
            plan = replanned or self._first_plan(epoch, self.planner.settings)
            _refuse_position(position, plan)
            if has_grown and sampler.is_given and position < plan.end:
                raise ValueError(_GROWTH.format(boundary="the beginning or the end", position=position))
            return plan.loaded_place(state)
        except BaseException:
            sampler.set_epoch(self.epoch, changed)
            raise

    def refuse_position(self, position: int) -> None:
        """Refuse a position that the epoch does not have."""
        _refuse_position(position, self.current_plan())

    def __getstate__(self) -> dict[str, Any]:
        copied = {"_cursor": copy(self._cursor), "planner": copy(self.planner)}
        return self.__dict__ | copied | {"_start": self.place(), "_interrupted": None, "_timelines": {}}


def _plan_at(plans: Sequence[EpochPlan], position: int) -> EpochPlan | None:
    """Return the last of some plans that begins at a position or before it; None if there is none."""
    return next((plan for plan in reversed(plans) if plan.start <= position), None)


def _refuse_position(position: int, plan: EpochPlan) -> None:
    if not 0 <= position <= plan.end:
        raise ValueError(f"position must be an int from 0 to {plan.end}, the samples of the epoch, got {position}")


def _step_ends(plan: EpochPlan, place: Place, world: int, all_ranks: bool) -> Iterator[tuple[int, int]]:
    """Yield two positions for each step from a place on: where the next step begins, and where its own samples end.

    They differ after the last step, if samples are dropped: these count as delivered.
    """
    passed = place.position
    for steps in plan.steps(place, world, all_ranks):
        ends = steps.ends[world - 1 :: world].tolist()
        offsets = steps.offsets[world::world].tolist()
        for end, offset in zip(ends, offsets, strict=True):
            yield end, min(end, passed + offset)
        passed = ends[-1] if ends else passed


def _step_of(plan: EpochPlan, place: Place, world: int, steps: int, all_ranks: bool) -> list[list[Any]]:
    """Return the step that is so many steps after a place, rank by rank."""
    passed, place = plan.seek(place, world, steps)
    wanted = (steps - passed) * world
    for batches in plan.steps(place, world, all_ranks):
        if wanted < len(batches.ends):
            return [plan.keys(batches.batch(wanted + rank)) for rank in range(world)]
        wanted -= len(batches.ends)
    raise IndexError(_NO_STEP)
