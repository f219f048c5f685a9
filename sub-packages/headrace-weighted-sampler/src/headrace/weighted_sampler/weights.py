"""Weights as users write them: by dataset name, by position, by index range, or one per sample; nested in groups.

Weights may come directly from YAML, JSON or OmegaConf: a list ``[weight, {name: weight}]`` is a group, like the tuple,
and a float counts as its shortest decimal form. ``_weight_semantics`` defines the meaning of a weight.
"""

from collections.abc import Collection, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import ConcatDataset, Dataset

from headrace.weighted_sampler._arguments import is_pair, listed, shown
from headrace.weighted_sampler._permutation import Indices
from headrace.weighted_sampler._shared.checks import checked_int
from headrace.weighted_sampler._shared.columns import array_of_column
from headrace.weighted_sampler._shared.digest import array_digest
from headrace.weighted_sampler._shared.display import counted, never_raises

T_co = TypeVar("T_co", covariant=True)
Weight: TypeAlias = int | float | Fraction | Decimal | np.integer[Any] | np.floating[Any]
NamedWeights: TypeAlias = Mapping[str, "Weight | tuple[Weight, NamedWeights]"]
Weights: TypeAlias = (
    NamedWeights
    | Mapping[int, Weight]
    | Mapping[tuple[int, int], Weight]
    | Sequence[Weight]
    | NDArray[Any]
    | torch.Tensor
)
StreamWeights: TypeAlias = NamedWeights | Sequence[Weight] | NDArray[Any] | torch.Tensor

_SHOWN = 8  # datasets that a repr names
MAX_DISTINCT_WEIGHTS = 4096  # sources made of one weight per sample; more distinct weights than that are rounded


class NamedConcatDataset(ConcatDataset[T_co]):
    """Concatenate datasets and keep their names, so that weights can be given by name.

    In its place, any dataset with ``names`` and ``cumulative_sizes`` is accepted.

    Args:
        datasets: ``{name: dataset}``, in the order of concatenation.

    Raises:
        TypeError: If ``datasets`` is not a mapping, a name is not a string, or a dataset has no length.
        ValueError: If ``datasets`` is empty.

    >>> both = NamedConcatDataset({"proteins": range(10), "peptides": range(3)})
    >>> both.names, both.cumulative_sizes, len(both)
    (('proteins', 'peptides'), [10, 13], 13)
    """

    def __init__(self, datasets: Mapping[str, Dataset[T_co] | Sequence[T_co]]) -> None:
        if not isinstance(datasets, Mapping):
            raise TypeError(f"datasets must be a mapping {{name: dataset}}, got {type(datasets).__name__}")
        if not datasets:
            raise ValueError("datasets must contain at least one dataset, got none")
        for name, dataset in datasets.items():
            if not isinstance(name, str):
                raise TypeError(f"datasets must have strings as names, got {name!r}")
            if not isinstance(dataset, Sized):
                raise TypeError(f"datasets[{name!r}] must have a length, got {type(dataset).__name__}")
        super().__init__(datasets.values())  # type: ignore[arg-type]  # a sequence is a dataset
        self.names = tuple(datasets)

    @never_raises
    def __repr__(self) -> str:
        ends = [0, *self.cumulative_sizes]
        parts = [f"{name} {end - begin:,}" for name, begin, end in zip(self.names, ends, ends[1:], strict=False)]
        shown = ", ".join([*parts[:_SHOWN], *([f"{len(parts) - _SHOWN} more"] if len(parts) > _SHOWN else [])])
        return f"{type(self).__name__}({counted(ends[-1], 'sample')}: {shown})"

    def __getitems__(self, indices: Sequence[int]) -> list[T_co]:
        """Return the samples of a batch, with one call per dataset that has ``__getitems__``.

        Raises:
            IndexError: If an index is not in the dataset.
        """
        places = np.asarray(indices, np.int64)
        batched = type(self).__getitem__ is ConcatDataset.__getitem__  # or a class that changes samples
        batched = batched and any(hasattr(dataset, "__getitems__") for dataset in self.datasets)
        if not batched or ((places < 0) | (places >= len(self))).any():
            return [self[index] for index in indices]  # counts from the end, or raises
        samples: list[Any] = [None] * len(places)
        owners = np.searchsorted(self.cumulative_sizes, places, side="right")
        for owner in np.unique(owners).tolist():
            dataset, own = self.datasets[owner], np.flatnonzero(owners == owner)
            inside = (places[own] - (self.cumulative_sizes[owner - 1] if owner else 0)).tolist()
            fetch = getattr(dataset, "__getitems__", None)
            found = fetch(inside) if callable(fetch) else [dataset[index] for index in inside]
            for place, sample in zip(own.tolist(), found, strict=True):
                samples[place] = sample
        return samples


