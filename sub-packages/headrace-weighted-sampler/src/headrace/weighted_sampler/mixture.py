"""The endless sequence: at every position a source, and the number of that source's draw.

Epochs are stretches of the one sequence, and so are the stages of a schedule. Nothing is carried from position
to position: any stretch is worked out from the seed, the weights and where it lies.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from headrace.weighted_sampler.interleaving import build_tree, draws_before
from headrace.weighted_sampler.keyed import Indices, derive
from headrace.weighted_sampler.turns import Stretch, Turn, turns

MOST = 2**62  # positions are 64-bit integers
WINDOWS = 2  # what this key is for; the passes have another one


@dataclass(frozen=True)
class Stage:
    """Weights that hold from a position on.

    Attributes:
        start: The position, from 0.
        weights: One integer a source, the same sources in every stage; 0 leaves one out.
    """

    start: int
    weights: tuple[int, ...]


class Mixture:
    """Sources by position, for some stages one after the other.

    Inside a stage every source's count follows its share to within about one and a half draws at the end of
    each window of 1,024 positions, and is exact after every period, the sum of the weights. Windows begin
    anew with every epoch and every stage.

    Args:
        stages: By rising ``start``; the first begins at 0.
        epoch_length: Positions in an epoch.
        seed: A 64-bit word.
        sizes: Draws in one pass of each source: a pass is through before the next one begins. None when the
            sources have no passes.

    >>> mixture = Mixture([Stage(0, (2, 1))], epoch_length=6, seed=0)
    >>> {source: sorted(draws.tolist()) for source, where, draws in mixture.turns(1, np.arange(6))}
    {0: [4, 5, 6, 7], 1: [2, 3]}
    """

    def __init__(
        self, stages: Sequence[Stage], epoch_length: int, seed: int, sizes: Sequence[int] | None = None
    ) -> None:
        self.stages = tuple(stages)
        self.epoch_length = epoch_length
        self.seed = seed
        self.sources = len(stages[0].weights)
        self._sizes = None if sizes is None else np.maximum(sizes, 1)
        self._trees = [build_tree(stage.weights) for stage in stages]
        self._bases = [[0] * self.sources]  # each source's draws before each stage
        for number, (stage, after) in enumerate(pairwise(self.stages)):
            self._bases.append(self._counted(number, after.start - stage.start))

    def turns(self, epoch: int, offsets: Indices) -> Iterator[Turn]:
        """Find the sources and draws at some positions of an epoch.

        Args:
            epoch: From 0; ``(epoch + 1) * epoch_length`` is at most 2**62.
            offsets: Positions within the epoch, ascending, shape ``[m]``.

        Yields:
            For each source that occurs, once a stage: its number, where in ``offsets`` it comes, and for
            each of those the number of its draw, counted from the beginning of the sequence.
        """
        begin = epoch * self.epoch_length
        for start, stop in pairwise(self._bounds(begin)):
            low, high = (int(at) for at in np.searchsorted(offsets, (start - begin, stop - begin)))
            if low < high:
                yield from self._stretch(start, stop, offsets[low:high] - (start - begin), low)

    def draws_before(self, position: int) -> list[int]:
        """Count each source's draws before a position of the endless sequence.

        Args:
            position: From 0 to 2**62. Exact at the end of every window, stage and epoch; inside a window the
                shuffle moves draws to and fro.
        """
        stage = self._stage_of(position)
        return self._counted(stage, position - self.stages[stage].start)

    def _stretch(self, start: int, stop: int, offsets: Indices, low: int) -> Iterator[Turn]:
        """A stretch within one epoch and one stage, from position ``start`` to ``stop``."""
        stage = self._stage_of(start)
        stretch = Stretch(
            root=self._trees[stage],
            length=stop - start,
            first=start - self.stages[stage].start,
            key=int(derive(self.seed, WINDOWS, start)[0]),
            bases=np.array(self._bases[stage]),
            sizes=self._sizes,
        )
        for source, where, draws in turns(stretch, offsets):
            yield source, where + low, draws

    def _bounds(self, begin: int) -> list[int]:
        """Where the epoch that begins here is cut: its ends, and the stages that begin inside."""
        end = begin + self.epoch_length
        return [begin, *(stage.start for stage in self.stages if begin < stage.start < end), end]

    def _stage_of(self, position: int) -> int:
        return bisect_right(self.stages, position, key=lambda stage: stage.start) - 1

    def _counted(self, stage: int, offset: int) -> list[int]:
        own = draws_before(self._trees[stage], np.array([offset]), self.sources)[0]
        return [base + int(count) for base, count in zip(self._bases[stage], own, strict=True)]
