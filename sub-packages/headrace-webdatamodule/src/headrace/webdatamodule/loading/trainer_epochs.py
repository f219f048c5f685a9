"""A trainer's epochs and a loader's: an epoch that a limit ended early continues after a resume.

A trainer takes an epoch that `max_steps` ended for a whole one. The resumed run delivers its rest, and the trainer
counts that epoch once.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import SequentialSampler

from headrace.webdatamodule._shared.checks import checked_int
from headrace.webdatamodule.loading.state_dict import LARGEST


class Loop:
    """The loop that a loader delivers to: one of the user's own, for which every batch counts."""

    @property
    def trainer(self) -> Any:
        """The trainer that runs this loop at this moment; None without one."""
        return None

    def iterates(self) -> bool:
        """Whether the loop itself asks for a batch at this moment, and not somebody beside it."""
        return True

    def steps_done(self) -> int | None:
        """Batches of the epoch that count; None when all do that were delivered."""
        return None

    def counts(self) -> bool:
        """Whether batches count in the report."""
        return True

    def on_batch(self, indices: Sequence[int]) -> None:
        """A batch of these samples was delivered, and counts."""

    def log(self, metrics: Callable[[], dict[str, float]]) -> None:
        """The loop asks for the next batch: log the figures of those before, if it is time."""

    def begin(self, epoch: int | None = None) -> None:
        """The loop is about to begin an epoch, or to be resumed."""

    def resize(self, length: int) -> None:
        """The epoch that is under way has another number of batches."""


_OWN = Loop()


class EpochLoader(ABC):
    """A loader that resumes, alone or in a trainer, whose fit loop then decides on epoch and position."""

    batch_sampler: Any = None  # trainers look for one beside `sampler`
    _shown_batch_sampler: Any = None  # by a loader that shows one
    _loop = _OWN
    _name: str
    _fixed: bool  # every epoch is the same

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def epoch(self) -> int:
        """The present epoch."""

    @property
    @abstractmethod
    def steps(self) -> int:
        """Batches of the present epoch that were delivered."""

    @property
    @abstractmethod
    def resumed(self) -> bool:
        """Whether a state was loaded, and nothing delivered since."""

    @abstractmethod
    def _deliver(self) -> Iterator[Any]:
        """The batches of an epoch, chosen at the first `next`: trainers make an iterator before they set the epoch."""

    def __iter__(self) -> Iterator[Any]:
        """Deliver the epoch, from the position that was loaded, else from its beginning."""
        return self._deliver()

    @abstractmethod
    def _rewind(self) -> None:
        """Forget the position: the epoch begins at its beginning."""

    @abstractmethod
    def _choose_epoch(self, epoch: int) -> None:
        """As `set_epoch`, without a look at the trainer; the present epoch keeps its position."""

    @abstractmethod
    def _restore(self, state: Mapping[str, Any]) -> None:
        """As `load_state_dict`, without a look at the trainer."""

    @abstractmethod
    def _end_iteration(self) -> None:
        """The iteration that is under way, if any, has been abandoned."""

    def _join(self, loop: Loop) -> None:
        """Deliver to another loop from now on."""
        self._loop = loop

    def _release(self) -> None:
        """Deliver to a loop of the user's own from now on."""
        self._loop = _OWN

    @property
    def sampler(self) -> EpochSetter:
        """Trainers call `loader.sampler.set_epoch`."""
        return EpochSetter(self)

    @property
    def remaining(self) -> int:
        """Batches that are left of the epoch."""
        return max(0, len(self) - self.steps)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch to deliver next; a position that was loaded holds for its own epoch only.

        Args:
            epoch: 0 to 2**62.

        Raises:
            TypeError: No int.
            ValueError: Another number.
        """
        number = checked_int(f"{self._name}: epoch", epoch, 0)
        if number >= LARGEST:
            raise ValueError(f"{self._name}: epoch must be an int from 0 to 2**62, got {epoch}")
        if self._fixed:
            return
        if self._trainer is not None:
            self._loop.begin(number)
        else:
            self._choose_epoch(number)

    @property
    def _is_joined(self) -> bool:
        """Whether a data module has joined a trainer's loop, and so decides on the epoch and the position."""
        return self._loop is not _OWN

    def _refuse_alone(self) -> None:
        """Refuse a Lightning trainer that trains on the loader without a data module: it would lose the position."""
        if self._is_joined or self._fixed:
            return
        raise ValueError(
            f"train_dataloaders must not hold the {self._name} loader, as a Trainer alone loses its position: give the "
            "Trainer datamodule=, an IndexedWebDataModule, a MapDataModule or a WebDataModule; or to evaluate, give "
            "the loader fixed_epoch=True. In a loop of your own call loader.set_epoch(epoch)"
        )

    @property
    def _trainer(self) -> Any:
        """The trainer that runs the loop of this loader at this moment, if one does."""
        return self._loop.trainer

    def _is_beside_a_fit(self) -> bool:
        """Whether an iteration that begins is not the trainer's, and so counts for nothing."""
        return self._trainer is not None and not self._loop.iterates()


class EpochSetter(SequentialSampler):
    """Trainers call `loader.sampler.set_epoch`; a sequential sampler is one that they do not replace."""

    def __init__(self, loader: EpochLoader) -> None:
        super().__init__(loader)
        self._loader = loader

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the loader delivers next."""
        if "lightning.pytorch" in sys.modules:
            self._loader._refuse_alone()
        self._loader.set_epoch(epoch)


class EpochOffset:
    """Chooses a loader's epochs for a trainer's."""

    def __init__(self) -> None:
        self._ahead = 0  # the trainer's number of an epoch, minus the loader's
        self._asked = self._saved = -1  # the trainer's number of the present epoch, and of the one in a checkpoint

    def state_dict(self, loader: EpochLoader) -> dict[str, int]:
        """The trainer's number of the loader's epoch."""
        return {"epoch": self._saved if loader.resumed and self._saved >= 0 else self._asked}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Resume."""
        self._saved = state["epoch"]

    def has_rest(self, loader: EpochLoader, epoch: int, limit: float) -> bool:
        """Whether the trainer takes the saved epoch for done, as its `epoch` is a later one, and some of it is left.

        `limit` is the most batches of an epoch if it is an int, else a share of them.
        """
        return loader.resumed and 0 <= self._saved < epoch and loader.steps + 1 <= _most(loader, limit)

    def begin(self, loader: EpochLoader, epoch: int, *, overfits: bool) -> None:
        """Choose the loader's epoch for the trainer's number.

        A trainer that overfits gets the loader's first epoch again and again.
        """
        if loader.resumed and self._saved >= 0:
            self._ahead = epoch - loader.epoch
            if epoch > self._saved and overfits:
                loader._rewind()  # which forgets that it was resumed
            elif epoch > self._saved:  # which was done
                self._ahead -= 1
        elif overfits and epoch != self._asked:
            self._ahead = epoch
            loader._rewind()
        if epoch != self._asked:
            self._asked = epoch
            loader._end_iteration()
        loader._choose_epoch(epoch - self._ahead)


def _most(loader: EpochLoader, limit: float) -> float:
    try:
        length: float = len(loader)
    except TypeError:  # an endless one
        length = math.inf
    return min(length, limit if isinstance(limit, int) else length * limit)
