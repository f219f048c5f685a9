"""Arguments: checked once, given for each split, and described in words for a checkpoint."""

from __future__ import annotations

import inspect
import operator
import reprlib
from collections.abc import Mapping
from functools import partial
from typing import Any

from headrace.webdatamodule.loading.fingerprint import digest
from headrace.webdatamodule.loading.worker import WorkerTimeout

_LONGEST = 120


def checked_int(name: str, value: Any, low: int, cure: str = "") -> int:
    """An argument as an int >= `low`; numpy's integers are allowed, bools are not."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < low:
        kind = TypeError if number is None else ValueError
        raise kind(f"{name} must be an int >= {low}, got {reprlib.repr(value)}{f': {cure}' if cure else ''}")
    return number


def seed_int(seed: Any) -> int:
    """A seed as an int of 64 bits."""
    number = checked_int("seed", seed, 0)
    if number >= 2**64:
        raise ValueError(f"seed must be an int from 0 to 2**64 - 1, got {seed!r}")
    return number


def check_loading(num_workers: Any, prefetch_factor: Any, timeout: Any, on_error: Any, where: str = "") -> None:
    """Refuse what no loader takes; `where` names the split."""
    checked_int(f"num_workers{where}", num_workers, 0, "0 reads in this process")
    if prefetch_factor is not None:
        checked_int("prefetch_factor", prefetch_factor, 1, "None stands for 2 batches a worker")
    WorkerTimeout(timeout)
    if on_error not in ("raise", "skip"):
        raise ValueError(f"on_error{where} must be 'raise' or 'skip', got {on_error!r}")


def describe_option(option: Any) -> str:
    """An option in words that a reader recognises; a digest stands for code and for long values."""
    if isinstance(option, partial):
        words = [describe_option(word) for word in option.args]
        words += [f"{name}={describe_option(value)}" for name, value in sorted(option.keywords.items())]
        return f"{describe_option(option.func)}({', '.join(words)})"
    if getattr(option, "shape", None) == () and callable(getattr(option, "item", None)):
        return describe_option(option.item())
    if isinstance(option, Mapping):
        pairs = sorted((repr(key), describe_option(value)) for key, value in option.items())
        return _shortened("{" + ", ".join(f"{key}: {value}" for key, value in pairs) + "}")
    if isinstance(option, tuple | list):
        return _shortened("[" + ", ".join(map(describe_option, option)) + "]")
    if isinstance(option, float) and option.is_integer():
        return repr(int(option))
    if isinstance(option, str | bool | int | float | type(None)):
        return _shortened(repr(option))
    if hasattr(option, "shape"):
        return f"{type(option).__name__} of shape {tuple(option.shape)} ({digest(option)})"
    if inspect.isclass(option) or inspect.isbuiltin(option):
        return str(option.__qualname__)
    return f"{getattr(option, '__qualname__', type(option).__name__)} ({digest(option)})"


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({digest(text)})"


def differences(saved: Any, own: Mapping[str, str]) -> str:
    """Which options, each in words, were others when a checkpoint was saved."""
    then = saved if isinstance(saved, Mapping) else {}
    changed = [name for name, value in own.items() if then.get(name, value) != value]
    before, now = (", ".join(f"{name}={its[name]}" for name in changed) for its in (then, own))
    return f"checkpoint has {before}, got {now}" if changed else ""
