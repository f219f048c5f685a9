"""What a state must hold, and which states are refused."""

from typing import Any

import pytest

from headrace.weighted_sampler import WeightedDistributedSampler

GOOD = WeightedDistributedSampler(range(20), {(0, 20): 1}, seed=7).state_dict(position=6)


def load(state: dict[str, Any], length: int = 20, ratio: float = 1, seed: int = 7) -> None:
    WeightedDistributedSampler(range(length), {(0, 20): ratio}, seed=seed).load_state_dict(state)


def test_the_state_is_a_few_plain_values() -> None:
    assert {key: type(value) for key, value in GOOD.items()} == {
        "version": int,
        "seed": int,
        "epoch": int,
        "position": int,
        "fingerprint": str,
    }
    load({**GOOD})


@pytest.mark.parametrize("key", sorted(GOOD))
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(ValueError, match=rf"state lacks \['{key}'\], got the keys"):
        load({name: value for name, value in GOOD.items() if name != key})


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"version": 2}, ValueError, "state has version 2, this release reads version 1"),
        ({"seed": 8}, ValueError, "state has seed 8, this sampler has seed 7"),
        ({"epoch": -1}, ValueError, r"state\['epoch'\] must be from 0"),
        ({"epoch": "3"}, TypeError, r"state\['epoch'\] must be an integer"),
        ({"position": 21}, ValueError, r"state\['position'\] must be from 0 to 20, got 21"),
        ({"position": 1.5}, TypeError, r"state\['position'\] must be an integer"),
    ],
)
def test_a_state_that_cannot_be_meant_is_refused(change: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        load({**GOOD, **change})


def test_another_dataset_length_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="dataset of 20 samples, this one has 25"):
        load({**GOOD}, length=25)


def test_other_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="state belongs to other weights"):
        load({**GOOD}, ratio=1.1)


def test_a_refused_state_changes_nothing() -> None:
    sampler = WeightedDistributedSampler(range(20), {(0, 20): 1}, seed=8)
    sampler.set_skip_batches(1, 3)
    with pytest.raises(ValueError, match="seed"):
        sampler.load_state_dict({**GOOD, "epoch": 5})
    assert (sampler.epoch, sampler.position) == (0, 3)
