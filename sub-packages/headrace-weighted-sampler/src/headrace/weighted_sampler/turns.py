"""Whose turn it is at each position, and which of its draws that is."""

from collections.abc import Iterator

import numpy as np

from headrace.weighted_sampler.interleaving import Node, draws_before
from headrace.weighted_sampler.keyed import Indices
from headrace.weighted_sampler.windows import DENSE, WIDTH, Places, shuffle_in_windows

Turn = tuple[int, Indices, Indices]  # a source, where in the positions it comes, the numbers of its draws


def turns(root: Node, sources: int, offsets: Indices, length: int, first: int, key: int) -> Iterator[Turn]:
    """Deal a stretch of the sequence to the sources.

    Each window holds as many draws of a source as the interleave says: first those of source 0, then those of
    source 1 and so on, before they are shuffled.

    Args:
        root: The interleave's tree.
        sources: Number of sources, at most 2**16.
        offsets: Positions within the stretch, ascending, shape ``[m]``.
        length: Positions in the stretch.
        first: Where the stretch begins in the interleave.
        key: A 64-bit word for the stretch.

    Yields:
        For each source that occurs: its number, where in ``offsets`` it comes, and how many draws it has had
        before each of these, counted from the interleave's beginning.

    >>> from headrace.weighted_sampler.interleaving import build_tree
    >>> dealt = turns(build_tree([2, 1]), 2, np.arange(6), length=6, first=0, key=7)
    >>> {source: (len(where), sorted(draws.tolist())) for source, where, draws in dealt}
    {0: (4, [0, 1, 2, 3]), 1: (2, [0, 1])}
    """
    where = shuffle_in_windows(offsets, length, key)
    begins = where.windows * WIDTH
    bounds = np.concatenate([begins, np.minimum(begins + WIDTH, length)])
    before, after = draws_before(root, first + bounds, sources).reshape(2, len(begins), sources)
    shares = after - before
    ends = np.cumsum(shares, axis=1)
    owner = _owners(where, shares, ends)
    draws = (before - ends + shares).ravel()[where.rows * sources + owner] + where.places
    yield from _by_source(owner, draws, sources)


def _owners(where: Places, shares: Indices, ends: Indices) -> Indices:
    """Find the source of each position: the one whose share of the window its place falls in."""
    windows, sources = shares.shape
    at = where.rows * WIDTH + where.places
    if windows * WIDTH <= len(at) * DENSE:
        numbers = np.tile(np.arange(sources, dtype=np.uint16), windows)
        return np.take(np.repeat(numbers, shares.ravel()), at).astype(np.int64)
    bounds = ends + np.arange(windows)[:, None] * WIDTH
    owner: Indices = np.searchsorted(bounds.ravel(), at, side="right") - where.rows * sources
    return owner


def _by_source(owner: Indices, draws: Indices, sources: int) -> Iterator[Turn]:
    order = np.argsort(owner.astype(np.uint16), kind="stable")
    counts = np.bincount(owner, minlength=sources)
    ends = np.cumsum(counts)
    for source in np.flatnonzero(counts).tolist():
        where = order[ends[source] - counts[source] : ends[source]]
        yield source, where, draws[where]
