"""Batches of neighbours in a list."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from strategies_of_sizes import Case, cases, examples

from headrace.size_aware_batching._validation import UNLIMITED
from headrace.size_aware_batching.planning.costs import PaddedCost
from headrace.size_aware_batching.planning.limits import CountLimits, SumLimits


def greedy(sizes: list[int], budget: int, most: int, padded: bool) -> list[int]:
    """Cut sizes element by element: where batches begin, and the end."""
    cuts, batch = [0], list[int]()
    for place, size in enumerate(sizes):
        more = [*batch, size]
        cost = max(more) * len(more) if padded else sum(more)
        if batch and (cost > budget or len(more) > most):
            cuts.append(place)
            batch = []
        batch.append(size)
    return [*cuts, len(sizes)] if sizes else cuts


@examples(150)
@given(cases(), st.one_of(st.just(UNLIMITED), st.integers(1, 50)))
def test_next_fit_is_the_greedy_loop(case: Case, most: int) -> None:
    sizes, budget = case
    limits = SumLimits((budget,), most_items=most)
    assert limits.next_fit(sizes).tolist() == greedy(sizes.tolist(), budget, most, padded=False)
    padded = CountLimits(most_items=most, capacity=PaddedCost().capacity(budget, None))
    assert padded.next_fit(sizes).tolist() == greedy(sizes.tolist(), budget, most, padded=True)
    falling = np.sort(sizes)[::-1]
    assert padded.cut(falling).tolist() == greedy(falling.tolist(), budget, most, padded=True)
    assert limits.cut(falling).tolist() == greedy(falling.tolist(), budget, most, padded=False)


@examples(50)
@given(cases())
def test_an_open_batch_is_left_for_the_next_piece(case: Case) -> None:
    sizes, budget = case
    limits = SumLimits((budget,))
    whole, piece = limits.next_fit(sizes).tolist(), limits.next_fit(sizes, last=False).tolist()
    assert piece == (whole[:-1] if len(whole) > 1 else whole)
