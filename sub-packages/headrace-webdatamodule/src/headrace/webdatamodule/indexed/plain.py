"""Batches of equal count, dealt to the ranks."""

from __future__ import annotations

import hashlib
import operator
import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

from headrace.webdatamodule.indexed.arguments import seed_int
from headrace.webdatamodule.indexed.even_batches import deal, n_steps
from headrace.webdatamodule.indexed.shuffling import Shuffle
from headrace.webdatamodule.indexed.states import check_sampler_state
from headrace.webdatamodule.splits import positive_int

VERSION = 1
_AHEAD = 2**14  # places that are worked out together


class PlainBatchSampler(Sampler[list[int]]):
    """Batches of `batch_size` samples, as many of them on every rank, each sample once.

    Step s deals the next `num_replicas * batch_size` places of one order to the ranks. The last batches are smaller
    where the samples do not divide; with fewer samples than ranks in a last step of one-sample batches, some are
    repeated, with a warning that names them.

    Args:
        count: Number of samples.
        batch_size: Samples of a batch, on each rank.
        sampler: The order; the same on every rank. With `take(start, stop)` it is asked for stretches, and
            `epoch_length` says how many places it has; else it is listed. None for an order of our own.
        shuffle: Whether that is another one in each epoch; else samples come as they stand.
        num_replicas: Number of ranks.
        rank: This one.
        seed: Key of the order, 0 to 2**64 - 1.

    Raises:
        TypeError: An argument of the wrong kind.
        ValueError: A number that is not allowed.

    >>> list(PlainBatchSampler(5, 2, shuffle=False))
    [[0, 1], [2, 3], [4]]
    """

    def __init__(
        self,
        count: int,
        batch_size: int,
        *,
        sampler: Iterable[int] | None = None,
        shuffle: bool = True,
        num_replicas: int = 1,
        rank: int = 0,
        seed: int = 0,
    ) -> None:
        self.count, self.batch_size = count, positive_int("batch_size", batch_size)
        self.num_replicas, self.rank = positive_int("num_replicas", num_replicas), operator.index(rank)
        if not 0 <= self.rank < self.num_replicas:
            raise ValueError(f"rank must be 0 to {self.num_replicas - 1}, got {rank}")
        if sampler is not None and (isinstance(sampler, Iterator) or not isinstance(sampler, Iterable)):
            raise TypeError(f"sampler must be an iterable that can be read in every epoch, got {sampler!r}")
        self.sampler, self.shuffle, self.seed = sampler, shuffle, seed_int(seed)
        self.epoch = self._start = self._position = 0
        self._listed: npt.NDArray[np.int64] | None = None

    def __len__(self) -> int:
        """How many batches the next iteration gives: of the whole epoch, or what is left of it."""
        return n_steps(self._end() - self._start, self.batch_size, self.num_replicas)

    def __iter__(self) -> Iterator[list[int]]:
        start, self._start = self._start, 0
        end, size, world = self._end(), self.batch_size, self.num_replicas
        order = self._order()
        steps = n_steps(end - start, size, world)
        together = max(1, _AHEAD // (size * world))
        for first in range(0, steps, together):
            deals = [deal(step, start, end, size, world) for step in range(first, min(first + together, steps))]
            begin = deals[0].start
            ids = order(begin, deals[-1].stop).tolist()
            for one in deals:
                low, high = one.of_rank(self.rank, world)
                self._position = one.stop
                if one.stop - one.start < world:
                    low, high = self._repeated(one.start, one.stop, ids, begin)
                yield ids[low - begin : high - begin]

    def _repeated(self, start: int, stop: int, ids: list[int], begin: int) -> tuple[int, int]:
        """Fewer samples than ranks: each rank gets one, and some come again."""
        count = stop - start
        again = [ids[start - begin + rank % count] for rank in range(count, self.num_replicas)]
        message = f"the last step has {count} samples for {self.num_replicas} ranks: {len(again)} come again"
        warnings.warn(f"{message}, {again[:10]}{' ...' if len(again) > 10 else ''}", stacklevel=3)
        mine = start + self.rank % count
        return mine, mine + 1

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch to iterate over next; a position that was loaded holds for its own epoch only."""
        if epoch != self.epoch:
            self._start = self._position = 0
        self.epoch, self._listed = epoch, None
        if callable(set_epoch := getattr(self.sampler, "set_epoch", None)):
            set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """What it takes to go on behind the last batch that was taken."""
        return {
            "version": VERSION,
            "seed": self.seed,
            "epoch": self.epoch,
            "position": self._position,
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken, at any number of ranks.

        Raises:
            ValueError: It is of other data, another order, batch size or seed, or no such state.
        """
        check_sampler_state(state, {"version": VERSION, "seed": self.seed, "fingerprint": self.fingerprint})
        self.set_epoch(operator.index(state["epoch"]))
        position = operator.index(state["position"])
        if not 0 <= position <= self._end():
            raise ValueError(f"state['position'] must be 0 to {self._end()}, the places of an epoch, got {position}")
        self._start = self._position = position

    @cached_property
    def fingerprint(self) -> str:
        """Stands for the count, the batch size and what decides the order."""
        order = getattr(self.sampler, "fingerprint", None) if self.sampler is not None else self.shuffle
        kind = f"{type(self.sampler).__name__} {order} {self.count} {self.batch_size}"
        return hashlib.blake2b(kind.encode(), digest_size=8).hexdigest()

    def _end(self) -> int:
        if self.sampler is None:
            return self.count
        if hasattr(self.sampler, "take") and hasattr(self.sampler, "epoch_length"):
            return int(self.sampler.epoch_length)
        return len(self._list())

    def _order(self) -> Any:
        if self.sampler is None:
            # A shuffle of an epoch is worked out in microseconds, or in no more than a sort of 65,536 words.
            return Shuffle(self.count, self.seed, self.epoch).take if self.shuffle else np.arange
        if hasattr(self.sampler, "take") and hasattr(self.sampler, "epoch_length"):
            return self.sampler.take
        listed = self._list()
        return lambda start, stop: listed[start:stop]

    def _list(self) -> npt.NDArray[np.int64]:
        if self._listed is None:
            self._listed = np.fromiter(map(operator.index, self.sampler or ()), np.int64)
        return self._listed
