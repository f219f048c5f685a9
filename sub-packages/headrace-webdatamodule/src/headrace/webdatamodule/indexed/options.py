"""Options in words, so that a checkpoint can say how they differed when it was saved."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

from headrace.webdatamodule.indexed.telling import digest

_LONGEST = 120


def in_words(option: Any) -> str:
    """Tell an option so that a reader knows it again; a digest stands for what is too long, and for code.

    >>> in_words(partial(sorted, reverse=True)), in_words(64), in_words("seq")
    ('sorted(reverse=True)', '64', "'seq'")
    """
    if isinstance(option, partial):
        words = [in_words(word) for word in option.args]
        words += [f"{name}={in_words(value)}" for name, value in sorted(option.keywords.items())]
        return f"{in_words(option.func)}({', '.join(words)})"
    if getattr(option, "shape", None) == () and callable(getattr(option, "item", None)):
        return in_words(option.item())
    if isinstance(option, Mapping):
        pairs = sorted((repr(key), in_words(value)) for key, value in option.items())
        return _short("{" + ", ".join(f"{key}: {value}" for key, value in pairs) + "}")
    if isinstance(option, tuple | list):
        return _short("[" + ", ".join(map(in_words, option)) + "]")
    if isinstance(option, float) and option.is_integer():
        return repr(int(option))
    if isinstance(option, str | bool | int | float | type(None)):
        return _short(repr(option))
    if hasattr(option, "shape"):
        return f"{type(option).__name__} of shape {tuple(option.shape)} ({digest(option)})"
    if inspect.isclass(option) or inspect.isbuiltin(option):
        return str(option.__qualname__)
    return f"{getattr(option, '__qualname__', type(option).__name__)} ({digest(option)})"


def _short(told: str) -> str:
    return told if len(told) <= _LONGEST else f"{told[:_LONGEST]}... ({digest(told)})"


def differences(before: Any, now: Mapping[str, str]) -> str:
    """Say which options were others when a checkpoint was saved.

    Args:
        before: The options in it.
        now: Those of now, each in words.

    >>> differences({"batching": "64", "seed": "0"}, {"batching": "32", "seed": "0"})
    'batching was 64 then, and is 32 now'
    """
    then = before if isinstance(before, Mapping) else {}
    changed = [(name, then.get(name), value) for name, value in now.items() if then.get(name, value) != value]
    return "; ".join(f"{name} was {old} then, and is {new} now" for name, old, new in changed)
