"""Samples of every structure, and what both collate functions make of their fields."""

import pickle
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from sequences import lengths_lists, sequences
from torch.utils.data import DataLoader

from headrace.size_aware_batching import (
    DistributedSizeAwareBatchSampler,
    PackedCollate,
    PaddedCollate,
)


class Protein(NamedTuple):
    """A sample with names."""

    tokens: torch.Tensor
    charge: float


def test_the_form_of_a_sample_is_kept() -> None:
    batch = PaddedCollate()([Protein(torch.ones(2), 1.0), Protein(torch.ones(1), -1.0)])
    assert isinstance(batch, Protein)
    assert batch.tokens.shape == (2, 2)
    nested = PaddedCollate({"b": 4})([{"a": ({"b": torch.ones(n)}, [torch.ones(n), n])} for n in (1, 2)])
    assert nested["a"][0]["b"].tolist() == [[1, 4], [1, 1]]
    assert isinstance(nested["a"][1], list)
    assert nested["a"][1][1].tolist() == [1, 2]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(3),
        np.arange(3)[::-1],
        np.arange(3, dtype=">i4"),
        np.arange(6, dtype=np.float32)[::2],
        np.array([True]),
    ],
)
def test_numpy_arrays_of_every_make(array: NDArray[Any]) -> None:
    read_only = array.copy()
    read_only.flags.writeable = False  # as memory-mapped ones are; torch would warn
    for collated in (PaddedCollate()([array, read_only]), PackedCollate()([array, read_only]).values.reshape(2, -1)):
        assert collated.tolist() == [array.tolist()] * 2
    assert PaddedCollate()([np.float32(1), np.float32(2)]).dtype == torch.float32


@pytest.mark.parametrize("kind", [PaddedCollate, PackedCollate])
def test_numbers_and_texts_may_be_named_as_fixed(kind: Any) -> None:
    samples: list[Any] = [{"ids": [1, 2], "label": 3, "name": "a"}, {"ids": [4], "label": 5, "name": "b"}]
    batch = kind(fixed=["label", "name"])(samples)
    assert batch["label"].tolist() == [3, 5]
    assert batch["name"] == ["a", "b"]
    with pytest.raises(ValueError, match=r"fixed must name fields .* got \['lable'\]: the samples have .*'label'"):
        kind(fixed=["lable"])(samples)
    with pytest.raises(ValueError, match=r"pad_value must name fields with a dimension 0, got \['label'\]"):
        kind(pad_value={"label": 0})(samples)


@given(lengths_lists, st.integers(1, 10))
def test_samples_are_cut_to_their_first_elements(lengths: list[int], most: int) -> None:
    samples: list[Any] = [{"x": x, "y": [float(n) for n in range(len(x))]} for x in sequences(lengths, 2)]
    cut = [{"x": sample["x"][:most], "y": sample["y"][:most]} for sample in samples]
    kinds: list[Any] = [PaddedCollate, PackedCollate]
    for kind in kinds:
        batch, expected = kind(max_length=most)(samples), kind()(cut)
        assert batch.keys() == expected.keys()
        assert all(torch.as_tensor(batch[key]).equal(torch.as_tensor(expected[key])) for key in batch)
    assert [len(sample["x"]) for sample in samples] == lengths


def test_what_is_fixed_is_not_cut() -> None:
    samples = [{"ids": [1, 2, 3], "features": [4, 5, 6]}, {"ids": [1], "features": [7, 8, 9]}]
    batch = PaddedCollate(max_length=2, fixed=["features"], return_lengths=True)(samples)
    assert batch["ids"].tolist() == [[1, 2], [1, 0]]
    assert batch["lengths"].tolist() == [2, 1]
    assert batch["features"].tolist() == [[4, 5, 6], [7, 8, 9]]


def test_a_cut_and_a_sampler_that_counts_it_stay_within_the_budget() -> None:
    sizes = [int(n) for n in np.random.default_rng(0).integers(1, 900, 300)]
    samples = [torch.zeros(size) for size in sizes]
    ways: list[tuple[Any, Any]] = [(PackedCollate, {}), (PaddedCollate, {"strategy": "bucketed", "cost": "padded"})]
    for kind, options in ways:
        batches = DistributedSizeAwareBatchSampler(sizes, 2048, max_length=512, **options)
        for batch in batches:
            kind(max_length=512, max_total_size=2048)([samples[index] for index in batch])
        loader: DataLoader[Any] = DataLoader(
            samples,  # type: ignore[arg-type]  # a list is a dataset of the map style
            batch_sampler=batches,
            collate_fn=kind(max_total_size=2048),
        )
        with pytest.raises(ValueError, match=r"max_total_size=2048 .* got \d+ of \d+ samples, .* max_length="):
            list(loader)


def test_a_batch_over_the_budget_is_refused() -> None:
    samples = [{"ids": [1, 2, 3]}, {"ids": [1]}]
    assert PaddedCollate(max_total_size=6)(samples)["ids"].numel() == 6
    with pytest.raises(
        ValueError, match=r"max_total_size=5 .* got 6 of 2 samples, the longest with 3: .* cost='padded', or the sizes"
    ):
        PaddedCollate(max_total_size=5)(samples)
    with pytest.raises(ValueError, match=r"max_total_size=7 .* got 8"):
        PaddedCollate(length_multiple=4, max_total_size=7)(samples)
    assert PackedCollate(max_total_size=4, total_multiple=8)(samples)["cu_seqlens"].tolist() == [0, 3, 4, 7, 8]
    with pytest.raises(ValueError, match=r"max_total_size=3 .* got 4 of 2 samples, the longest with 3"):
        PackedCollate(max_total_size=3)(samples)
    with pytest.raises(ValueError, match=r"max_total_size=4 .* got 6"):
        PaddedCollate(max_total_size=4)([{"source": [1], "target": [1, 2, 3]}, {"source": [1, 2], "target": [1]}])


