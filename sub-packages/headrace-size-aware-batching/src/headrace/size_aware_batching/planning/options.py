"""What a user asks of a plan, checked."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from headrace.size_aware_batching._sizes import real_number
from headrace.size_aware_batching._validation import one_of, whole_number
from headrace.size_aware_batching.cost import UNLIMITED, CostFunction

Strategy = Literal["sequential", "stratified", "bucketed", "packed"]
Oversize = Literal["raise", "skip", "own_batch"]
STRATEGIES: tuple[Strategy, ...] = ("sequential", "stratified", "bucketed", "packed")
OVERSIZE: tuple[Oversize, ...] = ("raise", "skip", "own_batch")


@dataclass(frozen=True)
class Options:
    """The arguments of `DistributedSizeAwareBatchSampler` that decide which batches there are.

    Args: as there.
    """

    strategy: Strategy = "stratified"
    cost: Literal["sum", "padded"] | CostFunction = "sum"
    shuffle: bool = True
    max_items: int | None = None
    batch_size_multiple: int = 1
    length_multiple: int = 1
    oversize: Oversize = "raise"
    max_length: float | None = None
    window: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_items", "batch_size_multiple", "length_multiple", "window"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name)))
        if not isinstance(self.shuffle, bool | np.bool_):
            raise TypeError(f"shuffle: got {self.shuffle!r}, expected True or False")
        one_of("strategy", self.strategy, STRATEGIES)
        one_of("oversize", self.oversize, OVERSIZE)
        if not callable(self.cost):
            one_of("cost", self.cost, ("sum", "padded", "a function of (n, largest)"))
        if self.max_length is not None:
            longest = real_number(self.max_length, "max_length")
            if longest <= 0:
                raise ValueError(f"max_length: got {longest}, expected more than 0")
            object.__setattr__(self, "max_length", None if longest >= UNLIMITED else longest)
        self._refuse_mismatches()

    @property
    def sums(self) -> bool:
        """Whether the cost of a batch is the sum of its sizes."""
        return isinstance(self.cost, str) and self.cost == "sum"

    def _refuse_mismatches(self) -> None:
        if not self.sums and self.strategy in ("stratified", "packed"):
            raise ValueError(
                f"strategy={self.strategy!r} puts different sizes into a batch, which is what cost={self.cost!r} "
                "pays for: use strategy='bucketed', or 'sequential' for an order of your own"
            )
        if self.batch_size_multiple > 1 and self.strategy in ("stratified", "packed"):
            raise ValueError(
                f"batch_size_multiple={self.batch_size_multiple} goes with strategy='bucketed' and 'sequential', "
                f"got {self.strategy!r}"
            )
        if self.max_items is not None and self.max_items < self.batch_size_multiple:
            raise ValueError(
                f"max_items={self.max_items} is less than batch_size_multiple={self.batch_size_multiple}: "
                "no batch could hold such a multiple"
            )
