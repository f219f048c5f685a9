"""What all data modules share: a loader for each split, and checkpoints that hold the position in training."""

import copy
from collections.abc import Collection, Mapping
from typing import Any, Generic, Protocol, TypeVar

import lightning

from headrace.webdatamodule._lightning import EvaluationLoops, FitLoop
from headrace.webdatamodule._shared.display import never_raises
from headrace.webdatamodule._shared.ranks import Ranks
from headrace.webdatamodule.loading.epoch_loader import EpochLoader
from headrace.webdatamodule.loading.state_dict import module_state
from headrace.webdatamodule.loading.trainer_mesh import TrainerMesh
from headrace.webdatamodule.split_names import Split, need, needed_by, stage_name


class LoadedSplit(Protocol):
    """A split of a data module: its data, and how its loader is made."""

    @property
    def options(self) -> Mapping[str, str] | None:
        """The options of the train loader in words, which a state holds beside the position; None for none."""

    def open(self) -> None:
        """Open the data for a stage: they may have been replaced since a former one."""

    def loader(self, ranks: Ranks) -> EpochLoader[Any]:
        """Make a loader for these ranks."""

    def in_words(self) -> str:
        """What is known of the data; opens nothing."""


_Split = TypeVar("_Split", bound=LoadedSplit)


