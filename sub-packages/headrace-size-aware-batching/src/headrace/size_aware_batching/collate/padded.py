"""Collate function that pads samples of different lengths to the longest."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import torch

from headrace.size_aware_batching._validation import checked_flag
from headrace.size_aware_batching.collate.arguments import check_limits, check_multiple, check_numbers
from headrace.size_aware_batching.collate.fields import Fields, Name, Path, checked_names, not_empty, with_keys
from headrace.size_aware_batching.collate.padding import padding_for, refuse_value
from headrace.size_aware_batching.planning.units import round_up


class PaddedBatch(NamedTuple):
    """Batch of `PaddedCollate` for samples that are not dicts, when lengths or a mask are asked for.

    Attributes:
        values: The padded fields, in the structure of a sample.
        lengths: int64, shape ``[n]``; None without ``return_lengths``.
        attention_mask: bool, shape ``[n, longest]``; None without ``return_mask``.
    """

    values: Any
    lengths: torch.Tensor | None
    attention_mask: torch.Tensor | None


@dataclass(frozen=True)
class PaddedCollate:
    """Stack samples of different lengths, each padded at its end to the longest; for ``collate_fn``.

    A sample is a tensor, or a tuple, list or dict of tensors, nested to any depth; dimension 0 is the length.
    Numpy arrays and lists of numbers count as tensors; a list of floats becomes float32. Every field is padded to the
    longest of that field, so that source and target may have different lengths. Numbers and 0-d tensors are stacked
    as ``torch.utils.data.default_collate`` does, strings are collected in a list. Instances can be pickled.

    Args:
        pad_value: The padding: a number, or a mapping from a field's name (its dict key, or its position in a
            tuple) to a number. Fields that are not in the mapping get 0. ``"labels"`` get -100, and an
            ``"attention_mask"`` 0, where no mapping names them.
        length_multiple: Lengths are rounded up to a multiple of this, for static shapes.
        fixed: Names of fields whose dimension 0 is not a length. They are stacked as they are.
        return_lengths: Whether to add the lengths, int64, shape ``[n]``: under ``"lengths"`` for dicts; other
            samples give a `PaddedBatch`.
        return_mask: Whether to add a mask, bool, shape ``[n, longest]``, True where there is a token: under
            ``"attention_mask"`` for dicts; other samples give a `PaddedBatch`.
        max_length: Samples are cut to their first elements, at most so many in each field that is not fixed. Give it
            to the batch sampler, too, which counts longer samples as that. None: nothing is cut.
        max_total_size: The budget of the batch sampler: a batch that holds more is an error, since its sizes were not
            those of the samples. Count times longest, of the longest field. None: not checked.

    Raises:
        TypeError: If an argument or a field has the wrong type.
        ValueError: If a batch is empty; samples differ in keys, dtypes or further dimensions; a dtype cannot hold
            the pad value; a name is not a field; a batch is over ``max_total_size``; or lengths are asked for and
            the fields of a sample disagree.

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

    def __post_init__(self) -> None:
        check_numbers("pad_value", self.pad_value)
        check_multiple("length_multiple", self.length_multiple)
        checked_flag("return_lengths", self.return_lengths)
        checked_flag("return_mask", self.return_mask)
        check_limits(self.max_length, self.max_total_size)
        object.__setattr__(self, "fixed", checked_names(self.fixed))

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Make a batch of samples."""
        fields = Fields(self.fixed, self.max_length)

        def join(tensors: list[torch.Tensor], path: Path) -> torch.Tensor:
            if fields.is_fixed(tensors, path):
                return torch.stack(tensors)
            longest = round_up(max(tensor.shape[0] for tensor in tensors), self.length_multiple)
            if path[-1:] == ("labels",) and {tensor.shape[0] for tensor in tensors} == {longest}:
                return torch.stack(tensors)  # they may be flags, which cannot hold -100
            value = padding_for(path, self.pad_value)
            refuse_value("pad_value", value, tensors[0].dtype, path)
            return _padded(tensors, value, longest)

        batch = fields.gather(not_empty(samples), join)
        fields.refuse_unknown(self.fixed, "fixed")
        if isinstance(self.pad_value, Mapping):
            fields.refuse_unknown(self.pad_value, "pad_value")
        if self.max_total_size is not None:
            longest = max(map(max, fields.lengths.values()), default=0)
            fields.refuse_over(self.max_total_size, len(samples) * round_up(longest, self.length_multiple))
        if not (self.return_lengths or self.return_mask):
            return batch
        lengths = fields.one_length("return_lengths and return_mask need one length for all fields of a sample")
        extra: dict[str, torch.Tensor] = {}
        if self.return_lengths:
            extra["lengths"] = torch.tensor(lengths)
        if self.return_mask:
            longest = round_up(max(lengths), self.length_multiple)
            extra["attention_mask"] = torch.arange(longest) < torch.tensor(lengths)[:, None]
        if isinstance(batch, dict):
            return with_keys(batch, extra)
        return PaddedBatch(batch, extra.get("lengths"), extra.get("attention_mask"))


def _padded(tensors: Sequence[torch.Tensor], pad_value: float, longest: int) -> torch.Tensor:
    """Stack tensors of shapes ``[length, ...]`` into ``[n, longest, ...]``."""
    filled = tensors[0].new_full((len(tensors), longest, *tensors[0].shape[1:]), pad_value)
    for row, tensor in zip(filled, tensors, strict=True):
        row[: tensor.shape[0]] = tensor
    return filled