# -- Sources -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """One source of a mixture."""

    name: str  # for the report
    begin: int  # its first dataset index, or its first place in ``WeightedSources.members`` if that is set
    end: int  # one past the last
    weight: Fraction  # the exact weight; for nested weights, the product of the shares along the path
    groups: tuple[str, ...] = ()  # enclosing groups of nested weights, outermost first

    @property
    def size(self) -> int:
        """Number of samples."""
        return self.end - self.begin


@dataclass(frozen=True)
class WeightedSources:
    """All sources by ascending ``begin``, including sources of weight 0."""

    parts: tuple[Source, ...]
    members: Indices | None = None  # dataset indices at the sources' places; None when the places are the indices
    rounding: float = 0.0  # largest relative change of a weight, from rounding one weight per sample into groups
    by_range: bool = False  # whether the weights were given by index range

    @property
    def weights(self) -> list[Fraction]:
        """The weights, in the order of the sources."""
        return [part.weight for part in self.parts]

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The places of each source, in their order."""
        return [(part.begin, part.end) for part in self.parts]

    def identity(self) -> object:
        """Plain values that identify the samples of each source."""
        return self.ranges, None if self.members is None else array_digest(self.members)


def as_fraction(name: str, value: Weight) -> Fraction:
    """Return a weight as an exact fraction; a float counts as the shortest decimal that reads back as itself.

    >>> as_fraction("weight", 1.1), as_fraction("weight", np.float32(0.25))
    (Fraction(11, 10), Fraction(1, 4))
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, Fraction, Decimal, np.integer, np.floating)):
        raise TypeError(f"{name} must be an int, float, Fraction or Decimal, got {shown(value)}")
    if isinstance(value, (int, Fraction)):
        exact = Fraction(value)
    elif value.is_finite() if isinstance(value, Decimal) else np.isfinite(value):
        exact = Fraction(str(value))
    else:
        raise ValueError(f"{name} must be finite, got {value}")
    if exact < 0:
        raise ValueError(f"{name} must not be negative, got {value}; 0 leaves a source out")
    return exact


def parse_sources(argument: str, weights: object, dataset: Sized) -> WeightedSources:
    """Check weights and find the sources they name; ``argument`` is the name of the weights in messages.

    >>> [part.name for part in parse_sources("weights", {(10, 30): 0.25, (0, 10): 2}, range(30)).parts]
    ['0-10', '10-30']
    """
    weights = plain_array(argument, weights)
    if isinstance(weights, Mapping):
        sources = _from_mapping(argument, weights, dataset)
    elif isinstance(weights, (Sequence, np.ndarray)) and not isinstance(weights, (str, bytes)):
        sources = _from_sequence(argument, weights, dataset)
    else:
        raise TypeError(f"{argument} must be a mapping or a sequence of numbers, got {type(weights).__name__}")
    if not any(sources.weights):
        raise nothing_to_draw(argument, weights)
    return sources


def nothing_to_draw(argument: str, weights: object) -> ValueError:
    """Return the error of weights that are all 0."""
    return ValueError(f"{argument} must hold at least one weight above 0, got {shown(weights)}; 0 leaves a source out")


