"""When a node needs each sample next. This is known long before, so that a cache of samples can evict by it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from headrace.webdatamodule.loading.permutation import Shuffle
from headrace.webdatamodule.shards.reading.local_shards import Upcoming

_WINDOWS = 64  # of an epoch: a cache evicts whole windows
_LEAST = 32  # minimum steps of a window; the ranks of a node are no further apart, prefetching included
_HORIZON = 8  # epochs
# What launchers say of the processes of a node: torchrun, Slurm, Open MPI.
_LOCAL = ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE")


class NextUses:
    """When the ranks of a node need samples next, in epochs that are each a permutation.

    No order is listed: the permutations of the next epochs are inverted for the samples in question. Later changes of
    the run are not foreseen; they only cost bytes that are fetched again.

    Args:
        seed: Seed of the permutations; None if every epoch has the order of the data.
        left_out: The samples that no epoch delivers, ascending.
        n_samples: Number of samples, those left out included.
        batch_size: Samples of a batch.
        drop_last: Whether the last samples are dropped if they do not fill a step.
        world: Number of data-parallel ranks.
        ranks: The ranks of this node.
    """

    def __init__(
        self,
        seed: int | None,
        left_out: npt.NDArray[np.int64],
        n_samples: int,
        *,
        batch_size: int,
        drop_last: bool,
        world: int,
        ranks: range,
    ) -> None:
        self._left_out, self._count = left_out, n_samples - len(left_out)
        self._batch_size, self._step, self._ranks = batch_size, batch_size * world, ranks
        self._steps = self._count // self._step if drop_last else -(-self._count // self._step)
        self._window = max(_LEAST, -(-self._steps // _WINDOWS))
        self._horizon = min(_HORIZON, -(-world // len(ranks)))
        self._shuffle = None if seed is None else lru_cache(_HORIZON)(lambda epoch: Shuffle(self._count, seed, epoch))

    def of(self, epoch: int, step: int, indices: Sequence[int]) -> Upcoming:
        """When samples of a step of an epoch are needed in later epochs."""
        numbers = np.asarray(indices, np.int64)
        numbers = numbers - np.searchsorted(self._left_out, numbers)
        windows: dict[int, int] = {}
        open_ = np.arange(len(numbers))
        for later in range(epoch + 1, epoch + 1 + self._horizon):
            if not len(open_):
                break
            some = numbers[open_]
            places = some if self._shuffle is None else self._shuffle(later).places(some)
            at, within = np.divmod(places, self._step)
            rank = within // self._batch_size
            ours = (rank >= self._ranks.start) & (rank < self._ranks.stop) & (at < self._steps)
            found = self._windows(later, at[ours])
            windows.update(zip((indices[place] for place in open_[ours].tolist()), found.tolist(), strict=True))
            open_ = open_[~ours]
        return Upcoming(int(self._windows(epoch, np.array([step]))[0]), windows)

    def _windows(self, epoch: int, steps: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return (epoch * self._steps + steps) // self._window


def ranks_of_node(world: int, rank: int) -> range | None:
    """The data-parallel ranks of this node, if the launcher says how many processes there are on it."""
    given = next((os.environ[name] for name in _LOCAL if os.environ.get(name, "").isdecimal()), None)
    total = os.environ.get("WORLD_SIZE", "")
    processes = int(total) if total.isdecimal() and int(total) else world
    if given is None or not int(given) or processes % world:
        return None
    local = max(1, int(given) // (processes // world))  # ranks of a model that is distributed get the same batches
    first = rank // local * local
    return range(first, min(first + local, world))
