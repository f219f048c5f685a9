"""What a checkpoint keeps of a stream, and which streams it fits."""

from collections.abc import Mapping
from typing import Any, NamedTuple, TypedDict

VERSION = 1
MOST = 2**48  # of any number: no run gets there, and what is made of them fits into 64 bits
UNSEEDED = "the seed of stages that shuffle without one"
STAGES = ("pipeline_wds", "pipeline_prebatch_wld", "invoke_wds", "invoke_wld", UNSEEDED)
_NUMBERS = ("version", "epoch", "position", "ranks", "workers")
_CURE = "Resume with what the checkpoint was made with, or begin without it"
_ELASTIC = (
    "A stream goes on in mid-epoch with the same numbers only: resume with those, or from a checkpoint at the end"
    " of an epoch. An IndexedWebDataModule resumes with any numbers"
)


class StreamState(TypedDict):
    """The state of a loader.

    Attributes:
        version: Of this format.
        epoch: Number of the epoch.
        position: Batches of it that were delivered to the training loop, on each rank.
        ranks: How many ranks shared the samples.
        workers: How many workers each had.
        dropped: Whether a function of `webdataset.map` dropped samples, so that no position can be worked out.
        fingerprint: What decides the order, as texts by name.
    """

    version: int
    epoch: int
    position: int
    ranks: int
    workers: int
    dropped: bool
    fingerprint: dict[str, str]


class Stream(NamedTuple):
    """What a state has to fit.

    Attributes:
        name: Name of the split, for messages.
        batches: Batches of an epoch; None when it has no end.
        ranks: Number of ranks.
        workers: Number of workers.
        fingerprint: What decides the order.
    """

    name: str
    batches: int | None
    ranks: int
    workers: int
    fingerprint: Mapping[str, str]


def check_state(state: Any, stream: Stream) -> StreamState:
    """Refuse the state of another stream.

    Args:
        state: As `state_dict` made it.
        stream: What it has to fit.

    Returns:
        The state.

    Raises:
        TypeError: It is no such state.
        ValueError: It is of another order, or stands in the middle of an epoch of other stages, ranks or workers.
    """
    checked = _form(state, stream.name)
    # At an epoch's end other numbers of ranks may go on, with batches that are larger or smaller for it.
    within = checked["position"] not in (0, stream.batches)
    for part in [*stream.fingerprint, *checked["fingerprint"]]:
        if part in STAGES and not within:
            continue
        was, is_now = checked["fingerprint"].get(part, "nothing"), stream.fingerprint.get(part, "nothing")
        if was != is_now:
            raise ValueError(
                f"{stream.name}: the checkpoint is of another order: {part} was {was} in it and is {is_now} here."
                f" {_CURE}"
            )
    position, most = checked["position"], stream.batches
    if most is not None and position > most:
        raise ValueError(
            f"{stream.name}: the checkpoint stands at batch {position} of an epoch of {most}. Give the trainer and"
            " the loader the length that they had"
        )
    if within:
        _check_numbers(checked, stream)
    return checked


def _check_numbers(state: StreamState, stream: Stream) -> None:
    was, is_now = (state["ranks"], state["workers"]), (stream.ranks, stream.workers)
    if was != is_now:
        raise ValueError(
            f"{stream.name}: the checkpoint stands at batch {state['position']} of epoch {state['epoch']} of {was[0]}"
            f" ranks with {was[1]} workers, here are {is_now[0]} ranks with {is_now[1]}. {_ELASTIC}"
        )


def _form(state: Any, name: str) -> StreamState:
    wanted = list(StreamState.__annotations__)
    if not isinstance(state, Mapping) or sorted(state) != sorted(wanted):
        got = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise TypeError(f"{name}: the state must be a mapping with {', '.join(wanted)}, got {got}")
    for number in _NUMBERS:
        if type(state[number]) is not int or state[number] < 0:
            raise TypeError(f"{name}: {number} of the state must be an int, 0 or more, got {state[number]!r}")
        if state[number] > MOST:
            raise ValueError(
                f"{name}: {number} of the state must be at most {MOST}, got {state[number]}: the checkpoint is damaged"
                " or was changed; take another one"
            )
    if state["version"] != VERSION:
        raise ValueError(f"{name}: the state has version {state['version']}, this release reads version {VERSION}")
    if not isinstance(state["fingerprint"], Mapping) or type(state["dropped"]) is not bool:
        raise TypeError(f"{name}: fingerprint of the state must be a mapping, and dropped a bool")
    copied: Any = {**state, "fingerprint": {str(part): str(text) for part, text in state["fingerprint"].items()}}
    made: StreamState = copied
    return made
