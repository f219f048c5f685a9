"""Options of loaders: checked once, passed on together, and described in words for a checkpoint."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, MutableSequence
from dataclasses import InitVar, dataclass, fields
from functools import partial
from typing import Any, Literal, TypeAlias

import torch

from headrace.webdatamodule._shared.checks import checked_int
from headrace.webdatamodule.loading.fingerprint import digest
from headrace.webdatamodule.loading.worker import WorkerTimeout
from headrace.webdatamodule.split_names import PerSplit, Split

OnError: TypeAlias = Literal["raise", "skip"]
SeedPer: TypeAlias = Literal["sample", "step"]
Collate: TypeAlias = Callable[[list[Any]], Any]
_LONGEST = 120


def seed_int(seed: Any) -> int:
    """A seed as an int of 64 bits."""
    number = checked_int("seed", seed, 0)
    if number >= 2**64:
        raise ValueError(f"seed must be an int from 0 to 2**64 - 1, got {seed!r}")
    return number


@dataclass(frozen=True, kw_only=True)
class Loading:
    """How a loader reads its batches: arguments of `ResumableLoader`; `where` names the split in errors."""

    collate_fn: Collate | None = None
    num_workers: int = 0
    prefetch_factor: int | None = None
    pin_memory: bool | None = False
    timeout: float = 600.0
    multiprocessing_context: Any = None
    on_error: OnError = "raise"
    seed_per: SeedPer = "step"
    where: InitVar[str] = ""

    @classmethod
    def by_split(
        cls, splits: Iterable[Split], *, collate_fn: Any, num_workers: Any, on_error: Any, **options: Any
    ) -> dict[Split, Loading]:
        """Return how each split is loaded; the first three arguments may be mappings from splits."""
        collate, workers = PerSplit("collate_fn", collate_fn), PerSplit("num_workers", num_workers, 0)
        errors = PerSplit("on_error", on_error, "raise")
        where = "[{}]" if any(argument.mapped for argument in (collate, workers, errors)) else ""
        return {
            split: cls(
                collate_fn=collate[split],
                num_workers=workers[split],
                on_error=errors[split],
                where=where.format(repr(split.name)),
                **options,
            )
            for split in splits
        }

    def __post_init__(self, where: str) -> None:
        if self.collate_fn is not None and not callable(self.collate_fn):
            raise TypeError(f"collate_fn{where} must be a function, got {self.collate_fn!r}")
        workers = checked_int(f"num_workers{where}", self.num_workers, 0, cure="0 reads in this process")
        object.__setattr__(self, "num_workers", workers)
        if self.prefetch_factor is not None:
            checked_int("prefetch_factor", self.prefetch_factor, 1, cure="None stands for 2 batches a worker")
        WorkerTimeout(self.timeout)
        if self.on_error not in ("raise", "skip"):
            raise ValueError(f"on_error{where} must be 'raise' or 'skip', got {self.on_error!r}")
        if self.seed_per not in ("sample", "step"):
            raise ValueError(f"seed_per must be 'sample' or 'step', got {self.seed_per!r}")

    def arguments(self) -> dict[str, Any]:
        """The same as keyword arguments."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def of_torch(self) -> dict[str, Any]:
        """The arguments for the workers of torch's `DataLoader`, which refuses some of them without workers."""
        return {
            "num_workers": self.num_workers,
            "prefetch_factor": self.prefetch_factor if self.num_workers else None,
            "pin_memory": torch.cuda.is_available() if self.pin_memory is None else self.pin_memory,
            "timeout": WorkerTimeout(self.timeout).seconds if self.num_workers else 0,
            "multiprocessing_context": self.multiprocessing_context if self.num_workers else None,
            "persistent_workers": self.num_workers > 0,
        }


def called(factory: partial[Any]) -> tuple[Any, ...]:
    """What a partial calls, and its positional arguments; LightningCLI's calls a class through functions of its own."""
    steps = [factory.func, *factory.args]
    while (getattr(steps[0], "__module__", None) or "").partition(".")[0] == "jsonargparse" and len(steps) > 1:
        del steps[0]
    return tuple(steps)


def describe_option(option: Any) -> str:
    """An option in words that a reader recognises; a digest stands for code and for long values."""
    if isinstance(option, partial):
        function, *arguments = called(option)
        words = [describe_option(word) for word in arguments]
        words += [f"{name}={describe_option(value)}" for name, value in sorted(option.keywords.items())]
        return f"{describe_option(function)}({', '.join(words)})"
    if getattr(option, "shape", None) == () and callable(getattr(option, "item", None)):
        return describe_option(option.item())
    if isinstance(option, Mapping):
        pairs = sorted((repr(key), describe_option(value)) for key, value in option.items())
        return _shortened("{" + ", ".join(f"{key}: {value}" for key, value in pairs) + "}")
    if isinstance(option, tuple | MutableSequence):  # such as a ListConfig; a range is not read through
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
