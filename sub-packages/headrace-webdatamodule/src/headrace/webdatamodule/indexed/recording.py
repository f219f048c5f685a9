"""A batch sampler that remembers which batches are on their way."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch.utils.data import Sampler

from headrace.webdatamodule.indexed.seeding import Asked


class Taken(NamedTuple):
    """A batch that was taken from a batch sampler.

    Args:
        indices: Its samples.
        state: The sampler's state behind it; None when it has none.
    """

    indices: Sequence[int]
    state: dict[str, Any] | None


class Beginning(NamedTuple):
    """How an iteration begins.

    Args:
        skip: Batches of the batch sampler that are not given.
        most: Batches that it has to have, those included; any number when None.
        key: Of the epoch's random numbers.
        first: Number of the step that its first batch is.
    """

    skip: int = 0
    most: int | None = None
    key: int = 0
    first: int = 0


class Recorded(Sampler[Asked]):
    """Gives the batches of a batch sampler to a `DataLoader`, which fetches ahead, and remembers them in order.

    Args:
        batches: The batch sampler.

    Attributes:
        on_the_way: What was taken and not yet delivered.
        beginning: Of the next iteration.
    """

    def __init__(self, batches: Iterable[Sequence[int]]) -> None:
        self.batches = batches
        self.on_the_way: deque[Taken] = deque()
        self.beginning = Beginning()
        self._state = getattr(batches, "state_dict", None)

    def __iter__(self) -> Iterator[Asked]:
        # Whatever was on its way belongs to an iteration that was given up.
        self.on_the_way = on_the_way = deque[Taken]()
        (skip, most, key, first), self.beginning = self.beginning, Beginning()
        given, number = iter(self.batches), 0
        for number, batch in enumerate(given, 1):
            taken = Taken(batch, self._state() if self._state else None)
            if most is not None and (number > most or (number == most and next(given, None) is not None)):
                raise self._miscounted(most, "gives more")
            if number > skip:
                on_the_way.append(taken)
                yield batch, key, first + number - 1
        if most is not None and number < most:
            raise self._miscounted(most, f"gave {number}")

    def _miscounted(self, most: int, what: str) -> RuntimeError:
        said = f"{type(self.batches).__name__} has a length of {most}, but {what} batches"
        return RuntimeError(f"{said}: trainers plan by it, make its __len__ count the batches of the present epoch")
