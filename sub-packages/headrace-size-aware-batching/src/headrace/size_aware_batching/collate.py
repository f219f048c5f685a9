"""Makes one batch of samples of different lengths: padded to the longest, or packed one after another."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from numbers import Real
from typing import Any, NamedTuple

import torch

from headrace.size_aware_batching._options import whole_number
from headrace.size_aware_batching.collating.fields import Fields, Name
from headrace.size_aware_batching.collating.rows import (
    mask_of,
    offsets_of,
    one_length,
    padded,
    positions_of,
    refuse_pad_value,
)
from headrace.size_aware_batching.collating.tree import Path, gather


class PaddedBatch(NamedTuple):
    """What `PaddedCollate` gives for samples that are no dicts, when lengths or a mask are asked for.

    Attributes:
        values: The padded fields, in the form of a sample.
        lengths: int64, shape ``[n]``; None if not asked for.
        attention_mask: bool, shape ``[n, longest]``; None if not asked for.
    """

    values: Any
    lengths: torch.Tensor | None
    attention_mask: torch.Tensor | None


class PackedBatch(NamedTuple):
    """What `PackedCollate` gives for samples that are no dicts.

    Attributes:
        values: The joined fields, in the form of a sample.
        cu_seqlens: int32, shape ``[n + 1]``.
        max_seqlen: The longest sample's length.
        position_ids: int64, shape ``[total]``.
    """

    values: Any
    cu_seqlens: torch.Tensor
    max_seqlen: int
    position_ids: torch.Tensor


@dataclass(frozen=True)
class PaddedCollate:
    """Stack samples of different lengths, each filled up at its end to the longest; for ``collate_fn``.

    A sample is a tensor, or a tuple, list or dict of tensors, nested as you like; the first dimension is the length.
    Numpy arrays and lists of numbers count as tensors. Every field is padded to the longest of its own kind, so that
    source and target may have different lengths. Numbers and 0-d tensors are stacked, strings listed. It can be
    pickled.

    Args:
        pad_value: What fills up: a number, or a mapping from a field's name (its dict key or its position in a
            tuple) to a number; fields that are not in it get 0.
        length_multiple: Lengths are rounded up to a multiple of this, for static shapes.
        fixed: Names of fields whose first dimension is no length. They are stacked as they are.
        return_lengths: Whether to give the lengths, int64, shape ``[n]``: dicts gain ``"lengths"``, for other
            samples the batch is a `PaddedBatch`.
        return_mask: Whether to give a mask, bool, shape ``[n, longest]``, True where there is a token: dicts gain
            ``"attention_mask"``, for other samples the batch is a `PaddedBatch`.

    Raises:
        TypeError: If an argument or a field is of the wrong kind.
        ValueError: If a batch is empty; samples differ in keys, dtypes or further dimensions; a dtype cannot hold
            the pad value; a name fits no field; or lengths are asked for and the fields of a sample disagree.

    >>> collate = PaddedCollate({"labels": -100}, return_mask=True)
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

    def __post_init__(self) -> None:
        values = self.pad_value.values() if isinstance(self.pad_value, Mapping) else [self.pad_value]
        for value in values:
            if not isinstance(value, Real):
                raise TypeError(f"pad_value: got {value!r}, expected a number, or a mapping from field to number")
        whole_number("length_multiple", self.length_multiple)
        object.__setattr__(self, "fixed", checked_names(self.fixed))

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Make a batch of samples."""
        samples = not_empty(samples)
        fields = Fields(self.fixed)

        def leaf(tensors: list[torch.Tensor], path: Path) -> torch.Tensor:
            if fields.enter(tensors, path):
                return torch.stack(tensors)
            value = self.pad_value.get(path[-1], 0) if isinstance(self.pad_value, Mapping) and path else self.pad_value
            value = 0 if isinstance(value, Mapping) else value
            refuse_pad_value(value, tensors[0].dtype, path)
            return padded(tensors, value, self.length_multiple)

        batch = gather(samples, leaf)
        fields.refuse_unknown(self.fixed, "fixed")
        if isinstance(self.pad_value, Mapping):
            fields.refuse_unknown(self.pad_value, "pad_value")
        return self._with_lengths(batch, fields) if self.return_lengths or self.return_mask else batch

    def _with_lengths(self, batch: Any, fields: Fields) -> Any:
        cure = "with return_lengths or return_mask all fields of a sample have one length, but those named in fixed"
        lengths = one_length(fields.lengths, cure)
        extra: dict[str, torch.Tensor] = {}
        if self.return_lengths:
            extra["lengths"] = torch.tensor(lengths)
        if self.return_mask:
            extra["attention_mask"] = mask_of(lengths, self.length_multiple)
        if isinstance(batch, dict):
            return with_keys(batch, extra)
        return PaddedBatch(batch, extra.get("lengths"), extra.get("attention_mask"))


@dataclass(frozen=True)
class PackedCollate:
    """Join samples one after another without padding, for variable-length attention; for ``collate_fn``.

    Samples are as for `PaddedCollate`; the tensors of a sample have one length. A dict gains three keys, for
    other samples the batch is a `PackedBatch`:

    - ``cu_seqlens``: where each sample begins and, last, the total; int32, shape ``[n + 1]``. What
      ``flash_attn_varlen_func`` takes as ``cu_seqlens_q``, and ``torch.nested.nested_tensor_from_jagged`` as offsets.
    - ``max_seqlen``: the longest sample's length, an int.
    - ``position_ids``: the position of each token in its sample, int64, shape ``[total]``.

    Args:
        fixed: Names of fields whose first dimension is no length (dict keys, or positions in a tuple). They are
            stacked.

    Raises:
        TypeError: If an argument or a field is of the wrong kind.
        ValueError: If a batch is empty; samples differ in keys, dtypes or further dimensions; the tensors of a
            sample differ in length; or a name fits no field.

    >>> batch = PackedCollate()([{"ids": [5, 6, 7]}, {"ids": [8]}])
    >>> batch["ids"], batch["cu_seqlens"], batch["max_seqlen"], batch["position_ids"]
    (tensor([5, 6, 7, 8]), tensor([0, 3, 4], dtype=torch.int32), 3, tensor([0, 1, 2, 0]))
    """

    _: KW_ONLY
    fixed: Sequence[Name] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "fixed", checked_names(self.fixed))

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Make a batch of samples."""
        samples = not_empty(samples)
        fields = Fields(self.fixed)

        def leaf(tensors: list[torch.Tensor], path: Path) -> torch.Tensor:
            return torch.stack(tensors) if fields.enter(tensors, path) else torch.cat(tensors)

        batch = gather(samples, leaf)
        fields.refuse_unknown(self.fixed, "fixed")
        cure = "samples that are packed have one length in all fields, but those named in fixed"
        lengths = one_length(fields.lengths, cure)
        extra = PackedBatch(batch, offsets_of(lengths), max(lengths), positions_of(lengths))
        if not isinstance(batch, dict):
            return extra
        return with_keys(batch, {key: value for key, value in extra._asdict().items() if key != "values"})


def checked_names(names: Any) -> tuple[Name, ...]:
    """Return names of fields as a tuple, or raise a TypeError."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise TypeError(f"fixed: got {names!r}, expected a sequence of dict keys or positions, such as ['target']")
    return tuple(names)


def not_empty(samples: Any) -> Sequence[Any]:
    """Return the samples as a sequence, or raise a ValueError if there is none."""
    if len(samples) == 0:
        raise ValueError("samples: got none, expected at least one: a batch sampler may not yield empty batches")
    return list(samples)


def with_keys(batch: dict[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch with keys added, or raise a ValueError where it has one of them already."""
    if taken := [key for key in extra if key in batch]:
        raise ValueError(f"samples: they have {taken} already, which the collate function adds: rename or remove them")
    return {**batch, **extra}
