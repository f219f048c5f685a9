"""Map-style datasets that a user gives: tables, paths and mappings of names are refused."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Mapping
from itertools import islice
from typing import Any

from headrace.webdatamodule.shards.urls import redacted
from headrace.webdatamodule.split_names import Split, by_split

# Methods of pyarrow's, pandas' and polars' tables, and what gives their rows; a dataset of Hugging Face has not all.
_TABLES = {
    ("to_pylist", "column_names"): "table.to_pylist()",
    ("to_dict", "iloc", "columns"): 'table.to_dict("records")',
    ("to_dicts", "columns"): "table.to_dicts()",
}


def check_datasets(datasets: Any) -> dict[Split, Any]:
    """The datasets by split; refuses those that are not indexed by sample."""
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
        path = reprlib.repr(redacted(dataset) if isinstance(dataset, str) else dataset)
        raise TypeError(f"{name} is a path, {path}: {cure}")
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
