"""A batch sampler that remembers which batches are on their way."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch.utils.data import Sampler


class Taken(NamedTuple):
    """A batch that was taken from a batch sampler.

    Args:
        indices: Its samples.
        state: The sampler's state behind it; None when it has none.
    """

    indices: Sequence[int]
    state: dict[str, Any] | None


class Recorded(Sampler[list[int]]):
    """Gives the batches of a batch sampler to a `DataLoader`, which fetches ahead, and remembers them in order.

    Args:
        batches: The batch sampler.

    Attributes:
        on_the_way: What was taken and not yet delivered.
        skip: Batches at the beginning of the next iteration that are not given.
        most: Batches that the next iteration has to have, the skipped ones included; any number when None.
    """

    def __init__(self, batches: Iterable[Sequence[int]]) -> None:
        self.batches = batches
        self.on_the_way: deque[Taken] = deque()
        self.skip = 0
        self.most: int | None = None
        self._state = getattr(batches, "state_dict", None)

    def __iter__(self) -> Iterator[Any]:
        # Whatever was on its way belongs to an iteration that was given up.
        self.on_the_way = on_the_way = deque[Taken]()
        skip, self.skip, most = self.skip, 0, self.most
        given, number = iter(self.batches), 0
        for number, batch in enumerate(given, 1):
            taken = Taken(batch, self._state() if self._state else None)
            if number == most and next(given, None) is not None:
                raise self._miscounted("gives more")
            if number > skip:
                on_the_way.append(taken)
                yield batch
        if most is not None and number < most:
            raise self._miscounted(f"gave {number}")

    def _miscounted(self, what: str) -> RuntimeError:
        said = f"{type(self.batches).__name__} has a length of {self.most}, but {what} batches"
        return RuntimeError(f"{said}: trainers plan by it, make its __len__ count the batches of the present epoch")
