"""Where rank and number of ranks come from, and which positions each rank takes."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import rank_worker
from forked import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from laws import in_steps
from torch.utils.data import DataLoader

from headrace.weighted_sampler import InterleavedDataset, WeightedDistributedSampler


@pytest.mark.slow
@given(st.integers(1, 700), st.integers(0, 700), st.integers(1, 16), st.booleans())
def test_the_ranks_share_the_rest_of_an_epoch_in_turn(length: int, start: int, world: int, drop_last: bool) -> None:
    options: dict[str, Any] = {"epoch_length": length + world, "drop_last": drop_last, "seed": 1}
    ranks = [WeightedDistributedSampler(range(90), {(0, 90): 1}, world, rank, **options) for rank in range(world)]
    length, start = ranks[0].epoch_length, min(start, length)
    state = ranks[0].state_dict(position=start)
    for rank in ranks:
        rank.load_state_dict(state)
    steps = (length - start) // world if drop_last else -(-(length - start) // world)
    assert [rank.remaining for rank in ranks] == [steps] * world
    shares = [list(rank) for rank in ranks]
    assert [len(share) for share in shares] == [steps] * world
    whole = ranks[0].take(0, length).tolist()
    wanted = (whole[start:] + whole)[: steps * world]
    assert in_steps((index for step in zip(*shares, strict=True) for index in step), world) == in_steps(wanted, world)
    assert ranks[0].padded(start).tolist() == whole[: max(0, start + steps * world - length)]
    assert ranks[0].dropped(start).tolist() == whole[start + steps * world :]


def test_one_rank_when_nothing_is_known() -> None:
    options: list[dict[str, Any]] = [{}, {"num_replicas": 1}, {"rank": 0}]
    for ranks in options:
        sampler = WeightedDistributedSampler(range(10), {(0, 10): 1}, **ranks)
        assert (sampler.num_replicas, sampler.rank, len(list(sampler))) == (1, 0, 10)


def test_a_world_without_a_rank_is_refused_rather_than_read_twice() -> None:
    sampler = WeightedDistributedSampler(range(10), {(0, 10): 1}, num_replicas=2)
    with pytest.raises(ValueError, match="num_replicas=2 was given without rank, and neither"):
        next(iter(sampler))


def test_a_rank_without_a_world_is_refused() -> None:
    sampler = WeightedDistributedSampler(range(10), {(0, 10): 1}, rank=1)
    with pytest.raises(ValueError, match="rank=1 was given without num_replicas"):
        len(sampler)


class Mesh:
    """As much of a device mesh as is needed."""

    ndim = 1

    def __init__(self, size: int, rank: int) -> None:
        self.ranks = size, rank

    def size(self) -> int:
        return self.ranks[0]

    def get_local_rank(self) -> int:
        return self.ranks[1]


def test_a_mesh_stands_for_num_replicas_and_rank() -> None:
    ranks = [WeightedDistributedSampler(range(10), {(0, 10): 1}, mesh=Mesh(3, rank)) for rank in range(3)]
    plain = [WeightedDistributedSampler(range(10), {(0, 10): 1}, 3, rank) for rank in range(3)]
    assert [(sampler.num_replicas, sampler.rank) for sampler in ranks] == [(3, 0), (3, 1), (3, 2)]
    assert [list(sampler) for sampler in ranks] == [list(sampler) for sampler in plain]


def test_ranks_are_looked_up_when_the_epoch_begins() -> None:
    mesh = Mesh(1, 0)
    sampler = WeightedDistributedSampler(range(10), {(0, 10): 1}, mesh=mesh)
    indices = iter(sampler)
    mesh.ranks = 2, 1
    assert list(indices) == list(WeightedDistributedSampler(range(10), {(0, 10): 1}, 2, 1))
    assert len(sampler) == 5


@pytest.mark.parametrize("given", [{"num_replicas": 2}, {"rank": 0}, {"num_replicas": 2, "rank": 0}])
def test_a_mesh_beside_numbers_is_refused(given: dict[str, Any]) -> None:
    for make in (
        lambda: WeightedDistributedSampler(range(10), {(0, 10): 1}, mesh=Mesh(2, 0), **given),
        lambda: InterleavedDataset([[1]], [1], mesh=Mesh(2, 0), **given),
    ):
        with pytest.raises(ValueError, match=r"mesh and \w+=\d were both given: .*, so leave out"):
            make()


def test_what_is_not_a_mesh_is_refused() -> None:
    with pytest.raises(TypeError, match=r"mesh must be a 1-D DeviceMesh or have size\(\) .*, got int"):
        WeightedDistributedSampler(range(10), {(0, 10): 1}, mesh=4)  # type: ignore[arg-type]
    square = Mesh(2, 0)
    square.ndim = 2
    with pytest.raises(ValueError, match=r"mesh must have 1 dimension, .* got 2: .*mesh\[\"dp\"\]"):
        WeightedDistributedSampler(range(10), {(0, 10): 1}, mesh=square)
    with pytest.raises(ValueError, match=r"mesh.get_local_rank\(\) must be an int from 0 to 1, got 2"):
        len(WeightedDistributedSampler(range(10), {(0, 10): 1}, mesh=Mesh(2, 2)))


def test_interleaved_streams_take_ranks_and_meshes_too() -> None:
    def stream(**ranks: Any) -> list[int]:
        dataset = InterleavedDataset([[0] * 600, [1] * 600], [1, 1], **ranks)
        items = list(dataset)
        assert dataset.state_dict()["stream"]["num_replicas"] == 2
        return items

    assert stream(mesh=Mesh(2, 1)) == stream(num_replicas=2, rank=1) != stream(mesh=Mesh(2, 0))


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.nightly)])
def test_workers_of_a_mesh_know_their_rank(method: str) -> None:
    dataset = InterleavedDataset([[0] * 60, [1] * 60], [1, 1], mesh=Mesh(2, 1))
    loader: DataLoader[int] = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context=method)
    assert list(loader) == list(dataset)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_processes_deliver_the_epoch_together(tmp_path: Path, world: int) -> None:
    interface = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    run_ranks(rank_worker.main, tmp_path, interface, [(tmp_path, rank, world) for rank in range(world)])
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(world)]
    assert [rank["world"] for rank in ranks] == [[world, rank] for rank in range(world)]
    alone = WeightedDistributedSampler(range(90), {(0, 60): 1, (60, 90): 0.5}, seed=5)
    for epoch, run in enumerate(("whole", "next")):
        alone.set_epoch(epoch)
        whole = alone.take(0, 75).tolist() + alone.take(0, -75 % world).tolist()
        assert in_steps(together(ranks, run), world) == in_steps(whole, world)
    assert together(ranks, "data_parallel") == together(ranks, "next")
    assert all(rank["tensor_parallel"] == alone.take(0, 75).tolist() for rank in ranks)
    assert together(ranks, "resumed") == together(ranks, "whole")[3 * 4 * world :]


def together(ranks: list[dict[str, list[int]]], run: str) -> list[int]:
    return [index for step in zip(*(rank[run] for rank in ranks), strict=True) for index in step]
