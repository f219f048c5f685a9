"""What a training loop is told of the epoch that is about to begin."""

import lightning
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.webdatamodule.trainer.counters import expect, limited


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.floats(0, 1))
def test_a_limit_is_a_number_or_a_share(length: int, number: int, share: float) -> None:
    assert limited(length, number) == min(length, number)
    assert limited(length, 1.0) == length
    assert limited(length, share) == int(length * share) <= length


def test_a_trainer_that_does_not_fit_is_left_alone() -> None:
    trainer = lightning.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    before = trainer.num_training_batches
    expect(trainer, 5)
    assert trainer.num_training_batches == before


@pytest.mark.parametrize("limit", [0, 0.0])
def test_a_limit_of_nothing_leaves_nothing(limit: float) -> None:
    assert limited(10, limit) == 0
