"""Under FSDP2 all ranks raise where one fails, and split their batches together; on real ranks."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sharded_worker
import torch
from processes import SERVER, run_in

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="this torch has no FSDP2 on the CPU"),
]


def run(folder: Path, world: int, task: str, *arguments: Any, **options: Any) -> tuple[list[int | None], list[Any]]:
    """Run a task on each rank; return the exit codes, and what each returned or raised, None if it did not say."""
    outs = [folder / f"rank{rank}.json" for rank in range(world)]
    ranks = [
        SERVER.Process(
            target=sharded_worker.run, args=(task, arguments, options, rank, world, str(folder / "store"), str(out))
        )
        for rank, out in enumerate(outs)
    ]
    try:
        for process in ranks:
            process.start()
        until = time.monotonic() + 2 * sharded_worker.HANGS
        while time.monotonic() < until:
            if all(out.exists() or not process.is_alive() for process, out in zip(ranks, outs, strict=True)):
                break
            time.sleep(0.05)
        (folder / "leave").touch()
        for process in ranks:
            process.join(sharded_worker.HANGS)
        codes = [process.exitcode for process in ranks]
    finally:
        for process in ranks:
            if process.pid is not None:
                process.kill()
                process.join()
    for out in outs:
        print(Path(f"{out}.stderr").read_text())  # where pytest shows it, if the test fails
    return codes, [json.loads(out.read_text()) if out.exists() else None for out in outs]


@pytest.mark.parametrize(
    ("world", "kind", "where", "step", "phase"),
    [
        (2, "plain", "forward", 0, "in the forward of step 0, with 8 samples ([8, 8]; cost 8)"),
        (3, "nested", "forward", 2, "in the forward of step 2, with 10 samples ([10, 8]; cost 10)"),
        (3, "nested", "backward", 2, "in the backward of step 2, with 10 samples ([10, 8]; cost 10)"),
        (2, "inside", "backward", 0, "in the backward of step 0, with 8 samples ([8, 8]; cost 8)"),
        (4, "hsdp", "backward", 1, "in the backward of step 1, with 12 samples ([12, 8]; cost 12)"),
        (2, "plain", "optimizer", 0, "in the optimizer of step 0: the optimizer does not fit"),
        (3, "nested", "optimizer", 3, "in the optimizer of step 3: the optimizer may have stopped half-way"),
    ],
)
def test_all_ranks_raise_where_one_runs_out_of_memory(
    world: int, kind: str, where: str, step: int, phase: str, tmp_path: Path
) -> None:
    codes, found = run(tmp_path, world, "fails", kind, where, step)
    assert codes == [1] * world
    for name, text in found:
        assert name == "OutOfMemoryError"
        assert text.startswith(f"rank {world - 1} ran out of memory {phase}")
        assert "CUDA out of memory" in text
        assert "resume from /runs/last.ckpt with a smaller budget of the sampler" in text
        assert ("or with OOMGuard(budget=" in text) == (where != "optimizer")


def test_all_ranks_know_before_the_process_that_serves_the_store_ends(tmp_path: Path) -> None:
    codes, found = run(tmp_path, 3, "fails, and goes", "nested", "forward", 1, 0)
    assert codes == [1] * 3
    for name, text in found:
        assert name == "OutOfMemoryError"
        assert text.startswith("rank 0 ran out of memory in the forward of step 1, with 6 samples")


@pytest.mark.parametrize(
    ("world", "kind", "where", "step", "told"),
    [
        (
            2,
            "compiled",
            "error",
            2,
            "in the forward of step 2, with 8 samples ([8, 8]; cost 8): ValueError: the loss is",
        ),
        (3, "plain", "cost", 1, "in the split of step 1: ValueError: the loss is wrong"),
        (2, "nested", "between", 1, "after 1 step: ValueError: the data are wrong"),
    ],
)
def test_all_ranks_raise_where_one_has_another_error(
    world: int, kind: str, where: str, step: int, told: str, tmp_path: Path
) -> None:
    codes, found = run(tmp_path, world, "fails", kind, where, step)
    assert codes == [1] * world
    name, text = found.pop()
    assert (name, text) == ("ValueError", "the data are wrong" if where == "between" else "the loss is wrong")
    for name, text in found:
        assert name == "RuntimeError"
        assert text.startswith(f"rank {world - 1} failed {told}")
        assert text.endswith("resume from /runs/last.ckpt once it is cured")


def test_the_other_ranks_raise_where_the_process_of_one_is_killed(tmp_path: Path) -> None:
    codes, found = run(tmp_path, 3, "fails", "nested", "killed", 1, _TOLD=1.0)
    assert codes == [1, 1, -9]
    for name, text in found[:2]:
        assert name == "RuntimeError"
        assert "lost the process of another rank in the forward of step 1, with" in text
        assert "resume from /runs/last.ckpt" in text
    assert found[0] == found[1]


def test_a_rank_that_waits_where_no_error_can_be_raised_ends_with_a_message(tmp_path: Path) -> None:
    codes, found = run(tmp_path, 2, "fails", "plain", "functional", 1, _GRACE=0.5)
    assert codes == [1, 1]
    assert found[0] is None
    assert found[1][0] == "OutOfMemoryError"
    said = (tmp_path / "rank0.json.stderr").read_text()
    assert "rank 1 ran out of memory in the forward of step 1" in said
    assert "rank 0 waits for it where no error can be raised: its process ends." in said
    assert "wait_tensor" in said  # the stacks say where


def test_a_first_update_that_ran_out_of_memory_is_tried_again(tmp_path: Path) -> None:
    (tmp_path / "rescued").mkdir()
    (tmp_path / "plain").mkdir()
    codes, found = run(tmp_path / "rescued", 2, "fails", "nested", "optimizer once", 0)
    assert codes == [0, 0]
    assert (codes, found) == run(tmp_path / "plain", 2, "fails", "nested", "nowhere", 0)


@pytest.mark.parametrize(
    ("world", "kind", "reduction", "clip"),
    [
        (2, "plain", "mean", None),
        (3, "nested", "sum", 0.05),
        (2, "compiled", "scaled", None),
        (4, "hsdp", "mean", 0.05),
        (4, "tensor_parallel", "mean", 0.05),
    ],
)
def test_a_planned_split_equals_the_unsplit_step(
    world: int, kind: str, reduction: str, clip: float | None, tmp_path: Path
) -> None:
    codes, found = run(tmp_path, world, "planned", kind, reduction, clip)
    assert codes == [0] * world
    for each in found:
        assert each["error"] < 1e-12
        assert each["weights"] == found[0]["weights"]
        assert each["parts"] == found[0]["parts"]  # the last rank's, which has a budget
        assert min(each["parts"]) >= 4
        assert each["split"] == 3


def test_models_that_cannot_be_watched_and_ranks_that_differ_are_refused(tmp_path: Path) -> None:
    codes, found = run(tmp_path, 2, "refused")
    assert codes == [0, 0]
    for rank, (outside, some, differ) in enumerate(found):
        assert "every trained parameter must be sharded by fully_shard, got 0.weight outside it" in outside
        assert "the mesh of the model must hold all 2 ranks of the process group, got 1" in some
        assert "all ranks must give a step the same number of batches, got [1 2]" in differ
        assert differ.startswith(("all ranks", f"rank {1 - rank} failed"))


def test_the_callback_refuses_fsdp2(tmp_path: Path) -> None:
    told = run_in({}, sharded_worker.in_lightning, tmp_path)
    assert told.startswith("OOMRescue must train a model that is not sharded, got one of FSDP2")


def test_parts_without_a_target_leave_the_mean_as_it_is(tmp_path: Path) -> None:
    codes, (first, second) = run(tmp_path, 2, "masked")
    assert codes == [0, 0]
    for each in (first, second):
        assert each["error"] < 1e-12
        assert np.isfinite(each["loss"])
        assert each["weights"] == first["weights"]
