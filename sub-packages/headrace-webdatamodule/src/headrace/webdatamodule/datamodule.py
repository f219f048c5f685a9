"""`Split`, `WebDataModule` and `PickledDataWDS`: tar shards as streams. Imports lightning and webdataset."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import CombinedLoader

from headrace.webdatamodule._shared.checks import checked_int
from headrace.webdatamodule._shared.display import counted
from headrace.webdatamodule._shared.ranks import Ranks
from headrace.webdatamodule.base_datamodule import BaseDataModule
from headrace.webdatamodule.shards.writing.pack_files import pack_files
from headrace.webdatamodule.split_names import BySplit, Split, by_split, named_sources
from headrace.webdatamodule.streaming.pipeline import (
    StreamDataset,
    StreamOptions,
    calls_of,
    open_stream,
    stages_of,
)
from headrace.webdatamodule.streaming.stream_loader import StreamLoader, open_loader
from headrace.webdatamodule.streaming.stream_sources import Mix, check_place, local_directory

__all__ = ["PickledDataWDS", "Split", "WebDataModule"]

_Place = str | PathLike[str]
_Calls = Sequence[tuple[str, Mapping[str, Any]]]


class StreamSplit:
    """A split that is read as a stream."""

    options = None  # the state of its loader has them
    dataset: StreamDataset  # once it is open

    def __init__(self, stream: StreamOptions) -> None:
        self.stream = stream

    def open(self) -> None:
        """Open the shards, as they are now."""
        self.dataset = open_stream(self.stream)

    def loader(self, ranks: Ranks) -> StreamLoader:
        """Make a loader for these ranks."""
        if not hasattr(self, "dataset"):
            self.open()
        return open_loader(self.dataset, ranks.current, ranks.mesh)

    def in_words(self) -> str:
        """The number of samples of an epoch, and the places."""
        places = ", ".join(name or place for name, place in self.stream.places.items())
        return f"{counted(self.stream.n_samples, 'sample')} of {places}"


class WebDataModule(BaseDataModule[StreamSplit]):
    """Tar shards as train, val, test and predict loaders of a Lightning trainer, read as a stream.

    For each split a sample passes: the shards, sorted by name (or shuffled, see `kwargs_wds`) -> split among ranks and
    workers -> the members named by `suffix_keys_wds`, decoded by their extension without running code, as a tuple ->
    `pipeline_wds` -> out of the worker -> `pipeline_prebatch_wld`, where the batching belongs -> the trainer.

    `Trainer.fit()` needs the train split and uses the val split if there is one; `validate()` needs val; `test()`
    needs test; `predict()` uses predict, or test if there is no predict split. Arguments that are mappings take
    members of `Split` or their names, such as "train".

    **Epochs.** A loader yields `ceil(n_samples / global_batch_size)` batches per epoch on every rank; this is also its
    `len()`. With batches of `global_batch_size / ranks` samples and the correct `n_samples`, the epoch has every sample
    once. If the shards end earlier, the loader rereads them, because a rank that stops early would leave the others
    waiting; but a val, test or predict loader on one rank has a shorter epoch. If samples remain, they are left out of
    the epoch. In both cases a warning gives the numbers, once. The train loader has a different order in each epoch,
    which depends only on the seed and the epoch number; the other loaders have the same order every time.

    **Several ranks.** If all shards have an index beside them (from `index_shards`, or a writer of this package), all
    ranks and workers get equal parts of the samples, for any sizes of the shards; at most `ranks - 1` samples repeat,
    with a warning. Otherwise each rank reads complete shards, every n-th of the list. With shards of unequal size some
    ranks then repeat samples and others leave some out, with warnings; fewer shards than ranks are refused. All ranks
    always yield the same number of batches. Ranks are the data-parallel ranks, read at the start of an epoch;
    tensor-parallel ranks of a trainer get the same batches.

    **Resuming.** The module stores the epoch and the number of trained batches. So a fit resumes in mid-epoch from
    Lightning's checkpoints, including those after an error, with the same numbers of ranks and workers. The earlier
    batches are reread and skipped; for long epochs, `IndexedWebDataModule` resumes without that cost. A checkpoint of
    other shards, seeds or options is refused.

    Args:
        n_samples: Samples per epoch for each split, over all ranks.
        suffix_keys_wds: Member key, or keys, to extract: "tensor.pyd" is the member "<sample key>.tensor.pyd" of the
            tar file. Samples become tuples, also with one key.
        dirs_tars_wds: Directory of the shards for each split; or several, `{name: directory}`, with a `mix`.
        global_batch_size: Samples per batch over all ranks. It does not batch: it sets the epoch's length.
        prefix_tars_wds: Shards are `{directory}/{prefix_tars_wds}-*.tar`; those of `write_shards` have "shard".
        pipeline_wds: For each split a composable, or several, applied to the samples in the workers: a callable from
            iterator to iterator, such as `webdataset.shuffle(100)`. A `random.Random` in a stage of webdataset's, or
            the `seed` of its shuffle, seeds a generator for each epoch, rank and worker. A shuffle with neither uses
            the `seed` of `kwargs_wds` (default 0). What stages draw from the global generators of `random`, numpy and
            torch in a worker is seeded in the same way, unless `kwargs_wld` has a `worker_init_fn`.
        pipeline_prebatch_wld: The same for samples as they leave the workers; batch here.
        kwargs_wds: For each split, options of `webdataset.WebDataset`. A true `shardshuffle` shuffles all shards,
            differently in each epoch of training, by `seed` (default 0). `nodesplitter` is `webdataset.split_by_node`
            by default.
        kwargs_wld: For each split, options of `webdataset.WebLoader`, such as `num_workers`. As in every DataLoader
            that does not batch, arrays become tensors and tuples lists on the way out of it; a `collate_fn` that
            returns its argument keeps them.
        invoke_wds: For each split, (method name, kwargs) pairs: called on the WebDataset last.
        invoke_wld: The same for the WebLoader, such as `[("with_epoch", {"nbatches": 100})]`.
        allowed_classes: Classes and functions that pickles in the shards may use, beyond tensors, arrays, numbers and
            builtin containers; themselves, or named as "module.Name".
        mix: For each split with several directories a callable that receives `{name: iterable of samples}` and returns
            one iterable, such as `functools.partial(InterleavedDataset, weights={...}, stopping="endless")` of
            headrace.weighted_sampler. Each worker calls it for each pass. Samples are mixed before `pipeline_wds`; an
            epoch has `n_samples` samples of the mixture.
        exact: Whether ranks share samples rather than shards: True needs an index beside each shard and refuses
            options that forbid it, False shares shards, None shares samples if possible.
        num_replicas: Number of data-parallel ranks; the trainer's, else the process group's, when not given.
        rank: This data-parallel rank, 0 to `num_replicas - 1`; given together with `num_replicas`.
        mesh: Instead of both, a 1-D DeviceMesh of the data-parallel ranks, or anything with `size()` and
            `get_local_rank()`.

    Raises:
        TypeError: A mapping whose keys are not splits, or values of the wrong kind.
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
        n_samples: BySplit[int],
        suffix_keys_wds: str | Iterable[str],
        dirs_tars_wds: BySplit[_Place] | BySplit[Mapping[str, _Place]] | BySplit[_Place | Mapping[str, _Place]],
        global_batch_size: int,
        prefix_tars_wds: str = "wdshards",
        pipeline_wds: BySplit[Any] | None = None,
        pipeline_prebatch_wld: BySplit[Any] | None = None,
        kwargs_wds: BySplit[Mapping[str, Any]] | None = None,
        kwargs_wld: BySplit[Mapping[str, Any]] | None = None,
        invoke_wds: BySplit[_Calls] | None = None,
        invoke_wld: BySplit[_Calls] | None = None,
        *,
        allowed_classes: Collection[type | Callable[..., Any] | str] = (),
        mix: BySplit[Mix] | None = None,
        exact: bool | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        mesh: Any = None,
    ) -> None:
        counts = {
            split: checked_int(f"n_samples[{split.name!r}]", count, 1)
            for split, count in by_split("n_samples", n_samples).items()
        }
        places = {
            split: _checked_places(f"dirs_tars_wds[{split.name!r}]", given)
            for split, given in by_split("dirs_tars_wds", dirs_tars_wds).items()
        }
        mixes = _checked_mixes(places, by_split("mix", mix))
        batch_size = checked_int("global_batch_size", global_batch_size, 1)
        keys = _member_keys(suffix_keys_wds)
        stages_wds = by_split("pipeline_wds", pipeline_wds)
        stages_wld = by_split("pipeline_prebatch_wld", pipeline_prebatch_wld)
        options_wds = by_split("kwargs_wds", kwargs_wds)
        options_wld = by_split("kwargs_wld", kwargs_wld)
        calls_wds = by_split("invoke_wds", invoke_wds)
        calls_wld = by_split("invoke_wld", invoke_wld)
        options = {
            split: StreamOptions(
                name=split.name,
                places=places[split],
                prefix=prefix_tars_wds,
                keys=keys,
                n_samples=count,
                global_batch_size=batch_size,
                training=split is Split.train,
                stages_wds=stages_of(f"pipeline_wds[{split.name!r}]", stages_wds.get(split)),
                stages_wld=stages_of(f"pipeline_prebatch_wld[{split.name!r}]", stages_wld.get(split)),
                kwargs_wds=options_wds.get(split) or {},
                kwargs_wld=options_wld.get(split) or {},
                invoke_wds=calls_of(f"invoke_wds[{split.name!r}]", calls_wds.get(split)),
                invoke_wld=calls_of(f"invoke_wld[{split.name!r}]", calls_wld.get(split)),
                allowed_classes=tuple(allowed_classes),
                mix=mixes.get(split),
                exact=exact,
            )
            for split, count in counts.items()
            if split in places
        }
        splits = {split: StreamSplit(own) for split, own in options.items()}
        super().__init__(splits, {"n_samples": counts, "dirs_tars_wds": places}, Ranks(num_replicas, rank, mesh))

    def prepare_data(self) -> None:
        """Do nothing: the shards exist. Lightning calls this in one process per node."""

    def val_dataloader(self) -> Any:
        """Return the loader of the val split; without a val split none, so that fit runs without it."""
        if Split.val in self._splits:
            return self._loader(Split.val)
        return _NoLoaders() if self._in_stage else []

    def _check_state(self, state: Any) -> None:
        if not isinstance(state, Mapping) or (state and "train" not in state):
            raise TypeError(f"state_dict must be what state_dict() returned, got {state!r}")

    def _options_in_words(self) -> str:
        split = next(iter(self._splits.values()), None)
        return "" if split is None else f"global_batch_size={split.stream.global_batch_size}"

    def _open(self, split: Split) -> None:
        super()._open(split)
        self._splits[split].dataset.check_ranks(*self._present_ranks().current())


