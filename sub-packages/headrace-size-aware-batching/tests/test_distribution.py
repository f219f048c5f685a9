"""Batches of like work for the ranks of a step."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from strategies_of_sizes import examples

from headrace.size_aware_batching.planning.distribution import FEWEST_CHUNKS, chunk_length, shuffle_sorted_chunks
from headrace.size_aware_batching.planning.options import Options
from headrace.size_aware_batching.planning.prepared import prepare
from headrace.size_aware_batching.planning.strategies import BatchLists


@examples(50)
@given(st.lists(st.floats(0, 1e9), max_size=300), st.integers(0, 500), st.sampled_from([1, 4, 6, 48, 64]))
def test_arranging_is_a_permutation_whose_groups_are_alike(work: list[float], before: int, group: int) -> None:
    costs = np.array(work)
    places = shuffle_sorted_chunks(costs, 7, before, group)
    assert sorted(places.tolist()) == list(range(len(work)))
    ordered = np.empty(len(work))
    ordered[places] = np.argsort(np.argsort(costs, kind="stable"))
    first = -before % group
    for start in range(first, len(work) - group + 1, group):  # whole groups hold neighbours in the sorted costs
        ranks = ordered[start : start + group]
        assert ranks.max() - ranks.min() == group - 1


@given(st.integers(0, 5000), st.integers(1, 500))
def test_a_chunk_is_a_divisor_of_the_ranks_and_few_batches_make_some_chunks(n_batches: int, ranks: int) -> None:
    length = chunk_length(n_batches, ranks)
    assert ranks % length == 0
    assert length == 1 or length * FEWEST_CHUNKS <= n_batches
    longer = [each for each in range(length + 1, ranks + 1) if ranks % each == 0]
    assert all(each * FEWEST_CHUNKS > n_batches for each in longer)


def test_steps_are_balanced_by_the_work_that_is_given() -> None:
    generator = np.random.default_rng(0)
    sizes = generator.integers(1, 100, 20_000)
    work = generator.lognormal(0, 1.5, 20_000)
    options = Options()
    imbalances = []
    for given_work in (None, work):
        planned = BatchLists(replace(prepare(sizes, 800, options), work=given_work), options).of_epoch(1, 8)
        batches = [np.add.reduceat(work[indices], offsets[:-1]) for indices, offsets in planned.batches()]
        per_batch = np.concatenate(batches)
        steps = per_batch[: len(per_batch) // 8 * 8].reshape(-1, 8)
        imbalances.append(float((steps.max(axis=1) / steps.mean(axis=1)).mean()))
    assert imbalances[0] > 1.2
    assert imbalances[1] < 1.02
