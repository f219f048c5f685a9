"""One number for a dataset's sizes and the options that decide its batches."""

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching.cost import Limits
from headrace.size_aware_batching.planning.options import Options

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
