"""`ResumableDataModule`: what data modules over map-style datasets share, below the opening of their data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial, wraps
from typing import Any, Protocol

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info

from headrace.webdatamodule._lightning import FitLoop, LastIndices
from headrace.webdatamodule.loader import ResumableLoader
from headrace.webdatamodule.loading.distributed import TrainerMesh, check_given_ranks
from headrace.webdatamodule.loading.factories import (
    BATCH_SAMPLER,
    RANKS,
    check_callable,
    check_factories,
    keywords_of,
    make_batches,
)
from headrace.webdatamodule.loading.options import (
    PerSplit,
    as_int,
    check_loading,
    describe_option,
    differences,
    seed_int,
)
from headrace.webdatamodule.loading.position import has_state
from headrace.webdatamodule.loading.predictions import in_order
from headrace.webdatamodule.loading.sizes import Sizes
from headrace.webdatamodule.loading.stats import Reports
from headrace.webdatamodule.splits import Split, need, needed_by, stage_name

VERSION = 1


class SplitSource(Protocol):
    """The dataset of each split."""

    def reopen(self, split: Split) -> None:
        """Look at a split as it is now, when a stage begins."""

    def opened(self, split: Split) -> Any:
        """Its dataset, map-style."""

    def sizes(self, split: Split) -> Sizes | None:
        """Of each sample; all ranks have to call this."""

    def fingerprint(self, split: Split) -> str:
        """Stands for the data of a split."""


class ResumableDataModule(lightning.LightningDataModule):
    """Map-style datasets as train, val, test and predict loaders of a Lightning trainer, resumed exactly.

    The base of `IndexedWebDataModule` and `MapDataModule`, which say what the arguments are. A subclass sets `_data`.
    """

    _data: SplitSource

    def __init__(
        self,
        given: PerSplit,
        *,
        batch_size: Any,
        batch_sampler: Any,
        sizes: PerSplit,
        sampler: Any,
        shuffle: Any,
        drop_last: Any,
        collate_fn: Any,
        num_workers: Any,
        seed: Any,
        on_error: Any,
        prefetch_factor: Any,
        pin_memory: bool | None,
        timeout: Any,
        multiprocessing_context: Any,
        log_stats: bool,
        num_replicas: Any,
        rank: Any,
        mesh: Any,
    ) -> None:
        super().__init__()
        self._given, self._sizes = given, sizes
        self._batch_size = PerSplit("batch_size", batch_size)
        self._batch_sampler = PerSplit("batch_sampler", batch_sampler)
        self._sampler, self._shuffle, self._drop_last = PerSplit("sampler", sampler), shuffle, drop_last
        if not self._sampler.mapped:  # evaluation has to deliver every sample once
            self._sampler = PerSplit("sampler", {Split.train: sampler})
        self._collate_fn = PerSplit("collate_fn", collate_fn)
        self._num_workers = PerSplit("num_workers", num_workers, 0)
        self._on_error = PerSplit("on_error", on_error, "raise")
        self._seed, self._log_stats = seed_int(seed), log_stats
        self._loading = {
            "prefetch_factor": prefetch_factor,
            "timeout": timeout,
            "multiprocessing_context": multiprocessing_context,
        }
        self._pin_memory = pin_memory
        check_given_ranks(num_replicas, rank, mesh)
        self._ranks = (num_replicas, rank, mesh)
        self._check()
        self._hide_val()
        self._loaders: dict[Split, ResumableLoader] = {}
        self._fit_loop: FitLoop | None = None
        self._reports = Reports()
        self._predicted: list[Sequence[int]] = []
        self._options: dict[str, str] = {}  # of the train loader, in words
        self._resized = False  # batch_size was set
        self._unnamed = False  # whether only their options tell one order or batch sampler from another
        self._saved: dict[str, Any] | None = None  # of the checkpoint to resume from
        self._left: dict[str, Any] = {}  # of a fit that is over, for a checkpoint that is saved after it

    def _check(self) -> None:
        for name, value in (("shuffle", self._shuffle), ("drop_last", self._drop_last)):
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be True or False, got {value!r}; it is for training alone")
        self._check_ignored()
        loading = self._loading
        where = "[{}]" if self._num_workers.mapped or self._on_error.mapped else ""
        for split in filter(self._given.__contains__, Split):
            workers, on_error = self._num_workers[split], self._on_error[split]
            check_loading(workers, loading["prefetch_factor"], loading["timeout"], on_error, where.format(split))
            check_callable("collate_fn", self._collate_fn[split], split)
            check_factories(
                split,
                self._batch_size[split],
                self._batch_sampler[split],
                self._sizes[split],
                self._sampler[split],
                ranks_given=any(value is not None for value in self._ranks),
            )
        if not any(self._batch_sampler[split] for split in Split) and self._sizes.given is not None:
            raise ValueError(f"sizes is for batch_sampler, and there is none: give {BATCH_SAMPLER}")

    def _check_ignored(self) -> None:
        """Refuse options that the factories of the train split leave without effect."""
        if Split.train not in self._given:
            return
        if self._batch_sampler[Split.train] is not None and (self._drop_last or not self._shuffle):
            option = "drop_last=True" if self._drop_last else "shuffle=False"
            raise ValueError(
                f"{option} is for batch_size, and batch_sampler makes the training batches: give it to batch_sampler, "
                "as an argument of its functools.partial, such as shuffle=False or tail='drop' of "
                "DistributedSizeAwareBatchSampler"
            )
        if self._sampler[Split.train] is not None and not self._shuffle:
            raise ValueError("shuffle=False and sampler both decide the order of training: drop one of them")

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "val_dataloader"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._hide_val()

    def _hide_val(self) -> None:
        """Without a val split a trainer has to find no method of ours: it would warn that validation has no loader."""
        if Split.val not in self._given:

            @wraps(lightning.LightningDataModule.val_dataloader)
            def missing() -> ResumableLoader:
                return self._loader(Split.val)  # which raises

            self.val_dataloader = missing  # type: ignore[method-assign]

    @property
    def batch_size(self) -> int | None:
        """Samples of a training batch on each rank, None with a `batch_sampler`; may be set between fits.

        Lightning's batch-size finder sets it.
        """
        size = self._batch_size[Split.train]
        return None if size is None else as_int("batch_size", size, 1)

    @batch_size.setter
    def batch_size(self, size: int) -> None:
        if self.batch_size is None and Split.train in self._given:
            raise AttributeError("there is no batch_size to set: batch_sampler makes the batches")
        as_int("batch_size", size, 1)
        given = self._batch_size
        value = {**given.given, Split.train: size} if given.mapped else size
        self._batch_size, self._resized = PerSplit("batch_size", value), True
        if (loader := self._loaders.pop(Split.train, None)) is not None:
            loader.close()

    def setup(self, stage: str) -> None:
        """Open the data that a stage needs. Runs in every process.

        Args:
            stage: "fit", "validate", "test" or "predict".

        Raises:
            ValueError: An unknown stage, or a split that it needs is missing.
            FileNotFoundError: There are no shards at a split's place.
            ShardError: There is no index or no manifest, or it is damaged.
        """
        stage = stage_name(stage)
        needed = self._needed_by(stage)
        if self.trainer is not None:
            self._close()  # loaders that were made without it know neither its ranks nor its steps
        if stage == "fit":
            self._left = {}
            self._fit_loop = None if self.trainer is None else FitLoop(self)
        self._need(needed, f"{stage}()")
        for split in (needed, Split.val) if stage == "fit" else (needed,):
            if split in self._given:
                self._data.reopen(split)

    def train_dataloader(self) -> ResumableLoader:
        """The loader of the train split. It resumes where the checkpoint of the run stood."""
        loader = self._loader(Split.train)
        if self._fit_loop is not None and self._fit_loop.trainer is not None:
            self._fit_loop.begin()  # before the trainer asks for its length
        return loader

    def val_dataloader(self) -> ResumableLoader:
        """The loader of the val split; where there is none, fit goes without."""
        loader = self._loader(Split.val)
        loader.counts = self._is_counted
        return loader

    def test_dataloader(self) -> ResumableLoader:
        """The loader of the test split."""
        return self._loader(Split.test)

    def predict_dataloader(self) -> ResumableLoader:
        """The loader of the predict split, or the test split; `predictions` sorts what comes of it."""
        loader = self._loader(self._needed_by("predict"))
        self._predicted = []
        keeps = self.trainer is None or self.trainer.predict_loop.return_predictions
        loader.on_batch = self._predicted.append if keeps else None
        loader.batch_sampler = LastIndices(loader)
        return loader

    def predictions(self, outputs: Sequence[Any], *, gather: bool = False) -> list[tuple[Any, Any]]:
        """The outputs of `Trainer.predict`, sample by sample, in the order of the data.

        Args:
            outputs: One for each batch: an array, a tensor or a list with one row for each sample, or a dictionary,
                tuple or named tuple of these.
            gather: Whether to put those of all ranks together, on each of them; all have to call it then.

        Returns:
            Pairs of a sample's key, where the dataset has `key(index)`, else its index, and its row; of this rank's
            samples, or of all, each once.

        Raises:
            TypeError: There are no outputs.
            ValueError: There are not as many outputs as batches, or rows as samples.
        """
        if outputs is None:
            raise TypeError("outputs must come from Trainer.predict, got None: leave out return_predictions=False")
        found = in_order(outputs, self._predicted)
        if gather and dist.is_available() and dist.is_initialized():
            parts: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(parts, found)
            found = sorted({index: row for part in parts[::-1] for index, row in part}.items())
        data = self._data.opened(self._needed_by("predict"))
        key = getattr(data, "key", int)
        return [(key(index), row) for index, row in found]

    def report(self) -> Reports:
        """Statistics of each split's loader on this rank, in the present stage or the last one that used it."""
        return Reports({**self._reports, **{split: loader.report() for split, loader in self._loaders.items()}})

    def state_dict(self) -> dict[str, Any]:
        """The position in the training split, for a checkpoint."""
        if (loader := self._loaders.get(Split.train)) is not None:
            state = {"version": VERSION, "train": loader.state_dict(), "options": self._options}
            return state if self._fit_loop is None else {**state, "trainer": self._fit_loop.epochs.state_dict(loader)}
        return self._saved or self._left

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a checkpoint; it is checked as soon as the training split is needed.

        A trainer that tests, validates or predicts with the weights of a checkpoint leaves the position alone.

        Raises:
            TypeError: It is no mapping.
            ValueError: It is of another version; and later, if it is of other data, sizes, options or another seed.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"the checkpoint's data state must be a mapping, got {type(state_dict).__name__}")
        if state_dict and (state_dict.get("version") != VERSION or "train" not in state_dict):
            found = state_dict.get("version")
            raise ValueError(f"the checkpoint's data state has version {found!r}, this release reads {VERSION}")
        if self.trainer is not None and self.trainer.state.fn not in (None, "fit"):
            return
        self._saved = dict(state_dict) or None
        if self._saved and self._fit_loop is not None and "trainer" in state_dict:
            self._fit_loop.epochs.load_state_dict(state_dict["trainer"])
            self._fit_loop.allow_cuts()
        if Split.train in self._loaders:
            self._resume(self._loaders[Split.train])

    def teardown(self, stage: str) -> None:  # noqa: ARG002 - the trainer's interface
        """End the workers of a stage, and log its statistics if `log_stats` says so."""
        if self._log_stats and not (dist.is_available() and dist.is_initialized() and dist.get_rank()):
            for loader in self._loaders.values():
                rank_zero_info(str(loader.report()))
        self._end()

    def on_exception(self, exception: BaseException) -> None:
        """End the workers, and note the samples that were waited for if one of them was killed."""
        for loader in self._loaders.values():
            loader.explain(exception)
        self._end()

    def _end(self) -> None:
        self._left, self._reports = self.state_dict(), self.report()
        self._close()
        self._saved = self._fit_loop = None

    def _close(self) -> None:
        for loader in self._loaders.values():
            loader.close()
            loader.fit_loop = None  # whoever still has the loader has it without the trainer
        self._loaders.clear()

    def _loader(self, split: Split) -> ResumableLoader:
        self._need(split, f"{split.name}_dataloader()")
        if split not in self._loaders:
            loader = self._make_loader(split)
            if split is Split.train:
                self._options = self._described()
                self._resume(loader)
                if self._fit_loop is not None:
                    loader.fit_loop, self._fit_loop.loader = self._fit_loop, loader
            self._loaders[split] = loader
        return self._loaders[split]

    def _resume(self, loader: ResumableLoader) -> None:
        if self._saved is None:
            return
        train = self._saved["train"]
        if self._resized and isinstance(train, Mapping) and train.get("epoch") == train.get("steps") == 0:
            return  # the batch-size finder goes back to where it began, and nothing had been read
        changed = differences(self._saved.get("options"), self._options)
        cure = "resume with the options it was saved with, or start without the checkpoint"
        if changed and self._unnamed:
            raise ValueError(f"the checkpoint does not fit: {changed}; {cure}")
        try:
            loader.restore(train)
        except ValueError as error:
            same_data = train.get("fingerprint") == self._data.fingerprint(Split.train)
            told = f"{changed}; {cure}" if changed and same_data else error
            raise ValueError(f"the checkpoint does not fit: {told}") from error

    def _described(self) -> dict[str, str]:
        given = (self._batch_size, self._batch_sampler, self._sizes, self._sampler)
        options = {argument.name: describe_option(argument[Split.train]) for argument in given}
        options.update(seed=str(self._seed), shuffle=str(self._shuffle), drop_last=str(self._drop_last))
        return options

    def _make_loader(self, split: Split) -> ResumableLoader:
        data = self._data.opened(split)
        sizes = None if self._batch_sampler[split] is None else self._data.sizes(split)
        training = split is Split.train
        ranks = self._ranks
        if self.trainer is not None and ranks == (None, None, None):
            ranks = (None, None, TrainerMesh(self.trainer))
        batches = partial(self._make_batches, split, data, sizes)
        if own := {name: value for name, value in keywords_of(self._batch_sampler[split]).items() if name in RANKS}:
            ranks = (own.get("num_replicas"), own.get("rank"), own.get("mesh"))
        loader = ResumableLoader(
            data,
            batches,
            collate_fn=self._collate_fn[split],
            num_workers=self._num_workers[split],
            on_error=self._on_error[split],
            sizes=sizes,
            seed=self._seed,
            fingerprint=self._data.fingerprint(split),
            num_replicas=ranks[0],
            rank=ranks[1],
            mesh=ranks[2],
            name=split.name,
            fixed_epoch=not training,
            pin_memory=torch.cuda.is_available() if self._pin_memory is None else self._pin_memory,
            **self._loading,
        )
        len(loader)  # makes the batch sampler, so that its errors come at once
        return loader

    def _make_batches(self, split: Split, data: Any, sizes: Sizes | None, num_replicas: int, rank: int) -> Any:
        """The batch sampler of a rank."""
        training = split is Split.train
        order, batches = make_batches(
            data,
            sizes,
            self._batch_size[split],
            self._batch_sampler[split],
            self._sampler[split],
            training=training,
            shuffle=training and self._shuffle,
            drop_last=training and self._drop_last,
            num_replicas=num_replicas,
            rank=rank,
            seed=self._seed,
        )
        if training:
            unnamed = order is not None and getattr(order, "fingerprint", None) is None
            self._unnamed = unnamed or not has_state(batches)
        return batches

    def _is_counted(self) -> bool:
        return self.trainer is None or not self.trainer.sanity_checking

    def _needed_by(self, stage: str) -> Split:
        return needed_by(stage, [split for split in Split if split in self._given])

    def _need(self, split: Split, what: str) -> None:
        need(split, what, self._given.name, [one for one in Split if one in self._given])
