"""What this repository relies on: a budget that holds, shares that are exact, a resume that loses nothing."""

import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from proteins.train import main

from headrace.webdatamodule import write_shards

CONFIG = Path(__file__).parent.parent / "config.yaml"
RESIDUES = torch.tensor(list(b"ACDEFGHIKLMNPQRSTVWY"), dtype=torch.uint8)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the configuration, and shards of random sequences."""
    draw = torch.Generator().manual_seed(0)
    for name, count in {"swissprot": 200, "metagenome": 100, "val": 20}.items():
        lengths = torch.randint(20, 400, (count,), generator=draw).tolist()
        samples = [
            (f"{name}-{i:03d}", {"seq.txt": RESIDUES[torch.randint(20, (length,), generator=draw)].numpy().tobytes()})
            for i, length in enumerate(lengths)
        ]
        write_shards(samples, tmp_path / "shards" / name, samples_per_shard=50)
    shutil.copy(CONFIG, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fit(*options: str) -> list[str]:
    """Return the keys that a run was trained on, in order."""
    model = main(["fit", "--config", "config.yaml", *options]).model
    return list(model.seen)


def test_a_run_that_is_stopped_and_resumed_sees_what_one_without_a_stop_sees(run: Path) -> None:
    uninterrupted = fit()
    shutil.rmtree(run / "checkpoints")
    begun = fit("--trainer.max_steps", "6")
    resumed = fit("--ckpt_path", "checkpoints/last.ckpt")
    assert begun + resumed == uninterrupted
    assert Counter(key.partition("-")[0] for key in uninterrupted[:120]) == {"swissprot": 90, "metagenome": 30}


def test_no_batch_exceeds_the_budget(run: Path) -> None:
    data = main(["fit", "--config", "config.yaml", "--trainer.fast_dev_run", "1"]).datamodule
    assert all(tokens.numel() <= 1024 for tokens, _ in data.train_dataloader())
