"""How the batches of a split are made: of equal size, or by the functions of a user."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import InitVar, dataclass
from typing import Any

from torch.utils.data import SequentialSampler

from headrace.webdatamodule._shared.checks import checked_int
from headrace.webdatamodule._shared.ranks import Ranks
from headrace.webdatamodule.loading.batch_plans import has_state
from headrace.webdatamodule.loading.batch_sampler import DistributedBatchSampler
from headrace.webdatamodule.loading.factories import (
    RANKS,
    BatchSamplerFactory,
    SamplerFactory,
    call_factory,
    keywords_of,
)
from headrace.webdatamodule.loading.fingerprint import own_fingerprint
from headrace.webdatamodule.loading.options import describe_option, seed_int
from headrace.webdatamodule.split_names import PerSplit, Split

_BATCH_SAMPLER = (
    "a function that makes batches, such as functools.partial(DistributedSizeAwareBatchSampler, max_total_size=16384)"
)
_SAMPLER = "a function that makes the order, such as functools.partial(WeightedDistributedSampler, weights={'web': 3})"
_OF_TORCH = "lambda dataset, *, seed, **ranks: RandomSampler(dataset, generator=torch.Generator().manual_seed(seed))"
_CURE = "give validation, test and predict one without it, as batch_sampler={'train': ..., 'val': ...}"


class InOrder(SequentialSampler):
    """The samples in the order of the data."""

    @property
    def fingerprint(self) -> str:
        """Stands for the order, so that ranks need not compare it."""
        return f"in order {len(self)}"


@dataclass(frozen=True, kw_only=True)
class Batching:
    """How the batches of a split are made: the arguments of data modules, of which only training uses some."""

    split: Split
    batch_size: int | None
    batch_sampler: BatchSamplerFactory | None
    sizes: Any
    sampler: SamplerFactory | None
    shuffle: bool
    drop_last: bool
    seed: int
    ranks: Ranks  # that the data module was given
    sizes_are: InitVar[str] = ""  # what `sizes` may be, for errors

    @classmethod
    def by_split(
        cls, splits: Iterable[Split], *, batch_size: Any, batch_sampler: Any, sizes: Any, sampler: Any, **options: Any
    ) -> dict[Split, Batching]:
        """Return how each split is batched; the first four arguments may be mappings from splits."""
        size, factory = PerSplit("batch_size", batch_size), PerSplit("batch_sampler", batch_sampler)
        size_of, order = PerSplit("sizes", sizes), PerSplit("sampler", sampler)
        if not order.mapped:  # evaluation has to deliver every sample once
            order = PerSplit("sampler", {Split.train: sampler})
        if sizes is not None and not any(factory[split] for split in Split):
            raise ValueError(f"sizes is for batch_sampler, and there is none: give {_BATCH_SAMPLER}")
        return {
            split: cls(
                split=split,
                batch_size=size[split],
                batch_sampler=factory[split],
                sizes=size_of[split],
                sampler=order[split],
                **options,
            )
            for split in splits
        }

    def __post_init__(self, sizes_are: str) -> None:
        for name in ("shuffle", "drop_last"):
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {value!r}; it is for training alone")
        object.__setattr__(self, "seed", seed_int(self.seed))
        self._check_batches(sizes_are)
        self._check_sampler()
        self._check_effect()

    def _check_batches(self, sizes_are: str) -> None:
        """Refuse what leaves open how the batches are made, or says it twice."""
        name, size, factory = self.split.name, self.batch_size, self.batch_sampler
        if size is None and factory is None:
            raise ValueError(f"no batch_size for {name!r}: give batch_size (samples of a batch) or batch_sampler")
        if size is not None and factory is not None:
            raise ValueError(f"{name!r} has both batch_size={size!r} and batch_sampler: give one of them")
        if size is not None:
            cure = "samples of a batch on each rank; for batches by size give batch_sampler"
            object.__setattr__(self, "batch_size", checked_int("batch_size", size, 1, cure=cure))
            return
        if not callable(factory):
            raise TypeError(f"batch_sampler must be {_BATCH_SAMPLER}; got {factory!r} for {name!r}")
        if self.sizes is None:
            raise ValueError(f"batch_sampler makes batches by size, and {name!r} has no sizes: give sizes= {sizes_are}")
        named = keywords_of(factory).keys() & set(RANKS)
        if named and self.ranks.given:
            raise ValueError(f"ranks were given twice, {sorted(named)} in batch_sampler and to the module: drop one")

    def _check_sampler(self) -> None:
        """Refuse what makes no order of all ranks, such as a class of torch's."""
        name, sampler = self.split.name, self.sampler
        if sampler is None:
            return
        if not callable(sampler):
            raise TypeError(f"sampler must be a function, got {sampler!r} for {name!r}; give {_SAMPLER}")
        for rank in keywords_of(sampler).keys() & set(RANKS):
            raise ValueError(
                f"sampler for {name!r} names {rank}: the order is that of all ranks, and batches are dealt to them "
                f"afterwards; leave {rank} out"
            )
        try:
            signature = inspect.signature(sampler)
        except (TypeError, ValueError):  # of a function that does not tell
            return
        try:
            signature.bind(None, num_replicas=1, rank=0, seed=0)
        except TypeError as error:
            raise TypeError(
                "sampler is called as sampler(dataset, num_replicas=1, rank=0, seed=seed), and that of "
                f"{name!r} does not take this ({error}): give {_SAMPLER}; of torch's samplers {_OF_TORCH}"
            ) from None

    def _check_effect(self) -> None:
        """Refuse options that have no effect beside others."""
        if self.sampler is not None and "sampler" in keywords_of(self.batch_sampler):
            raise ValueError(
                f"sampler was given twice for {self.split.name!r}: in batch_sampler, and to the data module; drop one"
            )
        if self.split is not Split.train:
            return
        if self.batch_sampler is not None and (self.drop_last or not self.shuffle):
            option = "drop_last=True" if self.drop_last else "shuffle=False"
            raise ValueError(
                f"{option} is for batch_size, and batch_sampler makes the training batches: give it to batch_sampler, "
                "as an argument of its functools.partial, such as shuffle=False or tail='drop' of "
                "DistributedSizeAwareBatchSampler"
            )
        if self.sampler is not None and not self.shuffle:
            raise ValueError("shuffle=False and sampler both decide the order of training: drop one of them")

    def options(self) -> dict[str, str]:
        """Return the options in words, as a state holds them."""
        names = ("batch_size", "batch_sampler", "sizes", "sampler", "seed", "shuffle", "drop_last")
        return {name: describe_option(getattr(self, name)) for name in names}

    def factory_ranks(self) -> Ranks | None:
        """Return the ranks that `batch_sampler` names; None if it names none."""
        named = {name: value for name, value in keywords_of(self.batch_sampler).items() if name in RANKS}
        return Ranks(**named) if named else None

    def make(self, dataset: Any, sizes: Any, num_replicas: int, rank: int) -> Any:
        """Make the batch sampler of a rank, over samples of these sizes."""
        training, order = self.split is Split.train, None
        if not training:
            self._refuse_curriculum()
        if self.sampler is not None:
            order = self._order(dataset)
        elif self.batch_sampler is not None and not training:
            order = InOrder(range(len(dataset)))
        options: dict[str, Any] = {"sampler": order, "num_replicas": num_replicas, "rank": rank, "seed": self.seed}
        if self.batch_size is not None:
            shuffle, drop_last = training and self.shuffle, training and self.drop_last
            return DistributedBatchSampler(
                len(dataset), self.batch_size, shuffle=shuffle, drop_last=drop_last, **options
            )
        try:
            batches = call_factory(self.batch_sampler, sizes, **options)
        except TypeError as error:
            error.add_note(
                f"batch_sampler(sizes, sampler=..., num_replicas=..., rank=..., seed=...) was called: {_BATCH_SAMPLER}"
            )
            raise
        if not training:
            _refuse_uneven(batches)
        return batches

    def _refuse_curriculum(self) -> None:
        """Refuse a curriculum in evaluation, which has the order of the data: the sampler's own error is a riddle."""
        if (curriculum := keywords_of(self.batch_sampler).get("curriculum")) is not None:
            raise ValueError(
                f"batch_sampler for {self.split.name!r} has curriculum={curriculum!r}, which orders training only: "
                f"{_CURE}"
            )

    def _order(self, dataset: Any) -> Any:
        return call_factory(self.sampler, dataset, num_replicas=1, rank=0, seed=self.seed)

    def is_named_by(self, batches: Any, dataset: Any) -> bool:
        """Whether the state of a batch sampler that was made here names its order, and refuses another one."""
        ordered = self.sampler is None or own_fingerprint(self._order(dataset)) is not None
        return ordered and has_state(batches)


def _refuse_uneven(batches: Any) -> None:
    """Refuse a batch sampler that leaves samples out, or gives some twice."""
    for name, values in {"tail": ("drop", "pad"), "drop_last": (True,)}.items():
        if (value := getattr(batches, name, None)) in values:
            raise ValueError(
                f"batch_sampler must deliver every sample once for evaluation, got {name}={value!r}: {_CURE}"
            )
