"""Which reader reads what: checked before any begins."""

import warnings
from collections.abc import Sequence

import webdataset as wds

from headrace.webdatamodule.options import own_split, resampled
from headrace.webdatamodule.recipe import Recipe
from headrace.webdatamodule.streaming.counting import STRICT
from headrace.webdatamodule.streaming.ranges import RangeSource, without_index
from headrace.webdatamodule.urls import scheme_of

# What these do, ranges of samples do as well; other options change what comes out of a shard.
_NO_MATTER = {
    "shardshuffle",
    "detshuffle",
    "seed",
    "nodesplitter",
    "workersplitter",
    "handler",
    "empty_check",
    "verbose",
}


def is_exact(recipe: Recipe, name: str, urls: Sequence[str]) -> bool:
    """Whether ranks and workers get equal shares of samples, rather than whole shards.

    Args:
        recipe: Says what was asked for, and the options that may forbid it.
        name: Name of the source.
        urls: Its shards.

    Raises:
        ValueError: It was asked for, and cannot be.
    """
    if recipe.exact is False:
        return False
    reason = _obstacle(recipe, name)
    missing = 0 if reason else without_index(urls)
    if missing:
        reason = f"{missing} of {len(urls)} shards have no index beside them: call index_shards on their directory"
    if reason and recipe.exact:
        raise ValueError(f"{_called(recipe, name)}: exact=True is not possible, because {reason}")
    if 0 < missing < len(urls):
        warnings.warn(
            f"{_called(recipe, name)}: {reason}; until then ranks share whole shards", UserWarning, stacklevel=2
        )
    return reason is None


def _obstacle(recipe: Recipe, name: str) -> str | None:
    options = recipe.kwargs_wds
    others = sorted(set(options) - _NO_MATTER)
    if scheme_of(recipe.places[name]) == "pipe":
        return "a pipe has no index: give a directory"
    if own_split(options) or options.get("workersplitter", wds.split_by_worker) is not wds.split_by_worker:
        return "kwargs_wds holds a splitter of your own: leave it out"
    if others:
        return f"kwargs_wds holds {', '.join(others)}: leave it out"
    if options.get("handler", wds.reraise_exception) not in STRICT:
        return "a handler in kwargs_wds may leave samples out: leave the handler out"
    return None


def check_readers(recipe: Recipe, n_shards: int, world: int, name: str = "") -> None:
    """Refuse more ranks than shards, when ranks read whole shards: some would have nothing to read.

    Of sources that are mixed each reader needs a shard of each. Otherwise workers without a shard idle, and a
    warning says so.

    Args:
        recipe: Names the workers. Splitters of the user's own are taken to know what they do.
        n_shards: Number of shards.
        world: Number of ranks.
        name: Name of the source.

    Raises:
        ValueError: With the numbers.
    """
    options, workers = recipe.kwargs_wds, recipe.kwargs_wld.get("num_workers", 0)
    if own_split(options) or "workersplitter" in options or resampled(options):
        return
    readers = world * recipe.workers
    needed = readers if recipe.mix else world
    numbers = (
        f"{_called(recipe, name)}: {n_shards} shards cannot be shared by {readers} readers"
        f" ({world} ranks with num_workers={workers})"
    )
    if needed > n_shards:
        fewer = f"lower num_workers in kwargs_wld[Split.{recipe.name}], " if recipe.mix else ""
        raise ValueError(
            f"{numbers}: {'each' if recipe.mix else 'each rank'} reads whole shards and needs at least one. Call"
            f" index_shards on the directory, so that samples are shared, {fewer}or write at least {needed} shards"
        )
    if readers > n_shards:
        warnings.warn(
            f"{numbers}: each reads whole shards, so that {readers - n_shards} workers or more idle. Call index_shards"
            f" on the directory, so that samples are shared, lower num_workers in kwargs_wld[Split.{recipe.name}], or"
            f" write at least {readers} shards",
            UserWarning,
            stacklevel=2,
        )


def tell_padding(recipe: Recipe, source: RangeSource | None, world: int) -> None:
    """Say how many samples come twice an epoch, so that all ranks get equally many.

    Args:
        recipe: Names the split.
        source: What reads the samples, None when ranks read whole shards.
        world: Number of ranks.
    """
    if source is not None and (more := -source.n_samples % world):
        warnings.warn(
            f"{recipe.name}: {source.n_samples} samples cannot be shared equally by {world} ranks: {more} of them come"
            f" twice in each pass. With {source.n_samples + more} or {source.n_samples - world + more} none would",
            UserWarning,
            stacklevel=2,
        )


def _called(recipe: Recipe, name: str) -> str:
    return f"{recipe.name}, source {name!r}" if name else recipe.name
