"""Batches within a budget, in the order of the elements."""

import math
import pickle
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import pairwise, repeat
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from headrace.size_aware_batching import SizeAwareBatchSampler, size_aware_batching
from headrace.size_aware_batching.sampler import exact

SIZES = st.one_of(
    st.lists(st.integers(0, 30)),
    st.lists(st.floats(0, 30)),
    st.lists(st.one_of(st.integers(0, 2**60), st.floats(0), st.just(math.inf))),
    st.lists(st.sampled_from([0.1, 0.2, 0.3, 1e-17, 5e-324, 1e16, 1, 1e308])),
)
BUDGETS = st.one_of(st.integers(1, 60), st.floats(1e-3, 60), st.integers(1, 2**62 - 1), st.just(math.inf))


def run(sizes: Sequence[float], budget: float) -> tuple[list[list[int]], str]:
    """Return the batches of indices and the summary."""
    info: list[str] = []
    batches = size_aware_batching(
        range(len(sizes)), sizes.__getitem__, budget, info_logger=info.append, warn_logger=lambda _: None
    )
    found = list(batches)
    (summary,) = info
    return found, summary


def total(sizes: list[float]) -> Fraction:
    """Sum without rounding, by another road than the code."""
    return sum((Fraction(size) for size in sizes), Fraction(0))


@given(SIZES, BUDGETS)
def test_laws(sizes: list[float], budget: float) -> None:
    batches, summary = run(sizes, budget)
    flat = [index for batch in batches for index in batch]
    oversize = [i for i, size in enumerate(sizes) if size > budget or size == math.inf]
    assert flat == [i for i in range(len(sizes)) if i not in oversize]  # each once, order kept
    assert all(batches)
    assert all(total([sizes[i] for i in batch]) <= budget for batch in batches)
    for batch, following in pairwise(batches):  # no batch is closed too early
        assert total([sizes[i] for i in [*batch, following[0]]]) > budget
    counts = f"{len(batches):,} {'batch' if len(batches) == 1 else 'batches'}", f"element{'s' * (len(flat) != 1)}"
    assert summary.startswith(f"{counts[0]} of {len(flat):,} {counts[1]}, ")
    assert f"; {len(oversize)} skipped" in summary


@given(st.lists(st.floats(0, 1e308)))
def test_sums_do_not_round(values: list[float]) -> None:
    assert Fraction(sum(map(exact, values)), 2**1074) == total(values)


def test_integers_beyond_float_precision_stay_exact() -> None:
    assert run([2**60, 1, 1], 2**60 + 1)[0] == [[0, 1], [2]]  # as floats all three would fit


def test_float_sums_do_not_drift() -> None:
    # A running float sum would lose each 1 against 1e16 and never close the batch.
    assert [len(batch) for batch in run([1e16, *[1.0] * 25], 1e16 + 10)[0]] == [11, 15]
    assert run([0.5, 0.25, 0.25], 1.0)[0] == [[0, 1, 2]]  # exactly full is allowed


def test_one_batch_is_held_and_the_source_may_be_endless() -> None:
    batches = size_aware_batching(repeat("x"), len, 3)
    assert [next(batches) for _ in range(3)] == [["x", "x", "x"]] * 3


def test_the_summary_counts_all_and_names_ten() -> None:
    assert run([9] * 12 + [2, 3], 5)[1] == (
        "1 batch of 2 elements, fill 1.0000 of max_total_size=5; "
        "12 skipped as larger than that: positions 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more"
    )
    assert run([3, 3], 4)[1] == "2 batches of 2 elements, fill 0.7500 of max_total_size=4; 0 skipped"


@pytest.mark.parametrize(("sizes", "budget"), [([], 5), ([9], 5), ([1, 2], math.inf)])
def test_no_fill_where_there_is_none(sizes: list[float], budget: float) -> None:
    assert "elements, fill nan of max_total_size" in run(sizes, budget)[1]


