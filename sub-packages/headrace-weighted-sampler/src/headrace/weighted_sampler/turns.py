"""Whose turn it is at each position, and which of its draws that is."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.weighted_sampler.interleaving import Node, draws_before
from headrace.weighted_sampler.keyed import Indices
from headrace.weighted_sampler.windows import DENSE, WIDTH, Places, shuffle_in_windows

Turn = tuple[int, Indices, Indices]  # a source, where in the positions it comes, the numbers of its draws
AT_ONCE = 16  # windows that are put in order in one call


@dataclass(frozen=True)
class Stretch:
    """A stretch of the sequence with the same weights throughout.

    Attributes:
        root: The interleave's tree.
        length: Positions in the stretch.
        first: Where the stretch begins in the interleave.
        key: A 64-bit word for the stretch.
        bases: Draws that each source has had where the interleave begins, shape ``[s]``, at most 2**16 sources.
        sizes: Draws in one pass of each source, shape ``[s]``; None when there are no passes.
    """

    root: Node
    length: int
    first: int
    key: int
    bases: Indices
    sizes: Indices | None = None


def turns(stretch: Stretch, offsets: Indices) -> Iterator[Turn]:
    """Deal positions of a stretch to the sources.

    Each window holds as many draws of a source as the interleave says: first those of source 0, then those of
    source 1 and so on, before they are shuffled. Where a pass of a source ends inside a window, its draws there
    are numbered in the order of their positions, so that the next pass begins when this one is through.

    Args:
        stretch: The stretch.
        offsets: Positions within it, ascending, shape ``[m]``.

    Yields:
        For each source that occurs: its number, where in ``offsets`` it comes, and how many draws it has had
        before each of these.

    >>> from headrace.weighted_sampler.interleaving import build_tree
    >>> dealt = turns(Stretch(build_tree([2, 1]), length=6, first=0, key=7, bases=np.array([0, 5])), np.arange(6))
    >>> {source: (len(where), sorted(draws.tolist())) for source, where, draws in dealt}
    {0: (4, [0, 1, 2, 3]), 1: (2, [5, 6])}
    """
    sources = len(stretch.bases)
    where = shuffle_in_windows(offsets, stretch.length, stretch.key)
    begins = where.windows * WIDTH
    bounds = np.concatenate([begins, np.minimum(begins + WIDTH, stretch.length)])
    counts = draws_before(stretch.root, stretch.first + bounds, sources) + stretch.bases
    before, after = counts.reshape(2, len(begins), sources)
    shares = after - before
    owner = _owners(where, shares)
    draws = (before - np.cumsum(shares, axis=1) + shares).ravel()[where.rows * sources + owner] + where.places
    _in_order(stretch, offsets, where, before, shares, owner, draws)
    yield from _by_source(owner, draws, sources)


def _owners(where: Places, shares: Indices) -> Indices:
    """Find the source of each position: the one whose share of the window its place falls in."""
    windows, sources = shares.shape
    at = where.rows * WIDTH + where.places
    if windows * WIDTH <= len(at) * DENSE:
        numbers = np.tile(np.arange(sources, dtype=np.uint16), windows)
        return np.take(np.repeat(numbers, shares.ravel()), at).astype(np.int64)
    bounds = np.cumsum(shares, axis=1) + np.arange(windows)[:, None] * WIDTH
    owner: Indices = np.searchsorted(bounds.ravel(), at, side="right") - where.rows * sources
    return owner


def _in_order(
    stretch: Stretch, offsets: Indices, where: Places, before: Indices, shares: Indices, owner: Indices, draws: Indices
) -> None:
    """Number the draws anew, in place, in the windows in which a source passes from one pass to the next."""
    if stretch.sizes is None:
        return
    last = before + np.maximum(shares, 1) - 1
    passing = ((before // stretch.sizes != last // stretch.sizes) & (stretch.sizes > 1)).any(axis=1)
    rows = np.flatnonzero(passing)
    for low in range(0, len(rows), AT_ONCE):
        chosen = rows[low : low + AT_ONCE]
        own = np.flatnonzero(_member(chosen, len(passing))[where.rows])
        place = np.searchsorted(chosen, where.rows[own]) * WIDTH + (offsets[own] & (WIDTH - 1))
        ranks = _ranks(stretch, where.windows[chosen], shares[chosen])
        draws[own] = before[where.rows[own], owner[own]] + ranks[place]


def _member(chosen: Indices, rows: int) -> NDArray[np.bool_]:
    is_chosen = np.zeros(rows, bool)
    is_chosen[chosen] = True
    return is_chosen


def _ranks(stretch: Stretch, windows: Indices, shares: Indices) -> Indices:
    """How many earlier positions of its window each position's source has, for whole windows one after another."""
    offsets = (windows[:, None] * WIDTH + np.arange(WIDTH)).ravel()
    offsets = offsets[offsets < stretch.length]
    rows = np.searchsorted(windows, offsets // WIDTH)
    where = Places(windows, rows, shuffle_in_windows(offsets, stretch.length, stretch.key).places)
    groups = rows * shares.shape[1] + _owners(where, shares)
    order = np.argsort(groups, kind="stable")
    ordered = groups[order]
    begins = np.flatnonzero(np.diff(ordered, prepend=-1))
    ranks = np.empty(len(offsets), np.int64)
    ranks[order] = np.arange(len(offsets)) - np.repeat(begins, np.diff(begins, append=len(offsets)))
    return ranks


def _by_source(owner: Indices, draws: Indices, sources: int) -> Iterator[Turn]:
    order = np.argsort(owner.astype(np.uint16), kind="stable")
    counts = np.bincount(owner, minlength=sources)
    ends = np.cumsum(counts)
    for source in np.flatnonzero(counts).tolist():
        where = order[ends[source] - counts[source] : ends[source]]
        yield source, where, draws[where]
