"""The terms of a memory model, and its cost function."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float64]
ROUNDING = 1e-12  # by which a power in Python and one of an array may differ, as a share
_FACTOR = re.compile(r"(n|[LS]\d*)(?:\^(\d))?")


@dataclass(frozen=True)
class Term:
    """A product of powers of a batch's features."""

    name: str  # as it was written, such as "n*L^2"
    count: int  # power of the number of samples
    largest: tuple[int, ...]  # of the largest size in each column
    total: tuple[int, ...]  # of the sum of the sizes in each column

    @classmethod
    def parse(cls, text: str, columns: int) -> "Term":
        """Read a term: factors n, L (largest) and S (sum), joined by ``*``, each with a power such as ``^2``.

        >>> Term.parse("n*L1^2", columns=2)
        Term(name='n*L1^2', count=1, largest=(0, 2), total=(0, 0))
        """
        powers = {"n": [0], "L": [0] * columns, "S": [0] * columns}
        for factor in text.replace(" ", "").split("*"):
            match = _FACTOR.fullmatch(factor)
            column = int(match[1][1:] or 0) if match else 0
            if match is None or column >= columns or (columns > 1 and match[1] in ("L", "S")):
                raise ValueError(
                    f"a feature must be a product such as 'n*L^2' of n (samples), L (largest size) and S (sum of the "
                    f"sizes), L0, L1, ... where a sample has several sizes; got {text!r} for {columns} of them"
                )
            powers[match[1][0]][column] += int(match[2] or 1)
        return cls(text, powers["n"][0], tuple(powers["L"]), tuple(powers["S"]))

    def __call__(self, count: Any, largest: Any, total: Any) -> Any:
        """Return the value for a batch; ``largest`` and ``total`` hold a number or an array for each column."""
        value = count**self.count
        for power, column in zip((*self.largest, *self.total), (*largest, *total), strict=True):
            if power:
                value = value * column**power
        return value


@dataclass(frozen=True)
class MemoryCost:
    """Bytes of a batch by count and largest size, with the margin, for ``cost=`` of the samplers.

    ``BatchMemoryModel.cost()`` returns it. Sums of sizes count as count times largest, their maximum. It is picklable.

    Args:
        terms: The features.
        slopes: Bytes per unit of each feature, non-negative.
        intercept: Bytes at zero.
        floor: Minimum bytes of every batch.
        factor: One plus the margin.
        most: The largest measured count, size in each column and value of each feature, in this order; a batch beyond
            one of them has infinite cost. None to extrapolate.
    """

    terms: tuple[Term, ...]
    slopes: tuple[float, ...]
    intercept: float
    floor: float
    factor: float
    most: tuple[float, ...] | None

    @classmethod
    def of_dict(cls, found: dict[str, Any]) -> "MemoryCost":
        """Return what ``dataclasses.asdict`` made into a dict, read from a file that may hold anything."""
        terms = tuple(Term.parse(term["name"], len(term["largest"])) for term in found["terms"])
        slopes = tuple(map(float, found["slopes"]))
        intercept, floor, factor = (float(found[name]) for name in ("intercept", "floor", "factor"))
        most = None if found["most"] is None else tuple(map(float, found["most"]))
        numbers = (*slopes, intercept, floor, factor, *(most or ()))
        if not all(map(math.isfinite, numbers)) or min((*slopes, floor, factor - 1)) < 0:
            raise ValueError("the numbers of cost must be finite, slopes and floor >= 0, and factor >= 1")
        measured = 1 + len(terms[0].largest) + len(terms)
        if len(slopes) != len(terms) or (most is not None and len(most) != measured):
            raise ValueError("cost must have a slope and a largest value for each feature")
        return cls(terms, slopes, intercept, floor, factor, most)

    def __call__(self, count: int, largest: Any) -> float:
        """Return the bytes of a batch of ``count`` samples with this largest size."""
        sizes = largest.tolist() if isinstance(largest, np.ndarray | np.generic | torch.Tensor) else largest
        columns = tuple(sizes) if isinstance(sizes, Sequence) else (sizes,)
        values = self.values(count, columns, [count * size for size in columns])
        return math.inf if self.beyond((count, *columns, *values)) is not None else self.factor * self.linear(values)

    def is_of_samples(self) -> bool:
        """Whether the bytes are a sum over the samples: features S and n, so many per unit of size and per sample."""
        return {term.name for term in self.terms} == {"S", "n"}

    def is_of_sums(self) -> bool:
        """Whether the bytes depend on the sums of the sizes alone."""
        return all(not term.count and not any(term.largest) for term in self.terms)

    def values(self, count: int, largest: Sequence[float], total: Sequence[float]) -> list[float]:
        """Return the features of a batch."""
        columns = len(self.terms[0].largest)
        if (wrong := next((len(each) for each in (largest, total) if len(each) != columns), None)) is not None:
            shape = "[n]" if columns == 1 else f"[n, {columns}]"
            raise ValueError(
                f"the model was fitted to {columns} size{'s' * (columns > 1)} for each sample, got {wrong}: give sizes "
                f"of shape {shape}, or measure and fit anew"
            )
        return [float(term(count, largest, total)) for term in self.terms]

    def linear(self, values: list[float]) -> float:
        """Return the bytes without the margin of a batch with these features."""
        return max(self.floor, self.intercept + sum(map(float.__mul__, self.slopes, values)))

    def beyond(self, found: Sequence[float]) -> int | None:
        """Return the first place at which count, sizes or features lie beyond ``most``."""
        if self.most is None:
            return None
        pairs = enumerate(zip(found, self.most, strict=True))
        return next((place for place, (value, most) in pairs if value > (1 + ROUNDING) * most), None)


def default_terms(columns: int) -> tuple[str, ...]:
    """Return n*L and n*L^2 for each column of sizes.

    >>> default_terms(1), default_terms(2)
    (('n*L', 'n*L^2'), ('n*L0', 'n*L0^2', 'n*L1', 'n*L1^2'))
    """
    names = ["L"] if columns == 1 else [f"L{column}" for column in range(columns)]
    return tuple(f"n*{name}{power}" for name in names for power in ("", "^2"))


def candidate_terms(columns: int) -> list[tuple[str, ...]]:
    """Return the features among which the data choose: of padded batches, and of packed ones.

    Kernels for packed sequences have buffers that grow with the number of sequences, too: FlashAttention's backward
    pass takes ``S + 128 * n`` rows.

    >>> candidate_terms(1)
    [('n*L', 'n*L^2'), ('S', 'S^2'), ('S', 'n')]
    """
    names = ["S"] if columns == 1 else [f"S{column}" for column in range(columns)]
    of_sums = tuple(f"{name}{power}" for name in names for power in ("", "^2"))
    return [default_terms(columns), of_sums, *([("S", "n")] if columns == 1 else [])]
