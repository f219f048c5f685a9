"""Integers and exact weights as arguments, and what the errors say."""

from collections import UserDict, UserList
from typing import Any

import numpy as np
import pytest
import torch

from headrace.weighted_sampler import InterleavedDataset, NamedConcatDataset, WeightedDistributedSampler
from headrace.weighted_sampler._arguments import as_int


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_python_and_numpy_integers_are_accepted(value: object) -> None:
    got = as_int("rank", value, 0)
    assert (got, type(got)) == (3, int)


@pytest.mark.parametrize("value", [True, np.True_, 1.0, "1", None, np.array([1, 2]), torch.tensor([1, 2])])
def test_everything_else_is_refused_by_name(value: object) -> None:
    with pytest.raises(TypeError, match=r"^rank must be an int >= 0, got"):
        as_int("rank", value, 0)


@pytest.mark.parametrize(
    ("value", "high", "allowed"), [(-1, None, ">= 0"), (-1, 5, "from 0 to 5"), (6, 5, "from 0 to 5")]
)
def test_bounds_are_named(value: int, high: int | None, allowed: str) -> None:
    with pytest.raises(ValueError, match=rf"^epoch must be an int {allowed}, got {value}$"):
        as_int("epoch", value, 0, high)


def config(value: Any) -> Any:
    """Return a value as OmegaConf and others have it: lists and mappings of classes of their own."""
    if isinstance(value, dict):
        return UserDict({name: config(own) for name, own in value.items()})
    return UserList(map(config, value)) if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize(
    ("weights", "options"),
    [
        ({"web": 3, "books": 1}, {"schedule": [(50, {"web": 1, "books": 1})]}),
        ({"text": (0.7, {"web": 3, "books": 1})}, {"schedule": [(50, {"text": [1, {"web": 0, "books": 1}]})]}),
        ([3, 1], {"schedule": [(50, [1, 1])], "max_passes": {0: 2}}),
    ],
)
def test_lists_and_mappings_of_a_config_are_as_pythons_own(weights: Any, options: dict[str, Any]) -> None:
    data = NamedConcatDataset({"web": range(90), "books": range(10)})
    plain = WeightedDistributedSampler(data, weights, **options)
    of_config = WeightedDistributedSampler(data, config(weights), **{key: config(own) for key, own in options.items()})
    assert of_config.fingerprint == plain.fingerprint
    assert list(of_config) == list(plain)


def test_lists_and_mappings_of_a_config_mix_streams() -> None:
    sources, weights, schedule = {"a": [1, 2, 3], "b": [4]}, {"both": [1, {"a": 3, "b": 1}]}, [[2, {"a": 1, "b": 1}]]
    plain = InterleavedDataset(sources, weights, schedule=schedule, stopping="all_exhausted")  # type: ignore[arg-type]
    of_config: Any = InterleavedDataset(
        config(sources), config(weights), schedule=config(schedule), stopping="all_exhausted"
    )
    assert list(of_config) == list(plain)
    of_lists: Any = InterleavedDataset(config([[1, 2], [3]]), config([2, 1]), schedule=config([[2, [1, 1]]]))
    assert list(of_lists) == list(InterleavedDataset([[1, 2], [3]], [2, 1], schedule=[(2, [1, 1])]))


@pytest.mark.parametrize("schedule", ["ab", ["ab"], [(1, {"web": 1, "books": 1}, 2)], {"a": 1}])
def test_a_schedule_of_something_else_is_refused(schedule: Any) -> None:
    data = NamedConcatDataset({"web": range(90), "books": range(10)})
    with pytest.raises(TypeError, match=r"^schedule must be a list of tuples \(position, weights\), got "):
        WeightedDistributedSampler(data, [3, 1], schedule=schedule)
