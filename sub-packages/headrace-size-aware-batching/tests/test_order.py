"""Orders of samples."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from strategies_of_sizes import examples

from headrace.size_aware_batching.planning.order import ShuffledOrder


@examples(25)
@given(st.integers(1, 100_000), st.integers(0, 2**63), st.data())
def test_a_shuffle_is_a_permutation_readable_anywhere(n_samples: int, key: int, data: st.DataObject) -> None:
    order = ShuffledOrder(key, n_samples)
    everything = order.take(0, n_samples)
    assert (np.bincount(everything, minlength=n_samples) == 1).all()
    start = data.draw(st.integers(0, n_samples))
    stop = data.draw(st.integers(start, n_samples))
    assert order.take(start, stop).tolist() == everything[start:stop].tolist()
