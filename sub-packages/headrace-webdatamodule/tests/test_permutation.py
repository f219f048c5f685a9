"""A shuffled order of which any place is worked out by itself."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.webdatamodule._shared.random import fold_in, splitmix64
from headrace.webdatamodule.loading.permutation import SHORT, Shuffle

words = st.integers(0, 2**64 - 1)


@given(st.integers(0, 3000), words, words)
@example(SHORT - 1, 0, 0)
@example(SHORT, 0, 0)
@example(SHORT + 1, 2**64 - 1, 7)
@example(80_003, 3, 1)
def test_an_order_is_a_bijection(size: int, seed: int, epoch: int) -> None:
    shuffle = Shuffle(size, seed, epoch)
    assert np.array_equal(np.sort(shuffle.take(0, size)), np.arange(size))


@given(st.data(), st.sampled_from([1, 2, 999, SHORT - 1, SHORT, 70_001, 2**40, 2**62]), words)
def test_any_stretch_is_that_of_the_whole(data: st.DataObject, size: int, seed: int) -> None:
    start = data.draw(st.integers(0, size - 1))
    stop = data.draw(st.integers(start, min(size, start + 500)))
    middle = data.draw(st.integers(start, stop))
    shuffle = Shuffle(size, seed)
    whole = shuffle.take(start, stop)
    assert whole.dtype == np.int64
    assert np.array_equal(whole, np.concatenate([shuffle.take(start, middle), Shuffle(size, seed).take(middle, stop)]))
    assert len(set(whole.tolist())) == stop - start
    assert ((whole >= 0) & (whole < size)).all()


@pytest.mark.parametrize("size", [1000, 100_000])
def test_every_word_of_the_key_tells(size: int) -> None:
    keys = [(0,), (1,), (0, 0), (0, 1), (1, 0), (2**63, 0), (0, 2**63)]
    assert len({tuple(Shuffle(size, *key).take(0, 200).tolist()) for key in keys}) == len(keys)


@pytest.mark.parametrize("size", [500, SHORT + 500])
def test_places_are_even_and_neighbours_independent(size: int) -> None:
    """Means over many keys, six standard deviations wide: what a wrong round would miss by far."""
    firsts, steps = [], []
    for key in range(400):
        head = Shuffle(size, key).take(0, 20).astype(float) / size
        firsts.append(head.mean())
        steps.append(np.corrcoef(head[:-1], head[1:])[0, 1])
    assert abs(np.mean(firsts) - 0.5) < 6 * 0.289 / np.sqrt(20 * 400)
    assert abs(np.mean(steps) + 1 / 20) < 6 * 0.23 / np.sqrt(400)


def test_three_numbers_come_in_all_orders() -> None:
    counts = Counter(tuple(Shuffle(3, key).take(0, 3).tolist()) for key in range(6000))
    assert len(counts) == 6
    assert all(abs(count - 1000) < 6 * 29 for count in counts.values())


def test_the_orders_are_those_of_the_first_release() -> None:
    """A checkpoint is resumed with the same order on every platform and in every later version."""
    assert Shuffle(10, 3, 0).take(0, 10).tolist() == [7, 6, 3, 2, 9, 0, 1, 5, 4, 8]
    assert Shuffle(100_000, 3, 0).take(5, 10).tolist() == [82057, 45245, 51728, 74676, 92794]
    assert int(fold_in(1, 2)[0]) == 15671754871817308195
    # https://prng.di.unimi.it/splitmix64.c, from state 0
    state = np.arange(3, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert splitmix64(state).tolist() == [16294208416658607535, 7960286522194355700, 487617019471545679]


@given(st.lists(words, max_size=5))
def test_a_key_knows_the_place_of_its_words(key: list[int]) -> None:
    longer = [tuple(key), (*key, 0), (*key, 0, 0), (0, *key, 1)]
    assert len({int(fold_in(*one)[0]) for one in longer}) == len(longer)
    for one, other in pairwise(sorted(set(key))):
        assert fold_in(one, other)[0] != fold_in(other, one)[0]
