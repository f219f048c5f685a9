"""The sources of a mixture of streams and their weights, as whole numbers."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace.weighted_sampler.checks import WORD, integer
from headrace.weighted_sampler.shares import integer_weights
from headrace.weighted_sampler.stopping import Stopping, check_stopping
from headrace.weighted_sampler.weights import Ratio, exact

T = TypeVar("T")
Sources: TypeAlias = Mapping[str, Iterable[T]] | Sequence[Iterable[T]]
StreamWeights: TypeAlias = Mapping[str, Ratio] | Sequence[Ratio] | NDArray[Any]

MOST_SOURCES = 2**16


@dataclass(frozen=True)
class StreamMixture(Generic[T]):
    """What is mixed, and how.

    Attributes:
        names: Of the sources that are drawn from.
        sources: The sources themselves.
        weights: Draws of each in one period of the interleave.
        seed: A 64-bit word.
        stopping: When the stream ends.
    """

    names: tuple[str, ...]
    sources: tuple[Iterable[T], ...]
    weights: tuple[int, ...]
    seed: int
    stopping: Stopping

    @property
    def fingerprint(self) -> str:
        """Names the weights and the stopping rule, not the data.

        >>> build_mixture([[1], [2]], [0.5, 0.5], 0, "endless").fingerprint
        'c1448828a9db87a6'
        """
        text = json.dumps([self.names, self.weights, self.stopping])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def build_mixture(sources: Sources[T], weights: StreamWeights, seed: int, stopping: str) -> StreamMixture[T]:
    """Check the sources and weights and leave out those of weight 0.

    Sources of a mapping are taken in the order of their names, so that the order in which it was written
    changes nothing. Those of a sequence are named by their position.

    Args:
        sources: ``{name: iterable}`` or a list of iterables.
        weights: ``{name: weight}`` or a list of weights; any proportions.
        seed: A 64-bit word.
        stopping: The name of a rule.

    Raises:
        TypeError: If an argument is of another type, or a source cannot be iterated.
        ValueError: If names or lengths do not fit, no weight is above 0, one is negative, NaN or infinite, or
            a source that has to begin again is an iterator.

    >>> mixture = build_mixture({"b": [1], "a": [2], "c": [3]}, {"a": 0.25, "b": 0.75, "c": 0}, 0, "endless")
    >>> mixture.names, mixture.weights
    (('a', 'b'), (1, 3))
    """
    if isinstance(sources, Mapping):
        found = _by_name(sources, weights)
    else:
        found = _by_position(sources, weights)
    if len(found) > MOST_SOURCES:
        raise ValueError(f"sources must be at most {MOST_SOURCES}, got {len(found)}; join some of them")
    rule = check_stopping(stopping)
    drawn = [(name, source, weight) for name, source, weight in found if weight]
    if not drawn:
        raise ValueError(f"weights must hold at least one above 0, got {weights!r}: there is nothing to draw")
    for name, source, _ in drawn:
        _check_source(name, source, rule)
    names, iterables, shares = zip(*drawn, strict=True)
    return StreamMixture(names, iterables, integer_weights(shares), integer("seed", seed, 0, WORD - 1), rule)


def is_one_shot(source: object) -> bool:
    """Whether a source is its own iterator and so cannot begin again.

    >>> is_one_shot(iter([1])), is_one_shot([1])
    (True, False)
    """
    return isinstance(source, Iterator) and iter(source) is source


Found: TypeAlias = list[tuple[str, Iterable[T], Fraction]]


def _by_name(sources: Mapping[str, Iterable[T]], weights: StreamWeights) -> Found[T]:
    if not isinstance(weights, Mapping):
        raise TypeError(
            f"weights must be a mapping {{name: weight}} as sources is one, got {type(weights).__name__}: "
            "the order of a mapping should not decide which weight is whose"
        )
    for name in sources:
        if not isinstance(name, str):
            raise TypeError(f"sources must have names that are texts, got {name!r}")
    if missing := sorted(set(sources) - set(weights)):
        raise ValueError(f"weights lacks the sources {missing}; give each a weight, 0 leaves one out")
    if unknown := sorted(set(weights) - set(sources), key=repr):
        raise ValueError(f"weights names {unknown}, which are not in sources; the sources are {sorted(sources)}")
    return [(name, sources[name], exact(f"weights[{name!r}]", weights[name])) for name in sorted(sources)]


def _by_position(sources: Sequence[Iterable[T]], weights: StreamWeights) -> Found[T]:
    _check_list("sources", sources, "a mapping {name: iterable} or a list of iterables,")
    _check_list("weights", weights, "a list, as sources is one,")
    numbers = list(weights)
    if len(numbers) != len(sources):
        raise ValueError(f"weights must hold one number a source: got {len(numbers)} for {len(sources)} sources")
    return [
        (str(place), source, exact(f"weights[{place}]", weight))
        for place, (source, weight) in enumerate(zip(sources, numbers, strict=True))
    ]


def _check_list(name: str, given: object, allowed: str) -> None:
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, (Sequence, np.ndarray)):
        raise TypeError(f"{name} must be {allowed} got {type(given).__name__}")


def _check_source(name: str, source: object, stopping: Stopping) -> None:
    if isinstance(source, (str, bytes)) or not isinstance(source, Iterable):
        raise TypeError(f"sources[{name!r}] must have __iter__ and yield samples, got {type(source).__name__}")
    if stopping != "first_exhausted" and is_one_shot(source):
        raise ValueError(
            f"sources[{name!r}] is an iterator ({type(source).__name__}) and cannot begin again, which "
            f"stopping={stopping!r} needs; give an object whose __iter__ makes a new iterator, or use "
            "stopping='first_exhausted'"
        )
