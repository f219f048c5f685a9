"""Joins tensors of different lengths: under one another, padded, or one after another. Pure."""

from collections.abc import Sequence

import torch

from headrace.size_aware_batching.collating.tree import Path, place

INT32_END = 2**31


def lengths_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the first dimension of each tensor."""
    return [tensor.shape[0] for tensor in tensors]


def padded(tensors: Sequence[torch.Tensor], pad_value: float, length_multiple: int) -> torch.Tensor:
    """Stack tensors, each filled up at its end to the longest.

    Args:
        tensors: Shapes ``[length, ...]``, of one dtype, at least one.
        pad_value: What fills up.
        length_multiple: The longest is rounded up to a multiple of this.

    Returns:
        Shape ``[n, longest, ...]``.

    >>> padded([torch.tensor([1, 2, 3]), torch.tensor([4])], -1, 2).tolist()
    [[1, 2, 3, -1], [4, -1, -1, -1]]
    """
    longest = -(-max(lengths_of(tensors)) // length_multiple) * length_multiple
    filled = tensors[0].new_full((len(tensors), longest, *tensors[0].shape[1:]), pad_value)
    for row, tensor in zip(filled, tensors, strict=True):
        row[: tensor.shape[0]] = tensor
    return filled


def mask_of(lengths: Sequence[int], length_multiple: int) -> torch.Tensor:
    """Return a mask of the shape that `padded` gives, ``[n, longest]``: True where there is a token.

    >>> mask_of([2, 1], 3).tolist()
    [[True, True, False], [True, False, False]]
    """
    longest = -(-max(lengths) // length_multiple) * length_multiple
    return torch.arange(longest) < torch.tensor(lengths)[:, None]


def offsets_of(lengths: Sequence[int]) -> torch.Tensor:
    """Return where each sequence begins and, last, where the last one ends, int32, shape ``[n + 1]``.

    Raises:
        ValueError: If there are too many tokens for int32, which variable-length attention wants.

    >>> offsets_of([3, 0, 2]).tolist()
    [0, 3, 3, 5]
    """
    if (total := sum(lengths)) >= INT32_END:
        raise ValueError(f"samples: got {total} tokens, cu_seqlens (int32) allow 2**31 - 1: make smaller batches")
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def positions_of(lengths: Sequence[int]) -> torch.Tensor:
    """Return the position of each token in its own sequence, int64, shape ``[total]``.

    >>> positions_of([3, 0, 2]).tolist()
    [0, 1, 2, 0, 1]
    """
    counts = torch.tensor(lengths, dtype=torch.int64)
    return torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts).repeat_interleave(counts)


def refuse_other_shape(tensors: Sequence[torch.Tensor], path: Path, fixed: bool) -> None:
    """Raise a ValueError where a tensor's shape differs from the first one's; its length may, unless ``fixed``."""
    skipped = 0 if fixed else 1
    for sample, tensor in enumerate(tensors):
        if tensor.ndim != tensors[0].ndim or tensor.shape[skipped:] != tensors[0].shape[skipped:]:
            allowed = "is named in fixed: all shapes are the same" if fixed else "may differ in dimension 0 only"
            raise ValueError(
                f"{place(path, sample)} has shape {list(tensor.shape)}, {place(path, 0)} has "
                f"{list(tensors[0].shape)}: this field {allowed}"
            )


def refuse_pad_value(value: float, dtype: torch.dtype, path: Path) -> None:
    """Raise a ValueError where a dtype cannot hold the pad value; what is cut off would be so in silence."""
    if dtype.is_floating_point or dtype.is_complex:
        return
    low, high = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    if not (low <= value <= high and value == int(value)):
        raise ValueError(
            f"pad_value: got {value!r} for {place(path)} of {dtype}, allowed are whole numbers from {low} to {high}: "
            "convert the field in the dataset, or give each field its own value by a mapping"
        )


def one_length(lengths: dict[Path, list[int]], cure: str) -> list[int]:
    """Return the length of each sample, which all of its fields have.

    Args:
        lengths: For each field, the length in each sample.
        cure: What to do when they differ, for the error.

    Raises:
        ValueError: If a sample has fields of different lengths, or no field at all.

    >>> one_length({("x",): [2, 3], ("y",): [2, 3]}, "")
    [2, 3]
    """
    if not lengths:
        raise ValueError("samples: they hold no tensor with a first dimension, so that no sample has a length")
    first, *others = lengths
    for other in others:
        for sample, (length, mine) in enumerate(zip(lengths[first], lengths[other], strict=True)):
            if length != mine:
                raise ValueError(
                    f"{place(other, sample)} has length {mine}, {place(first, sample)} has {length}: {cure}"
                )
    return lengths[first]
