"""Messages of the library in the words of the command line."""

from __future__ import annotations

import re

_CALL = re.compile(r"\bcall (index_shards|verify_shards)\b")
_ARGUMENT = re.compile(
    r"(?<![\w/.'\"-])(drop_columns|samples_per_shard|bytes_per_shard|n_shards)(=True)?(?![\w/.'\"-])"
)


def worded(message: str) -> str:
    """A message; functions and arguments of the library become commands and flags.

    Args:
        message: Of an error or a fault.

    >>> worded("there is none: call index_shards on it, and pass drop_columns=True")
    'there is none: run headrace-shards index on it, and pass --drop-columns'
    """
    named = _CALL.sub(lambda call: f"run headrace-shards {call[1].removesuffix('_shards')}", message)
    return _ARGUMENT.sub(lambda name: f"--{name[1].replace('_', '-')}", named)


def wording(error: Exception) -> str:
    """The message of an error.

    Args:
        error: What was raised.

    >>> wording(FileNotFoundError(2, "No such file or directory", "a.tar"))
    'a.tar: No such file or directory'
    """
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return worded(str(error))
