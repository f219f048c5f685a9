"""Under FSDP2 all ranks split their batches together; where one runs out of memory, torchrun ends all of them."""

import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sharded_lightning_worker
import sharded_worker
import torch
from processes import run_in, run_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="this torch has no FSDP2 on the CPU"),
]


def run(task: Any, *arguments: Any, world: int, folder: Path) -> list[Any]:
    return run_ranks(partial(sharded_worker.in_group, task, arguments), world, folder)


@pytest.mark.parametrize(
    ("world", "kind", "where", "step", "phase"),
    [
        (2, "nested", "forward", 0, "in the forward of step 0, with 8 samples ([8, 8]; cost 64)"),
        (2, "plain", "backward", 1, "in the backward of step 1, with 8 samples ([8, 8]; cost 64)"),
        (2, "inside", "optimizer", 1, "in the optimizer of step 1: "),
        pytest.param(
            *(3, "nested", "forward", 2, "in the forward of step 2, with 10 samples ([10, 8]; cost 80)"),
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            *(2, "compiled", "backward", 1, "in the backward of step 1, with 8 samples ([8, 8]; cost 64)"),
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            *(4, "hsdp", "backward", 0, "in the backward of step 0, with 12 samples ([12, 8]; cost 96)"),
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_torchrun_ends_all_ranks_where_one_runs_out_of_memory(
    world: int, kind: str, where: str, step: int, phase: str, tmp_path: Path
) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    done = subprocess.run(
        [*launch, sharded_worker.__file__, str(tmp_path), kind, where, str(step)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    ended = time.time()
    print(done.stderr)  # where pytest shows it, if the test fails
    assert done.returncode == 1
    assert f"OutOfMemoryError: rank {world - 1} ran out of memory {phase}" in done.stderr
    assert "CUDA out of memory. The other ranks wait for this one" in done.stderr
    assert "resume from the last checkpoint" in done.stderr
    assert ("or with OOMGuard(budget=" in done.stderr) == (where != "optimizer")
    assert ended - (tmp_path / "failed").stat().st_mtime < 25  # after 30 seconds torchrun would kill what it cannot end
    for process in (int(path.read_text()) for path in tmp_path.glob("*.pid")):
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


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
    found = run(sharded_worker.planned, kind, reduction, clip, world=world, folder=tmp_path)
    for each in found:
        assert each["error"] < 1e-12
        assert each["weights"] == found[0]["weights"]
        assert each["parts"] == found[0]["parts"]  # the last rank's, which has a budget
        assert min(each["parts"]) >= 4
        assert each["split"] == 3


def test_an_error_names_the_rank_also_where_nothing_is_known_of_the_part_or_nothing_has_run(tmp_path: Path) -> None:
    found = run(sharded_worker.messages, world=2, folder=tmp_path)
    for rank, messages in enumerate(found):
        told = f"OutOfMemoryError: rank {rank} ran out of memory in the"
        for name in ("length", "cost", "sizes_of"):
            assert messages[name].startswith(f"{told} forward of step 0"), messages[name]
            assert "ValueError: the size is unknown" in messages[name]
        for name in ("count", "budget") if rank else ("count", "budget", "parts"):
            assert messages[name].startswith(f"{told} split of step 0: CUDA out of memory. The other"), messages[name]
        for message in messages.values():
            assert "from the last checkpoint with a smaller budget of the sampler" in message
    assert "with 6 samples (" in found[0]["sizes_of"]
    assert "cost 48): CUDA out of memory" in found[0]["sizes_of"]
    assert "parts" not in found[1]


def test_models_that_not_all_ranks_train_and_ranks_that_differ_are_refused(tmp_path: Path) -> None:
    for outside, some, differ in run(sharded_worker.refused, world=2, folder=tmp_path):
        assert "every trained parameter must be sharded by fully_shard, got 0.weight outside it" in outside
        assert "the mesh of the model must hold all 2 ranks of the process group, got 1" in some
        assert differ == "all ranks must give a step the same number of batches, got [1, 2]"


def test_the_callback_refuses_fsdp2(tmp_path: Path) -> None:
    message = run_in({}, sharded_lightning_worker.in_lightning, tmp_path)
    assert message.startswith("OOMRescue must train a model that is not sharded, got one of FSDP2")


def test_parts_without_a_target_leave_the_mean_as_it_is(tmp_path: Path) -> None:
    first, second = run(sharded_worker.masked, world=2, folder=tmp_path)
    for each in (first, second):
        assert each["error"] < 1e-12
        assert np.isfinite(each["loss"])
        assert each["weights"] == first["weights"]
