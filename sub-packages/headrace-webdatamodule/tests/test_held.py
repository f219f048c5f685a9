import errno
import os
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.webdatamodule.shards.reading.dataset import Held, default_limit


class Thing:
    def __init__(self, number: int) -> None:
        self.number = number


def numbers_of(opened: list[weakref.ref[Thing]]) -> list[int]:
    return [thing.number for thing in [ref() for ref in opened] if thing is not None]


@given(st.lists(st.integers(0, 6)), st.integers(1, 4))
def test_the_last_used_are_held_and_the_others_let_go(numbers: list[int], limit: int) -> None:
    opened: list[weakref.ref[Thing]] = []

    def open_one(number: int) -> Thing:
        opened.append(weakref.ref(thing := Thing(number)))
        return thing

    held = Held(open_one, limit)
    recent: list[int] = []
    for number in numbers:
        known, before = number in recent, len(opened)
        assert held.get(number).number == number
        assert len(opened) == before + (not known)
        recent = ([one for one in recent if one != number] + [number])[-limit:]
        assert sorted(numbers_of(opened)) == sorted(recent)
    held.close()
    assert all(ref() is None for ref in opened)


def test_a_want_of_descriptors_lets_others_go_and_lowers_the_limit() -> None:
    alive: weakref.WeakSet[Thing] = weakref.WeakSet()

    def open_one(number: int) -> Thing:
        if len(alive) >= 5:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        alive.add(thing := Thing(number))
        return thing

    held = Held(open_one, 100)
    for number in range(40):
        assert held.get(number).number == number
        assert len(alive) <= 5


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENOENT, errno.EIO])
def test_an_error_that_cannot_be_helped_is_raised(code: int) -> None:
    def open_one(number: int) -> Thing:
        raise OSError(code, os.strerror(code))

    with pytest.raises(OSError, match=rf"Errno {code}\]"):
        Held(open_one, 3).get(0)


def test_the_usual_limit_leaves_room_for_others() -> None:
    resource = pytest.importorskip("resource", reason="Windows has no such limit")
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert 1 <= default_limit() <= 4096
    assert soft < 0 or 2 * default_limit() <= max(soft, 2)
