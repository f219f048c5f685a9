"""`MapDataModule`: any map-style dataset as the loaders of a Lightning trainer. Imports lightning."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial, wraps
from typing import Any

import lightning
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info

from headrace.webdatamodule._lightning import LastIndices, PredictLoop
from headrace.webdatamodule._shared.checks import checked_int
from headrace.webdatamodule._shared.ranks import Mesh, Ranks
from headrace.webdatamodule.base_datamodule import BaseDataModule
from headrace.webdatamodule.loader import ResumableLoader
from headrace.webdatamodule.loading.batch_plans import has_state
from headrace.webdatamodule.loading.batch_sampler import DistributedBatchSampler
from headrace.webdatamodule.loading.distributed import is_distributed, on_one_rank, waiting
from headrace.webdatamodule.loading.factories import (
    BATCH_SAMPLER,
    RANKS,
    BatchSamplerFactory,
    InOrder,
    SamplerFactory,
    call_factory,
    check_callable,
    check_factories,
    keywords_of,
    make_batches,
    refuse_curriculum,
    refuse_uneven_evaluation,
)
from headrace.webdatamodule.loading.fingerprint import dataset_fingerprint, own_fingerprint
from headrace.webdatamodule.loading.map_datasets import check_datasets
from headrace.webdatamodule.loading.options import (
    Collate,
    Loading,
    OnError,
    SeedPer,
    called,
    describe_option,
    differences,
    seed_int,
)
from headrace.webdatamodule.loading.predictions import in_order
from headrace.webdatamodule.loading.sizes import Sizes, evaluated_sizes, sizes_of_dataset
from headrace.webdatamodule.loading.stage_report import Reports
from headrace.webdatamodule.loading.state_dict import check_module_state
from headrace.webdatamodule.split_names import BySplit, ForSplits, PerSplit, Split


class MapDataModule(BaseDataModule):
    """Map-style datasets as train, val, test and predict loaders of a Lightning trainer, with exact resume.

    Any map-style dataset is accepted: a list, a torch or Hugging Face `Dataset`, a PyTorch Geometric dataset. It is
    indexed by 0 to n - 1; convert tables, which are indexed by column, to rows. If the dataset has `__getitems__`, it
    is read a batch at a time; see `ResumableLoader` for the requirements.

    Batches are a function of the data, the options, the seed and the epoch; every rank gets the same number. A
    checkpoint saved at any moment stores the position, and resumes there with any number of ranks and workers: no
    sample is lost or repeated. Training batches are shuffled in each epoch anew; validation, test and predict deliver
    every sample once, in the same order every time. Changed data is refused: a dataset is identified by its own
    `fingerprint`, if it has one, else by its length and, for lists, arrays, tensors and Hugging Face datasets, by 64 to
    128 of its samples at even distances.

    `batch_size` to `num_workers` and `on_error` may be mappings from `Split` or the names of splits; a single value
    serves all splits, but a single `sampler` only training. `predict` uses `Split.predict`, or `Split.test` if there is
    no predict split.

    Args:
        datasets: {split: dataset}, such as {"train": train, "val": val}.
        batch_size: Samples of a batch on each rank.
        batch_sampler: Alternative to `batch_size`: a function that returns a batch sampler by size, see
            `BatchSamplerFactory`, such as `functools.partial(DistributedSizeAwareBatchSampler, max_total_size=16384)`.
        sizes: Sizes of the samples for `batch_sampler`, shape [n] or [n, k]: an array, a list or a tensor; an Arrow
            array, a pandas or polars Series, `dataset["length"]` of a Hugging Face dataset, or ("train.parquet",
            "length"), a Parquet file and its column; the name of a column of a Hugging Face dataset, or of each dataset
            in a `ConcatDataset`; or a function of the sample, which one process calls once for each. None: the
            dataset's own `sizes` or `num_tokens(index)`.
        sampler: A function that returns the order of the training samples, see `SamplerFactory`, such as
            `functools.partial(WeightedDistributedSampler, weights={name: weight})`. Validation, test and predict keep
            the order of the data, every sample once; only a mapping, {split: function}, orders them too.
        shuffle: Whether training batches of `batch_size` are shuffled. False is refused with a `sampler` or a
            `batch_sampler`, which determine the order themselves.
        drop_last: Whether training leaves out samples that do not fill a batch of `batch_size` on every rank;
            refused with a `batch_sampler`, which has its own options.
        collate_fn: Converts a list of samples to a batch, in the worker; None: torch's `default_collate`.
        num_workers: Number of worker processes; they persist across epochs.
        seed: Seed of the order and the batches, 0 to 2**64 - 1.
        on_error: "raise" the error of a sample that is damaged (a `DamagedShardError` or `DecodeError`), or "skip" the
            sample, warn and count it. An `UnsafePickleError` is always raised.
        seed_per: What the random numbers of transforms depend on. "step": seed, split, epoch, step and rank, in workers
            only. "sample": seed, epoch and sample, the same with any number of ranks and workers; then each sample
            seeds the global generators of `random`, numpy and torch's CPU, in 10 to 40 microseconds. See
            `ResumableLoader` and `sample_rng`.
        prefetch_factor: Batches that each worker prefetches; None: 2.
        pin_memory: Whether batches are copied to pinned memory; None: if there is a GPU.
        timeout: Seconds to wait for a batch of the workers before an error; 0 for no limit.
        multiprocessing_context: Start method of workers: "fork", "forkserver" or "spawn"; see torch.
        log_stats: Whether to give the figures of `ResumableLoader.metrics` to the trainer's loggers during a fit, every
            `log_every_n_steps`; and to log, at the end of each stage, the delivered samples of each source, padding and
            skipped samples.
        num_replicas: Number of data-parallel ranks; by default the trainer's or the process group's.
        rank: This rank; by default the trainer's or the process group's.
        mesh: In place of both, a 1-D `DeviceMesh` of the data-parallel ranks.
        accept: What may differ from the run that saved the checkpoint to resume from: arguments of the batches, such as
            {"batch_size"} or, of a `batch_sampler`, {"max_total_size"}, and "data" for samples that were appended. The
            rest of the epoch, new samples included, is delivered with the new ones.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument has a value that is not allowed.

    >>> module = MapDataModule({"train": list(range(10))}, batch_size=4, collate_fn=list, seed=1)
    >>> module.setup("fit")
    >>> loader = module.train_dataloader()
    >>> len(loader), sorted(number for batch in loader for number in batch)
    (3, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    """

    _sizes_are = "an array of one size for each sample, a column of a Hugging Face dataset, or a function of the sample"

    def __init__(
        self,
        datasets: BySplit[Any],
        *,
        batch_size: ForSplits[int] | None = None,
        batch_sampler: ForSplits[BatchSamplerFactory] | None = None,
        sizes: Any = None,
        sampler: ForSplits[SamplerFactory] | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        collate_fn: ForSplits[Collate] | None = None,
        num_workers: ForSplits[int] = 0,
        seed: int = 0,
        on_error: ForSplits[OnError] = "raise",
        seed_per: SeedPer = "step",
        prefetch_factor: int | None = None,
        pin_memory: bool | None = None,
        timeout: float = 600.0,
        multiprocessing_context: Any = None,
        log_stats: bool = False,
        num_replicas: int | None = None,
        rank: int | None = None,
        mesh: Mesh | None = None,
        accept: Collection[str] = (),
    ) -> None:
        super().__init__()
        self._accept = {accept} if isinstance(accept, str) else set(accept)
        self._batch_size = PerSplit("batch_size", batch_size)
        self._batch_sampler = PerSplit("batch_sampler", batch_sampler)
        self._given, self._sizes = self._checked_data(datasets, PerSplit("sizes", sizes))
        self._splits = {self._given.name: [split for split in Split if split in self._given]}
        self._sampler, self._shuffle, self._drop_last = PerSplit("sampler", sampler), shuffle, drop_last
        if not self._sampler.mapped:  # evaluation has to deliver every sample once
            self._sampler = PerSplit("sampler", {Split.train: sampler})
        self._collate_fn = PerSplit("collate_fn", collate_fn)
        self._num_workers, per_split = PerSplit("num_workers", num_workers, 0), PerSplit("on_error", on_error, "raise")
        where = "[{}]" if self._num_workers.mapped or per_split.mapped else ""
        self._loading = {
            split: Loading(
                num_workers=self._num_workers[split],
                prefetch_factor=prefetch_factor,
                pin_memory=pin_memory,
                timeout=timeout,
                multiprocessing_context=multiprocessing_context,
                on_error=per_split[split],
                seed_per=seed_per,
                where=where.format(repr(split.name)),
            )
            for split in Split
            if split in self._given
        }
        self._seed, self._log_stats = seed_int(seed), log_stats
        self._ranks = Ranks(num_replicas, rank, mesh)
        self._check()
        self._hide_val()
        self._datasets: dict[Split, Any] = {}
        self._fingerprints: dict[Split, str] = {}
        self._found_sizes: dict[Split, Sizes] = {}
        self._shared_sizes: dict[Split, Sizes] = {}  # the same, where one rank evaluated them for all
        self._reports = Reports()
        self._predicted: list[Sequence[int]] = []
        self._options: dict[str, str] = {}  # of the train loader, in words
        self._resized = False  # batch_size was set
        self._unnamed = False  # whether only their options tell one order or batch sampler from another

    def _check(self) -> None:
        for name, value in (("shuffle", self._shuffle), ("drop_last", self._drop_last)):
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be True or False, got {value!r}; it is for training alone")
        self._check_ignored()
        for split in self._loading:
            check_callable("collate_fn", self._collate_fn[split], split)
            check_factories(
                split,
                self._batch_size[split],
                self._batch_sampler[split],
                self._sizes[split],
                self._sampler[split],
                sizes_are=self._sizes_are,
                ranks_given=self._ranks.given,
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

    def _options_in_words(self) -> str:
        batches = self._batch_sampler if self._batch_size.given is None else self._batch_size
        shown = [f"{one.name}={one.in_words(_words)}" for one in (batches, self._num_workers)]
        return ", ".join([*shown, f"seed={self._seed}"])

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "val_dataloader"}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        super().__setstate__(kept)
        self._hide_val()

    def _hide_val(self) -> None:
        """Without a val split a trainer has to find no method of ours: it would warn models that do not validate."""
        if Split.val not in self._given:

            @wraps(lightning.LightningDataModule.val_dataloader)
            def missing() -> ResumableLoader:
                return self._loader(Split.val)  # type: ignore[no-any-return]  # which raises

            self.val_dataloader = missing  # type: ignore[method-assign]

    @property
    def batch_size(self) -> int | None:
        """Samples of a training batch on each rank, None with a `batch_sampler`; may be set between fits.

        Lightning's batch-size finder sets it.
        """
        size = self._batch_size[Split.train]
        return None if size is None else checked_int("batch_size", size, 1)

    @batch_size.setter
    def batch_size(self, size: int) -> None:
        if self.batch_size is None and Split.train in self._given:
            raise AttributeError("there is no batch_size to set: batch_sampler makes the batches")
        checked_int("batch_size", size, 1)
        given = self._batch_size
        value = {**given.given, Split.train: size} if given.mapped else size
        self._batch_size, self._resized = PerSplit("batch_size", value), True
        if (loader := self._loaders.pop(Split.train, None)) is not None:
            loader.close()

    def _checked_data(self, datasets: Any, sizes: PerSplit) -> tuple[PerSplit, PerSplit]:
        given = check_datasets(datasets)
        by_size = {
            split: sizes_of_dataset(split, given[split], sizes[split])
            for split in given
            if self._batch_sampler[split] is not None
        }
        return PerSplit("datasets", given), PerSplit("sizes", by_size or sizes.given)

    def _data_in_words(self, split: Split) -> str:
        return f"{len(self._given[split]):,} samples"

    def _open_dataset(self, split: Split) -> Any:
        return self._given[split]

    def _evaluate_sizes(self, split: Split) -> Sizes:
        sizes = self._sizes[split]
        return evaluated_sizes(sizes, self._given[split], split) if callable(sizes) else sizes

    def _open(self, split: Split) -> None:
        before = self._fingerprints.pop(split, None)
        self._datasets.pop(split, None)  # it may have been replaced since a former stage
        if self._fingerprint(split) != before and before is not None:
            self._found_sizes.pop(split, None)
            self._shared_sizes.pop(split, None)
        if is_distributed() and self._batch_sampler[split] is not None:
            self._sizes_of(split)  # as long as all ranks are here; a loader may be made by one of them

    def _dataset(self, split: Split) -> Any:
        if split not in self._datasets:
            self._datasets[split] = self._open_dataset(split)
        return self._datasets[split]

    def _fingerprint(self, split: Split) -> str:
        if split not in self._fingerprints:
            self._fingerprints[split] = dataset_fingerprint(self._dataset(split))
        return self._fingerprints[split]

    def _sizes_of(self, split: Split) -> Sizes | None:
        """The size of each sample, if there are sizes; all ranks have to call this the first time."""
        if callable(self._sizes[split]):  # evaluated by one rank; the others wait
            if split not in self._shared_sizes:
                self._shared_sizes[split] = on_one_rank(partial(self._evaluated_sizes, split))
            return self._shared_sizes[split]
        return None if self._sizes[split] is None else self._evaluated_sizes(split)

    def _evaluated_sizes(self, split: Split) -> Sizes:
        """The same, by this process alone."""
        if split not in self._found_sizes:
            self._found_sizes[split] = self._evaluate_sizes(split)
        return self._found_sizes[split]

    def val_dataloader(self) -> ResumableLoader:
        """The loader of the val split; where there is none, fit goes without."""
        return self._loader(Split.val)  # type: ignore[no-any-return]  # of `_make_loader`

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
        found = in_order(outputs, self._predicted)
        if gather and dist.is_available() and dist.is_initialized():
            parts: list[Any] = [None] * dist.get_world_size()
            with waiting("the other ranks to call predictions(gather=True)"):
                dist.all_gather_object(parts, found)
            found = sorted({index: row for part in parts[::-1] for index, row in part}.items())
        data = self._dataset(self._needed_by("predict"))
        key = getattr(data, "key", None)
        key = key if callable(key) else int
        return [(key(index), row) for index, row in found]

    def report(self) -> Reports:
        """Statistics of each split's loader on this rank, in the present stage or the last one that used it."""
        return Reports({**self._reports, **{split: loader.report() for split, loader in self._loaders.items()}})

    def _state_options(self) -> dict[str, str]:
        return self._options

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a checkpoint; it is checked as soon as the training split is needed.

        A trainer that tests, validates or predicts with the weights of a checkpoint leaves the position alone.

        Raises:
            TypeError: It is no mapping.
            ValueError: It is of another version; and later, if it is of other data, sizes, options or another seed.
        """
        check_module_state(state_dict)
        super().load_state_dict(state_dict)

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

    def _resume(self, loader: ResumableLoader) -> None:
        if self._resume_state is None:
            return
        train = self._resume_state["train"]
        if self._resized and isinstance(train, Mapping) and train.get("epoch") == train.get("steps") == 0:
            return  # the batch-size finder goes back to where it began, and nothing had been read
        accept = self._accept | ({"batch_size"} if self._same_trainer and self._resized else set())
        own = {name: value for name, value in self._options.items() if name not in accept}
        changed = differences(self._resume_state.get("options"), own)
        cure: Any = "resume with the options it was saved with, or start without the checkpoint"
        if changed and self._unnamed:
            raise ValueError(f"the checkpoint does not fit: {changed}; {cure}")
        try:
            loader._restore(train, accept)
        except ValueError as error:
            same_data = train.get("fingerprint") == self._fingerprint(Split.train)
            cure = error if getattr(error, "acceptable", ()) else cure
            reason = f"{changed}; {cure}" if changed and same_data else error
            raise ValueError(f"the checkpoint does not fit: {reason}") from error

    def _described(self) -> dict[str, str]:
        given = (self._batch_size, self._batch_sampler, self._sizes, self._sampler)
        options = {argument.name: describe_option(argument[Split.train]) for argument in given}
        options.update(seed=str(self._seed), shuffle=str(self._shuffle), drop_last=str(self._drop_last))
        return options

    def _make_loader(self, split: Split) -> ResumableLoader:
        data = self._dataset(split)
        sizes = None if self._batch_sampler[split] is None else self._sizes_of(split)
        training, ranks = split is Split.train, self._present_ranks()
        if training:
            self._options = self._described()
        if own := {name: value for name, value in keywords_of(self._batch_sampler[split]).items() if name in RANKS}:
            ranks = Ranks(**own)
        loader = ResumableLoader(
            data,
            partial(self._make_batches, split, data, sizes),
            collate_fn=self._collate_fn[split],
            sizes=sizes,
            seed=self._seed,
            fingerprint=self._fingerprint(split),
            num_replicas=ranks.num_replicas,
            rank=ranks.rank,
            mesh=ranks.mesh,
            name=split.name,
            fixed_epoch=not training,
            **self._loading[split].arguments(),
        )
        len(loader)  # makes the batch sampler, so that its errors come at once
        return loader

    def _make_batches(self, split: Split, data: Any, sizes: Sizes | None, num_replicas: int, rank: int) -> Any:
        """The batch sampler of a rank."""
        training, factory, sampler = split is Split.train, self._batch_sampler[split], self._sampler[split]
        order: Any = None if training or factory is None else InOrder(range(len(data)))
        if not training:
            refuse_curriculum(factory, split)
        if sampler is not None:
            order = call_factory(sampler, data, num_replicas=1, rank=0, seed=self._seed)
        subject: Any = sizes
        if factory is None:
            options: dict[str, Any] = {"shuffle": training and self._shuffle, "drop_last": training and self._drop_last}
            subject = len(data)
            factory = partial(DistributedBatchSampler, batch_size=self._batch_size[split], **options)
        batches = make_batches(factory, subject, sampler=order, num_replicas=num_replicas, rank=rank, seed=self._seed)
        if training:
            unnamed = order is not None and own_fingerprint(order) is None
            self._unnamed = unnamed or not has_state(batches)
        else:
            refuse_uneven_evaluation(batches)
        return batches


def _words(value: Any) -> str:
    """A number, or the name of a function."""
    function = called(value)[0] if isinstance(value, partial) else value
    return getattr(function, "__name__", type(function).__name__) if callable(function) else str(value)
