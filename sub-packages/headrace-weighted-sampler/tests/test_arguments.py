"""Integers and exact weights as arguments, and what the errors say."""

from collections import UserDict, UserList
from typing import Any

import pytest

from headrace.weighted_sampler import InterleavedDataset, NamedConcatDataset, WeightedDistributedSampler


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