class BaseDataModule(lightning.LightningDataModule, Generic[_Split]):
    """A loader for each split, and the position in training for a trainer's checkpoints.

    Args:
        splits: Those that have all they need.
        arguments: The splits that each argument of the data module has, by its name.
        ranks: As they were given.
    """

    def __init__(
        self, splits: Mapping[Split, _Split], arguments: Mapping[str, Collection[Split]], ranks: Ranks
    ) -> None:
        super().__init__()
        self._splits, self._arguments, self._ranks = dict(splits), arguments, ranks
        self._loaders: dict[Split, Any] = {}
        self._in_stage = False  # of a trainer
        self._fit_loop: FitLoop | None = None
        self._resume_state: dict[str, Any] | None = None  # of the checkpoint to resume from
        self._copied_state: dict[str, Any] | None = None  # of the module that this one is a copy of
        self._last_fit_state: dict[str, Any] = {}  # for a checkpoint after a fit, and for the trainer's next fit
        self._same_trainer = False  # whether `_resume_state` is that of the trainer's fit before

    def _check_state(self, state: Any) -> None:
        """Refuse what is no state of a data module."""
        raise NotImplementedError

    def _options_in_words(self) -> str:
        raise NotImplementedError

    @never_raises
    def __repr__(self) -> str:
        """What it is, and where training is; opens nothing."""
        data = ", ".join(f"{split.name} {self._splits[split].in_words()}" for split in Split if split in self._splits)
        parts = [data, self._options_in_words()]
        if (loader := self._loaders.get(Split.train)) is not None:
            parts.append(f"train loader at epoch {loader.epoch}, step {loader.steps}")
        return f"<{type(self).__name__}: {'; '.join(parts)}>"

    __str__ = __repr__  # that of the base class makes all loaders

    def __getstate__(self) -> dict[str, Any]:
        """What a copy has: all but the loaders. Its train loader continues at the position, outside of a fit."""
        kept = {**vars(self), "_loaders": {}, "_fit_loop": None, "_in_stage": False}
        if Split.train in self._loaders:
            kept["_copied_state"] = self.state_dict()
        if self._in_stage:
            kept["trainer"] = None
        return kept

    def __copy__(self) -> Any:
        other, kept = object.__new__(type(self)), {**self.__getstate__(), "trainer": None}
        vars(other).update(
            {name: value.copy() if type(value) in (dict, list) else value for name, value in kept.items()}
        )
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        other = memo[id(self)] = object.__new__(type(self))
        kept = {name: value for name, value in self.__getstate__().items() if name != "trainer"}
        vars(other).update({**copy.deepcopy(kept, memo), "trainer": memo.get(id(self.trainer))})
        return other

    def setup(self, stage: str) -> None:
        """Open the data that a stage needs. Runs in every process.

        Args:
            stage: "fit", "validate", "test" or "predict".

        Raises:
            ValueError: The stage is unknown, or a split that it needs is missing; for a stream also if kwargs_wds or
                kwargs_wld has an unknown option, or there are more ranks than shards without indexes.
            FileNotFoundError: A split's location has no shards.
            ShardError: An index or a manifest is missing or damaged.
        """
        stage = stage_name(stage)
        needed = self._needed_by(stage)
        if self.trainer is not None:
            # Loaders that were made without it know neither its ranks nor its steps.
            self._close(train=stage == "fit")
            self._in_stage = True
        if stage == "fit":
            left, self._last_fit_state = self._last_fit_state, {}
            if self.trainer is not None:
                self._copied_state = None  # as the loader of the other module would be closed
            if self._fit_loop is not None:  # of a fit that was never torn down
                self._fit_loop.restore_reload()
            self._fit_loop = None if self.trainer is None else FitLoop(self)
            if left and self.trainer is not None and self.trainer.global_step and self.trainer.ckpt_path is None:
                self.load_state_dict(left)
                self._same_trainer = True
        self._need(needed, f"{stage}()")
        for split in (needed, Split.val) if stage == "fit" else (needed,):
            if split in self._splits:
                self._open(split)

    def _open(self, split: Split) -> None:
        self._splits[split].open()

    def train_dataloader(self) -> Any:
        """Return the loader of the train split; it resumes at the position of the checkpoint."""
        loader = self._loader(Split.train)
        if self._fit_loop is not None and self._fit_loop.trainer is not None:
            self._fit_loop.begin()  # before the trainer asks for its length
            _refuse_single_batches(loader, self._fit_loop.trainer)
        return loader

    def test_dataloader(self) -> Any:
        """Return the loader of the test split."""
        return self._loader(Split.test)

    def predict_dataloader(self) -> Any:
        """Return the loader of the predict split, or of the test split if there is none."""
        return self._loader(self._needed_by("predict"))

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the train loader and of its trainer; a trainer saves it in its checkpoints."""
        if (loader := self._loaders.get(Split.train)) is None:
            return self._copied_state or self._resume_state or self._last_fit_state
        trainer = None
        if self._fit_loop is not None and self._fit_loop.trainer is not None:  # None beside other loaders, too
            trainer = self._fit_loop.epochs.state_dict(loader)
        return module_state(loader.state_dict(), trainer, self._splits[Split.train].options)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a checkpoint; it is checked as soon as the training split is needed.

        A trainer that tests, validates or predicts with the weights of a checkpoint leaves the position alone.

        Args:
            state_dict: As `state_dict` returned it.

        Raises:
            TypeError: The state is not one of a data module.
            ValueError: The state has another version; or later, if data, sizes, options or the seed differ.
        """
        self._check_state(state_dict)
        if self._in_stage and self.trainer is not None and self.trainer.state.fn not in (None, "fit"):
            return
        self._resume_state, self._copied_state, self._same_trainer = dict(state_dict) or None, None, False
        if self._fit_loop is not None and "trainer" in state_dict:
            self._fit_loop.load_state_dict(state_dict["trainer"])
        if Split.train in self._loaders and self._resume_state is not None:
            self._resume(self._loaders[Split.train], self._resume_state)

    def teardown(self, stage: str) -> None:  # noqa: ARG002 - the trainer's interface
        """End the workers of a stage.

        The next stage starts from the beginning, unless it is given a checkpoint or is another fit of the same trainer.
        """
        self._end()

    def on_exception(self, exception: BaseException) -> None:  # noqa: ARG002 - the trainer's interface
        """End the workers after an error."""
        self._end()

    def _end(self) -> None:
        if self._fit_loop is not None:
            self._fit_loop.restore_reload()
        self._last_fit_state = self.state_dict()
        self._close(train=not self._in_stage or self._fit_loop is not None)
        self._in_stage, self._resume_state, self._copied_state, self._fit_loop = False, None, None, None

    def _close(self, *, train: bool) -> None:
        """Close the loaders; that of the train split, which a loop of one's own may read, if `train` says so."""
        for split in [split for split in self._loaders if train or split is not Split.train]:
            loader = self._loaders.pop(split)
            loader.close()
            loader._release()  # a caller may keep it, without the trainer

    def _loader(self, split: Split) -> Any:
        self._need(split, f"{split.name}_dataloader()")
        if split not in self._loaders:
            loader: Any = self._splits[split].loader(self._present_ranks())
            if split is Split.train:
                copied, self._copied_state = self._copied_state, None
                if copied is not None:
                    loader._restore(copied["train"])
                elif self._resume_state is not None:
                    self._resume(loader, self._resume_state)
                if self._fit_loop is not None:
                    self._fit_loop.loader = loader
                    loader._join(self._fit_loop)
            elif self._in_stage:
                loader._join(EvaluationLoops(self.trainer))
            self._loaders[split] = loader
        return self._loaders[split]

    def _resume(self, loader: Any, state: Mapping[str, Any]) -> None:
        loader._restore(state["train"])

    def _present_ranks(self) -> Ranks:
        """The ranks as they were given, else the trainer's."""
        if self.trainer is not None and not self._ranks.given:
            return Ranks(mesh=TrainerMesh(self.trainer))
        return self._ranks

    def _needed_by(self, stage: str) -> Split:
        return needed_by(stage, {split for splits in self._arguments.values() for split in splits})

    def _need(self, split: Split, what: str) -> None:
        for name, splits in self._arguments.items():
            need(split, what, name, splits)


def _refuse_single_batches(loader: Any, trainer: Any) -> None:
    """Refuse a trainer that would take an optimizer step for each batch, where the sampler plans steps of several."""
    counts = getattr(loader, "accumulation", None)
    if (
        counts is None
        or max(counts, default=1) == 1
        or trainer.accumulate_grad_batches != 1
        or trainer.strategy.handles_gradient_accumulation
        or not trainer.lightning_module.automatic_optimization
        or any(getattr(callback, "accumulates_tokens", False) for callback in trainer.callbacks)
    ):
        return
    raise ValueError(
        f"callbacks must hold TokensPerStep() of headrace.size_aware_batching where the batch sampler has "
        f"tokens_per_step, got none: the optimizer would step after every batch, not after {max(counts)}"
    )