def plain_array(argument: str, weights: object) -> object:
    """Convert a tensor or a column to an array, and refuse arrays that are not 1-D; return other weights unchanged."""
    weights = array_of_column(weights, argument)
    if isinstance(weights, torch.Tensor):
        dense = weights.to_dense()
        # numpy has no bfloat16; other types keep their own decimals.
        weights = (dense.double() if dense.dtype == torch.bfloat16 else dense).numpy(force=True)
    if isinstance(weights, np.ndarray) and weights.ndim != 1:
        raise _not_numbers(argument, weights)
    return weights


def _from_mapping(argument: str, weights: Mapping[Any, Weight], dataset: Sized) -> WeightedSources:
    kinds = {_key_kind(argument, key) for key in weights}
    if len(kinds) > 1:
        raise TypeError(f"{argument} must have keys of one kind, got {sorted(kinds)}")
    if kinds == {"name"}:
        flat, groups = flatten(argument, weights)
        parts = _from_parts(argument, flat, dataset, named=True)
        return WeightedSources(tuple(replace(part, groups=groups.get(part.name, ())) for part in parts))
    if kinds == {"position"}:
        return WeightedSources(_from_parts(argument, weights, dataset, named=False))
    ranges = sorted((_range(argument, *item, len(dataset)) for item in weights.items()), key=lambda part: part.begin)
    for before, after in pairwise(ranges):
        if after.begin < before.end:
            raise ValueError(
                f"{argument} ranges ({before.begin}, {before.end}) and ({after.begin}, {after.end}) overlap: "
                "every sample may be in one range only"
            )
    return WeightedSources(tuple(ranges), by_range=True)


def flatten(argument: str, weights: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[str, ...]]]:
    """Multiply out nested weights; returns the weight of each name, and the groups of each name that has any.

    >>> flatten("weights", {"web": (0.7, {"en": 3, "de": 1}), "code": 0.3})[0]["en"]
    Fraction(21, 40)
    """
    flat: dict[str, Any] = {}
    groups: dict[str, tuple[str, ...]] = {}
    for name, value in weights.items():
        own: dict[str, Any] = {name: value}
        if isinstance(value, Mapping):
            raise TypeError(f"{argument}[{name!r}] must be a weight, or (weight, {{name: weight}}), got {shown(value)}")
        if is_pair(value) and isinstance(value[1], Mapping):
            share, where = as_fraction(f"{argument}[{name!r}]", value[0]), f"{argument}[{name!r}][1]"
            members, inner = flatten(where, value[1])
            exact = {member: as_fraction(f"{where}[{member!r}]", weight) for member, weight in members.items()}
            if not (total := sum(exact.values())):
                raise nothing_to_draw(where, value[1])
            own = {member: share * weight / total for member, weight in exact.items()}
            groups |= {member: (name, *inner.get(member, ())) for member in own}
        if twice := sorted(set(own) & set(flat)):
            raise ValueError(f"{argument} names {twice[0]!r} twice; every source may be in one group only")
        flat |= own
    return flat, groups


def is_by_range(weights: object) -> bool:
    """Whether weights are by index range."""
    return isinstance(weights, Mapping) and all(isinstance(key, tuple) for key in weights)


def _key_kind(argument: str, key: object) -> str:
    if isinstance(key, str):
        return "name"
    if isinstance(key, tuple) and len(key) == 2:
        return "range"
    if isinstance(key, (int, np.integer)) and not isinstance(key, bool):
        return "position"
    raise TypeError(
        f"{argument} keys must be tuples (begin, end), dataset names, or positions in a ConcatDataset, got {shown(key)}"
    )


