"""Runs headrace-runs in this process, and makes runs whose steps are known."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from doors import sampler_with

from headrace.runs.cli import main
from headrace.webdatamodule import DistributedBatchSampler, ResumableLoader, write_shards

N = 200
SIZES = np.random.default_rng(0).integers(1, 60, N)
Steps = dict[int, list[list[int]]]


class Command:
    """Calls the command; `error` is what the latest call wrote to stderr."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys, self.error = capsys, ""

    def __call__(self, *words: object, code: int = 0) -> str:
        self._capsys.readouterr()
        try:
            ended = main([str(word) for word in words])
        except SystemExit as stopped:
            ended = int(stopped.code or 0)
        out, self.error = self._capsys.readouterr()
        assert ended == code, self.error
        assert code == 0 or (not out and self.error.count("\n") == 1), (out, self.error)
        return out

    def document(self, *words: object) -> dict[str, Any]:
        """What `show --json` prints."""
        found: dict[str, Any] = json.loads(self("show", *words, "--json"))
        return found

    def step(self, checkpoint: Path, number: int, *words: object) -> list[list[int]]:
        """The indices of a step, rank by rank."""
        found = self.document(checkpoint, "--step", number, *words)
        ranks: list[list[int]] = [[] for _ in range(found["world"])]
        for row in found["samples"]:
            assert row["step"] == number
            ranks[row["rank"]].append(row["index"])
        return ranks


def equal_batches(**options: Any) -> Any:
    return DistributedBatchSampler(N, 4, **options)


def batches_by_size(**options: Any) -> Any:
    return sampler_with(SIZES, **{"max_total_size": 150, **options})


def delivered(make: Any, dataset: Any, save_at: int, checkpoint: Path) -> Steps:
    """Trains two epochs and three steps: on 3 ranks, from step 5 on 2, without some samples from step 9 on.

    The state of the run before step `save_at` is saved. Each rank has a loader, as each process would.
    """
    steps: Steps = {}
    state: dict[str, Any] | None = None
    for world, until in ((3, 5), (2, 9), (2, 10**6)):
        ranks = [
            ResumableLoader(dataset, make(num_replicas=world, rank=rank), collate_fn=list, check_ranks=False)
            for rank in range(world)
        ]
        for loader in ranks:
            if state is not None:
                loader.load_state_dict(state)
            if until == 10**6:
                loader.exclude([3, 50, 77])
        for epoch in range(ranks[0].epoch, 3):
            for loader in ranks:
                loader.set_epoch(epoch)
            iterators = [iter(loader) for loader in ranks]
            while True:
                number = ranks[0].run_steps
                assert number is not None
                if number == until:
                    break
                if number == save_at and not checkpoint.exists():
                    torch.save({"loader": ranks[0].state_dict(), "model": {"weight": torch.ones(3)}}, checkpoint)
                if None in [next(one, None) for one in iterators]:
                    break
                steps[number] = [list(map(int, loader.indices)) for loader in ranks]
            state = ranks[0].state_dict()
            if number == until or epoch == 2:
                break
    return steps


def shards(folder: Path, names: tuple[str, ...] = ("train",)) -> list[Path]:
    """Folders of shards with N samples altogether."""
    each = N // len(names)
    for part, name in enumerate(names):
        numbers = range(part * each, (part + 1) * each)
        samples = [(f"{name}{one}", {"json": str(one).encode(), "seq.txt": b"A" * int(SIZES[one])}) for one in numbers]
        write_shards(samples, folder / name, n_shards=3)
    return [folder / name for name in names]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)
