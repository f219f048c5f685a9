"""Where rank and number of ranks come from, and which positions each rank takes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.weighted_sampler import WeightedDistributedSampler
from headrace.weighted_sampler._ranks import Ranks, process_group, rank_positions, sharded_end

LENGTHS = st.integers(0, 300)
WORLDS = st.integers(1, 16)


@given(LENGTHS, st.integers(0, 320), WORLDS, st.booleans())
def test_the_end_is_the_nearest_full_step(length: int, start: int, world: int, drop_last: bool) -> None:
    end = sharded_end(length, start, world, drop_last)
    assert (end - start) % world == 0
    if start >= length:
        assert end == start
    elif drop_last:
        assert length - world < end <= length
    else:
        assert length <= end < length + world


@given(st.integers(0, 50), st.integers(0, 300), WORLDS, st.integers(1, 7))
def test_the_ranks_share_the_positions_in_turn(start: int, steps: int, world: int, block: int) -> None:
    end = start + steps * world
    shares = []
    for rank in range(world):
        blocks = list(rank_positions(start, end, world, rank, block))
        assert all(1 <= len(part) <= block for part in blocks)
        shares.append(np.concatenate([np.empty(0, np.int64), *blocks]))
    assert [len(share) for share in shares] == [steps] * world
    assert np.array_equal(np.stack(shares, axis=1).ravel(), np.arange(start, end))


def test_one_rank_when_nothing_is_known() -> None:
    assert process_group() is None
    assert Ranks().resolve() == (1, 0)
    assert Ranks(1).resolve() == (1, 0)


def test_a_world_without_a_rank_is_refused_rather_than_read_twice() -> None:
    sampler = WeightedDistributedSampler(range(10), {(0, 10): 1}, num_replicas=2)
    with pytest.raises(ValueError, match="num_replicas=2 was given without rank, and torch"):
        next(iter(sampler))


def test_a_rank_without_a_world_is_refused() -> None:
    sampler = WeightedDistributedSampler(range(10), {(0, 10): 1}, rank=1)
    with pytest.raises(ValueError, match="rank=1 was given without num_replicas"):
        len(sampler)


@pytest.mark.parametrize("world", [2, 3])
def test_processes_deliver_the_epoch_together(tmp_path: Path, world: int) -> None:
    interface = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    worker = str(Path(__file__).with_name("rank_worker.py"))
    processes = [
        subprocess.Popen(
            [sys.executable, worker, str(tmp_path), str(rank), str(world)],
            env={**os.environ, **interface, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        errors = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()  # does nothing to those that have ended
    assert [process.returncode for process in processes] == [0] * world, errors

    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(world)]
    assert [rank["world"] for rank in ranks] == [[world, rank] for rank in range(world)]
    alone = WeightedDistributedSampler(range(90), {(0, 60): 1, (60, 90): 0.5}, seed=5)
    for epoch, run in enumerate(("whole", "next")):
        alone.set_epoch(epoch)
        assert together(ranks, run) == alone.take(0, 75).tolist() + alone.take(0, -75 % world).tolist()
    assert together(ranks, "resumed") == together(ranks, "whole")[3 * 4 * world :]


def together(ranks: list[dict[str, list[int]]], run: str) -> list[int]:
    return [index for step in zip(*(rank[run] for rank in ranks), strict=True) for index in step]
