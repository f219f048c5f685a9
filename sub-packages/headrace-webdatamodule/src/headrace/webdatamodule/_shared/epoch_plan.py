"""The plan of an epoch, as a run asks it: steps from any place on, at any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

NO_LIMIT = 2**62  # steps that no epoch has


class Place(NamedTuple):
    """A place in an epoch.

    Attributes:
        position: Number of samples before it, those of all ranks together.
        plan_state: What else the plan needs to continue there, in JSON; only the plan reads it.
    """

    position: int
    plan_state: tuple[Any, ...] = ()


class PlannedBatch(NamedTuple):
    """A batch of one rank.

    Attributes:
        samples: What a batch sampler yields.
        place: The place after the batch: an iteration from there yields what follows.
        draws: For each sample, its number in the order of a user's sampler; None without one.
    """

    samples: list[Any]
    place: Place
    draws: list[int] | None = None


class Steps(NamedTuple):
    """Some complete steps: in step s, rank r gets batch ``s * world + r``.

    Attributes:
        samples: As the plan numbers them; `EpochPlan.keys` gives what batches hold.
        offsets: Where each batch begins in ``samples`` and, last, where the last one ends.
        ends: The position after each batch.
        draws: For each sample, its number in the order of a user's sampler; None without one.
        warning: A warning for every rank.
        warning_once: A warning for one rank, given once in a run.
    """

    samples: NDArray[Any]
    offsets: NDArray[np.int64]
    ends: NDArray[np.int64]
    draws: NDArray[np.int64] | None = None
    warning: str = ""
    warning_once: str = ""

    def batch(self, number: int) -> NDArray[Any]:
        """Return the samples of a batch."""
        return self.samples[self.offsets[number] : self.offsets[number + 1]]


class EpochPlan(Protocol):
    """The batches of an epoch, or of what a change leaves of one. It never changes.

    Positions count over all plans of an epoch.
    """

    @property
    def start(self) -> int:
        """The position where it begins."""

    @property
    def end(self) -> int:
        """The position where it ends."""

    def steps(self, place: Place, world: int, all_ranks: bool, /) -> Iterator[Steps]:
        """Yield the steps from a place on; one process that takes ``all_ranks`` needs no balance of the last ones."""

    def n_steps(self, place: Place, world: int, most: int = NO_LIMIT, /) -> int:
        """Return the number of steps from a place on, or ``most`` if there are more."""

    def seek(self, place: Place, world: int, steps: int, /) -> tuple[int, Place]:
        """Return a step and its place: the latest, at most ``steps`` after a place, that is found directly."""

    def place(self, position: int, began: Place, world: int, /) -> Place:
        """Return the place of a position, for an iteration that began at ``began`` with so many ranks."""

    def loaded_place(self, state: Mapping[str, Any], /) -> Place:
        """Return the place of a state; refuse a state that was changed."""

    def refuse_empty(self, world: int, /) -> None:
        """Refuse a number of ranks that leaves them no batch."""

    def keys(self, samples: NDArray[Any], /) -> list[Any]:
        """Return what batches hold: ints, or pieces of samples."""

    def delivered(self, start: int, stop: int, /) -> NDArray[np.int64]:
        """Return the samples of the dataset between two positions."""

    def first_unread(self, position: int, /) -> int:
        """Return the first draw of a user's order that nothing before a position has read."""

    def position_of_draw(self, draw: int, /) -> int:
        """Return the first position that may hold a draw of a user's order, or a later one."""
