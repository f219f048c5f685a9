"""Samples sorted by size, in strata."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from strategies_of_sizes import examples

from headrace.size_aware_batching.planning import strata
from headrace.size_aware_batching.planning.shuffles import (
    random_words,
)
from headrace.size_aware_batching.planning.strata import Strata


@examples(50)
@given(st.integers(1, 300), st.data())
def test_strata_give_every_sample_to_one_window(n_samples: int, data: st.DataObject) -> None:
    strata = Strata(n_samples, data.draw(st.integers(1, n_samples)))
    shifts = strata.shifts(data.draw(st.integers(0, 2**64 - 1)))
    found: list[int] = []
    for window in range(strata.n_windows):
        depth = strata.depth if window < strata.n_full else strata.depth - 1
        assert strata.start(window) == len(found)
        assert all(strata.window_of(len(found) + place) == window for place in range(depth))
        places = strata.places(window, window + 1, shifts)[0, :depth]
        # No sample is larger than the first of its stratum: it stands behind it in the sorted order.
        assert (places >= strata.firsts()[:depth]).all()
        assert (places // strata.n_windows == np.arange(depth)).all()
        found += places.tolist()
    assert sorted(found) == list(range(n_samples))


@examples(50)
@given(st.lists(st.integers(0, 70_000), max_size=400), st.sampled_from([np.int16, np.int32, np.int64, np.float32]))
def test_sorting_is_stable_and_falls(sizes: list[int], kind: type[np.generic]) -> None:
    array: NDArray[np.generic] = np.array([size % 30_000 if kind is np.int16 else size for size in sizes], kind)
    expected = np.argsort(-array.astype(np.float64), kind="stable")
    order, descending = strata.sorted_by_size(array)
    assert order.tolist() == expected.tolist()
    assert descending.tolist() == array[expected].tolist()


@pytest.mark.parametrize("worth_a_thread", [2**22, 1300])
def test_sorting_in_chunks(monkeypatch: pytest.MonkeyPatch, worth_a_thread: int) -> None:
    monkeypatch.setattr(strata, "SORTED_AT_ONCE", 100)
    monkeypatch.setattr(strata, "WORTH_A_THREAD", worth_a_thread)
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    sizes = (random_words(3, 5000) % np.uint64(300)).astype(np.int32)
    assert strata.sorted_by_size(sizes)[0].tolist() == np.argsort(-sizes, kind="stable").tolist()
