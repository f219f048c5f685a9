"""One weight a sample: samples of equal weight become a source."""

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.weighted_sampler.keyed import Indices

MOST = 4096  # sources made of weights; more distinct weights than that are rounded
MANTISSA = 52  # bits of a float64's fraction


@dataclass(frozen=True)
class Groups:
    """Samples by weight.

    Attributes:
        members: Dataset indices of weight above 0, by rising weight and index, shape ``[n]``.
        ends: For each group, where in ``members`` it ends.
        weights: Each group's weight, rising.
        rounding: The largest relative change of a weight; 0.0 when each weight has a group of its own.
        digest: Names the weights.
    """

    members: Indices
    ends: tuple[int, ...]
    weights: NDArray[Any]
    rounding: float
    digest: str


def group_by_weight(weights: NDArray[Any]) -> Groups:
    """Put samples of equal weight together.

    Where there are more than 4,096 distinct weights, each is rounded to as many binary digits as leave no
    more groups than that: to within 0.4 % when the largest is a million times the smallest.

    Args:
        weights: One number a sample, finite, not negative, not all zero, shape ``[n]``.

    >>> groups = group_by_weight(np.array([0.5, 2.0, 0.0, 0.5]))
    >>> groups.members.tolist(), groups.ends, groups.weights.tolist()
    ([0, 3, 1], (2, 3), [0.5, 2.0])
    """
    drawn = np.flatnonzero(weights)
    values = weights[drawn]
    rounded = _few(values)
    order = np.argsort(rounded, kind="stable")
    ends = [*(np.flatnonzero(np.diff(rounded[order])) + 1).tolist(), len(order)]
    return Groups(
        members=drawn[order],
        ends=tuple(ends),
        weights=rounded[order][np.array(ends) - 1],
        rounding=0.0 if rounded is values else float(np.max(np.abs(rounded / values - 1))),
        digest=hashlib.sha256(np.ascontiguousarray(weights).tobytes()).hexdigest()[:16],
    )


def _few(values: NDArray[Any]) -> NDArray[Any]:
    """Round to the most binary digits that leave few enough values, by integer arithmetic on their bits."""
    rounded, digits = values, 14
    while len(np.unique(rounded)) > MOST:
        digits -= 1
        drop = np.int64(MANTISSA - digits)
        plain = values.astype(np.float64)
        bits = plain.view(np.int64) + (np.int64(1) << (drop - 1))
        rounded = (bits >> drop << drop).view(np.float64)
        # At the very ends of what a float64 holds, rounding would give infinity or 0.
        rounded = np.where(
            np.isfinite(rounded) & (rounded > 0), rounded, (plain.view(np.int64) >> drop << drop).view(np.float64)
        )
        rounded = np.where(rounded > 0, rounded, np.float64(5e-324))
    return rounded
