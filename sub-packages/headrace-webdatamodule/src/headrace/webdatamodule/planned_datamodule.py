"""Data modules whose batches are planned: loaders, reports, predictions and resumes. Imports lightning."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import lightning
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info

from headrace.webdatamodule._lightning import LastIndices, PredictLoop
from headrace.webdatamodule._shared.checks import checked_int
from headrace.webdatamodule._shared.display import counted
from headrace.webdatamodule._shared.ranks import Ranks
from headrace.webdatamodule.base_datamodule import BaseDataModule
from headrace.webdatamodule.loader import ResumableLoader
from headrace.webdatamodule.loading.batching import Batching
from headrace.webdatamodule.loading.distributed import is_distributed, on_one_rank, waiting
from headrace.webdatamodule.loading.fingerprint import dataset_fingerprint
from headrace.webdatamodule.loading.options import Loading, called, differences
from headrace.webdatamodule.loading.predictions import in_order
from headrace.webdatamodule.loading.sizes import Sizes
from headrace.webdatamodule.loading.stage_report import Reports
from headrace.webdatamodule.loading.state_dict import check_module_state
from headrace.webdatamodule.split_names import Split


class SplitData(Protocol):
    """The samples of a split: a dataset as it was given, or shards."""

    def open(self) -> Any:
        """Return the map-style dataset, as the data are now."""

    def evaluate(self, sizes: Any) -> Sizes:
        """Return the size of each sample; evaluates a function in this process."""

    def in_words(self) -> str:
        """What is known of the samples before they are opened."""


class PlannedSplit:
    """A split whose batches are planned: its samples in the present stage, their sizes, and the loader over them."""

    def __init__(self, data: SplitData, batching: Batching, loading: Loading) -> None:
        self._data, self.batching, self.loading = data, batching, loading
        self.options: dict[str, str] = {}  # of the latest loader, in words
        self.dataset: Any = None  # until it is opened
        self.fingerprint: str | None = None
        self._evaluated_sizes: Sizes | None = None
        self._agreed_sizes: Sizes | None = None  # the same, where one rank evaluated them for all

    def with_batch_size(self, batch_size: int) -> PlannedSplit:
        """Return the same split with batches of another size."""
        other = copy.copy(self)
        other.batching = replace(self.batching, batch_size=batch_size)
        return other

    def in_words(self) -> str:
        """The number of samples, where it is known."""
        return self._data.in_words() if self.dataset is None else counted(len(self.dataset), "sample")

    def open(self) -> None:
        """Open the data for a stage: they may have been replaced since a former one."""
        self.dataset = self._data.open()
        before, self.fingerprint = self.fingerprint, dataset_fingerprint(self.dataset)
        if before not in (None, self.fingerprint):
            self._evaluated_sizes = self._agreed_sizes = None
        if is_distributed():
            self._sizes()  # as long as all ranks are here; a loader may be made by one of them

    def evaluate_sizes(self) -> Sizes:
        """Return the size of each sample, evaluated once by this process."""
        if self._evaluated_sizes is None:
            self._evaluated_sizes = self._data.evaluate(self.batching.sizes)
        return self._evaluated_sizes

    def _sizes(self) -> Sizes | None:
        """The size of each sample where batches are made by size; all ranks have to call this the first time."""
        if self.batching.batch_sampler is None:
            return None
        if not callable(self.batching.sizes):
            return self.evaluate_sizes()
        if self._agreed_sizes is None:  # one rank evaluates the function; the others wait
            self._agreed_sizes = on_one_rank(self.evaluate_sizes)
        return self._agreed_sizes

    def loader(self, ranks: Ranks) -> ResumableLoader:
        """Make a loader for these ranks, or for those that its batch sampler names."""
        if self.dataset is None:
            self.open()
        sizes, batching = self._sizes(), self.batching
        ranks = batching.factory_ranks() or ranks
        self.options = batching.options() if batching.split is Split.train else {}
        loader = ResumableLoader(
            self.dataset,
            partial(batching.make, self.dataset, sizes),
            sizes=sizes,
            seed=batching.seed,
            fingerprint=self.fingerprint,
            num_replicas=ranks.num_replicas,
            rank=ranks.rank,
            mesh=ranks.mesh,
            name=batching.split.name,
            fixed_epoch=batching.split is not Split.train,
            **self.loading.arguments(),
        )
        len(loader)  # makes the batch sampler, so that its errors come at once
        return loader

    def resume(self, loader: ResumableLoader, state: Mapping[str, Any], accept: Collection[str]) -> None:
        """Resume the train loader from the state of a data module, unless data or options differ."""
        position, options = state["train"], {name: self.options[name] for name in self.options.keys() - accept}
        changed = differences(state.get("options"), options)
        cure: Any = "resume with the options it was saved with, or start without the checkpoint"
        if changed and not self.batching.is_named_by(loader.batch_sampler, self.dataset):
            raise ValueError(f"the checkpoint does not fit: {changed}; {cure}")
        try:
            loader._restore(position, accept)
        except ValueError as error:
            same_data = position.get("fingerprint") == self.fingerprint
            cure = error if getattr(error, "acceptable", ()) else cure
            reason = f"{changed}; {cure}" if changed and same_data else error
            raise ValueError(f"the checkpoint does not fit: {reason}") from error


class PlannedDataModule(BaseDataModule[PlannedSplit]):
    """A data module with planned batches; `argument` is the name of the one that gives the data of the splits."""

    _check_state = staticmethod(check_module_state)

    def __init__(
        self,
        argument: str,
        data: Mapping[Split, SplitData],
        batching: Mapping[Split, Batching],
        loading: Mapping[Split, Loading],
        *,
        ranks: Ranks,
        log_stats: bool,
        accept: Collection[str],
    ) -> None:
        splits = {split: PlannedSplit(data[split], batching[split], loading[split]) for split in Split if split in data}
        super().__init__(splits, {argument: list(splits)}, ranks)
        self._accept = {accept} if isinstance(accept, str) else set(accept)
        self._log_stats = log_stats
        self._reports = Reports()
        self._predicted: list[Sequence[int]] = []
        self._resized = False  # batch_size was set
        if Split.val not in self._splits:
            self.val_dataloader = _MissingLoader(self)  # type: ignore[method-assign]

    def _options_in_words(self) -> str:
        options = {split: {**vars(own.batching), **vars(own.loading)} for split, own in self._splits.items()}
        words = []
        for name in ("batch_size", "batch_sampler", "num_workers", "seed"):
            values = {split: its[name] for split, its in options.items() if its[name] is not None}
            shown = ", ".join(f"{split.name}: {_word(value)}" for split, value in values.items())
            if len(values) == len(options) and all(value == next(iter(values.values())) for value in values.values()):
                words.append(f"{name}={_word(next(iter(values.values())))}")
            elif values:
                words.append(f"{name}={{{shown}}}")
        return ", ".join(words)

    @property
    def batch_size(self) -> int | None:
        """Samples of a training batch on each rank, None with a `batch_sampler`; may be set between fits.

        Splits that have the same number of samples in a batch follow. Lightning's batch-size finder sets it.
        """
        split = self._splits.get(Split.train) or next(iter(self._splits.values()), None)
        return None if split is None else split.batching.batch_size

    @batch_size.setter
    def batch_size(self, size: int) -> None:
        if (before := self.batch_size) is None:
            raise AttributeError("there is no batch_size to set: batch_sampler makes the batches")
        size = checked_int("batch_size", size, 1)
        self._splits = {
            split: own.with_batch_size(size) if own.batching.batch_size == before else own
            for split, own in self._splits.items()
        }
        self._resized = True
        if (loader := self._loaders.pop(Split.train, None)) is not None:
            loader.close()

    def val_dataloader(self) -> ResumableLoader:
        """The loader of the val split; where there is none, fit goes without."""
        return self._loader(Split.val)  # type: ignore[no-any-return]  # of a planned split

    def predict_dataloader(self) -> ResumableLoader:
        """The loader of the predict split, or the test split; `predictions` sorts what comes of it."""
        loader: ResumableLoader = super().predict_dataloader()
        self._predicted = []
        keeps = self.trainer is None or self.trainer.predict_loop.return_predictions
        trainer = self.trainer if self._in_stage else None
        loader._join(PredictLoop(trainer, self._predicted if keeps else None))
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
        rows = in_order(outputs, self._predicted)
        if gather and dist.is_available() and dist.is_initialized():
            parts: list[Any] = [None] * dist.get_world_size()
            with waiting("the other ranks to call predictions(gather=True)"):
                dist.all_gather_object(parts, rows)
            rows = sorted({index: row for part in parts[::-1] for index, row in part}.items())
        key = getattr(self._splits[self._needed_by("predict")].dataset, "key", None)
        key = key if callable(key) else int
        return [(key(index), row) for index, row in rows]

    def report(self) -> Reports:
        """Statistics of each split's loader on this rank, in the present stage or the last one that used it."""
        return Reports({**self._reports, **{split: loader.report() for split, loader in self._loaders.items()}})

    def teardown(self, stage: str) -> None:
        """End the workers of a stage, and log its statistics if `log_stats` says so."""
        if self._log_stats and not (dist.is_available() and dist.is_initialized() and dist.get_rank()):
            Reports({split: loader.report() for split, loader in self._loaders.items()}).log(rank_zero_info)
        super().teardown(stage)

    def on_exception(self, exception: BaseException) -> None:
        """End the workers, and note the samples that were waited for if one of them was killed."""
        for loader in self._loaders.values():
            loader._explain_if_own(exception)
        super().on_exception(exception)

    def _end(self) -> None:
        self._reports = self.report()
        super()._end()

    def _resume(self, loader: ResumableLoader, state: Mapping[str, Any]) -> None:
        position = state["train"]
        if self._resized and isinstance(position, Mapping) and position.get("epoch") == position.get("steps") == 0:
            return  # the batch-size finder goes back to where it began, and nothing had been read
        accept = self._accept | ({"batch_size"} if self._same_trainer and self._resized else set())
        self._splits[Split.train].resume(loader, state, accept)


class _MissingLoader:
    """In place of `val_dataloader` without a val split: for a method, a trainer warns models that do not validate."""

    __wrapped__ = lightning.LightningDataModule.val_dataloader  # where Lightning looks

    def __init__(self, module: PlannedDataModule) -> None:
        self._module = module

    def __call__(self) -> Any:
        return self._module._loader(Split.val)  # which raises


def _word(value: Any) -> str:
    """A number, or the name of a function."""
    function = called(value)[0] if isinstance(value, partial) else value
    return getattr(function, "__name__", type(function).__name__) if callable(function) else str(value)
