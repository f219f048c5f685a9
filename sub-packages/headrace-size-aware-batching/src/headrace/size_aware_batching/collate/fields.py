"""Reading samples of any structure into tensors, and joining each field over the samples."""

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

Name: TypeAlias = str | int
Path: TypeAlias = tuple[Name, ...]  # keys and positions that lead to a field of a sample
Join: TypeAlias = Callable[[list[torch.Tensor], Path], Any]

_NUMBERS = bool | int | float | complex


@dataclass
class Fields:
    """The fields of a batch: all names, and the lengths of the fields with a dimension 0."""

    fixed: Sequence[Name]
    max_length: int | None
    spans: Sequence[tuple[int, int]] | None = None  # what to take of each value: one that is cut comes repeatedly
    lengths: dict[Path, list[int]] = field(default_factory=dict)
    names: set[Name] = field(default_factory=set)
    others: set[Name] = field(default_factory=set)  # numbers and texts

    def gather(self, values: Sequence[Any], join: Join, path: Path = ()) -> Any:
        """Join the same field of all samples, and the fields within it."""
        read: list[tuple[str, Any]] = []
        for sample, value in enumerate(values):
            again = sample > 0 and value is values[sample - 1]
            read.append(read[-1] if again else _read(value, path, sample))
        kind = read[0][0]
        for sample, (other, _) in enumerate(read):
            if other != kind:
                raise TypeError(
                    f"{place(path, sample)} is {other}, {place(path, 0)} is {kind}: give all samples one structure"
                )
        if kind == "a dict":
            return {key: self.gather([v[key] for v in values], join, (*path, key)) for key in _same_keys(values, path)}
        if kind == "a tuple":
            places = range(_same_count(values, path))
            return like(values[0], [self.gather([v[i] for v in values], join, (*path, i)) for i in places])
        if kind == "a tensor":
            return join(_one_dtype([value for _, value in read], path), path)
        self.others.update(path[-1:])
        return list(values) if kind == "text" else torch.stack(_one_dtype([value for _, value in read], path))

    def is_fixed(self, tensors: list[torch.Tensor], path: Path) -> bool:
        """Record a field, check its shapes, return whether it is in ``fixed``; truncate other fields in place."""
        self.names.update(path[-1:])
        fixed = bool(path) and path[-1] in self.fixed
        first = tensors[0].shape if fixed else tensors[0].shape[1:]
        for sample, tensor in enumerate(tensors):
            if tensor.ndim != tensors[0].ndim or (tensor.shape if fixed else tensor.shape[1:]) != first:
                allowed = "is named in fixed: all shapes must be equal" if fixed else "may differ in dimension 0 only"
                raise ValueError(
                    f"{place(path, sample)} has shape {list(tensor.shape)}, {place(path, 0)} has "
                    f"{list(tensors[0].shape)}: this field {allowed}"
                )
        if not fixed:
            if self.spans is not None:
                tensors[:] = [tensor[start:stop] for tensor, (start, stop) in zip(tensors, self.spans, strict=True)]
            if self.max_length is not None:
                tensors[:] = [tensor[: self.max_length] for tensor in tensors]
            self.lengths[path] = [tensor.shape[0] for tensor in tensors]
        return fixed

    def refuse_unknown(self, names: Iterable[Name], argument: str, of_any: bool = False) -> None:
        """Raise a ValueError if a name is not that of a field; ``of_any``: it may name numbers and texts."""
        known = self.names | self.others if of_any else self.names
        if unknown := [name for name in names if name not in known]:
            there = ", ".join(sorted(map(repr, known))) or "no such field with a name"
            which = "of the samples" if of_any else "with a dimension 0"
            raise ValueError(f"{argument} must name fields {which}, got {unknown}: the samples have {there}")

    def refuse_over(self, max_total_size: int | None, found: int, cure: str = "") -> None:
        """Raise a ValueError if a batch of ``found`` elements is over the budget."""
        if max_total_size is not None and found > max_total_size:
            count, longest = len(next(iter(self.lengths.values()))), max(map(max, self.lengths.values()))
            raise ValueError(
                f"the batch must hold at most max_total_size={max_total_size} elements, got {found} of {count} "
                f"samples, the longest with {longest}: give the batch sampler {cure}the sizes that samples have "
                "here, and the collate function max_length= where the sampler has it"
            )

    def one_length(self, need: str) -> list[int]:
        """Return the length of each sample; raise a ValueError if its fields differ in length."""
        if not self.lengths:
            raise ValueError("the samples have no tensor with a dimension 0, and therefore no length")
        first, *others = self.lengths
        for other in others:
            for sample, (length, found) in enumerate(zip(self.lengths[first], self.lengths[other], strict=True)):
                if length != found:
                    raise ValueError(
                        f"{place(other, sample)} has length {found}, {place(first, sample)} has {length}: {need}; "
                        "name the others in fixed"
                    )
        return self.lengths[first]


