"""What all loaders share: epochs, the position, and which iteration counts. It knows no trainer."""

from __future__ import annotations

import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

from torch.utils.data import SequentialSampler

from headrace.webdatamodule._shared.checks import checked_int
from headrace.webdatamodule.loading.position import BEGINNING, Iteration, Position, Progress
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


_I = TypeVar("_I", bound=Iteration)


class EpochLoader(ABC, Generic[_I]):
    """A loader that resumes, alone or in a trainer, whose fit loop then decides on epoch and position."""

    batch_sampler: Any = None  # trainers look for one beside `sampler`
    _shown_batch_sampler: Any = None  # by a loader that shows one
    _loop = _OWN
    _name: str
    _fixed: bool  # every epoch is the same
    _progress: Progress[_I]  # the position, which nobody else has

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    def epoch(self) -> int:
        """The current epoch."""
        return self._progress.epoch

    @property
    @abstractmethod
    def steps(self) -> int:
        """Number of delivered batches of the current epoch."""

    @property
    def resumed(self) -> bool:
        """Whether a state was loaded and no batch was delivered since."""
        return self._progress.resumed

    def __iter__(self) -> Iterator[Any]:
        """Deliver the epoch, from the position that was loaded, else from its beginning."""
        return self._deliver()  # which begins at the first `next`: trainers make an iterator before they set the epoch

    def _deliver(self) -> Iterator[Any]:
        if self._is_beside_trainer():
            # Whenever it begins, it leaves the trainer's position alone, and waits for no other rank.
            with self._independent(BEGINNING, checked=False) as (_, batches):
                yield from batches
        elif self._trainer is None and self._progress.under_way and not self._progress.chosen:
            yield from self._peek()
        else:
            yield from self._count()

    def _peek(self) -> Iterator[Any]:
        """The epoch once more, while another iteration is under way.

        One batch is a peek, which counts for nothing. With the second one the epoch is restarted.
        """
        progress = self._progress
        with self._independent(progress.restart(), checked=True) as (iteration, batches):
            for number, batch in enumerate(batches, 1):
                yield batch
                if number == 1 and progress.begun and not progress.chosen and progress.epoch == iteration.epoch:
                    self._adopt(iteration)

    @abstractmethod
    def _independent(self, start: Position, *, checked: bool) -> AbstractContextManager[tuple[_I, Iterator[Any]]]:
        """An iteration of the present epoch that counts for nothing, and its batches, with workers of its own.

        `checked` says whether the ranks compare their plans.
        """

    @abstractmethod
    def _count(self) -> Iterator[Any]:
        """The batches of an iteration that counts, and moves the position."""

    def _adopt(self, iteration: _I) -> None:
        """Let an iteration count that has delivered one batch."""
        self._progress.adopt(iteration)

    def _begin_next(self) -> None:
        """Go where the next iteration that counts begins."""
        progress = self._progress
        if progress.finished and not progress.chosen and not self._fixed:
            self._begin_at(progress.epoch + 1)
        elif progress.begun:  # the same epoch once more
            progress.put(progress.epoch, progress.restart())

    def _begin_at(self, epoch: int) -> None:
        """Let the next iteration begin with that epoch."""
        self._progress.put(epoch, BEGINNING)

    def _rewind(self) -> None:
        """Forget the position: the epoch begins at its beginning."""
        self._begin_at(self.epoch)

    def _choose_epoch(self, epoch: int) -> None:
        """As `set_epoch`, whatever the trainer does; the present epoch keeps its position."""
        if self.resumed and self._trainer is None and epoch < self.epoch:
            warnings.warn(
                f"the {self._name} loader has loaded a state of epoch {self.epoch}, and set_epoch({epoch}) drops it: "
                "samples come again; loop over range(loader.epoch, epochs)",
                stacklevel=3,
            )
        if self._progress.choose(epoch):
            self._begin_at(epoch)

    def _end_iteration(self) -> None:
        """The iteration that is under way, if any, has been abandoned."""
        if self._progress.iteration is not None:
            self._progress.iteration.under_way = False

    @abstractmethod
    def _restore(self, state: Mapping[str, Any]) -> None:
        """As `load_state_dict`, without a look at the trainer."""

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

    def _is_beside_trainer(self) -> bool:
        """Whether an iteration that begins is not the trainer's, and so counts for nothing."""
        return self._trainer is not None and not self._loop.iterates()


class EpochSetter(SequentialSampler):
    """Trainers call `loader.sampler.set_epoch`; a sequential sampler is one that they do not replace."""

    def __init__(self, loader: EpochLoader[Any]) -> None:
        super().__init__(loader)
        self._loader = loader

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the loader delivers next."""
        if "lightning.pytorch" in sys.modules:
            self._loader._refuse_alone()
        self._loader.set_epoch(epoch)
