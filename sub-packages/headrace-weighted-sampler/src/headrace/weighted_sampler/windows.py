"""Positions shuffled inside short windows, each window with a key of its own.

Without the shuffle an exact interleave is regular: with eight equal sources every eighth position is the same
source, and a rank that takes every eighth position would read nothing else. The counts at the end of each
window stay as they are.
"""

from dataclasses import dataclass

import numpy as np

from headrace.weighted_sampler.keyed import Indices, Words, derive, splitmix64
from headrace.weighted_sampler.shuffles import shuffles

WIDTH = 1024  # positions in a window
SIDE = np.int64(32)  # a window is a square of 32 x 32 places
ROUNDS = 6
NUMBERS = ROUNDS * 32  # one byte each
BYTES = 8
DENSE = 64  # positions are dense when there is one in so many


@dataclass(frozen=True)
class Places:
    """Where some positions stand.

    Attributes:
        windows: Numbers of the windows that occur, ascending, shape ``[w]``.
        rows: For each position, which of those windows, shape ``[m]``.
        places: For each position, its shuffled place in that window, shape ``[m]``.
    """

    windows: Indices
    rows: Indices
    places: Indices


def shuffle_in_windows(offsets: Indices, length: int, key: int) -> Places:
    """Shuffle positions ``0 .. length - 1`` inside windows of 1,024, and say where some of them go.

    A full window is sent through a Feistel network over its square with keyed tables; the last, shorter one
    is sorted by random words.

    Args:
        offsets: Positions, ascending, shape ``[m]``.
        length: Where the last window ends.
        key: A 64-bit word.

    Returns:
        Their windows and places. Over all positions of a window the places are a bijection.

    >>> moved = shuffle_in_windows(np.arange(1500), 1500, key=1)
    >>> moved.windows.tolist(), sorted(moved.places[:1024]) == list(range(1024))
    ([0, 1], True)
    """
    windows = offsets // WIDTH
    found, rows = _distinct(windows)
    cut = int(np.searchsorted(offsets, length - length % WIDTH))
    full = _full(offsets[:cut] & (WIDTH - 1), rows[:cut], found, key)
    return Places(found, rows, np.concatenate([full, _short(offsets[cut:], length, key)]))


def _distinct(windows: Indices) -> tuple[Indices, Indices]:
    """Number the windows that occur: the window of each row, and each position's row."""
    if not windows.size:
        return windows, windows
    first = int(windows[0])
    span = int(windows[-1]) - first + 1
    if span <= len(windows):
        return np.arange(first, first + span), windows - first
    found, rows = np.unique(windows, return_inverse=True)
    return found, rows


def _full(places: Indices, rows: Indices, windows: Indices, key: int) -> Indices:
    numbers = _numbers(windows, key)
    left, right, at = places >> 5, places & (SIDE - 1), rows * NUMBERS
    for _ in range(0, ROUNDS, 2):
        left = (left + np.take(numbers, at + right, mode="clip")) & (SIDE - 1)
        at += SIDE
        right = (right + np.take(numbers, at + left, mode="clip")) & (SIDE - 1)
        at += SIDE
    shuffled: Indices = (left << 5) | right
    return shuffled


def _numbers(windows: Indices, key: int) -> Indices:
    """The numbers to add, for each window, round and chooser; flat."""
    words: Words = derive(key, windows.astype(np.uint64))[:, None] ^ np.arange(NUMBERS // BYTES, dtype=np.uint64)
    numbers: Indices = splitmix64(words).astype("<u8", copy=False).view(np.uint8).ravel()  # type: ignore[assignment]  # bytes are enough
    return numbers


def _short(offsets: Indices, length: int, key: int) -> Indices:
    if not offsets.size:
        return offsets
    width = length % WIDTH
    places: Indices = shuffles(width, derive(key, length // WIDTH))[0][offsets & (WIDTH - 1)]
    return places
