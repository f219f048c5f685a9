"""The order that a user's sampler gives: its epochs, its fingerprint, the same on every rank."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from functools import cached_property, partial
from numbers import Integral
from operator import index
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import SequentialSampler

from headrace.size_aware_batching._shared.digest import array_digest, text_digest
from headrace.size_aware_batching._shared.mixture import NOT_MIXED, Mixed, PossibleMixture
from headrace.size_aware_batching._shared.ranks import Mesh
from headrace.size_aware_batching._shared.run import NoSampler
from headrace.size_aware_batching.planning.gather import gather
from headrace.size_aware_batching.planning.order import SliceOrder, listed_order
from headrace.size_aware_batching.planning.pieces import Pieces

READ_AT_ONCE = 2**20
COMPARED = 2**16  # positions of an order that ranks compare


class NoUserSampler(NoSampler):
    """In place of `UserSampler` if there is no ``sampler``: the batches are shuffled by a key."""

    sampler = None
    is_mixture = False
    knows_epochs = epochs_differ = True
    first_epoch = 0
    fingerprint = None
    mixed = NOT_MIXED

    def of_epoch(self, _epoch: int, _n_samples: int, _mixed: Mixed) -> None:
        """There is no order that was given."""

    def epoch_fingerprint(self, _epoch: int, _mixed: Mixed) -> None:
        """There is no order that was given."""


class UserSampler(PossibleMixture):
    """The order that a user's sampler gives, epoch by epoch.

    `of_epoch` returns a view of one epoch, which stays the same when the sampler goes to another one. A sampler with
    ``take(start, stop)`` is read in slices; its epoch has ``epoch_length``, ``total_size`` or ``len`` positions. A
    sampler that has neither ``take`` nor ``set_epoch``, such as a ``RandomSampler``, has one order until it is read
    again.
    """

    is_given = True

    def __init__(self, sampler: Iterable[int], n_samples: int) -> None:
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
        super().__init__(sampler)
        self._n_samples = n_samples  # of the dataset
        self.epoch = 0  # that the sampler was set to
        self._listed: NDArray[Any] | None = None  # what was read in this epoch, where it cannot be sliced
        self._views: dict[int, tuple[Any, SliceOrder]] = {}  # by epoch, and what they were made for

    def of_epoch(self, epoch: int, n_samples: int, mixed: Mixed) -> SliceOrder:
        """Return the order of an epoch; the same object until the sampler is read again.

        Args:
            epoch: The current one, or any one of a sampler that knows its epochs.
            n_samples: Number of samples that the sampler may name.
            mixed: Settings of a mixture, which may be others than its present ones.
        """
        if n_samples < self._n_samples and mixed.mixture is None:
            raise ValueError(
                f"sampler must tell the order of the first {n_samples} samples, before the data grew, as a "
                f"WeightedDistributedSampler does, got {type(self.sampler).__name__}: look up steps of that time with "
                "the sampler of that time"
            )
        if epoch != self.epoch and not self.knows_epochs:
            raise ValueError(
                f"epoch must be {self.epoch} for this sampler, got {epoch}: {type(self.sampler).__name__} has neither "
                "set_epoch(epoch) nor take(start, stop), so the order of other epochs is not known"
            )
        slices, other = hasattr(self.sampler, "take"), self._mixed(mixed, epoch)
        asked = getattr(self.sampler, "epoch", None) if slices and epoch == self.epoch and other is None else epoch
        made_for = (n_samples, self._length(other) if slices else None, asked, mixed)
        if epoch not in self._views or self._views[epoch][0] != made_for:
            if slices:
                view = SliceOrder(self._length(other), partial(self._take, epoch, n_samples, other))
            else:
                listed = self._read(epoch, n_samples)
                view = SliceOrder(len(listed), lambda start, stop: listed[start:stop])
            recent = list(self._views.items())[-2:]
            self._views = {**dict(recent), epoch: (made_for, view)}
        return self._views[epoch][1]

    @property
    def fingerprint(self) -> str:
        """The sampler's own ``fingerprint``, or a best-effort hash of its values, its class, its length and seed."""
        own = getattr(self.sampler, "fingerprint", None)
        return self._best_effort if own is None else str(own)

    def epoch_fingerprint(self, epoch: int, mixed: Mixed) -> str:
        """The fingerprint of what decides the order up to the end of an epoch, if the sampler can tell."""
        sampler = self.sampler if mixed == self.mixed else self._mixed(mixed, epoch)
        own = getattr(sampler, "epoch_fingerprint", None)
        return str(own(epoch)) if callable(own) else self.fingerprint

    @cached_property
    def _best_effort(self) -> str:
        known = f"{type(self.sampler).__name__} {self._length()} {getattr(self.sampler, 'seed', None)}"
        listed = array_digest(np.asarray(self.sampler)) if isinstance(self.sampler, Sequence) else ""
        return text_digest(f"{known} {listed}")

    @property
    def knows_epochs(self) -> bool:
        """Whether the order of any epoch can be read at any time."""
        fixed = isinstance(self.sampler, Sequence | SequentialSampler)
        return fixed or hasattr(self.sampler, "take") or hasattr(self.sampler, "set_epoch")

    @property
    def epochs_differ(self) -> bool:
        """Whether the sampler shuffles by epoch: without ``set_epoch`` each epoch has the same order."""
        return hasattr(self.sampler, "set_epoch") and getattr(self.sampler, "shuffle", True) is not False

    def check(self, epoch: int, world: int, mesh: Mesh | None) -> None:
        """Refuse a sampler that was made for other ranks, or whose order differs across ranks."""
        self._refuse_other_ranks(world)
        if world > 1 and getattr(self.sampler, "fingerprint", None) is None:
            self._refuse_different_orders(self.of_epoch(epoch, self._n_samples, self.mixed), mesh)

    def _refuse_other_ranks(self, num_replicas: int) -> None:
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

    def _refuse_different_orders(self, order: SliceOrder, mesh: Mesh | None) -> None:
        """Compare the order across ranks."""
        found = f"{order.n_samples} {array_digest(np.asarray(order.take(0, min(order.n_samples, COMPARED))))}"
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
    def _at(self, epoch: int) -> Iterator[None]:
        """Set the sampler to an epoch for a moment; it is the same afterwards."""
        set_epoch = getattr(self.sampler, "set_epoch", None)
        if epoch == self.epoch or set_epoch is None:
            yield
            return
        present = getattr(self.sampler, "epoch", self.epoch)
        try:
            set_epoch(epoch)
            yield
        finally:
            set_epoch(present)

    @property
    def epoch_length(self) -> int:
        """Draws of an epoch of a mixture."""
        return self._length()

    @property
    def first_epoch(self) -> int:
        """The first epoch whose order is that of the present data: where those of a mixture grew, or 0."""
        return int(getattr(self.sampler, "first_epoch", 0))

    def _mixed(self, mixed: Mixed, epoch: int) -> Any:
        """Return a mixture as it is with other settings, for one epoch; None of any other sampler."""
        if not self.is_mixture:
            return None
        same = mixed.mixture in (None, self.mixed.mixture)
        other = copy(self.sampler) if same else self.sampler.at_mixture(mixed.mixture)
        other.reweights = list(mixed.reweights)
        other.set_epoch(epoch)
        return other

    def finished(self) -> None:
        """Forget the order of this epoch: the next iteration reads the sampler again."""
        self._listed = None
        self._views.pop(self.epoch, None)

    def __getstate__(self) -> dict[str, Any]:
        # A sampler has an epoch of its own; what has none, such as a long list, is shared.
        sampler = copy(self.sampler) if hasattr(self.sampler, "set_epoch") else self.sampler
        return self.__dict__ | {"_views": {}, "sampler": sampler}

    def set_epoch(self, epoch: int, changed: bool) -> None:
        """Pass the epoch on to a sampler that has ``set_epoch``; any other is read anew when the epoch changes."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)
            changed = True
        if changed:
            self.finished()
            self.epoch = epoch

    def _length(self, other: Any = None) -> int:
        sampler = self.sampler if other is None else other
        for name in ("epoch_length", "total_size"):
            if hasattr(sampler, name):
                return int(getattr(sampler, name))
        return len(sampler)

    def _take(self, epoch: int, n_samples: int, other: Any, start: int, stop: int) -> NDArray[Any]:
        with self._at(epoch) if other is None else nullcontext():
            taken = np.asarray((self.sampler if other is None else other).take(start, stop))
        if _checked(taken, n_samples).shape != (stop - start,):
            raise ValueError(
                f"sampler.take({start}, {stop}) must return shape ({stop - start},), got {taken.shape}: the epoch has "
                f"{self._length()} positions by the sampler's epoch_length, total_size or len"
            )
        return taken

    def _read(self, epoch: int, n_samples: int) -> NDArray[Any]:
        if epoch == self.epoch and self._listed is not None:
            return self._listed
        with self._at(epoch):
            listed = _checked(np.fromiter(map(index, self.sampler), np.int64), n_samples)
        if epoch == self.epoch:
            self._listed = listed
        return listed


def _checked(taken: NDArray[Any], n_samples: int) -> NDArray[Any]:
    if len(taken) and not (taken.min() >= 0 and taken.max() < n_samples):
        bad = taken[(taken < 0) | (taken >= n_samples)][0]
        raise ValueError(f"sampler must give indices from 0 to {n_samples - 1}, got {bad}")
    return taken


def planned_order(order: SliceOrder, kept: NDArray[Any] | None, pieces: Pieces | None, n_samples: int) -> SliceOrder:
    """Return the samples of an order that are planned, or their pieces; either reads the whole epoch."""
    if kept is None and pieces is None:
        return order
    taken = np.concatenate(
        [order.take(start, start + READ_AT_ONCE) for start in range(0, order.n_samples, READ_AT_ONCE)]
        or [np.zeros(0, np.int64)]
    )
    places = np.arange(len(taken))
    if kept is not None:
        known = np.zeros(n_samples, bool)
        known[kept] = True
        places = np.flatnonzero(known[taken])
        taken = taken[places]
    if pieces is not None:
        places = np.repeat(places, pieces.counts(taken))
        taken = pieces.of_samples(taken)
    return listed_order(taken, order, places)
