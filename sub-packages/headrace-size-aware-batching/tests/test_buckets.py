"""Buckets of sizes and batches inside them."""

import math
import pickle
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from headrace.size_aware_batching.buckets import bucket_of
from headrace.size_aware_batching.sampler import BucketBatchSampler, SizeAwareBatchSampler
from headrace.size_aware_batching.utils import Buckets, create_buckets


def slow_buckets(sizes: list[int], width: int, count: int) -> tuple[list[int], list[int]]:
    """The same rule, one value at a time."""
    bounds, held = [min(sizes)], [0]
    for value in range(min(sizes), max(sizes) + 1):
        full = held[-1] >= count and value in sizes
        if full or value - bounds[-1] == width:
            bounds.append(value)
            held.append(0)
        held[-1] += sizes.count(value)
    return [*bounds, max(sizes) + 1], held


def test_a_gap_becomes_empty_buckets() -> None:
    sizes = torch.tensor([1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 3, 22, 22, 22, 22])
    buckets = create_buckets(sizes, max_width=5, min_bucket_count=10)
    assert isinstance(buckets, Buckets)
    assert buckets.bucket_boundaries.tolist() == [1, 6, 11, 16, 21, 23]
    assert buckets.bucket_sizes.tolist() == [12, 0, 0, 0, 4]


def test_a_bucket_closes_when_it_holds_enough() -> None:
    bounds, held = create_buckets(torch.arange(20), 10, 5)
    assert bounds.tolist() == [0, 5, 10, 15, 20]
    assert held.tolist() == [5, 5, 5, 5]
    assert bounds.dtype == held.dtype == torch.int64


@given(st.lists(st.integers(0, 60), min_size=1), st.integers(1, 20), st.integers(1, 8))
def test_equals_the_rule_value_by_value(sizes: list[int], width: int, count: int) -> None:
    bounds, held = create_buckets(sizes, width, count)
    assert (bounds.tolist(), held.tolist()) == slow_buckets(sizes, width, count)


@given(
    st.lists(st.integers(0, 10**5), min_size=1),
    st.integers(1, 10**6),
    st.integers(1, 50),
    st.integers(0, 2**40),
)
def test_laws(sizes: list[int], width: int, count: int, shift: int) -> None:
    bounds, held = create_buckets(torch.tensor(sizes) + shift, width, count)
    widths = bounds.diff()
    assert (widths >= 1).all()
    assert (widths <= width).all()
    assert bounds[0] == min(sizes) + shift
    assert bounds[-1] == max(sizes) + shift + 1
    assert held.tolist() == np.histogram(np.array(sizes) + shift, bounds.numpy())[0].tolist()
    assert int(held.sum()) == len(sizes)


@pytest.mark.parametrize("sizes", [[7], np.array([7, 7], dtype=np.uint8), torch.tensor([7], dtype=torch.int16)])
def test_one_value(sizes: Any) -> None:
    bounds, held = create_buckets(sizes, 5, 1)
    assert bounds.tolist() == [7, 8]
    assert held.tolist() == [len(sizes)]


def test_numbers_at_the_edge_of_int64() -> None:
    top = 2**63 - 2
    assert create_buckets([top - 1, top], 2**62, 1).bucket_boundaries.tolist() == [top - 1, top, top + 1]
    assert create_buckets([0, top], 2**62, 1).bucket_sizes.tolist() == [1, 1]
    with pytest.raises(ValueError, match="the last boundary would exceed 64 bits"):
        create_buckets([2**63 - 1], 5, 1)


def test_huge_gaps_are_refused_and_large_ones_are_quick() -> None:
    with pytest.raises(
        ValueError, match=r"max_width must .* empty buckets between 8 and 1000000000: use a greater max_width"
    ):
        create_buckets([1, 3, 10**9], 5, 1)
    assert len(create_buckets([0, 10**6], 1, 1).bucket_sizes) == 10**6 + 1
    assert len(create_buckets([0, 10**15], 10**10, 1).bucket_sizes) == 10**5 + 1


