"""Checks for tests of samplers, loaders and datasets that resume: those of headrace, or your own.

The packages of headrace do not import one another, so each has this file; the copies are equal.
"""

import copy
import itertools
import json
from collections.abc import Callable
from typing import Any

_MOST_CUTS = 50  # places of an epoch where it is cut; an epoch that has more is cut at places spread over it


def check_resumes(
    make: Callable[[], Any],
    *,
    epochs: int = 3,
    most_cuts: int = _MOST_CUTS,
    load: Callable[[Any, Any], None] | None = None,
) -> None:
    """Check that a sampler, loader or dataset resumes exactly.

    The object needs ``__iter__``, ``set_epoch``, ``state_dict`` and ``load_state_dict``; ``len()`` and ``remaining``
    are checked if it has them. Each epoch is interrupted at every position: a new object loads the state from there,
    and must deliver exactly the rest. Then the rules for epochs are checked. If ``set_epoch`` chose an epoch that was
    not iterated yet, a state of an older epoch is ignored. Only iterating, ``set_epoch`` of another epoch and
    ``load_state_dict`` move the position.

    Args:
        make: Returns a new object at the beginning of its first epoch; all of these objects are equal.
        epochs: Number of epochs to check, at least 3; each must deliver at least 2 items.
        most_cuts: Maximum number of positions at which an epoch is interrupted, evenly spread.
        load: Loads a state into a new object; by default ``new.load_state_dict(state)``.

    Raises:
        AssertionError: If a resumed object differs; the message names the epoch, the position and the items.

    >>> class Forgetful:
    ...     epoch = 0
    ...     def __iter__(self): return iter(range(10))
    ...     def set_epoch(self, epoch): self.epoch = epoch
    ...     def state_dict(self): return {"epoch": self.epoch}
    ...     def load_state_dict(self, state): self.epoch = state["epoch"]
    >>> check_resumes(Forgetful)
    Traceback (most recent call last):
    AssertionError: epoch 0, cut at 0 of 10, cut again 1 later: item 0 must be 1, got 0
    """
    _Resumes(make, epochs, most_cuts, load or (lambda new, state: new.load_state_dict(state))).check()


class _Resumes:
    def __init__(self, make: Callable[[], Any], epochs: int, most_cuts: int, load: Callable[[Any, Any], None]) -> None:
        self.make, self.most_cuts, self.load = make, most_cuts, load
        self.wholes = [self.delivered(self.at(epoch)) for epoch in range(epochs)]

    def check(self) -> None:
        for epoch, whole in enumerate(self.wholes):
            self.expect(f"epoch {epoch}", len(whole) >= 2, f"must deliver at least 2 items, got {len(whole)}")
            self.compare(f"epoch {epoch}, two new objects", self.at(epoch), whole)
            for place in self.cuts(len(whole)):
                self.check_cut(epoch, place)
        self.check_rule()

    def at(self, epoch: int) -> Any:
        """A new object, in that epoch."""
        new = self.make()
        new.set_epoch(epoch)
        return new

    def state(self, epoch: int, place: int) -> Any:
        """What is saved at a place of an epoch."""
        cut = self.at(epoch)
        items = iter(cut)
        for _ in range(place):
            next(items)
        return copy.deepcopy(cut.state_dict())

    def cuts(self, length: int) -> list[int]:
        if length < self.most_cuts:
            return list(range(length + 1))
        return sorted({round(length * number / self.most_cuts) for number in range(self.most_cuts + 1)})

    def check_cut(self, epoch: int, place: int) -> None:
        whole, where = self.wholes[epoch], f"epoch {epoch}, cut at {place} of {len(self.wholes[epoch])}"
        running = self.at(epoch)
        items = iter(running)
        begun = [_plain(next(items)) for _ in range(place)]
        state = running.state_dict()
        saved = json.dumps(state, default=repr)
        self.compare(f"{where}, the one that was saved", itertools.chain(begun, items), whole)
        self.expect(where, json.dumps(state, default=repr) == saved, "its state must not change when it iterates on")

        resumed = self.make()
        self.load(resumed, state)
        self.look(f"{where}, before it is resumed", resumed, len(whole), len(whole) - place, saved)
        self.compare(f"{where}, resumed", resumed, whole[place:])
        if epoch + 1 < len(self.wholes):
            resumed.set_epoch(epoch + 1)
            self.compare(f"{where}, resumed, the epoch after it", resumed, self.wholes[epoch + 1])

        running, resumed = self.make(), self.make()
        self.load(running, state)
        items = iter(running)
        ahead = min(1, len(whole) - place)
        for _ in range(ahead):
            next(items)
        self.load(resumed, running.state_dict())
        self.compare(f"{where}, cut again {ahead} later", resumed, whole[place + ahead :])

    def look(self, where: str, resumed: Any, length: int, left: int, saved: str) -> None:
        """What only looks moves nothing, and says what is so."""
        for _ in range(2):
            repr(resumed)
            if hasattr(type(resumed), "__len__"):
                self.expect(where, len(resumed) == length, f"len() must be {length}, got {len(resumed)}")
            remaining = getattr(resumed, "remaining", left)
            self.expect(where, remaining == left, f"remaining must be {left}, got {remaining}")
            state = json.dumps(resumed.state_dict(), default=repr)
            self.expect(where, state == saved, f"state_dict() must be what was loaded, {saved}, got {state}")

    def check_rule(self) -> None:
        """Sequences of set_epoch and load_state_dict: the later set_epoch wins, else the later state."""
        last = len(self.wholes) - 1
        old, late = (0, len(self.wholes[0]) // 2), (last, len(self.wholes[last]) // 2)
        states = {place: self.state(*place) for place in (old, late)}
        between = (last - 1, 0)
        sequences: list[tuple[tuple[Any, ...], tuple[int, int]]] = [
            ((late, old), old),
            ((old, late), late),
            ((old, last), (last, 0)),
            ((late, last), late),
            ((late, last, old), late),
            ((late, last, old, old), late),
            ((last, old), (last, 0)),
            ((last, late), late),
            ((last - 1, old), between),
            ((old, last - 1, old), between),
            ((last - 1, late), late),
            ((late, last - 1, old), between),
            ((late, 0), (0, 0)),
        ]
        for sequence, (epoch, place) in sequences:
            new, said = self.make(), []
            for each in sequence:
                if isinstance(each, tuple):
                    self.load(new, states[each])
                    said.append(f"load the state at {each[1]} of epoch {each[0]}")
                else:
                    new.set_epoch(each)
                    said.append(f"set_epoch({each})")
            self.compare(", ".join(said), new, self.wholes[epoch][place:])

    def compare(self, where: str, items: Any, wanted: list[Any]) -> None:
        found = self.delivered(items)
        for number, (item, own) in enumerate(itertools.zip_longest(found, wanted, fillvalue="the end")):
            self.expect(where, item == own, f"item {number} must be {_short(own)}, got {_short(item)}")

    @staticmethod
    def delivered(items: Any) -> list[Any]:
        return [_plain(item) for item in items]

    @staticmethod
    def expect(where: str, holds: bool, message: str) -> None:
        if not holds:
            raise AssertionError(f"{where}: {message}")


def _plain(item: Any) -> Any:
    """An item that ``==`` compares as a whole: tensors and arrays as lists, wherever they are."""
    if hasattr(item, "tolist"):
        return item.tolist()
    if isinstance(item, dict):
        return {key: _plain(value) for key, value in item.items()}
    return [_plain(each) for each in item] if isinstance(item, list | tuple) else item


def _short(item: Any) -> str:
    text = repr(item)
    return text if len(text) <= 80 else text[:77] + "..."
