"""Sizes of samples from whatever knows them, as an array."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Dataset, Subset

from headrace.size_aware_batching._budget import any_column
from headrace.size_aware_batching.sizes import size_array


def read_sizes(sizes: Any) -> NDArray[Any]:
    """Turn sizes, or a dataset that knows them, into an array; small integers are not copied.

    Args:
        sizes: An array, tensor or sequence of shape ``[n]`` or ``[n, k]``, a mapping from each index to its size,
            or a dataset with an attribute ``sizes`` or a method ``num_tokens(index)``, which is called once a sample.

    Raises:
        TypeError: If it holds no numbers.
        ValueError: If a size is NaN, infinite or negative, or the shape is another one.
    """
    if not isinstance(sizes, np.ndarray | torch.Tensor):
        if hasattr(sizes, "num_tokens"):
            return size_array(sizes.num_tokens, len(sizes), "num_tokens")
        if hasattr(sizes, "sizes"):
            return sizes_of_dataset(sizes)
        if isinstance(sizes, ConcatDataset):
            return np.concatenate([read_sizes(dataset) for dataset in sizes.datasets])
        if isinstance(sizes, Subset):
            return read_sizes(sizes.dataset)[np.asarray(sizes.indices, np.int64)]
        if isinstance(sizes, Dataset):
            raise TypeError(
                f"sizes: got {type(sizes).__name__}, a dataset without sizes or num_tokens(index); give it one of "
                "them, or give the sizes as an array, such as [len(sample) for sample in dataset]"
            )
        if isinstance(sizes, Mapping):
            return size_array(sizes, len(sizes), "sizes")
    if isinstance(sizes, torch.Tensor):
        sizes = sizes.detach().to("cpu", torch.float64 if sizes.is_floating_point() else sizes.dtype).numpy()
    try:
        array = np.asarray(sizes)
    except ValueError as error:
        raise ValueError(f"sizes: expected numbers of shape [n] or [n, k]: {error}") from None
    if array.size == 0:
        array = array.astype(np.int64)
    if array.dtype.kind not in "iuf":
        raise TypeError(
            f"sizes: got {type(sizes).__name__} of {array.dtype}, expected numbers, or a dataset with sizes or "
            "num_tokens(index)"
        )
    if array.dtype.kind == "f":
        array = array.astype(np.float64, copy=False)
    if array.ndim not in (1, 2):
        raise ValueError(f"sizes: got shape {array.shape}, expected [n] or [n, k]")
    refuse_bad(array)
    return array.astype(np.int64) if array.dtype == np.uint64 else array


def sizes_of_dataset(dataset: Any) -> NDArray[Any]:
    """Return the sizes that a dataset knows, one for each of its samples."""
    sizes = read_sizes(dataset.sizes)
    if hasattr(dataset, "__len__") and len(dataset) != len(sizes):
        raise ValueError(f"sizes: {type(dataset).__name__} has {len(dataset)} samples, but {len(sizes)} sizes")
    return sizes


def refuse_bad(array: NDArray[Any]) -> None:
    """Refuse NaN, infinite and negative sizes, and integers beyond 63 bits."""
    if array.size and not (array.min() >= 0 and array.max() < 2**62):
        bad = np.flatnonzero(any_column(~((array >= 0) & (array < 2**62))))
        raise ValueError(
            f"sizes: {len(bad)} of {len(array)} are negative, NaN or 2**62 and more, the first at index {bad[0]}: "
            f"{array[bad[0]]}"
        )
