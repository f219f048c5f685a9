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
    """

    def __init__(self, batches: Iterable[Sequence[int]]) -> None:
        self.batches = batches
        self.on_the_way: deque[Taken] = deque()
        self.skip = 0
        self._state = getattr(batches, "state_dict", None)

    def __iter__(self) -> Iterator[Any]:
        # Whatever was on its way belongs to an iteration that was given up.
        self.on_the_way = on_the_way = deque[Taken]()
        skip, self.skip = self.skip, 0
        for number, batch in enumerate(self.batches):
            if number >= skip:
                on_the_way.append(Taken(batch, self._state() if self._state else None))
                yield batch
