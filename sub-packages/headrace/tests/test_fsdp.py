"""Sharded models: FSDP on GPUs, and FSDP2 (Lightning's `ModelParallelStrategy`) on two real gloo processes too."""

from pathlib import Path
from typing import Any

import pytest
import torch
from runs import counted, run
from simulated import write_source

pytestmark = pytest.mark.slow

EVERY = 4


def check_resume(folder: Path, world: int, again: int, strategy: str, accelerator: str) -> None:
    """A checkpoint in the middle of an epoch goes on where it was saved."""
    shards = {"a": write_source(folder / "a", "a", 60, 3), "b": write_source(folder / "b", "b", 20, 2)}
    options: dict[str, Any] = {
        "shards": {name: str(path) for name, path in shards.items()},
        "weights": {"a": 0.5, "b": 1.5},
        "epochs": 2,
        "workers": 1,
        "strategy": strategy,
        "accelerator": accelerator,
        "checkpoints": str(folder / "checkpoints"),
    }
    whole = run(folder / "whole", world, every=EVERY, **options)
    steps = sorted(int(path.stem.removeprefix("step=")) for path in (folder / "checkpoints").glob("step=*.ckpt"))
    second_epoch = next(step for epoch, step, _ in whole[0] if epoch == 1)
    step = next(step for step in steps if step > second_epoch)
    assert step < len(whole[0]), "in the middle of an epoch"
    checkpoint = str(folder / "checkpoints" / f"step={step}.ckpt")
    after = run(folder / "resumed", again, resume=checkpoint, **options)
    before = [steps[:step] for steps in whole]
    assert counted([one for rank in (*before, *after) for one in rank]) == counted(
        [one for rank in whole for one in rank]
    )
    if world == again:
        assert [old + new for old, new in zip(before, after, strict=True)] == whole


@pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="this torch has no FSDP2 on the CPU")
def test_fsdp2_on_two_processes(tmp_path: Path) -> None:
    check_resume(tmp_path, 2, 2, "fsdp2", "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("strategy", "devices"),
    [("fsdp", 2), ("fsdp2", 1)],  # on one device FSDP does not shard, and Lightning cannot load what it saved there
)
def test_on_gpus(strategy: str, devices: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < devices:
        pytest.skip(f"needs {devices} CUDA devices")
    world = min(2, torch.cuda.device_count())
    check_resume(tmp_path, world, world, strategy, "gpu")
