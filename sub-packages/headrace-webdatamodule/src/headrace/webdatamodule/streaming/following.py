"""What a train loader asks the trainer that it serves, and tells it: the trainer alone knows which steps were done."""

from __future__ import annotations

from typing import Any

from headrace.webdatamodule.indexed.lengths import begin_afresh, limited, take_back
from headrace.webdatamodule.streaming.resumable import EpochLoader


class Following:
    """Joins a train loader with the trainer of a data module, as long as that fits with this loader and no other.

    Args:
        module: The data module; its `trainer` is looked at.
        loader: The loader.
    """

    def __init__(self, module: Any, loader: EpochLoader) -> None:
        self.module = module
        self.loader = loader

    def trainer(self) -> Any:
        """The trainer; None when it does not fit with the loader, or with others beside it, whose steps are theirs."""
        trainer = self.module.trainer
        if trainer is None or trainer.datamodule is not self.module or trainer.state.fn != "fit":
            return None
        loaders = getattr(trainer.fit_loop, "_combined_loader", None)
        flat = [] if loaders is None else loaders.flattened
        return trainer if len(flat) == 1 and flat[0] is self.loader else None

    def steps_done(self) -> int | None:
        """Batches of the epoch whose training step ended; None when no trainer counts them."""
        trainer = self.trainer()
        return None if trainer is None else int(trainer.fit_loop.epoch_loop.batch_progress.current.processed)

    def which_epoch(self, asked: int) -> int:
        """The epoch to deliver when the trainer asks for one: after a resume, what is left of the one before it.

        Args:
            asked: The trainer's number. It counts an epoch that a limit ended in the middle as done.
        """
        trainer, loader = self.trainer(), self.loader
        epoch, position = loader.at
        if trainer is None or not loader.resumed or asked != epoch + 1:
            return asked
        if not 0 < position < _batches(loader, trainer.limit_train_batches):
            return asked
        take_back(trainer)
        return epoch

    def before_epochs(self) -> None:
        """Look whether an epoch goes on, before the trainer decides that its epochs are over."""
        trainer = self.trainer()
        if trainer is not None:
            self.which_epoch(int(trainer.fit_loop.epoch_progress.current.processed))

    def on_epoch(self) -> None:
        """Tell a trainer that is being resumed that an epoch begins at its beginning."""
        trainer = self.trainer()
        if trainer is not None and self.loader.at[1] == 0:
            begin_afresh(trainer)


def _batches(loader: EpochLoader, limit: float) -> float:
    if not loader.endless:
        return limited(len(loader), limit)
    return limit if isinstance(limit, int) else float("inf")


def follow_trainer(module: Any, loader: EpochLoader) -> None:
    """Let a train loader heed the trainer of its data module.

    Args:
        module: The data module.
        loader: Its loader.
    """
    loader.follows = Following(module, loader)
