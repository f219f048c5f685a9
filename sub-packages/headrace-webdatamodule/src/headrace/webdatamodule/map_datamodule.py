"""`MapDataModule`: any map-style dataset as the loaders of a Lightning trainer. Imports lightning."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from headrace.webdatamodule._shared.display import counted
from headrace.webdatamodule._shared.ranks import Mesh, Ranks
from headrace.webdatamodule.loading.batching import Batching
from headrace.webdatamodule.loading.factories import BatchSamplerFactory, SamplerFactory
from headrace.webdatamodule.loading.options import Collate, Loading, OnError, SeedPer
from headrace.webdatamodule.loading.sizes import Sizes, evaluated_sizes, sizes_of_dataset
from headrace.webdatamodule.planned_datamodule import PlannedDataModule
from headrace.webdatamodule.shards.urls import redacted
from headrace.webdatamodule.split_names import BySplit, ForSplits, PerSplit, Split, by_split

_SIZES = "an array of one size for each sample, a column of a Hugging Face dataset, or a function of the sample"
# Methods of pyarrow's, pandas' and polars' tables, and what gives their rows; a dataset of Hugging Face has not all.
_TABLES = {
    ("to_pylist", "column_names"): "table.to_pylist()",
    ("to_dict", "iloc", "columns"): 'table.to_dict("records")',
    ("to_dicts", "columns"): "table.to_dicts()",
}


class MapDataModule(PlannedDataModule):
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

    `batch_size`, `batch_sampler`, `sizes`, `sampler`, `collate_fn`, `num_workers` and `on_error` may be mappings from
    `Split` or the names of splits; a single value serves all splits, but a single `sampler` only training. `predict`
    uses `Split.predict`, or `Split.test` if there is no predict split.

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
        checked = _checked_datasets(datasets)
        factories, sizes_of = PerSplit("batch_sampler", batch_sampler), PerSplit("sizes", sizes)
        by_size = {
            split: sizes_of_dataset(split, dataset, sizes_of[split])
            for split, dataset in checked.items()
            if factories[split] is not None
        }
        ranks = Ranks(num_replicas, rank, mesh)
        batching = Batching.by_split(
            checked,
            batch_size=batch_size,
            batch_sampler=batch_sampler,
            sizes=by_size or sizes,
            sampler=sampler,
            shuffle=shuffle,
            drop_last=drop_last,
            seed=seed,
            ranks=ranks,
            sizes_are=_SIZES,
        )
        loading = Loading.by_split(
            checked,
            collate_fn=collate_fn,
            num_workers=num_workers,
            on_error=on_error,
            seed_per=seed_per,
            prefetch_factor=prefetch_factor,
            pin_memory=pin_memory,
            timeout=timeout,
            multiprocessing_context=multiprocessing_context,
        )
        data = {split: GivenDataset(split, dataset) for split, dataset in checked.items()}
        super().__init__("datasets", data, batching, loading, ranks=ranks, log_stats=log_stats, accept=accept)


@dataclass(frozen=True)
class GivenDataset:
    """The dataset of a split, as it was given."""

    split: Split
    dataset: Any

    def open(self) -> Any:
        """Return it."""
        return self.dataset

    def evaluate(self, sizes: Any) -> Sizes:
        """Return the sizes; a function is called for each sample."""
        return evaluated_sizes(sizes, self.dataset, self.split) if callable(sizes) else sizes

    def in_words(self) -> str:
        """The number of samples."""
        return counted(len(self.dataset), "sample")


def _checked_datasets(datasets: Any) -> dict[Split, Any]:
    """The datasets by split; refuses those that are not indexed by sample."""
    given = by_split("datasets", datasets, "dataset")
    if not given:
        raise ValueError("datasets is empty: give at least one, such as {'train': dataset}")
    for split, dataset in given.items():
        _refuse_tables(f"datasets[{split.name!r}]", dataset)
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            kind = type(dataset).__name__
            raise TypeError(f"datasets[{split.name!r}] must have len() and integer indices, got {kind}")
        if isinstance(dataset, Mapping) and dataset and not {0, len(dataset) - 1} <= dataset.keys():
            keys = ", ".join(map(reprlib.repr, islice(dataset, 5))) + (", ..." if len(dataset) > 5 else "")
            raise TypeError(
                f"datasets[{split.name!r}] is a mapping with the keys {keys}, and samples are found by 0 to n - 1: "
                "give columns as a TensorDataset(x, y) or datasets.Dataset.from_dict(columns), and several sources as "
                "a ConcatDataset, or NamedConcatDataset of headrace-weighted-sampler"
            )
    if Split.train in given and not len(given[Split.train]):
        raise ValueError("datasets['train'] is empty: training needs samples; leave the split out to evaluate alone")
    return given


def _refuse_tables(name: str, dataset: Any) -> None:
    """Refuse what has a length and indices, but no samples: a path, or a table that gives columns."""
    kind = type(dataset).__name__
    if isinstance(dataset, str | bytes | os.PathLike):
        cure = "read it first, such as datasets.Dataset.from_parquet(path)"
        path = reprlib.repr(redacted(dataset) if isinstance(dataset, str) else dataset)
        raise TypeError(f"{name} is a path, {path}: {cure}")
    for methods, rows in _TABLES.items():
        if all(hasattr(dataset, method) for method in methods):
            cure = f"give its rows, {rows}, or datasets.Dataset.from_parquet(path) of a file"
            raise TypeError(f"{name} is a table that is indexed by columns, a {kind}: {cure}")