def _from_parts(argument: str, weights: Mapping[Any, Weight], dataset: Sized, *, named: bool) -> tuple[Source, ...]:
    ends, names = _concatenated(argument, dataset, named)
    allowed: Sequence[Any] = names if named else range(len(ends))
    check_names(argument, weights, allowed, "the dataset does not have; it has")
    parts = []
    for (begin, end), name, key in zip(pairwise([0, *ends]), names, allowed, strict=True):
        weight = as_fraction(f"{argument}[{name!r}]", weights[key])
        if weight and end == begin:
            raise ValueError(f"{argument}[{name!r}] is {weights[key]}, but that dataset is empty; give it weight 0")
        parts.append(Source(name, begin, end, weight))
    return tuple(parts)


def check_names(argument: str, weights: Collection[Any], allowed: Sequence[Any], which: str) -> None:
    """Refuse weights that do not name each source once; ``which`` stands before the names that are allowed."""
    known = set(allowed)
    if unknown := [key for key in weights if key not in known]:
        raise ValueError(f"{argument} names {listed(unknown)}, which {which} {listed(allowed)}")
    if missing := [key for key in allowed if key not in weights]:
        raise ValueError(f"{argument} lacks {listed(missing)}: every source needs a weight; 0 leaves it out")


def _concatenated(argument: str, dataset: Sized, named: bool) -> tuple[list[int], list[str]]:
    given = getattr(dataset, "cumulative_sizes", None)
    if given is None:
        raise TypeError(
            f"{argument} by {'name' if named else 'position'} needs a concatenation of datasets, got "
            f"{type(dataset).__name__}; give a NamedConcatDataset or a ConcatDataset, or weights by index range"
        )
    called = getattr(dataset, "names", None)
    if called is None and named:
        raise TypeError(
            f"{argument} by name needs a dataset with names, and {type(dataset).__name__} has none; "
            "give a NamedConcatDataset({name: dataset, ...}), or weights by position"
        )
    ends = list(map(int, given))
    names = list(map(str, range(len(ends)) if called is None else called))
    if len(names) != len(ends) or len(set(names)) != len(names):
        raise ValueError(f"dataset.names must be {len(ends)} different names, one a dataset, got {listed(names)}")
    if ends != sorted(ends) or ends[-1:] != [len(dataset)]:
        raise ValueError(f"dataset.cumulative_sizes must rise to len(dataset), {len(dataset)}, got {listed(ends)}")
    return ends, names


def _range(argument: str, key: tuple[int, int], weight: Weight, length: int) -> Source:
    begin = checked_int(f"begin of the {argument} range {key}", key[0], 0)
    end = checked_int(f"end of the {argument} range {key}", key[1], 0)
    if end <= begin:
        fault = "is reversed" if end < begin else "is empty"
        raise ValueError(f"{argument} range ({begin}, {end}) {fault}: end must be greater than begin")
    if end > length:
        raise ValueError(
            f"{argument} range ({begin}, {end}) reaches outside the dataset of {length} samples: "
            f"end must be at most {length}"
        )
    return Source(f"{begin}-{end}", begin, end, as_fraction(f"weight of the {argument} range ({begin}, {end})", weight))


def _from_sequence(argument: str, weights: Sequence[Any] | NDArray[Any], dataset: Sized) -> WeightedSources:
    parts = len(getattr(dataset, "cumulative_sizes", ()))
    if parts and len(weights) == parts:
        return WeightedSources(_from_parts(argument, dict(enumerate(weights)), dataset, named=False))
    if len(weights) == len(dataset):
        return _from_samples(argument, weights)
    joined = f"one for each of the {parts} datasets, or " if parts else ""
    raise ValueError(
        f"{argument} must hold {joined}one weight for each of the {len(dataset)} samples, got {len(weights)}"
    )


def _not_numbers(argument: str, given: NDArray[Any]) -> TypeError:
    return TypeError(f"{argument} must hold numbers in one dimension, got dtype {given.dtype}, shape {given.shape}")


