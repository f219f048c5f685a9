"""Planner options, validated."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from headrace.size_aware_batching._validation import checked_flag, checked_int, one_of, shown, warn, whole_number
from headrace.size_aware_batching.planning.costs import Cost, CostFunction, as_cost
from headrace.size_aware_batching.planning.run_record import RunRecord
from headrace.size_aware_batching.planning.shapes import checked_shapes

Strategy = Literal["sequential", "stratified", "bucketed", "packed"]
Oversize = Literal["raise", "skip", "own_batch", "split"]
StreamOversize = Literal["raise", "skip", "own_batch"]  # of elements that have no index
STRATEGIES: tuple[Strategy, ...] = ("sequential", "stratified", "bucketed", "packed")
LARGEST_MULTIPLE = 2**31
# Options that states of older builds lack, and what these builds did. 16, 64, 256 balanced ranks: of 1,000,000
# lognormal sizes the largest of 64 ranks has 1.022, 1.0006, 1.0007 times the mean work, padded 1.215, 1.006, 1.006.
ADDED = {"balanced_ranks": 64}
OVERSIZE: tuple[Oversize, ...] = ("raise", "skip", "own_batch", "split")
STREAM_OVERSIZE: tuple[StreamOversize, ...] = ("raise", "skip", "own_batch")


def complete_record(record: RunRecord) -> RunRecord:
    """Add the options that a record of an older build lacks, in place."""
    if record.changes and "options" in record.changes[0]:
        options = record.changes[0]["options"]
        record.changes[0]["options"] = {**options, **{name: options.get(name, value) for name, value in ADDED.items()}}
    return record


def default_cost(strategy: Strategy) -> Literal["sum"]:
    """Return the cost where none was given; warn where batches are most likely padded."""
    if strategy == "bucketed":
        warn(
            "strategy='bucketed' without cost fills batches by the sum of their sizes, so that padded ones exceed the "
            "budget: give cost='padded', or cost='sum' if batches are not padded"
        )
    return "sum"


@dataclass(frozen=True)
class Options:
    """The arguments of `DistributedSizeAwareBatchSampler` that decide which batches there are."""

    strategy: Strategy = "stratified"
    cost: Literal["sum", "padded"] | CostFunction = "sum"
    shuffle: bool = True
    max_items: int | None = None
    batch_size_multiple: int = 1
    length_multiple: int = 1
    oversize: Oversize = "raise"
    window: int | None = None
    shapes: int | Sequence[tuple[int, int]] | None = None
    curriculum: int | None = None
    balanced_ranks: int = 64

    def __post_init__(self) -> None:
        for name in ("max_items", "batch_size_multiple", "length_multiple", "window", "curriculum"):
            end = LARGEST_MULTIPLE + 1 if name.endswith("multiple") else None
            object.__setattr__(self, name, whole_number(name, getattr(self, name), end=end))
        ranks = checked_int("balanced_ranks", self.balanced_ranks, 1, LARGEST_MULTIPLE + 1)
        object.__setattr__(self, "balanced_ranks", ranks)
        if isinstance(self.shapes, Sequence) and not isinstance(self.shapes, str):
            object.__setattr__(self, "shapes", checked_shapes(self.shapes, self.length_multiple))
        else:
            object.__setattr__(self, "shapes", whole_number("shapes", self.shapes))
        object.__setattr__(self, "shuffle", checked_flag("shuffle", self.shuffle))
        one_of("strategy", self.strategy, STRATEGIES)
        one_of("oversize", self.oversize, OVERSIZE)
        self._refuse_mismatches()
        if self.shapes is not None:
            self._refuse_shapes()
        if self.curriculum is not None:
            self._refuse_curriculum()

    @property
    def parts(self) -> dict[str, Any]:
        """The arguments by name, for a fingerprint, with a mark where earlier builds planned other batches."""
        parts = dict(vars(self))
        padded = self.strategy == "bucketed" and self.batch_cost.pads and self.shapes is None
        if padded and self.max_items is not None:  # they padded batches of `max_items` samples up to the budget
            parts["max_items"] = (self.max_items, "grouped by cost")
        return parts

    @property
    def batch_cost(self) -> Cost:
        """The cost of a batch."""
        return as_cost(self.cost, self.length_multiple)

    def _refuse_mismatches(self) -> None:
        cost = self.batch_cost
        if self.strategy not in cost.strategies:
            raise ValueError(
                f"strategy={self.strategy!r} works with cost='sum' only, got "
                f"{'a function' if callable(self.cost) else repr(self.cost)}: use strategy='bucketed', or 'sequential' "
                "for an order of your own"
            )
        if not cost.pads and self.length_multiple > 1:
            raise ValueError(
                f"length_multiple must be 1 with cost={cost.name!r}, got {self.length_multiple}: it has no padding"
            )
        if self.batch_size_multiple > 1 and self.strategy in ("stratified", "packed"):
            raise ValueError(
                f"batch_size_multiple={self.batch_size_multiple} goes with strategy='bucketed' and 'sequential', "
                f"got {self.strategy!r}"
            )
        if self.balanced_ranks != ADDED["balanced_ranks"] and self.strategy == "sequential":
            raise ValueError(
                f"balanced_ranks={self.balanced_ranks} goes with strategy='stratified', 'packed' and 'bucketed', got "
                "'sequential', which keeps the order of the samples: leave it out"
            )
        if self.max_items is not None and self.max_items < self.batch_size_multiple:
            raise ValueError(
                f"max_items={self.max_items} is less than batch_size_multiple={self.batch_size_multiple}: "
                "no batch could hold such a multiple"
            )

    def _refuse_shapes(self) -> None:
        given = f"shapes={shown(self.shapes)} goes with"
        if not self.batch_cost.pads:
            raise ValueError(
                f"{given} cost='padded' or a function, got {self.cost!r}: batches that are not padded have no shape of "
                "count and length"
            )
        if self.strategy != "bucketed":
            raise ValueError(
                f"{given} strategy='bucketed', got {self.strategy!r}: in another order any batch may need the longest "
                "shape"
            )
        if self.oversize == "own_batch":
            raise ValueError(
                f"{given} oversize='raise', 'skip' and 'split', got 'own_batch': each of those batches has a shape of "
                "its own"
            )

    def _refuse_curriculum(self) -> None:
        if self.strategy == "sequential":
            raise ValueError(
                f"curriculum={self.curriculum} goes with strategy='stratified', 'packed' and 'bucketed', got "
                "'sequential', which keeps the order of the samples"
            )
        if not self.shuffle:
            raise ValueError(
                f"curriculum={self.curriculum} goes with shuffle=True, got False: without it every epoch is the same"
            )
