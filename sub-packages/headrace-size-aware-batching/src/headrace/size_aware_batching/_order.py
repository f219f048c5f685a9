"""The order of samples: sorted by size, in strata, shuffled by a key, or as a user's sampler gives it."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from operator import index
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import SequentialSampler

from headrace.size_aware_batching._collectives import gather
from headrace.size_aware_batching._random import LONGEST_ROW, derive, shuffle_rows, splitmix64
from headrace.size_aware_batching._ranks import Mesh

SORTED_AT_ONCE = 2**18  # samples
COUNTED = 2**16  # sizes below this are sorted by counting


def index_type(n_samples: int) -> type[np.signedinteger[Any]]:
    """Return the smallest integer type that holds the indices of so many samples."""
    return np.int32 if n_samples < 2**31 else np.int64


def sorted_by_size(sizes: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the indices of the samples by size, largest first, equal sizes in their order, and the sorted sizes.

    Small integers are sorted by counting, a chunk at a time, with 4 bytes a sample and a chunk's worth beside them; the
    sorted ones have two bytes each.

    >>> order, descending = sorted_by_size(np.array([3, 7, 3, 9]))
    >>> order.tolist(), descending.tolist(), descending.dtype
    ([3, 1, 0, 2], [9, 7, 3, 3], dtype('uint16'))
    """
    kind = index_type(len(sizes))
    if not len(sizes) or sizes.dtype.kind not in "iu" or sizes.max() >= COUNTED:
        negated = -sizes.astype(np.float64 if sizes.dtype.kind == "f" else np.int64)
        order = np.argsort(negated, kind="stable").astype(kind)
        return order, sizes[order]
    largest = int(sizes.max())
    order = np.empty(len(sizes), kind)
    chunks = [slice(start, start + SORTED_AT_ONCE) for start in range(0, len(sizes), SORTED_AT_ONCE)]
    counts = np.zeros(largest + 1, np.int64)
    for chunk in chunks:
        counts += np.bincount(sizes[chunk], minlength=len(counts))
    following = places_before(counts)  # where the next sample of each size goes
    for chunk in chunks:
        part = (largest - sizes[chunk]).astype(np.uint16)
        ranked = np.argsort(part, kind="stable")
        values = largest - part[ranked].astype(np.int64)
        present = np.bincount(values, minlength=len(counts))
        order[(following - places_before(present))[values] + np.arange(len(values))] = ranked + chunk.start
        following += present
    return order, np.repeat(np.arange(len(counts), dtype=np.uint16)[::-1], counts[::-1])


