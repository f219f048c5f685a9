"""Two real ranks under Lightning's DDP, one killed in the middle of an epoch; resumed on one rank and on two."""

import signal
from pathlib import Path
from typing import Any

import pytest
from runs import assert_none_left, counted, errors_of, exit_code, last_checkpoint, run, started, steps_of
from simulated import write_source

pytestmark = pytest.mark.slow

EVERY = 3  # steps from one checkpoint to the next


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("sources")
    shards = {"a": write_source(folder / "a", "a", 90, 3), "b": write_source(folder / "b", "b", 37, 2)}
    return {
        "shards": {name: str(path) for name, path in shards.items()},
        "weights": {"a": 0.5, "b": 2.0},
        "workers": 2,
        "strategy": "ddp",
        "checkpoints": "",
    }


@pytest.mark.timeout(900)
def test_one_rank_killed_then_resumed_on_one_and_on_two(tmp_path: Path, options: dict[str, Any]) -> None:
    whole = run(tmp_path / "whole", 2, **options)
    in_second_epoch = [step for epoch, step, _ in whole[0] if epoch == 1]
    die_at = in_second_epoch[len(in_second_epoch) // 2]
    options = options | {"every": EVERY, "checkpoints": str(tmp_path / "checkpoints")}

    killed = tmp_path / "killed"
    with started(killed, 2, {1: {"die_at": die_at}}, **options) as ranks:
        assert exit_code(ranks[1]) == -signal.SIGKILL
        # The other one finds the connection closed, and ends by itself.
        assert exit_code(ranks[0]) == 1
        assert "by peer" in errors_of(killed, 0), errors_of(killed, 0)
        assert_none_left(ranks)

    step, checkpoint = last_checkpoint(tmp_path / "checkpoints")
    assert die_at - EVERY <= step <= die_at
    assert in_second_epoch[0] < step < in_second_epoch[-1], "in the middle of an epoch"
    before = [[one for one in steps_of(killed, rank) if one[1] < step] for rank in range(2)]
    wanted = counted([one for rank in whole for one in rank])

    options = options | {"every": 0, "resume": checkpoint}
    for world in (1, 2):
        after = run(tmp_path / f"resumed-{world}", world, **options)
        assert counted([one for rank in (*before, *after) for one in rank]) == wanted
        if world == 2:
            assert [old + new for old, new in zip(before, after, strict=True)] == whole
