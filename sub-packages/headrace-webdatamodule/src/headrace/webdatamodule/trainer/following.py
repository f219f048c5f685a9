"""What a train loader asks the trainer that it serves, and tells it: the trainer alone knows which steps were done."""

from __future__ import annotations

import math
from typing import Any, Protocol

from headrace.webdatamodule.trainer.counters import (
    about_to_restore,
    begin_afresh,
    expect,
    limited,
    saved_epochs,
    settle,
    take_back,
    take_back_saved,
)


class Follows(Protocol):
    """What a loader asks whoever takes its batches."""

    def steps_done(self) -> int | None:
        """Batches of the epoch that were made use of."""

    def which_epoch(self, asked: int) -> int:
        """The epoch to deliver when another one is asked for."""

    def before_epochs(self) -> None:
        """An iteration is about to be made."""

    def on_epoch(self) -> None:
        """An epoch was chosen."""


class Followed(Protocol):
    """A train loader. Its `len` is batches of an epoch on this rank; a TypeError if it is endless."""

    follows: Follows | None

    @property
    def at(self) -> tuple[int, int]:
        """The epoch, and the batches of it that were delivered."""

    @property
    def resumed(self) -> bool:
        """Whether a state was loaded, and nothing delivered since."""

    def rewind(self) -> None:
        """Forget the position that was loaded: the epoch begins at its beginning."""

    def __len__(self) -> int: ...


class Following:
    """Joins a train loader with the trainer of a data module, as long as that fits with this loader and no other.

    Args:
        module: The data module; its `trainer` is looked at.
        loader: The loader.
    """

    def __init__(self, module: Any, loader: Followed) -> None:
        self.module = module
        self.loader = loader

    def trainer(self) -> Any:
        """The trainer; None when it does not fit with the loader, or with others beside it, whose steps are theirs."""
        trainer = self._fitting()
        if trainer is None:
            return None
        loaders = getattr(trainer.fit_loop, "_combined_loader", None)
        flat = [] if loaders is None else loaders.flattened
        return trainer if len(flat) == 1 and flat[0] is self.loader else None

    def _fitting(self) -> Any:
        trainer = self.module.trainer
        fits = trainer is not None and trainer.datamodule is self.module and trainer.state.fn == "fit"
        return trainer if fits else None

    def steps_done(self) -> int | None:
        """Batches of the epoch whose training step ended; None when no trainer counts them."""
        trainer = self.trainer()
        return None if trainer is None else int(trainer.fit_loop.epoch_loop.batch_progress.current.processed)

    def which_epoch(self, asked: int) -> int:
        """The epoch to deliver when the trainer asks for one: after a resume, what is left of the one before it.

        Args:
            asked: The trainer's number. It counts an epoch that a limit ended in the middle as done.
        """
        trainer = self.trainer()
        if trainer is None:
            return asked
        if self._left(trainer, *_epochs(trainer)):
            take_back(trainer)
            return self.loader.at[0]
        return self._only_epoch(trainer) if trainer.overfit_batches else asked

    def _left(self, trainer: Any, begun: int, ended: int) -> bool:
        """Whether something is left of the last epoch that ended."""
        epoch, position = self.loader.at
        most = limited(_length(self.loader), trainer.limit_train_batches)
        last = 0 < begun == ended if trainer.overfit_batches else ended == epoch + 1
        return self.loader.resumed and last and 0 < position < most

    def _only_epoch(self, trainer: Any) -> int:
        """The same few batches in every epoch: a loaded position is of the one that the trainer is in the middle of."""
        begun, ended = _epochs(trainer)
        goes_on = getattr(trainer.fit_loop, "restarted_mid_epoch", False) and begun > ended
        if self.loader.resumed and not goes_on:
            self.loader.rewind()
        return 0

    def before_epochs(self) -> None:
        """Look whether an epoch goes on, before the trainer decides that its epochs are over."""
        trainer = self.trainer()
        if trainer is not None and self._left(trainer, *_epochs(trainer)):
            take_back(trainer)

    def before_restoring(self) -> None:
        """The same, when the loader was asked for before the trainer knows its epoch: it may take it for its last."""
        trainer = self._fitting()
        if trainer is not None and about_to_restore(trainer) and self._left(trainer, *saved_epochs(trainer)):
            take_back_saved(trainer)

    def on_epoch(self) -> None:
        """Tell the trainer how long the epoch is, and when it is being resumed that it begins at its beginning."""
        trainer = self.trainer()
        if trainer is None:
            return
        settle(trainer)
        if self.loader.at[1] == 0:
            begin_afresh(trainer)
        length = _length(self.loader)
        if length < math.inf:
            expect(trainer, int(length))


def _epochs(trainer: Any) -> tuple[int, int]:
    """How many epochs the trainer counts as begun, and as ended, which is the number of the next one."""
    current = trainer.fit_loop.epoch_progress.current
    return int(current.ready), int(current.processed)


def _length(loader: Followed) -> float:
    try:
        return len(loader)
    except TypeError:
        return math.inf


def follow_trainer(module: Any, loader: Followed) -> None:
    """Let a train loader heed the trainer of its data module; to be called when the loader has its position.

    Args:
        module: The data module.
        loader: Its loader.
    """
    loader.follows = following = Following(module, loader)
    following.before_restoring()
