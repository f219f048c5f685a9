"""The only module with private names of a trainer, as they are in Lightning 2.5 and 2.6, the range of pyproject.

- `fit_loop.epoch_progress`: `current.processed` numbers the epoch that begins; `current_epoch` follows too late.
- `fit_loop.epoch_loop.batch_progress`: batches whose step is done; checkpoints are saved within a step, too.
- `restarting`, `restarted_...`, `reset_restart_stage()` of both loops: whether an epoch is resumed, or begins.
- `fit_loop._combined_loader`: the train loaders, whose steps are ours if there is no other; the trainer's iterators.
- `_IndexBatchSamplerWrapper`: only a batch sampler of this class gives a `BasePredictionWriter` its indices.
"""

from typing import Any

from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper

from headrace.webdatamodule.loading.epochs import EpochOffset


class FitLoop:
    """Joins a trainer's fit loop with the train `loader` of its data module, an `EpochLoader`."""

    def __init__(self, module: Any) -> None:
        self._module, self.epochs = module, EpochOffset()
        self.loader: Any = None  # until the data module has made it
        self._max_epochs = module.trainer.max_epochs
        module.trainer.reload_dataloaders_every_n_epochs = 1  # so that it asks for the length of each epoch

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
        iterator = getattr(self._module.trainer.fit_loop._combined_loader, "_iterator", None)
        return any(one.gi_running for one in getattr(iterator, "iterators", ()))

    def begin(self, epoch: int | None = None) -> None:
        """Choose the loader's epoch for the trainer's, which is about to begin or to be resumed."""
        trainer = self._module.trainer
        number = int(trainer.fit_loop.epoch_progress.current.processed) if epoch is None else epoch
        self.epochs.begin(self.loader, number, trainer.limit_train_batches, overfits=bool(trainer.overfit_batches))
        self.allow_cuts()

    def allow_cuts(self) -> None:
        """Let a trainer count as many epochs more as were cut, before it compares their number."""
        if self._max_epochs not in (None, -1):
            self._module.trainer.fit_loop.max_epochs = self._max_epochs + self.epochs.cuts

    def settle(self) -> None:
        """Let a resumed loop count as the loader does; its own counts are off by one after a step that failed."""
        loop, steps = self._module.trainer.fit_loop, self.loader.steps
        if (inner := loop.epoch_loop).restarting or self.loader.resumed:
            ended, total = int(inner.restarted_on_train_batch_end), inner.batch_progress.total
            inner.batch_progress.current.completed = steps - ended  # reset() adds the batch of on_train_batch_end
            total.ready = total.started = total.processed = total.completed + ended
            inner.restarting = steps > 0
            if not steps and loop.restarted_on_epoch_end:  # with max_steps it would never count that epoch
                loop.epoch_progress.increment_completed()
                loop.reset_restart_stage()


class LastIndices(_IndexBatchSamplerWrapper):
    """The batch sampler of a loader to predict: any number finds the indices of its last batch; no others are kept."""

    def __init__(self, loader: Any) -> None:
        self.loader, self._batch_sampler, self.sampler = loader, loader, loader.sampler
        self.seen_batch_indices: Any = self

    def __getitem__(self, number: int) -> list[int]:
        return [int(index) for index in self.loader.indices]
