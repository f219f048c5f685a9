"""The keys of all samples of a set, each made when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload


class SampleKeys(Sequence[str]):
    """A sequence of texts that are made by a function.

    Args:
        count: How many.
        key: Gives the one at a position, 0 to `count - 1`.

    >>> keys = SampleKeys(3, "key{}".format)
    >>> keys[-1], keys[:2], "key1" in keys
    ('key2', ['key0', 'key1'], True)
    """

    def __init__(self, count: int, key: Callable[[int], str]) -> None:
        self._range, self._key = range(count), key

    def __len__(self) -> int:
        return len(self._range)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        where = self._range[index]
        return self._key(where) if isinstance(where, int) else [self._key(one) for one in where]
