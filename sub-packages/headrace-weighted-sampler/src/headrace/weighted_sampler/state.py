"""The few integers to resume from, and what is refused."""

from collections.abc import Mapping
from typing import Any, TypedDict

from headrace.weighted_sampler.checks import WORD, integer

VERSION = 1


class State(TypedDict):
    """What ``state_dict`` holds.

    Attributes:
        version: Of this layout.
        seed: Of the sampler.
        epoch: The epoch that ``position`` is in.
        position: Samples of that epoch's global sequence that need no delivery again.
        fingerprint: Of the dataset's length and the weights.
    """

    version: int
    seed: int
    epoch: int
    position: int
    fingerprint: str


def check_state(
    state: Mapping[str, Any], seed: int, fingerprint: str, length: int, most_epochs: int
) -> tuple[int, int]:
    """Return (epoch, position) of a state that belongs to this sampler.

    Args:
        state: As ``state_dict`` made it.
        seed: The sampler's.
        fingerprint: The sampler's.
        length: Positions in an epoch.
        most_epochs: Number of epochs that can be told apart.

    Raises:
        TypeError: If it is no mapping.
        ValueError: If a key is missing, or the state comes from another version, seed, dataset or weights.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"state must be what state_dict() returned, got {type(state).__name__}")
    if missing := sorted(State.__required_keys__ - set(state)):
        raise ValueError(f"state lacks {missing}, got the keys {sorted(state)}; pass what state_dict() returned")
    if type(state["version"]) is not int or state["version"] != VERSION:
        raise ValueError(
            f"state has version {state['version']!r}, this release reads version {VERSION}; "
            "load it with the release that wrote it"
        )
    if integer("state['seed']", state["seed"], 0, WORD - 1) != seed:
        raise ValueError(
            f"state has seed {state['seed']!r}, this sampler has seed {seed}: the orders have nothing in "
            f"common; build the sampler with seed={state['seed']!r}"
        )
    _same_data(str(state["fingerprint"]), fingerprint)
    epoch = integer("state['epoch']", state["epoch"], 0, most_epochs - 1)
    return epoch, integer("state['position']", state["position"], 0, length)


def _same_data(saved: str, own: str) -> None:
    if saved == own:
        return
    saved_length, own_length = saved.partition("-")[0], own.partition("-")[0]
    if saved_length != own_length:
        raise ValueError(
            f"state belongs to a dataset of {saved_length} samples, this one has {own_length}; "
            "resume with the dataset it was saved with"
        )
    raise ValueError(
        f"state belongs to other weights, semantics, schedule, sizes or epoch_length (fingerprint {saved}, this "
        f"sampler's is {own}); resume with those it was saved with"
    )
