"""The states of headrace's loaders and samplers in a checkpoint, found without running code from it."""

from __future__ import annotations

import json
import pickle
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

SAMPLER = {"version", "seed", "epoch", "position", "fingerprint"}
LOADER = {"version", "seed", "epoch", "steps", "fingerprint", "batch_sampler"}
# What may hold a state in a folder: of accelerate, the Hugging Face Trainer, and of Lightning with sharded models.
# Weights and optimizers are left alone.
IN_FOLDERS = ("custom_checkpoint_*.pkl", "dl_state_dict*.bin", "trainer_state.json", "meta.pt")
_ALSO = ("*.ckpt", "*.pt", "*.pth", "checkpoint*")
_DISTRIBUTED = ".metadata"  # in a folder of torch.distributed.checkpoint
_TORCHDATA = ("_snapshot", "_sampler_iter_yielded")  # of the state of a StatefulDataLoader
_CURE = "load it in Python where you trust it, and save the loader's state alone: torch.save(state, 'state.pt')"


class CheckpointError(ValueError):
    """A checkpoint is damaged, or reading it would need more than plain values."""


@dataclass(frozen=True)
class Found:
    """A state in a checkpoint.

    Attributes:
        path: Where it is, such as ``IndexedWebDataModule/train``; "." where the checkpoint is the state.
        sampler: The batch sampler's state.
        loader: That of the loader around it; None where a sampler was saved by itself.
    """

    path: str
    sampler: Mapping[str, Any]
    loader: Mapping[str, Any] | None = None

    @property
    def recorded(self) -> bool:
        """Whether it has a record of the run."""
        return bool(self.sampler.get("run"))


@dataclass
class Checkpoint:
    """The states of a checkpoint, and files of its folder that were not read, with the reason."""

    states: list[Found] = field(default_factory=list)
    passed_over: list[str] = field(default_factory=list)


def read_checkpoint(path: Path) -> Checkpoint:
    """Find all states in a file or a folder.

    Raises:
        FileNotFoundError: The path does not exist.
        CheckpointError: It is damaged, or needs more than plain values and tensors.
        ValueError: It is a folder that is no checkpoint.
    """
    found = Checkpoint()
    if path.is_dir():
        parts = list(_files(path))
        if not parts:
            if (path / _DISTRIBUTED).is_file():
                raise ValueError(f"{path}: a checkpoint of torch.distributed.checkpoint is not read here: {_CURE}")
            inside = sorted({one.name for pattern in _ALSO for one in path.glob(pattern)})[:5]
            cure = f"give one of {', '.join(inside)}" if inside else "give the checkpoint itself"
            raise ValueError(f"{path}: the folder has none of {', '.join(IN_FOLDERS)}: {cure}")
        for name, read in parts:
            try:
                found.states += _states(read(), name)
            except CheckpointError as error:
                found.passed_over.append(str(error))
        if not found.states and found.passed_over:
            raise CheckpointError("; ".join(found.passed_over))
    else:
        if path.exists() and not path.is_file():
            raise ValueError(f"{path}: neither a file nor a folder")
        found.states += _states(_load(path), ())
    found.states = _without_copies(found.states)
    return found


def _files(folder: Path) -> Iterator[tuple[tuple[str, ...], Callable[[], Any]]]:
    """The parts of a folder that may hold states: where they are in it, and how each is read."""
    for pattern in IN_FOLDERS:
        for path in sorted(folder.glob(pattern)):
            if path.is_file():
                yield (path.name,), lambda path=path: _load(path)  # type: ignore[misc]  # binds this one


def _load(path: Path) -> Any:
    if path.suffix == ".json":
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (RecursionError, ValueError) as error:
            raise CheckpointError(f"{path}: no JSON: {error}") from error
    with path.open("rb") as file:
        zipped = file.read(4) == b"PK\x03\x04"
    # Mapped, so that no weights are read.
    return _load_torch(str(path), str(path), mmap=zipped)


def _load_torch(source: Any, name: str, **options: Any) -> Any:
    try:
        return torch.load(source, map_location="cpu", weights_only=True, **options)
    except OSError:
        raise
    except Exception as error:
        # "Unsupported global: GLOBAL posix.system was not an allowed global", "Unsupported class ..."
        asked = re.search(r"(?:GLOBAL|class|Unsupported global:) ([\w.]+\.[\w.]+)", str(error))
        if asked and isinstance(error, pickle.UnpicklingError):
            raise CheckpointError(
                f"{name}: refused, as reading it would call {asked[1]}, which is more than plain values and tensors: "
                f"{_CURE}"
            ) from error
        reason = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
        raise CheckpointError(f"{name}: no file of torch.save that is whole and needs no code: {reason}") from error


def _states(thing: object, path: tuple[str, ...]) -> Iterator[Found]:
    """The states inside plain containers, with their places; those of short paths come first."""
    waiting, seen = deque([(thing, path)]), set[int]()
    while waiting:
        thing, path = waiting.popleft()
        if id(thing) in seen:  # a container may hold itself
            continue
        seen.add(id(thing))
        if isinstance(thing, Mapping):
            if (found := _state(thing, "/".join(path) or ".")) is not None:
                yield found
                continue
            inside: Iterable[tuple[Any, Any]] = thing.items()
        else:
            inside = enumerate(thing) if isinstance(thing, list | tuple) else ()
        waiting += ((one, (*path, str(name))) for name, one in inside if isinstance(one, Mapping | list | tuple))


def _state(thing: Mapping[Any, Any], where: str) -> Found | None:
    inner = thing.get("batch_sampler")
    if set(thing) >= LOADER and isinstance(inner, Mapping):
        return Found(where, inner, thing)
    if set(thing) >= SAMPLER:
        return Found(where, thing)
    return _of_torchdata(thing, where) if any(name in thing for name in _TORCHDATA) else None


def _of_torchdata(thing: Mapping[str, Any], where: str) -> Found | None:
    """The sampler's state in that of a StatefulDataLoader; one without a position is refused."""
    try:
        from headrace.size_aware_batching.integrations import NoSamplerStateError, sampler_state
    except ImportError:
        return None  # found as any other
    try:
        return Found(where, sampler_state(thing))
    except NoSamplerStateError:
        return None
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: {error}") from error


def _without_copies(states: list[Found]) -> list[Found]:
    """Each state once, where its path is shortest: trainers keep a loader's state beside that of its data module."""
    kept: list[Found] = []
    for state in sorted(states, key=lambda one: one.path.count("/")):
        if not any(repr((state.sampler, state.loader)) == repr((one.sampler, one.loader)) for one in kept):
            kept.append(state)
    return sorted(kept, key=lambda one: one.path)


def chosen(checkpoint: Checkpoint, path: str | None, name: str) -> Found:
    """The one state of a checkpoint, or that at a path.

    Raises:
        ValueError: There is none, or there are several.
    """
    states = checkpoint.states
    listed = ", ".join(one.path for one in states)
    if not states:
        raise ValueError(
            f"{name}: no state of ResumableLoader, DistributedBatchSampler or DistributedSizeAwareBatchSampler in it: "
            "save the loader's state_dict() with the weights; use a SizeAwareTrainerMixin in a Hugging Face Trainer"
        )
    if path is not None:
        if found := [one for one in states if one.path == path]:
            return found[0]
        raise ValueError(f"--state must be one of {listed}, got {path!r}")
    with_record = [one for one in states if one.recorded]
    if len(with_record) == 1 or len(states) == 1:
        return (with_record or states)[0]
    raise ValueError(f"{name} holds {len(states)} states: choose one with --state: {listed}")
