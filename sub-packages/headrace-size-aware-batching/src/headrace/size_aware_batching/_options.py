"""Planner options, validated, and the fingerprint of sizes and options."""

import hashlib
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching._budget import UNLIMITED, CostFunction, Limits
from headrace.size_aware_batching._sizes import real_number
from headrace.size_aware_batching._validation import one_of, whole_number

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


PIECE = 2**20
PROBES = 256


def fingerprint(sizes: NDArray[Any], budget: Any, options: Options, limits: Limits, order: int | None) -> int:
    """Return 63 bits that differ when sizes, budgets or options do.

    Equal sizes give equal numbers whatever integer or real type they come in. A cost function is known by the
    counts it allows at some sizes.
    """
    digest = hashlib.blake2b(digest_size=8)
    kind = "<f8" if sizes.dtype.kind == "f" else "<i8"
    if kind == "<f8" and len(sizes) and bool((sizes == np.floor(sizes)).all()):
        kind = "<i8"
    digest.update(repr(sizes.shape).encode())
    for start in range(0, len(sizes), PIECE):
        digest.update(np.ascontiguousarray(sizes[start : start + PIECE].astype(kind)).tobytes())
    budgets = budget if isinstance(budget, list) else [budget]
    parts = dict(sorted(options.__dict__.items()))
    if callable(options.cost):
        parts["cost"] = "function"
        if limits.capacity is not None and len(sizes):
            probes = np.linspace(float(sizes.min()), float(sizes.max()), PROBES).astype(sizes.dtype)
            digest.update(limits.capacity(probes).astype("<i8").tobytes())
    digest.update(repr(([float(b) for b in budgets], parts, order)).encode())
    return int.from_bytes(digest.digest(), "little") >> 1
