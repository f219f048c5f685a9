"""The order that a user's sampler gives: its epochs, its fingerprint, the same on every rank."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cached_property
from numbers import Integral
from operator import index
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import SequentialSampler

from headrace.size_aware_batching.planning.gather import gather
from headrace.size_aware_batching.planning.order import SliceOrder
from headrace.size_aware_batching.planning.pieces import Pieces
from headrace.size_aware_batching.planning.ranks import Mesh

PIECE = 2**20
COMPARED = 2**16  # positions of an order that ranks compare

# What the fingerprint of a mixture covers, as it says itself, and the usual cause of another one.
OF_A_MIXTURE = "its data, weights, semantics, sizes, epoch_length, drop_last or an earlier part of its schedule"
REWEIGHTED = (
    "the state holds a reweight of its run at draw {draw:,} and applies it by itself: construct the mixture with "
    "the weights of the run's beginning"
)


class SamplerOrder:
    """Order read from a user's sampler; the sampler handles epochs.

    One with ``take(start, stop)`` is asked for the windows that are needed; its epoch has ``epoch_length``,
    ``total_size`` or ``len`` positions. ``kept`` are the samples that are planned, ascending; None for all. With
    ``pieces`` the order is one of pieces, those of a sample where the sample stands. Either reads the whole epoch.
    """

    def __init__(
        self,
        sampler: Iterable[int],
        kept: NDArray[np.int64] | None,
        n_samples: int,
        pieces: Pieces | None = None,
    ) -> None:
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
        self.kept, self.pieces = kept, pieces
        self.n_samples = n_samples
        self._positions: tuple[NDArray[Any], NDArray[Any] | None] | None = None  # samples, and their draws if others
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

    @property
    def epochs_differ(self) -> bool:
        """Whether the sampler shuffles by epoch: without ``set_epoch`` each epoch has the same order."""
        return hasattr(self.sampler, "set_epoch") and getattr(self.sampler, "shuffle", True) is not False

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
        if self.kept is None and self.pieces is None and hasattr(self.sampler, "take"):
            length, epoch = self._length(), getattr(self.sampler, "epoch", None)
            if self._order is None or (self._order.n_samples, self._order.epoch) != (length, epoch):
                self._order = SliceOrder(length, self._take, epoch)
            return self._order
        if self._order is None:
            positions, draws = self._positions = self._read() if self._positions is None else self._positions
            self._order = SliceOrder(
                len(positions),
                lambda start, stop: positions[start:stop],
                draw=int if draws is None else lambda place: int(draws[place]),
            )
        return self._order

    @property
    def epoch_length(self) -> int:
        """Draws of an epoch of a mixture."""
        return self._length()

    @property
    def mixes(self) -> bool:
        """Whether the sampler has weights that a run may change."""
        own = self.sampler
        reads = hasattr(own, "take") and callable(getattr(own, "set_epoch", None))
        return reads and hasattr(own, "reweights") and callable(getattr(own, "reweighted", None))

    @property
    def reweights(self) -> list[Any]:
        """Changes of a mixture's weights that runs have made, as the mixture has them."""
        return list(self.sampler.reweights) if self.mixes else []

    def set_reweights(self, changes: list[Any]) -> None:
        """Give a mixture the weights of a run."""
        if not self.mixes:
            raise ValueError(
                f"state is of a run whose mixture got other weights, and sampler is a {type(self.sampler).__name__}: "
                "give the WeightedDistributedSampler of that run"
            )
        self.sampler.reweights = changes
        self.finished()

    def sampler_with(self, changes: list[Any], epoch: int) -> Any:
        """Return the sampler as it was with these changes of its weights; another one reads that epoch alone."""
        if changes == self.reweights:
            return self.sampler
        other = copy(self.sampler)
        other.reweights = changes
        other.set_epoch(epoch)
        return other

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

    def _read(self) -> tuple[NDArray[Any], NDArray[Any] | None]:
        if hasattr(self.sampler, "take"):
            length = self._length()
            parts = [self._take(start, min(start + PIECE, length)) for start in range(0, length, PIECE)]
            taken = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        else:
            taken = self._checked(np.fromiter(map(index, self.sampler), np.int64))
        draws = None
        if self.kept is not None:
            known = np.zeros(self.n_samples, bool)
            known[self.kept] = True
            draws = np.flatnonzero(known[taken])
            taken = taken[draws]
        if self.pieces is not None:
            counts = self.pieces.counts(taken)
            draws = np.repeat(np.arange(len(taken)) if draws is None else draws, counts)
            taken = self.pieces.of(taken)
        return taken, draws

    def _checked(self, taken: NDArray[Any]) -> NDArray[Any]:
        if len(taken) and not (taken.min() >= 0 and taken.max() < self.n_samples):
            bad = taken[(taken < 0) | (taken >= self.n_samples)][0]
            raise IndexError(f"sampler must give indices from 0 to {self.n_samples - 1}, got {bad}")
        return taken
