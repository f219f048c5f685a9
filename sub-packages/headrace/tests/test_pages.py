"""What the pages show beyond their Python examples: a script on two ranks, a signal in mid-epoch, the command line."""

import json
import os
import pickle
import re
import shlex
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import lmdb
import numpy as np
import pytest
import torch
from in_process import Done
from pages import DOCS, SCRIPTS, block, blocks, run
from runs import run_script, torchrun

from headrace.webdatamodule import IndexedShards, MapDataModule, write_shards
from headrace.weighted_sampler.cli import main as mixtures

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not DOCS.is_dir(), reason="the pages lie in the repository")]


# DistributedDataParallel keeps gloo's threads behind destroy_process_group (torch 2.13). One that still drops its last
# tensor while the interpreter ends aborts the process, so the scripts leave before that.
LEAVE = "import os, sys; sys.stdout.flush(); os._exit(0)\n"


def script(folder: Path) -> Path:
    """The script for several GPUs: the functions and the model of the first part, and the end that starts them."""
    definitions = next(part for part in blocks("how-to/lightning.md", "python") if "class Model" in part)
    path = folder / "several.py"
    beginning = definitions[: definitions.index("def train(")]
    path.write_text(f"from pathlib import Path\n{beginning}\n{block('how-to/lightning.md', 'several.py')}\n{LEAVE}")
    return path


@pytest.mark.parametrize("start", ["python", pytest.param("torchrun", marks=pytest.mark.nightly)])
def test_the_script_trains_on_two_ranks(start: str, tmp_path: Path) -> None:
    samples = [(f"m{n:03d}", {"atoms.json": json.dumps([n % 90] * (1 + n % 60)).encode()}) for n in range(300)]
    write_shards(samples, tmp_path / "data" / "train", n_shards=3)
    write_shards(samples[:20], tmp_path / "data" / "val", n_shards=1)
    path, words = script(tmp_path), ["data", "2", "cpu"]
    if start == "torchrun":
        command = [str(SCRIPTS / "torchrun"), "--standalone", "--nproc-per-node=2", str(path), *words]
        done: Any = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, check=False)
    else:  # Lightning starts the other rank
        (done,) = run_script(path, words, tmp_path)
    assert done.returncode == 0, done.stderr
    steps = dict(re.findall(r"steps (\d+) of rank (\d)", done.stdout)[::-1])
    assert len(re.findall(r"of rank [01]", done.stdout)) == 2
    assert len(steps) == 1, "both ranks make as many steps"


def test_the_mean_of_an_evaluation_is_exact_on_two_ranks(tmp_path: Path) -> None:
    """A number that is logged with its batch_size is not: Lightning rounds the counts."""
    text = block("how-to/evaluation.md", "lightning")
    one = "trainer().validate(model, datamodule=data, verbose=False)\n"
    logged = 'self.log("val", self.mean)\n'
    assert text.count(one) == text.count(logged) == text.count("devices=1") == 1
    text = text[: text.index(one)] + one + 'print("mean", repr(float(figures["val"])), len(model.seen), sep=" ")\n'
    number = 'batch["tokens"].sum(1).mean()'
    rounded = f'{logged}        self.log("x", {number}, batch_size=len(batch["ids"]), sync_dist=True)\n'
    text = text.replace(logged, rounded).replace("devices=1", 'devices=2, strategy="ddp"')
    text = text.replace('print("mean"', 'print("rounded", float(figures["x"]))\nprint("mean"')
    path = tmp_path / "evaluate.py"
    path.write_text(f"{text}\n{LEAVE}")
    done = by_forks(path, 2, {})
    assert [rank.returncode for rank in done] == [0, 0], done
    found = [re.search(r"mean (\S+) (\d+)", rank.stdout) for rank in done]
    exact = sum(5 + 37 * number % 90 for number in range(203)) / 203
    assert [float(mean[1]) for mean in found if mean] == [pytest.approx(exact, rel=1e-6)] * 2
    assert sum(int(mean[2]) for mean in found if mean) == 203
    if lightning.__version__.startswith("2.6."):  # as the page says
        inexact = re.search(r"rounded (\S+)", done[0].stdout)
        assert inexact is not None
        assert float(inexact[1]) == pytest.approx(exact * 101.5 / 101, rel=1e-6)


def by_torchrun(path: Path, world: int, environment: dict[str, str]) -> list[Done]:
    """Run a script on some ranks by the command; its launcher and each of the ranks import torch anew."""
    done = subprocess.run(
        [str(SCRIPTS / "torchrun"), "--standalone", f"--nproc-per-node={world}", path.name],
        cwd=path.parent,
        env=os.environ | environment,
        text=True,
        capture_output=True,
        check=False,
    )
    return [Done(done.returncode, done.stdout, done.stderr)]


def by_forks(path: Path, world: int, environment: dict[str, str]) -> list[Done]:
    """Run a script on some ranks in the environment of torchrun, forked from a process that has imported torch."""
    place, environments = torchrun(world)
    done = run_script(path, [], path.parent, [own | environment for own in environments])
    del place
    return done


