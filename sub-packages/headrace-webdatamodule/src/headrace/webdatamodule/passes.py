"""Which pass over the shards this is, on which rank, and the order of the shards in it."""

import copy
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, TypeVar

import torch
import webdataset as wds
from torch import distributed
from torch.utils.data import get_worker_info

from headrace.webdatamodule.streaming.seeding import is_unseeded, with_seed

_Pipeline = TypeVar("_Pipeline")


class Pass(NamedTuple):
    """Numbers that name one pass over the shards.

    Attributes:
        epoch: Number of the epoch, from 0.
        lap: How often the shards were begun again within the epoch.
        rank: This process among those that train together.
        world: How many they are.
        items: How many items the workers gave before: the pass is gone on with.
    """

    epoch: int
    lap: int
    rank: int
    world: int
    items: int = 0


class CurrentPass:
    """The pass, set by the process that trains and read by its workers, also by persistent ones."""

    def __init__(self) -> None:
        self._numbers = torch.tensor([0, 0, 0, 1, 0], dtype=torch.int64)
        self._numbers.share_memory_()  # type: ignore[no-untyped-call] # torch leaves it untyped
        self._dropped = torch.zeros(1, dtype=torch.bool)
        self._dropped.share_memory_()  # type: ignore[no-untyped-call] # torch leaves it untyped

    def set(self, current: Pass) -> None:
        """Name the pass that begins now."""
        self._numbers.copy_(torch.tensor(current, dtype=torch.int64))

    def get(self) -> Pass:
        """The pass that was named last."""
        return Pass(*self._numbers.tolist())

    @property
    def dropped(self) -> bool:
        """Whether a function of `webdataset.map` dropped a sample, in any process."""
        return bool(self._dropped[0])

    @dropped.setter
    def dropped(self, dropped: bool) -> None:
        self._dropped[0] = dropped


def rank_and_world() -> tuple[int, int]:
    """This process's rank and the number of ranks: torch.distributed's, else those of the environment."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return 0, 1


def shard_order(n_shards: int, seed: int | str, epoch: int, lap: int) -> list[int]:
    """A permutation of the shards that depends on the arguments only.

    Args:
        n_shards: How many.
        seed: Names the sequence of permutations.
        epoch: Each epoch has its own permutation,
        lap: and so has each further pass within it.

    Returns:
        The shards' positions, shuffled.

    >>> shard_order(6, seed=1, epoch=0, lap=0), shard_order(6, seed=1, epoch=1, lap=0)
    ([3, 1, 2, 0, 5, 4], [5, 1, 0, 3, 4, 2])
    """

    def rank(shard: int) -> bytes:
        return blake2b(f"{seed}/{epoch}/{lap}/{shard}".encode(), digest_size=16).digest()

    return sorted(range(n_shards), key=rank)


class ShardSource:
    """First stage of a pipeline: the shards of this pass, the same list on every rank and worker.

    Args:
        urls: The shards.
        seed: Seed of their order; None keeps the order as it is.
        current: The pass.
    """

    def __init__(self, urls: Sequence[str], seed: int | str | None, current: CurrentPass) -> None:
        self.urls = list(urls)
        self.seed = seed
        self.current = current

    def __call__(self) -> Iterator[dict[str, str]]:
        """One dictionary per shard, as webdataset's stages expect them."""
        now = self.current.get()
        order: Iterable[int] = range(len(self.urls))
        if self.seed is not None:
            order = shard_order(len(self.urls), self.seed, now.epoch, now.lap)
        return ({"url": self.urls[shard]} for shard in order)


class SplitByRank:
    """webdataset's `split_by_node` with the rank as the training process knows it.

    webdataset asks in the worker, where a spawned process knows of no ranks: every rank would read the
    same shards.
    """

    def __init__(self, current: CurrentPass) -> None:
        self.current = current

    def __call__(self, source: Iterable[Any]) -> Iterator[Any]:
        """Every `world`-th item, beginning with `rank`."""
        now = self.current.get()
        return (item for position, item in enumerate(source) if position % now.world == now.rank)


