"""Collate functions for samples of different lengths: padded to the longest, or packed without padding."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from numbers import Real
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.size_aware_batching._budget import round_up
from headrace.size_aware_batching._validation import whole_number

Name: TypeAlias = str | int
Path: TypeAlias = tuple[Name, ...]  # keys and positions that lead to a field of a sample
Join: TypeAlias = Callable[[list[torch.Tensor], Path], torch.Tensor]

_NUMBERS = bool | int | float | complex
_INT32_END = 2**31


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


class PackedBatch(NamedTuple):
    """Batch of `PackedCollate` for samples that are not dicts.

    Attributes:
        values: The concatenated fields, in the structure of a sample.
        cu_seqlens: int32, shape ``[n + 1]``.
        max_seqlen: Length of the longest sample.
        position_ids: int64, shape ``[total]``.
    """

    values: Any
    cu_seqlens: torch.Tensor
    max_seqlen: int
    position_ids: torch.Tensor


@dataclass(frozen=True)
class PaddedCollate:
    """Stack samples of different lengths, each padded at its end to the longest; for ``collate_fn``.

    A sample is a tensor, or a tuple, list or dict of tensors, nested to any depth; dimension 0 is the length.
    Numpy arrays and lists of numbers count as tensors; a list of floats becomes float32. Every field is padded to the
    longest of that field, so that source and target may have different lengths. Numbers and 0-d tensors are stacked
    as ``torch.utils.data.default_collate`` does, strings are collected in a list. Instances can be pickled.

    Args:
        pad_value: The padding: a number, or a mapping from a field's name (its dict key, or its position in a
            tuple) to a number. Fields that are not in the mapping get 0.
        length_multiple: Lengths are rounded up to a multiple of this, for static shapes.
        fixed: Names of fields whose dimension 0 is not a length. They are stacked as they are.
        return_lengths: Whether to add the lengths, int64, shape ``[n]``: under ``"lengths"`` for dicts; other
            samples give a `PaddedBatch`.
        return_mask: Whether to add a mask, bool, shape ``[n, longest]``, True where there is a token: under
            ``"attention_mask"`` for dicts; other samples give a `PaddedBatch`.

    Raises:
        TypeError: If an argument or a field has the wrong type.
        ValueError: If a batch is empty; samples differ in keys, dtypes or further dimensions; a dtype cannot hold
            the pad value; a name is not a field; or lengths are asked for and the fields of a sample disagree.

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
                raise TypeError(f"pad_value must be a number, or a mapping from field to number, got {value!r}")
        whole_number("length_multiple", self.length_multiple)
        object.__setattr__(self, "fixed", _checked_names(self.fixed))

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Make a batch of samples."""
        fields = _Fields(self.fixed)

        def join(tensors: list[torch.Tensor], path: Path) -> torch.Tensor:
            if fields.is_fixed(tensors, path):
                return torch.stack(tensors)
            value = self._pad_value(path)
            _refuse_pad_value(value, tensors[0].dtype, path)
            return _padded(tensors, value, self.length_multiple)

        batch = _gather(_not_empty(samples), join)
        fields.refuse_unknown(self.fixed, "fixed")
        if isinstance(self.pad_value, Mapping):
            fields.refuse_unknown(self.pad_value, "pad_value")
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
            return _with_keys(batch, extra)
        return PaddedBatch(batch, extra.get("lengths"), extra.get("attention_mask"))

    def _pad_value(self, path: Path) -> float:
        if not isinstance(self.pad_value, Mapping):
            return self.pad_value
        return self.pad_value.get(path[-1], 0) if path else 0


@dataclass(frozen=True)
class PackedCollate:
    """Concatenate samples without padding, for variable-length attention; for ``collate_fn``.

    Samples are as for `PaddedCollate`; all fields of a sample have one length. Dicts get three more keys, other
    samples give a `PackedBatch`:

    - ``cu_seqlens``: where each sample begins and, last, the total; int32, shape ``[n + 1]``. It is ``cu_seqlens_q``
      of ``flash_attn_varlen_func`` and the offsets of ``torch.nested.nested_tensor_from_jagged``.
    - ``max_seqlen``: the length of the longest sample, an int.
    - ``position_ids``: the position of each token in its sample, int64, shape ``[total]``.

    Args:
        fixed: Names of fields whose dimension 0 is not a length (dict keys, or positions in a tuple). They are
            stacked.

    Raises:
        TypeError: If an argument or a field has the wrong type.
        ValueError: If a batch is empty; samples differ in keys, dtypes or further dimensions; the fields of a
            sample differ in length; a name is not a field; or a batch has 2**31 tokens or more.

    >>> batch = PackedCollate()([{"ids": [5, 6, 7]}, {"ids": [8]}])
    >>> batch["ids"], batch["cu_seqlens"], batch["max_seqlen"], batch["position_ids"]
    (tensor([5, 6, 7, 8]), tensor([0, 3, 4], dtype=torch.int32), 3, tensor([0, 1, 2, 0]))
    """

    _: KW_ONLY
    fixed: Sequence[Name] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "fixed", _checked_names(self.fixed))

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Make a batch of samples."""
        fields = _Fields(self.fixed)

        def join(tensors: list[torch.Tensor], path: Path) -> torch.Tensor:
            return torch.stack(tensors) if fields.is_fixed(tensors, path) else torch.cat(tensors)

        batch = _gather(_not_empty(samples), join)
        fields.refuse_unknown(self.fixed, "fixed")
        lengths = fields.one_length("packed samples need one length for all of their fields")
        packed = PackedBatch(batch, cumulative_lengths(lengths), max(lengths), _positions(lengths))
        if not isinstance(batch, dict):
            return packed
        return _with_keys(batch, {key: value for key, value in packed._asdict().items() if key != "values"})


