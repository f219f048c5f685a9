"""Digests that stand for values: 128 bits of XXH3, or 64 where a file's format or speed asks for few.

They tell apart what differs by accident. They are no defence against somebody who can write to a checkpoint or a cache:
who can do that can change the batches anyway.
"""

from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

digest64 = xxhash.xxh3_64_intdigest  # under a name of ours: a function around it would cost as much again
PIECE = 2**18  # numbers that are looked at and hashed in one go, while they are in the processor's cache


def text_digest(text: str) -> str:
    """Return 32 hex digits for a text, whatever characters it has.

    >>> text_digest("headrace") == text_digest("headrace") != text_digest("headrac")
    True
    """
    return xxhash.xxh3_128_hexdigest(text.encode("utf-8", "surrogatepass"))


def bytes_digest(*pieces: bytes) -> bytes:
    """Return 16 bytes for some pieces, as if they were one."""
    state = xxhash.xxh3_128()
    for piece in pieces:
        state.update(piece)
    return state.digest()


def array_digest(array: NDArray[Any]) -> str:
    """Return 32 hex digits for the numbers of an array and its shape, the same for equal numbers of any type.

    An array is read once, and copied only where a narrower integer type would hold its numbers.

    >>> array_digest(np.array([3, 700], np.uint16)) == array_digest(np.array([3.0, 700.0]))
    True
    """
    state = xxhash.xxh3_128(repr(array.shape).encode())
    rows = max(1, PIECE * len(array) // max(1, array.size))
    for start in range(0, len(array), rows):
        piece = array[start : start + rows]
        kind = _narrowest(piece)
        state.update(f" {kind} ".encode())
        state.update(np.ascontiguousarray(piece, kind).data)
    return state.hexdigest()


def _narrowest(numbers: NDArray[Any]) -> str:
    """Return the narrowest type of integers that holds all numbers; that of floats where they are not whole."""
    if not numbers.size:
        return "<u1"
    if numbers.dtype.kind == "f" and not (
        (numbers == np.floor(numbers)).all() and numbers.min() >= -(2.0**63) and numbers.max() < 2.0**63
    ):
        return "<f8"
    if numbers.dtype.kind not in "ub" and numbers.min() < 0:
        return "<i8"
    return f"<u{np.min_scalar_type(int(numbers.max())).itemsize}"
