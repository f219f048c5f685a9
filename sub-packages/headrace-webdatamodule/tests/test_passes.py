import random
from typing import Any

import pytest
import webdataset as wds
from hypothesis import given
from hypothesis import strategies as st

from headrace.webdatamodule.passes import (
    CurrentPass,
    Pass,
    Reseeded,
    ShardSource,
    SplitByRank,
    rank_and_world,
    shard_order,
)


@given(st.integers(0, 200), st.integers(), st.integers(0, 9), st.integers(0, 3))
def test_an_order_is_a_permutation_and_repeats_itself(n: int, seed: int, epoch: int, lap: int) -> None:
    order = shard_order(n, seed, epoch, lap)
    assert sorted(order) == list(range(n))
    assert order == shard_order(n, seed, epoch, lap)


def test_seed_epoch_and_lap_all_tell() -> None:
    orders = {tuple(shard_order(20, *numbers)) for numbers in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]}
    assert len(orders) == 4


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 3))
def test_ranks_share_the_shards_whatever_the_epoch(n_shards: int, world: int, epoch: int) -> None:
    current = CurrentPass()
    urls = [str(i) for i in range(n_shards)]
    read: list[str] = []
    for rank in range(world):
        current.set(Pass(epoch, 0, rank, world))
        read += [item["url"] for item in SplitByRank(current)(ShardSource(urls, 3, current)())]
    assert sorted(read) == sorted(urls)


def test_without_a_seed_the_order_stays() -> None:
    source = ShardSource(["a", "b", "c"], None, CurrentPass())
    assert list(source()) == [{"url": "a"}, {"url": "b"}, {"url": "c"}]


STAGES: list[Any] = [
    wds.shuffle(50, rng=random.Random(3)),
    wds.shuffle(50, 50, random.Random(3)),
    wds.filters.detshuffle(50, seed=3),
]


@pytest.mark.parametrize("stage", STAGES)
def test_each_pass_shuffles_in_its_own_way_and_repeats_itself(stage: Any) -> None:
    current = CurrentPass()
    reseeded = Reseeded(stage, current)

    def order(*numbers: int) -> tuple[int, ...]:
        current.set(Pass(*numbers))
        return tuple(reseeded(iter(range(50))))

    passes = [(0, 0, 0, 1), (1, 0, 0, 1), (0, 1, 0, 1)]
    assert len({order(*numbers) for numbers in passes}) == 3
    assert [order(*numbers) for numbers in passes] == [order(*numbers) for numbers in passes]
    assert sorted(order(4, 0, 0, 1)) == list(range(50))


def test_ranks_shuffle_differently() -> None:
    current = CurrentPass()
    reseeded = Reseeded(STAGES[0], current)
    orders = []
    for rank in range(2):
        current.set(Pass(0, 0, rank, 2))
        orders.append(list(reseeded(iter(range(50)))))
    assert orders[0] != orders[1]


def test_other_composables_are_left_alone() -> None:
    assert list(Reseeded(lambda source: (2 * x for x in source), CurrentPass())(iter([1, 2]))) == [2, 4]


def test_ranks_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert rank_and_world() == (0, 1)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "5")
    assert rank_and_world() == (2, 5)
