"""Where a loader is in its epochs: its iterations, and where the next one begins."""

from __future__ import annotations

from collections import deque
from typing import Any, Generic, NamedTuple, TypeVar

from headrace.webdatamodule._shared.cursor import EpochCursor


class Position(NamedTuple):
    """A position in an epoch.

    Attributes:
        steps: Batches before it.
        place: What the source of the batches needs to continue there; None for the beginning of the epoch.
    """

    steps: int
    place: Any = None


BEGINNING = Position(0)


class Iteration:
    """One iteration over an epoch, from the position `start` on.

    Attributes:
        positions: Behind the batches that were delivered last; at least the last one.
        under_way: Whether its generator runs.
        finished: Whether all its batches were delivered.
    """

    def __init__(self, epoch: int, start: Position, last_positions: int = 2) -> None:
        self.epoch, self.start = epoch, start
        self.positions = deque([start], last_positions)
        self.under_way = self.finished = False

    @property
    def position(self) -> Position:
        """Behind the last batch that was delivered."""
        return self.positions[-1]


_I = TypeVar("_I", bound=Iteration)


class Progress(EpochCursor, Generic[_I]):
    """Where a loader is: its epoch, the position there, and where the next iteration begins.

    Positions count batches. The latest iteration alone moves the position.
    `set_epoch`, a state or a rewind puts the loader at a place, and then there is no latest iteration until another
    one begins.

    Attributes:
        place: Where it was put last; the next iteration begins there.
        resumed: Whether a state put it there.
    """

    iteration: _I | None

    def __init__(self) -> None:
        super().__init__()
        self.place, self.resumed = BEGINNING, False

    @property
    def begun(self) -> bool:
        """Whether an iteration has begun since it was put at a place."""
        return self.iteration is not None

    @property
    def finished(self) -> bool:
        """Whether the latest iteration came to its end."""
        return self.iteration is not None and self.iteration.finished

    @property
    def under_way(self) -> _I | None:
        """The latest iteration, while it runs."""
        return self.iteration if self.iteration is not None and self.iteration.under_way else None

    @property
    def chosen(self) -> bool:
        """Whether `set_epoch` chose the epoch, and nothing was iterated since."""
        return self._chosen

    def go_to(self, epoch: int, position: int) -> None:
        """As the cursor does; a position within the epoch has no place until `put`."""
        super().go_to(epoch, position)
        self.place, self.resumed = Position(position), False

    def put(self, epoch: int, place: Position, *, resumed: bool = False) -> None:
        """Let the next iteration begin at a place."""
        self.go_to(epoch, place.steps)
        self.place, self.resumed = place, resumed

    def load(self, epoch: int, place: Position) -> None:
        """Take the place of a state."""
        self._chosen = False
        self.put(epoch, place, resumed=True)

    def begin(self, iteration: object = None) -> object:
        """Make an iteration the latest one."""
        self.resumed = False
        return super().begin(iteration)

    def adopt(self, iteration: _I) -> None:
        """Make an iteration the latest one that has delivered batches already."""
        self.begin(iteration)
        self.move(iteration, iteration.position.steps)

    def last_counted(self, done: int | None = None) -> Position:
        """The position after the last batch, or after the first `done` batches, if these alone count."""
        positions = [self.place] if self.iteration is None else self.iteration.positions
        if done is None or done >= positions[-1].steps:
            return positions[-1]
        return next((position for position in reversed(positions) if position.steps <= done), positions[0])

    def restart(self) -> Position:
        """Start of a restarted epoch; one peeked batch keeps a loaded position."""
        latest = self.iteration
        if latest is None or latest.finished or latest.position.steps > latest.start.steps + 1:
            return BEGINNING
        return latest.start

    def flags(self) -> tuple[bool, bool, bool, bool]:
        """What a copy has to know beside the state."""
        return self.begun, self.finished, self.chosen, self.resumed

    def restore_flags(self, flags: tuple[bool, bool, bool, bool], done: _I) -> None:
        """Go on as the original of a copy, whose state was loaded; `done` is its latest iteration if that is over."""
        begun, finished, chosen, resumed = flags
        if finished:
            done.finished = True
            self.adopt(done)
        if finished or not begun:
            self._chosen, self.resumed = chosen, resumed