class Reseeded:
    """A composable of the user's whose random generators begin each pass anew, and differently.

    A worker starts every epoch with a copy of what the training process holds, so a generator handed to
    `webdataset.shuffle(rng=...)` would give the same order in every epoch, and so does its `seed=...`. Here
    each pass, rank and worker gets a generator of its own, derived from the state of the given one or the seed. A
    shuffle with neither would begin with the time, in an order that no checkpoint can go on with: it gets a seed.

    Args:
        stage: A callable from iterator to iterator, or a stage of webdataset's.
        current: The pass.
        seed: For a shuffle that has none.
    """

    def __init__(self, stage: Any, current: CurrentPass, seed: str = "0") -> None:
        self.stage = stage
        self.current = current
        self.seed = seed

    def __call__(self, source: Iterator[Any]) -> Iterator[Any]:
        """Apply the stage."""
        now, worker = self.current.get(), get_worker_info()
        place = f"{now.epoch}/{now.lap}/{now.rank}/{worker.id if worker else 0}"
        stage = with_seed(self.stage, self.seed) if is_unseeded(self.stage) else self.stage
        result: Iterator[Any] = wds.DataPipeline().invoke(_with_own_generators(stage, place, self.current), source)
        return result


def _with_own_generators(stage: Any, place: str, current: CurrentPass) -> Any:
    if isinstance(stage, wds.filters.FilterFunction):
        args = [_derived(value, place) for value in stage.args]
        named = {name: _derived(value, place) for name, value in stage.kw.items()}
        if stage.f is wds.shuffle.f:
            args, named = _with_own_seed(args, named, place)
        if stage.f is wds.map.f:
            args, named = _watched(args, named, current)
        return stage.__class__(stage.f, *args, **named)
    if isinstance(stage, wds.filters.detshuffle):
        stage, now = copy.copy(stage), current.get()
        # The stage counts passes by itself, and workers forget the count. Laps are far fewer than 1000.
        stage.epoch += 1000 * now.epoch + now.lap
    return stage


class Watched:
    """A function for `webdataset.map`, which drops a sample when it gets None for it: that is noted.

    Args:
        function: The function.
        current: Where to note it.
    """

    def __init__(self, function: Callable[[Any], Any], current: CurrentPass) -> None:
        self.function = function
        self.current = current

    def __call__(self, sample: Any) -> Any:
        """Call the function."""
        result = self.function(sample)
        if result is None:
            self.current.dropped = True
        return result


def _watched(args: list[Any], named: dict[str, Any], current: CurrentPass) -> tuple[list[Any], dict[str, Any]]:
    if "f" in named:
        return args, named | {"f": Watched(named["f"], current)}
    return [Watched(args[0], current), *args[1:]], named


def _with_own_seed(args: list[Any], named: dict[str, Any], place: str) -> tuple[list[Any], dict[str, Any]]:
    # shuffle(bufsize, initial, rng, seed): a seed begins the same order in every pass.
    if named.get("seed") is not None:
        return args, named | {"seed": f"{named['seed']!r}/{place}"}
    return [f"{arg!r}/{place}" if i == 3 and arg is not None else arg for i, arg in enumerate(args)], named


def _derived(value: Any, place: str) -> Any:
    if not isinstance(value, random.Random):
        return value
    state = blake2b(repr(value.getstate()).encode(), digest_size=16).hexdigest()
    return random.Random(f"{state}/{place}")  # noqa: S311 - an order, not a secret


def reseed(pipeline: _Pipeline, first: int, current: CurrentPass, seed: object = 0) -> _Pipeline:
    """Make the stages of a pipeline begin each pass with generators of their own.

    Args:
        pipeline: A pipeline of webdataset's; anything else is left as it is.
        first: Position of the first stage that is the user's.
        current: The pass.
        seed: For stages that shuffle without one; each gets a seed of its own.

    Returns:
        The pipeline.
    """
    if isinstance(pipeline, wds.DataPipeline):
        pipeline.pipeline[first:] = [
            Reseeded(stage, current, f"{seed}/{number}") for number, stage in enumerate(pipeline.pipeline[first:])
        ]
    return pipeline


def as_given(stage: Any) -> Any:
    """A stage as the user gave it, without what `reseed` put around it."""
    return stage.stage if isinstance(stage, Reseeded) else stage
