"""Words by key."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.weighted_sampler.keyed import below, derive, splitmix64

WORDS = st.integers(0, 2**64 - 1)


def test_splitmix64_gives_the_published_sequence() -> None:
    golden = 0x9E3779B97F4A7C15
    states = np.array([golden * step % 2**64 for step in range(3)], np.uint64)
    assert [hex(word) for word in splitmix64(states)] == [
        "0xe220a8397b1dcdaf",
        "0x6e789e6aa1b965f4",
        "0x6c45d188009454f",
    ]


@given(st.lists(WORDS, min_size=2, max_size=4, unique=True))
def test_keys_depend_on_every_word_and_its_place(words: list[int]) -> None:
    key = int(derive(*words)[0])
    assert key != int(derive(*reversed(words))[0])
    assert key != int(derive(*words, 0)[0])
    assert key != int(derive(words[0] ^ 1, *words[1:])[0])


@given(st.lists(WORDS, min_size=1, max_size=5), WORDS)
def test_an_array_of_words_gives_the_keys_of_its_elements(words: list[int], seed: int) -> None:
    together = derive(seed, np.array(words, np.uint64), 7).tolist()
    assert together == [int(derive(seed, word, 7)[0]) for word in words]


@pytest.mark.parametrize("bound", [1, 2, 3, 1000, 2**31 - 1, 2**31])
def test_scaled_words_stay_below_the_bound(bound: int) -> None:
    scaled = below(np.array([0, 2**63, 2**64 - 1], np.uint64), bound)
    assert scaled.tolist() == [0, bound // 2, bound - 1]
