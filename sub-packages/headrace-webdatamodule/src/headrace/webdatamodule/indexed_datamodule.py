"""`IndexedWebDataModule`: indexed shards as the loaders of a Lightning trainer. Imports lightning."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any, TypeAlias, TypeVar

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.model_helpers import is_overridden

from headrace.webdatamodule._lightning import FitLoop, LastIndices
from headrace.webdatamodule.loader import ResumableLoader
from headrace.webdatamodule.loading.dataset import ConcatShards, OnError
from headrace.webdatamodule.loading.distributed import Mesh, TrainerMesh, check_given_ranks
from headrace.webdatamodule.loading.factories import (
    BATCH_SAMPLER,
    RANKS,
    BatchSamplerFactory,
    SamplerFactory,
    check_callable,
    check_factories,
    keywords_of,
    make_batches,
)
from headrace.webdatamodule.loading.options import (
    PerSplit,
    as_int,
    check_loading,
    describe_option,
    differences,
    named_sources,
    seed_int,
)
from headrace.webdatamodule.loading.position import has_state
from headrace.webdatamodule.loading.predictions import in_order
from headrace.webdatamodule.loading.sizes import SizeOf, Sizes
from headrace.webdatamodule.loading.split_data import SplitData
from headrace.webdatamodule.loading.stats import Reports
from headrace.webdatamodule.shards import decode_member
from headrace.webdatamodule.splits import Split, needed_by, stage_name

VERSION = 1
_T = TypeVar("_T")
Splits: TypeAlias = Mapping[Split | str, _T]


class SharedShardsWarning(UserWarning):
    """One set of shards serves training and validation."""


class IndexedWebDataModule(lightning.LightningDataModule):
    """Indexed tar shards as train, val, test and predict loaders of a Lightning trainer, resumed exactly.

    A sample reaches `transform` and `collate_fn` as a dictionary of its `__key__` and its decoded members. Batches are
    a function of the shards, the options, the seed and the epoch; every rank gets as many. A checkpoint of any moment
    holds the position, and resumes there with any number of ranks and workers: no sample is lost, none comes twice.
    Training batches are shuffled anew in each epoch; validation, test and predict deliver every sample in the same
    order every time.

    `shards` to `num_workers`, `keys` and `on_error` may be mappings from `Split` or the names of splits; one value
    serves all splits. `predict` uses `Split.predict`, or `Split.test` where there is none.

    Args:
        shards: A directory that `index_shards` or `write_shards` left, its `manifest.json`, a list of tar files, a URL
            or a `Remote`; or several sources as {name: one of these}.
        batch_size: Samples of a batch on each rank.
        batch_sampler: Instead, a function that makes batches by size, see `BatchSamplerFactory`, such as
            `functools.partial(DistributedSizeAwareBatchSampler, max_total_size=16384)`.
        sizes: Of the samples, for `batch_sampler`: a column of the manifest, the key of a member, whose bytes count, or
            a function of the decoded sample. A function is evaluated once, and its results are kept as a column.
        sampler: A function that makes the order of the samples, see `SamplerFactory`, such as
            `functools.partial(WeightedDistributedSampler, weights={name: weight})`.
        shuffle: Whether training batches of `batch_size` are shuffled, where there is no `sampler`.
        drop_last: Whether training leaves out samples that do not fill a batch of `batch_size` on every rank.
        decode: As of `IndexedShards`.
        transform: Called with each decoded sample, in the worker.
        collate_fn: Makes a batch of a list of samples, in the worker; torch's `default_collate` when None.
        num_workers: Processes that read ahead; they stay from epoch to epoch.
        seed: Of the order and the batches, 0 to 2**64 - 1.
        allowed_classes: Classes that pickles may use; see `decode_member`.
        keys: Members to read; all when None.
        verify: When to compare checksums; see `IndexedShards`.
        max_bytes: Most bytes of a member, stored and decoded; see `IndexedShards`, whose default holds when None.
        on_error: "raise" the error of a sample that is damaged or cannot be decoded, or "skip" the sample, warn and
            count it.
        prefetch_factor: Batches that each worker reads ahead; 2 when None.
        pin_memory: Whether batches are copied to memory that a GPU reads directly; when None, if there is one.
        timeout: Seconds to wait for a batch of the workers before it is an error; 0 for no limit.
        multiprocessing_context: How workers are started: "fork", "forkserver" or "spawn"; see torch.
        log_stats: Whether to log, at the end of each stage, the delivered samples of each source, padding and skipped
            samples.
        num_replicas: Number of data-parallel ranks, instead of the trainer's or the process group's.
        rank: This one, likewise.
        mesh: Instead of both, a 1-D `DeviceMesh` of the data-parallel ranks.

    Raises:
        TypeError: An argument of the wrong kind.
        ValueError: An argument that is not allowed.

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
        batch_size: int | Splits[int] | None = None,
        batch_sampler: BatchSamplerFactory | Splits[BatchSamplerFactory] | None = None,
        sizes: SizeOf | Splits[SizeOf] | None = None,
        sampler: SamplerFactory | Splits[SamplerFactory] | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        decode: Any = decode_member,
        transform: Callable[[Any], Any] | Splits[Callable[[Any], Any]] | None = None,
        collate_fn: Callable[[list[Any]], Any] | Splits[Callable[[list[Any]], Any]] | None = None,
        num_workers: int | Splits[int] = 0,
        seed: int = 0,
        allowed_classes: Collection[Any] = (),
        keys: Sequence[str] | Splits[Sequence[str]] | None = None,
        verify: Any = "read",
        max_bytes: int | None = None,
        on_error: OnError | Splits[OnError] = "raise",
        prefetch_factor: int | None = None,
        pin_memory: bool | None = None,
        timeout: float = 600.0,
        multiprocessing_context: Any = None,
        log_stats: bool = False,
        num_replicas: int | None = None,
        rank: int | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        super().__init__()
        self._shards, self._sizes = PerSplit("shards", shards), PerSplit("sizes", sizes)
        self._batch_size = PerSplit("batch_size", batch_size)
        self._batch_sampler = PerSplit("batch_sampler", batch_sampler)
        self._sampler, self._shuffle, self._drop_last = PerSplit("sampler", sampler), shuffle, drop_last
        self._decode = PerSplit("decode", decode, decode_member)
        self._transform, self._collate_fn = PerSplit("transform", transform), PerSplit("collate_fn", collate_fn)
        self._num_workers = PerSplit("num_workers", num_workers, 0)
        self._on_error, self._keys = PerSplit("on_error", on_error, "raise"), PerSplit("keys", keys)
        self._verify = verify
        self._seed, self._log_stats = seed_int(seed), log_stats
        self._loading = {
            "prefetch_factor": prefetch_factor,
            "timeout": timeout,
            "multiprocessing_context": multiprocessing_context,
        }
        self._pin_memory = pin_memory
        check_given_ranks(num_replicas, rank, mesh)
        self._ranks = (num_replicas, rank, mesh)
        self._check()
        self._hide_val()
        self._data = SplitData(
            self._shards,
            self._sizes,
            decode=self._decode,
            transform=self._transform,
            keys=self._keys,
            num_workers=self._num_workers,
            on_error=self._on_error,
            verify=verify,
            max_bytes=max_bytes,
            allowed_classes=allowed_classes,
        )
        self._loaders: dict[Split, ResumableLoader] = {}
        self._fit_loop: FitLoop | None = None
        self._reports = Reports()
        self._predicted: list[Sequence[int]] = []
        self._resized = False  # batch_size was set
        self._unnamed = False  # whether only their options tell one order or batch sampler from another
        self._saved: dict[str, Any] | None = None  # of the checkpoint to resume from
        self._left: dict[str, Any] = {}  # of a fit that is over, for a checkpoint that is saved after it

    def _check(self) -> None:
        if self._verify not in ("read", "open", "none"):
            raise ValueError(f"verify must be one of 'read', 'open', 'none', got {self._verify!r}")
        for name, value in (("shuffle", self._shuffle), ("drop_last", self._drop_last)):
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be True or False, got {value!r}; it is for training alone")
        loading = self._loading
        for split in Split:
            if split in self._shards:
                named_sources(f"shards[{split}]", self._shards[split], split.name)
                where = f"[{split}]" if self._num_workers.mapped or self._on_error.mapped else ""
                check_loading(
                    self._num_workers[split],
                    loading["prefetch_factor"],
                    loading["timeout"],
                    self._on_error[split],
                    where,
                )
                for argument in (self._transform, self._collate_fn):
                    check_callable(argument.name, argument[split], split)
                check_factories(
                    split,
                    self._batch_size[split],
                    self._batch_sampler[split],
                    self._sizes[split],
                    self._sampler[split],
                    ranks_given=any(value is not None for value in self._ranks),
                )
        if not any(self._batch_sampler[split] for split in Split) and any(self._sizes[split] for split in Split):
            raise ValueError(f"sizes is for batch_sampler, and there is none: give {BATCH_SAMPLER}")

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "val_dataloader"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._hide_val()

    def _hide_val(self) -> None:
        """A trainer looks whether there is a method for validation, and warns of one that has no loader."""
        if Split.val not in self._shards:
            inherited = lightning.LightningDataModule.val_dataloader
            self.val_dataloader = MethodType(inherited, self)  # type: ignore[method-assign]

    @property
    def batch_size(self) -> int | None:
        """Samples of a training batch on each rank, None with a `batch_sampler`; may be set between fits.

        Lightning's batch-size finder sets it.
        """
        size = self._batch_size[Split.train]
        return None if size is None else as_int("batch_size", size, 1)

    @batch_size.setter
    def batch_size(self, size: int) -> None:
        if self.batch_size is None and Split.train in self._shards:
            raise AttributeError("there is no batch_size to set: batch_sampler makes the batches")
        as_int("batch_size", size, 1)
        given = self._batch_size
        value = {**given.given, Split.train: size} if given.mapped else size
        self._batch_size, self._resized = PerSplit("batch_size", value), True
        if (loader := self._loaders.pop(Split.train, None)) is not None:
            loader.close()

    def prepare_data(self) -> None:
        """Evaluate sizes that a function gives, and keep them beside the shards. One process per node does it."""
        for split in Split:
            if split in self._shards and callable(self._sizes[split]) and self._batch_sampler[split] is not None:
                self._data.evaluate_sizes(split)

    def setup(self, stage: str) -> None:
        """Open the shards that a stage needs. Runs in every process.

        Args:
            stage: "fit", "validate", "test" or "predict".

        Raises:
            ValueError: An unknown stage, or a split that it needs is missing.
            FileNotFoundError: There is nothing at a split's place.
            ShardError: There is no index or no manifest, or it is damaged.
        """
        stage = stage_name(stage)
        needed = self._needed_by(stage)
        if self.trainer is not None:
            self._close()  # loaders that were made without it know neither its ranks nor its steps
        if stage == "fit":
            self._left = {}
            self._fit_loop = None if self.trainer is None else FitLoop(self)
            if not self._shards.mapped and self._validates():
                message = "shards has no splits, so that validation reads what training reads"
                warnings.warn(f"{message}: pass {{'train': ..., 'val': ...}}", SharedShardsWarning, stacklevel=2)
        self._need(needed, f"{stage}()")
        for split in (needed, Split.val) if stage == "fit" else (needed,):
            if split in self._shards:
                self._data.reopen(split)

    def train_dataloader(self) -> ResumableLoader:
        """The loader of the train split. It resumes where the checkpoint of the run stood."""
        loader = self._loader(Split.train)
        if self._fit_loop is not None and self._fit_loop.trainer is not None:
            self._fit_loop.begin()  # before the trainer asks for its length
        return loader

    def val_dataloader(self) -> ResumableLoader:
        """The loader of the val split; where there is none, fit goes without."""
        loader = self._loader(Split.val)
        loader.counts = self._is_counted
        return loader

    def test_dataloader(self) -> ResumableLoader:
        """The loader of the test split."""
        return self._loader(Split.test)

    def predict_dataloader(self) -> ResumableLoader:
        """The loader of the predict split, or the test split; `predictions` sorts what comes of it."""
        loader = self._loader(self._needed_by("predict"))
        self._predicted = []
        keeps = self.trainer is None or self.trainer.predict_loop.return_predictions
        loader.on_batch = self._predicted.append if keeps else None
        loader.batch_sampler = LastIndices(loader)
        return loader

    def predictions(self, outputs: Sequence[Any], *, gather: bool = False) -> list[tuple[str, Any]]:
        """The outputs of `Trainer.predict`, sample by sample, in the order of the shards and with their keys.

        Args:
            outputs: One for each batch: an array, a tensor or a list with one row for each sample, or a dictionary,
                tuple or named tuple of these.
            gather: Whether to put those of all ranks together, on each of them; all have to call it then.

        Returns:
            Pairs of a sample's key and its row; of this rank's samples, or of all, each once.

        Raises:
            TypeError: There are no outputs.
            ValueError: There are not as many outputs as batches, or rows as samples.
        """
        if outputs is None:
            raise TypeError("outputs must come from Trainer.predict, got None: leave out return_predictions=False")
        found = in_order(outputs, self._predicted)
        if gather and dist.is_available() and dist.is_initialized():
            parts: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(parts, found)
            found = sorted({index: row for part in parts[::-1] for index, row in part}.items())
        data = self._data.opened(self._needed_by("predict"))
        return [(data.key(index), row) for index, row in found]

    def report(self) -> Reports:
        """Statistics of each split's loader on this rank, in the present stage or the last one that used it."""
        return Reports({**self._reports, **{split: loader.report() for split, loader in self._loaders.items()}})

    def state_dict(self) -> dict[str, Any]:
        """The position in the training split, for a checkpoint."""
        if (loader := self._loaders.get(Split.train)) is not None:
            state = {"version": VERSION, "train": loader.state_dict(), "options": self._options()}
            return state if self._fit_loop is None else {**state, "trainer": self._fit_loop.epochs.state_dict(loader)}
        return self._saved or self._left

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a checkpoint; it is checked as soon as the training split is needed.

        A trainer that tests, validates or predicts with the weights of a checkpoint leaves the position alone.

        Raises:
            TypeError: It is no mapping.
            ValueError: It is of another version; and later, if it is of other shards, sizes, options or another seed.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"the checkpoint's data state must be a mapping, got {type(state_dict).__name__}")
        if state_dict and (state_dict.get("version") != VERSION or "train" not in state_dict):
            found = state_dict.get("version")
            raise ValueError(f"the checkpoint's data state has version {found!r}, this release reads {VERSION}")
        if self.trainer is not None and self.trainer.state.fn not in (None, "fit"):
            return
        self._saved = dict(state_dict) or None
        if self._saved and self._fit_loop is not None and "trainer" in state_dict:
            self._fit_loop.epochs.load_state_dict(state_dict["trainer"])
            self._fit_loop.allow_cuts()
        if Split.train in self._loaders:
            self._resume(self._loaders[Split.train])

    def teardown(self, stage: str) -> None:  # noqa: ARG002 - the trainer's interface
        """End the workers of a stage, and log its statistics if `log_stats` says so."""
        if self._log_stats and not (dist.is_available() and dist.is_initialized() and dist.get_rank()):
            for loader in self._loaders.values():
                rank_zero_info(str(loader.report()))
        self._end()

    def on_exception(self, exception: BaseException) -> None:
        """End the workers, and note the samples that were waited for if one of them was killed."""
        for loader in self._loaders.values():
            loader.explain(exception)
        self._end()

    def _end(self) -> None:
        self._left, self._reports = self.state_dict(), self.report()
        self._close()
        self._saved = self._fit_loop = None

    def _close(self) -> None:
        for loader in self._loaders.values():
            loader.close()
            loader.fit_loop = None  # whoever still has the loader has it without the trainer
        self._loaders.clear()

    def _loader(self, split: Split) -> ResumableLoader:
        self._need(split, f"{split.name}_dataloader()")
        if split not in self._loaders:
            loader = self._make_loader(split)
            if split is Split.train:
                self._resume(loader)
                if self._fit_loop is not None:
                    loader.fit_loop, self._fit_loop.loader = self._fit_loop, loader
            self._loaders[split] = loader
        return self._loaders[split]

    def _resume(self, loader: ResumableLoader) -> None:
        if self._saved is None:
            return
        train = self._saved["train"]
        if self._resized and isinstance(train, Mapping) and train.get("epoch") == train.get("steps") == 0:
            return  # the batch-size finder goes back to where it began, and nothing had been read
        changed = differences(self._saved.get("options"), self._options())
        cure = "resume with the options it was saved with, or start without the checkpoint"
        if changed and self._unnamed:
            raise ValueError(f"the checkpoint does not fit: {changed}; {cure}")
        try:
            loader.restore(train)
        except ValueError as error:
            raise ValueError(
                f"the checkpoint does not fit: {f'{changed}; {cure}. ' if changed else ''}{error}"
            ) from error

    def _options(self) -> dict[str, str]:
        given = (self._batch_size, self._batch_sampler, self._sizes, self._sampler)
        options = {argument.name: describe_option(argument[Split.train]) for argument in given}
        return {
            "seed": str(self._seed),
            **options,
            "shuffle": str(self._shuffle),
            "drop_last": str(self._drop_last),
        }

    def _make_loader(self, split: Split) -> ResumableLoader:
        data, sizes = self._data.opened(split), None
        if self._batch_sampler[split] is not None:
            sizes = self._data.sizes(split)
        training = split is Split.train
        ranks = self._ranks
        if self.trainer is not None and ranks == (None, None, None):
            ranks = (None, None, TrainerMesh(self.trainer))
        batches = partial(self._make_batches, split, data, sizes)
        if own := {name: value for name, value in keywords_of(self._batch_sampler[split]).items() if name in RANKS}:
            ranks = (own.get("num_replicas"), own.get("rank"), own.get("mesh"))
        loader = ResumableLoader(
            data,
            batches,
            collate_fn=self._collate_fn[split],
            num_workers=self._num_workers[split],
            on_error=self._on_error[split],
            sizes=sizes,
            seed=self._seed,
            num_replicas=ranks[0],
            rank=ranks[1],
            mesh=ranks[2],
            name=split.name,
            fixed_epoch=not training,
            pin_memory=torch.cuda.is_available() if self._pin_memory is None else self._pin_memory,
            **self._loading,
        )
        len(loader)  # makes the batch sampler, so that its errors come at once
        return loader

    def _make_batches(self, split: Split, data: ConcatShards, sizes: Sizes | None, num_replicas: int, rank: int) -> Any:
        """The batch sampler of a rank."""
        training = split is Split.train
        order, batches = make_batches(
            data,
            sizes,
            self._batch_size[split],
            self._batch_sampler[split],
            self._sampler[split],
            shuffle=training and self._shuffle,
            drop_last=training and self._drop_last,
            num_replicas=num_replicas,
            rank=rank,
            seed=self._seed,
        )
        if training:
            unnamed = order is not None and getattr(order, "fingerprint", None) is None
            self._unnamed = unnamed or not has_state(batches)
        return batches

    def _validates(self) -> bool:
        model = None if self.trainer is None else self.trainer.lightning_module
        return model is not None and is_overridden("validation_step", model)

    def _is_counted(self) -> bool:
        return self.trainer is None or not self.trainer.sanity_checking

    def _needed_by(self, stage: str) -> Split:
        return needed_by(stage, [split for split in Split if split in self._shards])

    def _need(self, split: Split, what: str) -> None:
        if split not in self._shards:
            have = ", ".join(map(str, self._shards.given or ())) or "no split"
            raise ValueError(f"{what} needs {split}, but shards has {have}: add shards[{split}]")
