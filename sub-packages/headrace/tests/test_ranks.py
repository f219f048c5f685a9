"""One rule of ranks in all packages: what was given, else the process group, else the environment, else one rank."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runs import run_script

from headrace.size_aware_batching import BucketedBatching, DistributedSizeAwareBatchSampler
from headrace.webdatamodule import DistributedBatchSampler, MapDataModule, ResumableLoader
from headrace.weighted_sampler import InterleavedDataset, WeightedDistributedSampler

SIZES = [1 + number % 7 for number in range(120)]
NUMBERS = list(range(120))


class Mesh:
    """As much of a device mesh as is needed."""

    def __init__(self, size: int, rank: int) -> None:
        self.ranks = size, rank

    def size(self) -> int:
        return self.ranks[0]

    def get_local_rank(self) -> int:
        return self.ranks[1]


def of_module(**ranks: Any) -> Any:
    module = MapDataModule({"train": NUMBERS}, batch_size=2, collate_fn=list, **ranks)
    module.setup("fit")
    return module.train_dataloader()


def of_stream(**ranks: Any) -> Any:
    """A stream does not share its sources, it says which of them to read: here each rank takes its own items."""
    dataset = InterleavedDataset([NUMBERS], [1], **ranks)
    stream = dataset.state_dict()["stream"]
    return [list(dataset)[stream["rank"] :: stream["num_replicas"]]]


# What each public class delivers to this rank: batches of samples.
MAKERS: dict[str, Callable[..., Any]] = {
    "DistributedSizeAwareBatchSampler": lambda **ranks: DistributedSizeAwareBatchSampler(SIZES, 20, **ranks),
    "WeightedDistributedSampler": lambda **ranks: [list(WeightedDistributedSampler(NUMBERS, {(0, 120): 1}, **ranks))],
    "InterleavedDataset": of_stream,
    "DistributedBatchSampler": lambda **ranks: DistributedBatchSampler(120, 5, **ranks),
    "ResumableLoader": lambda **ranks: ResumableLoader(
        NUMBERS,
        lambda world, rank: DistributedBatchSampler(120, 5, num_replicas=world, rank=rank),
        collate_fn=list,
        **ranks,
    ),
    "MapDataModule": of_module,
}
CASES: dict[str, tuple[dict[str, str], dict[str, Any], tuple[int, int]]] = {  # environment, arguments, (world, rank)
    "nothing is known": ({}, {}, (1, 0)),
    "the environment": ({"RANK": "1", "WORLD_SIZE": "3"}, {}, (3, 1)),
    "half of the environment": ({"WORLD_SIZE": "3"}, {}, (1, 0)),
    "both are given": ({"RANK": "1", "WORLD_SIZE": "3"}, {"num_replicas": 4, "rank": 2}, (4, 2)),
    "one replica has one rank": ({"RANK": "1", "WORLD_SIZE": "3"}, {"num_replicas": 1}, (1, 0)),
    "the number, and the rank of the environment": ({"RANK": "1", "WORLD_SIZE": "3"}, {"num_replicas": 3}, (3, 1)),
    "the rank, and the number of the environment": ({"RANK": "1", "WORLD_SIZE": "3"}, {"rank": 1}, (3, 1)),
    "a mesh": ({"RANK": "1", "WORLD_SIZE": "4"}, {"mesh": Mesh(2, 1)}, (2, 1)),
    "the first rank of nothing": ({}, {"rank": 0}, (1, 0)),
}
REFUSED: dict[str, tuple[dict[str, str], dict[str, Any], str]] = {
    "no rank": ({}, {"num_replicas": 2}, "num_replicas=2 was given without rank, .*: give rank as well"),
    "no number": ({}, {"rank": 1}, "rank=1 was given without num_replicas, .*: give num_replicas as well"),
    "another number": ({"RANK": "1", "WORLD_SIZE": "4"}, {"num_replicas": 2}, "without rank, but there are 4 ranks"),
    "another rank": ({"RANK": "1", "WORLD_SIZE": "4"}, {"rank": 2}, "but this is rank 1 of 4"),
    "no such rank": ({}, {"num_replicas": 2, "rank": 2}, "rank must be from 0 to 1 with num_replicas=2, got 2"),
    "no ranks": ({}, {"num_replicas": 0, "rank": 0}, "num_replicas must be an int >= 1, got 0"),
    "no number at all": ({}, {"num_replicas": 2.0, "rank": 0}, "num_replicas must be an int >= 1, got 2.0"),
    "two answers": ({}, {"mesh": Mesh(2, 1), "rank": 1}, "mesh and rank=1 were both given: .*leave out rank"),
    "no mesh": ({}, {"mesh": 4}, r"mesh must be a 1-D DeviceMesh or have size\(\) and get_local_rank\(\), got int"),
    "a word for a number": ({"RANK": "one", "WORLD_SIZE": "4"}, {}, "RANK and WORLD_SIZE .* got RANK='one'"),
    "a rank outside": ({"RANK": "4", "WORLD_SIZE": "4"}, {}, "RANK and WORLD_SIZE .* got RANK='4'"),
}


def surround(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("case", CASES)
def test_every_package_finds_the_same_ranks(maker: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment, given, (world, rank) = CASES[case]
    surround(monkeypatch, environment)
    found = [list(map(int, batch)) for batch in MAKERS[maker](**given)]
    assert found == [list(map(int, batch)) for batch in MAKERS[maker](num_replicas=world, rank=rank)]


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("case", REFUSED)
def test_every_package_refuses_the_same_ranks(maker: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment, given, message = REFUSED[case]
    surround(monkeypatch, environment)
    with pytest.raises((TypeError, ValueError), match=message):
        list(MAKERS[maker](**given))


def test_a_stage_of_a_stream_shares_batches_only_when_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    surround(monkeypatch, {"RANK": "1", "WORLD_SIZE": "2"})  # its stream is split by node already
    alone = list(BucketedBatching(len, 12, shuffle=False)(["to", "stream", "brook", "or"]))
    shared = list(BucketedBatching(len, 12, shuffle=False, num_replicas=2)(["to", "stream", "brook", "or"]))
    assert (alone, shared) == ([["to", "or"], ["stream", "brook"]], [["stream", "brook"]])


# A rank's script; the tests' folder is on the path of all processes.
RANK = """
import json, os
from pathlib import Path
import torch.distributed as dist
import test_ranks

def answer():
    return {name: [list(batch) for batch in make()] for name, make in test_ranks.MAKERS.items()}

before = answer()
dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=int(os.environ["RANK"]), world_size=2)
after = answer()
dist.destroy_process_group()
Path(os.environ["RANK"]).write_text(json.dumps([before, after]))
"""


@pytest.mark.slow
def test_ranks_are_the_same_before_and_in_the_process_group(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    done = run_script(script, [], tmp_path, [{"RANK": str(rank), "WORLD_SIZE": "2"} for rank in range(2)])
    assert [rank.returncode for rank in done] == [0, 0], "\n".join(rank.stderr for rank in done)
    answers = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    for name in MAKERS:
        for when in range(2):
            shares = [sorted(index for batch in answer[when][name] for index in batch) for answer in answers]
            assert sorted(shares[0] + shares[1]) == NUMBERS, name
            assert len(answers[0][when][name]) == len(answers[1][when][name])
