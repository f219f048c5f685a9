"""States that were changed by hand are read, or refused with a ValueError or a TypeError; nothing else comes."""

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.size_aware_batching import (
    BlockwiseSizeAwareBatchSampler,
    DistributedSizeAwareBatchSampler,
    OptimizerStepBatchSampler,
)
from headrace.webdatamodule import DistributedBatchSampler, ResumableLoader
from headrace.weighted_sampler import InterleavedDataset, NamedConcatDataset, WeightedDistributedSampler

SIZES = np.random.default_rng(0).integers(1, 50, 300)


def blockwise() -> Any:
    return BlockwiseSizeAwareBatchSampler(
        [SIZES[:100], SIZES[100:180], SIZES[180:]], 180, block=1, num_replicas=2, rank=0
    )


def by_size(**options: Any) -> Any:
    return DistributedSizeAwareBatchSampler(SIZES, 180, num_replicas=2, rank=0, **options)


def equal(**options: Any) -> Any:
    return DistributedBatchSampler(300, 7, num_replicas=2, rank=0, **options)


def mixture(**options: Any) -> Any:
    data = NamedConcatDataset({"web": range(200), "books": range(100)})
    return WeightedDistributedSampler(data, {"web": 1, "books": 3}, num_replicas=1, rank=0, **options)


def grown(make: Callable[..., Any]) -> Any:
    """Batches over a mixture that grew at the beginning of epoch 1."""
    before = WeightedDistributedSampler(range(250), {(0, 200): 1, (200, 250): 3}, num_replicas=1, rank=0)
    old = (
        DistributedBatchSampler(250, 7, num_replicas=2, rank=0, sampler=before)
        if make is equal
        else DistributedSizeAwareBatchSampler(SIZES[:250], 180, num_replicas=2, rank=0, sampler=before)
    )
    list(old)
    now = WeightedDistributedSampler(range(300), {(0, 200): 1, (200, 300): 3}, num_replicas=1, rank=0)
    new = make(sampler=now)
    new.load_state_dict(old.state_dict(), accept={"data"})
    new.set_epoch(1)
    return new


def loader(batches: Any) -> Any:
    return ResumableLoader(list(range(300)), batches, collate_fn=list, check_ranks=False)


MAKERS: dict[str, Callable[[], Any]] = {
    "stratified": by_size,
    "split": partial(by_size, oversize="split", max_length=20),
    "special tokens": partial(by_size, extra_per_sample=2),
    "optimizer steps": lambda: OptimizerStepBatchSampler(SIZES, 180, tokens_per_step=700, num_replicas=2, rank=0),
    "curriculum": partial(by_size, cost="padded", curriculum=20),
    "blockwise": blockwise,
    "equal": equal,
    "mixture": mixture,
    "mixture of tokens": partial(mixture, per="token", sizes=SIZES, schedule=[(200, {"web": 1, "books": 1})]),
    "by size over a mixture": lambda: grown(by_size),
    "equal over a mixture": lambda: grown(equal),
    "streams": lambda: InterleavedDataset({"web": range(90), "books": range(40)}, {"web": 2, "books": 1}),
    "loader, equal": lambda: loader(equal()),
    "loader, by size": lambda: loader(by_size()),
}


def states(make: Callable[[], Any]) -> Iterator[Any]:
    """States with changes, of the middle of an epoch."""
    sampler = make()
    rest = iter(sampler)
    for _ in range(4):
        next(rest)
    yield sampler.state_dict()
    try:
        sampler.exclude([3, 9])
        sampler.skip(1)
    except (AttributeError, ValueError):
        return
    for _ in range(2):
        next(rest)
    yield sampler.state_dict()


STATES = {name: [json.loads(json.dumps(state)) for state in states(make)] for name, make in MAKERS.items()}
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 400),
    st.sampled_from(
        [2**62, 2**63, 10**40, -1, 0.5, float("nan"), float("inf"), "", "a word", "10", [], {}, [[]], [{}]]
    ),
    st.lists(st.integers(0, 5), max_size=3),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each entry inside."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in entries:
        yield (*path, key)
        yield from places(entry, (*path, key))


@st.composite
def changed(draw: st.DrawFn, known: list[Any]) -> Any:
    """A state with an entry that is deleted, replaced, or put in another one's place."""
    state = json.loads(json.dumps(draw(st.sampled_from(known))))
    for _ in range(draw(st.integers(1, 2))):
        path = draw(st.sampled_from(sorted(places(state), key=repr)))
        inside = state
        for key in path[:-1]:
            inside = inside[key]
        if draw(st.booleans()):
            inside[path[-1]] = deepcopy(draw(VALUES))
        else:
            del inside[path[-1]]
        if not state:
            break
    return state


@pytest.mark.parametrize("name", MAKERS)
@given(data=st.data())
def test_no_change_of_a_state_ends_in_another_error(name: str, data: st.DataObject) -> None:
    state = data.draw(changed(STATES[name]))
    made = MAKERS[name]()
    before = made.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            made.load_state_dict(state)
        except (TypeError, ValueError):
            assert made.state_dict() == before, "what was refused changes nothing"
            return
        with suppress(RuntimeError, ValueError):  # which name what was changed
            for _ in islice(made, 30):
                pass
            made.state_dict()
