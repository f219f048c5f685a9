"""Arguments: checked once, given for each split, and described in words for a checkpoint."""

from __future__ import annotations

import inspect
import operator
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from headrace.webdatamodule.loading.digest import digest
from headrace.webdatamodule.loading.worker import WorkerTimeout
from headrace.webdatamodule.splits import Split, by_split, meant_split, named_split

NESTED = "shards are {'train': directory}, or {'train': {'name': directory, ...}} for several sources"
_LONGEST = 120


def as_int(name: str, value: Any, low: int, cure: str = "") -> int:
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
    number = as_int("seed", seed, 0)
    if number >= 2**64:
        raise ValueError(f"seed must be an int from 0 to 2**64 - 1, got {seed!r}")
    return number


def check_loading(num_workers: Any, prefetch_factor: Any, timeout: Any, on_error: Any, where: str = "") -> None:
    """Refuse what no loader takes; `where` names the split."""
    as_int(f"num_workers{where}", num_workers, 0, "0 reads in this process")
    if prefetch_factor is not None:
        as_int("prefetch_factor", prefetch_factor, 1, "None stands for 2 batches a worker")
    WorkerTimeout(timeout)
    if on_error not in ("raise", "skip"):
        raise ValueError(f"on_error{where} must be 'raise' or 'skip', got {on_error!r}")


@dataclass(frozen=True)
class PerSplit:
    """The value of an argument: one for all splits, or a mapping from splits, which may leave some to the default.

    Every mapping is one from splits, unless `mappings` are among the values: then it is one if all its keys are splits,
    or are meant to be. `cure` says in errors what else a mapping may have been meant for.
    """

    name: str
    given: Any
    default: Any = None
    mappings: bool = False
    cure: str = ""

    def __post_init__(self) -> None:
        if self.mapped:
            object.__setattr__(self, "given", by_split(self.name, self.given, cure=self.cure))

    @property
    def mapped(self) -> bool:
        """Whether it is a mapping from splits."""
        if not isinstance(self.given, Mapping):
            return False
        if not self.mappings or any(isinstance(key, Split) for key in self.given):
            return True
        return bool(self.given) and all(meant_split(key) for key in self.given)

    def in_words(self, words: Callable[[Any], str]) -> str:
        """The value in words; of a mapping, those of each split."""
        if not self.mapped:
            return words(self.given)
        return "{" + ", ".join(f"{split.name}: {words(value)}" for split, value in self.given.items()) + "}"

    def __contains__(self, split: Split) -> bool:
        return split in self.given if self.mapped else self.given is not None

    def __getitem__(self, split: Split) -> Any:
        return self.given.get(split, self.default) if self.mapped else self.given


def named_sources(name: str, given: Any, default: str) -> dict[str, Any]:
    """The sources of a split, each with a name; an only one gets the default's."""
    if not isinstance(given, Mapping):
        return {default: given}
    if not given:
        raise ValueError(f"{name} is empty: name at least one source, such as {{'proteins': directory}}")
    for key, place in given.items():
        if not isinstance(key, str) or not key:
            raise TypeError(f"{name}: names of sources must be text, got {key!r}; {NESTED}")
        if named_split(key):
            raise TypeError(
                f"{name} names sources, and {key!r} is the name of a split: give the source another name, or the split "
                "a place of its own"
            )
        if isinstance(place, Split | Mapping):
            raise TypeError(f"{name}: {key!r} must be a place of shards, got {place!r}; {NESTED}")
    return dict(given)


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
