"""Laws of the shuffle inside windows."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.weighted_sampler.windows import WIDTH, shuffle_in_windows

WORDS = st.integers(0, 2**64 - 1)


@given(st.integers(1, 5 * WIDTH), WORDS)
def test_every_window_is_a_bijection(length: int, key: int) -> None:
    moved = shuffle_in_windows(np.arange(length), length, key)
    for number, window in enumerate(moved.windows.tolist()):
        places = moved.places[moved.rows == number]
        assert np.array_equal(np.sort(places), np.arange(min(WIDTH, length - window * WIDTH)))
    assert np.array_equal(moved.windows[moved.rows], np.arange(length) // WIDTH)


@given(st.integers(1, 2**60), WORDS, st.data())
def test_any_positions_are_worked_out_by_themselves(length: int, key: int, data: st.DataObject) -> None:
    offsets = np.array(sorted(data.draw(st.sets(st.integers(0, length - 1), min_size=1, max_size=30))))
    moved = shuffle_in_windows(offsets, length, key)
    for place, offset in enumerate(offsets):
        alone = shuffle_in_windows(offsets[place : place + 1], length, key)
        assert (alone.windows[0], alone.places[0]) == (offset // WIDTH, moved.places[place])


def test_windows_differ_and_their_places_are_even() -> None:
    windows = 2000
    moved = shuffle_in_windows(np.arange(windows * WIDTH), windows * WIDTH, key=3).places.reshape(windows, WIDTH)
    assert len(np.unique(moved, axis=0)) == windows
    counts = np.stack([np.bincount(moved[:, at] // 64, minlength=16) for at in range(0, WIDTH, 41)])
    chi_square = float(((counts - windows / 16) ** 2).sum() / (windows / 16))
    freedom = len(counts) * 15
    assert abs(chi_square - freedom) < 5 * (2 * freedom) ** 0.5
    kept = np.count_nonzero(np.diff(moved, axis=1) == 1) / windows
    assert 0.9 < kept < 1.1  # neighbours that stay neighbours: one a window by chance