class Sequences(Dataset[torch.Tensor]):
    """Sequence i holds i ones."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(index)


def test_sizes_of_elements_and_collate() -> None:
    words = ["to", "be", "or", "not", "to", "be"]
    assert list(size_aware_batching(words, len, 5)) == [["to", "be"], ["or", "not"], ["to", "be"]]
    assert list(size_aware_batching(words, len, 5, collate_fn=" ".join)) == ["to be", "or not", "to be"]


@pytest.mark.parametrize("sizeof", [{2: 3, 0: 1, 1: 4}, [1, 4, 3], np.array([1, 4, 3])])
def test_the_element_is_the_key(sizeof: Any) -> None:
    assert list(size_aware_batching([2, 0, 1, 0], sizeof, 4)) == [[2, 0], [1], [0]]
    tensors = list(size_aware_batching(torch.tensor([2, 0]), sizeof, 4))
    assert tensors == [[torch.tensor(2), torch.tensor(0)]]


def test_arguments_are_checked_at_the_call() -> None:
    good: dict[str, Any] = {"dataset": [1], "sizeof": [1], "max_total_size": 5}
    calls: list[dict[str, Any]] = [
        {"max_total_size": "5"},
        {"max_total_size": None},
        {"sizeof": 5},
        {"dataset": 5},
        {"collate_fn": 5},
        {"info_logger": 5},
        {"warn_logger": 5},
    ]
    for wrong in calls:
        with pytest.raises(TypeError, match=next(iter(wrong))):
            size_aware_batching(**(good | wrong))
    for budget in (0, -1, math.nan):
        with pytest.raises(ValueError, match="max_total_size"):
            size_aware_batching([1], [1], budget)


@pytest.mark.parametrize(("size", "error"), [(math.nan, ValueError), (-1, ValueError), ("x", TypeError)])
def test_a_faulty_size_names_the_element(size: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="size of the element at position 2 "):
        list(size_aware_batching([1, 1, size], lambda x: x, 5))
    with pytest.raises(error, match="size of index 7 "):
        list(SizeAwareBatchSampler([5, 7], {5: 1, 7: size}, 5))


def test_too_large_elements_are_named_counted_and_summed_up() -> None:
    info: list[str] = []
    warned: list[str] = []
    batches = list(size_aware_batching([3, 9, 2, 8], lambda x: x, 5, None, info.append, warned.append))
    assert batches == [[3, 2]]
    assert warned == [
        "the element at position 1 has size 9, more than max_total_size=5: it is skipped",
        "the element at position 3 has size 8, more than max_total_size=5: it is skipped",
    ]
    assert info == [
        "1 batch of 2 elements, fill 1.0000 of max_total_size=5; 2 skipped as larger than that: positions 1, 3"
    ]


def test_the_other_policies_for_elements_that_are_too_large() -> None:
    info: list[str] = []
    sampler = SizeAwareBatchSampler(range(5), [2, 9, 1, 1, math.inf], 5, info.append, oversize="own_batch")
    assert list(sampler) == [[0], [1], [2, 3], [4]]
    assert info == ["2 batches of 3 elements, fill 0.4000 of max_total_size=5; 2 over it, one a batch: indices 1, 4"]
    assert list(size_aware_batching([2, 9], lambda x: x, 5, oversize="own_batch")) == [[2], [9]]
    refusing = size_aware_batching([2, 9], lambda x: x, 5, oversize="raise")
    with pytest.raises(ValueError, match="the element at position 1 has size 9, more than max_total_size=5: raise"):
        list(refusing)
    with pytest.raises(ValueError, match="oversize must be one of raise, skip, own_batch, got 'alone'"):
        size_aware_batching([2], [1], 5, oversize="alone")  # type: ignore[arg-type]  # the point


def test_skipping_is_never_silent_by_default() -> None:
    with pytest.warns(UserWarning, match="position 0 has size inf, more than"):
        assert list(size_aware_batching([math.inf], lambda x: x, 5)) == []
    with pytest.warns(UserWarning, match="index 0 has size 6"):
        assert list(SizeAwareBatchSampler([0], [6], 5, warn_logger=None)) == []


@given(st.lists(st.integers(0, 12), min_size=1), st.integers(12, 30), st.randoms(use_true_random=False))
def test_both_faces_agree(sizes: list[int], budget: int, random: Any) -> None:
    order = list(range(len(sizes)))
    random.shuffle(order)
    by_index = list(SizeAwareBatchSampler(order, sizes, budget))
    assert by_index == list(size_aware_batching(order, sizes, budget))
    assert by_index == list(SizeAwareBatchSampler(order, torch.tensor(sizes), budget))
    assert [i for batch in by_index for i in batch] == order


@pytest.mark.parametrize("workers", [0, 2])
def test_in_a_loader(workers: int) -> None:
    dataset = Sequences()
    order = RandomSampler(dataset, generator=torch.Generator().manual_seed(0))
    sampler = SizeAwareBatchSampler(order, torch.arange(20), 30)
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=workers, collate_fn=torch.cat)
    for _ in range(2):
        sums = [int(batch.sum()) for batch in loader]
        assert sum(sums) == sum(range(20))
        assert max(sums) <= 30


def test_epochs_reach_the_inner_sampler() -> None:
    order: DistributedSampler[Any] = DistributedSampler(Sequences(), num_replicas=1, rank=0, seed=3)
    sampler = SizeAwareBatchSampler(order, list(range(20)), 30)
    first = list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) != first
    sampler.set_epoch(0)
    assert list(sampler) == first
    SizeAwareBatchSampler(SequentialSampler(range(3)), [1, 1, 1], 2).set_epoch(5)  # nothing to pass on


def test_every_epoch_has_a_summary_of_its_own() -> None:
    info: list[str] = []
    sampler = SizeAwareBatchSampler(range(4), [2, 2, 2, 2], 4, info_logger=info.append)
    for _ in range(2):
        list(sampler)
    assert info == ["2 batches of 4 elements, fill 1.0000 of max_total_size=4; 0 skipped"] * 2


def test_an_iterator_is_good_for_one_epoch_and_says_so() -> None:
    sampler = SizeAwareBatchSampler(iter([0, 1]), [1, 1], 1)
    assert list(sampler) == [[0], [1]]
    with pytest.raises(RuntimeError, match="sampler is an iterator and its indices are used up"):
        list(sampler)
    abandoned = SizeAwareBatchSampler(iter(range(10)), [1] * 10, 3)
    assert next(iter(abandoned)) == [0, 1, 2]  # index 3 has been read as well and would be lost
    with pytest.raises(RuntimeError, match="even an interrupted one"):
        list(abandoned)


def test_map_style_datasets_are_read_to_their_end() -> None:
    class ByIndex:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> str:
            return "abc"[index] * 2  # ends by its length only: no IndexError is promised

    assert list(size_aware_batching(ByIndex(), len, 4)) == [["aa", "bb"], ["cc"]]


def test_no_length_rather_than_a_wrong_one() -> None:
    sampler = SizeAwareBatchSampler(range(4), [1] * 4, 2)
    with pytest.raises(TypeError):
        len(sampler)  # type: ignore[arg-type]  # the point
    with pytest.raises(TypeError):
        len(DataLoader(Sequences(), batch_sampler=sampler))


def test_pickle() -> None:
    sampler = SizeAwareBatchSampler(SequentialSampler(range(5)), np.array([3, 4, 2, 6, 1]), 8)
    assert list(pickle.loads(pickle.dumps(sampler))) == [[0, 1], [2, 3], [4]]


def test_arguments() -> None:
    good: dict[str, Any] = {"sampler": [0], "sizeof": [1], "max_total_size": 5}

    def refused(error: type[Exception], match: str, **wrong: Any) -> None:
        with pytest.raises(error, match=match):
            SizeAwareBatchSampler(**(good | wrong))

    refused(TypeError, "sampler must be a Sampler or an iterable", sampler=5)
    refused(TypeError, "sizeof must be a callable", sizeof=None)
    refused(TypeError, "max_total_size must be a real number", max_total_size="5")
    refused(TypeError, "max_total_size must be a real number", max_total_size=True)
    for budget in (0, -3, math.nan, 0.0):
        refused(ValueError, "max_total_size", max_total_size=budget)
    refused(ValueError, "sizeof must hold numbers, got NaN at index 0", sizeof=np.array([math.nan]))
    refused(ValueError, "sizeof must be 1-D", sizeof=torch.ones(2, 2))
    refused(TypeError, "warn_logger must be a function", warn_logger="loud")


def test_batches_come_while_the_order_is_read() -> None:
    taken: list[int] = []

    def order() -> Iterator[int]:
        for index in range(10**9):
            taken.append(index)
            yield index

    assert next(iter(SizeAwareBatchSampler(order(), lambda _: 1, 3))) == [0, 1, 2]
    assert taken == [0, 1, 2, 3]


def test_default_collate_of_equal_sizes() -> None:
    pairs = [torch.tensor([i, i + 1]) for i in range(3)]
    batches = list(size_aware_batching(pairs, torch.numel, 4, collate_fn=default_collate))
    assert [tuple(batch.shape) for batch in batches] == [(2, 2), (1, 2)]


def test_thousands_too_large_are_counted_rather_than_named_one_by_one() -> None:
    warned: list[str] = []
    sampler = SizeAwareBatchSampler(range(2500), lambda index: 9, 5, warn_logger=warned.append)
    assert list(sampler) == []
    assert [text.split()[1] for text in warned[:100]] == list(map(str, range(100)))
    assert warned[100] == "1000 are skipped so far as larger than max_total_size=5"
    assert warned[101].endswith("indices 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2490 more")
    assert len(warned) == 102


def test_indices_of_any_make_come_out_as_ints() -> None:
    for order in (np.array([2, 0, 1]), torch.tensor([2, 0, 1])):
        batches = list(SizeAwareBatchSampler(order, {0: 1, 1: 1, 2: 1}, 2))
        assert batches == [[2, 0], [1]]
        assert {type(index) for batch in batches for index in batch} == {int}


def test_a_sampler_prints_its_main_figures() -> None:
    sampler = SizeAwareBatchSampler(RandomSampler(range(9)), [1] * 9, 16384, oversize="raise")
    assert repr(sampler) == "SizeAwareBatchSampler(RandomSampler, budget 16,384, oversize raise)"
