"""What changed in a run, and when: enough to tell what any step of it was."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple

from .epoch_plan import Place

Change = dict[str, Any]
RECORD = ("step", "starts", "run")  # what a state has of it
_COORDINATES = ("epoch", "position", "step")  # of a change
_OVERWRITTEN = ("world", "all", "n", "mixture", "accumulate")  # by a change that has them
_LARGEST = 2**62


class Section(NamedTuple):
    """Steps of an epoch with the same settings, from a step and a place on."""

    step: int
    place: Place
    settings: dict[str, Any]
    change: Change | None  # where it begins; None where an epoch begins without one

    @property
    def position(self) -> int:
        """The position where it begins."""
        return self.place.position


@dataclass(frozen=True)
class RunRecord:
    """The record of a run: the steps at which epochs began, and the changes. It never changes: methods return another.

    A *step* is one batch on each rank; steps are numbered from the start of the run, over all epochs. A *position* is a
    place in an epoch: samples that all ranks together have received or skipped. A *change* holds what differs from a
    place on: ``{"epoch": 0, "position": 640, "step": 10, "world": 6}``. The first change has all settings:

    - ``world``: number of ranks, and ``all``: True where one process takes the batches of all ranks;
    - ``n``: number of samples of the dataset;
    - ``mixture``: what a mixture records of itself; a change that has ``n``, too, ends the ``reweight`` before it;
    - ``options``: arguments that decide which batches there are; a change has only those that differ;
    - ``exclude``: samples left out; a change has only those that are new;
    - ``skip``: samples that are passed over there, once;
    - ``accumulate``: micro-batches of an optimizer step, where a run has those;
    - ``inside``: the ``plan_state`` of the `Place`, if a plan needs that to continue there;
    - ``reweight``: weights of a mixture that hold from a draw on, as the mixture has them; a change has only those that
      are new.

    Going back, to an earlier epoch or to the beginning of the current one, forgets what came after.

    Args:
        step: The number of the next step.
        starts: Of each epoch that began: the epoch, and its first step.
        changes: In the order of their places.
        began_at: Epoch and position of the latest beginning of an iteration.

    >>> record = RunRecord().begun(0, 0, {"world": 8, "n": 100, "options": {"batch_size": 4}})
    >>> record = replace(record, step=2).begun(0, 64, {"world": 3, "n": 100, "options": {"batch_size": 4}})
    >>> record.changes[1]
    {'epoch': 0, 'position': 64, 'step': 2, 'world': 3}
    """

    step: int = 0
    starts: tuple[tuple[int, int], ...] = ()
    changes: tuple[Change, ...] = ()
    began_at: tuple[int, int] = (0, 0)

    # States.

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> RunRecord:
        """Return the record of a state.

        Raises:
            ValueError: If it was changed.
        """
        place = state["epoch"], state["position"]
        step: Any = state.get("step")
        starts, changes = state.get("starts"), state.get("run")
        if not (_is_count(step) and isinstance(starts, list | tuple) and isinstance(changes, list | tuple) and changes):
            raise ValueError("state must have step, starts and run as state_dict() returned them: it was changed")
        if not all(
            isinstance(start, list | tuple) and len(start) == 2 and all(map(_is_count, start)) for start in starts
        ) or any(
            epoch >= later or first > next_first
            for (epoch, first), (later, next_first) in pairwise([*starts, [place[0] + 1, step]])
        ):
            raise ValueError(
                "state['starts'] must be pairs of an epoch and its first step, both ascending: it was changed"
            )
        before: tuple[Any, ...] = (0, 0, 0)
        for change in changes:
            now = tuple(change.get(name) for name in _COORDINATES) if isinstance(change, Mapping) else ()
            if not (len(now) == len(_COORDINATES) and all(map(_is_count, now)) and before <= now and now[:2] <= place):
                raise ValueError("state['run'] must be changes in the order of their steps: it was changed")
            if not _is_change(change):
                raise ValueError(
                    "state['run'] must hold numbers, options, weights and samples that are left out: it was changed"
                )
            before = now
        return cls(step, tuple((epoch, first) for epoch, first in starts), tuple(map(dict, changes)), place)

    def as_state(self) -> dict[str, Any]:
        """Return the record as states have it, in JSON."""
        # A tuple, as torch.distributed.checkpoint takes a list of dicts apart and loads only as many as there are now.
        return {"step": self.step, "starts": [list(start) for start in self.starts], "run": self.changes}

    def at(self, epoch: int, position: int, steps: int) -> RunRecord:
        """Return the record at a place so many steps after the current one, or before it."""
        step, changes = max(0, self.step + steps), self._changes_to(epoch, position)
        return replace(self, step=step, changes=changes, began_at=(epoch, position))

    def changes_after(self, epoch: int, position: int) -> bool:
        """Return whether something has changed after a place."""
        return len(self._changes_to(epoch, position)) < len(self.changes)

    # Changing.

    def begun(
        self, epoch: int, position: int, settings: Mapping[str, Any], plan_state: Sequence[Sequence[int]] = ()
    ) -> RunRecord:
        """Return the record where an iteration begins at a place, with these settings."""
        record = self.back_to(epoch, position)
        starts = record.starts if record.start_of(epoch) is not None else (*record.starts, (epoch, record.step))
        record = replace(record, starts=starts, began_at=(epoch, position))
        return record.noted(epoch, position, settings, plan_state=plan_state)

    def noted(
        self,
        epoch: int,
        position: int,
        settings: Mapping[str, Any],
        skip: int = 0,
        plan_state: Sequence[Sequence[int]] = (),
    ) -> RunRecord:
        """Return the record where these settings hold from a place on.

        It is the same one if the settings were the same before and nothing is skipped.
        """
        before = self.settings(epoch, position)
        new = {
            name: value
            for name, value in settings.items()
            if name in _OVERWRITTEN and before.get(name, False if name == "all" else None) != value
        }
        options = settings.get("options", before["options"])
        changed = {name: value for name, value in options.items() if before["options"].get(name, self) != value}
        changed |= {name: None for name, old in before["options"].items() if name not in options and old is not None}
        if changed:
            new["options"] = changed
        excluded_before = set(before["exclude"])
        if excluded := [index for index in settings.get("exclude", ()) if index not in excluded_before]:
            new["exclude"] = excluded
        reweights = [] if _has_grown(new) else before["reweight"]
        if reweighted := [change for change in settings.get("reweight", ()) if change not in reweights]:
            new["reweight"] = reweighted
        if skip:
            new["skip"] = skip
        if not new:
            return self
        changes, last = self.changes, self.changes[-1] if self.changes else None
        if last is not None and (last["epoch"], last["position"]) == (epoch, position) and "skip" not in last:
            changes, last = changes[:-1], {**last, **_with_change(last, new), **({"skip": skip} if skip else {})}
            last.pop("inside", None)
        else:
            last = {"epoch": epoch, "position": position, "step": self.step, **new}
        if plan_state:
            last["inside"] = [list(entry) for entry in plan_state]
        return replace(self, changes=(*changes, last))

    def back_to(self, epoch: int, position: int) -> RunRecord:
        """Return the record without what came after a place, if the run was at a later one already.

        What was excluded after it is noted anew by who excludes it.
        """
        if not self._is_rewind(epoch, position):
            return self
        step, changes = self.step_at(epoch, position), self._changes_to(epoch, position)
        if position == 0:
            changes = tuple(
                {name: value for name, value in change.items() if name != "skip"}
                if (change["epoch"], change["position"]) == (epoch, 0)
                else change
                for change in changes
            )
        return replace(
            self, step=step, starts=tuple(start for start in self.starts if start[0] <= epoch), changes=changes
        )

    # Looking up.

    def settings(self, epoch: int, position: int) -> dict[str, Any]:
        """Return the settings at a place: all changes up to there together."""
        settings: dict[str, Any] = {"options": {}, "exclude": [], "reweight": []}
        for change in self._changes_to(epoch, position):
            settings = _with_change(settings, change)
        return settings

    def sections(self, epoch: int) -> list[Section]:
        """Return the sections of an epoch that has begun: each change begins one."""
        settings = self.settings(epoch, 0)
        changes = [change for change in self.changes if change["epoch"] == epoch]
        first = changes[0] if changes and changes[0]["position"] == 0 else None
        start = self.starts[bisect_left(self.starts, epoch, key=itemgetter(0))][1]
        sections = [Section(start, Place((first or {}).get("skip", 0)), settings, first)]
        for change in changes:
            if change["position"] > 0:
                settings = _with_change(settings, change)
                place = Place(change["position"] + change.get("skip", 0), tuple(change.get("inside", ())))
                sections.append(Section(change["step"], place, settings, change))
        return sections

    def replans(self, change: Change) -> bool:
        """Return whether a change makes another list of batches from there on; where the record begins, none does."""
        return change is not self.changes[0] and not change.keys().isdisjoint(("n", "options", "exclude", "reweight"))

    @property
    def first_step(self) -> int:
        """The first step that is recorded."""
        return self.starts[0][1] if self.starts else self.step

    def start_of(self, epoch: int) -> int | None:
        """Return the first step of an epoch; None if it has not begun."""
        at = bisect_left(self.starts, epoch, key=itemgetter(0))
        return self.starts[at][1] if at < len(self.starts) and self.starts[at][0] == epoch else None

    def epoch_of(self, step: int) -> int:
        """Return the epoch of a step before the next one."""
        return self.starts[bisect_right(self.starts, step, key=itemgetter(1)) - 1][0]

    def first_world(self, epoch: int | None = None, position: int = 0) -> int | None:
        """Return the number of ranks with which the run began; None if it has not, or begins at that place.

        >>> record = RunRecord().begun(0, 0, {"world": 8})
        >>> record.first_world(0, 640), record.first_world(0, 0)
        (8, None)
        """
        worlds = (
            change["world"]
            for change in self.changes
            if "world" in change and (epoch is None or (change["epoch"], change["position"]) < (epoch, position))
        )
        return next(worlds, None)

    def step_at(self, epoch: int, position: int) -> int:
        """Return the number of the next step at a place, also where the run is about to go back to it."""
        if position == 0 and self._is_rewind(epoch, position):
            return next((step for begun, step in self.starts if begun >= epoch), self.step)
        return self.step

    def _is_rewind(self, epoch: int, position: int) -> bool:
        """Return whether the run was at a later place already."""
        last, first_step = self.starts[-1] if self.starts else (-1, self.step)
        restarts = position == 0 and epoch == last and self.step > first_step
        return restarts or (epoch, position) < self.began_at or epoch < last

    def _changes_to(self, epoch: int, position: int) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if (change["epoch"], change["position"]) <= (epoch, position))


def _with_change(settings: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**settings, **{name: value for name, value in change.items() if name in _OVERWRITTEN}}
    if "options" in settings or change.get("options"):
        merged["options"] = {**settings.get("options", {}), **change.get("options", {})}
    if "exclude" in settings or change.get("exclude"):
        merged["exclude"] = [*settings.get("exclude", ()), *change.get("exclude", ())]
    if "reweight" in settings or "reweight" in change:
        new = [list(entry) for entry in change.get("reweight", ())]  # in place of those at their draws and after
        earlier = () if _has_grown(change) else settings.get("reweight", ())
        merged["reweight"] = [list(entry) for entry in earlier if not new or entry[0] < new[0][0]] + new
    return merged


def _has_grown(change: Mapping[str, Any]) -> bool:
    """Return whether the data of a mixture grow with a change."""
    return "mixture" in change and "n" in change


def _is_change(change: Mapping[str, Any]) -> bool:
    excluded, reweighted, plan_state = (change.get(name, []) for name in ("exclude", "reweight", "inside"))
    return (
        all(_is_count(change[name]) for name in ("world", "n", "skip") if name in change)
        and (change.get("accumulate") is None or _is_count(change["accumulate"]))
        and isinstance(plan_state, list | tuple)
        and all(isinstance(entry, list | tuple) and all(map(_is_count, entry)) for entry in plan_state)
        and change.get("world", 1) > 0
        and isinstance(change.get("options", {}), Mapping)
        and isinstance(change.get("mixture", {}), Mapping)
        and isinstance(excluded, list | tuple)
        and all(map(_is_count, excluded))
        and isinstance(reweighted, list | tuple)
        and all(isinstance(entry, list | tuple) and len(entry) == 2 and _is_count(entry[0]) for entry in reweighted)
    )


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _LARGEST
