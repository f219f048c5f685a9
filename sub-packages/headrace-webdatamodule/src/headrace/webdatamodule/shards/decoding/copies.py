"""How much a pickle may have copied: a few bytes that name one large object again and again fill the memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from headrace.webdatamodule.shards.decoding.allowed import need

# Bytes per item of what a call copies. A list's item takes a byte in the pickle at the least, and 8 in memory:
# honest pickles stay below 8 times their length.
_UNITS: dict[type, int] = {bytes: 1, bytearray: 1, str: 1}
_UNITS |= dict.fromkeys((list, tuple, dict, set, frozenset), 8)
_FACTOR = 8
_FREE = 1 << 20


def copied(values: Iterable[Any]) -> int:
    """Bytes that a call with these arguments copies, about.

    Args:
        values: The arguments; what containers among them hold is not looked into.

    Returns:
        One per byte or character, 8 per item of a container.

    >>> copied([b"abcd", [None] * 3, 7])
    28
    """
    return sum(_UNITS[type(value)] * len(value) for value in values if type(value) in _UNITS)


class Budget:
    """Counts the bytes that one pickle has had copied.

    Args:
        nbytes: Length of the pickle; 8 times that and 1 MiB may be copied.

    >>> Budget(10).take(1 << 20)
    >>> Budget(10).take(1 << 21)
    Traceback (most recent call last):
        ...
    headrace.webdatamodule.shards.errors.UnsafePickleError: the pickle of 10 bytes copies more than 1048656 \
bytes out of the objects it holds
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.most = _FACTOR * nbytes + _FREE
        self.taken = 0

    def take(self, nbytes: int) -> None:
        """Count a copy that is about to be made.

        Args:
            nbytes: Its size.

        Raises:
            UnsafePickleError: When that is too much for a pickle of this length.
        """
        self.taken += nbytes
        message = "the pickle of {} bytes copies more than {} bytes out of the objects it holds"
        need(self.taken <= self.most, message, self.nbytes, self.most)
