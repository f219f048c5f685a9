"""`MapDataModule`: any map-style dataset as the loaders of a Lightning trainer. Imports lightning."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset
from tqdm import tqdm

from headrace.webdatamodule.loading.columns import array_of_column
from headrace.webdatamodule.loading.sizes import Sizes
from headrace.webdatamodule.loading.stats import check_sizes
from headrace.webdatamodule.resumable_datamodule import ResumableDataModule
from headrace.webdatamodule.splits import PerSplit, Split, by_split

# Methods of pyarrow's, pandas' and polars' tables, and what gives their rows; a dataset of Hugging Face has not all.
_TABLES = {
    ("to_pylist", "column_names"): "table.to_pylist()",
    ("to_dict", "iloc", "columns"): 'table.to_dict("records")',
    ("to_dicts", "columns"): "table.to_dicts()",
}


class MapDataModule(ResumableDataModule):
    """Map-style datasets as train, val, test and predict loaders of a Lightning trainer, resumed exactly.

    Any dataset will do: a list, a torch or Hugging Face `Dataset`, one of PyTorch Geometric. Samples have the indices 0
    to n - 1, unlike in tables, whose rows make a dataset. It is read with `__getitems__`, a batch at a time, where it
    has that: a list with one sample for each index, in their order, see `ResumableLoader`.

    Batches are a function of the data, the options, the seed and the epoch; every rank gets as many. A checkpoint of
    any moment holds the position, and resumes there with any number of ranks and workers: no sample is lost, none comes
    twice. Training batches are shuffled anew in each epoch; validation, test and predict deliver every sample once, in
    the same order every time. Data that changed is refused: it is known by the dataset's own `fingerprint` where it has
    one, else by its length and, of lists, arrays, tensors and Hugging Face datasets, 64 to 128 of its samples
    at even distances.

    `batch_size` to `num_workers` and `on_error` may be mappings from `Split` or the names of splits; one value serves
    all splits, one `sampler` training alone. `predict` uses `Split.predict`, or `Split.test` where there is none.

    Args:
        datasets: {split: dataset}, such as {"train": train, "val": val}.
        batch_size: Samples of a batch on each rank.
        batch_sampler: Instead, a function that makes batches by size, see `BatchSamplerFactory`, such as
            `functools.partial(DistributedSizeAwareBatchSampler, max_total_size=16384)`.
        sizes: Of the samples, for `batch_sampler`, shape [n] or [n, k]: an array, a list or a tensor; an Arrow array, a
            Series of pandas or polars, `dataset["length"]` of a Hugging Face dataset, or ("train.parquet", "length"), a
            Parquet file and its column; the name of a column of a Hugging Face dataset, or of each in a
            `ConcatDataset`; or a function of the sample, which one process calls once for each. When None, the
            dataset's own `sizes` or `num_tokens(index)`.
        sampler: A function that makes the order of the training samples, see `SamplerFactory`, such as
            `functools.partial(WeightedDistributedSampler, weights={name: weight})`. Validation, test and predict keep
            the order of the data, every sample once; only a mapping, {split: function}, orders them too.
        shuffle: Whether training batches of `batch_size` are shuffled. False is refused beside a `sampler` or a
            `batch_sampler`, which decide the order themselves.
        drop_last: Whether training leaves out samples that do not fill a batch of `batch_size` on every rank;
            refused beside a `batch_sampler`, which has options of its own.
        collate_fn: Makes a batch of a list of samples, in the worker; torch's `default_collate` when None.
        num_workers: Processes that read ahead; they stay from epoch to epoch.
        seed: Of the order and the batches, 0 to 2**64 - 1.
        on_error: "raise" the error of a sample that is damaged (a `DamagedShardError` or `DecodeError`), or "skip" the
            sample, warn and count it. An `UnsafePickleError` is always raised.
        prefetch_factor: Batches that each worker reads ahead; 2 when None.
        pin_memory: Whether batches are copied to memory that a GPU reads directly; when None, if there is one.
        timeout: Seconds to wait for a batch of the workers before it is an error; 0 for no limit.
        multiprocessing_context: How workers are started: "fork", "forkserver" or "spawn"; see torch.
        log_stats: Whether to log, at the end of each stage, the delivered samples of each source, padding and skipped
            samples.
        num_replicas: Number of data-parallel ranks, instead of the trainer's or the process group's.
        rank: This one, likewise.
        mesh: Instead of both, a 1-D `DeviceMesh` of the data-parallel ranks.

    Raises:
        TypeError: An argument of the wrong kind.
        ValueError: An argument that is not allowed.

    >>> module = MapDataModule({"train": list(range(10))}, batch_size=4, collate_fn=list, seed=1)
    >>> module.setup("fit")
    >>> loader = module.train_dataloader()
    >>> len(loader), sorted(number for batch in loader for number in batch)
    (3, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    """

    _sizes_are = "an array of one size for each sample, a column of a Hugging Face dataset, or a function of the sample"

    def _checked_data(self, datasets: Any, sizes: PerSplit) -> tuple[PerSplit, PerSplit]:
        given = _checked(datasets)
        by_size = {
            split: _read(split, given[split], sizes[split]) for split in given if self._batch_sampler[split] is not None
        }
        return PerSplit("datasets", given), PerSplit("sizes", by_size or sizes.given)

    def _data_in_words(self, split: Split) -> str:
        return f"{len(self._given[split]):,} samples"

    def _open_dataset(self, split: Split) -> Any:
        return self._given[split]

    def _evaluate_sizes(self, split: Split) -> Sizes:
        sizes = self._sizes[split]
        return _evaluated(sizes, self._given[split], split) if callable(sizes) else sizes


def _checked(datasets: Any) -> dict[Split, Any]:
    given = by_split("datasets", datasets, "dataset")
    if not given:
        raise ValueError("datasets is empty: give at least one, such as {'train': dataset}")
    for split, dataset in given.items():
        _refuse_tables(f"datasets[{split.name!r}]", dataset)
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            kind = type(dataset).__name__
            raise TypeError(f"datasets[{split.name!r}] must have len() and integer indices, got {kind}")
        if isinstance(dataset, Mapping):
            _refuse_names(f"datasets[{split.name!r}]", dataset)
    if Split.train in given and not len(given[Split.train]):
        raise ValueError("datasets['train'] is empty: training needs samples; leave the split out to evaluate alone")
    return given


def _refuse_tables(name: str, dataset: Any) -> None:
    """Refuse what has a length and indices, but no samples: a path, or a table that gives columns."""
    kind = type(dataset).__name__
    if isinstance(dataset, str | bytes | os.PathLike):
        cure = "read it first, such as datasets.Dataset.from_parquet(path)"
        raise TypeError(f"{name} is a path, {reprlib.repr(dataset)}: {cure}")
    for methods, rows in _TABLES.items():
        if all(hasattr(dataset, method) for method in methods):
            cure = f"give its rows, {rows}, or datasets.Dataset.from_parquet(path) of a file"
            raise TypeError(f"{name} is a table that is indexed by columns, a {kind}: {cure}")


def _refuse_names(name: str, dataset: Mapping[Any, Any]) -> None:
    """Refuse a mapping that does not have the indices of samples as its keys."""
    try:
        for index in {0, len(dataset) - 1} if len(dataset) else ():
            dataset[index]
    except KeyError:
        keys = ", ".join(reprlib.repr(key) for key in islice(dataset, 5))
        more = ", ..." if len(dataset) > 5 else ""
        raise TypeError(
            f"{name} is a mapping with the keys {keys}{more}, and samples are found by 0 to n - 1: give columns as a "
            "TensorDataset(x, y) or datasets.Dataset.from_dict(columns), and several sources as a ConcatDataset, or "
            "NamedConcatDataset of headrace-weighted-sampler"
        ) from None


def _read(split: Split, dataset: Any, sizes: Any) -> Any:
    """The sizes of a split as an array; a function as it is, and None where there are none."""
    if sizes is None:
        own = getattr(dataset, "sizes", None)
        sizes = None if callable(own) else own
        if sizes is None and callable(getattr(dataset, "num_tokens", None)):
            sizes = [dataset.num_tokens(index) for index in range(len(dataset))]
    if sizes is None or callable(sizes):
        return sizes
    if isinstance(sizes, str) and isinstance(dataset, ConcatDataset):
        return np.concatenate([_read(split, one, sizes) for one in dataset.datasets])
    if isinstance(sizes, str):
        columns = getattr(dataset, "column_names", None) or ()
        if sizes not in columns:
            have = f"has {', '.join(map(repr, columns)) or 'none'}"
            told = (
                f"sizes={sizes!r} must be a column of datasets[{split.name!r}], a {type(dataset).__name__} that {have}"
            )
            raise ValueError(f"{told}: give an array, or a function of the sample")
        sizes = dataset[sizes]
    array = np.asarray(array_of_column(sizes, f"sizes[{split.name!r}]"))
    if array.dtype.kind not in "iuf":
        raise TypeError(
            f"sizes[{split.name!r}] must be numbers or a function of the sample, got {type(sizes).__name__}"
        )
    return check_sizes(array, dataset, f"sizes[{split.name!r}]")


def _evaluated(function: Callable[[Any], Any], dataset: Any, split: Split) -> Sizes:
    bar = tqdm(range(len(dataset)), desc=f"sizing {split.name}", unit="sample", delay=1.0, disable=None)
    sizes = np.array([function(dataset[index]) for index in bar])
    if sizes.dtype.kind not in "iuf":
        raise TypeError(f"sizes[{split.name!r}] must give numbers, got {sizes.dtype}")
    return sizes
