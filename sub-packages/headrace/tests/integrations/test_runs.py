"""`headrace-runs` with the checkpoints of accelerate and of the Hugging Face Trainer."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs_command import SIZES, Command, N, batches_by_size, equal_batches
from runs_command import command as command
from torch.utils.data import DataLoader

from headrace.size_aware_batching.integrations import SizeAwareTrainerMixin
from headrace.webdatamodule import ResumableLoader

# torchdata 0.11 calls it in the constructor of its loader
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
SAMPLES: Any = list(range(N))
MAKERS = [equal_batches, batches_by_size]


@pytest.fixture
def words(tmp_path: Path) -> list[object]:
    np.save(tmp_path / "lengths.npy", SIZES)
    return ["--sizes", tmp_path / "lengths.npy"]


@pytest.mark.parametrize("make", MAKERS)
def test_a_loader_that_is_registered_with_accelerate(
    tmp_path: Path, command: Command, make: Any, words: list[object]
) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    loader = ResumableLoader(list(range(N)), make(), collate_fn=list)
    accelerator.register_for_checkpointing(loader)
    seen = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        for batch in loader:
            seen.append(batch)
            if len(seen) == 7:
                accelerator.save_state(str(tmp_path / "state"))
    assert model is not None
    for number in (0, 6, 7, 20, len(seen) - 1):
        assert command.step(tmp_path / "state", number, *words) == [seen[number]]
    assert command.document(tmp_path / "state")["state"] == "custom_checkpoint_0.pkl"
    accelerator.free_memory()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stateful_loader_that_accelerate_prepared(
    tmp_path: Path, command: Command, num_workers: int, words: list[object]
) -> None:
    accelerate = pytest.importorskip("accelerate")
    pytest.importorskip("torchdata")
    configuration = accelerate.DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=configuration)
    batches = batches_by_size(rank="all")
    loader = accelerator.prepare(DataLoader(SAMPLES, batch_sampler=batches, collate_fn=list, num_workers=num_workers))
    seen = []
    for batch in loader:
        seen.append(batch)
        if len(seen) == 5:
            accelerator.save_state(str(tmp_path / "state"))
    for number in (0, 4, 5, 6, len(seen) - 1):
        assert command.step(tmp_path / "state", number, *words) == [seen[number]]
    accelerator.free_memory()


class Noting(torch.nn.Module):
    """Notes what it is trained on."""

    def __init__(self, seen: list[list[int]]) -> None:
        super().__init__()
        self.weight, self.seen = torch.nn.Parameter(torch.ones(1)), seen

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen.append(ids.tolist())
        return {"loss": (self.weight * ids.float().mean()).sum() * 1e-6}


def collate(samples: list[int]) -> dict[str, torch.Tensor]:
    return {"ids": torch.tensor(samples)}


@pytest.mark.parametrize("stop", ["in an epoch", "at its end"])
def test_checkpoints_of_a_trainer_by_size(tmp_path: Path, command: Command, words: list[object], stop: str) -> None:
    """Also behind a resume, whose record goes on."""
    transformers = pytest.importorskip("transformers")
    seen: list[list[int]] = []

    class MyTrainer(SizeAwareTrainerMixin, transformers.Trainer):  # type: ignore[misc, name-defined]
        def sizes_of(self, dataset: Any) -> Any:
            return SIZES

    def trainer_of(steps: int) -> Any:
        arguments = transformers.TrainingArguments(
            str(tmp_path / "out"), save_steps=first, max_steps=steps, report_to=[],
            disable_tqdm=True, use_cpu=True, logging_strategy="no",
        )  # fmt: skip
        return MyTrainer(
            Noting(seen), arguments, train_dataset=list(range(N)), data_collator=collate, max_tokens_per_batch=150,
            sampler_options={"cost": "sum"},
        )  # fmt: skip

    first = 1
    length = len(trainer_of(1).train_batches)
    first = length + 5 if stop == "in an epoch" else length
    trainer_of(first).train()
    trainer_of(2 * first).train(str(tmp_path / "out" / f"checkpoint-{first}"))
    assert len(seen) == 2 * first
    for saved in (first, 2 * first):
        path = tmp_path / "out" / f"checkpoint-{saved}"
        assert command.document(path)["step"] == saved
        for number in (0, length - 1, length, first - 1, first, 2 * first - 1):
            assert command.step(path, number, *words) == [seen[number]], (saved, number)


def test_another_trainer_has_no_state(tmp_path: Path, command: Command) -> None:
    path = tmp_path / "checkpoint-5"
    path.mkdir()
    (path / "trainer_state.json").write_text('{"stateful_callbacks": {}, "global_step": 5}')
    command("show", path, code=2)
    assert "SizeAwareTrainerMixin" in command.error
