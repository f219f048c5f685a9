"""The mixture and the batches together under a real Lightning Trainer, on two real processes."""

import json
from collections import Counter
from pathlib import Path

import ddp_worker
import pytest
from meeting import Meeting
from runs import counted, errors_of, exit_code, processes, run
from simulated import write_source

pytestmark = pytest.mark.slow

WORLD, EPOCHS = 2, 6


def test_two_ranks_train_on_the_exact_mixture_in_equal_steps(tmp_path: Path) -> None:
    meeting, outs = Meeting(WORLD), [tmp_path / f"rank{rank}.json" for rank in range(WORLD)]
    with processes(
        ddp_worker.main, tmp_path, [(rank, meeting.environment, str(out)) for rank, out in enumerate(outs)]
    ) as ranks:
        assert [exit_code(process) for process in ranks] == [0] * WORLD, errors_of(tmp_path, 0)
    seen = [json.loads(out.read_text()) for out in outs]
    epochs = [Counter(i for rank in seen for batch in rank[epoch] for i in batch) for epoch in range(EPOCHS)]
    for epoch, drawn in enumerate(epochs):
        assert len({len(rank[epoch]) for rank in seen}) == 1
        # Half of the first 300, each once; all of the last 100, each twice.
        assert sum(count for index, count in drawn.items() if index < 300) == 150
        assert all(drawn[index] == 2 for index in range(300, 400))
    # Lightning set the epoch: the second one draws what the first did not.
    for first, second in zip(epochs[::2], epochs[1::2], strict=True):
        assert sorted(i for drawn in (first, second) for i in drawn if i < 300) == list(range(300))
    assert seen[0][0] != seen[0][1]
    # The numbers of batches differ, and nothing was left out nevertheless.
    assert len({len(batches) for batches in seen[0]}) > 1


def test_the_data_module_lets_epochs_of_different_lengths_come_whole(tmp_path: Path) -> None:
    shards = {"a": write_source(tmp_path / "a", "a", 300, 3), "b": write_source(tmp_path / "b", "b", 100, 2)}
    told = {name: str(path) for name, path in shards.items()}
    weights = {"a": 0.5, "b": 2.0}
    options = {"shards": told, "weights": weights, "budget": 80, "epochs": EPOCHS, "checkpoints": ""}
    ranks = run(tmp_path / "run", WORLD, strategy="ddp", workers=1, **options)
    lengths = [Counter(epoch for epoch, _, _ in steps) for steps in ranks]
    assert lengths[0] == lengths[1]
    assert len(set(lengths[0].values())) > 1
    epochs = counted([step for steps in ranks for step in steps])
    assert list(epochs) == list(range(EPOCHS))
    for drawn in epochs.values():
        assert sum(count for key, count in drawn.items() if key.startswith("a")) == 150
        assert all(drawn[f"b{number}"] == 2 for number in range(100))
    for epoch in range(0, EPOCHS, 2):
        both = epochs[epoch] + epochs[epoch + 1]
        assert all(both[f"a{number}"] == 1 for number in range(300))
