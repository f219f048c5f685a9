"""A trainer's epochs and a loader's: an epoch that a limit ended early goes on after a resume.

A trainer takes an epoch that `max_steps` ended for a whole one. The resumed run delivers its rest, which the trainer
counts as one more epoch. So its number of an epoch is then ahead of the loader's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

from torch.utils.data import SequentialSampler


class EpochLoader(Protocol):
    """A loader that a trainer tells its epochs."""

    def __len__(self) -> int: ...

    @property
    def epoch(self) -> int:
        """The present epoch."""

    @property
    def steps(self) -> int:
        """Batches of it that were delivered."""

    @property
    def resumed(self) -> bool:
        """Whether a state was loaded, and nothing delivered since."""

    def rewind(self) -> None:
        """Forget the position: the epoch begins at its beginning."""

    def choose_epoch(self, epoch: int) -> None:
        """Deliver an epoch next; the present one keeps its position."""

    def end_iteration(self) -> None:
        """The iteration that is going on, if any, has been abandoned."""


class EpochOffset:
    """Chooses a loader's epochs for a trainer's.

    Attributes:
        cuts: How many epochs were split: ended early, and went on in the trainer's next one.
    """

    def __init__(self) -> None:
        self.cuts = 0
        self._cuts_before = self._ahead = 0
        self._asked = self._saved = -1  # the trainer's number of the present epoch, and of the one in a checkpoint

    def state_dict(self, loader: EpochLoader) -> dict[str, int]:
        """The trainer's number of the loader's epoch, and how many were cut before."""
        if loader.resumed and self._saved >= 0:
            return {"epoch": self._saved, "cuts": self._cuts_before}
        return {"epoch": self._asked, "cuts": self.cuts}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Resume."""
        self._saved, self.cuts = state["epoch"], state["cuts"]
        self._cuts_before = self.cuts

    def begin(self, loader: EpochLoader, epoch: int, limit: float, *, overfits: bool) -> None:
        """Choose the loader's epoch: the saved one as long as some of it is left.

        Args:
            loader: The loader; it may have been resumed.
            epoch: The trainer's number.
            limit: Most batches of an epoch if it is an int, else a share of them.
            overfits: Whether the loader delivers its first epoch again and again.
        """
        if loader.resumed and self._saved >= 0:
            over = epoch > self._saved  # the trainer takes the saved epoch for done
            has_rest = loader.steps + 1 <= _most(loader, limit)
            self.cuts = self._cuts_before + 1 if over and has_rest else self._cuts_before
            self._ahead = epoch - loader.epoch
            if over and not has_rest:
                self._ahead -= 0 if overfits else 1
                loader.rewind()  # which forgets that it was resumed
        elif overfits and epoch != self._asked:
            self._ahead = epoch
            loader.rewind()
        if epoch != self._asked:
            self._asked = epoch
            loader.end_iteration()
        loader.choose_epoch(epoch - self._ahead)


def _most(loader: EpochLoader, limit: float) -> float:
    try:
        length: float = len(loader)
    except TypeError:  # an endless one
        length = math.inf
    return min(length, limit if isinstance(limit, int) else length * limit)


class EpochSetter(SequentialSampler):
    """Trainers call `loader.sampler.set_epoch`; a sequential sampler is one that they do not replace.

    Args:
        loader: Has a `set_epoch` and a `fit_loop`.
    """

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self._loader = loader

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the loader delivers next."""
        self._loader.set_epoch(epoch)
        if (fit_loop := self._loader.fit_loop) is not None and fit_loop.trainer is not None:
            fit_loop.settle()