@pytest.mark.parametrize(
    ("sizes", "error", "match"),
    [
        ([], ValueError, "sizes must hold at least one size"),
        (torch.tensor([1.0, 2.0]), TypeError, "sizes must be integers, got float64"),
        (torch.tensor([[1, 2]]), ValueError, "sizes must be 1-D"),
        ([3, -1], ValueError, "got -1 at index 1"),
        ([True], TypeError, "real number"),
        ("123", TypeError, "1-D"),
    ],
)
def test_sizes_that_are_refused(sizes: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        create_buckets(sizes, 5, 1)


@pytest.mark.parametrize("name", ["max_width", "min_bucket_count"])
@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)])
def test_options_that_are_refused(name: str, value: Any, error: type[Exception]) -> None:
    options = {"max_width": 5, "min_bucket_count": 5} | {name: value}
    with pytest.raises(error, match=f"{name} must be"):
        create_buckets([1, 2], **options)


@given(st.lists(st.floats(-5, 25)), st.lists(st.integers(0, 20), min_size=2, max_size=6, unique=True).map(sorted))
def test_every_size_is_in_the_interval_that_holds_it(sizes: list[float], bounds: list[int]) -> None:
    found = bucket_of(np.array(sizes, dtype=np.float64), np.array(bounds))
    for size, bucket in zip(sizes, found.tolist(), strict=True):
        holding = [j for j in range(len(bounds) - 1) if bounds[j] <= size < bounds[j + 1]]
        assert holding == ([] if bucket == -1 else [bucket])


SIZES = torch.arange(25)
BOUNDARIES = torch.tensor([0, 6, 15, 25])


def make(**changes: Any) -> BucketBatchSampler:
    options: dict[str, Any] = {
        "sizes": SIZES,
        "bucket_boundaries": BOUNDARIES,
        "base_batch_sampler_class": BatchSampler,
        "base_batch_sampler_shared_kwargs": {"batch_size": 2, "drop_last": False},
        "shuffle": False,
    }
    return BucketBatchSampler(**(options | changes))


def test_in_order_bucket_by_bucket() -> None:
    sampler = make()
    assert list(sampler) == [
        *([i, i + 1] for i in range(0, 6, 2)),
        *([i, i + 1] for i in range(6, 14, 2)),
        [14],
        *([i, i + 1] for i in range(15, 25, 2)),
    ]
    assert len(sampler) == len(list(sampler)) == 13
    assert sampler.bucket_sizes.tolist() == [6, 9, 10]
    assert sampler.outside.tolist() == []


def test_attributes_that_migrating_users_read() -> None:
    sampler = make(sizes=[1, 21, 2], bucket_boundaries=[30, 0, 10, 20], shuffle=True)
    assert sampler.num_buckets == 3
    assert sampler.num_samples == 3
    assert sampler.bucket_boundaries.tolist() == [0, 10, 20, 30]
    assert sampler.bucket_sizes.tolist() == [2, 0, 1]
    assert sampler.bucket_element_indices == [[0, 2], [], [1]]


def test_one_budget_for_each_bucket() -> None:
    sampler = make(
        base_batch_sampler_class=SizeAwareBatchSampler,
        base_batch_sampler_shared_kwargs={"sizeof": SIZES},
        base_batch_sampler_individual_kwargs={"max_total_size": [10, 30, 50]},
    )
    assert list(sampler) == [
        [0, 1, 2, 3, 4],
        [5],
        [6, 7, 8, 9],
        [10, 11],
        [12, 13],
        [14],
        [15, 16, 17],
        [18, 19],
        [20, 21],
        [22, 23],
        [24],
    ]
    with pytest.raises(TypeError):
        len(sampler)  # SizeAwareBatchSampler cannot know