def cumulative_lengths(lengths: Sequence[int]) -> torch.Tensor:
    """Return where each sequence begins and, last, where the last one ends, int32, shape ``[n + 1]``.

    Raises:
        ValueError: If there are more tokens than int32, the type that variable-length attention takes, can count.

    >>> cumulative_lengths([3, 0, 2]).tolist()
    [0, 3, 3, 5]
    """
    if (total := sum(lengths)) >= _INT32_END:
        raise ValueError(f"a packed batch must have fewer than 2**31 tokens, got {total}: make smaller batches")
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@dataclass
class _Fields:
    """The fields with a dimension 0 that a batch has, and their lengths."""

    fixed: Sequence[Name]
    lengths: dict[Path, list[int]] = field(default_factory=dict)
    names: set[Name] = field(default_factory=set)

    def is_fixed(self, tensors: list[torch.Tensor], path: Path) -> bool:
        """Record a field, check its shapes and return whether it is named in ``fixed``."""
        self.names.update(path[-1:])
        fixed = bool(path) and path[-1] in self.fixed
        first = tensors[0].shape if fixed else tensors[0].shape[1:]
        for sample, tensor in enumerate(tensors):
            if tensor.ndim != tensors[0].ndim or (tensor.shape if fixed else tensor.shape[1:]) != first:
                allowed = "is named in fixed: all shapes must be equal" if fixed else "may differ in dimension 0 only"
                raise ValueError(
                    f"{_place(path, sample)} has shape {list(tensor.shape)}, {_place(path, 0)} has "
                    f"{list(tensors[0].shape)}: this field {allowed}"
                )
        if not fixed:
            self.lengths[path] = [tensor.shape[0] for tensor in tensors]
        return fixed

    def refuse_unknown(self, names: Iterable[Name], argument: str) -> None:
        """Raise a ValueError where a name is not a field."""
        if unknown := [name for name in names if name not in self.names]:
            known = ", ".join(sorted(map(repr, self.names))) or "no named field"
            raise ValueError(f"{argument} must name fields of the samples, got {unknown}: the samples have {known}")

    def one_length(self, need: str) -> list[int]:
        """Return the length of each sample; raise a ValueError where its fields disagree."""
        if not self.lengths:
            raise ValueError("the samples have no tensor with a dimension 0, and therefore no length")
        first, *others = self.lengths
        for other in others:
            for sample, (length, found) in enumerate(zip(self.lengths[first], self.lengths[other], strict=True)):
                if length != found:
                    raise ValueError(
                        f"{_place(other, sample)} has length {found}, {_place(first, sample)} has {length}: {need}; "
                        "name the others in fixed"
                    )
        return self.lengths[first]


def _gather(values: Sequence[Any], join: Join, path: Path = ()) -> Any:
    """Join the same field of all samples, and the fields within it."""
    read = [_read(value, path, sample) for sample, value in enumerate(values)]
    kind = read[0][0]
    for sample, (other, _) in enumerate(read):
        if other != kind:
            raise TypeError(
                f"{_place(path, sample)} is {other}, {_place(path, 0)} is {kind}: give all samples one structure"
            )
    if kind == "a dict":
        return {key: _gather([v[key] for v in values], join, (*path, key)) for key in _same_keys(values, path)}
    if kind == "a tuple":
        joined = [_gather([v[i] for v in values], join, (*path, i)) for i in range(_same_count(values, path))]
        return _like(values[0], joined)
    if kind == "text":
        return list(values)
    tensors = _one_dtype([value for _, value in read], path)
    return join(tensors, path) if kind == "a tensor" else torch.stack(tensors)


def _read(value: Any, path: Path, sample: int) -> tuple[str, Any]:
    """Return how a value is joined, and the value; numbers and lists of numbers as tensors."""
    if isinstance(value, torch.Tensor):
        return ("a tensor" if value.ndim else "a number"), value
    if isinstance(value, Mapping):
        return "a dict", value
    if isinstance(value, str | bytes):
        return "text", value
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        return ("a tensor" if value.ndim else "a number"), torch.from_numpy(_plain_array(np.asarray(value)))
    if isinstance(value, list) and (tensor := _tensor_of_list(value)) is not None:
        return "a tensor", tensor
    if isinstance(value, tuple | list):
        return "a tuple", value
    if isinstance(value, _NUMBERS):
        return "a number", torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    found = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
    raise TypeError(
        f"{_place(path, sample)} must be a tensor, numpy array, list of numbers, number, string, or a dict or tuple "
        f"of these, got {found}: convert it in the dataset, or leave it out"
    )


