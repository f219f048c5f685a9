"""The order that a user's sampler gives to batches of equal size."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from copy import copy
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.webdatamodule._shared.digest import array_digest
from headrace.webdatamodule._shared.mixture import NOT_MIXED, Mixed, PossibleMixture
from headrace.webdatamodule._shared.ranks import Mesh
from headrace.webdatamodule._shared.run import NoSampler
from headrace.webdatamodule.loading.fingerprint import own_fingerprint

Order = tuple[int, Callable[[int, int], Any]]  # positions of an epoch, and the samples between two of them


class NoUserSampler(NoSampler):
    """In place of `UserSampler` if there is no `sampler`: the order is the built-in one."""

    is_mixture = False
    epochs_differ = None  # the planner knows
    fingerprint = None
    digest = ""
    sampler = None
    mixed = NOT_MIXED

    def of_epoch(self, _epoch: int, _mixed: Mixed) -> None:
        """There is no order that was given."""

    def epoch_fingerprint(self, _epoch: int, _mixed: Mixed) -> None:
        """There is no order that was given."""

    def copied(self) -> NoUserSampler:
        """Return the same: nothing of it changes."""
        return self


class UserSampler(PossibleMixture):
    """The order that a user's sampler gives, epoch by epoch.

    A sampler with `take(start, stop)` and `epoch_length` is read in slices. Any other is read once per epoch.
    """

    is_given = True

    def __init__(self, sampler: Iterable[int]) -> None:
        super().__init__(sampler)
        self.epoch = 0  # that the sampler was set to
        self._listed: tuple[int, npt.NDArray[np.int64]] | None = None  # an epoch and its order
        self._views: dict[int, tuple[Any, Order]] = {}  # by epoch, and what they were made for
        self._stamp: tuple[int, Mixed, str] | None = None  # epoch, mixture, fingerprint of the latest iteration

    @property
    def _has_slices(self) -> bool:
        return hasattr(self.sampler, "take") and hasattr(self.sampler, "epoch_length")

    @property
    def _sets_epochs(self) -> bool:
        return callable(getattr(self.sampler, "set_epoch", None))

    @property
    def epoch_length(self) -> int:
        """Draws of an epoch of a mixture."""
        return int(self.sampler.epoch_length)

    @property
    def epochs_differ(self) -> bool:
        """Whether the sampler shuffles by epoch."""
        return self._sets_epochs and getattr(self.sampler, "shuffle", True) is not False

    def of_epoch(self, epoch: int, mixed: Mixed) -> Order:
        """Return the order of an epoch; the same object until the sampler is another one."""
        if epoch != self.epoch and not self._sets_epochs:
            raise ValueError(
                f"number must be a step of epoch {self.epoch}, as {type(self.sampler).__name__} does not tell the "
                f"order of epoch {epoch}: give it set_epoch(epoch)"
            )
        made_for = (self.epoch_length if self._has_slices else None, mixed)
        if epoch not in self._views or self._views[epoch][0] != made_for:
            order: Order
            if self._has_slices:
                other = self._at(epoch, mixed)
                order = int(other.epoch_length), other.take
            else:
                listed = self._list(epoch)
                order = len(listed), partial(_slice, listed)
            recent = list(self._views.items())[-2:]
            self._views = {**dict(recent), epoch: (made_for, order)}
        return self._views[epoch][1]

    def _at(self, epoch: int, mixed: Mixed) -> Any:
        """Return a copy of the sampler at an epoch, of a mixture with these settings."""
        same = mixed.mixture in (None, self.mixed.mixture)
        other = copy(self.sampler) if same else self.sampler.at_mixture(mixed.mixture)
        if self.is_mixture:
            other.reweights = list(mixed.reweights)
        if self._sets_epochs:
            other.set_epoch(epoch)
        return other

    def _list(self, epoch: int) -> npt.NDArray[np.int64]:
        if epoch == self.epoch:
            if self._listed is None or self._listed[0] != epoch:
                self._listed = epoch, _read(self.sampler)
            return self._listed[1]
        self.sampler.set_epoch(epoch)
        try:
            return _read(self.sampler)
        finally:
            self.sampler.set_epoch(self.epoch)

    @property
    def fingerprint(self) -> str:
        """The class of the sampler and its own fingerprint."""
        return f"{type(self.sampler).__name__} {own_fingerprint(self.sampler)}"

    def epoch_fingerprint(self, epoch: int, mixed: Mixed) -> str:
        """The same of what decides the order up to the end of an epoch, if the sampler can tell."""
        if self._stamp is None or self._stamp[:2] != (epoch, mixed):
            return self._fingerprint_at(epoch, mixed)
        return self._stamp[2]

    def _fingerprint_at(self, epoch: int, mixed: Mixed) -> str:
        sampler = self.sampler if mixed == self.mixed else self._at(epoch, mixed)
        if not callable(getattr(sampler, "epoch_fingerprint", None)):
            return self.fingerprint
        return f"{type(self.sampler).__name__} {sampler.epoch_fingerprint(epoch)}"

    @property
    def digest(self) -> str:
        """Digest of an order without a fingerprint of its own; ranks compare it before an epoch."""
        if own_fingerprint(self.sampler) is not None:
            return ""
        return array_digest(self._list(self.epoch))

    # What a run asks.

    def check(self, epoch: int, _world: int, _mesh: Mesh | None) -> None:
        """Set the sampler to the epoch: a trainer that finds its set_epoch may have set it to one of its own."""
        if self._sets_epochs:
            self.sampler.set_epoch(epoch)
        self._stamp = epoch, self.mixed, self._fingerprint_at(epoch, self.mixed)

    def set_epoch(self, epoch: int, changed: bool) -> None:
        """Pass the epoch on to the sampler."""
        if changed:
            self.epoch = epoch
            self._views.clear()
            self._stamp = None
            if self._sets_epochs:
                self.sampler.set_epoch(epoch)

    def finished(self) -> None:
        """The order of an epoch is read once."""

    def refuse_resume(self) -> None:
        """An order that is read again is compared by what stands for it."""

    def copied(self) -> UserSampler:
        """Return an order with a sampler of its own, which has an epoch of its own."""
        other = copy(self)
        other.sampler, other._views = copy(self.sampler), {}
        return other

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_views": {}}


def _read(sampler: Iterable[int]) -> npt.NDArray[np.int64]:
    return np.fromiter(map(operator.index, sampler), np.int64)


def _slice(listed: npt.NDArray[np.int64], start: int, stop: int) -> npt.NDArray[np.int64]:
    return listed[start:stop]
