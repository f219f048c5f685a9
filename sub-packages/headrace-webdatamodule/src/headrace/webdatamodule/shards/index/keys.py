"""How an index stores the keys of samples: numbered keys as one rule, others as their bytes."""

from __future__ import annotations

import re
from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise, takewhile
from typing import Any, TypeGuard, overload

import numpy as np
import numpy.typing as npt

_DIGITS = 40
Described = tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]


class LazyTexts(Sequence[str]):
    """Texts that are made on access."""

    def __init__(self, count: int) -> None:
        self._range = range(count)

    def __len__(self) -> int:
        return len(self._range)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        where = self._range[index]
        return self._key(where) if isinstance(where, int) else [self._key(index) for index in where]

    @abstractmethod
    def _key(self, index: int) -> str: ...


class SampleKeys(LazyTexts):
    """Texts that are made by a function of their position."""

    def __init__(self, count: int, key: Callable[[int], str]) -> None:
        super().__init__(count)
        self._make = key

    def _key(self, index: int) -> str:
        return self._make(index)


class Keys(LazyTexts):
    """The keys of a shard's samples."""

    @abstractmethod
    def find(self, key: str) -> int:
        """The position of a key."""

    def many(self, samples: Sequence[int]) -> Iterable[str]:
        """The keys of some samples, fast."""
        return map(self._key, samples)


class NumberedKeys(Keys):
    """Keys that differ by a number only, in equal steps."""

    def __init__(self, count: int, prefix: str, first: int, step: int, width: int, suffix: str) -> None:
        # One "%" is three times as fast as an f-string put together from parts.
        begin, end = (part.replace("%", "%%") for part in (prefix, suffix))
        self.template, self.numbers = f"{begin}%0{width}d{end}", range(first, first + step * count, step)
        super().__init__(count)
        self._parts = (prefix, suffix)

    def _key(self, index: int) -> str:
        return self.template % self.numbers[index]

    def many(self, samples: Sequence[int]) -> Iterable[str]:
        """See `Keys`."""
        if isinstance(samples, range) and samples.step > 0:
            return map(self.template.__mod__, self.numbers[samples.start : samples.stop : samples.step])
        return map(self.template.__mod__, map(self.numbers.__getitem__, samples))

    def find(self, key: str) -> int:
        """See `Keys`; takes the same time for any number of samples."""
        prefix, suffix = self._parts
        digits = key[len(prefix) : len(key) - len(suffix)]
        number = int(digits) if digits.isascii() and digits.isdecimal() and len(digits) <= _DIGITS else -1
        if number not in self.numbers or self._key(self.numbers.index(number)) != key:
            raise KeyError(key)
        return self.numbers.index(number)


class ListedKeys(Keys):
    """Keys of any kind."""

    def __init__(
        self,
        count: int,
        prefix: str,
        ordered: bool,
        text: npt.NDArray[np.uint8],
        ends: npt.NDArray[Any] | None = None,
    ) -> None:
        super().__init__(count)
        self._prefix, self._ordered = prefix, ordered
        self._text, self._ends = text.data, ends
        self._width = text.size // count if count else 0

    def _key(self, index: int) -> str:
        if self._ends is None:
            begin, end = index * self._width, (index + 1) * self._width
        else:
            begin, end = int(self._ends[index - 1]) if index else 0, int(self._ends[index])
        return self._prefix + str(self._text[begin:end], "utf-8", "surrogateescape")

    @cached_property
    def _positions(self) -> dict[str, int]:
        return {key: index for index, key in enumerate(self)}

    def find(self, key: str) -> int:
        """See `Keys`; by bisection when the keys are sorted, else with a table made at the first call."""
        index = bisect_left(self, key) if self._ordered else self._positions.get(key, len(self))
        if index == len(self) or self[index] != key:
            raise KeyError(key)
        return index


def describe_keys(keys: Sequence[str]) -> Described:
    """What an index has to store so that `read_keys` gives the keys again."""
    return _numbered(keys) or _listed(keys)


def read_keys(count: int, described: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Keys:
    """The keys that were given to `describe_keys`."""
    if "first" in described:
        return NumberedKeys(count, **described)
    return ListedKeys(count, text=arrays["key_text"], ends=arrays.get("key_ends"), **described)


def is_utf8(value: object) -> TypeGuard[str]:
    """Whether a value is a text that stands for bytes, as of a file's name: UTF-8, or surrogates for other bytes."""
    try:
        return isinstance(value, str) and value.encode("utf-8", "surrogateescape") is not None
    except UnicodeEncodeError:
        return False


def _numbered(keys: Sequence[str]) -> Described | None:
    # The last number of a key counts fastest: in "train2/img_000123" it is 000123.
    found = [re.fullmatch(r"(.*?)([0-9]{1,18})([^0-9]*)", key, re.DOTALL) for key in keys[:2]]
    parts = [match.groups() for match in found if match]
    if not parts or len(parts) < len(found):
        return None
    prefix, digits, suffix = parts[0]
    first, step = int(digits), int(parts[-1][1]) - int(digits) if len(parts) > 1 else 1
    if step < 1:
        return None
    numbered = NumberedKeys(len(keys), prefix, first, step, len(digits), suffix)
    if numbered[-1] != keys[-1] or [*numbered.many(range(len(keys)))] != [*keys]:
        return None
    return {"prefix": prefix, "first": first, "step": step, "width": len(digits), "suffix": suffix}, {}


def _listed(keys: Sequence[str]) -> Described:
    pairs = zip(min(keys, default=""), max(keys, default=""), strict=False)
    prefix = "".join(first for first, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    rests = [key[len(prefix) :].encode("utf-8", "surrogateescape") for key in keys]
    ends = np.cumsum([len(rest) for rest in rests], dtype=np.uint64)
    arrays: dict[str, npt.NDArray[Any]] = {"key_text": np.frombuffer(b"".join(rests), np.uint8)}
    if len({len(rest) for rest in rests}) > 1:
        arrays["key_ends"] = ends.astype(np.uint32) if ends[-1] < 1 << 32 else ends
    return {"prefix": prefix, "ordered": all(a < b for a, b in pairwise(keys))}, arrays
