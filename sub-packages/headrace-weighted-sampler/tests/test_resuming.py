"""Resuming from every place, and what happens when an argument changed."""

import inspect
import subprocess
import sys
from fractions import Fraction
from itertools import islice
from typing import Any

import numpy as np
import pytest
from laws import in_steps

from headrace.weighted_sampler import InterleavedDataset, WeightedDistributedSampler
from headrace.weighted_sampler.testing import check_resumes

LENGTH = 60
SIZES = np.arange(1, LENGTH + 1)
RANGES = {(0, 40): 1, (40, 60): 2}
STREAMS = {"web": [f"w{number}" for number in range(40)], "books": [f"b{number}" for number in range(20)]}


class Data(list[int]):
    """Samples that say what they are."""

    fingerprint = "one"


class OtherData(Data):
    fingerprint = "two"


def sampler(**options: Any) -> WeightedDistributedSampler:
    arguments: dict[str, Any] = {"dataset": range(LENGTH), "weights": RANGES, "semantics": "proportion"} | options
    return WeightedDistributedSampler(**arguments)


def stream(**options: Any) -> InterleavedDataset[str]:
    arguments: dict[str, Any] = {"sources": STREAMS, "weights": {"web": 2, "books": 1}} | options
    return InterleavedDataset(**arguments)


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "one rank": (sampler, {}),
    "a rank of three": (sampler, {"num_replicas": 3, "rank": 2}),
    "dropped": (sampler, {"num_replicas": 7, "rank": 3, "drop_last": True}),
    "ranges by ratio": (sampler, {"weights": {(0, 40): 0.25, (40, 60): 1.5}, "semantics": "ratio"}),
    "by tokens": (sampler, {"per": "token", "sizes": SIZES}),
    "a source that leaves": (sampler, {"max_passes": {(40, 60): 1}, "epoch_length": 25}),
    "a source that leaves, by tokens": (sampler, {"max_passes": {(40, 60): 2}, "per": "token", "sizes": SIZES}),
    "sources that run out": (sampler, {"weights": {(0, 40): 1, (40, 60): 3}, "stopping": "drop_exhausted"}),
    "a schedule": (sampler, {"schedule": [(50, {(0, 40): 3, (40, 60): 1})]}),
    "a stream": (stream, {"stopping": "all_exhausted"}),
    "a stream of sources that run out": (stream, {"stopping": "drop_exhausted"}),
    "a stream by tokens": (stream, {"stopping": "all_exhausted", "per": "token", "sizeof": len}),
    "a stream by tokens of sources that run out": (
        stream,
        {"stopping": "drop_exhausted", "per": "token", "sizeof": len},
    ),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*has no state of its own:UserWarning")  # lists are read again
