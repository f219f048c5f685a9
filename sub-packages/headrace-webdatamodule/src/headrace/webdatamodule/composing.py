"""User-given composables and method calls, checked."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import webdataset as wds


def stages_of(name: str, given: Any) -> list[Any]:
    """One composable or several as a list.

    Args:
        name: The argument's name, for errors.
        given: None, a callable from iterator to iterator, a stage of webdataset's, or several of these.

    Returns:
        The composables, in order.

    Raises:
        TypeError: Something else, or a one-time iterator.

    >>> stages_of("pipeline_wds", None), len(stages_of("pipeline_wds", [iter, iter]))
    ([], 2)
    """
    if given is None:
        return []
    if _is_stage(given):
        return [given]
    stages = list(given) if isinstance(given, Iterable) and not isinstance(given, str | Mapping) else [given]
    for stage in stages:
        if not _is_stage(stage):
            expected = "callables that take an iterator and return one, such as webdataset.shuffle(100)"
            raise TypeError(f"{name} must be one or several {expected}, got {stage!r}")
    return stages


def _is_stage(stage: object) -> bool:
    return callable(stage) or isinstance(stage, wds.utils.PipelineStage)


def calls_of(name: str, given: Any) -> list[tuple[str, dict[str, Any]]]:
    """Method calls that are to be made last.

    Args:
        name: The argument's name, for errors.
        given: None, or pairs of a method's name and its keyword arguments.

    Returns:
        The pairs.

    Raises:
        TypeError: Not such pairs.

    >>> calls_of("invoke_wds", [("with_epoch", {"nbatches": 100})])
    [('with_epoch', {'nbatches': 100})]
    """
    calls = []
    for call in () if given is None else [given] if isinstance(given, str | Mapping) else given:
        match call:
            case (str(method), Mapping() as kwargs):
                calls.append((method, dict(kwargs)))
            case _:
                example = '[("with_epoch", {"nbatches": 100})]'
                raise TypeError(f"{name} must list pairs of method name and kwargs like {example}, got {call!r}")
    return calls


def invoke(name: str, target: Any, calls: Iterable[tuple[str, Mapping[str, Any]]]) -> Any:
    """Call methods one after the other, each on what the last one returned.

    Args:
        name: The argument's name, for errors.
        target: A WebDataset or WebLoader.
        calls: Pairs of a method's name and its keyword arguments.

    Returns:
        What the last call returned; `target` when there is none.

    Raises:
        ValueError: There is no such method.
    """
    for method, kwargs in calls:
        known = [known for known in dir(target) if not known.startswith("_") and callable(getattr(target, known))]
        if method not in known:
            close = difflib.get_close_matches(method, known)
            hint = f"; did you mean {' or '.join(close)}?" if close else f"; it has {', '.join(known)}"
            raise ValueError(f"{name}: {type(target).__name__} has no method {method!r}{hint}")
        result = getattr(target, method)(**kwargs)
        target = target if result is None else result
    return target
