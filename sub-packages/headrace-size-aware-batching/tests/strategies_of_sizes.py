"""Sizes that break batchers, as hypothesis strategies."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from numpy.typing import NDArray

Case = tuple[NDArray[np.int64], int]


def examples(count: int) -> settings:
    """Return settings for so many examples: ten times as many in the nightly run, at most ten in the inner loop."""
    chosen = settings()  # by the profile in conftest.py: the nightly run draws new examples each time
    return settings(max_examples=min(count, chosen.max_examples) if chosen.derandomize else 10 * count)


def _all_equal(budget: int) -> st.SearchStrategy[list[int]]:
    return st.tuples(st.integers(0, budget), st.integers(0, 300)).map(lambda p: [p[0]] * p[1])


def _two_values(budget: int) -> st.SearchStrategy[list[int]]:
    pair = st.tuples(st.integers(0, budget), st.integers(0, budget))
    return pair.flatmap(lambda values: st.lists(st.sampled_from(values), max_size=300))


def _near(budget: int) -> st.SearchStrategy[list[int]]:
    edges = {budget, budget - 1, budget // 2, budget // 2 + 1, budget // 3 + 1, budget // 8, 1, 0}
    return st.lists(st.sampled_from(sorted(edge for edge in edges if 0 <= edge <= budget)), max_size=300)


def _powers(budget: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, budget.bit_length() - 1).map(lambda power: 2**power), max_size=300)


def _one_giant(budget: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, max(1, budget // 50)), max_size=300).map(lambda sizes: [*sizes, budget])


def _any(budget: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, budget), max_size=300)


SHAPES = (_all_equal, _two_values, _near, _powers, _one_giant, _any)


def cases() -> st.SearchStrategy[Case]:
    """Return sizes, none above the budget, with their budget; budgets from tiny to more than the dealing grid."""
    budgets = st.one_of(st.integers(1, 40), st.integers(41, 5000), st.integers(2**20, 2**40))

    def shaped(budget: int) -> st.SearchStrategy[Case]:
        lists = st.sampled_from(SHAPES).flatmap(lambda shape: shape(budget))
        return lists.map(lambda sizes: (np.array(sizes, np.int64), budget))

    return budgets.flatmap(shaped)
