"""Lightning callbacks: in a real trainer, alone and on two real ranks."""

import random
from pathlib import Path
from typing import Any

import lightning
import lightning_worker
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning_worker import Model, Weighted, fit, sampler_of
from processes import run_ranks

from headrace.size_aware_batching.callbacks import OOMRescue, TokensPerStep, WorstBatchesFirst

pytestmark = pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")


def assert_equal(one: list[float], other: list[float]) -> None:
    assert np.abs(np.array(one) - np.array(other)).max() < 1e-12 * np.abs(other).max()


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer", "first optimizer"])
def test_a_rescued_run_equals_an_unbroken_one(phase: str) -> None:
    rescue = OOMRescue(indices=lambda batch: batch["index"].tolist())
    rescued = fit([rescue], phase=phase, clip=0.5)
    unbroken = fit([], clip=0.5)
    assert [event.phase for event in rescue.events] == ["optimizer" if "optimizer" in phase else "forward or backward"]
    assert_equal(rescued.weights(), unbroken.weights())
    assert rescued.losses == pytest.approx(unbroken.losses, rel=1e-12)
    assert rescued.trainer.global_step == unbroken.trainer.global_step == len(unbroken.losses)
    if "optimizer" not in phase:
        assert len(rescue.state_dict()["failures"]) == 1
        assert (rescue.report().split_steps, rescue.report().budget) == (1, np.inf)
    assert "step" not in vars(rescued.trainer.optimizers[0]) or rescued.trainer.lr_scheduler_configs


def test_a_loss_over_the_targets_of_the_whole_batch_is_rescued() -> None:
    rescue = OOMRescue(reduction="scaled")
    rescued, unbroken = fit([rescue], kind=Weighted), fit([], kind=Weighted, failing=False)
    assert len(rescue.events) == 1
    assert_equal(rescued.weights(), unbroken.weights())
    assert rescued.losses == pytest.approx(unbroken.losses, rel=1e-12)


def test_targets_that_are_counted_for_every_part_are_refused() -> None:
    told = "global_num_tokens must not run in the loss of a part, .* in Lightning in on_train_batch_start"
    with pytest.raises(RuntimeError, match=told):
        fit([OOMRescue(reduction="scaled")], "count", kind=Weighted)


def test_a_sample_that_does_not_fit_ends_the_run_with_its_index() -> None:
    rescue = OOMRescue(indices=lambda batch: batch["index"].tolist())
    with pytest.raises(torch.OutOfMemoryError, match="index 7 of the dataset, does not fit into memory by itself"):
        fit([rescue], phase="sample 7")


def test_the_worst_batches_leave_no_trace() -> None:
    random.seed(3)
    with_them, without = fit([WorstBatchesFirst(k=3)]), fit([])
    worst = sampler_of().worst_batches(3)
    assert with_them.worst == [worst[0], *worst]  # once without and once with the optimizer's state
    assert without.worst == []
    assert with_them.weights() == without.weights()
    assert with_them.losses == without.losses
    assert with_them.drawn == without.drawn
    assert with_them.trainer.logged_metrics == without.trainer.logged_metrics
    assert with_them.means == without.means


def test_a_batch_that_does_not_fit_is_found_before_the_training() -> None:
    with pytest.raises(torch.OutOfMemoryError, match=r"batch 1 of its most expensive ones, .* does not fit on rank 0"):
        fit([WorstBatchesFirst()], phase="large")


@pytest.mark.parametrize(
    ("callback", "change", "match"),
    [
        (WorstBatchesFirst(), {"plain": True}, "the loader's batch_sampler must have worst_batches"),
        (WorstBatchesFirst(), {"manual": True}, "WorstBatchesFirst needs automatic optimization"),
        (OOMRescue(), {"manual": True}, "OOMRescue needs automatic optimization"),
    ],
)
def test_what_is_refused(callback: Any, change: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        fit([callback], **change)
    with pytest.raises(
        TypeError, match=r"options must not contain \['clip_norm'\]: OOMRescue gets them from the trainer"
    ):
        OOMRescue(clip_norm=1.0)


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer", "forward twice"])
def test_a_rescued_run_with_accumulated_gradients_equals_an_unbroken_one(phase: str) -> None:
    rescue = OOMRescue(window=3)
    rescued, unbroken = fit([rescue], phase, accumulate=3, clip=0.5), fit([], accumulate=3, clip=0.5)
    failed = {event.step for event in rescue.events}
    assert failed == {"optimizer": {3}, "forward twice": {2, 3}}.get(phase, {2})
    assert len(rescue.events) >= 3 or phase == "optimizer"  # each of the step's batches, and maybe a part
    assert_equal(rescued.weights(), unbroken.weights())
    assert rescued.losses == pytest.approx(unbroken.losses, rel=1e-12)
    assert rescued.trainer.global_step == unbroken.trainer.global_step < len(unbroken.losses)


def test_a_rescued_run_with_a_number_of_tokens_in_each_step_equals_an_unbroken_one() -> None:
    rescue = OOMRescue()
    rescued = fit([TokensPerStep(), rescue], phase="forward", tokens=True)
    unbroken = fit([TokensPerStep()], tokens=True)
    assert {event.step for event in rescue.events} == {2}
    assert_equal(rescued.weights(), unbroken.weights())
    assert 2 < rescued.trainer.global_step == unbroken.trainer.global_step < len(unbroken.losses)


def test_gradients_that_are_accumulated_from_some_epoch_on() -> None:
    rescue = OOMRescue()
    rescued = fit([rescue, GradientAccumulationScheduler({1: 2})], phase="forward")
    assert rescue.events
    assert_equal(rescued.weights(), fit([GradientAccumulationScheduler({1: 2})]).weights())


def test_what_was_learned_about_the_budget_goes_into_the_checkpoint(tmp_path: Path) -> None:
    rescue = OOMRescue()
    run = fit([rescue], phase="forward twice")
    assert rescue.guard is not None
    assert rescue.guard.budget < np.inf
    run.trainer.save_checkpoint(tmp_path / "run.ckpt")
    again = OOMRescue()
    model = Model()
    trainer = lightning.Trainer(
        max_epochs=3, accelerator="cpu", callbacks=[again], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(model, ckpt_path=str(tmp_path / "run.ckpt"))
    assert again.guard is not None
    assert again.guard.budget == rescue.guard.budget


@pytest.mark.slow
def test_two_ranks_under_ddp(tmp_path: Path) -> None:
    first, second = run_ranks(lightning_worker.main, 2, tmp_path)
    for name in ("forward", "backward", "optimizer"):
        assert first[name] == second[name]
        assert_equal(first[name], first["unbroken"])
    assert first["accumulated"] == second["accumulated"]
    assert_equal(first["accumulated"], first["accumulated unbroken"])
    assert first["weighted"] == second["weighted"]
    assert_equal(first["weighted"], first["weighted unbroken"])
    for name, called in (("count", "global_num_tokens"), ("log", "a collective (barrier)")):
        assert f"{called} must not run in the loss of a part" in first[name]
        assert f"{called} must not run in the loss of a part" in second[name]
    assert (first["clipping"], second["clipping"]) == (
        "rank 1: OutOfMemoryError: CUDA out of memory",
        "CUDA out of memory",
    )
    assert "does not fit on rank 1" in first["large"]
    assert first["large"] == second["large"]
