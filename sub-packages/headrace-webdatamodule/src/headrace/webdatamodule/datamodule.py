"""The data modules of streams. Imports lightning, as `indexed_module.py` does."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch.utilities import CombinedLoader

from headrace.webdatamodule.composing import calls_of, stages_of
from headrace.webdatamodule.pipeline import Recipe, SplitData
from headrace.webdatamodule.shards.decoding.allowed import AllowedClass
from headrace.webdatamodule.shards.writing.pack_files import pack_files
from headrace.webdatamodule.splits import (
    Split,
    by_split,
    check_mixes,
    needed_by,
    positive_int,
    stage_name,
    suffix_keys,
)
from headrace.webdatamodule.streaming.mixing import Mix
from headrace.webdatamodule.streaming.resumable import EpochLoader
from headrace.webdatamodule.trainer.following import follow_trainer
from headrace.webdatamodule.urls import check_place, local_directory, scheme_of

__all__ = ["PickledDataWDS", "Split", "WebDataModule"]


class WebDataModule(lightning.LightningDataModule):
    """Tar shards as train, val and test loaders of a Lightning trainer.

    For each split the way of a sample is: shards, sorted by name (or shuffled, see `kwargs_wds`) ->
    split among ranks and workers -> the members named by `suffix_keys_wds`, decoded by their extension
    without running code, as a tuple -> `pipeline_wds` -> out of the worker -> `pipeline_prebatch_wld`,
    where the batching belongs -> the trainer.

    `Trainer.fit()` needs the train split and takes the val split if there is one; `validate()` needs
    val; `test()` and `predict()` need test.

    **Epochs.** A loader yields `ceil(n_samples / global_batch_size)` batches an epoch on every rank, and
    its `len()` says so. With batches of `global_batch_size / ranks` samples and the right `n_samples`,
    that is every sample once. When the shards run dry earlier, the loader begins them again, because a rank
    that stops early would leave the others waiting; but a val or test loader on one rank has a shorter epoch.
    When samples remain, they are left out of the epoch. Either way a warning tells the numbers, once.

    **Several ranks.** Where all shards have an index beside them (`index_shards`, or any writer of this package that
    makes them), all ranks and workers get equal shares of the samples, whatever the shards hold; at most
    `ranks - 1` samples come twice, and a warning says so. Otherwise each rank reads whole shards, every world-th of
    the list, and shards of unequal size make some ranks repeat samples and others leave some out, as the warnings
    say; fewer shards than ranks are refused. All ranks yield equally many batches in any case.

    **Resuming.** The module and the train loader keep the epoch and the batches of it that were trained on, so
    that a fit goes on in mid-epoch from Lightning's checkpoints, also from those after an error or a stop in
    mid-epoch, with the same numbers of ranks and workers. With
    an index, and stages of webdataset's that give one sample for one (`map`, `map_tuple`, ...) and one
    `batched(n)`, the loader begins at the position; otherwise it reads the epoch up to there again, and a warning
    says why. A checkpoint of other shards, seeds or options is refused. A function for `map` that drops samples by
    returning None belongs into `webdataset.select` when several ranks train.

    Args:
        n_samples: Samples an epoch for each split, over all ranks.
        suffix_keys_wds: Member key, or keys, to extract: "tensor.pyd" is the member
            "<sample key>.tensor.pyd" of the tar file. Samples become tuples, also with one key.
        dirs_tars_wds: Directory of the shards for each split; or several, `{name: directory}`, with a `mix`.
        global_batch_size: Samples a batch over all ranks. It does not batch: it sets the epoch's length.
        prefix_tars_wds: Shards are `{directory}/{prefix_tars_wds}-*.tar`; those of `write_shards` have "shard".
        pipeline_wds: For each split a composable, or several, applied to the samples in the workers: a
            callable from iterator to iterator, such as `webdataset.shuffle(100)`. A `random.Random` in a
            stage of webdataset's, or the `seed` of its shuffle, is the seed of a generator for each
            epoch, rank and worker. A shuffle with neither takes the `seed` of `kwargs_wds` (default 0).
        pipeline_prebatch_wld: The same for samples as they leave the workers; batch here.
        kwargs_wds: For each split, options of `webdataset.WebDataset`. A true `shardshuffle` shuffles all
            shards, differently each epoch, by `seed` (default 0). `nodesplitter` is
            `webdataset.split_by_node` by default.
        kwargs_wld: For each split, options of `webdataset.WebLoader`, such as `num_workers`. As in every
            DataLoader that does not batch, arrays become tensors and tuples lists on the way out of it;
            a `collate_fn` that returns its argument keeps them.
        invoke_wds: For each split, (method name, kwargs) pairs: called on the WebDataset at last.
        invoke_wld: The same for the WebLoader, such as `[("with_epoch", {"nbatches": 100})]`.
        allowed_classes: Classes and functions that pickles in the shards may use, beyond tensors, arrays,
            numbers and builtin containers; themselves, or named as "module.Name".
        allow_pipe: Whether `dirs_tars_wds` may hold `pipe:` URLs, which run a shell.
        mix: For each split with several directories a callable that gets `{name: iterable of samples}` and returns
            one iterable, such as `functools.partial(InterleavedDataset, weights={...}, stopping="endless")` of
            headrace.weighted_sampler. Each worker calls it for each pass. Samples are mixed before `pipeline_wds`;
            an epoch has `n_samples` samples of the mixture.
        exact: Whether ranks share samples rather than shards: True needs an index beside each shard and refuses
            options that forbid it, False shares shards, None shares samples if possible.

    Raises:
        TypeError: A mapping whose keys are not `Split`s, or values of the wrong kind.
        ValueError: A count below 1, or a URL that is not allowed.

    >>> import tempfile, webdataset as wds
    >>> from headrace.webdatamodule import write_tars
    >>> samples = [(f"s{i}", {"json": b"%d" % i}) for i in range(10)]
    >>> folder = tempfile.mkdtemp()
    >>> _ = write_tars(samples, folder, n_shards=2)
    >>> batch = [lambda source: (x for (x,) in source), wds.batched(4, collation_fn=None)]
    >>> module = WebDataModule(
    ...     {Split.train: 10}, "json", {Split.train: folder}, 4, pipeline_prebatch_wld={Split.train: batch}
    ... )
    >>> module.setup("fit")
    >>> len(module.train_dataloader()), list(module.train_dataloader())
    (3, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]])
    """

    def __init__(
        self,
        n_samples: Mapping[Split, int],
        suffix_keys_wds: str | Iterable[str],
        dirs_tars_wds: Mapping[Split, str | PathLike[str] | Mapping[str, str | PathLike[str]]],
        global_batch_size: int,
        prefix_tars_wds: str = "wdshards",
        pipeline_wds: Mapping[Split, Any] | None = None,
        pipeline_prebatch_wld: Mapping[Split, Any] | None = None,
        kwargs_wds: Mapping[Split, Mapping[str, Any]] | None = None,
        kwargs_wld: Mapping[Split, Mapping[str, Any]] | None = None,
        invoke_wds: Mapping[Split, Sequence[tuple[str, Mapping[str, Any]]]] | None = None,
        invoke_wld: Mapping[Split, Sequence[tuple[str, Mapping[str, Any]]]] | None = None,
        *,
        allowed_classes: Collection[AllowedClass] = (),
        allow_pipe: bool = False,
        mix: Mapping[Split, Mix] | None = None,
        exact: bool | None = None,
    ) -> None:
        super().__init__()
        self._n_samples = {
            split: positive_int(f"n_samples[{split}]", count)
            for split, count in by_split("n_samples", n_samples).items()
        }
        given = by_split("dirs_tars_wds", dirs_tars_wds)
        mixes = check_mixes(given, by_split("mix", mix))
        self._sources = {
            split: {
                name: check_place(f"dirs_tars_wds[{split}][{name!r}]", place, allow_pipe=allow_pipe)
                for name, place in places.items()
            }
            for split, places in given.items()
            if isinstance(places, Mapping)
        }
        self._places = {
            split: check_place(f"dirs_tars_wds[{split}]", place, allow_pipe=allow_pipe)
            for split, place in given.items()
            if not isinstance(place, Mapping)
        }
        self._keys = suffix_keys(suffix_keys_wds)
        self._prefix = prefix_tars_wds
        batch_size = positive_int("global_batch_size", global_batch_size)
        stages_wds = by_split("pipeline_wds", pipeline_wds)
        stages_wld = by_split("pipeline_prebatch_wld", pipeline_prebatch_wld)
        options_wds = by_split("kwargs_wds", kwargs_wds)
        options_wld = by_split("kwargs_wld", kwargs_wld)
        calls_wds = by_split("invoke_wds", invoke_wds)
        calls_wld = by_split("invoke_wld", invoke_wld)
        self._recipes = {
            split: Recipe(
                name=split.name,
                place=self._sources.get(split) or self._places[split],
                prefix=prefix_tars_wds,
                keys=self._keys,
                n_samples=count,
                global_batch_size=batch_size,
                begin_again=split is Split.train,
                stages_wds=stages_of(f"pipeline_wds[{split}]", stages_wds.get(split)),
                stages_wld=stages_of(f"pipeline_prebatch_wld[{split}]", stages_wld.get(split)),
                kwargs_wds=options_wds.get(split) or {},
                kwargs_wld=options_wld.get(split) or {},
                invoke_wds=calls_of(f"invoke_wds[{split}]", calls_wds.get(split)),
                invoke_wld=calls_of(f"invoke_wld[{split}]", calls_wld.get(split)),
                allowed_classes=tuple(allowed_classes),
                mix=mixes.get(split),
                exact=exact,
            )
            for split, count in self._n_samples.items()
            if split in given
        }
        self._data: dict[Split, SplitData] = {}
        self._train: Any = None
        self._resumed: Mapping[str, Any] | None = None  # of the checkpoint to go on from
        self._left: dict[str, Any] = {}  # of a stage that is over, for a checkpoint that is saved after it

    def prepare_data(self) -> None:
        """Nothing to do: the shards exist. Lightning calls this in one process per node."""

    def setup(self, stage: str) -> None:
        """Find the shards that a stage needs and build their pipelines. Runs in every process.

        Args:
            stage: "fit", "validate", "test" or "predict".

        Raises:
            ValueError: An unknown stage, a split that the stage needs is missing, or an unknown option in
                kwargs_wds or kwargs_wld.
            FileNotFoundError: A split has no shards.
        """
        stage = stage_name(stage)
        needed = needed_by(stage)
        self._need(needed, f"{stage}()")
        if stage == "fit":
            self._left = {}
        wanted = {needed} | ({Split.val} & self._recipes.keys() if stage == "fit" else set())
        self._data.update({split: SplitData(self._recipes[split]) for split in wanted})

    def train_dataloader(self) -> Any:
        """The loader of the train split; begins with the trainer's epoch, when there is a trainer."""
        self._train = self._loader(Split.train, self.trainer.current_epoch if self.trainer else 0)
        if self._resumed is not None and hasattr(self._train, "load_state_dict"):
            self._train.load_state_dict(self._resumed)
            self._resumed = None
        if isinstance(self._train, EpochLoader):
            follow_trainer(self, self._train)
        return self._train

    def val_dataloader(self) -> Any:
        """The loader of the val split; no loader when there is no val split, so that fit goes without."""
        if Split.val in self._recipes:
            return self._loader(Split.val)
        return _NoLoaders() if self.trainer else []

    def test_dataloader(self) -> Any:
        """The loader of the test split."""
        return self._loader(Split.test)

    def predict_dataloader(self) -> Any:
        """The same as `test_dataloader`."""
        return self.test_dataloader()

    def state_dict(self) -> dict[str, Any]:
        """Where the train loader stands; a trainer keeps it in its checkpoints."""
        if self._resumed is not None:
            return {"train": dict(self._resumed)}
        return {"train": self._train.state_dict()} if hasattr(self._train, "state_dict") else self._left

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next train loader go on where a state was saved.

        Args:
            state_dict: As `state_dict` made it. `train_dataloader` compares it with the shards and the options.
        """
        self._resumed = state_dict.get("train")

    def teardown(self, stage: str) -> None:  # noqa: ARG002 - the trainer's interface
        """Forget where a stage stood: the next one begins anew, unless it is given a checkpoint."""
        self._end()

    def on_exception(self, exception: BaseException) -> None:  # noqa: ARG002 - the trainer's interface
        """The same, after an error."""
        self._end()

    def _end(self) -> None:
        self._left = self.state_dict()
        self._train = self._resumed = None

    def _loader(self, split: Split, first_epoch: int = 0) -> Any:
        self._need(split, f"{split.name}_dataloader()")
        if split not in self._data:
            self._data[split] = SplitData(self._recipes[split])
        return self._data[split].loader(first_epoch)

    def _need(self, split: Split, what: str) -> None:
        places = [*self._places, *self._sources]
        arguments: dict[str, Collection[Split]] = {"n_samples": self._n_samples, "dirs_tars_wds": places}
        for name, given in arguments.items():
            if split not in given:
                have = ", ".join(map(str, given)) or "no split"
                raise ValueError(f"{what} needs {split}, but {name} has {have}: add {name}[{split}]")


class PickledDataWDS(WebDataModule):
    """Pickle files of a directory, packed into shards, as a data module.

    `prepare_data` packs `{dir_pickles}/{name}.{suffix}` of each name of a split into shards in the
    split's directory. The sample's key is `name.replace(".", "-")`, the suffix is its member key. The
    bytes are copied, never unpickled; what the loaders read, they read as `WebDataModule` does. Shards
    that are up to date are kept, and shards that hold other samples are never touched. After a run that
    was killed, the next one writes the rest.

    Each shard gets its index, and each directory a `manifest.json`, so that `IndexedShards` reads them as
    they are. Splits that share a directory with other tar files get indexes, but no manifest: it would make
    one set of them all.

    Args:
        dir_pickles: Directory of the pickle files.
        names_subset: File names without suffix for each split. Their number is `n_samples`.
        *args: Arguments of `WebDataModule` after `n_samples`: `suffix_keys_wds`, `dirs_tars_wds`,
            `global_batch_size`, ...
        n_tars_wds: Shards per split; as many as samples when there are fewer of those. None: 16, or as
            many as keep shards below 256 MiB.
        **kwargs: Keyword arguments of `WebDataModule`.

    Raises:
        TypeError: Names that are not lists of text, and what `WebDataModule` raises.
        ValueError: A split of `names_subset` without names or without a directory in `dirs_tars_wds`,
            and what `WebDataModule` raises.
    """

    def __init__(
        self,
        dir_pickles: str | PathLike[str],
        names_subset: Mapping[Split, Sequence[str]],
        *args: Any,
        n_tars_wds: int | None = None,
        **kwargs: Any,
    ) -> None:
        self._names = {
            split: _names(f"names_subset[{split}]", names)
            for split, names in by_split("names_subset", names_subset).items()
        }
        super().__init__({split: len(names) for split, names in self._names.items()}, *args, **kwargs)
        self._source = Path(dir_pickles).expanduser().absolute()
        self._n_tars = None if n_tars_wds is None else positive_int("n_tars_wds", n_tars_wds)
        for split in self._names:
            if split not in self._places:
                raise ValueError(f"names_subset has {split}, dirs_tars_wds has not: add its directory")
            if scheme_of(self._places[split]) == "pipe":
                raise ValueError(f"dirs_tars_wds[{split}] is a pipe: shards are written to directories only")

    def prepare_data(self) -> None:
        """Write the shards of all splits, their indexes and manifests, unless they are there and up to date.

        Lightning calls this in one process per node.

        Raises:
            FileNotFoundError: Pickle files are missing.
            FileExistsError: Shards of the same prefix that hold other samples are in the way.
            ShardError: Two names that differ only in dots and dashes, a name that cannot be stored, or a file
                that cannot be read any more.
            ManifestError: A manifest has columns that belonged to shards as they were before.
            OSError: The disk is full or the like; it names the shard.
        """
        for split, names in self._names.items():
            pack_files(
                self._source,
                names,
                self._keys,
                local_directory(self._places[split]),
                n_shards=self._n_tars,
                prefix=self._prefix,
            )


class _NoLoaders(CombinedLoader):
    """No loaders: a trainer goes without. It would take an empty list for one loader, and warn of it."""

    def __init__(self) -> None:
        super().__init__([])

    @property
    def flattened(self) -> list[Any]:
        return []

    @flattened.setter
    def flattened(self, flattened: list[Any]) -> None:
        pass


def _names(argument: str, given: Any) -> list[str]:
    names = [given] if isinstance(given, str) else list(given)
    if isinstance(given, str) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{argument} must be a list of names, got {given!r}")
    if not names:
        raise ValueError(f"{argument} is empty: name the split's samples, or leave the split out")
    return names