def _read(value: Any, path: Path, sample: int) -> tuple[str, Any]:
    """Return the kind of a value and the value; numbers and lists of numbers become tensors."""
    if isinstance(value, torch.Tensor):
        return ("a tensor" if value.ndim else "a number"), value
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        return ("a tensor" if value.ndim else "a number"), torch.from_numpy(_plain_array(np.asarray(value)))
    if isinstance(value, list) and (tensor := _tensor_of_list(value)) is not None:
        return "a tensor", tensor
    if isinstance(value, Mapping):
        return "a dict", value
    if isinstance(value, str | bytes):
        return "text", value
    if isinstance(value, tuple | list):
        return "a tuple", value
    if isinstance(value, _NUMBERS):
        return "a number", torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    found = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
    raise TypeError(
        f"{place(path, sample)} must be a tensor, numpy array, list of numbers, number, string, or a dict or tuple "
        f"of these, got {found}: convert it in the dataset, or leave it out"
    )


def _tensor_of_list(values: list[Any]) -> torch.Tensor | None:
    """Return a list of numbers as a tensor, or None for any other list."""
    if not values:
        return torch.zeros(0, dtype=torch.int64)
    first = type(values[0])
    if first is int or first is float:
        # Four times as fast as numpy, which inspects each item's type first. Fails for values that numpy would widen.
        array = np.empty(len(values), np.int64 if first is int else np.float32)
        try:
            struct.pack_into(f"{len(values)}{'q' if first is int else 'f'}", array.data, 0, *values)
        except (struct.error, OverflowError):
            pass
        else:
            return torch.from_numpy(array)
    if not isinstance(values[0], _NUMBERS | np.number):
        return None
    try:
        array = np.array(values)
    except ValueError:  # numbers beside lists of several lengths
        return None
    if array.ndim != 1 or array.dtype.kind not in "biufc":
        return None
    return torch.from_numpy(array.astype(np.float32) if array.dtype == np.float64 else array)


def _plain_array(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array in native byte order, contiguous and writeable, copied only if necessary."""
    if array.flags.carray and array.dtype.isnative:  # faster than np.require
        return array
    return np.require(array, dtype=array.dtype.newbyteorder("="), requirements=["C", "W"])


def _one_dtype(tensors: list[torch.Tensor], path: Path) -> list[torch.Tensor]:
    """Return the tensors; an empty list of int64 takes the dtype of the others, any other difference is refused."""
    first = next((tensor for tensor in tensors if tensor.shape != (0,)), tensors[0]).dtype
    for sample, tensor in enumerate(tensors):
        if tensor.dtype != first:
            if tensor.shape != (0,):
                raise ValueError(
                    f"{place(path, sample)} is of {tensor.dtype}, {place(path, 0)} of {tensors[0].dtype}: "
                    "convert them to one dtype in the dataset"
                )
            tensors[sample] = tensor.to(first)
    return tensors


def _same_keys(values: Sequence[Mapping[str, Any]], path: Path) -> list[str]:
    first = values[0].keys()
    for sample, value in enumerate(values):
        if value.keys() != first:
            lacks, has = sorted(map(repr, first - value.keys())), sorted(map(repr, value.keys() - first))
            found = [f"lacks [{', '.join(lacks)}]"] if lacks else []
            found += [f"has [{', '.join(has)}] besides"] if has else []
            raise ValueError(
                f"{place(path, sample)} has other keys than {place(path, 0)}: it {' and '.join(found)}: give all "
                "samples the same keys"
            )
    return list(first)


def _same_count(values: Sequence[Sequence[Any]], path: Path) -> int:
    first = len(values[0])
    for sample, value in enumerate(values):
        if len(value) != first:
            raise ValueError(f"{place(path, sample)} has {len(value)} elements, {place(path, 0)} has {first}")
    return first


def like(sample: Any, fields: list[Any]) -> Any:
    """Return fields as the type of the sample: a named tuple, a tuple or a list."""
    if hasattr(sample, "_fields"):
        return type(sample)(*fields)
    return fields if isinstance(sample, list) else tuple(fields)


def place(path: Path, sample: int | None = None) -> str:
    """Name a field of a sample for an error: ``samples[3]['a'][0]``."""
    return f"samples[{'i' if sample is None else sample}]" + "".join(f"[{key!r}]" for key in path)


def checked_names(names: Any, argument: str = "fixed") -> tuple[Name, ...]:
    """Return the names of fields as a tuple."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise TypeError(f"{argument} must be a sequence of dict keys or positions, such as ['target'], got {names!r}")
    return tuple(names)


def not_empty(samples: Any) -> Sequence[Any]:
    """Return the samples of a batch; refuse an empty batch."""
    if len(samples) == 0:
        raise ValueError("samples must hold at least one sample, got none: a batch sampler may not yield empty batches")
    return list(samples)


def with_keys(batch: dict[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch with keys added, or raise a ValueError if it already has one of them."""
    if taken := [key for key in extra if key in batch]:
        raise ValueError(f"the samples have {taken} already, which the collate function adds: rename or remove them")
    return {**batch, **extra}
