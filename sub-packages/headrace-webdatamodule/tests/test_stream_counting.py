"""Which stages can be counted."""

import random
from functools import partial
from typing import Any

import pytest
import webdataset as wds

from headrace.webdatamodule.streaming.counting import Batched, counted, description


@pytest.mark.parametrize(
    ("stages", "factor"),
    [
        ([], Batched()),
        ([wds.map(str), wds.map_tuple(str), wds.to_tuple("a"), wds.map_dict(a=str), wds.rename(a="b")], Batched()),
        ([wds.decode(), wds.batched(8)], Batched(8)),
        ([wds.map(str), wds.batched(8, partial=False), wds.map(len)], Batched(8, partial=False)),
        ([wds.batched(batchsize=1), wds.batched(4, collation_fn=None)], Batched(4)),
    ],
)
def test_stages_that_count(stages: list[Any], factor: Batched) -> None:
    assert counted(stages) == factor


@pytest.mark.parametrize(
    ("stages", "name"),
    [
        ([wds.shuffle(10), wds.batched(8)], "shuffle"),
        ([wds.select(bool)], "select"),
        ([wds.unbatched()], "unbatched"),
        ([wds.batched(2), wds.batched(2)], "batched"),
        ([wds.map(str, handler=wds.ignore_and_continue)], "map"),
        ([wds.map(random.Random(3))], "map"),
        ([iter], "iter"),
        ([wds.detshuffle(10)], "detshuffle"),
    ],
)
def test_stages_that_do_not(stages: list[Any], name: str) -> None:
    assert counted(stages) == name


def test_descriptions_tell_seeds_and_sizes_and_nothing_of_functions() -> None:
    def of(*stages: Any) -> str:
        return description(stages)

    assert of(wds.map(str), wds.batched(4, collation_fn=len)) == of(wds.map(len), wds.batched(4, collation_fn=str))
    assert of(wds.batched(4)) != of(wds.batched(5))
    assert of(wds.shuffle(4, seed=1)) != of(wds.shuffle(4, seed=2))
    assert of(wds.shuffle(4, rng=random.Random(1))) == of(wds.shuffle(4, rng=random.Random(1)))
    assert of(wds.shuffle(4, rng=random.Random(1))) != of(wds.shuffle(4, rng=random.Random(2)))


def test_descriptions_of_partial_functions() -> None:
    assert description([partial(sorted, key=len)]) != description([partial(sorted, key=len, reverse=True)])
    assert description([partial(sorted, key=len)]) == description([partial(sorted, key=str)])
