"""When to ask a server again: how often, after how long, and for which errors."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from email.utils import parsedate_to_datetime
from typing import SupportsFloat, TypeVar

from headrace.webdatamodule._shared.checks import checked_int
from headrace.webdatamodule.shards.errors import ShardError

_Item = TypeVar("_Item")
_Got = TypeVar("_Got")
_PERMANENT = (
    ShardError,
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    NotImplementedError,
    ImportError,
    AttributeError,
    TypeError,
    ValueError,
)
_TRANSIENT_STATUS = (408, 425, 429)
_LONGEST = 300.0  # seconds; a server that is down for longer, or asks for years by mistake, is an error
# Of requests through obstore; those that fail to the end are repeated through fsspec, by the policy.
OBSTORE_RETRY = {"max_retries": 2, "retry_timeout": timedelta(seconds=20)}
_CHANCE = random.SystemRandom()  # transforms draw from the process's generator, and a fork copies it


@dataclass(frozen=True)
class RetryPolicy:
    """How often to repeat a failed request, and how long to wait in between.

    Args:
        max_attempts: Number of attempts, including the first. File systems that retry by themselves, such as s3fs, get
            at most two.
        backoff: Seconds before the second attempt; doubled for each further attempt, plus a random part of up to one
            half.
        max_backoff: Maximum seconds between two attempts; more where a web server asks for it, up to five minutes.

    Raises:
        TypeError: `max_attempts` is not an int.
        ValueError: A number is not allowed.
    """

    max_attempts: int = 5
    backoff: float = 0.2
    max_backoff: float = 10.0

    def __post_init__(self) -> None:
        checked_int("max_attempts", self.max_attempts, 1, cure="1 asks once")
        check_seconds("backoff", self.backoff)
        check_seconds("max_backoff", self.max_backoff)

    def seconds(self, attempts: int) -> float:
        """Seconds to wait after so many attempts."""
        wait = min(self.max_backoff, self.backoff * 2.0 ** (attempts - 1))
        return wait * _CHANCE.uniform(1, 1.5)


def check_seconds(name: str, value: object, *, above: bool = False) -> None:
    """Refuse what is no number of seconds, 0 or more, or `above` 0."""
    seconds = float(value) if isinstance(value, SupportsFloat) else -1.0
    if not (seconds > 0 if above else seconds >= 0):
        raise ValueError(f"{name} must be seconds {'>' if above else '>='} 0, got {value!r}")


def is_transient(error: BaseException) -> bool:
    """Whether asking again may help."""
    status = getattr(error, "status", None)
    if isinstance(status, int) and 400 <= status < 500:
        return status in _TRANSIENT_STATUS
    cause = error.__cause__
    if isinstance(error, FileNotFoundError) and cause and (isinstance(cause, OSError) or hasattr(cause, "status")):
        return is_transient(cause)  # whatever happens on the way to a size, fsspec says that the file is not there
    return isinstance(error, Exception) and not isinstance(error, _PERMANENT)


def seconds_asked(error: object) -> float:
    """How long a server asks to wait until it is asked again (`Retry-After`), up to five minutes."""
    headers = getattr(error, "headers", None) or getattr(getattr(error, "__cause__", None), "headers", None) or {}
    asked = headers.get("Retry-After", "")
    try:
        seconds = float(asked)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(asked).timestamp() - time.time()
        except (OverflowError, ValueError):
            return 0.0
    return max(0.0, min(seconds, _LONGEST))


def retry(
    ask: Callable[[Sequence[_Item]], Sequence[_Got | BaseException]],
    wanted: Sequence[_Item],
    policy: RetryPolicy,
    attempts: Callable[[], int] | None = None,
) -> list[_Got | BaseException]:
    """Ask for some items, and again for those that failed; errors stand for those that failed to the end."""
    got: list[_Got | BaseException] = list(ask(wanted))
    for attempt in range(1, policy.max_attempts if attempts is None else attempts()):
        failed = [number for number, one in enumerate(got) if isinstance(one, BaseException)]
        if not failed or not all(is_transient(error) for error in got if isinstance(error, BaseException)):
            break
        time.sleep(max(policy.seconds(attempt), *(seconds_asked(got[number]) for number in failed)))
        for number, one in zip(failed, ask([wanted[number] for number in failed]), strict=True):
            got[number] = one
    return got
