"""The only module with private names of a trainer, as they are in Lightning 2.5 and 2.6, the range of pyproject.

- `fit_loop.epoch_progress`: `current.processed` numbers the epoch that begins; `current_epoch` follows too late.
  An epoch that `max_steps` ended early counts as one there; it is taken back when the rest is to be delivered, so that
  `max_epochs`, which callbacks change, stays as it is.
- `fit_loop.epoch_loop.batch_progress`: batches whose step is done; checkpoints are saved within a step, too, and a
  resumed loop counts from the loader's position.
- `restarting`, `restarted_...`, `reset_restart_stage()` of both loops: whether an epoch is resumed, or begins.
- `fit_loop.epoch_loop._batches_that_stepped`: by it a trainer says when it logs, and at which step.
- `fit_loop._combined_loader`: the train loaders, whose steps are ours if there is no other; the trainer's iterators.
- `fit_loop.max_batches`, `_data_fetcher` and `trainer.val_check_batch`: the number of batches of an epoch, by which it
  validates and takes the last optimizer step, so that both follow when the epoch is changed in its middle.
- The same of the loops that validate, test and predict: their iterators.
- `_IndexBatchSamplerWrapper`: only a batch sampler of this class gives a `BasePredictionWriter` its indices.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper

from headrace.webdatamodule.loading.epoch_loader import EpochLoader, Loop
from headrace.webdatamodule.loading.state_dict import is_module_state


class FitLoop(Loop):
    """Joins a trainer's fit loop with the train `loader` of its data module, an `EpochLoader`."""

    def __init__(self, module: Any) -> None:
        self._module, self.epochs = module, EpochOffset()
        self._logged = 0  # at which number of steps figures were logged last
        self.loader: Any = None  # until the data module has made it
        self._trainer_of_fit = module.trainer
        self._reload_before = self._reload_set = self._trainer_of_fit.reload_dataloaders_every_n_epochs
        self._override_reload(1)  # so that it asks for the length of each epoch
        self._finder = _StateFinder(module)
        self._trainer_of_fit.callbacks.insert(0, self._finder)

    def _override_reload(self, value: int) -> None:
        """Set the trainer's `reload_dataloaders_every_n_epochs`, unless somebody else has set it since."""
        if self._trainer_of_fit.reload_dataloaders_every_n_epochs == self._reload_set:
            self._trainer_of_fit.reload_dataloaders_every_n_epochs = self._reload_set = value

    def restore_reload(self) -> None:
        """The fit is over."""
        self._override_reload(self._reload_before)
        if self._finder in self._trainer_of_fit.callbacks:
            self._trainer_of_fit.callbacks.remove(self._finder)

    def load_state_dict(self, state: Any) -> None:
        """Resume, when the trainer's loops are not restored yet."""
        self.epochs.load_state_dict(state)
        self._override_reload(-1)  # so that it asks for the loader once they are, also where it has asked before

    @property
    def trainer(self) -> Any:
        """The trainer while it fits with this loader alone, else None."""
        trainer = self._module.trainer
        if trainer is None or trainer.datamodule is not self._module or trainer.state.fn != "fit":
            return None
        loaders = trainer.fit_loop._combined_loader
        return trainer if loaders is None or loaders.flattened == [self.loader] else None

    def steps_done(self) -> int | None:
        """Batches of the epoch whose gradients have reached the optimizer; None when no trainer counts them."""
        if (trainer := self.trainer) is None:
            return None
        done = int(trainer.fit_loop.epoch_loop.batch_progress.current.processed)
        return done if done >= trainer.num_training_batches else done - done % trainer.accumulate_grad_batches

    def iterates(self) -> bool:
        """Whether the trainer's iterator over the loader, a generator, runs at this moment, and not another one."""
        return _iterates(self._module.trainer.fit_loop)

    def log(self, metrics: Callable[[], dict[str, float]]) -> None:
        """Give the trainer's loggers the figures, at the steps at which it logs its own."""
        trainer = self.trainer
        if trainer is None or not getattr(self._module, "_log_stats", False):
            return
        steps = int(trainer.fit_loop.epoch_loop._batches_that_stepped)
        if steps == self._logged or not trainer.log_every_n_steps or steps % trainer.log_every_n_steps:
            return
        self._logged = steps
        if figures := metrics():
            for logger in trainer.loggers:
                logger.log_metrics(figures, step=steps - 1)

    def begin(self, epoch: int | None = None) -> None:
        """Choose the loader's epoch for the trainer's, which is about to begin or to be resumed."""
        trainer = self._module.trainer
        if epoch is None:
            number = int(trainer.fit_loop.epoch_progress.current.processed)
        else:
            number = epoch
            self._override_reload(1)
        if self.epochs.has_rest(self.loader, number, trainer.limit_train_batches):
            number -= 1
            self._count_one_less()
        self.epochs.begin(self.loader, number, overfits=bool(trainer.overfit_batches))
        if epoch is not None:
            self._align()

    def _align(self) -> None:
        """Let a resumed loop count as the loader does, also after a step that failed, or within accumulated gradients.

        Checkpoints of `on_train_batch_end` need it too: of the last batch of an epoch, where the next is longer.
        """
        loop, steps = self._module.trainer.fit_loop, self.loader.steps
        inner, epochs = loop.epoch_loop, loop.epoch_progress
        if not (inner.restarting or self.loader.resumed):
            return
        ended, total = int(inner.restarted_on_train_batch_end), inner.batch_progress.total
        inner.batch_progress.current.completed = steps - ended  # reset() adds the batch of on_train_batch_end
        total.ready = total.started = total.processed = total.completed + ended  # by it, validations between steps come
        inner.restarting = steps > 0
        if not steps and epochs.current.started == epochs.current.processed:  # the epoch that was saved is over
            if loop.restarted_on_epoch_end:  # with max_steps it would never count that epoch
                epochs.increment_completed()
            loop.reset_restart_stage()  # else the next one would never count as started

    def _count_one_less(self) -> None:
        """Let the trainer begin an epoch again that it took for a whole one."""
        loop = self._module.trainer.fit_loop
        for counts in (loop.epoch_progress.current, loop.epoch_progress.total):
            counts.ready = counts.started = counts.completed = counts.processed = counts.processed - 1
        loop.reset_restart_stage()

    def resize(self, length: int) -> None:
        """Let the trainer end its epoch where the loader's ends: there it validates, and takes the last step."""
        if (trainer := self.trainer) is None:
            return
        loop, limit = trainer.fit_loop, trainer.limit_train_batches
        most = _limited(length, limit)
        loop.max_batches = loop._data_fetcher.length = most
        if loop._data_fetcher.fetched >= most:  # the present batch is the last one now
            loop._data_fetcher.done = loop.epoch_loop.batch_progress.is_last_batch = True
        if isinstance(trainer.val_check_interval, float) and trainer.val_check_batch is not None:
            trainer.val_check_batch = max(1, int(most * trainer.val_check_interval))


