"""The pipeline from the shards of one directory to tuples of decoded members."""

from collections.abc import Sequence
from typing import Any

import webdataset as wds

from headrace.webdatamodule.options import check_options_wds, own_split, resampled, shuffles
from headrace.webdatamodule.passes import CurrentPass, ShardSource, SplitByRank
from headrace.webdatamodule.reading import Extract, OpenLocal
from headrace.webdatamodule.recipe import Recipe
from headrace.webdatamodule.streaming.assigning import is_exact
from headrace.webdatamodule.streaming.ranges import RangeSource
from headrace.webdatamodule.urls import scheme_of


def read_shards(recipe: Recipe, name: str, urls: Sequence[str], current: CurrentPass) -> wds.WebDataset:
    """Shards to tuples of decoded members.

    Args:
        recipe: What the pipeline is made of.
        name: Name of the source; empty when it is the only one.
        urls: Its shards.
        current: The pass that the stages look at.

    Returns:
        The dataset, not yet iterated. Its first stage is a `RangeSource` when samples are split among the ranks.
    """
    options, seed = checked_options(recipe)
    if seed is not None and name:
        seed = f"{seed}/{name}"
    if not own_split(options):
        options["nodesplitter"] = SplitByRank(current)
    dataset = wds.WebDataset(list(urls), shardshuffle=False, **options)
    if is_exact(recipe, name, urls):
        dataset.pipeline = [RangeSource(urls, recipe.keys, seed, current, even=recipe.mix is not None)]
    else:
        if not resampled(options):
            dataset.pipeline[0] = ShardSource(urls, seed, current)
        if scheme_of(recipe.places[name]) != "pipe":
            _replace_opener(dataset, options.get("handler", wds.reraise_exception))
    return dataset.compose(Extract(recipe.keys, recipe.allowed_classes))


def checked_options(recipe: Recipe) -> tuple[dict[str, Any], int | str | None]:
    """The options of webdataset's, and the seed of the shards' order.

    Args:
        recipe: Where they are from.

    Returns:
        The options without those that are ours, and the seed; None when the shards are not shuffled.

    Raises:
        ValueError: An option is unknown or not allowed.
    """
    where = f"kwargs_wds[Split.{recipe.name}]"
    options = {"empty_check": False, **check_options_wds(where, recipe.kwargs_wds)}
    shuffle = shuffles(f"{where}['shardshuffle']", options.pop("shardshuffle", False))
    # Our source shuffles all shards, before they are split: detshuffle's work, for all ranks at once.
    options.pop("detshuffle", None)
    return options, recipe.seed if shuffle else None


def _replace_opener(dataset: wds.WebDataset, handler: Any) -> None:
    openers = (wds.cache.StreamingOpen, wds.cache.FileCache)
    [position] = [i for i, stage in enumerate(dataset.pipeline) if isinstance(stage, openers)]
    dataset.pipeline[position] = OpenLocal(handler)
