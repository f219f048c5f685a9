"""Least squares for peaks of memory, over a floor, and conformal margins."""

import math
from collections.abc import Sequence
from itertools import combinations

import numpy as np

from headrace.size_aware_batching.memory.terms import Floats


def fit_floor(x: Floats, y: Floats) -> tuple[float, float, Floats]:
    """Fit ``max(floor, a + x @ b)`` with ``b >= 0`` by relative least squares.

    It tries every split of the points, in the order of ``y``, into points on the floor and points above it. ``x`` has
    shape ``[m, t]``, ``y`` ``[m]``. Returns the floor (0 if there is none), a, and b of shape ``[t]``.

    >>> x = np.array([[1.0], [2.0], [3.0], [4.0]])
    >>> floor, a, b = fit_floor(x, np.maximum(9.0, 1 + 4 * x[:, 0]))
    >>> round(floor, 6), round(a, 6), b.round(6).tolist()
    (9.0, 1.0, [4.0])
    """
    order = np.argsort(y, kind="stable")
    x, y = x[order], y[order]
    best, found = math.inf, (0.0, 0.0, np.zeros(x.shape[1]))
    for low in range(max(1, len(y) - x.shape[1])):
        floor = float((1 / y[:low]).sum() / (1 / y[:low] ** 2).sum()) if low else 0.0
        intercept, slopes = nonnegative_slopes(x[low:], y[low:])
        error = float(((np.maximum(floor, intercept + x @ slopes) / y - 1) ** 2).sum())
        if error < best - 1e-9 * len(y):  # bytes are rounded: a floor has to earn its place
            best, found = error, (floor, intercept, slopes)
    return found


def nonnegative_slopes(x: Floats, y: Floats) -> tuple[float, Floats]:
    """Fit ``a + x @ b`` with ``b >= 0`` by relative least squares, exactly: over every subset of the columns."""
    scale = np.maximum(x.max(axis=0), np.finfo(float).tiny)
    rows = np.concatenate([np.ones((len(x), 1)), x / scale], axis=1) / y[:, None]
    best, intercept, slopes = math.inf, 0.0, np.zeros(x.shape[1])
    for size in range(x.shape[1] + 1):
        for chosen in combinations(range(x.shape[1]), size):
            columns = [0, *(column + 1 for column in chosen)]
            found = np.linalg.lstsq(rows[:, columns], np.ones(len(y)), rcond=None)[0]
            error = float(((rows[:, columns] @ found - 1) ** 2).sum())
            if (found[1:] >= 0).all() and error < best:
                best, intercept, slopes = error, float(found[0]), np.zeros(x.shape[1])
                slopes[list(chosen)] = found[1:]
    return intercept, slopes / scale


def conformal_margin(scores: Floats | Sequence[float], coverage: float) -> float:
    """Return the margin of split-conformal prediction (Vovk et al., 2005; Lei et al., 2018).

    A new score from the same distribution is at most this with a probability of at least ``coverage``.

    >>> conformal_margin(range(19), 0.95), conformal_margin(range(39), 0.95)
    (18.0, 37.0)
    """
    if len(scores) < (needed := math.ceil(coverage / (1 - coverage) - 1e-9)):  # 19 for 0.95, 99 for 0.99
        raise ValueError(
            f"coverage={coverage:g} needs at least {needed} calibration points, got {len(scores)}: measure more "
            "batches or ask for less coverage"
        )
    rank = math.ceil((len(scores) + 1) * coverage - 1e-9)
    return float(np.sort(np.asarray(scores, np.float64))[rank - 1])