@pytest.mark.parametrize("form", [list, tuple, np.array, torch.tensor])
def test_any_form_of_sizes_boundaries_and_values(form: Any) -> None:
    sampler = make(
        sizes=form(range(25)),
        bucket_boundaries=form([25, 0, 15, 6]),  # sorted by the sampler
        base_batch_sampler_shared_kwargs={"drop_last": False},
        base_batch_sampler_individual_kwargs={"batch_size": [2, 2, 2]},
    )
    assert list(sampler) == list(make())
    assert sampler.bucket_boundaries.tolist() == [0, 6, 15, 25]


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=60),
    st.integers(1, 15),
    st.integers(1, 10),
    st.integers(1, 5),
    st.booleans(),
    st.integers(0, 5),
)
def test_laws_of_bucket_sampler(sizes: list[int], width: int, count: int, batch: int, shuffle: bool, seed: int) -> None:
    bounds, held = create_buckets(sizes, width, count)

    def sampler() -> BucketBatchSampler:
        return make(
            sizes=sizes,
            bucket_boundaries=bounds,
            base_batch_sampler_shared_kwargs={"batch_size": batch, "drop_last": False},
            shuffle=shuffle,
            generator=torch.Generator().manual_seed(seed),
        )

    batches = list(sampler())
    assert sorted(i for b in batches for i in b) == list(range(len(sizes)))  # each exactly once
    for b in batches:  # one bucket each
        assert len(set(np.searchsorted(bounds.numpy(), [sizes[i] for i in b], side="right"))) == 1
    assert len(batches) == len(sampler()) == sum(-(-n // batch) for n in held.tolist())
    assert batches == list(sampler())  # the generator decides alone


def test_shuffle_mixes_buckets_and_members() -> None:
    sampler = make(shuffle=True, generator=torch.Generator().manual_seed(1))
    first, second = list(sampler), list(sampler)
    assert first != second
    buckets = [int(np.searchsorted(BOUNDARIES.numpy(), batch[0], side="right")) for batch in first]
    assert buckets != sorted(buckets)
    members = [index for batch in first if batch[0] < 6 for index in batch]
    assert members != sorted(members)


def test_the_next_bucket_is_drawn_in_proportion_to_what_is_left() -> None:
    generator = torch.Generator().manual_seed(0)
    sampler = make(sizes=[0] * 30 + [9] * 10, bucket_boundaries=[0, 5, 10], shuffle=True, generator=generator)
    firsts = Counter(next(iter(sampler))[0] < 30 for _ in range(2000))
    assert abs(firsts[True] / 2000 - 0.75) < 0.05  # five standard deviations


def test_the_global_generator_is_used_without_one() -> None:
    sampler = make(shuffle=True)
    torch.manual_seed(3)
    first = list(sampler)
    torch.manual_seed(3)
    assert list(sampler) == first


@pytest.mark.parametrize("shuffle", [True, False])
def test_bases_that_drop_or_skip_come_to_an_end(shuffle: bool) -> None:
    dropped = make(base_batch_sampler_shared_kwargs={"batch_size": 4, "drop_last": True}, shuffle=shuffle)
    assert len(list(dropped)) == len(dropped) == 1 + 2 + 2
    summaries: list[str] = []
    options = {"sizeof": SIZES, "max_total_size": 22, "info_logger": summaries.append}
    skipping = make(
        base_batch_sampler_class=SizeAwareBatchSampler,
        base_batch_sampler_shared_kwargs=options,
        shuffle=shuffle,
    )
    with pytest.warns(UserWarning, match="more than max_total_size=22") as caught:
        kept = sorted(i for batch in skipping for i in batch)
    assert kept == list(range(23))
    assert len(caught) == 2
    assert len(summaries) == 3  # one for each bucket


def test_empty_buckets_have_no_sampler_but_keep_their_values() -> None:
    sampler = make(
        sizes=[1, 21, 2],
        bucket_boundaries=[0, 10, 20, 30],
        base_batch_sampler_shared_kwargs={"drop_last": False},
        base_batch_sampler_individual_kwargs={"batch_size": [2, 99, 1]},
    )
    assert sampler.bucket_sizes.tolist() == [2, 0, 1]
    assert len(sampler.base_batch_samplers) == 2
    assert list(sampler) == [[0, 2], [1]]


def test_elements_outside_are_counted_and_named() -> None:
    with pytest.warns(
        UserWarning, match=r"3 of 5 samples have sizes outside \[2, 4\) and are left out: indices 0, 1, 4"
    ) as caught:
        sampler = make(sizes=range(5), bucket_boundaries=[2, 4])
    assert caught[0].filename == __file__
    assert sampler.outside.tolist() == [0, 1, 4]
    assert list(sampler) == [[2, 3]]
    with pytest.raises(RuntimeError, match=r"got \[5, 9\) with none of the 2 sizes"):
        make(sizes=[1, 9], bucket_boundaries=[5, 9])
    with pytest.raises(RuntimeError, match="none of the 0 sizes"):
        make(sizes=[])


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"sizes": torch.ones(2, 2)}, ValueError, "sizes must be 1-D"),
        ({"sizes": torch.tensor(1)}, ValueError, "sizes must be 1-D"),
        ({"sizes": ["a"]}, TypeError, r"sizes\[0\] must be a real number"),
        (
            {"sizes": [1.0, math.nan]},
            ValueError,
            r"sizes\[1\] must be a real number, got NaN",
        ),
        ({"bucket_boundaries": torch.ones(2, 2)}, ValueError, "bucket_boundaries must be 1-D"),
        (
            {"bucket_boundaries": [0, 5, 5]},
            ValueError,
            r"bucket_boundaries must differ from one another, got repeatedly: \[5\]",
        ),
        (
            {"bucket_boundaries": [0]},
            ValueError,
            "bucket_boundaries must have at least 2 entries, .* got 1",
        ),
        ({"bucket_boundaries": [0, math.nan]}, ValueError, r"bucket_boundaries\[1\] must be a real number, got NaN"),
        ({"base_batch_sampler_class": list}, TypeError, "must be a class derived from Sampler"),
        ({"base_batch_sampler_class": BatchSampler([1], 1, False)}, TypeError, "must be a class derived"),
        ({"base_batch_sampler_shared_kwargs": [1]}, TypeError, "shared_kwargs must be a mapping from argument names"),
        (
            {"base_batch_sampler_shared_kwargs": {1: 2}},
            TypeError,
            "shared_kwargs must be a mapping from argument names",
        ),
        ({"base_batch_sampler_individual_kwargs": 3}, TypeError, "individual_kwargs must be a mapping"),
        (
            {"base_batch_sampler_individual_kwargs": {"x": 3}},
            TypeError,
            "\\['x'\\] must be a sequence with a value for each",
        ),
        ({"base_batch_sampler_individual_kwargs": {"x": "abc"}}, TypeError, r"\['x'\] must be a sequence"),
        (
            {"base_batch_sampler_individual_kwargs": {"x": [1]}},
            ValueError,
            "\\['x'\\] must have a value for each of the 3 buckets, empty ones included, got 1",
        ),
        (
            {"base_batch_sampler_individual_kwargs": {"batch_size": [1, 2, 3]}},
            ValueError,
            "must be shared or individual, got both for",
        ),
        ({"base_batch_sampler_shared_kwargs": {"sampler": 2}}, ValueError, "must not contain 'sampler'"),
        ({"shuffle": 1}, TypeError, "shuffle must be True or False"),
        ({"generator": 1}, TypeError, "generator must be a torch.Generator or None"),
    ],
)
def test_arguments_that_are_refused(changes: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make(**changes)


def test_epochs_reach_bases_that_want_them() -> None:
    class Counting(BatchSampler):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    sampler = make(base_batch_sampler_class=Counting)
    sampler.set_epoch(4)
    assert [base.epoch for base in sampler.base_batch_samplers if isinstance(base, Counting)] == [4, 4, 4]
    make().set_epoch(4)  # nothing to pass on


@pytest.mark.parametrize("workers", [0, 2])
def test_in_a_loader(workers: int) -> None:
    loader = DataLoader(TensorDataset(SIZES), batch_sampler=make(shuffle=True), num_workers=workers)
    assert len(loader) == 13
    assert sorted(int(i) for [batch] in loader for i in batch) == list(range(25))


def test_pickle() -> None:
    assert list(pickle.loads(pickle.dumps(make()))) == list(make())


def test_a_sampler_prints_its_main_figures() -> None:
    assert repr(make()) == "BucketBatchSampler(25 samples in 3 buckets, BatchSampler, in order)"
    with pytest.warns(UserWarning, match="outside"):
        sampler = make(sizes=[1, 2, 900], bucket_boundaries=[0, 9], shuffle=True)
    assert repr(sampler) == "BucketBatchSampler(2 samples in 1 bucket, 1 outside, BatchSampler, shuffled)"