@pytest.mark.parametrize(
    ("start", "after"),
    [
        (by_forks, 2),
        pytest.param(by_torchrun, 2, marks=pytest.mark.nightly),
        pytest.param(by_torchrun, 1, marks=pytest.mark.nightly),
    ],
)
def test_the_plain_loop_on_two_ranks_is_killed_and_resumed(
    start: Callable[[Path, int, dict[str, str]], list[Done]], after: int, tmp_path: Path
) -> None:
    text = block("how-to/loops.md", "task") + block("how-to/loops.md", "plain_ddp")
    step = "optimizer.step()\n"
    assert text.count(step) == 1
    dying = 'os.environ.get("DIE_AT") == f"{epoch}.{loader.steps}" and os.kill(os.getpid(), 9)'
    path = tmp_path / "train.py"
    path.write_text(text.replace(step, f"optimizer.step(); {dying}\n") + LEAVE)
    assert all(rank.returncode for rank in start(path, 2, {"DIE_AT": "1.13"}))
    saved = torch.load(tmp_path / "checkpoints" / "last.pt", weights_only=True)
    assert set(saved["model"]["seen"].tolist()) == {1, 2}, "in the middle of the second epoch"
    for rank in start(path, after, {"DIE_AT": ""}):
        assert rank.returncode == 0, rank.stderr


def test_the_commands_pack_an_lmdb_and_a_folder(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path / "structures.lmdb"), map_size=2**20) as store, store.begin(write=True) as entries:
        for number in range(30):
            entries.put(b"s%02d" % number, pickle.dumps([number]))
    (tmp_path / "pickles").mkdir()
    for number in range(20):
        (tmp_path / "pickles" / f"p{number:02d}.pkl").write_bytes(pickle.dumps([number]))
    told = run("how-to/data.md", "pack", tmp_path)
    assert re.search(r"^samples +30$", told, re.MULTILINE)
    assert re.search(r"^fill", told, re.MULTILINE)
    sizes = [int(line) for line in (tmp_path / "bytes.txt").read_text().splitlines()]
    assert sizes == [len(pickle.dumps([number])) for number in range(30)]
    for folder, count in (("train", 30), ("train2", 20)):
        shards = IndexedShards(tmp_path / folder)
        assert [sample["pkl"] for sample in shards] == [[number] for number in range(count)]


def test_the_mixture_is_known_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("web.npy", 20 + np.arange(9000) % 50)
    np.save("books.npy", 200 + np.arange(500) % 300)
    command, *words = shlex.split(block("how-to/mixtures.md", "before").replace("\\\n", " "))
    assert (command, mixtures(words)) == ("headrace-mixtures", 0)
    assert capsys.readouterr().out == block("how-to/mixtures.md", "before, printed")
    pytest.importorskip("yaml")
    Path("mixture.yaml").write_text(block("how-to/mixtures.md", "before, config"))
    assert mixtures(["--config", "mixture.yaml", "--json"]) == 0
    Path("again.json").write_text(printed := capsys.readouterr().out)
    assert mixtures(["--config", "again.json", "--json"]) == 0
    assert capsys.readouterr().out == printed


class Steps(lightning.LightningModule):
    """Counts its batches, and signals the process in the middle of one."""

    def __init__(self, stop_at: int) -> None:
        super().__init__()
        self.layer, self.stop_at, self.seen = torch.nn.Linear(1, 1), stop_at, list[int]()

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        if self.global_step == self.stop_at:
            os.kill(os.getpid(), signal.SIGUSR1)
        self.seen += batch.tolist()
        return torch.Tensor(self.layer(batch[:, None].float()).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def test_a_run_that_slurm_will_end_saves_between_two_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, before = list[list[str]](), signal.getsignal(signal.SIGUSR1)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    names: dict[str, Any] = {"lightning": lightning, "os": os}
    exec(block("how-to/lightning.md", "requeue"), names)
    names["subprocess"] = SimpleNamespace(run=lambda words, check: asked.append(words))
    path = tmp_path / "last.ckpt"

    def fit(model: Steps, checkpoint: Path | None) -> list[int]:
        trainer = lightning.Trainer(
            max_epochs=1,
            accelerator="cpu",
            callbacks=[names["SaveAndRequeue"](path)],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        data = MapDataModule({"train": list(range(40))}, batch_size=4)
        trainer.fit(model, datamodule=data, ckpt_path=checkpoint, **({"weights_only": False} if checkpoint else {}))
        return model.seen

    try:
        first = Steps(stop_at=4)
        with pytest.raises(SystemExit):
            fit(first, None)
        assert len(first.seen) == 5 * 4, "the step is finished"
        assert asked == [["scontrol", "requeue", "17"]]
        assert sorted(first.seen + fit(Steps(stop_at=-1), path)) == list(range(40))
    finally:
        signal.signal(signal.SIGUSR1, before)
