"""The size of each sample: bytes of a member, a column, or a function of the sample, evaluated once and kept."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import ConcatDataset, DataLoader
from tqdm import tqdm

from headrace.webdatamodule._shared.columns import array_of_column
from headrace.webdatamodule.loading.batch_reading import (
    BatchDataset,
    DamagedSampleWarning,
    RawBatch,
    SkippedSample,
    raise_explained,
)
from headrace.webdatamodule.loading.fingerprint import digest
from headrace.webdatamodule.loading.options import OnError
from headrace.webdatamodule.loading.worker import end_with_parent, end_workers, start_workers
from headrace.webdatamodule.shards import IndexedShards, ManifestError, add_column
from headrace.webdatamodule.shards.index.manifest import DERIVED
from headrace.webdatamodule.split_names import Split

SizeOf: TypeAlias = str | Callable[[Any], Any]
Sizes: TypeAlias = npt.NDArray[Any]

_TOGETHER = 256  # samples that are sized together
_ALLOWED = "a size is a number, or as many for each sample; finite, and not negative"


class SizesInMemoryWarning(UserWarning):
    """Sizes were evaluated, and cannot be kept beside the shards."""


def sizes_of_shards(
    shards: IndexedShards,
    source: Any,
    sizes: SizeOf,
    *,
    num_workers: int = 0,
    name: str = "sizes",
    reading: Sequence[Any] = (),
    on_error: OnError = "raise",
) -> Sizes:
    """The size of each sample of some shards, which lie at `source`: shape [n_samples], or [n_samples, k].

    `sizes` is the name of a column, the key of a member, whose bytes count, or a function of the decoded sample; a
    column comes before a member of the same name. What a function returns is kept as a column beside the shards, and
    evaluated again only when its code, the shards or what decides on its argument (`reading`) change. A damaged sample
    that is skipped has size 0, and nothing is kept then.
    """
    if isinstance(sizes, str):
        return _named(shards, sizes, name)
    if not callable(sizes):
        kind = f"{type(sizes).__name__} of {len(sizes)}" if hasattr(sizes, "__len__") else repr(sizes)
        cure = "keep numbers that you have with add_column, and pass the column's name"
        if isinstance(sizes, Sequence) and all(isinstance(one, str) for one in sizes):
            cure = f"for several sizes write one column of shape [n_samples, {len(sizes)}], and pass its name"
        raise TypeError(
            f"sizes must be the name of a member or a column, or a function of a sample, got {kind}: {cure}"
        )
    column = column_name(sizes, *reading)
    if column in shards.columns:
        return np.asarray(shards.column(column))
    found, skipped = _evaluated(shards, sizes, num_workers, name, on_error)
    if skipped:
        message = f"damaged samples of {name} have no size, {len(skipped)} of {len(shards)}: {skipped[0].message}"
        warnings.warn(message, DamagedSampleWarning, stacklevel=2)
    else:
        _keep(source, column, found, shards)
    return found


def column_name(function: Callable[[Any], Any], *reading: Any) -> str:
    """The name of the column that keeps a function's results; another one when its code changes.

    Its code is that of the function, of functions of the same module that it names, their constants, defaults, what
    they close over, and the plain values, containers and arrays that they find in the module; of an object also the
    methods of its class and what it holds. What it calls elsewhere does not count. A function that changes such a
    container itself is another one afterwards. `reading` is what else decides what it gets, such as a decoder.
    """
    called = getattr(function, "__name__", type(function).__name__)
    plain = "".join(letter if letter.isalnum() or letter == "_" else "" for letter in called)[:40]
    return f"{DERIVED}{plain}-{digest(function, *reading)}"


def sizes_of_dataset(split: Split, dataset: Any, sizes: Any) -> Any:
    """The sizes of a split as an array; a function as it is, and None where there are none."""
    if sizes is None:
        own = getattr(dataset, "sizes", None)
        sizes = None if callable(own) else own
        if sizes is None and callable(getattr(dataset, "num_tokens", None)):
            sizes = [dataset.num_tokens(index) for index in range(len(dataset))]
    if sizes is None or callable(sizes):
        return sizes
    if isinstance(sizes, str) and isinstance(dataset, ConcatDataset):
        return np.concatenate([sizes_of_dataset(split, one, sizes) for one in dataset.datasets])
    if isinstance(sizes, str):
        columns = getattr(dataset, "column_names", None) or ()
        if sizes not in columns:
            have = f"has {', '.join(map(repr, columns)) or 'none'}"
            message = (
                f"sizes={sizes!r} must be a column of datasets[{split.name!r}], a {type(dataset).__name__} that {have}"
            )
            raise ValueError(f"{message}: give an array, or a function of the sample")
        sizes = dataset[sizes]
    array = np.asarray(array_of_column(sizes, f"sizes[{split.name!r}]"))
    if array.dtype.kind not in "iuf":
        raise TypeError(
            f"sizes[{split.name!r}] must be numbers or a function of the sample, got {type(sizes).__name__}"
        )
    return check_sizes(array, dataset, f"sizes[{split.name!r}]")


def evaluated_sizes(function: Callable[[Any], Any], dataset: Any, split: Split) -> Sizes:
    """The sizes that a function gives for the samples of a split."""
    bar = tqdm(range(len(dataset)), desc=f"sizing {split.name}", unit="sample", delay=1.0, disable=None)
    sizes = np.array([function(dataset[index]) for index in bar])
    if sizes.dtype.kind not in "iuf":
        raise TypeError(f"sizes[{split.name!r}] must give numbers, got {sizes.dtype}")
    return sizes


def check_sizes(sizes: npt.NDArray[Any], dataset: Any, name: str = "sizes") -> npt.NDArray[Any]:
    """Refuse an array that has no size, or no sizes, for each sample of a dataset."""
    if sizes.ndim not in (1, 2) or len(sizes) != len(dataset):
        got = f"shape {list(sizes.shape)}" if sizes.ndim != 1 else len(sizes)
        raise ValueError(f"{name} must hold one size for each of the {len(dataset)} samples, got {got}")
    return sizes


def _named(shards: IndexedShards, wanted: str, name: str) -> Sizes:
    if wanted in shards.columns:
        sizes = np.asarray(shards.column(wanted))  # a map of its file where it is large, which a batch sampler may know
        if sizes.dtype.kind not in "iuf" or sizes.ndim not in (1, 2):
            shape = list(sizes.shape[1:])
            raise ValueError(f"column {wanted!r} of {name} holds {sizes.dtype} of shape {shape}: {_ALLOWED}")
        wrong = ~(np.isfinite(sizes) & (sizes >= 0)).reshape(len(sizes), -1).all(axis=1)
        if wrong.any():
            first = int(wrong.argmax())
            message = f"column {wanted!r} of {name} holds {sizes[first]} for sample {shards.key(first)!r}"
            raise ValueError(f"{message}: {_ALLOWED}")
        return sizes
    if wanted.lower() in shards.member_keys:
        return shards.sizes(wanted)
    columns = f"columns {sorted(shards.columns)}" if shards.columns else "no columns"
    message = f"sizes={wanted!r} is neither a column nor a member of {name}, which has {columns} and the members"
    raise ValueError(f"{message} {list(shards.member_keys)}: name one of these, or give a function of the sample")


def _evaluated(
    shards: IndexedShards, function: Callable[[Any], Any], num_workers: int, name: str, on_error: OnError
) -> tuple[Sizes, list[SkippedSample]]:
    count = len(shards)
    chunks = [range(start, min(start + _TOGETHER, count)) for start in range(0, count, _TOGETHER)]
    dataset = BatchDataset(shards, None, on_error)
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_sampler=chunks,  # type: ignore[arg-type]  # ranges are as good as lists
        num_workers=min(num_workers, len(chunks)),
        collate_fn=partial(_sized, function),
        generator=torch.Generator(),  # else a seed is taken from the caller's random numbers
        worker_init_fn=end_with_parent,
    )
    found, skipped = list[Sizes](), list[SkippedSample]()
    batches = start_workers(loader)
    try:
        # Appears when it takes long only.
        with tqdm(total=count, desc=f"sizing {name}", unit="sample", delay=1.0, disable=None) as bar:
            for chunk, (sized, read) in zip(chunks, batches, strict=True):
                if read.error is not None:
                    raise read.error
                if found and sized.shape[1:] != found[0].shape[1:]:
                    key = shards.key(read.indices[0])
                    numbers = f"{_many(found[0])} for samples before {key!r}, and {_many(sized)} for it"
                    raise ValueError(f"sizes gave {numbers}: give as many for each")
                skipped += read.skipped
                found.append(_filled(chunk, sized, {one.sample for one in read.skipped}))
                bar.update(len(chunk))
    finally:
        end_workers(batches)
    return (np.concatenate(found) if found else np.zeros(0, np.int64)), skipped


def _filled(chunk: range, sized: Sizes, without: set[int]) -> Sizes:
    """The sizes of all samples of a chunk: 0 for those that have none."""
    if not without:
        return sized
    sizes = np.zeros((len(chunk), *sized.shape[1:]), sized.dtype)
    sizes[[position not in without for position in chunk]] = sized
    return sizes


def _sized(function: Callable[[Any], Any], read: RawBatch) -> tuple[Sizes, RawBatch]:
    """Runs in the worker, which sends the sizes alone."""
    sizes: list[Sizes] = []
    for sample in read.samples:
        key = sample["__key__"]
        try:
            sizes.append(_one(function(sample), key))
        except Exception as error:
            raise_explained(error, "the sizes function", f"in the sizes function, with sample {key!r}")
        if sizes[-1].shape != sizes[0].shape:
            first = read.samples[0]["__key__"]
            numbers = f"{_many(sizes[0:1])} for sample {first!r}, and {_many(sizes[-1:])} for {key!r}"
            raise ValueError(f"sizes gave {numbers}: give as many for each")
    return np.stack(sizes) if sizes else np.zeros(0, np.int64), read._replace(samples=[])


def _one(value: Any, key: str) -> Sizes:
    size = np.asarray(value)
    if size.dtype.kind not in "iuf" or size.ndim > 1 or not (np.isfinite(size) & (size >= 0)).all():
        raise ValueError(f"sizes gave {value!r} for sample {key!r}: {_ALLOWED}")
    return size


def _many(sizes: Any) -> str:
    shape = np.shape(sizes)[1:]
    return f"{shape[0]} sizes" if shape else "one size"


def _keep(source: Any, column: str, sizes: Sizes, shards: IndexedShards) -> None:
    far = isinstance(source, str) and "://" in source
    reason = "shards on other machines are not written to" if far else "only a directory with a manifest holds columns"
    if isinstance(source, str | os.PathLike) and not far:
        path = Path(source)
        folder = path.parent if path.suffix == ".json" else path
        try:
            now = IndexedShards(folder)
            if now.fingerprint == shards.fingerprint:
                if column not in now.columns:  # else another process was faster
                    add_column(folder, column, sizes)
                return
            reason = "the shards were replaced meanwhile"
        except (OSError, ManifestError) as error:
            reason = str(error)
    cure = "keep them with add_column where the shards are written, and pass the column's name"
    warnings.warn(
        f"the sizes were evaluated, and will be again next time, since {reason}: {cure}",
        SizesInMemoryWarning,
        stacklevel=2,
    )
