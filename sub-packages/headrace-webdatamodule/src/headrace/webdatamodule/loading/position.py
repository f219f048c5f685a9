"""Positions in an epoch: what a batch sampler is asked for, and the states that a loader resumes from."""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch.utils.data import Sampler

from headrace.webdatamodule.loading.dataset import Request

VERSION = 1
LARGEST = 2**62  # no number in a state is as large
_CURES = {
    "seed": "use that seed, or start without the checkpoint",
    "fingerprint": "it was saved with other samples, sizes, weights, batch size or budget; use those, or start without "
    "the checkpoint",
}
_OTHER_DATA = "another kind of dataset, other samples or shards, another number or order, or other names of sources"


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


SINGLE = (
    "batch_sampler must give lists of indices, got {got} from {kind}, which gives one sample at a time: wrap it, "
    "such as BatchSampler({kind}(...), batch_size=..., drop_last=False) of torch.utils.data"
)
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


def check_batch_sampler(batch_sampler: Any, dataset: Any) -> Any:
    """Refuse what is no batch sampler, or one that says it was made for another number of samples."""
    if not (hasattr(batch_sampler, "__len__") and hasattr(batch_sampler, "__iter__")):
        kind = type(batch_sampler).__name__
        raise TypeError(
            f"batch_sampler must give lists of indices in every epoch and have a length, got {kind}: give one such as "
            "DistributedBatchSampler(len(dataset), batch_size)"
        )
    if not hasattr(type(batch_sampler), "fingerprint"):  # whose `sizes` and `n_samples` may mean something else
        return batch_sampler
    sizes = getattr(batch_sampler, "sizes", None)
    count = getattr(batch_sampler, "n_samples", None) if sizes is None else len(sizes)
    if isinstance(count, int) and count not in (0, len(dataset)):
        kind = type(batch_sampler).__name__
        raise ValueError(f"dataset must have the {count} samples that {kind} was made for, got {len(dataset)}")
    return batch_sampler


def ranks_of(batch_sampler: Any) -> tuple[int, int] | None:
    """The number of ranks and the rank that a batch sampler, or its sampler, is for; None if it does not say."""
    for one in (batch_sampler, getattr(batch_sampler, "sampler", None)):
        found = getattr(one, "num_replicas", None), getattr(one, "rank", None)
        if all(isinstance(number, int) for number in found):
            return found  # type: ignore[return-value]  # of two ints
    return None


def set_epoch(batch_sampler: Any, epoch: int) -> None:
    """Tell a batch sampler, or its sampler, the epoch."""
    setter = getattr(batch_sampler, "set_epoch", None)
    setter = setter or getattr(getattr(batch_sampler, "sampler", None), "set_epoch", None)
    if callable(setter):
        setter(epoch)


def rewind(batch_sampler: Any, epoch: int) -> None:
    """Put a batch sampler at the beginning of an epoch: it forgets its position with its epoch."""
    set_epoch(batch_sampler, epoch + 1)
    set_epoch(batch_sampler, epoch)


def load_state(batch_sampler: Any, state: Mapping[str, Any], epoch: int) -> None:
    """Resume a batch sampler, whichever epoch was set before."""
    batch_sampler.load_state_dict(state)
    if batch_sampler.state_dict().get("epoch", epoch) != epoch:  # a later epoch was set, which it keeps
        set_epoch(batch_sampler, epoch)
        batch_sampler.load_state_dict(state)