def _from_samples(argument: str, weights: ArrayLike) -> WeightedSources:
    given = np.asarray(weights)
    if given.dtype == object:  # fractions and decimals, or values that are not numbers
        given = np.array([float(as_fraction(f"{argument}[{at}]", weight)) for at, weight in enumerate(given)])
    if given.ndim != 1 or given.dtype.kind not in "iuf":
        raise _not_numbers(argument, given)
    wrong = np.flatnonzero(~(np.isfinite(given) & (given >= 0)))
    if wrong.size:
        raise ValueError(
            f"{argument} must be finite and not negative, got {given[wrong[0]]} for sample {wrong[0]} "
            f"({wrong.size} such weights); 0 leaves a sample out"
        )
    if not given.any():
        return WeightedSources((Source("all samples", 0, len(given), Fraction(0)),))
    return group_by_weight(argument, given)


def group_by_weight(argument: str, given: NDArray[Any]) -> WeightedSources:
    """Make one source per distinct weight; round the weights if there are more than 4,096 of them.

    >>> sources = group_by_weight("weights", np.array([0.5, 2.0, 0.0, 0.5]))
    >>> sources.members.tolist(), [(part.begin, part.end, float(part.weight)) for part in sources.parts]
    ([0, 3, 1], [(0, 2, 0.5), (2, 3, 2.0)])
    """
    drawn = np.flatnonzero(given)
    values = given[drawn]
    rounded = _rounded(values)
    order = np.argsort(rounded, kind="stable")
    ends = [*(np.flatnonzero(np.diff(rounded[order])) + 1).tolist(), len(order)]
    return WeightedSources(
        tuple(
            Source(f"weight {rounded[order[begin]]:.6g}", begin, end, as_fraction(argument, rounded[order[begin]]))
            for begin, end in pairwise([0, *ends])
        ),
        members=drawn[order],
        rounding=0.0 if rounded is values else float(np.max(np.abs(rounded / values - 1))),
    )


def _rounded(values: NDArray[Any]) -> NDArray[Any]:
    """Round to the most binary digits that leave at most 4,096 values: to 0.4 % over a range of a million."""
    rounded, digits = values, 15
    fractions, exponents = np.frexp(values.astype(np.float64))  # exact, unlike logarithms
    while len(np.unique(rounded)) > MAX_DISTINCT_WEIGHTS:
        digits -= 1
        with np.errstate(over="ignore"):  # the largest numbers round up to infinity
            rounded = np.ldexp(np.rint(np.ldexp(fractions, digits)), exponents - digits)
        rounded = np.minimum(rounded, np.finfo(np.float64).max)
    return rounded


# -- Of streams ----------------------------------------------------------------------------------------------------


def parse_stream_weights(
    argument: str, sources: Collection[Any], weights: object, semantics: str
) -> dict[str, Fraction]:
    """Validate the weights of streams, by name if ``sources`` is a mapping; returns the weight of each source."""
    given: Mapping[str, Any]
    if isinstance(sources, Mapping):
        if not isinstance(weights, Mapping):
            raise TypeError(
                f"{argument} must be a mapping {{name: weight}} as sources is one, got {type(weights).__name__}: "
                "the order of a mapping should not decide which source a weight belongs to"
            )
        given, groups = flatten(argument, weights)
        if groups and semantics != "proportion":
            raise ValueError(f"nested {argument} need semantics='proportion', got {semantics!r}")
        check_names(argument, given, sorted(sources), "sources does not have; it has")
        exact = {name: as_fraction(f"{argument}[{name!r}]", weight) for name, weight in given.items()}
    else:
        numbers: Any = plain_array(argument, weights)
        check_list(argument, numbers, "a list, as sources is one,")
        if len(numbers) != len(sources):
            raise ValueError(
                f"{argument} must hold one number per source: got {len(numbers)} for {len(sources)} sources"
            )
        exact = {str(place): as_fraction(f"{argument}[{place}]", weight) for place, weight in enumerate(numbers)}
    if not any(exact.values()):
        raise nothing_to_draw(argument, weights)
    return exact


def check_list(name: str, given: object, allowed: str) -> None:
    """Refuse values that are neither a list nor an array."""
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, (Sequence, np.ndarray)):
        raise TypeError(f"{name} must be {allowed} got {type(given).__name__}")
