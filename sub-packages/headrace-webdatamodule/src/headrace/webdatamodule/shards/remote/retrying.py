"""What to do about requests that fail: try again for a while where that may help."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from headrace.webdatamodule.shards.errors import ShardError

Asked = TypeVar("Asked")
Got = TypeVar("Got")
_LASTING = (
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
_PASSING = (408, 425, 429)


@dataclass(frozen=True)
class Patience:
    """How often to try, and how long to wait in between.

    Args:
        tries: How often to try in all.
        wait: Seconds before the second try; doubled each time, and up to a half more by chance.
        longest: Seconds between two tries, at most.

    Raises:
        ValueError: A number is not allowed.
    """

    tries: int = 5
    wait: float = 0.2
    longest: float = 10.0

    def __post_init__(self) -> None:
        if self.tries < 1 or self.wait < 0 or self.longest < 0:
            raise ValueError(f"tries must be 1 or more, wait and longest 0 seconds or more, got {self}")

    def seconds(self, tried: int) -> float:
        """How long to wait after some tries.

        Args:
            tried: How many.
        """
        return min(self.longest, self.wait * 2.0 ** (tried - 1)) * random.uniform(1, 1.5)  # noqa: S311 - no secret


def passes(error: BaseException) -> bool:
    """Whether an error may be gone a moment later.

    Args:
        error: What a file system of fsspec raised.

    >>> passes(ConnectionResetError()), passes(FileNotFoundError())
    (True, False)
    """
    status = getattr(error, "status", None)
    if isinstance(status, int) and 400 <= status < 500:
        return status in _PASSING
    cause = error.__cause__
    if isinstance(error, FileNotFoundError) and cause and (isinstance(cause, OSError) or hasattr(cause, "status")):
        return passes(cause)  # whatever happens on the way to a size, fsspec says that the file is not there
    return isinstance(error, Exception) and not isinstance(error, _LASTING)


def persist(
    ask: Callable[[Sequence[Asked]], Sequence[Got | BaseException]], wanted: Sequence[Asked], patience: Patience
) -> list[Got | BaseException]:
    """Ask for things, and again for those that did not come.

    Args:
        ask: Gives a thing or an error for each one.
        wanted: What to ask for.
        patience: How often.

    Returns:
        The things; errors for those that did not come to the end.
    """
    got: list[Got | BaseException] = list(ask(wanted))
    for tried in range(1, patience.tries):
        failed = [number for number, one in enumerate(got) if isinstance(one, BaseException)]
        if not failed or not all(passes(error) for error in got if isinstance(error, BaseException)):
            break
        time.sleep(patience.seconds(tried))
        for number, one in zip(failed, ask([wanted[number] for number in failed]), strict=True):
            got[number] = one
    return got
