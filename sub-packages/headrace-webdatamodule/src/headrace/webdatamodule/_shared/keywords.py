"""Errors for keyword arguments of wrong names: they say the right one."""

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from functools import wraps
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

# What other libraries call an argument, and what it may be here: the first name that the function has is meant.
_OTHER_NAMES = {
    "bs": ("batch_size",),
    "batch_size": ("max_items", "global_batch_size", "batch_sampler"),
    "budget": ("max_total_size",),
    "collator": ("collate_fn",),
    "data": ("dataset", "datasets", "sources", "shards"),
    "data_source": ("dataset", "sizes", "n_samples"),
    "dataset": ("datasets", "shards", "sources", "sizes", "n_samples"),
    "global_rank": ("rank",),
    "length_fn": ("sizeof",),
    "lengths": ("sizes",),
    "local_rank": ("rank",),
    "max_batch_size": ("max_items",),
    "max_batch_tokens": ("max_total_size",),
    "max_duration": ("max_total_size",),
    "max_sentences": ("max_items",),
    "max_tokens": ("max_total_size",),
    "max_tokens_in_batch": ("max_total_size",),
    "n_workers": ("num_workers",),
    "num_processes": ("num_replicas",),
    "num_ranks": ("num_replicas",),
    "num_samples": ("n_samples", "epoch_length"),
    "path": ("shards", "source"),
    "probabilities": ("weights",),
    "probs": ("weights",),
    "process_index": ("rank",),
    "proportions": ("weights",),
    "random_seed": ("seed",),
    "random_state": ("seed",),
    "replicas": ("num_replicas",),
    "stopping_strategy": ("stopping",),
    "token_budget": ("max_total_size",),
    "tokens_per_batch": ("max_total_size",),
    "urls": ("shards", "source"),
    "workers": ("num_workers",),
    "world_size": ("num_replicas",),
}


def explains_keywords(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Let a call with a keyword that the function does not have say which one is meant; its signature stays.

    >>> @explains_keywords
    ... def load(*, num_workers=0): ...
    >>> load(num_wokers=2)
    Traceback (most recent call last):
        ...
    TypeError: load() got an unexpected keyword argument 'num_wokers': did you mean 'num_workers'?
    """

    @wraps(function)
    def called(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        try:
            return function(*args, **kwargs)
        except TypeError:
            if message := _wrong_keyword(function, kwargs):
                raise TypeError(message) from None
            raise

    return called


def _wrong_keyword(function: Callable[..., object], given: dict[str, object]) -> str | None:
    """Return what is wrong with the first keyword that the function does not have, if there is one."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    names = [parameter.name for parameter in parameters if parameter.name != "self"]
    for name in given:
        if name not in names:
            meant = [other for other in _OTHER_NAMES.get(name.lower(), ()) if other in names]
            meant = (meant or get_close_matches(name.lower(), names, cutoff=0.7))[:1]
            cure = f"did you mean {meant[0]!r}?" if meant else f"the arguments are {', '.join(names)}"
            called = function.__qualname__.removesuffix(".__init__")
            return f"{called}() got an unexpected keyword argument {name!r}: {cure}"
    return None