ones = torch.ones


FAULTS: list[tuple[list[Any], type[Exception], str]] = [
    ([], ValueError, "samples must hold at least one"),
    ([{"x": ones(1)}, {"y": ones(1)}], ValueError, r"samples\[1\] has other keys.*lacks \['x'\] and has \['y'\]"),
    ([{"x": ones(1)}, {"x": ones(1), "y": ones(1)}], ValueError, r"samples\[0\]: it has \['y'\] besides: give all"),
    ([{"x": ones(1), "y": ones(1)}, {"x": ones(1)}], ValueError, r"samples\[0\]: it lacks \['y'\]: give all"),
    ([{"a": {"x": ones(1)}}, {"a": {}}], ValueError, r"samples\[1\]\['a'\] has other keys"),
    ([(ones(1),), (ones(1), ones(1))], ValueError, r"samples\[1\] has 2 elements, samples\[0\] has 1"),
    ([{"x": ones(1)}, {"x": ones(2).long()}], ValueError, r"samples\[1\]\['x'\] is of torch.int64, .*torch.float32"),
    ([(1, ones(1)), (1.5, ones(1))], ValueError, r"samples\[1\]\[0\] is of torch.float64"),
    ([{"x": ones(1)}, {"x": "one"}], TypeError, r"samples\[1\]\['x'\] is text, samples\[0\]\['x'\] is a tensor"),
    ([{"x": ones(1)}, {"x": None}], TypeError, r"samples\[1\]\['x'\] must be a tensor.*got NoneType"),
    ([np.array(["a"])], TypeError, r"samples\[0\] must be .*got an array of <U1"),
    ([ones(2, 3), ones(2, 4)], ValueError, r"samples\[1\] has shape \[2, 4\], samples\[0\] has \[2, 3\]"),
    ([ones(2), ones(2, 1)], ValueError, r"samples\[1\] has shape \[2, 1\]"),
]


@pytest.mark.parametrize("collate", [PaddedCollate(), PackedCollate()])
@pytest.mark.parametrize(("samples", "error", "message"), FAULTS)
def test_faulty_samples_are_named(collate: Any, samples: list[Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        collate(samples)


# Lists of numbers.


def test_lists_of_floats_become_float32_and_empty_lists_take_the_dtype_of_the_others() -> None:
    for collate in (PaddedCollate(), PackedCollate()):
        batch = collate([{"x": []}, {"x": [0.5, 2]}])
        assert batch["x"].dtype == torch.float32
        assert batch["x"].flatten().tolist()[-2:] == [0.5, 2.0]
    assert PaddedCollate()([[1, 2], [3]]).dtype == torch.int64
    assert PaddedCollate()([[True], [False]]).dtype == torch.bool
    assert PaddedCollate()([list(np.arange(3)), [1]]).tolist() == [[0, 1, 2], [1, 0, 0]]


@pytest.mark.parametrize(
    "values",
    [
        *([1, 2], [True, False], [1, True], [True, 2], [1, 0.5], [0.5, 1], [0.5, True], [1, 2j], [0.5, 2j]),
        *([2**63 - 1, -(2**63)], [np.int32(1), 2], [1, np.float64(0.5)], [float("nan"), 1e300]),
    ],
)
def test_lists_of_numbers_take_the_values_of_numpy(values: list[Any]) -> None:
    array = np.array(values)
    with np.errstate(over="ignore"):
        expected = array.astype(np.float32) if array.dtype == np.float64 else array
        batch = PackedCollate()([values]).values
    assert batch.numpy().dtype == expected.dtype
    np.testing.assert_array_equal(batch.numpy(), expected)
    batch[0] = batch[1]  # writeable


def test_lists_that_hold_other_things_are_fields() -> None:
    rows, count = PaddedCollate()([[[1, 2], 3], [[4], 5]])
    assert rows.tolist() == [[1, 2], [4, 0]]
    assert count.tolist() == [3, 5]
    square = PaddedCollate()([[[1, 2], [3, 4]], [[5], [6]]])
    assert [part.tolist() for part in square] == [[[1, 2], [5, 0]], [[3, 4], [6, 0]]]


# In loaders.


@pytest.mark.slow
@pytest.mark.parametrize(
    "collate",
    [
        PaddedCollate({0: -1}, 4, fixed=[1], return_mask=True),
        pytest.param(PackedCollate(fixed=[1]), marks=pytest.mark.nightly),
    ],
)
def test_in_a_loader_with_workers(collate: Any) -> None:
    samples = [(torch.full((n,), n), torch.zeros(2)) for n in range(1, 13)]
    sampler = DistributedSizeAwareBatchSampler(range(1, 13), 24)
    loader: DataLoader[Any] = DataLoader(
        samples,  # type: ignore[arg-type]  # a list is a dataset of the map style
        batch_sampler=sampler,
        collate_fn=collate,
        num_workers=1,
        multiprocessing_context="spawn",  # so that it has to be pickled
    )
    seen = [int(n) for batch in loader for n in batch.values[0].flatten() if n > 0]
    assert sorted(seen) == [n for n in range(1, 13) for _ in range(n)]


@pytest.mark.parametrize(
    "collate",
    [
        PaddedCollate({0: -1}, 4, fixed=[1], return_mask=True),
        PackedCollate(fixed=[1], layout="huggingface", separator={"labels": -100}, total_multiple=8),
    ],
)
def test_collate_functions_can_be_pickled(collate: Any) -> None:
    assert pickle.loads(pickle.dumps(collate)) == collate
