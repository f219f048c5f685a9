"""`IndexedWebDataModule`: indexed shards as the loaders of a Lightning trainer. Imports lightning."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from lightning.pytorch.utilities.model_helpers import is_overridden

from headrace.webdatamodule._shared.ranks import Mesh, Ranks
from headrace.webdatamodule.loading.batching import Batching
from headrace.webdatamodule.loading.factories import BatchSamplerFactory, SamplerFactory
from headrace.webdatamodule.loading.options import Collate, Loading, OnError, SeedPer
from headrace.webdatamodule.loading.sizes import SizeOf, Sizes, sizes_of_shards
from headrace.webdatamodule.planned_datamodule import PlannedDataModule
from headrace.webdatamodule.shards import IndexedShards, decode_member
from headrace.webdatamodule.shards.decoding.limits import MAX_BYTES
from headrace.webdatamodule.shards.decoding.sample_decoder import Decode
from headrace.webdatamodule.shards.reading.options import Reading
from headrace.webdatamodule.split_names import NESTED, ForSplits, PerSplit, Split, named_sources

_SIZES = "the name of a column, the key of a member, whose bytes count, or a function of the sample"
_DECODERS = "decoders of members with such names are {'train': {'member': function, ...}}"


class SharedShardsWarning(UserWarning):
    """One set of shards serves training and validation."""


class IndexedWebDataModule(PlannedDataModule):
    """Indexed tar shards as train, val, test and predict loaders of a Lightning trainer, with exact resume.

    `transform` and `collate_fn` receive a sample as a dictionary of its `__key__` and its decoded members. Batches are
    a function of the shards, the options, the seed and the epoch; every rank gets the same number. A checkpoint saved
    at any moment stores the position, and resumes there with any number of ranks and workers: no sample is lost or
    repeated. Training batches are shuffled in each epoch anew; validation, test and predict deliver every sample in the
    same order every time.

    `shards`, `batch_size`, `batch_sampler`, `sizes`, `sampler`, `decode`, `transform`, `collate_fn`, `num_workers`,
    `keys` and `on_error` may be mappings from `Split` or the names of splits; a single value serves all splits, but a
    single `sampler` only training. `predict` uses `Split.predict`, or `Split.test` if there is no predict split.

    Args:
        shards: A directory indexed by `index_shards` or `write_shards`, its `manifest.json`, a list of tar files, a URL
            or a `Remote`. In a mapping, the keys are splits; a split of several sources is {name: one of these}, as in
            {"train": {"web": directory, "books": directory}, "val": directory}.
        batch_size: Samples of a batch on each rank.
        batch_sampler: Alternative to `batch_size`: a function that returns a batch sampler by size, see
            `BatchSamplerFactory`, such as `functools.partial(DistributedSizeAwareBatchSampler, max_total_size=16384)`.
        sizes: Sizes of the samples for `batch_sampler`: a column of the manifest, the key of a member (its size in
            bytes), or a function of the decoded sample, which is evaluated once and stored as a column.
        sampler: A function that returns the order of the training samples, see `SamplerFactory`, such as
            `functools.partial(WeightedDistributedSampler, weights={name: weight})`. Validation, test and predict keep
            the order of the data, every sample once; only a mapping, {split: function}, orders them too.
        shuffle: Whether training batches of `batch_size` are shuffled. False is refused with a `sampler` or a
            `batch_sampler`, which determine the order themselves.
        drop_last: Whether training leaves out samples that do not fill a batch of `batch_size` on every rank;
            refused with a `batch_sampler`, which has its own options.
        decode: Decoder of members; see `IndexedShards`.
        transform: Called with each decoded sample, in the worker.
        collate_fn: Converts a list of samples to a batch, in the worker; None: torch's `default_collate`.
        num_workers: Number of worker processes; they persist across epochs.
        seed: Seed of the order and the batches, 0 to 2**64 - 1.
        allowed_classes: Classes that pickles may use; see `decode_member`.
        keys: Members to read; None: all.
        verify: When to compare checksums; see `IndexedShards`.
        max_bytes: Maximum bytes of a member, stored and decoded; None: the default of `IndexedShards`.
        on_error: "raise" the error of a sample that is damaged or cannot be decoded, or "skip" the sample, warn and
            count it. An `UnsafePickleError` is always raised.
        seed_per: What the random numbers of transforms depend on. "step": seed, split, epoch, step and rank, in workers
            only. "sample": seed, epoch and sample, the same with any number of ranks and workers; then each sample
            seeds the global generators of `random`, numpy and torch's CPU, in 10 to 40 microseconds. See
            `ResumableLoader` and `sample_rng`.
        prefetch_factor: Batches that each worker prefetches; None: 2.
        pin_memory: Whether batches are copied to pinned memory; None: if there is a GPU.
        timeout: Seconds to wait for a batch of the workers before an error; 0 for no limit.
        multiprocessing_context: Start method of workers: "fork", "forkserver" or "spawn"; see torch.
        log_stats: Whether to give the figures of `ResumableLoader.metrics` to the trainer's loggers during a fit, every
            `log_every_n_steps`; and to log, at the end of each stage, the delivered samples of each source, padding and
            skipped samples.
        num_replicas: Number of data-parallel ranks; by default the trainer's or the process group's.
        rank: This rank; by default the trainer's or the process group's.
        mesh: In place of both, a 1-D `DeviceMesh` of the data-parallel ranks.
        accept: What may differ from the run that saved the checkpoint to resume from: arguments of the batches, such as
            {"batch_size"} or, of a `batch_sampler`, {"max_total_size"}, and "data" for samples that were appended. The
            rest of the epoch, new samples included, is delivered with the new ones.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument has a value that is not allowed.

    >>> import tempfile
    >>> from headrace.webdatamodule import index_shards, write_tars
    >>> folder = tempfile.mkdtemp()
    >>> _ = write_tars([(f"s{i}", {"json": b"%d" % i}) for i in range(10)], folder, n_shards=2)
    >>> _ = index_shards(folder)
    >>> module = IndexedWebDataModule(folder, batch_size=4, seed=1)
    >>> module.setup("fit")
    >>> loader = module.train_dataloader()
    >>> len(loader), sorted(number for batch in loader for number in batch["json"].tolist())
    (3, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    """

    def __init__(
        self,
        shards: Any,
        *,
        batch_size: ForSplits[int] | None = None,
        batch_sampler: ForSplits[BatchSamplerFactory] | None = None,
        sizes: ForSplits[SizeOf] | None = None,
        sampler: ForSplits[SamplerFactory] | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        decode: ForSplits[Decode] = decode_member,
        transform: ForSplits[Callable[[Any], Any]] | None = None,
        collate_fn: ForSplits[Collate] | None = None,
        num_workers: ForSplits[int] = 0,
        seed: int = 0,
        allowed_classes: Collection[Any] = (),
        keys: ForSplits[Sequence[str]] | None = None,
        verify: Any = "read",
        max_bytes: int | None = None,
        on_error: ForSplits[OnError] = "raise",
        seed_per: SeedPer = "step",
        prefetch_factor: int | None = None,
        pin_memory: bool | None = None,
        timeout: float = 600.0,
        multiprocessing_context: Any = None,
        log_stats: bool = False,
        num_replicas: int | None = None,
        rank: int | None = None,
        mesh: Mesh | None = None,
        accept: Collection[str] = (),
    ) -> None:
        places = PerSplit("shards", shards, cure=NESTED)
        if places.mapped and not places.given:
            raise ValueError("shards is empty: give at least one split, such as {'train': directory}")
        splits = [split for split in Split if split in places]
        ranks = Ranks(num_replicas, rank, mesh)
        batching = Batching.by_split(
            splits,
            batch_size=batch_size,
            batch_sampler=batch_sampler,
            sizes=sizes,
            sampler=sampler,
            shuffle=shuffle,
            drop_last=drop_last,
            seed=seed,
            ranks=ranks,
            sizes_are=_SIZES,
        )
        loading = Loading.by_split(
            splits,
            collate_fn=collate_fn,
            num_workers=num_workers,
            on_error=on_error,
            seed_per=seed_per,
            prefetch_factor=prefetch_factor,
            pin_memory=pin_memory,
            timeout=timeout,
            multiprocessing_context=multiprocessing_context,
        )
        decoders = PerSplit("decode", decode, decode_member, mappings=True, cure=_DECODERS)
        transforms, members = PerSplit("transform", transform), PerSplit("keys", keys)
        limit = MAX_BYTES if max_bytes is None else max_bytes
        reading = {
            split: Reading(members[split], decoders[split], transforms[split], verify, allowed_classes, limit)
            for split in splits
        }
        sources = {split: named_sources(f"shards[{split.name!r}]", places[split], split.name) for split in splits}
        data = {split: ShardsOfSplit(split, sources[split], reading[split], loading[split]) for split in splits}
        super().__init__("shards", data, batching, loading, ranks=ranks, log_stats=log_stats, accept=accept)
        self._shared = not places.mapped

    def prepare_data(self) -> None:
        """Evaluate sizes that a function gives, and keep them beside the shards. One process per node does it."""
        for split in self._splits.values():
            if callable(split.batching.sizes) and split.batching.batch_sampler is not None:
                split.evaluate_sizes()

    def setup(self, stage: str) -> None:
        """Open the shards that a stage needs. Runs in every process.

        Args:
            stage: "fit", "validate", "test" or "predict".

        Raises:
            ValueError: An unknown stage, or a split that it needs is missing.
            FileNotFoundError: There is nothing at a split's place.
            ShardError: There is no index or no manifest, or it is damaged.

        Warns:
            SharedShardsWarning: One set of shards serves training and validation.
        """
        super().setup(stage)
        model = None if self.trainer is None or stage != "fit" else self.trainer.lightning_module
        if self._shared and model is not None and is_overridden("validation_step", model):
            message = "shards has no splits, so that validation reads what training reads"
            warnings.warn(f"{message}: pass {{'train': ..., 'val': ...}}", SharedShardsWarning, stacklevel=2)


@dataclass(frozen=True)
class ShardsOfSplit:
    """The shards of a split: the place of each source, by its name, and how samples are read."""

    split: Split
    places: Mapping[str, Any]
    reading: Reading
    loading: Loading  # with which a function of the sizes is evaluated

    def open(self) -> IndexedShards:
        """Open the shards, as they are now."""
        return IndexedShards(self.places, **self.reading.arguments())

    def evaluate(self, sizes: Any) -> Sizes:
        """Return the sizes; a function is called for each decoded sample, unless its results were kept."""
        decode, keys = self.reading.decode, self.reading.keys
        untransformed = replace(self.reading, transform=None).arguments()
        parts = [
            sizes_of_shards(
                IndexedShards(place, **untransformed),
                place,
                sizes,
                num_workers=self.loading.num_workers,
                name=name,
                reading=() if decode is decode_member and keys is None else (decode, keys),
                on_error=self.loading.on_error,
            )
            for name, place in self.places.items()
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def in_words(self) -> str:
        """The place, or the names of several sources."""
        if [*self.places] != [self.split.name]:
            return f"of {', '.join(self.places)}"
        place = self.places[self.split.name]
        return f"of {place}" if isinstance(place, str | os.PathLike) else f"of a {type(place).__name__}"
