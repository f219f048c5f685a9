"""Collate function that pads samples of different lengths to the longest."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from headrace.size_aware_batching._shared.checks import shown
from headrace.size_aware_batching._shared.display import never_raises, options_of, shape_of
from headrace.size_aware_batching._validation import checked_flag
from headrace.size_aware_batching.collate.arguments import check_limits, check_multiple, check_numbers
from headrace.size_aware_batching.collate.fields import Fields, Name, Path, checked_names, like, not_empty, with_keys
from headrace.size_aware_batching.collate.padding import padding_for, refuse_value
from headrace.size_aware_batching.planning.shapes import checked_shapes
from headrace.size_aware_batching.planning.units import round_up


class PaddedBatch(NamedTuple):
    """Batch of `PaddedCollate` for samples that are not dicts, with ``return_lengths`` or ``return_mask``.

    Attributes:
        values: The padded fields, in the structure of a sample.
        lengths: int64, shape ``[n]``; None without ``return_lengths``.
        attention_mask: bool, shape ``[n, longest]``; None without ``return_mask``.
    """

    values: Any
    lengths: torch.Tensor | None
    attention_mask: torch.Tensor | None

    @never_raises
    def __repr__(self) -> str:
        fields = {"values": self.values, "lengths": self.lengths, "attention_mask": self.attention_mask}
        return f"{type(self).__name__}({', '.join(f'{name}={shape_of(value)}' for name, value in fields.items())})"


@dataclass(frozen=True, repr=False)
class PaddedCollate:
    """Stack samples of different lengths, each padded at its end to the longest; for ``collate_fn``.

    A sample is a tensor, or a tuple, list or dict of tensors, nested to any depth; dimension 0 is the length. Numpy
    arrays and lists of numbers count as tensors; a list of floats becomes float32. Every field is padded to its own
    longest length, so that source and target may have different lengths. Numbers and 0-d tensors are stacked as in
    ``torch.utils.data.default_collate``; strings are collected in a list. Instances are picklable.

    Args:
        pad_value: The padding: a number, or a mapping from a field's name (its dict key, or its position in a
            tuple) to a number. Fields that are not in the mapping get 0. Unless a mapping names them, ``"labels"`` get
            -100, and an ``"attention_mask"`` 0.
        length_multiple: Lengths are rounded up to a multiple of this, for static shapes.
        fixed: Names of fields whose dimension 0 is not a length. They are stacked.
        return_lengths: Whether to add the lengths, int64, shape ``[n]``: under ``"lengths"`` for dicts, in a
            `PaddedBatch` for other samples.
        return_mask: Whether to add a mask, bool, shape ``[n, longest]``, True for tokens: under ``"attention_mask"``
            for dicts, in a `PaddedBatch` for other samples.
        max_length: Samples are truncated to this number of elements in each field that is not fixed. Pass it to the
            batch sampler as well, so that it counts the truncated lengths. None: no truncation.
        shapes: Shapes (count, length), such as ``sampler.shapes`` of a `DistributedSizeAwareBatchSampler`. Each batch
            is padded to the shortest shape that holds it, all fields to one length. Missing rows are added as padding:
            their mask is False everywhere, their lengths and ``attention_mask`` are 0, their labels -100. Numbers and
            ``fixed`` fields get such rows as well; strings do not. A loss without labels must ignore these rows:
            ``attention_mask.any(1)`` is True for samples. None: pad to the longest sample.
        max_total_size: The budget of the batch sampler: a larger batch raises an error, because it means that the
            sampler's sizes were wrong. The size is the count times the longest length of all fields. None: not checked.

    Raises:
        TypeError: If an argument or a field has the wrong type.
        ValueError: If a batch is empty; samples differ in keys, dtypes or further dimensions; a dtype cannot represent
            the pad value; a name is not a field; a batch is over ``max_total_size``; or the fields of a sample differ
            in length with ``return_lengths`` or ``return_mask``.

    >>> collate = PaddedCollate(return_mask=True)
    >>> batch = collate([{"ids": [5, 6, 7], "labels": [1, 0, 1]}, {"ids": [8], "labels": [1]}])
    >>> batch["ids"].tolist(), batch["labels"].tolist()
    ([[5, 6, 7], [8, 0, 0]], [[1, 0, 1], [1, -100, -100]])
    >>> batch["attention_mask"].sum(1)
    tensor([3, 1])
    """

    pad_value: float | Mapping[Name, float] = 0
    length_multiple: int = 1
    _: KW_ONLY
    fixed: Sequence[Name] = ()
    return_lengths: bool = False
    return_mask: bool = False
    max_length: int | None = None
    max_total_size: int | None = None
    shapes: Sequence[tuple[int, int]] | None = None

    @never_raises
    def __repr__(self) -> str:
        return options_of(self)

    def __post_init__(self) -> None:
        check_numbers("pad_value", self.pad_value)
        check_multiple("length_multiple", self.length_multiple)
        checked_flag("return_lengths", self.return_lengths)
        checked_flag("return_mask", self.return_mask)
        check_limits(self.max_length, self.max_total_size)
        object.__setattr__(self, "fixed", checked_names(self.fixed))
        if self.shapes is not None:
            object.__setattr__(self, "shapes", checked_shapes(self.shapes, self.length_multiple))

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Return the batch of some samples."""
        fields = Fields(self.fixed, self.max_length)
        batch = fields.gather(not_empty(samples), partial(_Field.of, fields))
        fields.refuse_unknown(self.fixed, "fixed", of_any=True)
        if isinstance(self.pad_value, Mapping):
            fields.refuse_unknown(self.pad_value, "pad_value", of_any=self.shapes is not None)
        longest = max(map(max, fields.lengths.values()), default=0)
        rows, length = self._shape_of(len(samples), longest)
        if fields.lengths:
            fields.refuse_over(self.max_total_size, rows * length, "cost='padded', or ")
        batch = self._joined(batch, rows, None if self.shapes is None else length)
        if not (self.return_lengths or self.return_mask):
            return batch
        lengths = fields.one_length("return_lengths and return_mask need one length for all fields of a sample")
        of_rows = torch.tensor(lengths + [0] * (rows - len(lengths)))
        extra: dict[str, torch.Tensor] = {}
        if self.return_lengths:
            extra["lengths"] = of_rows
        if self.return_mask:
            extra["attention_mask"] = torch.arange(length) < of_rows[:, None]
        if isinstance(batch, dict):
            return with_keys(batch, extra)
        return PaddedBatch(batch, extra.get("lengths"), extra.get("attention_mask"))

    def _shape_of(self, count: int, longest: int) -> tuple[int, int]:
        """Return how many rows a batch has and how long they are."""
        if self.shapes is None:
            return count, round_up(longest, self.length_multiple)
        for rows, length in self.shapes:
            if count <= rows and longest <= length:
                return rows, length
        raise ValueError(
            f"shapes must hold every batch, got {count} samples, the longest with {longest}, and shapes (count, "
            f"length) {shown(list(self.shapes))}: give those of the batch sampler, which needs the lengths that "
            "samples have here, and the collate function max_length= where the sampler has it"
        )

    def _joined(self, batch: Any, rows: int, length: int | None, path: Path = ()) -> Any:
        """Join the fields in a batch; ``length`` is that of all, None for the longest of each."""
        if isinstance(batch, _Field):
            if batch.fixed:
                return self._filled(torch.stack(batch.tensors), rows, path)
            return self._padded(batch.tensors, rows, length, path)
        if isinstance(batch, torch.Tensor):
            return self._filled(batch, rows, path)
        if isinstance(batch, dict):
            return {key: self._joined(field, rows, length, (*path, key)) for key, field in batch.items()}
        if isinstance(batch, tuple | list):
            return like(batch, [self._joined(field, rows, length, (*path, i)) for i, field in enumerate(batch)])
        return batch

    def _padded(self, tensors: list[torch.Tensor], rows: int, length: int | None, path: Path) -> torch.Tensor:
        """Stack tensors of shapes ``[length, ...]`` into ``[rows, longest, ...]``."""
        lengths = {tensor.shape[0] for tensor in tensors}
        longest = round_up(max(lengths), self.length_multiple) if length is None else length
        if path[-1:] == ("labels",) and lengths == {longest} and rows == len(tensors):
            return torch.stack(tensors)  # they may be flags, which cannot hold -100
        value = self._checked_value(tensors[0].dtype, path)
        padded = tensors[0].new_full((rows, longest, *tensors[0].shape[1:]), value)
        for row, tensor in zip(padded, tensors, strict=False):
            row[: tensor.shape[0]] = tensor
        return padded

    def _filled(self, stacked: torch.Tensor, rows: int, path: Path) -> torch.Tensor:
        """Add the rows that are missing."""
        if rows == len(stacked):
            return stacked
        value = self._checked_value(stacked.dtype, path)
        return torch.cat([stacked, stacked.new_full((rows - len(stacked), *stacked.shape[1:]), value)])

    def _checked_value(self, dtype: torch.dtype, path: Path) -> float:
        """Return the padding of a field."""
        value = padding_for(path, self.pad_value)
        refuse_value("pad_value", value, dtype, path)
        return value


@dataclass(frozen=True)
class _Field:
    """A field of all samples, read and not joined yet."""

    tensors: list[torch.Tensor]
    fixed: bool

    @classmethod
    def of(cls, fields: Fields, tensors: list[torch.Tensor], path: Path) -> "_Field":
        """Return a field, and record it."""
        fixed = fields.is_fixed(tensors, path)  # which cuts them
        return cls(tensors, fixed)
