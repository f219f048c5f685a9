import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shard_server import served, written_once

from headrace.webdatamodule import RetryPolicy, ShardError
from headrace.webdatamodule.shards.stores.retries import is_transient, retry, seconds_asked

folder = pytest.fixture(scope="module")(written_once)


class StatusError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def missing(cause: BaseException | None) -> FileNotFoundError:
    error = FileNotFoundError("http://h/a.tar")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (StatusError(500), True),
        (StatusError(503), True),
        (StatusError(429), True),
        (StatusError(404), False),
        (StatusError(403), False),
        (StatusError(416), False),
        (TimeoutError(), True),
        (OSError("reset"), True),
        (PermissionError(), False),
        (ShardError("no library"), False),
        (KeyboardInterrupt(), False),
        (missing(None), False),
        (missing(missing(None)), False),
        (missing(StatusError(500)), True),
        (missing(StatusError(410)), False),
        (missing(ConnectionResetError()), True),
        (missing(RuntimeError("as of botocore")), False),
    ],
)
def test_what_may_pass(error: BaseException, expected: bool) -> None:
    assert is_transient(error) is expected


@given(st.lists(st.integers(0, 5), max_size=6), st.integers(1, 5))
def test_each_is_asked_for_until_it_comes(failures: list[int], tries: int) -> None:
    left, asked = list(failures), [0] * len(failures)

    def ask(wanted: Sequence[int]) -> list[Any]:
        made: list[Any] = []
        for one in wanted:
            asked[one] += 1
            left[one] -= 1
            made.append(one if left[one] < 0 else OSError())
        return made

    got = retry(ask, range(len(failures)), RetryPolicy(tries, backoff=0.0))
    for one, times in enumerate(failures):
        assert (got[one] == one) is (times < tries)
        assert asked[one] == min(times + 1, tries)


def test_a_lasting_error_ends_it() -> None:
    calls: list[int] = []

    def ask(wanted: Sequence[int]) -> list[Any]:
        calls.append(len(wanted))
        return [OSError(), PermissionError()]

    assert [type(one) for one in retry(ask, [1, 2], RetryPolicy(backoff=0))] == [OSError, PermissionError]
    assert calls == [2]


class AskedError(Exception):
    def __init__(self, headers: dict[str, str] | None) -> None:
        super().__init__()
        self.headers = headers


@pytest.mark.parametrize(
    ("asked", "least", "most"),
    [
        ("17", 17, 17),
        ("0", 0, 0),
        ("-5", 0, 0),
        ("nan", 0, 0),
        ("1e9", 300, 300),
        ("9" * 5000, 300, 300),
        (timedelta(seconds=100), 20, 100),
        (timedelta(days=100), 300, 300),
        (timedelta(days=-100), 0, 0),
        ("Wed, 21 Oct 2026 07:28:00 -0000", 0, 300),
        ("tomorrow", 0, 0),
        ("", 0, 0),
    ],
)
def test_what_a_server_asks_for(asked: str | timedelta, least: float, most: float) -> None:
    if not isinstance(asked, str):
        asked = format_datetime(datetime.now(UTC) + asked, usegmt=True)
    for error in (AskedError({"Retry-After": asked}), missing(AskedError({"Retry-After": asked}))):
        assert least <= seconds_asked(error) <= most
    assert seconds_asked(AskedError(None)) == seconds_asked(OSError()) == 0


@pytest.mark.parametrize("name", ["manifest.json", ".tar"])
def test_a_request_waits_as_long_as_the_server_asks(folder: Path, name: str) -> None:
    with served(folder) as site:
        if name == ".tar":
            far = site.dataset()
            assert far.sizes("bin").sum() > 0
        site.faults.kind, site.faults.name, site.faults.times = "429, Retry-After: 1", name, 1
        started = time.monotonic()
        assert (far if name == ".tar" else site.dataset())[0]["json"] == [0]
        assert time.monotonic() - started >= 1


def test_waits_grow_to_a_limit() -> None:
    patience = RetryPolicy(9, backoff=1.0, max_backoff=5.0)
    assert 1 <= patience.seconds(1) <= 1.5
    assert 4 <= patience.seconds(3) <= 6
    assert 5 <= patience.seconds(8) <= 7.5
    with pytest.raises(ValueError, match="max_attempts must be an int >= 1"):
        RetryPolicy(max_attempts=0)
    wrong: Any
    for wrong in (-1, "1", None, float("nan")):
        for name in ("backoff", "max_backoff"):
            with pytest.raises(ValueError, match=rf"{name} must be seconds >= 0, got {wrong!r}"):
                RetryPolicy(**{name: wrong})
