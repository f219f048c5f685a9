"""Options that are handed through to webdataset and torch, checked by name."""

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import webdataset as wds
from torch.utils.data import DataLoader

_SET_WDS = {"urls": "the shards come from dirs_tars_wds and prefix_tars_wds"}
_SET_WLD = {
    "batch_size": "batch in pipeline_prebatch_wld, for example with webdataset.batched(16)",
    "dataset": "the data module makes it",
}


def check_options_wds(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of webdataset.WebDataset.

    Args:
        name: The argument's name, for errors.
        options: The options.

    Returns:
        A copy of them.

    Raises:
        ValueError: An unknown option, or one that the pipeline sets itself.

    >>> check_options_wds("kwargs_wds", {"seed": 3})
    {'seed': 3}
    """
    return _check(name, options, wds.WebDataset, _SET_WDS)


def check_options_wld(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of webdataset.WebLoader, which are those of torch's DataLoader.

    Args:
        name: The argument's name, for errors.
        options: The options.

    Returns:
        A copy of them.

    Raises:
        ValueError: An unknown option, or one that the pipeline sets itself.

    >>> check_options_wld("kwargs_wld", {"num_worker": 3})
    Traceback (most recent call last):
        ...
    ValueError: kwargs_wld: DataLoader has no option 'num_worker'; did you mean 'num_workers'?
    """
    return _check(name, options, DataLoader, _SET_WLD)


def _check(
    name: str, options: Mapping[str, Any], target: Callable[..., Any], taken: Mapping[str, str]
) -> dict[str, Any]:
    for option, cure in taken.items():
        if option in options:
            raise ValueError(f"{name} cannot hold {option!r}: {cure}")
    known = [option for option in inspect.signature(target).parameters if option not in taken]
    for option in options:
        if option not in known:
            close = difflib.get_close_matches(str(option), known, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(known)}"
            raise ValueError(f"{name}: {target.__name__} has no option {option!r}; {hint}")
    return dict(options)


def shuffles(name: str, shardshuffle: Any) -> bool:
    """Whether `shardshuffle` asks for shuffled shards.

    Args:
        name: The argument's name, for errors.
        shardshuffle: A bool, None, or a number of shards; any positive number shuffles all shards.

    Raises:
        ValueError: Something else.
    """
    if shardshuffle is None or (isinstance(shardshuffle, int) and shardshuffle >= 0):
        return bool(shardshuffle)
    raise ValueError(f"{name} must be True, False or a number of shards, 0 or more, got {shardshuffle!r}")


def own_split(options: Mapping[str, Any]) -> bool:
    """Whether the user chose how ranks share the shards."""
    # None is a choice as well: every rank reads all shards.
    return options.get("nodesplitter", wds.split_by_node) is not wds.split_by_node


def resampled(options: Mapping[str, Any]) -> bool:
    """Whether the shards are drawn without end."""
    return bool(options.get("resampled")) or options.get("mode") == "resampled"
