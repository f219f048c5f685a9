"""`headrace-runs` with the checkpoints of trainers, with hostile ones, and with hostile samples."""

import io
import json
import os
import pickle
import shlex
import tarfile
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from pages import DOCS, block
from runs_command import SIZES, Command, batches_by_size, equal_batches, shards
from runs_command import command as command
from torch.distributed.checkpoint import state_dict_saver

from headrace.webdatamodule import (
    DistributedBatchSampler,
    IndexedShards,
    IndexedWebDataModule,
    ResumableLoader,
    index_shards,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
]


class Model(lightning.LightningModule):
    """Notes what it is trained on."""

    def __init__(self, width: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(width, 1)
        self.seen: list[list[str]] = []

    def training_step(self, batch: list[dict[str, Any]]) -> torch.Tensor:
        self.seen.append([sample["__key__"] for sample in batch])
        loss: torch.Tensor = self.layer(torch.ones(1, 1)).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


def fit(data: IndexedWebDataModule, steps: int, folder: Path) -> list[list[str]]:
    """Trains, and keeps a checkpoint every 30 steps; returns the keys of each step."""
    keeper = ModelCheckpoint(folder, every_n_train_steps=30, save_top_k=-1, filename="{step}")
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_steps=steps, logger=False, callbacks=[keeper], enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    model = Model()
    trainer.fit(model, datamodule=data)
    return model.seen


def test_a_checkpoint_of_lightning_tells_what_the_fit_did_and_will_do(tmp_path: Path, command: Command) -> None:
    [place] = shards(tmp_path)
    data = IndexedWebDataModule({"train": place}, batch_size=4, collate_fn=list, seed=2)
    seen, path = fit(data, 75, tmp_path / "kept"), tmp_path / "kept" / "step=60.ckpt"
    assert len(seen) == 75
    for number in (0, 30, 59, 60, 74):
        found = command.document(path, "--step", number, "--data", place)
        assert [row["key"] for row in found["samples"]] == seen[number]
        assert found["past"] == (number < 60)
        assert found["state"] == "IndexedWebDataModule/train"


@pytest.mark.skipif(not DOCS.is_dir(), reason="the pages lie in the repository")
def test_the_page_shows_the_command_as_it_is_used(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    [place] = shards(tmp_path)
    seen = fit(IndexedWebDataModule({"train": place}, batch_size=4, collate_fn=list), 60, tmp_path / "kept")
    (tmp_path / "kept" / "step=60.ckpt").rename(tmp_path / "last.ckpt")
    np.save(tmp_path / "lengths.npy", SIZES)
    (tmp_path / "checkpoint-20").mkdir()
    batches = batches_by_size(num_replicas=2, rank=0)
    next(iter(batches))
    callbacks = {"headrace": {"fingerprint": batches.fingerprint, "sampler": batches.state_dict()}}
    (tmp_path / "checkpoint-20" / "trainer_state.json").write_text(json.dumps({"stateful_callbacks": callbacks}))
    monkeypatch.chdir(tmp_path)
    lines = [shlex.split(line, comments=True) for line in block("how-to/spikes.md", "runs").splitlines()]
    assert all(words[0] == "headrace-runs" for words in lines)
    summary, step, with_sizes, exported, by_size = [command(*words[1:]) for words in lines]
    assert "next step 60" in summary
    assert [line.split()[2] for line in step.splitlines()[2:]] == seen[41]
    assert with_sizes == step  # this run has batches of a fixed count
    assert "wrote 8 files and samples.json into step41" in exported
    assert len(list(Path("step41").iterdir())) == 9
    assert f"rank 1: {' '.join(map(str, batches.step(1234)[1]))}" in by_size


def test_a_folder_of_torch_distributed_checkpoint_is_refused_with_the_cure(tmp_path: Path, command: Command) -> None:
    state_dict_saver.save({"loader": equal_batches()}, checkpoint_id=tmp_path / "step3", no_dist=True)
    command("show", tmp_path / "step3", code=2)
    assert "load it in Python" in command.error


class Attack:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("kind", ["zip", "legacy", "pickle", "folder"])
def test_a_checkpoint_that_would_run_code_is_refused_and_nothing_runs(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # as some set it for others' checkpoints
    touched, path = tmp_path / "touched", tmp_path / "hostile"
    states = {"loader": equal_batches().state_dict(), "more": Attack(touched)}
    if kind in ("zip", "legacy"):
        torch.save(states, path, _use_new_zipfile_serialization=kind == "zip")
    elif kind == "pickle":
        path.write_bytes(pickle.dumps(states))
    else:
        path.mkdir()
        torch.save(states, path / "custom_checkpoint_0.pkl")
    command("show", path, code=1)
    assert not touched.exists()
    assert "system" in command.error or kind == "pickle"
    assert kind == "pickle" or "save the loader's state alone" in command.error


def test_a_checkpoint_with_other_objects_is_refused_by_their_name(tmp_path: Path, command: Command) -> None:
    torch.save({"loader": equal_batches().state_dict(), "home": Path("/")}, tmp_path / "x.pt")
    command("show", tmp_path / "x.pt", code=1)
    assert "pathlib" in command.error
    assert "torch.save(state, 'state.pt')" in command.error


HOSTILE = ["../../escaped", "/tmp/absolute", "a/../../b", "new\nline", "k" * 90, "ü" * 40, "con", "~", "%2e%2e"]


def test_an_export_stays_in_its_folder_whatever_the_keys_are(tmp_path: Path, command: Command) -> None:
    place = tmp_path / "shards"
    place.mkdir()
    with tarfile.open(place / "a.tar", "w") as tar:
        for number, key in enumerate(HOSTILE):
            for member, data in (("json", b"%d" % number), ("se g.txt", b"text")):
                info = tarfile.TarInfo(f"{key}.{member}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    index_shards(place)
    shards_ = IndexedShards(place, decode=None)
    loader = ResumableLoader(shards_, DistributedBatchSampler(len(shards_), 100), collate_fn=list)
    torch.save(loader.state_dict(), tmp_path / "state.pt")
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    words = [tmp_path / "state.pt", "--step", 0, "--num-replicas", 1, "--data", place]
    found = command.document(*words, "--export", tmp_path / "out" / "step0")
    assert found["exported"]["files"] == 2 * len(HOSTILE)
    files = {path for path in tmp_path.rglob("*") if path.is_file()} - before
    assert {path.parent for path in files} == {tmp_path / "out" / "step0"}
    assert len(files) == 2 * len(HOSTILE) + 1
    rows = json.loads((tmp_path / "out" / "step0" / "samples.json").read_text())
    for row in rows:
        sample = shards_[row["index"]]
        assert sample["__key__"] == row["key"]
        for member, name in row["files"].items():
            assert (tmp_path / "out" / "step0" / name).read_bytes() == sample[member]
    command("show", *words, "--export", tmp_path / "out" / "step0", code=2)
    assert "must be empty" in command.error
    assert "\n" not in command("show", *words).splitlines()[3]


def test_an_export_of_a_damaged_shard_is_an_error(tmp_path: Path, command: Command) -> None:
    [place] = shards(tmp_path)
    loader = ResumableLoader(IndexedShards(place), equal_batches(num_replicas=1, rank=0), collate_fn=list)
    next(iter(loader))
    torch.save(loader.state_dict(), tmp_path / "state.pt")
    [row, *_] = loader.samples_of_step(0)
    with Path(row["shard"]).open("r+b") as file:
        file.seek(row["offset"])
        file.write(b"\xff")
    words = [tmp_path / "state.pt", "--step", 0, "--data", place]
    assert command.document(*words)["samples"] == loader.samples_of_step(0)
    command("show", *words, "--export", tmp_path / "out", code=1)
    assert row["key"] in command.error
    assert not (tmp_path / "out").exists()