@pytest.mark.parametrize("cuts", [10, pytest.param(100, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("case", CASES)
def test_it_resumes_everywhere(case: str, cuts: int) -> None:
    make, options = CASES[case]
    check_resumes(lambda: make(**options), most_cuts=cuts)


SHORT = {"weights": {(0, 57): 1, (57, 60): 9}}  # the second source has one pass in the first four draws

# By the class and the argument: other options, and the argument's other value.
REFUSED: dict[Any, dict[str, list[tuple[dict[str, Any], Any]]]] = {
    sampler: {
        "dataset": [({}, range(LENGTH + 1)), ({"dataset": Data(range(LENGTH))}, OtherData(range(LENGTH)))],
        "weights": [({}, {(0, 40): 1, (40, 60): 3}), ({}, {(0, 30): 1, (30, 60): 2})],
        "seed": [({}, 1)],
        "drop_last": [({}, True)],
        "weight_dict": [({"weights": None, "weight_dict": {(0, 40): 1}, "semantics": None}, {(0, 40): 2})],
        "semantics": [({"weights": {(0, 40): 30, (40, 60): 30}}, "count")],
        "epoch_length": [({}, 50)],
        "temperature": [({"weights": {(0, 40): 1, (40, 60): 1}, "semantics": "temperature", "temperature": 1}, 3)],
        "schedule": [({}, [(2, {(0, 40): 9, (40, 60): 1})])],
        "per": [({}, "token")],
        "sizes": [({"sizes": SIZES, "per": "token"}, SIZES[::-1])],
        "stopping": [({}, "drop_exhausted")],
        "max_passes": [(SHORT, {(57, 60): 1}), (SHORT | {"max_passes": {(57, 60): 1}}, {(57, 60): 2})],
    },
    stream: {
        "sources": [({}, {**STREAMS, "web": STREAMS["web"][:-1]})],
        "weights": [({}, {"web": 1, "books": 1})],
        "seed": [({}, 1)],
        "stopping": [({}, "all_exhausted")],
        "semantics": [({}, "ratio")],
        "temperature": [({"semantics": "temperature", "temperature": 1}, 3)],
        "schedule": [({}, [(2, {"web": 1, "books": 5})])],
        "per": [({}, "token")],
        "num_replicas": [({"rank": 0}, 2)],  # every stream has sources of its own
        "rank": [({"num_replicas": 2}, 1)],
        "mesh": [({"mesh": type("One", (), {"size": lambda self: 1, "get_local_rank": lambda self: 0})()}, "two")],
    },
}
# Of another function it is not known whether it counts alike.
ACCEPTED: dict[Any, set[str]] = {sampler: {"num_replicas", "rank", "mesh"}, stream: {"sizeof"}}


class Two:
    """A mesh of two ranks."""

    def size(self) -> int:
        return 2

    def get_local_rank(self) -> int:
        return 1


@pytest.mark.parametrize("make", [sampler, stream])
def test_every_argument_is_refused_or_accepted_when_it_changes(make: Any) -> None:
    assert set(inspect.signature(type(make())).parameters) == REFUSED[make].keys() | ACCEPTED[make]


@pytest.mark.parametrize(
    ("make", "name", "case"),
    [(make, name, case) for make, names in REFUSED.items() for name in names for case in range(len(names[name]))],
)
def test_another_value_of_an_argument_that_decides_the_order_is_refused(make: Any, name: str, case: int) -> None:
    options, value = REFUSED[make][name][case]
    saved = make(**options | ({"rank": 0} if name == "rank" else {"num_replicas": 1} if name == "num_replicas" else {}))
    list(islice(saved, 5))
    more: dict[str, Any] = {} if name != "per" else {"sizes": SIZES} if make is sampler else {"sizeof": len}
    other = make(**options | more | {name: Two() if name == "mesh" else value})

    def resume() -> None:
        other.load_state_dict(saved.state_dict())
        next(iter(other))  # a stream compares the ranks when it begins

    with pytest.raises(ValueError, match=r"^state"):
        resume()


def test_other_ranks_resume_each_sample_once() -> None:
    whole = sampler().take(0, LENGTH).tolist()
    saved = sampler()
    list(islice(saved, 5))
    delivered = []
    for rank in range(5):
        resumed = sampler(num_replicas=5, rank=rank)
        resumed.load_state_dict(saved.state_dict())
        delivered.append(list(resumed))
    assert in_steps((index for step in zip(*delivered, strict=True) for index in step), 5) == in_steps(whole[5:], 5)


def test_equal_options_in_other_types_are_accepted() -> None:
    saved = sampler(weights={(0, 40): 1.0, (40, 60): Fraction(2)}, seed=np.int64(0), drop_last=np.False_)
    sampler().load_state_dict(saved.state_dict())


BEFORE_THE_GROUP = """
import os
from headrace.weighted_sampler import WeightedDistributedSampler
for rank in range(2):
    if os.fork() == 0:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
        sampler = WeightedDistributedSampler(range(100), {(0, 100): 1})
        print(len(sampler), *sampler, flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""


@pytest.mark.slow
def test_ranks_come_from_torchruns_environment_until_there_is_a_process_group() -> None:
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{BEFORE_THE_GROUP}"]
    done = subprocess.run(command, env={"PATH": ""}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answers = [[int(word) for word in line.split()] for line in done.stdout.splitlines()]
    assert [answer[0] for answer in answers] == [50, 50]
    assert sorted(answers[0][1:] + answers[1][1:]) == list(range(100))
