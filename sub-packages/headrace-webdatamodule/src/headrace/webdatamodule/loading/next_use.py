"""When a node needs each sample next. This is known long before, so that a cache of samples can evict by it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from headrace.webdatamodule.loading.permutation import Shuffle
from headrace.webdatamodule.shards.reading.local_shards import Upcoming

_WINDOWS = 64  # of an epoch: a cache evicts whole windows
_LEAST = 32  # minimum steps of a window; the ranks of a node are no further apart, prefetching included
_HORIZON = 8  # epochs
_MOST_PLANNED = 1 << 21  # samples of an epoch; planning five epochs of as many takes 1 to 3 seconds
# What launchers say of the processes of a node: torchrun, Slurm, Open MPI.
_LOCAL = ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE")


class NextUses(Protocol):
    """When the ranks of a node need samples next."""

    def of(self, epoch: int, step: int, indices: Sequence[int]) -> Upcoming:
        """When samples of a step of an epoch are needed in later epochs."""


class PermutationUses:
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
        """See `NextUses`."""
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


Uses = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]  # samples, ascending, and the windows of their first use


class PlanUses:
    """When the ranks of a node need samples next, in epochs that a batch sampler plans: batch s * W + r is of rank r.

    Where the last batches are distributed in another way, a use is foreseen too early or too late. That costs bytes.

    Args:
        plan: Returns the plan of an epoch: `indices`, and the `offsets` of its batches in them.
        world: Number of data-parallel ranks.
        ranks: The ranks of this node.
    """

    def __init__(self, plan: Callable[[int], Any], world: int, ranks: range) -> None:
        self._plan, self._world, self._ranks = plan, world, ranks
        self._horizon = min(_HORIZON, -(-world // len(ranks)))
        self._steps: dict[int, int] = {}  # of each epoch
        self._uses: dict[int, Uses] = {}

    def prepare(self, epoch: int) -> bool:
        """Plan the next epochs and this one, before its batches are read; return whether they can be planned."""
        self._uses = {number: uses for number, uses in self._uses.items() if number >= epoch}
        try:
            for number in range(epoch + self._horizon, epoch - 1, -1):
                if number not in self._uses:
                    self._add(number)
        except (AttributeError, TypeError, ValueError):  # another kind of plan, or one of the present epoch alone
            return False
        return True

    def of(self, epoch: int, step: int, indices: Sequence[int]) -> Upcoming:
        """See `NextUses`; of an epoch that is prepared."""
        numbers, windows = np.asarray(indices, np.int64), dict[int, int]()
        for later in range(epoch + self._horizon, epoch, -1):
            samples, first = self._uses[later]
            places = np.searchsorted(samples, numbers)
            places[places == len(samples)] = 0
            found = samples[places] == numbers if len(samples) else np.zeros(len(numbers), bool)
            windows.update(zip(numbers[found].tolist(), first[places[found]].tolist(), strict=True))
        now = int(self._window(epoch, np.array([step]))[0])
        return Upcoming(now - self._width(epoch) + 1, windows)  # a cache keeps the window before the present one

    def _add(self, epoch: int) -> None:
        plan = self._plan(epoch)
        counts = np.diff(np.asarray(plan.offsets))
        step, rank = np.divmod(np.repeat(np.arange(len(counts)), counts), self._world)
        own = (rank >= self._ranks.start) & (rank < self._ranks.stop)
        samples, first = np.unique(np.asarray(plan.indices, np.int64)[own], return_index=True)
        self._steps[epoch] = -(-len(counts) // self._world)
        self._uses[epoch] = samples, self._window(epoch, step[own][first])

    def _window(self, epoch: int, steps: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Windows of the same scale in all epochs, though these have different numbers of steps."""
        width, most = self._width(epoch), max(1, self._steps[epoch])
        return epoch * _WINDOWS + np.minimum(steps, most - 1) * _WINDOWS // most // width * width

    def _width(self, epoch: int) -> int:
        """The least power of two of windows that together have enough steps."""
        enough = -(-_LEAST * _WINDOWS // max(1, self._steps[epoch]))
        return min(_WINDOWS, 1 << max(0, enough - 1).bit_length())


def planned_uses(plan: Any, sizes: Any, world: int, rank: int) -> PlanUses | None:
    """The next uses by a batch sampler of another package, from its `plan` of epochs; None for a single node."""
    ranks = ranks_of_node(world, rank)
    if ranks is None or len(ranks) == world or not callable(plan):
        return None
    if not isinstance(sizes, np.ndarray) or len(sizes) > _MOST_PLANNED:
        return None
    return PlanUses(plan, world, ranks)


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