def check_state(state: Any, kind: str, own: Mapping[str, Any], counts: Sequence[str], more: Sequence[str] = ()) -> None:
    """Refuse a state of something else, or one that was damaged.

    `own` has its owner's "version", and other values that may not differ; `counts` are fields that are numbers, `more`
    are others, of which one that ends with "?" may be absent.
    """
    fields = [*own, *(name for name in more if not name.endswith("?")), *counts]
    expected = f"{kind}: state must be what state_dict() returned, with {', '.join(fields)}"
    if not isinstance(state, Mapping):
        raise TypeError(f"{expected}; got {type(state).__name__}")
    lacks = [name for name in fields if name not in state]
    if lacks or set(state) - {*fields, *(name.rstrip("?") for name in more)}:
        fault = f"this state lacks {', '.join(lacks)}" if lacks else "this state has others"
        raise ValueError(f"{expected}; {fault}: got {', '.join(sorted(map(str, state)))}")
    for name in (*counts, "version"):
        if type(state[name]) is not int or not 0 <= state[name] < LARGEST:
            message = f"state[{name!r}] must be an int from 0 to 2**62, got {state[name]!r}"
            raise ValueError(f"{kind}: {message}: the checkpoint was damaged or changed; take another one")
    if state["version"] != own["version"]:
        versions = f"checkpoint has version={state['version']}, this release reads {own['version']}"
        cure = "it was saved by another version of headrace; resume with that one, or start without the checkpoint"
        raise ValueError(f"{kind}: {versions}: {cure}")
    for name, value in own.items():
        if state[name] != value:
            raise ValueError(f"{kind}: checkpoint has {name}={state[name]!r}, got {name}={value!r}: {_CURES[name]}")


def check_loader_state(state: Any, fingerprint: str, seed: int, name: str) -> None:
    """Refuse a `ResumableLoader`'s state of other data or another seed, or one that was changed."""
    own, more = {"version": VERSION, "seed": seed}, ("fingerprint", "batch_sampler", "order?")
    check_state(state, "ResumableLoader", own, ("epoch", "steps"), more)
    if state["fingerprint"] != fingerprint:
        raise ValueError(
            f"checkpoint is of other {name} data ({_OTHER_DATA}): it has fingerprint={state['fingerprint']!r}, "
            f"got {fingerprint!r}; resume with the data it was saved with, or start without the checkpoint"
        )
    batches, steps, epoch = state["batch_sampler"], state["steps"], state["epoch"]
    if not isinstance(batches, Mapping):
        raise TypeError(f"state['batch_sampler'] must be a mapping, got {type(batches).__name__}")
    if batches.get("epoch", epoch) != epoch:
        raise ValueError(f"state is of epoch {epoch}, but its batch sampler is in {batches['epoch']!r}: it was changed")
    position = batches.get("position", steps)
    if type(position) is int and (position > 0) != (steps > 0):
        raise ValueError(f"state has steps={steps}, but its batch sampler's position={position}: it was changed")


def length_of(batch_sampler: Any, before: int) -> int:
    """Batches of the whole epoch, of which some came before the position that the batch sampler was resumed at."""
    remaining = getattr(batch_sampler, "remaining", None) if before and has_state(batch_sampler) else None
    if remaining is not None and not callable(remaining):
        return before + int(remaining)
    return len(batch_sampler)


def resume(batch_sampler: Any, state: Mapping[str, Any], present: int, ranks: tuple[int, int]) -> dict[str, Any] | None:
    """Resume a batch sampler from a loader's state that was checked; if that is refused, it is in the `present` epoch.

    Returns the hash of the batches before, of a batch sampler without a state, if this rank saved it.
    """
    own, epoch, steps = state["batch_sampler"], state["epoch"], state["steps"]
    if has_state(batch_sampler):
        load_state(batch_sampler, own, epoch)
        if 0 < steps < len(batch_sampler) and state.get("order", "") != getattr(batch_sampler, "order_digest", ""):
            rewind(batch_sampler, present)
            raise ValueError(OTHER_ORDER.format(kind=type(getattr(batch_sampler, "sampler", batch_sampler)).__name__))
        return None
    num_replicas, rank = ranks
    if own.get("num_replicas") != num_replicas:
        raise ValueError(
            f"checkpoint has num_replicas={own.get('num_replicas')}, got num_replicas={num_replicas}, "
            f"and {type(batch_sampler).__name__} has no state_dict to share the rest among them: resume with as many "
            "ranks, or give a batch sampler that has one"
        )
    set_epoch(batch_sampler, epoch)
    if steps > (length := len(batch_sampler)):
        set_epoch(batch_sampler, present)
        raise ValueError(f"state has steps={steps}, more than the {length} batches of its epoch")
    return {"delivered": own["delivered"]} if "delivered" in own and own.get("rank") == rank else None
