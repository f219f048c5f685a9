"""What a mixture draws from: the datasets of a concatenation, index ranges, or samples of equal weight."""

from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import ConcatDataset, Dataset

from headrace.weighted_sampler.checks import integer
from headrace.weighted_sampler.groups import group_by_weight
from headrace.weighted_sampler.keyed import Indices
from headrace.weighted_sampler.weights import Ratio, exact

T_co = TypeVar("T_co", covariant=True)
Weights: TypeAlias = (
    Mapping[str, Ratio]
    | Mapping[int, Ratio]
    | Mapping[tuple[int, int], Ratio]
    | Sequence[Ratio]
    | NDArray[Any]
    | torch.Tensor
)


class NamedConcatDataset(ConcatDataset[T_co]):
    """Join datasets and remember their names, so that weights can be given by name.

    Any dataset with ``names`` and ``cumulative_sizes`` will do in its place.

    Args:
        datasets: ``{name: dataset}``, in the order in which they are joined.

    Raises:
        TypeError: If it is no mapping, or a name is no text.

    >>> both = NamedConcatDataset({"proteins": range(10), "peptides": range(3)})
    >>> both.names, both.cumulative_sizes, len(both)
    (('proteins', 'peptides'), [10, 13], 13)
    """

    def __init__(self, datasets: Mapping[str, Dataset[T_co] | Sequence[T_co]]) -> None:
        _check_named(datasets)
        super().__init__(datasets.values())  # type: ignore[arg-type]  # a sequence is a dataset
        self.names = tuple(datasets)


def _check_named(datasets: object) -> None:
    if not isinstance(datasets, Mapping):
        raise TypeError(f"datasets must be a mapping {{name: dataset}}, got {type(datasets).__name__}")
    if not datasets:
        raise ValueError("datasets must hold at least one dataset, got none")
    for name, dataset in datasets.items():
        if not isinstance(name, str):
            raise TypeError(f"datasets must have names that are texts, got {name!r}")
        if not isinstance(dataset, Sized):
            raise TypeError(f"datasets[{name!r}] must have a length, got {type(dataset).__name__}")


@dataclass(frozen=True)
class Source:
    """One source.

    Attributes:
        name: Its name, or what its indices are, for the report.
        begin: First of its indices; of its places in ``Sources.members`` where there are such.
        end: One past the last.
        weight: As given, exactly.
    """

    name: str
    begin: int
    end: int
    weight: Fraction

    @property
    def size(self) -> int:
        """Number of samples."""
        return self.end - self.begin


@dataclass(frozen=True)
class Sources:
    """All sources, by rising ``begin``, those of weight 0 included.

    Attributes:
        parts: The sources.
        members: Dataset indices at the sources' places; None when the places are the indices.
        digest: Names the members; empty when there are none.
        rounding: Largest relative change of a weight, from rounding them into groups.
    """

    parts: tuple[Source, ...]
    members: Indices | None = field(default=None, repr=False, compare=False)
    digest: str = ""
    rounding: float = 0.0

    @property
    def weights(self) -> list[Fraction]:
        """The weights, in the order of the sources."""
        return [part.weight for part in self.parts]


def read_sources(argument: str, weights: Weights, dataset: Sized) -> Sources:
    """Find out what the weights name and check them.

    Args:
        argument: What to call the weights in an error.
        weights: By dataset name, by position in a concatenation (a mapping or a sequence), by index range
            ``(begin, end)``, or one a sample.
        dataset: What is drawn from.

    Raises:
        TypeError: If the keys are of no such kind, or a weight is no number.
        ValueError: If a source is missing, unknown or empty, ranges overlap or leave the dataset, or a
            weight is negative, NaN or infinite, or all are 0.

    >>> [part.name for part in read_sources("weights", {(10, 30): 0.25, (0, 10): 2}, range(30)).parts]
    ['0-10', '10-30']
    """
    sources = _read(argument, weights, dataset)
    if not any(sources.weights):
        raise ValueError(
            f"{argument} must hold at least one weight above 0, got {_shown(weights)}: there is nothing to draw"
        )
    return sources


