"""Batches of nearly equal sum, count and make-up: shuffle among like sizes, then deal to the lightest batches."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching.planning.keyed import Words, shuffle_blocks

GRID = 2**19  # a budget, in the units that dealing counts in: sums and batch numbers share 31 bits
MAX_BATCHES = 1024
ROUNDS = 2048  # of dealing sample by sample; about a hundred are usual


def deal(
    units: NDArray[Any], n_batches: int, capacity: int, keys: Words, block: int
) -> tuple[NDArray[np.uint16], NDArray[np.bool_]]:
    """Deal the samples of several windows to batches, largest first, always to the lightest.

    A round gives as many samples as a quarter of the batches, one to each of the lightest. All windows advance in
    lock-step: a round is one sort of the running sums, whose low bits hold the batch's number.

    Args:
        units: Sizes, shape ``[c, n]``, every row falling; at most ``capacity``.
        n_batches: Batches of each window, at most 1,024.
        capacity: Budget of a batch, at most 2**19; at most 2**40 with units of 64 bits.
        keys: One key a window, shape ``[c]``.
        block: Samples among which the order is shuffled before dealing, a power of two; 1 for none.

    Returns:
        The batch of each sample, shape ``[c, n]``, and whether all batches of a window are inside the budget,
        shape ``[c]``.
    """
    n_windows, length = units.shape
    places = shuffle_blocks(keys, length, block)
    shuffled = np.take_along_axis(units, places, axis=1)
    kind = units.dtype.type  # 32 bits where they suffice: sorting them is several times faster
    bits = kind(max(1, (n_batches - 1).bit_length()))
    shuffled <<= bits
    running = np.tile(np.arange(n_batches, dtype=kind), (n_windows, 1))
    dealt = np.empty((n_windows, length), np.uint16)
    at_once = max(1, n_batches // 4)
    mask = kind((1 << int(bits)) - 1)
    # Where a few batches hold very many samples, these go by the handful until the last rounds.
    handful = max(1, length // (at_once * ROUNDS))
    # Large samples come first, and one by one.
    large = int((units > capacity // handful).any(axis=0).sum())
    first = -(-large // block) * block if handful > 1 else 0
    bulk = first + max(0, length - at_once * ROUNDS // 4 - first) // (handful * at_once) * handful * at_once
    bulk = bulk if handful > 1 else 0
    for start in range(0, first, at_once):
        running.sort(axis=1)
        stop = min(start + at_once, first, length)
        lightest = running[:, : stop - start]
        dealt[:, start:stop] = lightest & mask
        lightest += shuffled[:, start:stop]
    for start in range(first, bulk, at_once * handful):
        running.sort(axis=1)
        lightest = running[:, :at_once]
        dealt[:, start : start + at_once * handful] = np.repeat(lightest & mask, handful, axis=1)
        lightest += shuffled[:, start : start + at_once * handful].reshape(n_windows, at_once, handful).sum(axis=2)
    for start in range(max(first, bulk), length, at_once):
        running.sort(axis=1)
        stop = min(start + at_once, length)
        lightest = running[:, : stop - start]
        dealt[:, start:stop] = lightest & mask
        lightest += shuffled[:, start:stop]
    fits: NDArray[np.bool_] = np.asarray(((running >> bits) <= capacity).all(axis=1))
    batches = np.empty_like(dealt)
    np.put_along_axis(batches, places.astype(np.int64), dealt, axis=1)
    return batches, fits
