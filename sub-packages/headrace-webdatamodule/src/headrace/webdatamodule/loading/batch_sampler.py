"""Batches of equal size for every rank."""

from __future__ import annotations

import hashlib
import operator
import warnings
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

from headrace.webdatamodule._arguments import checked_int
from headrace.webdatamodule.loading.cursor import EpochCursor
from headrace.webdatamodule.loading.fingerprint import own_fingerprint
from headrace.webdatamodule.loading.options import seed_int
from headrace.webdatamodule.loading.permutation import Shuffle
from headrace.webdatamodule.loading.ranks import Mesh, Ranks, refuse_sharding_again
from headrace.webdatamodule.loading.state_dict import STATE_VERSION, check_state

_AHEAD = 2**14  # places of the order that are worked out together


class DistributedBatchSampler(Sampler[list[int]]):
    """Batches of `batch_size` samples, the same number on every rank, each sample once.

    Step s distributes the next `num_replicas * batch_size` positions of one order to the ranks. The last batches are
    smaller if the samples do not divide evenly, unless `drop_last`. With fewer samples than ranks in the last step,
    some repeat, with a warning that names them. After a `break`, a new iteration restarts the epoch.

    Args:
        n_samples: Number of samples.
        batch_size: Samples of a batch, on each rank.
        sampler: The order, the same on every rank. If it has `take(start, stop)`, slices are read from it, and
            `epoch_length` is the number of its positions; otherwise it is listed once per epoch. None: the built-in
            order.
        shuffle: Whether the built-in order is a new permutation in each epoch; otherwise it is the order of the data.
        drop_last: Whether samples that do not fill a batch on every rank are left out.
        num_replicas: Number of data-parallel ranks; None: read from the process group at the start of an epoch.
        rank: This rank, with the same default.
        mesh: In place of both, a 1-D `DeviceMesh` of the data-parallel ranks.
        seed: Seed of the order, 0 to 2**64 - 1.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A number that is not allowed.

    Attributes:
        draws: For each sample of the latest batch its position in the epoch's order, where that is a `sampler`'s; else
            None, as no sample comes twice. A loader seeds the random numbers of repeated samples by it.

    >>> list(DistributedBatchSampler(5, 2, shuffle=False))
    [[0, 1], [2, 3], [4]]
    >>> list(DistributedBatchSampler(5, 2, shuffle=False, drop_last=True))
    [[0, 1], [2, 3]]
    """

    def __init__(
        self,
        n_samples: int,
        batch_size: int,
        *,
        sampler: Iterable[int] | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        num_replicas: int | None = None,
        rank: int | None = None,
        mesh: Mesh | None = None,
        seed: int = 0,
    ) -> None:
        self.n_samples = checked_int("n_samples", n_samples, 0, "give len(dataset)")
        self.batch_size = checked_int("batch_size", batch_size, 1)
        self._ranks = Ranks(num_replicas, rank, mesh)
        if sampler is not None and (isinstance(sampler, Iterator) or not isinstance(sampler, Iterable)):
            raise TypeError(f"sampler must be an iterable that can be read in every epoch, got {sampler!r}")
        self.sampler, self.shuffle, self.drop_last, self.seed = sampler, shuffle, drop_last, seed_int(seed)
        self._cursor = EpochCursor()  # its positions count samples of all ranks
        self._stamp = ""  # the fingerprint of the epoch that is iterated, which every batch's state holds
        self._listed: tuple[int, npt.NDArray[np.int64]] | None = None  # an epoch and its order
        self.draws: range | None = None

    @property
    def epoch(self) -> int:
        """The epoch of the latest iteration, or of the next one."""
        return self._cursor.epoch

    @property
    def num_replicas(self) -> int:
        """Number of data-parallel ranks, as of now."""
        return self._ranks.world_size()

    @property
    def rank(self) -> int:
        """This rank, as of now."""
        return self._ranks.current()[1]

    def __len__(self) -> int:
        """Batches of the whole epoch on each rank."""
        return self._steps(0, self._ranks.world_size())

    @property
    def remaining(self) -> int:
        """Batches that are left of the epoch, at the present number of ranks."""
        return self._steps(self._cursor.position, self._ranks.world_size())

    def __iter__(self) -> Iterator[list[int]]:
        world, rank = self._ranks.current()
        if world > 1:
            refuse_sharding_again("num_replicas=1 and rank=0")
        iteration, start, end = self._cursor.begin(), self._cursor.position, self._end(self.epoch)
        self._stamp = self._epoch_fingerprint(self.epoch)
        steps = self._steps(start, world)
        if end and not steps and not start:
            raise ValueError(
                f"drop_last=True leaves no batch: {end} samples do not fill {world} batches of {self.batch_size}; "
                "use a smaller batch_size, or drop_last=False"
            )
        order = self._order()
        together = max(1, _AHEAD // (self.batch_size * world))
        for first in range(0, steps, together):
            spans = [
                step_span(step, start, end, self.batch_size, world, drop_last=self.drop_last)
                for step in range(first, min(first + together, steps))
            ]
            begin = spans[0][0]
            ids = order(begin, spans[-1][1]).tolist()
            for low, high in spans:
                self._cursor.move(iteration, high)
                own = equal_share(low, high, rank, world)
                if high - low < world:
                    own = self._repeated(low, high, rank, world, ids, begin)
                self.draws = None if self.sampler is None else range(*own)
                yield ids[own[0] - begin : own[1] - begin]

    def _repeated(self, low: int, high: int, rank: int, world: int, ids: list[int], begin: int) -> tuple[int, int]:
        """Fewer samples than ranks: each rank gets one, and some come twice."""
        count = high - low
        again = [ids[low - begin + other % count] for other in range(count, world)]
        message = f"the last step has {count} samples for {world} ranks: {len(again)} come again"
        warnings.warn(f"{message}, {again[:10]}{' ...' if len(again) > 10 else ''}", stacklevel=3)
        own = low + rank % count
        return own, own + 1

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch to iterate over next; a loaded position holds for its own epoch only."""
        if self._cursor.choose(checked_int("epoch", epoch, 0)):
            self._set_inner_epoch(epoch)

    def _set_inner_epoch(self, epoch: int) -> None:
        if callable(set_epoch := getattr(self.sampler, "set_epoch", None)):
            set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position, in samples of all ranks, behind the last batch that was taken; true at any moment."""
        return {
            "version": STATE_VERSION,
            "seed": self.seed,
            "epoch": self.epoch,
            "position": self._cursor.position,
            "fingerprint": self._stamp if self._cursor.iteration else self._epoch_fingerprint(self.epoch),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume where a state was taken, at any number of ranks.

        A state of an older epoch than a later `set_epoch` chose is left alone.

        Raises:
            TypeError: It is no state.
            ValueError: It is of other data, another order, batch size or seed, or no such state.
        """
        own: dict[str, Any] = {"version": STATE_VERSION, "seed": self.seed}
        check_state(state, type(self).__name__, own, ("epoch", "position"), ("fingerprint",))
        epoch, position = state["epoch"], state["position"]
        own["fingerprint"] = self._epoch_fingerprint(epoch)
        check_state(state, type(self).__name__, own, ("epoch", "position"))
        if self._cursor.overrules(epoch):
            return
        self._set_inner_epoch(epoch)
        if position > (end := self._end(epoch)):
            self._set_inner_epoch(self.epoch)
            raise ValueError(f"state['position'] must be 0 to {end}, the places of an epoch, got {position}")
        self._cursor.resume(epoch, position)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_cursor": copy(self._cursor)}

    def __copy__(self) -> DistributedBatchSampler:
        other = object.__new__(type(self))
        vars(other).update(self.__getstate__(), sampler=copy(self.sampler))  # which has an epoch of its own
        return other

    @property
    def fingerprint(self) -> str:
        """Stands for the samples, the batch size, the order and the seed."""
        return self._fingerprint_with(own_fingerprint(self.sampler))

    def _epoch_fingerprint(self, epoch: int) -> str:
        """What states hold: a sampler's schedule may change behind their epoch."""
        of = getattr(self.sampler, "epoch_fingerprint", None)
        return self._fingerprint_with(of(epoch)) if callable(of) else self.fingerprint

    def _fingerprint_with(self, inner: str | None) -> str:
        order = f"shuffle {bool(self.shuffle)}" if self.sampler is None else f"{type(self.sampler).__name__} {inner}"
        parts = f"{self.n_samples} {self.batch_size} {bool(self.drop_last)} {order} {self.seed}"
        return hashlib.blake2b(parts.encode(), digest_size=8).hexdigest()

    @property
    def order_digest(self) -> str:
        """Stands for an order that says nothing of itself; ranks compare it before an epoch."""
        if self.sampler is None or own_fingerprint(self.sampler) is not None:
            return ""
        return hashlib.blake2b(self._list(self.epoch).tobytes(), digest_size=8).hexdigest()

    def _steps(self, start: int, world: int) -> int:
        return n_steps(self._end(self.epoch) - start, self.batch_size, world, drop_last=self.drop_last)

    def _end(self, epoch: int) -> int:
        if self.sampler is None:
            return self.n_samples
        return int(self.sampler.epoch_length) if self._has_slices else len(self._list(epoch))  # type: ignore[attr-defined]

    @property
    def _has_slices(self) -> bool:
        return hasattr(self.sampler, "take") and hasattr(self.sampler, "epoch_length")

    def _order(self) -> Any:
        if self.sampler is None:
            # A shuffle of an epoch is worked out in microseconds, or in no more than a sort of 65,536 words.
            return Shuffle(self.n_samples, self.seed, self.epoch).take if self.shuffle else np.arange
        if self._has_slices:
            return self.sampler.take  # type: ignore[attr-defined]
        listed = self._list(self.epoch)
        return lambda start, stop: listed[start:stop]

    def _list(self, epoch: int) -> npt.NDArray[np.int64]:
        if self._listed is None or self._listed[0] != epoch:
            self._listed = epoch, np.fromiter(map(operator.index, self.sampler or ()), np.int64)
        return self._listed[1]


def n_steps(left: int, batch_size: int, world: int, *, drop_last: bool = False) -> int:
    """How many steps `left` samples make."""
    return left // (batch_size * world) if drop_last else -(-left // (batch_size * world))


def step_span(
    step: int, start: int, end: int, batch_size: int, world: int, *, drop_last: bool = False
) -> tuple[int, int]:
    """The places of a step, counted from `start`: the first, and the one after the last.

    All steps but the last hold `batch_size * world` samples. Where the last one would leave ranks without a sample, the
    last two share theirs.
    """
    whole = batch_size * world
    begin = start + step * whole
    if drop_last:
        return begin, begin + whole
    steps = n_steps(end - start, batch_size, world)
    rest = end - start - (steps - 1) * whole
    if rest < world and steps > 1 and batch_size > 1 and step >= steps - 2:
        first = start + (steps - 2) * whole
        middle = first + (end - first) // 2
        return (first, middle) if step == steps - 2 else (middle, end)
    return begin, min(begin + whole, end)


def equal_share(start: int, stop: int, number: int, count: int) -> tuple[int, int]:
    """The share of one of `count` readers in a range; equal up to one, and so empty in a range that is shorter."""
    n = stop - start
    return start + n * number // count, start + n * (number + 1) // count
