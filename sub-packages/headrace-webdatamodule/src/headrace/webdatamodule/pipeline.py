"""A split's shards to a loader: how the stages are put together."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import webdataset as wds

from headrace.webdatamodule.composing import invoke
from headrace.webdatamodule.epoch import Epoch, EpochLoader, Tally
from headrace.webdatamodule.options import check_options_wds, check_options_wld, own_split, resampled, shuffles
from headrace.webdatamodule.passes import CurrentPass, ShardSource, SplitByRank, rank_and_world, reseed
from headrace.webdatamodule.reading import Extract, OpenLocal
from headrace.webdatamodule.shards.allowed import AllowedClass
from headrace.webdatamodule.urls import scheme_of, shard_urls


@dataclass(frozen=True)
class Recipe:
    """All that one split's pipeline is made of, checked.

    Attributes:
        name: Name of the split, for messages.
        place: Directory of the shards, or a `pipe:` URL.
        prefix: Begin of the shards' names.
        keys: Member keys to extract.
        n_samples: Samples an epoch over all ranks.
        global_batch_size: Samples a batch over all ranks.
        begin_again: Whether to begin the shards again when they run dry before the epoch's end.
        stages_wds: Composables on the samples, in the workers.
        stages_wld: Composables on the samples as they leave the workers.
        kwargs_wds: For WebDataset.
        kwargs_wld: For WebLoader.
        invoke_wds: Method calls on the WebDataset, last.
        invoke_wld: Method calls on the WebLoader, last.
        allowed_classes: What pickles may use beyond the default.
    """

    name: str
    place: str
    prefix: str
    keys: tuple[str, ...]
    n_samples: int
    global_batch_size: int
    begin_again: bool
    stages_wds: Sequence[Any] = ()
    stages_wld: Sequence[Any] = ()
    kwargs_wds: Mapping[str, Any] = field(default_factory=dict)
    kwargs_wld: Mapping[str, Any] = field(default_factory=dict)
    invoke_wds: Sequence[tuple[str, Mapping[str, Any]]] = ()
    invoke_wld: Sequence[tuple[str, Mapping[str, Any]]] = ()
    allowed_classes: Collection[AllowedClass] = ()

    @property
    def n_batches(self) -> int:
        """Batches an epoch on each rank: n_samples / global_batch_size, rounded up."""
        return -(-self.n_samples // self.global_batch_size)


class SplitData:
    """One split's dataset, and the loaders made of it.

    Args:
        recipe: What it is made of.

    Raises:
        FileNotFoundError: There are no shards.
        ValueError: An option that is unknown or that the pipeline sets itself, or a method that does not exist.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.options_wld = check_options_wld(f"kwargs_wld[Split.{recipe.name}]", recipe.kwargs_wld)
        self.current = CurrentPass()
        self.urls = shard_urls(recipe.place, recipe.prefix)
        self.dataset = make_dataset(recipe, self.urls, self.current)

    def loader(self, first_epoch: int = 0) -> EpochLoader:
        """A loader of batches.

        Args:
            first_epoch: Number of the first epoch, which chooses the order of the shards.

        Raises:
            ValueError: More readers than shards, or a method that does not exist.
        """
        recipe = self.recipe
        check_readers(recipe, len(self.urls), rank_and_world()[1])
        promise = f"n_samples={recipe.n_samples}, global_batch_size={recipe.global_batch_size}"
        epoch = Epoch(
            recipe.name,
            recipe.n_batches,
            promise,
            begin_again=recipe.begin_again,
            endless=resampled(recipe.kwargs_wds) or self.dataset.repetitions != 1,
            tally=Tally(),
        )
        loader = EpochLoader(self.dataset, recipe.stages_wld, epoch, self.current, first_epoch, **self.options_wld)
        invoked: EpochLoader = invoke(f"invoke_wld[Split.{recipe.name}]", loader, recipe.invoke_wld)
        return reseed(invoked, 1, self.current)


def make_dataset(recipe: Recipe, urls: Sequence[str], current: CurrentPass) -> wds.WebDataset:
    """Shards to tuples of decoded members, and through the user's composables.

    Args:
        recipe: What the pipeline is made of.
        urls: The shards.
        current: The pass that the stages look at.

    Returns:
        The dataset, not yet iterated.
    """
    where = f"[Split.{recipe.name}]"
    options = {"empty_check": False, **check_options_wds(f"kwargs_wds{where}", recipe.kwargs_wds)}
    shuffle = shuffles(f"kwargs_wds{where}['shardshuffle']", options.pop("shardshuffle", False))
    # Our source shuffles all shards, before they are split: detshuffle's work, for all ranks at once.
    options.pop("detshuffle", None)
    if not own_split(options):
        options["nodesplitter"] = SplitByRank(current)
    dataset = wds.WebDataset(list(urls), shardshuffle=False, **options)
    seed = options.get("seed")
    if not resampled(options):
        dataset.pipeline[0] = ShardSource(urls, (0 if seed is None else seed) if shuffle else None, current)
    if scheme_of(recipe.place) != "pipe":
        _replace_opener(dataset, options.get("handler", wds.reraise_exception))
    own = len(dataset.pipeline)
    dataset = dataset.compose(Extract(recipe.keys, recipe.allowed_classes), *recipe.stages_wds)
    return reseed(invoke(f"invoke_wds{where}", dataset, recipe.invoke_wds), own, current)


def check_readers(recipe: Recipe, n_shards: int, world: int) -> None:
    """Refuse more readers than shards: some would have nothing to read.

    Args:
        recipe: Names the workers. Splitters of the user's own are taken to know what they do.
        n_shards: Number of shards.
        world: Number of ranks.

    Raises:
        ValueError: With the numbers.
    """
    workers = recipe.kwargs_wld.get("num_workers", 0)
    if own_split(recipe.kwargs_wds) or "workersplitter" in recipe.kwargs_wds or resampled(recipe.kwargs_wds):
        return
    if (readers := world * max(1, workers)) > n_shards:
        raise ValueError(
            f"{recipe.name}: {n_shards} shards cannot be shared by {readers} readers ({world} ranks with"
            f" num_workers={workers}): each reads whole shards and needs at least one. Lower num_workers in"
            f" kwargs_wld[Split.{recipe.name}], or write at least {readers} shards"
        )


def _replace_opener(dataset: wds.WebDataset, handler: Any) -> None:
    openers = (wds.cache.StreamingOpen, wds.cache.FileCache)
    [position] = [i for i, stage in enumerate(dataset.pipeline) if isinstance(stage, openers)]
    dataset.pipeline[position] = OpenLocal(handler)