class EpochOffset:
    """Chooses a loader's epochs for a trainer's: an epoch that a limit ended early continues after a resume.

    A trainer takes an epoch that `max_steps` ended for a whole one. The resumed run delivers its rest, and the trainer
    counts that epoch once.
    """

    def __init__(self) -> None:
        self._ahead = 0  # the trainer's number of an epoch, minus the loader's
        self._asked = self._saved = -1  # the trainer's number of the present epoch, and of the one in a checkpoint

    def state_dict(self, loader: EpochLoader[Any]) -> dict[str, int]:
        """The trainer's number of the loader's epoch."""
        return {"epoch": self._saved if loader.resumed and self._saved >= 0 else self._asked}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Resume."""
        self._saved = state["epoch"]

    def has_rest(self, loader: EpochLoader[Any], epoch: int, limit: float) -> bool:
        """Whether the trainer takes the saved epoch for done, as its `epoch` is a later one, and some of it is left.

        `limit` is the most batches of an epoch if it is an int, else a share of them.
        """
        return loader.resumed and 0 <= self._saved < epoch and loader.steps + 1 <= _most(loader, limit)

    def begin(self, loader: EpochLoader[Any], epoch: int, *, overfits: bool) -> None:
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


def _most(loader: EpochLoader[Any], limit: float) -> float:
    try:
        length: float = len(loader)
    except TypeError:  # an endless one
        length = math.inf
    return min(length, limit if isinstance(limit, int) else length * limit)


class _StateFinder(Callback):
    """Loads a data module's state that Lightning does not find, as it keeps it by the name of the class."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:  # noqa: ARG002 - the trainer's interface
        """Load the state of a class with another name; without one, refuse a checkpoint of the middle of an epoch."""
        if type(self._module).__qualname__ in checkpoint:
            return
        for state in filter(is_module_state, checkpoint.values()):
            self._module.load_state_dict(state)
            return
        batches = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        if batches["current"]["processed"] > 0 and not batches["is_last_batch"]:
            raise ValueError(
                "ckpt_path must be a checkpoint that holds the position of the train loader, as it was saved in the "
                "middle of an epoch, got one without: samples would come again, or be lost. Resume with the data "
                "module that saved it, or from a checkpoint of the end of an epoch"
            )


def _limited(length: int, limit: float) -> int:
    """The batches of an epoch under `limit_train_batches`: the most if it is an int, else a share of them."""
    return min(length, limit) if isinstance(limit, int) else int(length * limit)


class EvaluationLoops(Loop):
    """Joins a trainer's loops that validate, test or predict with a loader: what others take of it counts for nothing.

    They run on all ranks; what a callback takes may be taken on one.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    @property
    def trainer(self) -> Any:
        """The trainer."""
        return self._trainer

    def counts(self) -> bool:
        """Whether it is no sanity check."""
        return not self._trainer.sanity_checking

    def iterates(self) -> bool:
        """Whether an iterator of these loops runs at this moment, and not another one."""
        trainer = self._trainer
        loops = trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop
        return any(map(_iterates, loops))


class PredictLoop(EvaluationLoops):
    """The same for a loader to predict; keeps the indices of its batches in `delivered`, unless it is None.

    Without a trainer it is a loop of the user's own.
    """

    def __init__(self, trainer: Any, delivered: list[Sequence[int]] | None) -> None:
        super().__init__(trainer)
        self._delivered = delivered

    def counts(self) -> bool:
        """All batches do."""
        return True

    def on_batch(self, indices: Sequence[int]) -> None:
        """Keep the indices of a batch."""
        if self._delivered is not None:
            self._delivered.append(indices)


def _iterates(loop: Any) -> bool:
    """Whether a loop's iterator over a loader, a generator, runs at this moment."""
    iterator = getattr(loop._combined_loader, "_iterator", None)
    return any(getattr(one, "gi_running", False) for one in getattr(iterator, "iterators", ()))


class LastIndices(_IndexBatchSamplerWrapper):
    """The batch sampler of a loader to predict: any number finds the indices of its last batch; no others are kept."""

    def __init__(self, loader: Any) -> None:
        self.loader, self._batch_sampler, self.sampler = loader, loader, loader.sampler
        self.seen_batch_indices: Any = self

    def __getitem__(self, number: int) -> list[int]:
        return [int(index) for index in self.loader.indices]
