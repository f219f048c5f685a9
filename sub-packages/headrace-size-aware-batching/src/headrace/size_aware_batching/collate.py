"""Makes one batch of samples of different lengths: padded to the longest, or packed one after another."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from numbers import Real
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.size_aware_batching.planning.options import whole_number

Path: TypeAlias = tuple[str | int, ...]
NUMBERS = bool | int | float | complex
Leaf: TypeAlias = Callable[[list[torch.Tensor], Path], Any]


def gather(values: Sequence[Any], leaf: Leaf, path: Path = ()) -> Any:
    """Join the same field of all samples, and the fields within it.

    Args:
        values: What each sample holds there, one entry a sample, at least one.
        leaf: Joins tensors that have a first dimension, given the path to them.
        path: Keys and positions that lead to the field.

    Returns:
        Dicts and tuples of the same form; numbers and 0-d tensors stacked, strings and bytes in a list.

    Raises:
        TypeError: If samples hold different kinds of things there, or something that cannot be joined.
        ValueError: If keys, lengths of tuples or dtypes differ.

    >>> gather([{"x": 1, "name": "a"}, {"x": 2, "name": "b"}], leaf=lambda tensors, path: None)
    {'x': tensor([1, 2]), 'name': ['a', 'b']}
    """
    kind = same_kind(values, path)
    if kind == "a dict":
        return {key: gather([value[key] for value in values], leaf, (*path, key)) for key in same_keys(values, path)}
    if kind == "a tuple":
        joined = [gather([v[i] for v in values], leaf, (*path, i)) for i in range(same_count(values, path))]
        return like(values[0], joined)
    if kind == "text":
        return list(values)
    tensors = [as_tensor(value) for value in values]
    same_dtype(tensors, path)
    return leaf(tensors, path) if kind == "a tensor" else torch.stack(tensors)


def place(path: Path, sample: int | None = None) -> str:
    """Name a field of a sample for an error.

    >>> place(("a", 0), sample=3), place(())
    ("samples[3]['a'][0]", 'samples[i]')
    """
    return f"samples[{'i' if sample is None else sample}]" + "".join(f"[{key!r}]" for key in path)


def kind_of(value: Any) -> str | None:
    """Return how a value is joined, None where it cannot be.

    >>> kind_of([1, 2]), kind_of((1, 2)), kind_of(0.5), kind_of(object())
    ('a tensor', 'a tuple', 'a number', None)
    """
    if isinstance(value, torch.Tensor | np.ndarray | np.generic) and not isinstance(value, str | bytes):
        known = isinstance(value, torch.Tensor) or value.dtype.kind in "biufc"
        return ("a tensor" if value.ndim else "a number") if known else None
    if isinstance(value, Mapping):
        return "a dict"
    if isinstance(value, str | bytes):
        return "text"
    if isinstance(value, list) and all(isinstance(element, NUMBERS) for element in value):
        return "a tensor"  # token ids as a tokenizer gives them
    if isinstance(value, tuple | list):
        return "a tuple"
    return "a number" if isinstance(value, NUMBERS) else None


def same_kind(values: Sequence[Any], path: Path) -> str:
    """Return how the values are joined, or raise a TypeError that names the sample that does not go with them."""
    kinds = [known_kind(value, path, sample) for sample, value in enumerate(values)]
    for sample, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise TypeError(
                f"{place(path, sample)} is {kind}, {place(path, 0)} is {kinds[0]}: give all samples one form"
            )
    return kinds[0]


def known_kind(value: Any, path: Path, sample: int) -> str:
    """Return how a value is joined, or raise a TypeError that names it."""
    if (kind := kind_of(value)) is None:
        what = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
        raise TypeError(
            f"{place(path, sample)}: got {what}, expected tensors, numpy arrays or lists of numbers, numbers, "
            "strings, or dicts and tuples of these: convert it in the dataset, or leave it out"
        )
    return kind


def same_keys(values: Sequence[Mapping[str, Any]], path: Path) -> list[str]:
    """Return the keys of the first dict, or raise a ValueError where another one has others."""
    first = values[0].keys()
    for sample, value in enumerate(values):
        if value.keys() != first:
            lacks, has = sorted(map(repr, first - value.keys())), sorted(map(repr, value.keys() - first))
            raise ValueError(
                f"{place(path, sample)} has other keys than {place(path, 0)}: it lacks [{', '.join(lacks)}] and has "
                f"[{', '.join(has)}] besides: give all samples the same keys"
            )
    return list(first)


def same_count(values: Sequence[Sequence[Any]], path: Path) -> int:
    """Return the number of elements of the first tuple, or raise a ValueError where another one has more or fewer."""
    first = len(values[0])
    for sample, value in enumerate(values):
        if len(value) != first:
            raise ValueError(f"{place(path, sample)} has {len(value)} elements, {place(path, 0)} has {first}")
    return first


def same_dtype(tensors: Sequence[torch.Tensor], path: Path) -> None:
    """Raise a ValueError where a tensor has another dtype than the first."""
    for sample, tensor in enumerate(tensors):
        if tensor.dtype != tensors[0].dtype:
            raise ValueError(
                f"{place(path, sample)} is of {tensor.dtype}, {place(path, 0)} of {tensors[0].dtype}: "
                "convert them to one dtype in the dataset"
            )


def like(sample: Any, fields: list[Any]) -> Any:
    """Return fields as what the sample is: a named tuple, a tuple or a list."""
    if hasattr(sample, "_fields"):
        return type(sample)(*fields)
    return fields if isinstance(sample, list) else tuple(fields)


def as_tensor(value: Any) -> torch.Tensor:
    """Turn a tensor, array, list of numbers or number into a tensor, without a copy where that can be.

    Floats become float64, as in ``torch.utils.data.default_collate``.

    >>> as_tensor(0.5).dtype, as_tensor([]).dtype, as_tensor(np.arange(3)[::-1])
    (torch.float64, torch.int64, tensor([2, 1, 0]))
    """
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.ndarray | np.generic):
        return torch.from_numpy(plain_array(np.asarray(value)))
    if value == []:
        return torch.zeros(0, dtype=torch.int64)
    real = any(isinstance(element, float) for element in (value if isinstance(value, list) else [value]))
    return torch.tensor(value, dtype=torch.float64 if real else None)


def plain_array(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array as torch takes it: native byte order, contiguous, writeable; what is so is not copied."""
    native = array.dtype.newbyteorder("=")
    return np.require(array, dtype=native, requirements=["C", "W"])  # memory-mapped arrays are not writeable


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


Name = str | int


@dataclass
class Fields:
    """Which fields with a first dimension were met in a batch.

    Args:
        fixed: Names of those whose first dimension is no length.
    """

    fixed: Sequence[Name]
    lengths: dict[Path, list[int]] = field(default_factory=dict)
    names: set[Name] = field(default_factory=set)

    def enter(self, tensors: list[torch.Tensor], path: Path) -> bool:
        """Note a field, check its shapes, and return whether it is a fixed one."""
        self.names.update(path[-1:])
        is_fixed = bool(path) and path[-1] in self.fixed
        refuse_other_shape(tensors, path, is_fixed)
        if not is_fixed:
            self.lengths[path] = lengths_of(tensors)
        return is_fixed

    def refuse_unknown(self, names: Iterable[Name], argument: str) -> None:
        """Raise a ValueError where a name fits no field."""
        if unknown := [name for name in names if name not in self.names]:
            have = ", ".join(sorted(map(repr, self.names))) or "no name"
            raise ValueError(f"{argument}: got {unknown}, but the samples' tensors have {have}")


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
