"""Where a mixture of streams stands, and what is refused."""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypedDict

from headrace.weighted_sampler.checks import WORD, integer
from headrace.weighted_sampler.mixture import MOST
from headrace.weighted_sampler.stream_reader import SourceState
from headrace.weighted_sampler.stream_sources import StreamMixture

VERSION = 1


@dataclass(frozen=True)
class Stream:
    """Which of the streams that are read at the same time this is.

    Attributes:
        rank: Of the process.
        world_size: Number of ranks.
        worker: Of the rank's loader; 0 in the main process.
        num_workers: Workers of the loader; 1 in the main process.
    """

    rank: int = 0
    world_size: int = 1
    worker: int = 0
    num_workers: int = 1

    def __str__(self) -> str:
        """Name the stream in a message."""
        return f"rank {self.rank} of {self.world_size}, worker {self.worker} of {self.num_workers}"


class StreamState(TypedDict):
    """What ``state_dict`` holds.

    Attributes:
        version: Of this layout.
        seed: Of the mixture.
        epoch: The epoch that ``position`` is in.
        position: Items of that epoch that this stream has handed out.
        stream: Which stream, as a dict of four integers.
        fingerprint: Of the names, the weights and the stopping rule.
        sources: Where each source stands, by name.
    """

    version: int
    seed: int
    epoch: int
    position: int
    stream: dict[str, int]
    fingerprint: str
    sources: dict[str, SourceState]


def make_state(
    mixture: StreamMixture[Any], epoch: int, position: int, stream: Stream, sources: Mapping[str, SourceState]
) -> StreamState:
    """Put a state together."""
    return StreamState(
        version=VERSION,
        seed=mixture.seed,
        epoch=epoch,
        position=position,
        stream=asdict(stream),
        fingerprint=mixture.fingerprint,
        sources=dict(sources),
    )


def check_stream_state(state: Mapping[str, Any], mixture: StreamMixture[Any]) -> StreamState:
    """Return a state that belongs to this mixture.

    Args:
        state: As ``state_dict`` made it.
        mixture: The mixture that is to go on from it.

    Raises:
        TypeError: If it is no mapping.
        ValueError: If a key is missing, or it comes from another version, seed, or from other sources, weights
            or another stopping rule.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"state must be what state_dict() returned, got {type(state).__name__}")
    _check_keys("state", state, StreamState.__required_keys__)
    if state["version"] != VERSION:
        raise ValueError(
            f"state has version {state['version']!r}, this release reads version {VERSION}; "
            "load it with the release that wrote it"
        )
    if state["seed"] != mixture.seed:
        raise ValueError(
            f"state has seed {state['seed']!r}, this dataset has seed {mixture.seed}: the orders have nothing in "
            f"common; build the dataset with seed={state['seed']!r}"
        )
    _check_sources(state, mixture)
    return StreamState(
        version=VERSION,
        seed=mixture.seed,
        epoch=integer("state['epoch']", state["epoch"], 0, WORD // 2 - 1),
        position=integer("state['position']", state["position"], 0, MOST // 2),
        stream=_stream(state["stream"]),
        fingerprint=mixture.fingerprint,
        sources={name: _source_state(name, state["sources"][name]) for name in mixture.names},
    )


def check_stream(state: StreamState, stream: Stream) -> None:
    """Refuse a state of another stream: its sources have read other shards.

    Raises:
        ValueError: If rank, number of ranks, worker or number of workers differ.
    """
    saved = Stream(**state["stream"])
    if saved != stream:
        raise ValueError(
            f"state belongs to {saved}, this stream is {stream}: streams share out the data among themselves, so "
            "save a state on every rank, load each where it was saved, and keep the numbers of ranks and workers "
            "(torchdata's StatefulDataLoader does it for the workers)"
        )


def _check_sources(state: Mapping[str, Any], mixture: StreamMixture[Any]) -> None:
    if not isinstance(state["sources"], Mapping):
        raise TypeError(f"state['sources'] must be a mapping, got {type(state['sources']).__name__}")
    names, own = sorted(state["sources"]), sorted(mixture.names)
    if names != own:
        raise ValueError(
            f"state belongs to the sources {names}, this dataset draws from {own}; resume with the sources it was "
            "saved with"
        )
    if state["fingerprint"] != mixture.fingerprint:
        raise ValueError(
            f"state belongs to other weights or another stopping rule (fingerprint {state['fingerprint']}, this "
            f"dataset's is {mixture.fingerprint}); resume with those it was saved with"
        )


def _source_state(name: str, state: Mapping[str, Any]) -> SourceState:
    what = f"state['sources'][{name!r}]"
    _check_keys(what, state, SourceState.__required_keys__)
    return SourceState(
        drawn=integer(f"{what}['drawn']", state["drawn"], 0, MOST),
        exhausted=integer(f"{what}['exhausted']", state["exhausted"], 0, MOST),
        source=state["source"],
        iterator=state["iterator"],
    )


def _stream(state: Mapping[str, Any]) -> dict[str, int]:
    keys = asdict(Stream())
    _check_keys("state['stream']", state, keys)
    return {key: integer(f"state['stream'][{key!r}]", state[key], 0) for key in keys}


def _check_keys(what: str, state: object, keys: Collection[str]) -> None:
    if not isinstance(state, Mapping):
        raise TypeError(f"{what} must be a mapping, got {type(state).__name__}")
    if missing := sorted(set(keys) - set(state)):
        raise ValueError(f"{what} lacks {missing}, got the keys {sorted(state)}; pass what state_dict() returned")
