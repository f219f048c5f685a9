"""A part of every source, so that a short run repeats its data as the full run does."""

from __future__ import annotations  # help() shows the names of types, not the unions behind them

import math
import warnings
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headrace.weighted_sampler._arguments import SEED_BOUND
from headrace.weighted_sampler._shared.checks import checked_int
from headrace.weighted_sampler._shared.random import fold_in
from headrace.weighted_sampler._weight_semantics import parse_sizes

_FEW = 8  # samples of a part; with fewer, rounding changes the repetition by more than 6 %


def repetition_matched_subset(
    dataset: Any, fraction: float | Fraction, *, sizes: ArrayLike | None = None, seed: int = 0
) -> dict[Any, NDArray[np.int64]]:
    """Return a random part of every source, for a run of the same fraction of the tokens.

    A full run repeats its small sources; a short run over all data hardly repeats them, so its losses say little about
    the full run. Over this part, with ``epoch_length`` and training steps multiplied by ``fraction`` too, each source
    makes as many passes as in the full run, whatever its weight. (The remedy of "Repetition Mismatch", arXiv
    2606.07597.) The part of a smaller fraction with the same seed is contained in that of a larger one.

    Args:
        dataset: With ``names`` and ``cumulative_sizes``, such as a ``NamedConcatDataset``; or a ``ConcatDataset``.
        fraction: Share of each source, above 0 and at most 1. A source keeps at least one sample; a
            warning names those whose part is so small that they repeat otherwise.
        sizes: Tokens of each sample, shape ``[len(dataset)]``, for a mixture ``per="token"``: the fraction is then of
            the tokens. None: of the samples.
        seed: From 0 to 2**64 - 1; chooses the samples.

    Returns:
        For each source, by its name (or its position in a ``ConcatDataset``), indices into ``dataset``, ascending.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If ``fraction`` or ``seed`` is not allowed.

    >>> from headrace.weighted_sampler import NamedConcatDataset
    >>> both = NamedConcatDataset({"large": range(320), "small": range(160)})
    >>> {name: len(indices) for name, indices in repetition_matched_subset(both, 1 / 16).items()}
    {'large': 20, 'small': 10}
    """
    if not hasattr(dataset, "cumulative_sizes"):
        raise TypeError(
            f"dataset must have cumulative_sizes, as a NamedConcatDataset has, got {type(dataset).__name__}: "
            "concatenate the sources"
        )
    if isinstance(fraction, bool) or not isinstance(fraction, int | float | Fraction):
        raise TypeError(f"fraction must be a number above 0 and at most 1, got {fraction!r}")
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction must be above 0 and at most 1, got {fraction!r}")
    checked_int("seed", seed, 0, SEED_BOUND - 1)
    ends = [int(end) for end in dataset.cumulative_sizes]
    names = getattr(dataset, "names", range(len(ends)))
    tokens = None if sizes is None else parse_sizes(sizes, ends[-1] if ends else 0)
    part, few = {}, []
    for source, (name, begin, end) in enumerate(zip(names, [0, *ends], ends, strict=False)):
        size = end - begin
        words = fold_in(seed, source, np.arange(size, dtype=np.uint64))
        if tokens is None:
            count = min(size, max(1, math.floor(size * fraction + 0.5)))
            chosen = np.argpartition(words, count - 1)[:count] if size else np.zeros(0, np.int64)
        else:
            order = np.argsort(words, kind="stable")
            summed = np.cumsum(tokens[begin:end][order], dtype=np.float64)
            count = min(size, 1 + int(np.abs(summed - float(fraction) * summed[-1]).argmin())) if size else 0
            chosen = order[:count]
        if count < min(size, _FEW):
            few.append(f"{name!r} ({count} of {size:,})")
        part[name] = np.sort(chosen).astype(np.int64) + begin
    if few:
        warnings.warn(
            f"{', '.join(few)}: so few samples repeat otherwise than in the full run; raise "
            f"fraction={float(fraction):g}",
            UserWarning,
            stacklevel=2,
        )
    return part
