"""`IndexedWebDataModule`. Imports lightning, as `datamodule.py` does."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.model_helpers import is_overridden

from headrace.webdatamodule.indexed.arguments import PerSplit, named_sources, seed_int
from headrace.webdatamodule.indexed.checking import BATCHING, check_arguments, check_loading
from headrace.webdatamodule.indexed.delivering import Damaged
from headrace.webdatamodule.indexed.opening import Opening
from headrace.webdatamodule.indexed.options import differences, in_words
from headrace.webdatamodule.indexed.outcomes import in_order
from headrace.webdatamodule.indexed.plain import PlainBatchSampler
from headrace.webdatamodule.indexed.protocols import Batching, Ordering
from headrace.webdatamodule.indexed.sizes import SizeOf, Sizes
from headrace.webdatamodule.indexed.sources import Sources
from headrace.webdatamodule.indexed.tally import Reports
from headrace.webdatamodule.loader import ResumableLoader, has_state
from headrace.webdatamodule.shards.decoding.allowed import AllowedClass
from headrace.webdatamodule.shards.decoding.decode import decode_member
from headrace.webdatamodule.shards.decoding.limits import MAX_BYTES
from headrace.webdatamodule.shards.reading.dataset import Check
from headrace.webdatamodule.splits import Split, needed_by, stage_name
from headrace.webdatamodule.trainer.following import follow_trainer

VERSION = 1


class SharedShardsWarning(UserWarning):
    """One set of shards serves training and validation."""


class IndexedWebDataModule(lightning.LightningDataModule):
    """Indexed tar shards as train, val and test loaders of a Lightning trainer: exact, and resumed exactly.

    A sample reaches `transform` and `collate_fn` as a dictionary of its `__key__` and its decoded members. Batches are
    a function of the shards, the options, the seed and the epoch; every rank gets as many. A checkpoint at any moment
    holds where the run stood, and goes on there with any number of ranks and workers: no sample is lost, none comes
    twice. Batches in the training split are shuffled anew in each epoch; those of the others come in one order.

    `shards` to `num_workers`, `keys` and `damaged` may be mappings from `Split`; one value serves all splits. `predict`
    uses `Split.test`.

    Args:
        shards: What `index_shards` or `write_shards` left: a directory, its `manifest.json`, a list of tar files, a URL
            or a `Remote`; or several sources as {name: one of these}.
        batching: Samples of a batch on each rank; or a callable that makes the batches by size, see `Batching`, such
            as `functools.partial(DistributedSizeAwareBatchSampler, max_total_size=16384)`.
        sizes: Of the samples, for a callable `batching`: a column of the manifest, the key of a member, whose bytes
            count, or a function of the decoded sample. What a function says is evaluated once, and kept as a column.
        order: A callable that makes the order of the samples, see `Ordering`, such as
            `functools.partial(WeightedDistributedSampler, weights={name: weight})`.
        decode: As of `IndexedShards`.
        transform: Gets each decoded sample, in the worker.
        collate_fn: Makes a batch of a list of samples, in the worker; torch's `default_collate` when None.
        num_workers: Processes that read ahead; they stay from epoch to epoch.
        seed: Of the order and the batches, 0 to 2**64 - 1.
        allowed_classes: What pickles may use; see `decode_member`.
        keys: Members to read; all when None.
        check: When to compare checksums; see `IndexedShards`.
        max_bytes: Most bytes of a member, stored and decoded; see `IndexedShards`.
        damaged: "raise" the error of a sample that is damaged or cannot be decoded, or "skip" the sample, warn and
            count it.
        prefetch_factor: Batches that each worker reads ahead; 2 when None.
        pin_memory: Whether batches are copied to memory that a GPU reads directly; when None, if there is one.
        timeout: Seconds to wait for a batch of the workers before it is an error.
        multiprocessing_context: How workers are started; see torch.
        report: Whether to log, at the end of each stage, what was delivered: samples of each source, padding, skipped.

    Raises:
        TypeError: An argument of the wrong kind.
        ValueError: An argument that is not allowed.

    >>> import tempfile
    >>> from headrace.webdatamodule import index_shards, write_tars
    >>> folder = tempfile.mkdtemp()
    >>> _ = write_tars([(f"s{i}", {"json": b"%d" % i}) for i in range(10)], folder, n_shards=2)
    >>> _ = index_shards(folder)
    >>> module = IndexedWebDataModule(folder, batching=4, seed=1)
    >>> module.setup("fit")
    >>> loader = module.train_dataloader()
    >>> len(loader), sorted(number for batch in loader for number in batch["json"].tolist())
    (3, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    """

    def __init__(
        self,
        shards: Any,
        *,
        batching: int | Batching | Mapping[Split, int | Batching],
        sizes: SizeOf | Mapping[Split, SizeOf] | None = None,
        order: Ordering | Mapping[Split, Ordering] | None = None,
        decode: Any = decode_member,
        transform: Callable[[Any], Any] | Mapping[Split, Callable[[Any], Any]] | None = None,
        collate_fn: Callable[[list[Any]], Any] | Mapping[Split, Callable[[list[Any]], Any]] | None = None,
        num_workers: int | Mapping[Split, int] = 0,
        seed: int = 0,
        allowed_classes: Collection[AllowedClass] = (),
        keys: Sequence[str] | Mapping[Split, Sequence[str]] | None = None,
        check: Check = "read",
        max_bytes: int = MAX_BYTES,
        damaged: Damaged | Mapping[Split, Damaged] = "raise",
        prefetch_factor: int | None = None,
        pin_memory: bool | None = None,
        timeout: float = 600.0,
        multiprocessing_context: Any = None,
        report: bool = False,
    ) -> None:
        super().__init__()
        self._shards, self._batching = PerSplit("shards", shards), PerSplit("batching", batching)
        self._sizes, self._order = PerSplit("sizes", sizes), PerSplit("order", order)
        self._decode = PerSplit("decode", decode, decode_member)
        self._transform, self._collate_fn = PerSplit("transform", transform), PerSplit("collate_fn", collate_fn)
        self._num_workers = PerSplit("num_workers", num_workers, 0)
        self._damaged = PerSplit("damaged", damaged, "raise")
        self._keys, self._check, self._allowed = PerSplit("keys", keys), check, tuple(allowed_classes)
        self._max_bytes = max_bytes
        self._seed, self._report = seed_int(seed), report
        check_loading(timeout, prefetch_factor)
        self._loading = {
            "prefetch_factor": prefetch_factor,
            "pin_memory": pin_memory,
            "timeout": timeout,
            "multiprocessing_context": multiprocessing_context,
        }
        per_split = (self._shards, self._batching, self._sizes, self._order, self._transform, self._collate_fn)
        check_arguments({one.name: one for one in (*per_split, self._num_workers, self._damaged)}, check)
        self._hide_val()
        self._data: dict[Split, Sources] = {}
        self._found_sizes: dict[Split, Sizes | None] = {}
        self._loaders: dict[Split, ResumableLoader] = {}
        self._reports = Reports()
        self._predicted: list[Sequence[int]] = []
        self._by_words = False  # whether options are all that tells one order or batching from another
        self._saved: dict[str, Any] | None = None  # of the checkpoint to go on from
        self._left: dict[str, Any] = {}  # of a stage that is over, for a checkpoint that is saved after it

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "val_dataloader"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._hide_val()

    def _hide_val(self) -> None:
        """A trainer looks whether there is a method for validation, and warns of one that has nothing to give."""
        if Split.val not in self._shards:
            inherited = lightning.LightningDataModule.val_dataloader
            self.val_dataloader = MethodType(inherited, self)  # type: ignore[method-assign]

    def prepare_data(self) -> None:
        """Evaluate sizes that a function gives, and keep them beside the shards. One process per node does it."""
        for split in Split:
            if split in self._shards and callable(self._sizes[split]) and callable(self._batching[split]):
                self._size(split)

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
        needed = needed_by(stage)
        self._left = {} if stage == "fit" else self._left
        if stage == "fit" and not self._shards.mapped and self._validates():
            told = "shards has no Split keys, so that validation reads what training reads"
            warnings.warn(f"{told}: pass {{Split.train: ..., Split.val: ...}}", SharedShardsWarning, stacklevel=2)
        self._need(needed, f"{stage}()")
        for split in (needed, Split.val) if stage == "fit" else (needed,):
            if split in self._shards:
                self._open_again(split)

    def train_dataloader(self) -> ResumableLoader:
        """The loader of the train split. It goes on where the checkpoint that is being resumed stood."""
        loader = self._loader(Split.train)
        follow_trainer(self, loader)
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
        """The loader of the test split; `predictions` puts in order what comes of it."""
        loader = self._loader(Split.test)
        self._predicted = []
        loader.on_batch = self._predicted.append
        return loader

    def predictions(self, outputs: Sequence[Any], *, gather: bool = False) -> list[tuple[str, Any]]:
        """What `Trainer.predict` returned, sample by sample, in the order of the shards and with their keys.

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
            raise TypeError(
                "outputs must be what Trainer.predict returned, got None: leave out return_predictions=False"
            )
        found = in_order(outputs, self._predicted)
        if gather and dist.is_available() and dist.is_initialized():
            parts: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(parts, found)
            found = sorted({index: row for part in parts[::-1] for index, row in part}.items())
        sources = self._opened(Split.test)
        return [(sources.key(index), row) for index, row in found]

    def report(self) -> Reports:
        """What each split's loader has delivered on this rank, in the stage at hand or in the last one with it."""
        return Reports({**self._reports, **{split: loader.report() for split, loader in self._loaders.items()}})

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: where the training split stands, the epoch included."""
        if Split.train in self._loaders:
            return {"version": VERSION, "train": self._loaders[Split.train].state_dict(), "options": self._options()}
        return self._saved or self._left

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint; it is checked as soon as the training split is needed.

        Raises:
            ValueError: It is of another version; and later, if it is of other shards, sizes, options or another seed.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"the checkpoint's data state must be a mapping, got {type(state_dict).__name__}")
        if state_dict and (state_dict.get("version") != VERSION or "train" not in state_dict):
            found = state_dict.get("version")
            raise ValueError(f"the checkpoint's data state has version {found!r}, this release reads {VERSION}")
        self._saved = state_dict or None
        if Split.train in self._loaders:
            self._go_on(self._loaders[Split.train])

    def teardown(self, stage: str) -> None:  # noqa: ARG002 - the trainer's interface
        """End the workers of a stage, and log what was delivered if `report` asks for it."""
        if self._report and not (dist.is_initialized() and dist.get_rank()):
            for loader in self._loaders.values():
                rank_zero_info(str(loader.report()))
        self._end()

    def on_exception(self, exception: BaseException) -> None:
        """End the workers, and note what was waited for if one of them was killed."""
        for loader in self._loaders.values():
            loader.explain(exception)
        self._end()

    def _end(self) -> None:
        self._left, self._reports = self.state_dict(), self.report()
        for loader in self._loaders.values():
            loader.close()
        self._loaders.clear()
        self._saved = None

    def _loader(self, split: Split) -> ResumableLoader:
        self._need(split, f"{split.name}_dataloader()")
        if split not in self._loaders:
            loader = self._loaders[split] = self._made(split)
            if split is Split.train:
                self._go_on(loader)
        return self._loaders[split]

    def _go_on(self, loader: ResumableLoader) -> None:
        if self._saved is None:
            return
        changed = differences(self._saved.get("options"), self._options())
        if changed and self._by_words:
            raise ValueError(f"the checkpoint does not fit: {changed}; resume with the same, or begin without it")
        try:
            loader.load_state_dict(self._saved["train"])
        except ValueError as error:
            raise ValueError(f"the checkpoint does not fit: {changed or 'see its cause'}. {error}") from error

    def _options(self) -> dict[str, str]:
        given = {"batching": self._batching, "sizes": self._sizes, "order": self._order}
        return {"seed": str(self._seed), **{name: in_words(one[Split.train]) for name, one in given.items()}}

    def _made(self, split: Split) -> ResumableLoader:
        sources, sizes = self._opened(split), self._size(split)
        world, rank = self._world()
        make, seed = self._batching[split], self._seed
        # The order is that of all ranks; the batches are what is dealt to them.
        order = None if self._order[split] is None else self._order[split](sources, num_replicas=1, rank=0, seed=seed)
        if not callable(make):
            make = partial(PlainBatchSampler, batch_size=operator.index(make), shuffle=split is Split.train)
            sized: Any = len(sources)
        else:
            sized = sizes
        try:
            batches = make(sized, sampler=order, num_replicas=world, rank=rank, seed=seed)
        except TypeError as error:
            error.add_note(f"as batching(sizes, sampler=..., num_replicas=..., rank=..., seed=...); {BATCHING}")
            raise
        if split is Split.train:
            unnamed = order is not None and getattr(order, "fingerprint", None) is None
            self._by_words = unnamed or not has_state(batches)
        pin = self._loading["pin_memory"]
        return ResumableLoader(
            sources,
            batches,
            collate_fn=self._collate_fn[split],
            num_workers=self._num_workers[split],
            damaged=self._damaged[split],
            sizes=sizes,
            seed=seed,
            world=(world, rank),
            name=split.name,
            **{**self._loading, "pin_memory": torch.cuda.is_available() if pin is None else pin},
        )

    def _open_again(self, split: Split) -> None:
        """Open a split as it is now; the shards may have been written anew since a former stage."""
        before = self._data.pop(split, None)
        if before is not None and before.fingerprint != self._opened(split).fingerprint:
            self._found_sizes.pop(split, None)
        self._opened(split)

    def _opened(self, split: Split) -> Sources:
        if split not in self._data:
            self._data[split] = self._opening(split).sources()
        return self._data[split]

    def _size(self, split: Split) -> Sizes | None:
        wanted = self._sizes[split]
        if wanted is None or not callable(self._batching[split]):
            return None
        if split not in self._found_sizes:
            self._found_sizes[split] = self._opening(split).sizes(wanted)
        return self._found_sizes[split]

    def _opening(self, split: Split) -> Opening:
        return Opening(
            named_sources(f"shards[{split}]", self._shards[split], split.name),
            keys=self._keys[split],
            decode=self._decode[split],
            transform=self._transform[split],
            check=self._check,
            allowed_classes=self._allowed,
            max_bytes=self._max_bytes,
            damaged=self._damaged[split],
            num_workers=self._num_workers[split],
        )

    def _world(self) -> tuple[int, int]:
        if self.trainer is not None:
            return self.trainer.world_size, self.trainer.global_rank
        if dist.is_available() and dist.is_initialized():
            return dist.get_world_size(), dist.get_rank()
        return 1, 0

    def _validates(self) -> bool:
        model = None if self.trainer is None else self.trainer.lightning_module
        return model is not None and is_overridden("validation_step", model)

    def _is_counted(self) -> bool:
        return self.trainer is None or not self.trainer.sanity_checking

    def _need(self, split: Split, what: str) -> None:
        if split not in self._shards:
            have = ", ".join(map(str, self._shards.given or ())) or "no split"
            raise ValueError(f"{what} needs {split}, but shards has {have}: add shards[{split}]")
