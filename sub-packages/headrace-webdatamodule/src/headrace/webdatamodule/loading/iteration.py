"""Where a loader stands in its epochs: its iterations, and where the next one begins."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Any

from headrace.webdatamodule._shared.cursor import EpochCursor
from headrace.webdatamodule.loading.batch_plans import BEGINNING, BatchAt, BatchPlan, Position
from headrace.webdatamodule.loading.batch_reading import Keys, Request, SkippedSample
from headrace.webdatamodule.loading.next_use import NextUses


class Iteration:
    """One iteration over an epoch of `length` batches, from a position on.

    Attributes:
        plan: Where its batches come from.
        batches: Those that were not requested yet.
        positions: Behind the batches that were delivered last; at least the last one.
        in_flight: Batches that were requested and are not delivered yet.
        delivered: The last batch, and its skipped samples.
        compared: What the ranks compare.
        reader: What reads its samples.
        changed: Whether its batches were changed, so that the ranks compare their plans once more.
        together: Batches that were read since its ranks met: since it began, or since other ranks took over.
        under_way: Whether its generator runs.
        finished: Whether it came to its end.
    """

    def __init__(
        self,
        plan: BatchPlan,
        epoch: int,
        start: Position,
        length: int,
        ranks: tuple[int, int],
        compared: dict[str, Any],
        kept: int = 2,
    ) -> None:
        self.plan, self.epoch, self.start, self.length, self.ranks = plan, epoch, start, length, ranks
        self.compared = compared
        self.batches: Iterator[BatchAt] = iter(())
        self.positions = deque([start], kept)
        self.in_flight: deque[BatchAt] = deque()
        self.delivered: tuple[BatchAt, list[SkippedSample]] = BatchAt([], None), []
        self.reader: Any = None
        self.changed = self.under_way = self.finished = False
        self.together = 0

    def meet(self) -> None:
        """Let other ranks take over: they compare their plans when those do that join them, which begin anew."""
        self.changed, self.together = False, 0
        self.compared.pop("changed", None)

    def deliver(self, skipped: list[SkippedSample]) -> BatchAt:
        """Move behind the next batch in flight, and return it."""
        batch = self.in_flight.popleft()
        self.delivered = batch, skipped
        self.positions.append(Position(self.position.steps + 1, batch.place))
        return batch

    @property
    def position(self) -> Position:
        """Behind the last batch that was delivered."""
        return self.positions[-1]

    def requests(self, keys: Keys, next_uses: NextUses | None = None) -> Iterator[Request]:
        """Yield requests for the batches that were not delivered yet; those in flight are requested once more."""
        step, stop = self.position.steps, self.length
        again, self.in_flight = [*self.in_flight], deque()
        for batch in chain(again, self.batches):
            if step >= stop or (step == stop - 1 and next(self.batches, None) is not None):
                raise self._miscounted("gives more")
            self.in_flight.append(batch)
            upcoming = None if next_uses is None else next_uses.of(self.epoch, step, batch.samples)
            yield Request(batch.samples, keys, step, batch.draws, None, upcoming)
            step += 1
        if step < stop:
            raise self._miscounted(f"gave {step}")

    def _miscounted(self, what: str) -> RuntimeError:
        message = f"{self.plan.kind} has a length of {self.length}, but {what} batches"
        return RuntimeError(f"{message}: trainers plan by it, make its __len__ count the batches of the present epoch")


class Progress(EpochCursor):
    """Where a loader stands: its epoch, the position there, and where the next iteration begins.

    It is the cursor of a `ResumableLoader`; its positions count batches. The latest iteration alone moves the position.
    `set_epoch`, a state or a rewind puts the loader at a place, and then there is no latest iteration until another
    one begins.

    Attributes:
        place: Where it was put last; the next iteration begins there.
        resumed: Whether a state put it there.
    """

    iteration: Iteration | None

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
    def under_way(self) -> Iteration | None:
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

    def adopt(self, iteration: Iteration) -> None:
        """Make an iteration the latest one that has delivered batches already."""
        self.begin(iteration)
        self.move(iteration, iteration.position.steps)

    def behind(self, done: int | None = None) -> Position:
        """The position after the last batch; if no more than `done` batches count, after the last of these."""
        positions = [self.place] if self.iteration is None else self.iteration.positions
        if done is None or done >= positions[-1].steps:
            return positions[-1]
        return next((position for position in reversed(positions) if position.steps <= done), positions[0])

    def again(self) -> Position:
        """Where the latest iteration's epoch begins once more: a look at one batch leaves a loaded position."""
        latest = self.iteration
        if latest is None or latest.finished or latest.position.steps > latest.start.steps + 1:
            return BEGINNING
        return latest.start

    def flags(self) -> tuple[bool, bool, bool, bool]:
        """What a copy has to know beside the state."""
        return self.begun, self.finished, self.chosen, self.resumed

    def follow(self, flags: tuple[bool, bool, bool, bool], plan: Any, ranks: tuple[int, int]) -> None:
        """Stand where the original of a copy stands, whose state was loaded here."""
        begun, finished, chosen, resumed = flags
        if finished:
            done = Iteration(plan, self.epoch, self.place, self.place.steps, ranks, {})
            done.finished = True
            self.adopt(done)
        if finished or not begun:
            self._chosen, self.resumed = chosen, resumed