class PickledDataWDS(WebDataModule):
    """Pickle files of a directory, packed into shards, as a data module.

    `prepare_data` packs `{dir_pickles}/{name}.{suffix}` of each name of a split into shards in the
    split's directory. The sample's key is `name.replace(".", "-")`, the suffix is its member key. The
    bytes are copied, never unpickled; the loaders read as `WebDataModule` does. The shards of a split are
    kept while the sizes and times of its files stay the same; when one changes, all of them are written
    again. Shards with other samples are never changed. After a killed run, the next run writes the rest.

    Each shard gets an index, and each directory a `manifest.json`, so that `IndexedShards` can read them.
    A directory with other tar files is refused, because the manifest would make all of them one set.

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
        names_subset: BySplit[Sequence[str]],
        *args: Any,
        n_tars_wds: int | None = None,
        **kwargs: Any,
    ) -> None:
        self._names = {
            split: _names(f"names_subset[{split.name!r}]", names)
            for split, names in by_split("names_subset", names_subset).items()
        }
        super().__init__({split: len(names) for split, names in self._names.items()}, *args, **kwargs)
        self._source = Path(dir_pickles).expanduser().absolute()
        self._n_tars = None if n_tars_wds is None else checked_int("n_tars_wds", n_tars_wds, 1)
        for split in self._names:
            places = self._splits[split].stream.places if split in self._splits else {}
            if list(places) != [""]:
                raise ValueError(f"names_subset has {split.name!r}, dirs_tars_wds has not: add its directory")

    def prepare_data(self) -> None:
        """Write the shards of all splits, their indexes and manifests, unless they are there and up to date.

        Lightning calls this in one process per node.

        Raises:
            FileNotFoundError: Pickle files are missing.
            FileExistsError: Other tar files, or shards that hold other samples, are in the way.
            ShardError: Two names that differ only in dots and dashes, a name that cannot be stored, or a file
                that cannot be read any more.
            ManifestError: Files have changed, and a manifest has columns that belong to the shards as they are.
            OSError: The disk is full or the like; it names the shard.
        """
        for split, names in self._names.items():
            stream = self._splits[split].stream
            pack_files(
                self._source,
                names,
                stream.keys,
                local_directory(stream.places[""]),
                n_shards=self._n_tars,
                prefix=stream.prefix,
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


def _checked_places(name: str, given: Any) -> dict[str, str]:
    """Directories by name; a single one has an empty name."""
    return {
        source: check_place(f"{name}[{source!r}]" if source else name, place)
        for source, place in named_sources(name, given, "").items()
    }


def _checked_mixes(places: Mapping[Split, Mapping[str, str]], mixes: Mapping[Split, Any]) -> dict[Split, Any]:
    """The functions that mix: one for each split of several directories, and for no other."""
    what = "a callable from {name: iterable} to one iterable"
    for split, sources in places.items():
        if "" not in sources and split not in mixes:
            raise ValueError(
                f"dirs_tars_wds[{split.name!r}] names {len(sources)} sources: add mix={{{split.name!r}: {what}}}"
            )
    for split, mix in mixes.items():
        if "" in places.get(split, {"": ""}):
            raise ValueError(
                f"mix has {split.name!r}, but dirs_tars_wds[{split.name!r}] is not a mapping {{name: directory}}"
            )
        if not callable(mix):
            raise TypeError(f"mix[{split.name!r}] must be {what}, got {mix!r}")
    return dict(mixes)


def _member_keys(given: Any) -> tuple[str, ...]:
    """`suffix_keys_wds` as a tuple."""
    keys = (given,) if isinstance(given, str) else tuple(given) if hasattr(given, "__iter__") else (given,)
    for key in keys:
        if not isinstance(key, str):
            raise TypeError(f"suffix_keys_wds must be a str or several, such as 'tensor.pyd', got {key!r}")
    if not keys or not all(keys):
        raise ValueError(f"suffix_keys_wds must name at least one member key, got {given!r}")
    for key in keys:
        if key.startswith("."):
            raise ValueError(f"suffix_keys_wds has no leading dot: write {key.lstrip('.')!r}, got {key!r}")
    return keys
