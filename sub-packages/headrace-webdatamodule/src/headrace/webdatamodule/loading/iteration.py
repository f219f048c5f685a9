"""An iteration over planned batches: what was requested, and what was delivered."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Any

from headrace.webdatamodule.loading.batch_plans import BatchAt, BatchPlan
from headrace.webdatamodule.loading.batch_reading import Keys, Request, SkippedSample
from headrace.webdatamodule.loading.next_use import NextUses
from headrace.webdatamodule.loading.position import Iteration, Position


class PlannedIteration(Iteration):
    """One iteration over an epoch of `length` batches, from a position on.

    Attributes:
        plan: Where its batches come from.
        batches: Those that were not requested yet.
        in_flight: Batches that were requested and are not delivered yet.
        delivered: The last batch, and its skipped samples.
        compared: What the ranks compare.
        reader: What reads its samples.
        changed: Whether its batches were changed, so that the ranks compare their plans once more.
        batches_since_check: Batches that were read since it began, or since other ranks took over.
    """

    def __init__(
        self,
        plan: BatchPlan,
        epoch: int,
        start: Position,
        length: int,
        ranks: tuple[int, int],
        compared: dict[str, Any],
        last_positions: int = 2,
    ) -> None:
        super().__init__(epoch, start, last_positions)
        self.plan, self.length, self.ranks, self.compared = plan, length, ranks, compared
        self.batches: Iterator[BatchAt] = iter(())
        self.in_flight: deque[BatchAt] = deque()
        self.delivered: tuple[BatchAt, list[SkippedSample]] = BatchAt([], None), []
        self.reader: Any = None
        self.changed = False
        self.batches_since_check = 0

    def reset_check(self) -> None:
        """Reset the rank check after reshard."""
        self.changed, self.batches_since_check = False, 0
        self.compared.pop("changed", None)

    def deliver(self, skipped: list[SkippedSample]) -> BatchAt:
        """Move behind the next batch in flight, and return it."""
        batch = self.in_flight.popleft()
        self.delivered = batch, skipped
        self.positions.append(Position(self.position.steps + 1, batch.place))
        return batch

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