def _read(argument: str, weights: object, dataset: Sized) -> Sources:
    if isinstance(weights, torch.Tensor):
        dense = weights.to_dense()
        # numpy knows no bfloat16; all other kinds keep their own decimals.
        weights = (dense.double() if dense.dtype == torch.bfloat16 else dense).numpy(force=True)
    if isinstance(weights, np.ndarray) and weights.ndim != 1:
        raise TypeError(
            f"{argument} must hold numbers in one dimension, got dtype {weights.dtype}, shape {weights.shape}"
        )
    if isinstance(weights, Mapping):
        return Sources(_from_mapping(argument, weights, dataset))
    if isinstance(weights, (Sequence, np.ndarray)) and not isinstance(weights, (str, bytes)):
        return _from_sequence(argument, weights, dataset)
    raise TypeError(f"{argument} must be a mapping or a sequence of numbers, got {type(weights).__name__}")


def _from_mapping(argument: str, weights: Mapping[Any, Ratio], dataset: Sized) -> tuple[Source, ...]:
    kinds = {_kind(argument, key) for key in weights}
    if len(kinds) > 1:
        raise TypeError(f"{argument} must have keys of one kind, got {sorted(kinds)}")
    if not weights or kinds == {"range"}:
        return _ranges(argument, weights, len(dataset))
    return _joined(argument, weights, dataset, named=kinds == {"name"})


def _kind(argument: str, key: object) -> str:
    if isinstance(key, str):
        return "name"
    if isinstance(key, tuple) and len(key) == 2:
        return "range"
    if isinstance(key, (int, np.integer)) and not isinstance(key, bool):
        return "position"
    raise TypeError(
        f"{argument} keys must be tuples (begin, end), dataset names, or positions in a ConcatDataset, got {key!r}"
    )


def _joined(argument: str, weights: Mapping[Any, Ratio], dataset: Sized, *, named: bool) -> tuple[Source, ...]:
    """The datasets of a concatenation, by name or by position; each has to have a weight."""
    ends, names = _parts_of(argument, dataset, named)
    allowed: Sequence[Any] = names if named else range(len(ends))
    known = set(allowed)
    if unknown := [key for key in weights if key not in known]:
        raise ValueError(f"{argument} names {unknown[0]!r}, which the dataset does not have; it has {_listed(allowed)}")
    if missing := [key for key in allowed if key not in weights]:
        raise ValueError(f"{argument} lacks {_listed(missing)}: every dataset needs a weight, and 0 leaves it out")
    begins = [0, *ends]
    return tuple(
        _source(argument, name, begins[place], end, weights[key])
        for place, (end, name, key) in enumerate(zip(ends, names, allowed, strict=True))
    )


def _parts_of(argument: str, dataset: Sized, named: bool) -> tuple[list[int], list[str]]:
    ends = getattr(dataset, "cumulative_sizes", None)
    if ends is None:
        raise TypeError(
            f"{argument} by {'name' if named else 'position'} needs a concatenation of datasets, got "
            f"{type(dataset).__name__}; give a NamedConcatDataset or a ConcatDataset, or weights by index range"
        )
    names = getattr(dataset, "names", None)
    if names is None and named:
        raise TypeError(
            f"{argument} by name needs a dataset with names, and {type(dataset).__name__} has none; "
            "give a NamedConcatDataset({name: dataset, ...}), or weights by position"
        )
    bounds, called = list(map(int, ends)), list(map(str, range(len(ends)) if names is None else names))
    if len(called) != len(bounds) or len(set(called)) != len(called):
        raise ValueError(f"dataset.names must be {len(bounds)} different names, one a dataset, got {_listed(called)}")
    if bounds != sorted(bounds) or bounds[-1:] != [len(dataset)]:
        raise ValueError(f"dataset.cumulative_sizes must rise to len(dataset), {len(dataset)}, got {_listed(bounds)}")
    return bounds, called


