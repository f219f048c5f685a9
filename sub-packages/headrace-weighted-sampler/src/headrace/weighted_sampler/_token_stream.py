"""The source of each item of a stream whose shares are in tokens: known only when the items before it were read."""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from headrace.weighted_sampler._mixture import STREAMS
from headrace.weighted_sampler._permutation import sort_shuffles
from headrace.weighted_sampler._shared.random import fold_in
from headrace.weighted_sampler.schedule import Stage, stage_at


class TokenStreamOrder:
    """Draws from the source that is furthest behind its share of the tokens, in exact integers.

    So a source is off by about one longest item, whatever the sizes. Sources that are equally far behind come in an
    order that differs between streams, so that not all of them begin with the same one.

    Args:
        stages: Weights in tokens, by position.
        seed: With ``stream`` it decides the order of sources that are equally far behind.
        stream: Epoch, rank and worker.
        behind: The tokens by which each source is behind its share; by default 0.

    >>> order = TokenStreamOrder([Stage(0, (1, 1))], seed=0, stream=(0, 0, 0))
    >>> sources = []
    >>> for size in (3, 1, 1, 1, 2):
    ...     sources.append(order.source_at(len(sources)))
    ...     order.add(len(sources) - 1, sources[-1], size)
    >>> [source == sources[0] for source in sources]
    [True, False, False, False, True]
    """

    def __init__(
        self, stages: Sequence[Stage], seed: int, stream: tuple[int, ...], behind: Sequence[Fraction] | None = None
    ) -> None:
        self._stages = tuple(stages)
        count = len(stages[0].weights)
        behind = [Fraction(0)] * count if behind is None else behind
        # In parts of a token, so that all numbers are whole.
        self._unit = math.lcm(*(sum(stage.weights) for stage in stages), *(own.denominator for own in behind))
        self._behind = [int(own * self._unit) for own in behind]
        self._weights = [
            tuple(weight * (self._unit // sum(stage.weights)) for weight in stage.weights) for stage in stages
        ]
        key = fold_in(seed, STREAMS, *stream)
        self._turns = sort_shuffles(count, key)[0].tolist() if count <= 2**16 else np.arange(count).tolist()

    def source_at(self, position: int) -> int:
        """Return the number of the source of the next item."""
        weights = self._weights[stage_at(self._stages, position)]
        return max((source for source in self._turns if weights[source]), key=self._behind.__getitem__)

    def add(self, position: int, source: int, size: int) -> None:
        """Count the item at a position."""
        weights = self._weights[stage_at(self._stages, position)]
        self._behind = [own + weight * size for own, weight in zip(self._behind, weights, strict=True)]
        self._behind[source] -= self._unit * size

    @property
    def behind(self) -> list[Fraction]:
        """The tokens by which each source is behind its share."""
        return [Fraction(own, self._unit) for own in self._behind]
