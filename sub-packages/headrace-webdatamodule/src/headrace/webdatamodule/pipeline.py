"""A split's shards to a loader: how the stages are put together."""

from collections.abc import Mapping, Sequence
from typing import Any

import webdataset as wds

from headrace.webdatamodule.composing import invoke
from headrace.webdatamodule.epoch import Epoch, Tally
from headrace.webdatamodule.options import check_options_wld, resampled
from headrace.webdatamodule.passes import CurrentPass, as_given, rank_and_world, reseed
from headrace.webdatamodule.recipe import Recipe
from headrace.webdatamodule.streaming.assigning import check_readers, tell_padding
from headrace.webdatamodule.streaming.counting import counted
from headrace.webdatamodule.streaming.fingerprint import fingerprint
from headrace.webdatamodule.streaming.mixing import Mixed, SourcePass, SourceStream
from headrace.webdatamodule.streaming.one_source import read_shards
from headrace.webdatamodule.streaming.ranges import RangeSource
from headrace.webdatamodule.streaming.resumable import EpochLoader
from headrace.webdatamodule.urls import shard_urls

__all__ = ["Recipe", "SplitData", "check_readers"]


class SplitData:
    """One split's dataset, and the loaders made of it.

    Args:
        recipe: What it is made of.

    Raises:
        FileNotFoundError: There are no shards.
        ValueError: An option that is unknown or that the pipeline sets itself, a method that does not exist, more
            ranks than shards, or `exact` without indexes.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.options_wld = check_options_wld(f"kwargs_wld[Split.{recipe.name}]", recipe.kwargs_wld)
        self.current = CurrentPass()
        self.urls = {name: shard_urls(place, recipe.prefix) for name, place in recipe.places.items()}
        self.dataset, self.sources = make_dataset(recipe, self.urls, self.current)
        self.fingerprint = fingerprint(recipe, self.urls, self.sources)
        self._checked = 0
        self._check(rank_and_world()[1])

    def loader(self, first_epoch: int = 0) -> Any:
        """A loader of batches: an `EpochLoader`, unless a method in `invoke_wld` returns something else.

        Args:
            first_epoch: Number of the first epoch, which chooses the order of the shards.

        Raises:
            ValueError: More ranks than shards, or a method that does not exist.
        """
        recipe, (rank, world) = self.recipe, rank_and_world()
        self._check(world)
        epoch = Epoch(
            recipe.name,
            recipe.n_batches,
            f"n_samples={recipe.n_samples}, global_batch_size={recipe.global_batch_size}",
            begin_again=recipe.begin_again,
            endless=self._endless,
            tally=Tally(),
        )
        loader = EpochLoader(
            self.dataset, recipe.stages_wld, epoch, self.current, first_epoch, self.fingerprint, **self.options_wld
        )
        invoked: Any = invoke(f"invoke_wld[Split.{recipe.name}]", loader, recipe.invoke_wld)
        reseed(invoked, 2, self.current, f"{recipe.seed}/outside")
        if isinstance(invoked, EpochLoader) and world == 1 and not (recipe.begin_again or self._endless):
            invoked.shorten()
        if rank == 0 and not recipe.mix:
            tell_padding(recipe, self.sources[""], world)
        return invoked

    @property
    def _endless(self) -> bool:
        # Of a mixture an epoch is what was promised: whether it ends by itself is the mixture's affair.
        recipe = self.recipe
        return recipe.mix is not None or resampled(recipe.kwargs_wds) or self.dataset.repetitions != 1

    def _check(self, world: int) -> None:
        if world == self._checked:
            return
        self._checked = world
        for name, source in self.sources.items():
            if source is None:
                check_readers(self.recipe, len(self.urls[name]), world, name)


def make_dataset(
    recipe: Recipe, urls: Mapping[str, Sequence[str]], current: CurrentPass
) -> tuple[wds.WebDataset, dict[str, RangeSource | None]]:
    """Shards to tuples of decoded members, and through the user's composables.

    Args:
        recipe: What the pipeline is made of.
        urls: The shards of each source.
        current: The pass that the stages look at.

    Returns:
        The dataset, not yet iterated, and of each source what reads its samples by their numbers; None where the
        shards are read whole.
    """
    read: dict[str, RangeSource | None] = {}
    if recipe.mix is None:
        dataset = read_shards(recipe, "", urls[""], current)
        read[""] = _range_source(dataset)
    else:
        streams = {}
        for name in urls:
            own = SourcePass(current)
            dataset = read_shards(recipe, name, urls[name], own)
            streams[name], read[name] = SourceStream(dataset, own), _range_source(dataset)
        dataset = dataset.compose()
        dataset.pipeline = [Mixed(streams, recipe.mix, current)]
    own_stages = len(dataset.pipeline)
    dataset = dataset.compose(*recipe.stages_wds)
    dataset = invoke(f"invoke_wds[Split.{recipe.name}]", dataset, recipe.invoke_wds)
    dataset = reseed(dataset, own_stages, current, recipe.seed)
    inside = counted(map(as_given, dataset.pipeline[own_stages:]))
    if (source := read.get("")) is not None and not isinstance(inside, str):
        source.inside = inside
    return dataset, read


def _range_source(dataset: wds.WebDataset) -> RangeSource | None:
    source = dataset.pipeline[0]
    return source if isinstance(source, RangeSource) else None
