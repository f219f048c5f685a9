"""Trains in a process that kills itself half-way, resumes in another, and counts what was lost and what came twice.

python resuming.py {"folder": ..., "checkpoints": ..., "die_at": step, ...}
"""

import json
import logging
import os
import signal
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import torch
from data import data_module
from model import ByteTransformer
from torch import Tensor


@dataclass(frozen=True)
class Outcome:
    """What a run that was killed and resumed trained on, beside one that was not.

    Args:
        steps: Of the epoch.
        killed_at: The step at which the process was killed.
        resumed_from: The step of its last checkpoint.
        lost: Samples that were never trained on.
        repeated: Samples that were trained on more often than they should.
    """

    steps: int
    killed_at: int
    resumed_from: int
    lost: int
    repeated: int

    def __str__(self) -> str:
        """Return it in a few lines."""
        return (
            f"killed (SIGKILL) at step {self.killed_at} of {self.steps}, resumed from the checkpoint of step "
            f"{self.resumed_from}\nsamples lost: {self.lost}\nsamples repeated: {self.repeated}"
        )


def killed_and_resumed(expected: Iterable[str], steps: int, folder: Path, job: Mapping[str, Any]) -> Outcome:
    """Train the epoch in two processes, of which the first is killed in the middle.

    Args:
        expected: Keys of the samples that an uninterrupted epoch trains on, as often as it does.
        steps: Of that epoch.
        folder: For checkpoints and records; emptied.
        job: Arguments of ``data_module``, and "max_length".

    Raises:
        RuntimeError: A process ended otherwise than it should.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    every = max(1, steps // 10)
    killed_at = max(1, steps // 2)
    killed_at += every > 1 and killed_at % every == 0  # between two checkpoints
    for die_at, status in ((killed_at, -signal.SIGKILL), (-1, 0)):
        words = json.dumps({**job, "records": str(folder), "die_at": die_at, "every": every})
        done = subprocess.run([sys.executable, __file__, words], check=False)  # noqa: S603 - this very file
        if done.returncode != status:
            raise RuntimeError(f"the training ended with status {done.returncode}, not with {status}")
    # What came after the last checkpoint of the first process is undone by the second, and trained on again there.
    checkpoint = killed_at // every * every
    first, second = (json_lines(folder / name) for name in ("0.jsonl", f"{checkpoint}.jsonl"))
    trained = Counter(key for keys in first[:checkpoint] + second for key in keys)
    wanted = Counter(expected)
    return Outcome(steps, killed_at, checkpoint, (wanted - trained).total(), (trained - wanted).total())


def json_lines(path: Path) -> list[list[str]]:
    """Return the keys of each step that a process trained."""
    return [json.loads(line) for line in path.read_text().splitlines()]


class Recorded(ByteTransformer):
    """Writes down the keys of each step, and ends its process at one of them without a farewell."""

    def __init__(self, max_length: int, records: Path, begin: int, die_at: int) -> None:
        super().__init__(max_length)
        self.file = (records / f"{begin}.jsonl").open("w", buffering=1)
        self.die_at = die_at

    def training_step(self, batch: Mapping[str, Any]) -> Tensor:
        """Train on a batch, write down its keys; or die."""
        if self.global_step == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = super().training_step(batch)
        self.file.write(json.dumps(batch["keys"]) + "\n")
        return loss


def main(job: dict[str, Any]) -> None:
    """Train, from the last checkpoint if there is one."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    records = Path(job["records"])
    saved = sorted(records.glob("*.ckpt"), key=lambda path: int(path.stem))
    begin = int(saved[-1].stem) if saved else 0
    model = Recorded(job["max_length"], records, begin, job["die_at"])
    keeper = lightning.pytorch.callbacks.ModelCheckpoint(
        records, "{step}", every_n_train_steps=job["every"], save_top_k=-1, auto_insert_metric_name=False
    )
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="auto", devices=1, logger=False, callbacks=[keeper], enable_model_summary=False,
        enable_progress_bar=False,
    )  # fmt: skip
    folders = {name: Path(folder) for name, folder in job["folders"].items()}
    module = data_module(folders, job["tokens"], job["budget"], job["max_length"])
    trainer.fit(model, datamodule=module, ckpt_path=saved[-1] if saved else None)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