def _source(argument: str, name: str, begin: int, end: int, weight: Ratio) -> Source:
    share = exact(f"{argument}[{name!r}]", weight)
    if share and end == begin:
        raise ValueError(f"{argument}[{name!r}] is {weight}, but that dataset is empty; give it weight 0")
    return Source(name, begin, end, share)


def _ranges(argument: str, weights: Mapping[Any, Ratio], length: int) -> tuple[Source, ...]:
    ranges = sorted((_range(argument, *item, length) for item in weights.items()), key=lambda part: part.begin)
    _refuse_overlap(argument, ranges)
    return tuple(ranges)


def _range(argument: str, key: tuple[int, int], weight: Ratio, length: int) -> Source:
    begin = integer(f"begin of the {argument} range {key}", key[0], 0)
    end = integer(f"end of the {argument} range {key}", key[1], 0)
    if end <= begin:
        fault = "is reversed" if end < begin else "is empty"
        raise ValueError(f"{argument} range ({begin}, {end}) {fault}: end must be greater than begin")
    if end > length:
        raise ValueError(
            f"{argument} range ({begin}, {end}) reaches outside the dataset of {length} samples: "
            f"end must be at most {length}"
        )
    return Source(f"{begin}-{end}", begin, end, exact(f"weight of the {argument} range ({begin}, {end})", weight))


def _refuse_overlap(argument: str, ranges: Iterable[Source]) -> None:
    before: Source | None = None
    for part in ranges:
        if before is not None and part.begin < before.end:
            raise ValueError(
                f"{argument} ranges ({before.begin}, {before.end}) and ({part.begin}, {part.end}) overlap: "
                "every sample may be in one range only"
            )
        before = part


def _from_sequence(argument: str, weights: Sequence[Any] | NDArray[Any], dataset: Sized) -> Sources:
    parts = len(getattr(dataset, "cumulative_sizes", ()))
    if parts and len(weights) == parts:
        return Sources(_joined(argument, dict(enumerate(weights)), dataset, named=False))
    if len(weights) == len(dataset):
        return _per_sample(argument, weights)
    joined = f"one for each of the {parts} datasets, or " if parts else ""
    raise ValueError(
        f"{argument} must hold {joined}one weight for each of the {len(dataset)} samples, got {len(weights)}"
    )


def _per_sample(argument: str, weights: ArrayLike) -> Sources:
    given = np.asarray(weights)
    if given.dtype == object:  # fractions and decimals, or what is no number
        given = np.array([float(exact(f"{argument}[{place}]", weight)) for place, weight in enumerate(given)])
    _check_numbers(argument, given)
    if not given.any():
        return Sources((Source("all samples", 0, len(given), Fraction(0)),))
    groups = group_by_weight(given)
    begins = (0, *groups.ends)
    parts = tuple(
        Source(f"weight {weight:.6g}", begin, end, exact(argument, weight))
        for begin, end, weight in zip(begins, groups.ends, groups.weights, strict=False)
    )
    return Sources(parts, groups.members, groups.digest, groups.rounding)


def _check_numbers(argument: str, given: NDArray[Any]) -> None:
    if given.ndim != 1 or given.dtype.kind not in "iuf":
        raise TypeError(f"{argument} must hold numbers in one dimension, got dtype {given.dtype}, shape {given.shape}")
    wrong = np.flatnonzero(~(np.isfinite(given) & (given >= 0)))
    if wrong.size:
        raise ValueError(
            f"{argument} must be finite and not negative, got {given[wrong[0]]} for sample {wrong[0]} "
            f"({wrong.size} such weights); 0 leaves a sample out"
        )


def _listed(keys: Sequence[Any]) -> str:
    shown = ", ".join(map(repr, keys[:10]))
    return shown if len(keys) <= 10 else f"{shown} and {len(keys) - 10} more"


def _shown(weights: object) -> str:
    text = repr(weights)
    return text if len(text) <= 200 else f"{text[:200]}..."
