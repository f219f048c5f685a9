"""Waits for the batches of workers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

_ASKED = 5.0  # seconds; a killed worker is noticed within that


class Wait:
    """A limit to how long a batch may take.

    Torch looks for dead workers when its own limit has passed, and a signal that says so earlier may come at the
    wrong moment. So it gets a short limit, and is asked again.

    Args:
        timeout: Seconds; 0 for no limit.

    >>> Wait(600.0).seconds, Wait(2.0).seconds, Wait(0.0).seconds
    (5.0, 2.0, 0.0)
    """

    def __init__(self, timeout: float) -> None:
        if type(timeout) not in (int, float) or not 0 <= timeout < math.inf:
            raise ValueError(f"timeout must be seconds, 0 for no limit, got {timeout!r}")
        self.timeout = timeout
        self.turns = max(1, math.ceil(timeout / _ASKED))
        self.seconds = timeout / self.turns

    def next_of(self, batches: Iterator[Any]) -> Any:
        """The next batch of a `DataLoader`; None when there is no more.

        Raises:
            RuntimeError: It does not come in time, or a worker has died.
        """
        for _ in range(self.turns):
            try:
                return next(batches, None)
            except RuntimeError as error:
                if not str(error).startswith("DataLoader timed out"):
                    raise
        raise RuntimeError(f"DataLoader timed out after {self.timeout:g} seconds")
