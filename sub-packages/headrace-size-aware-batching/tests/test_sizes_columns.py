"""Columns of other libraries as sizes."""

import sys

import pytest
from sets_of_sizes import Dataset

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
from headrace.size_aware_batching.sizes.read import read_sizes


def test_parquet_without_pyarrow_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)  # as if it were not installed
    with pytest.raises(ImportError, match=r"need pyarrow, to read train\.parquet: pip install pyarrow"):
        DistributedSizeAwareBatchSampler(("train.parquet", "length"), 10)


def test_a_module_of_ones_own_may_be_called_datasets() -> None:
    kind = type("Proteins", (Dataset,), {"__module__": "datasets.proteins"})
    assert read_sizes(kind(lambda index: index, 3)).tolist() == [0, 1, 2]
