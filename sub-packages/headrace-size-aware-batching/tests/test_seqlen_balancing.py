"""Micro-batches under the names of other loops: every sample once, the cap, the counts, and what is refused.

``scripts/peers`` compares them with the functions that they replace, in the environment that has those.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.size_aware_batching.integrations import (
    get_seqlen_balanced_partitions,
    micro_batch_indices,
)

CAP = 100
lengths_within_the_cap = st.lists(st.integers(1, CAP), min_size=1, max_size=60)


def assert_each_once(groups: list[list[int]], n_samples: int) -> None:
    assert sorted(index for group in groups for index in group) == list(range(n_samples))
    assert all(groups)
    assert [sorted(group) for group in groups] == groups
    assert all(type(index) is int for group in groups for index in group)


def sums(groups: list[list[int]], lengths: Any) -> list[int]:
    return [int(np.asarray(lengths)[group].sum()) for group in groups]


def rollout(n_samples: int, seed: int = 0) -> Any:
    """Answers of a few hundred tokens, and some that reach the limit."""
    rng = np.random.default_rng(seed)
    return np.where(rng.random(n_samples) < 0.2, rng.integers(60, CAP + 1, n_samples), rng.integers(1, 30, n_samples))


@given(lengths_within_the_cap, st.integers(1, 12), st.booleans())
def test_every_sample_is_in_one_partition(lengths: list[int], count: int, equal: bool) -> None:
    count = min(count, len(lengths))
    lengths = lengths[: len(lengths) // count * count] if equal else lengths
    partitions = get_seqlen_balanced_partitions(lengths, count, equal)
    assert len(partitions) == count
    assert_each_once(partitions, len(lengths))
    if equal:
        assert {len(partition) for partition in partitions} == {len(lengths) // count}


@pytest.mark.parametrize("equal", [True, False])
def test_partitions_are_balanced(equal: bool) -> None:
    for seed in range(5):
        lengths = rollout(512, seed)
        work = 24576 * lengths + lengths**2
        for weights in (lengths, work):
            loads = sums(get_seqlen_balanced_partitions(weights, 8, equal), weights)
            assert max(loads) <= 1.005 * np.mean(loads)


@pytest.mark.parametrize(
    "kind", [list, np.array, torch.tensor, torch.Tensor], ids=["list", "array", "tensor", "floats"]
)
def test_lengths_come_as_loops_have_them(kind: Callable[[Any], Any]) -> None:
    lengths = rollout(64).tolist()
    given_as = kind(lengths)
    assert get_seqlen_balanced_partitions(given_as, 4, True) == get_seqlen_balanced_partitions(lengths, 4, True)
    assert micro_batch_indices([given_as], CAP) == micro_batch_indices([lengths], CAP)


def test_work_larger_than_32_bits_and_not_whole_is_balanced() -> None:
    work = rollout(64) * 1e15 + 0.5
    loads = [work[partition].sum() for partition in get_seqlen_balanced_partitions(work, 4, True)]
    assert max(loads) <= 1.02 * np.mean(loads)


def groups_of(lengths: Any, cap: int, least: int = 1, divisor: int = 1) -> list[list[int]]:
    [groups] = micro_batch_indices([lengths], cap, min_num_micro_batch=least, num_batches_divided_by=divisor)
    return groups


@pytest.mark.slow
@given(lengths_within_the_cap, st.integers(1, 8), st.integers(1, 4))
def test_groups_hold_the_capacity_and_their_number_its_conditions(lengths: list[int], least: int, divisor: int) -> None:
    needed = -(-max(least, len(groups_of(lengths, CAP))) // divisor) * divisor
    if needed > len(lengths):
        with pytest.raises(ValueError, match=f"a sample for each of {needed} micro-batches, got {len(lengths)}"):
            groups_of(lengths, CAP, least, divisor)
        return
    groups = groups_of(lengths, CAP, least, divisor)
    assert_each_once(groups, len(lengths))
    assert max(sums(groups, lengths)) <= CAP
    assert len(groups) == needed


def test_groups_are_as_few_as_can_be_and_balanced() -> None:
    lengths = rollout(256)
    fewest = -(-int(lengths.sum()) // CAP)
    groups = groups_of(lengths, CAP)
    assert len(groups) <= 1.05 * fewest
    spread = sums(groups_of(lengths, 10**12, 8), lengths)  # without a capacity: one group for each rank
    assert len(spread) == 8
    assert max(spread) <= 1.01 * np.mean(spread)


@pytest.mark.slow
@given(
    st.lists(st.lists(st.integers(1, CAP), min_size=24, max_size=40), min_size=1, max_size=4),
    st.integers(1, 5),
    st.sampled_from([None, 1, 2, 3]),
)
def test_ranks_have_as_many_micro_batches_within_the_cap(
    ranks: list[list[int]], least: int, multiple: int | None
) -> None:
    halves = [[(length + 1) // 2 for length in own] for own in ranks]  # so that there are always enough samples
    found = micro_batch_indices(halves, CAP, num_batches_divided_by=multiple, min_num_micro_batch=least)
    assert len(found) == len(ranks)
    [count] = {len(groups) for groups in found}
    assert count >= least
    assert count % (multiple or 1) == 0
    for groups, own in zip(found, halves, strict=True):
        assert_each_once(groups, len(own))
        assert max(sums(groups, own)) <= CAP


def test_micro_batches_of_a_rank_come_by_descending_work() -> None:
    ranks = [rollout(64, seed) for seed in range(4)]
    found = micro_batch_indices(ranks, CAP, work=lambda lengths: 24576 * lengths + lengths**2)
    work = np.array(
        [[(24576 * own + own**2)[group].sum() for group in groups] for groups, own in zip(found, ranks, strict=True)]
    )
    assert (np.diff(work) <= 0).all()
    assert work.max(axis=0).sum() <= 1.1 * work.sum(axis=1).max()


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (
            lambda: get_seqlen_balanced_partitions([3, 4], 3, False),
            ValueError,
            "k_partitions must be at most the number of samples, 2, got 3",
        ),
        (
            lambda: get_seqlen_balanced_partitions([3, 4, 5], 2, True),
            ValueError,
            "k_partitions must divide the number of samples, 3, where equal_size is True, got 2",
        ),
        (
            lambda: get_seqlen_balanced_partitions([3, 4], 0, False),
            ValueError,
            "k_partitions must be an int >= 1, got 0",
        ),
        (lambda: get_seqlen_balanced_partitions([3, 4], 2, 1), TypeError, "equal_size must be True or False, got 1"),  # type: ignore[arg-type]
        (lambda: get_seqlen_balanced_partitions([3, -4], 2, True), ValueError, "seqlen_list must hold numbers >= 0"),
        (lambda: micro_batch_indices([[]], 5), ValueError, r"lengths_of_ranks\[0\] must hold at least one length"),
        (lambda: micro_batch_indices([[3]], 0), ValueError, "max_token_len must be an int >= 1, got 0"),
        (
            lambda: micro_batch_indices([[3, 7, 8]], 6),
            ValueError,
            r"must hold lengths up to max_token_len=6, got 7 at index 1 \(2 are over it\): leave such samples out",
        ),
        (
            lambda: micro_batch_indices([[3, 4]], 6, min_num_micro_batch=3),
            ValueError,
            "there must be a sample for each of 3 micro-batches, got 2 samples: take more",
        ),
        (
            lambda: micro_batch_indices([[3, 3], [3, 7]], 6),
            ValueError,
            r"lengths_of_ranks\[1\] must hold lengths up to max_token_len=6, got 7 at index 1",
        ),
        (
            lambda: micro_batch_indices([[3, 3, 3], [5]], 6),
            ValueError,
            r"a sample for each of 2 micro-batches, got 1 sample of rank 1: .* or pad=True, which repeats",
        ),
        (
            lambda: micro_batch_indices([[3, 3]], 6, work=lambda lengths: lengths[:1]),
            ValueError,
            "work must return one number for each of 2 lengths, got 1",
        ),
        (lambda: micro_batch_indices([], 6), ValueError, "must hold the lengths of each rank, got no rank"),
        (lambda: micro_batch_indices([3, 4], 6), TypeError, r"lengths_of_ranks\[0\] must be a 1-D tensor"),
    ],
)
def test_what_cannot_be_divided_is_refused(call: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()


def test_a_rank_with_too_few_samples_repeats_its_smallest() -> None:
    lengths = [[60, 50, 40, 60, 30], [20, 90], [70]]
    found = micro_batch_indices(lengths, 100, pad=True)
    assert [len(groups) for groups in found] == [3, 3, 3]
    assert sorted(sample for group in found[0] for sample in group) == [0, 1, 2, 3, 4]
    assert found[1:] == [[[1], [0], [0]], [[0], [0], [0]]]
    assert all(sum(lengths[0][sample] for sample in group) <= 100 for group in found[0])
    enough = [[6, 2, 5, 4, 3], [7, 2]]
    assert micro_batch_indices(enough, 10, pad=True) == micro_batch_indices(enough, 10)
