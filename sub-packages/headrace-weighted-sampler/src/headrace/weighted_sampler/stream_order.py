"""Which source comes at each position of one stream."""

from collections.abc import Sequence

import numpy as np

from headrace.weighted_sampler.keyed import derive
from headrace.weighted_sampler.mixture import MOST, Mixture, Stage
from headrace.weighted_sampler.windows import WIDTH

STREAMS = 3  # what these keys are for; windows and passes have other ones


class StreamOrder:
    """The source at every position: a pure function of the weights, the seed, the epoch and the stream.

    Each source's count is within about one and a half of its share at the end of every window of 1,024
    positions. Every (epoch, rank, worker) has a key of its own, so that ranks do not all draw the same source
    in the same step.

    Args:
        weights: Draws of each source in one period, whole numbers above 0.
        seed: A 64-bit word.
        epoch: A 64-bit word.
        rank: Of this process, from 0.
        worker: Of this rank's loader, from 0.

    >>> order = StreamOrder((3, 1), seed=0, epoch=0, rank=0, worker=0)
    >>> sum(order.source_at(position) for position in range(1024))
    256
    """

    def __init__(self, weights: Sequence[int], seed: int, epoch: int, rank: int, worker: int) -> None:
        key = int(derive(seed, STREAMS, epoch, rank, worker)[0])
        self._mixture = Mixture([Stage(0, tuple(weights))], MOST, key)
        self._window = -1
        self._sources: list[int] = []  # of that window; kept so that a position costs one look-up

    def source_at(self, position: int) -> int:
        """Return the number of the source whose turn it is.

        Args:
            position: From 0 to 2**62 - 1.
        """
        window, place = divmod(position, WIDTH)
        if window != self._window:
            self._sources = self._deal(window)
            self._window = window
        return self._sources[place]

    def _deal(self, window: int) -> list[int]:
        owners = np.empty(WIDTH, np.int64)
        for source, where, _ in self._mixture.turns(0, np.arange(window * WIDTH, (window + 1) * WIDTH)):
            owners[where] = source
        dealt: list[int] = owners.tolist()
        return dealt