def places_before(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how many samples of larger sizes there are, from the count of each size."""
    return np.concatenate([[0], np.cumsum(counts[::-1])[:-1]])[::-1].copy()


@dataclass(frozen=True)
class Strata:
    """Samples sorted by size in strata, one sample of each stratum for every window.

    Stratum j is ``n_windows`` neighbours in the sorted order. So all windows have the same spread of sizes, each can be
    planned alone, and none of its samples is larger than the largest of the sample's stratum.
    """

    n_samples: int
    n_windows: int

    @property
    def depth(self) -> int:
        """Number of strata, the samples in a full window."""
        return -(-self.n_samples // self.n_windows)

    @property
    def n_full(self) -> int:
        """Number of windows that have a sample of the last stratum: the first ones."""
        return self.n_samples - (self.depth - 1) * self.n_windows

    def start(self, window: int) -> int:
        """Return the number of samples in the windows before this one."""
        return window * (self.depth - 1) + min(window, self.n_full)

    def window_of(self, position: int) -> int:
        """Return the window that holds the sample at a position of the epoch."""
        full = self.n_full * self.depth
        if position < full or self.depth == 1:
            return position // self.depth
        return self.n_full + (position - full) // (self.depth - 1)

    def firsts(self) -> NDArray[np.int64]:
        """Return the place, in the sorted order, of each stratum's first sample, shape ``[depth]``."""
        return np.arange(self.depth, dtype=np.int64) * self.n_windows

    def shifts(self, key: int) -> NDArray[np.int64]:
        """Return each stratum's keyed rotation, shape ``[depth]``; the last stratum, which may be short, has none."""
        words = splitmix64(np.arange(self.depth, dtype=np.uint64) ^ derive(key)) >> np.uint64(32)
        shifts = ((words * np.uint64(self.n_windows)) >> np.uint64(32)).astype(np.int64)
        shifts[-1] = 0
        return shifts

    def places(
        self, first: int, stop: int, shifts: NDArray[np.int64], sequence: NDArray[np.int64] | None = None
    ) -> NDArray[np.int64]:
        """Return the places in the sorted order of the samples of some windows, shape ``[windows, strata]``.

        ``sequence`` lists the strata that are asked for, None for all. Windows from ``n_full`` on have no sample of the
        last stratum; the place given for it is valid, but not theirs.
        """
        firsts = self.firsts()
        if sequence is not None:
            shifts, firsts = shifts[sequence], firsts[sequence]
        places = np.arange(first, stop, dtype=np.int64)[:, None] + shifts
        places -= (places >= self.n_windows) * np.int64(self.n_windows)
        places += firsts
        np.minimum(places, self.n_samples - 1, out=places)
        return places


UNITS = 2**19  # of a budget, in which columns are compared


def kd_order(
    sizes: NDArray[Any], budgets: Sequence[float], strata: Strata, ranked: bool = True
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Order samples ``[n, k]`` so that those of a stratum are alike in all columns; return each stratum's maximum, too.

    As in a k-d tree (Bentley, "Multidimensional binary search trees used for associative searching", 1975): the list is
    halved again and again, at a multiple of the stratum, each part by the column in which its shares of the budget
    spread most. ``ranked`` strata follow by how much they take; else neighbours in the tree stay neighbours.
    """
    n_samples, leaf = strata.n_samples, strata.n_windows
    shares = np.empty(sizes.shape, np.int32)
    for column, budget in enumerate(budgets):
        shares[:, column] = np.minimum(np.ceil(sizes[:, column] * (UNITS / max(budget, 1))), UNITS)
    order = np.arange(n_samples, dtype=index_type(n_samples))
    cuts = np.array([0, n_samples])
    while (lengths := np.diff(cuts)).max() > leaf:
        sorted_shares = shares[order]
        lowest = np.minimum.reduceat(sorted_shares, cuts[:-1], axis=0)
        spread = np.maximum.reduceat(sorted_shares, cuts[:-1], axis=0) - lowest
        part = np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)
        chosen = spread.argmax(axis=1)[part]
        key = (part << 20) | (UNITS - np.take_along_axis(sorted_shares, chosen[:, None], axis=1)[:, 0])
        order = order[np.argsort(key, kind="stable")]
        halves = cuts[:-1] + np.minimum(-(-lengths // leaf) // 2 * leaf, lengths)
        cuts = np.unique(np.concatenate([cuts, halves]))
    begins = strata.firsts()
    largest = np.maximum.reduceat(sizes[order], begins, axis=0)
    if largest.dtype.kind != "f":
        largest = largest.astype(np.int64)
    if not ranked:
        return order, largest
    # Strata that take most come first, as greedy balancing wants them; the last, which may be short, stays the last.
    totals = np.maximum(largest.sum(axis=0, dtype=np.float64), 1)
    rank = np.argsort(-(largest / totals).max(axis=1)[:-1], kind="stable")
    whole = len(rank) * leaf
    order[:whole] = order[:whole].reshape(-1, leaf)[rank].ravel()
    return order, largest[np.append(rank, len(rank))]


@dataclass(frozen=True)
class ShuffledOrder:
    """A keyed shuffle readable from any position: neighbours go to different windows, each of which is shuffled."""

    n_samples: int
    kept: NDArray[Any] | None = None

    def take(self, epoch_key: int, start: int, stop: int) -> NDArray[Any]:
        """Return the samples at these positions of the epoch."""
        stop = min(stop, self.n_samples)
        if start >= stop:
            return np.zeros(0, np.int64)
        strata = Strata(self.n_samples, -(-self.n_samples // LONGEST_ROW))
        shifts = strata.shifts(int(derive(epoch_key, 3)[0]))
        first, last = strata.window_of(start), strata.window_of(stop - 1)
        parts = []
        for begin, end, depth in (
            (first, min(last + 1, strata.n_full), strata.depth),
            (max(first, strata.n_full), last + 1, strata.depth - 1),
        ):
            if begin < end and depth:
                places = strata.places(begin, end, shifts)[:, :depth]
                keys = derive(epoch_key, np.arange(begin, end, dtype=np.uint64), 4)
                rows = np.arange(len(keys), dtype=np.int64)[:, None] * depth
                parts.append(places.ravel()[(shuffle_rows(keys, depth) + rows).ravel()])
        offset = strata.start(first)
        taken = np.concatenate(parts)[start - offset : stop - offset]
        return taken if self.kept is None else self.kept[taken]


@dataclass(frozen=True)
class SliceOrder:
    """An order given by a function from two positions to the samples between them."""

    n_samples: int
    give: Callable[[int, int], NDArray[Any]]
    epoch: Any = None  # of a sampler that is asked; another one makes this another order

    def take(self, epoch_key: int, start: int, stop: int) -> NDArray[Any]:  # noqa: ARG002  # the function knows the epoch
        """Return the samples at these positions."""
        return self.give(start, min(stop, self.n_samples))


Order: TypeAlias = ShuffledOrder | SliceOrder  # the samples of an epoch, in order


def natural_order(n_samples: int, kept: NDArray[Any] | None) -> SliceOrder:
    """Return the samples in their own order: 0, 1, 2, ... or those that were kept."""
    return SliceOrder(n_samples, np.arange if kept is None else lambda start, stop: kept[start:stop])


PIECE = 2**20
COMPARED = 2**16  # positions of an order that ranks compare


class SamplerOrder:
    """Order read from a user's sampler; the sampler handles epochs.

    One with ``take(start, stop)`` is asked for the windows that are needed; its epoch has ``epoch_length``,
    ``total_size`` or ``len`` positions. ``kept`` are the samples that are planned, ascending; None for all.
    """

    def __init__(self, sampler: Iterable[int], kept: NDArray[np.int64] | None, n_samples: int) -> None:
        if isinstance(sampler, np.ndarray | torch.Tensor):
            sampler = sampler.tolist()  # numpy's take is another function
        if not hasattr(sampler, "take") and not hasattr(sampler, "__iter__"):
            raise TypeError(f"sampler must be an iterable of indices, got {type(sampler).__name__}")
        if isinstance(sampler, Iterator):
            raise TypeError(
                f"sampler must be an iterable that can be read again in every epoch, got the iterator "
                f"{type(sampler).__name__}: give a list or a torch sampler"
            )
        replicas = getattr(sampler, "num_replicas", 1)
        if not hasattr(sampler, "take") and replicas > 1:
            raise ValueError(
                f"sampler must give the samples of all ranks, got a {type(sampler).__name__} for one rank of "
                f"{replicas}: give it num_replicas=1, rank=0; the batch sampler distributes the batches"
            )
        self.sampler: Any = sampler
        self.kept = kept
        self.n_samples = n_samples
        self._positions: NDArray[Any] | None = None
        self._order: SliceOrder | None = None  # over these positions

    @property
    def fingerprint(self) -> str:
        """The sampler's own ``fingerprint``, or a best-effort hash of its values, its class, its length and seed."""
        own = getattr(self.sampler, "fingerprint", None)
        return self._best_effort if own is None else str(own)

    def epoch_fingerprint(self, epoch: int) -> str:
        """The fingerprint of what decides the order up to the end of an epoch, if the sampler can tell."""
        own = getattr(self.sampler, "epoch_fingerprint", None)
        return str(own(epoch)) if callable(own) else self.fingerprint

    @cached_property
    def _best_effort(self) -> str:
        known = f"{type(self.sampler).__name__} {self._length()} {getattr(self.sampler, 'seed', None)}"
        digest = hashlib.blake2b(known.encode(), digest_size=16)
        if isinstance(self.sampler, Sequence):
            digest.update(np.asarray(self.sampler).astype("<i8").tobytes())
        return digest.hexdigest()

    @property
    def knows_epochs(self) -> bool:
        """Whether the order of any epoch can be read at any time."""
        fixed = isinstance(self.sampler, Sequence | SequentialSampler)
        return fixed or hasattr(self.sampler, "take") or hasattr(self.sampler, "set_epoch")

    def refuse_other_ranks(self, num_replicas: int) -> None:
        """Refuse a sampler that was made for other ranks, or that starts in the middle of an epoch."""
        own = getattr(self.sampler, "num_replicas", 1)
        if own not in (1, num_replicas):
            raise ValueError(
                f"sampler must be made for 1 or {num_replicas} ranks as the batch sampler is, got a "
                f"{type(self.sampler).__name__} with num_replicas={own}: give num_replicas and rank to the batch "
                "sampler only"
            )
        begin = getattr(self.sampler, "position", 0)
        if isinstance(begin, Integral) and begin:
            raise ValueError(
                f"sampler must start at the beginning of the epoch, got a {type(self.sampler).__name__} at position "
                f"{begin}: resume with load_state_dict of the batch sampler, and not of its sampler"
            )

    def refuse_different_orders(self, mesh: Mesh | None) -> None:
        """Compare the order across ranks, where the sampler has no fingerprint that stands for it."""
        if getattr(self.sampler, "fingerprint", None) is not None:
            return
        order = self.order()
        sample = np.asarray(order.take(0, 0, min(order.n_samples, COMPARED))).astype("<i8")
        found = hashlib.blake2b(f"{order.n_samples} ".encode() + sample.tobytes(), digest_size=16).hexdigest()
        name = type(self.sampler).__name__
        cure = (
            "give it generator=torch.Generator().manual_seed(seed) with one seed on all ranks, or leave out sampler, "
            "since shuffle=True gives all ranks one random order"
        )
        gathered = gather(found, mesh)
        if gathered is None or len(gathered) < 2:
            if getattr(self.sampler, "generator", self) is None:
                raise ValueError(
                    f"sampler must give all ranks the same order, got a {name} without a generator, which draws from "
                    f"the random state of each process: {cure}"
                )
        elif len(set(gathered)) > 1:
            other = next(rank for rank, value in enumerate(gathered) if value != gathered[0])
            raise ValueError(
                f"sampler must give all ranks the same order, got a {name} whose order on rank {other} differs from "
                f"that on rank 0: {cure}"
            )

    def refuse_resume(self) -> None:
        """Refuse to resume inside an order that cannot be read again."""
        if not self.knows_epochs:
            raise ValueError(
                f"sampler must have set_epoch(epoch) or take(start, stop) to resume within an epoch, got a "
                f"{type(self.sampler).__name__}, whose order cannot be read again: leave out sampler, or give one "
                "that has either"
            )

    @contextmanager
    def at_epoch(self, epoch: int, current: int) -> Iterator[None]:
        """Read the order of another epoch for a while; the current one is the same afterwards."""
        if epoch == current:
            yield
            return
        if not self.knows_epochs:
            raise ValueError(
                f"epoch must be {current} for this sampler, got {epoch}: {type(self.sampler).__name__} has neither "
                "set_epoch(epoch) nor take(start, stop), so the order of other epochs is not known"
            )
        read = self._positions, self._order
        self.finished()
        set_epoch = getattr(self.sampler, "set_epoch", None)
        restored = getattr(self.sampler, "epoch", current)
        try:
            if set_epoch is not None:
                set_epoch(epoch)
            yield
        finally:
            if set_epoch is not None:
                set_epoch(restored)
            self._positions, self._order = read

    def order(self) -> SliceOrder:
        """Return the order of the current epoch; the same object until the sampler is read again."""
        if self.kept is None and hasattr(self.sampler, "take"):
            length, epoch = self._length(), getattr(self.sampler, "epoch", None)
            if self._order is None or (self._order.n_samples, self._order.epoch) != (length, epoch):
                self._order = SliceOrder(length, self._take, epoch)
            return self._order
        if self._order is None:
            positions = self._positions = self._read() if self._positions is None else self._positions
            self._order = SliceOrder(len(positions), lambda start, stop: positions[start:stop])
        return self._order

    def finished(self) -> None:
        """Forget the order: the next iteration reads the sampler again."""
        self._positions = self._order = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_order": None}

    def set_epoch(self, epoch: int, changed: bool) -> None:
        """Pass the epoch on to a sampler that has ``set_epoch``; any other is read anew when the epoch changes."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)
            changed = True
        if changed:
            self.finished()

    def _length(self) -> int:
        for name in ("epoch_length", "total_size"):
            if hasattr(self.sampler, name):
                return int(getattr(self.sampler, name))
        return len(self.sampler)

    def _take(self, start: int, stop: int) -> NDArray[Any]:
        taken = self._checked(np.asarray(self.sampler.take(start, stop)))
        if taken.shape != (stop - start,):
            raise ValueError(
                f"sampler.take({start}, {stop}) must return shape ({stop - start},), got {taken.shape}: the epoch has "
                f"{self._length()} positions by the sampler's epoch_length, total_size or len"
            )
        return taken

    def _read(self) -> NDArray[Any]:
        if hasattr(self.sampler, "take"):
            length = self._length()
            parts = [self._take(start, min(start + PIECE, length)) for start in range(0, length, PIECE)]
            taken = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        else:
            taken = self._checked(np.fromiter(map(index, self.sampler), np.int64))
        if self.kept is None:
            return taken
        known = np.zeros(self.n_samples, bool)
        known[self.kept] = True
        return taken[known[taken]]

    def _checked(self, taken: NDArray[Any]) -> NDArray[Any]:
        if len(taken) and not (taken.min() >= 0 and taken.max() < self.n_samples):
            bad = taken[(taken < 0) | (taken >= self.n_samples)][0]
            raise IndexError(f"sampler must give indices from 0 to {self.n_samples - 1}, got {bad}")
        return taken
