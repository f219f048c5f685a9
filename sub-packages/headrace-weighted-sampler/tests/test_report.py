"""The report counts what is really delivered."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.weighted_sampler import WeightedDistributedSampler

WEIGHTS = {(0, 100): 0.255, (100, 110): 2}


def samplers(world: int, drop_last: bool, epoch: int = 0) -> list[WeightedDistributedSampler]:
    made = [WeightedDistributedSampler(range(120), WEIGHTS, world, rank, drop_last=drop_last) for rank in range(world)]
    for sampler in made:
        sampler.set_epoch(epoch)
    return made


@given(st.integers(1, 16), st.booleans(), st.integers(0, 9))
def test_delivered_is_what_the_ranks_yield(world: int, drop_last: bool, epoch: int) -> None:
    ranks = samplers(world, drop_last, epoch)
    report = ranks[0].report()
    yielded = Counter(index >= 100 for sampler in ranks for index in sampler)
    assert [line.delivered for line in report.ranges] == [yielded[False], yielded[True]]
    assert [(line.asked, line.draws) for line in report.ranges] == [(Fraction("25.5"), 26), (20, 20)]
    assert sum(yielded.values()) == 46 + len(report.padded) - len(report.dropped)
    assert (report.epoch, report.num_replicas, report.not_drawn) == (epoch, world, 10)


@pytest.mark.parametrize(("drop_last", "extra"), [(False, "2 padded, 0 dropped"), (True, "0 padded, 1 dropped")])
def test_the_table_shows_the_numbers(drop_last: bool, extra: str) -> None:
    sampler = samplers(3, drop_last)[0]
    lines = str(sampler.report()).splitlines()
    assert lines[0] == f"epoch 0: {48 if not drop_last else 45} samples over 3 ranks, {extra}"
    assert lines[1].split() == ["range", "size", "ratio", "asked", "draws", "delivered", "share"]
    assert lines[2].split()[:5] == ["0-100", "100", "0.255", "25.5", "26"]
    assert lines[-1] == "not drawn: 10 samples in no range or of ratio 0"
    assert len({len(line) for line in lines[1:-1]}) == 1
