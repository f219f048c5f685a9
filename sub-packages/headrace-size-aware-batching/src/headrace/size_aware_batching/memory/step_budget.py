"""The cost above which a batch is split at once: it shrinks where steps keep running out of memory, and recovers."""

import math
from typing import Any

from headrace.size_aware_batching._shared.checks import checked_int
from headrace.size_aware_batching._validation import real_number


class StepBudget:
    """Learns from the steps that ran out of memory lately.

    One such step may be chance, and batches that are planned to cost the same would all be split ever after. So the
    budget is just below the lowest cost that has failed in two steps of the last ``window``; older ones are forgotten.

    >>> budget = StepBudget(given=math.inf, shrink=0.9, window=10)
    >>> budget.add(3, 100.0)
    >>> budget.add(5, 80.0)
    >>> budget.at(4), budget.at(6), budget.at(14)
    (90.0, 90.0, inf)
    """

    def __init__(self, given: float, shrink: float, window: int) -> None:
        if not 0 < real_number(shrink, "shrink") < 1:
            raise ValueError(f"shrink must be between 0 and 1, got {shrink}")
        self.given, self.shrink = float(real_number(given, "budget")), shrink
        self.window = checked_int("window", window, 1)
        self._failures: list[tuple[int, float]] = []  # a step, and the lowest cost that failed in it

    def at(self, step: int, failing: float = math.inf) -> float:
        """Return the budget of a step in which a batch of the cost ``failing`` has run out of memory."""
        recent = sorted([*(cost for failed_at, cost in self._failures if step - failed_at <= self.window), failing])
        return min(self.given, self.shrink * recent[1]) if len(recent) > 1 else self.given

    def add(self, step: int, cost: float) -> None:
        """Take note of a step that ran out of memory, and of the lowest cost that did."""
        recent = [(failed_at, each) for failed_at, each in self._failures if step - failed_at <= self.window]
        self._failures = [*recent, (step, cost)]

    def state_dict(self, step: int) -> dict[str, Any]:
        """Return how many steps ago which costs failed."""
        return {"failures": [[step - failed_at, cost] for failed_at, cost in self._failures]}

    def load_state_dict(self, state: dict[str, Any], step: int) -> None:
        """Continue from a state."""
        self._failures = [(step - int(ago), float(cost)) for ago, cost in state["failures"]]
