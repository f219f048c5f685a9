"""Planner options, validated, and the fingerprint of sizes and options."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching._validation import checked_flag, one_of, shown, whole_number

Capacity = Callable[[NDArray[Any]], NDArray[np.int64]]  # largest sizes -> how many samples fit
CostFunction = Callable[[int, Any], float]  # of the count and the largest size, a vector where there are several
Strategy = Literal["sequential", "stratified", "bucketed", "packed"]
Oversize = Literal["raise", "skip", "own_batch"]
STRATEGIES: tuple[Strategy, ...] = ("sequential", "stratified", "bucketed", "packed")
LARGEST_MULTIPLE = 2**31
OVERSIZE: tuple[Oversize, ...] = ("raise", "skip", "own_batch")


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

    def __post_init__(self) -> None:
        for name in ("max_items", "batch_size_multiple", "length_multiple", "window"):
            end = LARGEST_MULTIPLE + 1 if name.endswith("multiple") else None
            object.__setattr__(self, name, whole_number(name, getattr(self, name), end=end))
        object.__setattr__(self, "shuffle", checked_flag("shuffle", self.shuffle))
        one_of("strategy", self.strategy, STRATEGIES)
        one_of("oversize", self.oversize, OVERSIZE)
        if not callable(self.cost):
            one_of("cost", self.cost, ("sum", "padded", "a function of (n, largest)"))
        self._refuse_mismatches()

    @property
    def sums(self) -> bool:
        """Whether the cost of a batch is the sum of its sizes."""
        return isinstance(self.cost, str) and self.cost == "sum"

    def _refuse_mismatches(self) -> None:
        if not self.sums and self.strategy in ("stratified", "packed"):
            raise ValueError(
                f"strategy={self.strategy!r} works with cost='sum' only, got "
                f"{'a function' if callable(self.cost) else repr(self.cost)}: use strategy='bucketed', or 'sequential' "
                "for an order of your own"
            )
        if self.sums and self.length_multiple > 1:
            raise ValueError(
                f"length_multiple must be 1 with cost='sum', got {self.length_multiple}: sums have no padding"
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
WHOLE, PART = 32, 4  # hex digits


def fingerprint(parts: Mapping[str, Any]) -> str:
    """Return 32 hex digits that stand for all parts together, and then 4 for each, so that a difference has a name.

    Equal parts give equal fingerprints, whatever integer or real type they come in.
    """
    digests = [hashlib.blake2b(repr(canonical(value)).encode(), digest_size=16).digest() for value in parts.values()]
    whole = hashlib.blake2b(b"".join(digests), digest_size=WHOLE // 2).hexdigest()
    return whole + "".join(digest.hex()[:PART] for digest in digests)


def differing(parts: Mapping[str, Any], own: str, other: str) -> list[str]:
    """Return the names of the parts in which two fingerprints differ, the own value beside them where it is short.

    >>> parts = {"budget": 5, "seed": 0}
    >>> differing(parts, fingerprint(parts), fingerprint({"budget": 6, "seed": 0}))
    ['budget (here 5)']
    """
    found = []
    for place, (name, value) in enumerate(parts.items()):
        digits = slice(WHOLE + PART * place, WHOLE + PART * (place + 1))
        if own[digits] != other[digits]:
            short = value is None or isinstance(value, str | Real)
            found.append(f"{name} (here {shown(value)})" if short and name != "sampler" else name)
    return found


def cost_part(cost: str | CostFunction, sizes: NDArray[Any], capacity: Capacity | None) -> Any:
    """Return what stands for a cost in a fingerprint: for a function, the counts that it allows at some sizes."""
    if not callable(cost) or capacity is None or not len(sizes):
        return "function" if callable(cost) else cost
    return capacity(np.linspace(sizes.min(axis=0), sizes.max(axis=0), PROBES).astype(sizes.dtype))


def array_digest(array: NDArray[Any]) -> bytes:
    """Return 16 bytes for the values of an array, the same for integers and for floats that are whole."""
    digest = hashlib.blake2b(repr(array.shape).encode(), digest_size=16)
    whole = array.dtype.kind != "f" or bool((array == np.floor(array)).all() and array.max(initial=0) < 2**63)
    kind = "<i8" if whole else "<f8"
    for start in range(0, len(array), PIECE):
        digest.update(np.ascontiguousarray(array[start : start + PIECE].astype(kind)).tobytes())
    return digest.digest()


def canonical(value: Any) -> Any:
    """Return a value in one form for all types that are equal: 50 for 50.0, True for ``np.True_``."""
    if isinstance(value, np.ndarray):
        return array_digest(value).hex()
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return int(float(value)) if float(value).is_integer() else float(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(canonical(element) for element in value)
    return value
