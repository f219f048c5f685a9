"""Positions in an epoch: what a batch sampler is asked for, and the states that a loader resumes from."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch.utils.data import Sampler

from headrace.webdatamodule.loading.dataset import Request

VERSION = 1


class Position(NamedTuple):
    """A place in an epoch.

    Attributes:
        steps: Batches of the epoch before it.
        state: Of the batch sampler there. Of one that has none, a hash of the batches before, if there are any.
    """

    steps: int
    state: dict[str, Any] | None


class Requests(Sampler[Request]):
    """The batch sampler of the inner `DataLoader`: notes each batch that it requests."""

    def __init__(self) -> None:
        self._next: Iterator[Request] = iter(())

    def begin(
        self,
        batches: Any,
        in_flight: deque[tuple[Sequence[int], Position]],
        *,
        start: Position,
        stop: int,
        key: int,
    ) -> None:
        """Prepare the next iteration.

        Args:
            batches: A batch sampler.
            in_flight: Gets the batches, and the position behind each.
            start: Where it begins. A batch sampler without a state is read up to there.
            stop: Number of steps of the epoch, as its length says.
            key: Of the random numbers.

        Raises:
            ValueError: Later, if the batches up to there are not those that were delivered before.
        """
        self._next = self._requests(batches, in_flight, start, stop, key)

    def __iter__(self) -> Iterator[Request]:
        return self._next  # the same one when it is asked twice, as torch does

    @staticmethod
    def _requests(
        batches: Any, in_flight: deque[tuple[Sequence[int], Position]], start: Position, stop: int, key: int
    ) -> Iterator[Request]:
        state_of = batches.state_dict if has_state(batches) else None
        given, before = iter(batches), hashlib.blake2b(digest_size=8)
        step = start.steps if state_of else 0
        for batch in given:
            step += 1
            if state_of:
                state = state_of()
            else:
                before.update(repr(list(batch)).encode())
                state = {"delivered": before.hexdigest()}
            if step > stop or (step == stop and next(given, None) is not None):
                raise _miscounted(batches, stop, "gives more")
            if step > start.steps:
                in_flight.append((batch, Position(step, state)))
                yield Request(batch, key, step - 1)
            elif step == start.steps < stop and start.state not in (None, state):
                raise ValueError(OTHER_ORDER.format(kind=type(batches).__name__))
        if step < stop:
            raise _miscounted(batches, stop, f"gave {step}")


OTHER_ORDER = (
    "the order of {kind} is not the one that the checkpoint was saved in: samples would be lost and repeated. Use a "
    "sampler whose order depends on a seed and the epoch alone, or start without the checkpoint"
)


def _miscounted(batches: Any, stop: int, what: str) -> RuntimeError:
    message = f"{type(batches).__name__} has a length of {stop}, but {what} batches"
    return RuntimeError(f"{message}: trainers plan by it, make its __len__ count the batches of the present epoch")


def has_state(batch_sampler: Any) -> bool:
    """Whether a batch sampler can be resumed by itself."""
    return callable(getattr(batch_sampler, "state_dict", None)) and hasattr(batch_sampler, "load_state_dict")


def checked(batch_sampler: Any) -> Any:
    """A batch sampler; TypeError for anything that cannot be one."""
    if hasattr(batch_sampler, "__len__") and hasattr(batch_sampler, "__iter__"):
        return batch_sampler
    kind = type(batch_sampler).__name__
    raise TypeError(f"batch_sampler must give lists of indices in every epoch and have a length, got {kind}")


def check_samples(batch_sampler: Any, dataset: Any) -> None:
    """Refuse a batch sampler that was made for another number of samples, as far as it says for how many."""
    sizes = getattr(batch_sampler, "sizes", None)
    count = getattr(batch_sampler, "n_samples", None) if sizes is None else len(sizes)
    if isinstance(count, int) and count not in (0, len(dataset)):
        kind = type(batch_sampler).__name__
        raise ValueError(f"dataset must have the {count} samples that {kind} was made for, got {len(dataset)}")


def set_epoch(batch_sampler: Any, epoch: int) -> None:
    """Tell a batch sampler, or its sampler, the epoch."""
    setter = getattr(batch_sampler, "set_epoch", None)
    setter = setter or getattr(getattr(batch_sampler, "sampler", None), "set_epoch", None)
    if callable(setter):
        setter(epoch)


def load_state(batch_sampler: Any, state: Mapping[str, Any], epoch: int) -> None:
    """Resume a batch sampler, whichever epoch it was told before."""
    batch_sampler.load_state_dict(state)
    if batch_sampler.state_dict().get("epoch", epoch) != epoch:  # it was told a later epoch, and kept that
        set_epoch(batch_sampler, epoch)
        batch_sampler.load_state_dict(state)


def check_state(state: Any, fingerprint: str, seed: int, name: str) -> tuple[int, int]:
    """Refuse a state of something else; return the steps delivered, and their epoch."""
    if not isinstance(state, Mapping):
        raise TypeError(f"state must be what state_dict() returned, got {type(state).__name__}")
    if missing := {"version", "seed", "epoch", "steps", "fingerprint", "batch_sampler"} - set(state):
        raise ValueError(f"state lacks {sorted(missing)}: pass what state_dict() returned")
    if state["version"] != VERSION:
        version = state["version"]
        raise ValueError(f"checkpoint has version={version!r}, this release reads {VERSION}: use the one that saved it")
    if state["seed"] != seed:
        cure = "use that seed, or start without the checkpoint"
        raise ValueError(f"checkpoint has seed={state['seed']!r}, got seed={seed}: {cure}")
    if state["fingerprint"] != fingerprint:
        raise ValueError(
            f"checkpoint is of other {name} data: it has fingerprint={state['fingerprint']!r}, got {fingerprint!r}; "
            "resume with the data it was saved with, or start without the checkpoint"
        )
    numbers = {key: state[key] for key in ("steps", "epoch")}
    for key, number in numbers.items():
        if type(number) is not int or not 0 <= number < 2**62:
            raise ValueError(f"state[{key!r}] must be an int from 0 to 2**62, got {number!r}")
    return numbers["steps"], numbers["epoch"]
