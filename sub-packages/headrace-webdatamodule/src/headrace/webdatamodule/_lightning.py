"""The only module that knows a trainer's inside. Tried with Lightning 2.5.0 and 2.6.6, the range of pyproject.

Besides public names it uses, of `trainer.fit_loop`:

- `epoch_progress.current.processed`: number of the epoch that begins; `trainer.current_epoch` says so later;
- `epoch_loop.batch_progress`: the batches whose training step is done (a checkpoint may be saved within a step). A
  resumed loop gets these counts from the data: its own are off by one after a step that failed;
- `epoch_loop.restarting`, `restarted_on_train_batch_end`: whether and where a resumed loop continues.

And `_IndexBatchSamplerWrapper`: a `BasePredictionWriter` gets indices only from a batch sampler of that class.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from math import inf
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper


class FitLoop:
    """The fit loop of the trainer of a data module, and its train loader.

    A trainer takes an epoch that `max_steps` ended for a whole one. Its rest is delivered when the run is resumed, so
    the trainer's number of an epoch is then one more than the loader's.
    """

    def __init__(self, module: Any) -> None:
        self._module: Any = module
        self.loader: Any = None
        self._asked = self._saved = -1  # the trainer's number of the present epoch, and of the one in the checkpoint
        self._ahead = self._cuts = self._cut = 0  # epochs that it is ahead of the loader, and why
        self._max_epochs = module.trainer.max_epochs
        module.trainer.reload_dataloaders_every_n_epochs = 1  # so that it asks for the length of each epoch

    @property
    def trainer(self) -> Any:
        """The trainer while it fits with the data module alone, else None."""
        trainer = self._module.trainer
        if trainer is None or trainer.datamodule is not self._module or trainer.state.fn != "fit":
            return None
        loaders = getattr(trainer.fit_loop, "_combined_loader", None)
        return trainer if loaders is None or loaders.flattened == [self.loader] else None

    def steps_done(self) -> int | None:
        """Batches of the epoch whose gradients have reached the optimizer; None when no trainer counts them."""
        if (trainer := self.trainer) is None:
            return None
        done = int(trainer.fit_loop.epoch_loop.batch_progress.current.processed)
        return done if done >= trainer.num_training_batches else done - done % trainer.accumulate_grad_batches

    def state_dict(self) -> dict[str, int]:
        """The trainer's epoch and how many epochs it counted twice."""
        if self.loader.resumed and self._saved >= 0:
            return {"epoch": self._saved, "cuts": self._cuts}
        return {"epoch": self._asked, "cuts": self._cuts + self._cut}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Resume; before the trainer compares its epoch with `max_epochs`."""
        self._saved, self._cuts = state["epoch"], state["cuts"]
        self._allow(self._cuts)

    def _allow(self, cuts: int) -> None:
        if self._max_epochs not in (None, -1):
            self._module.trainer.fit_loop.max_epochs = self._max_epochs + cuts

    def next_epoch(self) -> int:
        """The trainer's number of the epoch that begins, or goes on."""
        return int(self._module.trainer.fit_loop.epoch_progress.current.processed)

    def begin(self, epoch: int) -> None:
        """Choose the loader's epoch for the trainer's: the saved one as long as something of it is left."""
        loader, trainer = self.loader, self._module.trainer
        if loader.resumed and self._saved >= 0:
            over = epoch > self._saved  # the trainer takes the saved epoch for done
            self._cut = cut = int(over and loader.steps < self._most())
            self._allow(self._cuts + cut)
            if over and not cut:
                loader.rewind()  # forgets that it was resumed
                self._ahead = epoch if trainer.overfit_batches else epoch - loader.epoch - 1
            else:
                self._ahead = epoch - loader.epoch
        elif trainer.overfit_batches and epoch != self._asked:
            loader.rewind()
            self._ahead = epoch
        if epoch != self._asked:
            self._asked = epoch
            loader.end_iteration()
        loader.choose_epoch(epoch - self._ahead)

    def _most(self) -> float:
        limit, length = self._module.trainer.limit_train_batches, sized_len(self.loader)
        if isinstance(limit, int) or length is None:
            return min(inf if length is None else length, limit if isinstance(limit, int) else inf)
        return int(length * limit)

    def settle(self) -> None:
        """Let a loop that is being resumed take its counts from the loader, when the epoch begins or goes on."""
        loop, steps = self._module.trainer.fit_loop, self.loader.steps
        inner = loop.epoch_loop
        if not (inner.restarting or self.loader.resumed):
            return
        ended = int(inner.restarted_on_train_batch_end)
        inner.batch_progress.current.completed = steps - ended
        total = inner.batch_progress.total
        total.ready = total.started = total.processed = total.completed + ended
        inner.restarting = steps > 0


class TrainerMesh:
    """The data-parallel ranks of a trainer, under model-parallel strategies too; a `mesh=`."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def size(self) -> int:
        """Number of ranks that read different data."""
        return int((self._trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1))

    def get_local_rank(self) -> int:
        """This process among them."""
        return int((self._trainer.distributed_sampler_kwargs or {}).get("rank", 0))


class LastIndices(_IndexBatchSamplerWrapper):
    """Gives a `BasePredictionWriter` the indices of the batch that a loader delivered last, and keeps no others."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    @property
    def seen_batch_indices(self) -> Any:  # type: ignore[override]
        """Any index finds the last batch."""
        return defaultdict(lambda: list(map(int, self._loader.indices)), {None: None})
