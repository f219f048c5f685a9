"""Steps of so many tokens in a Lightning run with a data module: stopped, and resumed, on other ranks too."""

import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch

from headrace.size_aware_batching import OptimizerStepBatchSampler
from headrace.size_aware_batching.callbacks import TokensPerStep
from headrace.webdatamodule import MapDataModule, ResumableLoader

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*resuming from a checkpoint that ended before:UserWarning"),
]

SIZES = np.random.default_rng(0).integers(1, 60, 400)
by_tokens = partial(OptimizerStepBatchSampler, max_total_size=220, tokens_per_step=[(0, 900), (5, 1500)])


def collate(samples: list[int]) -> torch.Tensor:
    return torch.tensor(samples)


class Model(lightning.LightningModule):
    """Keeps how often each sample has reached the optimizer, in a buffer; saves, or fails, where it is told to."""

    def __init__(self, save_at: int = -1, path: Path | None = None, fails: bool = False) -> None:
        super().__init__()
        self.save_at, self.path, self.fails = save_at, path, fails
        self.scale = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(len(SIZES), dtype=torch.int64))
        self.waiting: list[torch.Tensor] = []
        self.steps: list[list[int]] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx == self.save_at and self.path is not None:
            self.trainer.save_checkpoint(self.path)
            if self.fails:
                raise KeyboardInterrupt
        self.waiting.append(batch)
        sizes = torch.from_numpy(SIZES)[batch].double()
        return (self.scale * sizes / 60 - 0.3).square().sum() * float(self.trainer.accumulate_grad_batches) / 900

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        batches, self.waiting = torch.cat(self.waiting), []
        self.seen += torch.bincount(batches, minlength=len(SIZES))  # type: ignore[operator]  # a buffer
        self.steps.append(sorted(batches.tolist()))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(model: Model, ckpt: Path | None = None, workers: int = 0, callbacks: Any = None, **ranks: Any) -> Model:
    module = MapDataModule(
        {"train": list(range(len(SIZES)))},
        batch_sampler=by_tokens,
        sizes=SIZES,
        collate_fn=collate,
        num_workers=workers,
        **ranks,
    )
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[TokensPerStep()] if callbacks is None else callbacks,
    )
    trainer.fit(model, datamodule=module, ckpt_path=ckpt, weights_only=False if ckpt else None)
    return model


@pytest.fixture(scope="module")
def whole() -> Model:
    """Of a run that was not stopped."""
    with warnings.catch_warnings(action="ignore"):
        return fit(Model())


NIGHTLY = [(save_at, 1) for save_at in (3, 20, 25, 31)]
STOPS = [
    pytest.param(save_at, workers, marks=pytest.mark.nightly if (save_at, workers) in NIGHTLY else ())
    for save_at in (3, 20, 25, 27, 31)
    for workers in (0, 1)
]


@pytest.mark.slow
@pytest.mark.parametrize(("save_at", "workers"), STOPS)
def test_a_run_that_stops_inside_a_step_trains_that_step_again_as_a_whole(
    tmp_path: Path, save_at: int, workers: int, whole: Model
) -> None:
    with pytest.raises(SystemExit):
        fit(Model(save_at, tmp_path / "last.ckpt", fails=True), workers=workers)
    resumed = fit(Model(), tmp_path / "last.ckpt", workers=workers)
    assert resumed.seen.tolist() == [2] * len(SIZES)  # type: ignore[operator]  # a buffer
    assert resumed.steps == whole.steps[-len(resumed.steps) :]
    assert torch.equal(resumed.scale, whole.scale)


@pytest.mark.parametrize("save_at", [20, 27])
def test_the_same_steps_go_on_on_other_ranks(tmp_path: Path, save_at: int, whole: Model) -> None:
    with pytest.raises(SystemExit):
        fit(Model(save_at, tmp_path / "last.ckpt", fails=True))
    ranks = [fit(Model(), tmp_path / "last.ckpt", num_replicas=2, rank=rank).steps for rank in range(2)]
    together = [sorted(first + second) for first, second in zip(*ranks, strict=True)]
    assert together == whole.steps[-len(together) :]


def test_a_resumable_loader_resumes_between_two_steps_on_other_ranks() -> None:
    def loaders(world: int) -> list[tuple[Any, ResumableLoader]]:
        samplers = [by_tokens(SIZES, num_replicas=world, rank=rank) for rank in range(world)]
        return [(one, ResumableLoader(range(len(SIZES)), one, collate_fn=list, num_workers=1)) for one in samplers]

    def steps_of(sampler: Any, loader: ResumableLoader) -> Any:
        return sampler.optimizer_steps(loader)

    done, state = Counter[int](), None
    for sampler, loader in loaders(3):
        for number, step in enumerate(steps_of(sampler, loader)):
            done += Counter(sample for batch in step for sample in batch)
            if number == 6:
                assert state in (None, loader.state_dict())
                state = loader.state_dict()
                break
        loader.close()
    assert state is not None
    assert state["batch_sampler"]["inside_step"] == []
    for sampler, loader in loaders(2):
        loader.load_state_dict(state)
        for step in steps_of(sampler, loader):
            done += Counter(sample for batch in step for sample in batch)
        loader.close()
    assert done == Counter(range(len(SIZES)))


def test_a_trainer_that_does_not_accumulate_is_refused() -> None:
    with pytest.raises(ValueError, match=r"callbacks must hold TokensPerStep\(\) .* would step after every"):
        fit(Model(), callbacks=[], num_replicas=1, rank=0)
