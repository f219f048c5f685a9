"""The keys of many samples at once, as fast as Python makes texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from headrace.webdatamodule.shards.index.keys import Keys, NumberedKeys

Namer = Callable[[Sequence[int]], Iterable[str]]


def namer(keys: Keys) -> Namer:
    """How to make the keys of some samples.

    Args:
        keys: The keys of a shard.

    Returns:
        A function from numbers of samples, which have to exist, to their keys.

    >>> list(namer(NumberedKeys(9, "100%", 5, 2, 3, "x"))([0, 3]))
    ['100%005x', '100%011x']
    """
    return _numbered(keys) if isinstance(keys, NumberedKeys) else lambda samples: map(keys.__getitem__, samples)


def _numbered(keys: NumberedKeys) -> Namer:
    make, numbers = keys.template.__mod__, keys.numbers

    def names(samples: Sequence[int]) -> Iterable[str]:
        if isinstance(samples, range) and samples.step > 0:
            return map(make, numbers[samples.start : samples.stop : samples.step])
        return map(make, map(numbers.__getitem__, samples))

    return names
