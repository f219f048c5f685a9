"""Columns of Arrow, Hugging Face datasets, Parquet, polars, pandas and numpy as sizes, weights and groups."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import ConcatDataset

from headrace.size_aware_batching import (
    BucketBatchSampler,
    DistributedSizeAwareBatchSampler,
    SizeAwareBatchSampler,
    plan_step,
)
from headrace.weighted_sampler import WeightedDistributedSampler

pa = pytest.importorskip("pyarrow")
SIZES = [5, 1, 4, 1, 5, 9, 2, 6]


def planned(sizes: Any) -> list[Any]:
    sampler = DistributedSizeAwareBatchSampler(sizes, 10, num_replicas=1, rank=0)
    return list(sampler.sizes.tolist())


def shared(sizes: Any, buffer: Any) -> bool:
    sampler = DistributedSizeAwareBatchSampler(sizes, 10, num_replicas=1, rank=0)
    return np.shares_memory(sampler.sizes, np.asarray(buffer))


def test_arrow_arrays_are_not_copied() -> None:
    array = pa.array(SIZES)
    whole, parts = pa.chunked_array([array]), pa.chunked_array([array[:3], array[3:]])
    assert planned(array) == planned(whole) == planned(parts) == SIZES
    assert shared(array, array)
    assert shared(whole, array)
    assert planned(pa.array(SIZES, pa.uint16())) == planned(pa.array(SIZES, pa.float64())) == SIZES
    with pytest.raises(ValueError, match=r"got nan at index 1 \(1 of 2 are negative, null or NaN, or too large\)"):
        planned(pa.array([3, None]))
    with pytest.raises(TypeError, match="sizes must be numbers"):
        planned(pa.array(["ab", "c"]))
    with pytest.raises(TypeError, match=r"sizes must be one column, got a pyarrow.*Table with 'n': give table\['n'\]"):
        planned(pa.table({"n": SIZES}))


def test_series_of_pandas_and_polars() -> None:
    pd, pl = pytest.importorskip("pandas"), pytest.importorskip("polars")
    buffer = np.array(SIZES)
    assert planned(pd.Series(SIZES)) == planned(pl.Series(SIZES)) == SIZES
    assert shared(pd.Series(buffer, copy=False), buffer)
    series = pl.Series(SIZES)
    assert shared(series, series.to_numpy())
    assert planned(pd.Series(SIZES, index=list("hgfedcba"))) == SIZES  # by position, whatever the index says
    for kind in ("Int64", "int64[pyarrow]", "float64"):
        assert planned(pd.Series(SIZES, dtype=kind)) == SIZES
    for missing in (pd.Series([3, None], dtype="Int64"), pl.Series([3, None])):
        with pytest.raises(ValueError, match="got nan at index 1"):
            planned(missing)


def test_groups_of_a_step_and_weights_of_samples_are_columns_as_sizes_are(tmp_path: Path) -> None:
    pd, pl, datasets = (pytest.importorskip(name) for name in ("pandas", "polars", "datasets"))
    parquet = pytest.importorskip("pyarrow.parquet")
    names, weights = list("abacbdcd"), [1.0, 3.0, 1.0, 0.0, 3.0, 2.0, 2.0, 1.0]
    parquet.write_table(pa.table({"name": names, "weight": weights}), tmp_path / "a.parquet")
    dataset = datasets.Dataset.from_dict({"name": names, "weight": weights})

    def groups(column: Any) -> list[list[int]]:
        plan = plan_step([5] * 8, 10, num_replicas=4, group_by=column)
        return [np.concatenate(rank).tolist() for rank in plan.micro_batches]

    def drawn(column: Any) -> list[int]:
        return list(WeightedDistributedSampler(range(8), column, num_replicas=1, rank=0, epoch_length=40))

    def by_tokens(column: Any) -> list[int]:
        sampler = WeightedDistributedSampler(
            range(8), {(0, 4): 1, (4, 8): 1}, num_replicas=1, rank=0, semantics="proportion", per="token", sizes=column
        )
        return list(sampler)

    for kind in ("str", "object", "category", "string[pyarrow]"):
        assert groups(pd.Series(names, dtype=kind)) == groups(names)
    for column in (pd.Categorical(names), pl.Series(names), pl.Series(names, dtype=pl.Categorical)):
        assert groups(column) == groups(names)
    for column in (pa.array(names), pa.chunked_array([names]), pa.array(names).dictionary_encode()):
        assert groups(column) == groups(names)
    assert groups(dataset["name"]) == groups((tmp_path / "a.parquet", "name")) == groups(names)
    with pytest.raises(TypeError, match=r"group_by must hold .* got None at index 7"):
        groups(pa.array([*names[:7], None]))
    columns = (pd.Series(weights), pl.Series(weights), pa.array(weights), pa.chunked_array([weights]))
    for numbers in (*columns, dataset["weight"], (tmp_path / "a.parquet", "weight")):
        assert drawn(numbers) == drawn(weights)
        assert by_tokens(numbers) == by_tokens(weights)
    with pytest.raises(TypeError, match=r"weights must be one column, got a pyarrow.lib.Table"):
        drawn(pa.table({"weight": weights}))


def test_a_memory_map_is_not_read_into_memory(tmp_path: Path) -> None:
    np.save(tmp_path / "sizes.npy", np.array(SIZES, np.uint16))
    mapped = np.load(tmp_path / "sizes.npy", mmap_mode="r")
    assert planned(mapped) == SIZES
    assert shared(mapped, mapped)


def test_every_sampler_takes_them() -> None:
    for sizes in (pa.array(SIZES), pa.chunked_array([SIZES])):
        batches = list(SizeAwareBatchSampler(range(8), sizes, 10))
        assert batches == list(SizeAwareBatchSampler(range(8), SIZES, 10))
        buckets = BucketBatchSampler(
            sizes, [0, 3, 10], SizeAwareBatchSampler, {"max_total_size": 10, "sizeof": sizes}, shuffle=False
        )
        assert sorted(index for batch in buckets for index in batch) == list(range(8))


def test_a_column_of_parquet_files(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"text": list("abcdefgh"), "n": SIZES}), tmp_path / "a.parquet")
    parquet.write_table(pa.table({"text": list("ij"), "n": [7, 8]}), tmp_path / "b.parquet")
    assert planned((tmp_path / "a.parquet", "n")) == planned((str(tmp_path / "a.parquet"), "n")) == SIZES
    assert planned((tmp_path, "n")) == [*SIZES, 7, 8]
    with pytest.raises(ValueError, match=r"a\.parquet has no column 'tokens', only 'text', 'n'"):
        planned((tmp_path / "a.parquet", "tokens"))
    assert planned(([tmp_path / "b.parquet", tmp_path / "a.parquet"], "n")) == [7, 8, *SIZES]
    with pytest.raises(FileNotFoundError, match=r"\*\.parquet is a pattern.*: give the folder, or a list of files"):
        planned((tmp_path / "*.parquet", "n"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty holds no Parquet files: give the folder of them, or a list"):
        planned((tmp_path / "empty", "n"))
    with pytest.raises(FileNotFoundError, match=r"c\.parquet"):
        planned((tmp_path / "c.parquet", "n"))
    with pytest.raises(TypeError, match=r"sizes must be numbers, .*'\.\.\.a\.parquet': give the file with its column"):
        planned("...a.parquet")


def test_a_column_of_a_dataset_follows_its_rows() -> None:
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"text": ["x" * n for n in SIZES], "n": SIZES})
    assert planned(dataset["n"]) == SIZES
    turned = dataset.select([3, 2, 5])
    assert planned(turned["n"]) == [1, 4, 9]
    mixed = dataset.shuffle(seed=1)
    assert planned(mixed["n"]) == [row["n"] for row in mixed]
    for form in ("numpy", "torch", "arrow", None):
        assert planned(mixed.with_format(form)["n"]) == [row["n"] for row in mixed]
    both = datasets.concatenate_datasets([turned, dataset])
    assert planned(both["n"]) == [1, 4, 9, *SIZES]
    nested = datasets.Dataset.from_dict({"graph": [{"atoms": n, "bonds": 2 * n} for n in SIZES]})
    assert planned(nested["graph"]["atoms"]) == SIZES


def test_a_column_of_a_dataset_is_read_at_once() -> None:
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"n": np.arange(200_000) % 10 + 1})
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        for rows in (dataset, dataset.shuffle(seed=1)):
            assert len(planned(rows["n"])) == 200_000
    finally:
        sys.setprofile(None)
    assert calls < 200_000  # row by row there are some for each of 400,000 rows


def test_a_whole_dataset_is_refused_with_the_cure() -> None:
    datasets = pytest.importorskip("datasets")
    dataset: Any = datasets.Dataset.from_dict({"text": ["ab", "c"], "n": [2, 1]})
    told = r"sizes must be one column, got a datasets.*Dataset with 'text', 'n': give dataset\['n'\]"
    with pytest.raises(TypeError, match=told):
        planned(dataset)
    bare = dataset.remove_columns("n")
    with pytest.raises(TypeError, match=r"with 'text': none holds numbers; add one, such as .*\.map\("):
        planned(bare)
    with pytest.raises(TypeError, match=r"DatasetDict with the splits 'train': give sizes of one of them"):
        planned(datasets.DatasetDict({"train": dataset}))
    with pytest.raises(TypeError, match=r"IterableDataset, a stream: .*bucketed_batching"):
        planned(dataset.to_iterable_dataset())


def test_several_datasets_name_the_cure() -> None:
    datasets = pytest.importorskip("datasets")
    dataset: Any = datasets.Dataset.from_dict({"text": ["ab", "c"], "n": [2, 1]})
    several: ConcatDataset[Any] = ConcatDataset([dataset, dataset])
    told = r"give dataset\['n'\] of each, as np.concatenate\(\[part\[\.\.\.\]\[:\] for part in dataset\.datasets\]\)"
    with pytest.raises(TypeError, match=told):
        planned(several)
    assert planned(np.concatenate([one["n"][:] for one in several.datasets])) == [2, 1, 2, 1]


def test_a_column_of_a_dataset_with_a_transform_is_refused_with_the_cure() -> None:
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"n": SIZES, "graph": [{"atoms": n} for n in SIZES]})
    tenfold = dataset.with_transform(lambda rows: {**rows, "n": [10 * n for n in rows["n"]]})
    assert tenfold["n"][0] == 10 * SIZES[0]  # the dataset returns others than it stores
    told = r"^sizes must be those of the samples, got column 'n' of a dataset with a transform.*\(None\)\['n'\]"
    for changed in (tenfold, tenfold.shuffle(seed=1)):
        with pytest.raises(ValueError, match=told):
            planned(changed["n"])
    with pytest.raises(ValueError, match=r"column 'graph' of a dataset with a transform"):
        planned(tenfold["graph"]["atoms"])
    with pytest.raises(ValueError, match=r"^sizeof must be those of the samples, got column 'n'"):
        SizeAwareBatchSampler(range(8), tenfold["n"], 10)
    assert planned(tenfold.with_format(None)["n"]) == SIZES
    dataset.set_transform(lambda rows: {"n": [2 * n for n in rows["n"]]})
    with pytest.raises(ValueError, match=told):
        planned(dataset["n"])
