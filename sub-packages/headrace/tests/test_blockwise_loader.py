"""Batches that are planned block by block, in a `ResumableLoader`: epochs, kills, other ranks, and `headrace-runs`."""

from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.runs.cli import main
from headrace.size_aware_batching import BlockwiseSizeAwareBatchSampler
from headrace.webdatamodule import ResumableLoader

SHARDS = [np.random.default_rng(shard).integers(1, 60, 7 + shard % 5) for shard in range(40)]
N = sum(map(len, SHARDS))


def loader(world: int = 1, rank: int = 0, workers: int = 0) -> ResumableLoader:
    batches = BlockwiseSizeAwareBatchSampler(SHARDS, 200, block=90, num_replicas=world, rank=rank)
    return ResumableLoader(list(range(N)), batches, collate_fn=list, num_workers=workers)


def test_an_epoch_is_that_of_the_sampler_and_the_next_one_follows() -> None:
    own = BlockwiseSizeAwareBatchSampler(SHARDS, 200, block=90, num_replicas=2, rank=1)
    made = loader(2, 1)
    for epoch in range(3):
        own.set_epoch(epoch)
        assert list(made) == list(own)
        assert len(made) == len(own)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_loader_that_is_killed_anywhere_goes_on_on_other_ranks(workers: int) -> None:
    for stop in (0, 1, 5, 9, len(loader(3))):
        seen, states = Counter[int](), []
        for rank in range(3):
            made = loader(3, rank, workers)
            seen.update(index for batch in islice(made, stop) for index in batch)
            states.append(made.state_dict())
            made.close()
        assert states[0] == states[1] == states[2]
        for rank in range(2):
            resumed = loader(2, rank)
            resumed.load_state_dict(states[0])
            rest = list(resumed)
            assert len(rest) == len(resumed) - stop
            seen.update(index for batch in rest for index in batch)
            assert [index for batch in resumed for index in batch] != []
            assert resumed.epoch == 1
        assert seen == Counter(range(N))


@pytest.mark.slow
def test_steps_past_and_coming_are_known_to_the_loader() -> None:
    ranks = [loader(2, rank) for rank in range(2)]
    delivered = [list(zip(*[iter(one) for one in ranks], strict=True)) for _ in range(2)]
    steps = [list(step) for epoch in delivered for step in epoch]
    assert [ranks[0].step(number) for number in range(len(steps))] == steps
    assert [loader(2).step(number) for number in range(len(steps))] == steps
    assert ranks[1].replay(3) == steps[3][1]
    with pytest.raises(ValueError, match="cannot exclude samples"):
        ranks[0].exclude([3])


def test_steps_are_skipped_and_the_rest_is_exact() -> None:
    whole, one = loader(1), loader(1)
    everything = list(whole)
    batches = iter(one)
    first = next(batches)
    skipped = one.skip(2).tolist()
    rest = list(batches)
    assert [first, *rest] == [everything[0], *everything[3:]]
    assert sorted(skipped) == sorted(int(index) for batch in everything[1:3] for index in batch)


def test_the_command_says_that_blocks_are_asked_for_in_python(tmp_path: Path, capsys: Any) -> None:
    made = loader(2)
    next(iter(made))
    torch.save({"loader": made.state_dict()}, tmp_path / "last.pt")
    np.save(tmp_path / "sizes.npy", np.concatenate(SHARDS))
    code = main(["show", str(tmp_path / "last.pt"), "--step", "0", "--sizes", str(tmp_path / "sizes.npy")])
    assert code
    assert "planned its batches block by block" in capsys.readouterr().err
