"""Positions in an epoch, and the batches from a position on."""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch.utils.data import Sampler

from headrace.webdatamodule.loading.batch_reading import Request
from headrace.webdatamodule.loading.foreign_batch_sampler import OTHER_ORDER, has_state


class Position(NamedTuple):
    """A place in an epoch."""

    steps: int  # batches of the epoch before it
    state: dict[str, Any] | None  # of the batch sampler; of one that has none, a hash of the batches before, if any


class Iteration:
    """One iteration; alive as long as its generator is."""

    def __init__(self, position: Position) -> None:
        self.position = position  # behind the batch that was delivered last
        # What was requested and not yet delivered: the indices of a batch, and the position behind it.
        self.in_flight: deque[tuple[Sequence[int], Position]] = deque()


class Requests(Sampler[Request]):
    """The batch sampler of the inner `DataLoader`: what `requested` gives for the next iteration."""

    def __init__(self) -> None:
        self.next: Iterator[Request] = iter(())

    def __iter__(self) -> Iterator[Request]:
        return self.next  # the same one when it is asked twice, as torch does


def requested(batches: Any, iteration: Iteration, stop: int, key: int) -> Iterator[Request]:
    """The batches of an epoch of `stop` steps from where an iteration begins, noted as in flight."""
    start, state_of = iteration.position, batches.state_dict if has_state(batches) else None
    given, before = iter(batches), hashlib.blake2b(digest_size=8)
    step = start.steps if state_of else 0  # a batch sampler without a state is read from the beginning
    for batch in given:
        step += 1
        if not hasattr(batch, "__len__"):
            raise TypeError(SINGLE.format(got=type(batch).__name__, kind=type(batches).__name__))
        if state_of:
            state = state_of()
        else:
            before.update(array("q", (len(batch), *batch)).tobytes())
            if step < start.steps:
                continue
            state = {"delivered": before.hexdigest()}
        if step > stop or (step == stop and next(given, None) is not None):
            raise _miscounted(batches, stop, "gives more")
        if step > start.steps:
            iteration.in_flight.append((batch, Position(step, state)))
            yield Request(batch, key, step - 1)
        elif step < stop and start.state not in (None, state):
            raise ValueError(OTHER_ORDER.format(kind=type(batches).__name__))
    if step < stop:
        raise _miscounted(batches, stop, f"gave {step}")


def _miscounted(batches: Any, stop: int, what: str) -> RuntimeError:
    message = f"{type(batches).__name__} has a length of {stop}, but {what} batches"
    return RuntimeError(f"{message}: trainers plan by it, make its __len__ count the batches of the present epoch")


SINGLE = (
    "batch_sampler must give lists of indices, got {got} from {kind}, which gives one sample at a time: wrap it, "
    "such as BatchSampler({kind}(...), batch_size=..., drop_last=False) of torch.utils.data"
)
