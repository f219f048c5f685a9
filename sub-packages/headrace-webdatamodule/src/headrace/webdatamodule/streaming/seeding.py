"""Stages that shuffle without a seed: webdataset takes the time for one, and no order could be had again."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import webdataset as wds


def is_unseeded(stage: Any) -> bool:
    """Whether a stage is webdataset's `shuffle`, with neither `seed` nor `rng`.

    >>> is_unseeded(wds.shuffle(9)), is_unseeded(wds.shuffle(9, seed=1)), is_unseeded(wds.map(str))
    (True, False, False)
    """
    if not isinstance(stage, wds.filters.FilterFunction) or stage.f is not wds.shuffle.f:
        return False
    return _lacks(_given(stage))


def with_seed(stage: Any, seed: str) -> Any:
    """The same stage with a seed.

    Args:
        stage: One that has none.
        seed: Of its generator.
    """
    return stage.__class__(stage.f, **{**_given(stage), "seed": seed})


def shuffles_unseeded(stages: Iterable[Any], calls: Sequence[tuple[str, Mapping[str, Any]]]) -> bool:
    """Whether one of some stages, or of those that method calls add, shuffles without a seed.

    >>> shuffles_unseeded([wds.map(str)], [("shuffle", {"size": 9})])
    True
    """
    return any(map(is_unseeded, stages)) or any(name == "shuffle" and _lacks(kwargs) for name, kwargs in calls)


def _given(stage: Any) -> dict[str, Any]:
    bound = inspect.signature(stage.f).bind(None, *stage.args, **stage.kw).arguments
    return dict(list(bound.items())[1:])


def _lacks(options: Mapping[str, Any]) -> bool:
    return options.get("seed") is None and options.get("rng") is None
