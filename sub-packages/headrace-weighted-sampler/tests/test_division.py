"""Rounded shares, against Python's integers."""

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.weighted_sampler.division import rounded_share


@given(st.integers(1, 2**62), st.data())
@example(2**62, None)
@example(2**62 - 1, None)
@example(2**31, None)
@example(2**31 + 1, None)
@example(1, None)
def test_it_is_what_python_computes(whole: int, data: st.DataObject | None) -> None:
    part = whole - whole // 3 if data is None else data.draw(st.integers(0, whole))
    counts = [0, whole // 2, whole] + ([] if data is None else data.draw(st.lists(st.integers(0, whole), max_size=9)))
    want = [(count * part + whole // 2) // whole for count in counts]
    assert rounded_share(np.array(counts), part, whole).tolist() == want