def _tensor_of_list(values: list[Any]) -> torch.Tensor | None:
    """Return a list of numbers as a tensor, or None where it is a list of something else."""
    if not values:
        return torch.zeros(0, dtype=torch.int64)
    if not isinstance(values[0], _NUMBERS | np.number):
        return None
    try:
        array = np.array(values)  # six times as fast as torch.tensor
    except ValueError:  # numbers beside lists of several lengths
        return None
    if array.ndim != 1 or array.dtype.kind not in "biufc":
        return None
    return torch.from_numpy(array.astype(np.float32) if array.dtype == np.float64 else array)


def _plain_array(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array in native byte order, contiguous and writeable, copied only where it is not."""
    return np.require(array, dtype=array.dtype.newbyteorder("="), requirements=["C", "W"])


def _one_dtype(tensors: list[torch.Tensor], path: Path) -> list[torch.Tensor]:
    """Return the tensors; an empty list of int64 takes the dtype of the others, any other difference is refused."""
    first = next((tensor for tensor in tensors if tensor.shape != (0,)), tensors[0]).dtype
    for sample, tensor in enumerate(tensors):
        if tensor.dtype != first:
            if tensor.shape != (0,):
                raise ValueError(
                    f"{_place(path, sample)} is of {tensor.dtype}, {_place(path, 0)} of {tensors[0].dtype}: "
                    "convert them to one dtype in the dataset"
                )
            tensors[sample] = tensor.to(first)
    return tensors


def _same_keys(values: Sequence[Mapping[str, Any]], path: Path) -> list[str]:
    first = values[0].keys()
    for sample, value in enumerate(values):
        if value.keys() != first:
            lacks, has = sorted(map(repr, first - value.keys())), sorted(map(repr, value.keys() - first))
            raise ValueError(
                f"{_place(path, sample)} has other keys than {_place(path, 0)}: it lacks [{', '.join(lacks)}] and has "
                f"[{', '.join(has)}] besides: give all samples the same keys"
            )
    return list(first)


def _same_count(values: Sequence[Sequence[Any]], path: Path) -> int:
    first = len(values[0])
    for sample, value in enumerate(values):
        if len(value) != first:
            raise ValueError(f"{_place(path, sample)} has {len(value)} elements, {_place(path, 0)} has {first}")
    return first


def _like(sample: Any, fields: list[Any]) -> Any:
    """Return fields as the type of the sample: a named tuple, a tuple or a list."""
    if hasattr(sample, "_fields"):
        return type(sample)(*fields)
    return fields if isinstance(sample, list) else tuple(fields)


def _place(path: Path, sample: int | None = None) -> str:
    """Name a field of a sample for an error: ``samples[3]['a'][0]``."""
    return f"samples[{'i' if sample is None else sample}]" + "".join(f"[{key!r}]" for key in path)


def _padded(tensors: Sequence[torch.Tensor], pad_value: float, length_multiple: int) -> torch.Tensor:
    """Stack tensors of shapes ``[length, ...]`` into ``[n, longest, ...]``."""
    longest = round_up(max(tensor.shape[0] for tensor in tensors), length_multiple)
    filled = tensors[0].new_full((len(tensors), longest, *tensors[0].shape[1:]), pad_value)
    for row, tensor in zip(filled, tensors, strict=True):
        row[: tensor.shape[0]] = tensor
    return filled


def _positions(lengths: Sequence[int]) -> torch.Tensor:
    """Return the position of each token in its own sequence: 0, 1, 2, 0, 1 for lengths 3 and 2."""
    counts = torch.tensor(lengths, dtype=torch.int64)
    return torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts).repeat_interleave(counts)


def _refuse_pad_value(value: float, dtype: torch.dtype, path: Path) -> None:
    """Raise a ValueError where a dtype cannot hold the pad value: torch would truncate it silently."""
    if dtype.is_floating_point or dtype.is_complex:
        return
    low, high = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    if not (low <= value <= high and value == int(value)):
        raise ValueError(
            f"pad_value must be a whole number from {low} to {high} for {_place(path)} of {dtype}, got {value!r}: "
            "convert the field in the dataset, or give each field its own value by a mapping"
        )


def _checked_names(names: Any) -> tuple[Name, ...]:
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise TypeError(f"fixed must be a sequence of dict keys or positions, such as ['target'], got {names!r}")
    return tuple(names)


def _not_empty(samples: Any) -> Sequence[Any]:
    if len(samples) == 0:
        raise ValueError("samples must hold at least one sample, got none: a batch sampler may not yield empty batches")
    return list(samples)


def _with_keys(batch: dict[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch with keys added, or raise a ValueError where it has one of them already."""
    if taken := [key for key in extra if key in batch]:
        raise ValueError(f"the samples have {taken} already, which the collate function adds: rename or remove them")
    return {**batch, **extra}
