"""Dataset indices at positions of an epoch."""

from typing import Any

import numpy as np

from headrace.weighted_sampler.keyed import Indices, derive
from headrace.weighted_sampler.passes import Passes
from headrace.weighted_sampler.recipe import Recipe
from headrace.weighted_sampler.windows import WIDTH

DRAWS = 1  # what this key is for; the windows have another one
BLOCK = 2**15  # positions worked out at a time: few enough to stay in the processor's cache
EACH = 64  # positions for each source, where there are thousands of sources to go through
TABLE = 2**21  # counts, of each source in each window, that a block holds at most
REACH = 2**22  # positions that a block spans at most, own ones and those of other ranks


class Order:
    """The endless sequence of a recipe and a seed, by stretches of an epoch.

    A pure function of both; what is kept between calls only makes it faster. A source's passes are keyed by
    where its indices lie, so that other sources do not matter to them.

    Args:
        recipe: Sources and stages.
        seed: A 64-bit word.
    """

    def __init__(self, recipe: Recipe, seed: int) -> None:
        self.recipe = recipe
        self.mixture = recipe.mixture(seed)
        self._seed = seed
        self._passes = self._fresh()
        self._block = max(BLOCK, EACH * len(recipe.sources.parts))

    def block(self, world: int) -> int:
        """Positions of one rank of ``world`` that are best worked out at a time."""
        windows = max(1, TABLE // len(self.recipe.sources.parts))
        return max(1, min(self._block, REACH // world, windows * max(1, WIDTH // world)))

    def at(self, epoch: int, offsets: Indices) -> Indices:
        """Find the samples at some positions of an epoch.

        Args:
            epoch: From 0.
            offsets: Positions in the epoch, ascending, shape ``[m]``.

        Returns:
            Dataset indices, shape ``[m]``.
        """
        found = np.empty(len(offsets), np.int64)
        parts = self.recipe.sources.parts
        for source, where, draws in self.mixture.turns(epoch, offsets):
            found[where] = self._passes[source](draws) + parts[source].begin
        members = self.recipe.sources.members
        return found if members is None else members[found]

    def stretch(self, epoch: int, start: int, stop: int) -> Indices:
        """Find the samples at positions ``start .. stop - 1`` of an epoch."""
        found = np.empty(stop - start, np.int64)
        step = self.block(world=1)
        for low in range(start, stop, step):
            high = min(low + step, stop)
            found[low - start : high - start] = self.at(epoch, np.arange(low, high))
        return found

    def owners(self, epoch: int, offsets: Indices) -> list[int]:
        """Count how many of some positions, ascending, belong to each source."""
        counts = [0] * self.mixture.sources
        for source, where, _ in self.mixture.turns(epoch, offsets):
            counts[source] += len(where)
        return counts

    def _fresh(self) -> list[Passes]:
        parts = self.recipe.sources.parts
        begins, ends = (np.array(bounds, np.uint64) for bounds in zip(*((p.begin, p.end) for p in parts), strict=True))
        keys = derive(self._seed, DRAWS, begins, ends).tolist()
        return [Passes(part.size, key) for part, key in zip(parts, keys, strict=True)]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_passes": self._fresh()}  # the tables stay behind: workers make their own
