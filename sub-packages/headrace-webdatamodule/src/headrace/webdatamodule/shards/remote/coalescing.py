"""Members that lie close together, read in one request."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Span = tuple[int, int]
Offsets = npt.NDArray[np.int64]


def coalesce(begins: Offsets, ends: Offsets, *, gap: int, most: int) -> list[Span]:
    """Put spans of bytes together.

    Args:
        begins: Where they begin, shape [n], in any order, repeated or not.
        ends: Where they end, shape [n].
        gap: Bytes between two spans that may be read in vain.
        most: Bytes of what is put together, at most; a single span may have more.

    Returns:
        Ascending spans. Each of those given lies in one of them, those without bytes aside.

    >>> coalesce(np.array([900, 0, 100]), np.array([950, 50, 200]), gap=50, most=1000)
    [(0, 200), (900, 950)]
    """
    some = ends > begins
    order = np.lexsort((ends[some], begins[some]))
    made: list[Span] = []
    for begin, end in zip(begins[some][order].tolist(), ends[some][order].tolist(), strict=True):
        if made:
            first, last = made[-1]
            if begin < last or (begin - last <= gap and max(last, end) - first <= most):
                made[-1] = first, max(last, end)
                continue
        made.append((begin, end))
    return made


class Pieces:
    """Some pieces of a file, which give slices as all of its bytes would.

    Args:
        spans: Where they lie: ascending, apart from one another.
        read: Their bytes.

    >>> pieces = Pieces([(0, 4), (10, 12)], [b"abcd", b"ef"])
    >>> pieces[1:3], pieces[10:12], pieces[7:7]
    (b'bc', b'ef', b'')
    """

    def __init__(self, spans: Sequence[Span], read: Sequence[bytes]) -> None:
        self._begins = [begin for begin, _ in spans]
        self._read = read

    def __getitem__(self, wanted: slice) -> bytes:
        begin, end = wanted.start, wanted.stop
        if begin >= end:
            return b""
        number = bisect_right(self._begins, begin) - 1
        first = self._begins[number] if number >= 0 else 0
        if number < 0 or end - first > len(self._read[number]):
            raise LookupError(f"bytes {begin} to {end} were not read")
        return self._read[number][begin - first : end - first]
