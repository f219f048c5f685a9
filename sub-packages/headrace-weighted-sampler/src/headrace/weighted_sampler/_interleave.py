"""Which source each draw of an endless sequence comes from: near its share at every draw, in closed form.

The sources are the leaves of a binary tree (Huffman, "A method for the construction of minimum-redundancy codes",
1952, so that frequent sources lie near the root). A node deals its draws to its children: its axis is divided into
cells of equal length, as many as its lighter child has draws, and the place in the middle of each cell is the lighter
child's. So of the first ``t`` draws of a node each child has its share to within half a draw. A source is off by the
sum over its ancestors of such an error times its share of them. No state is carried from draw to draw.

Sequences that run side by side would all draw a rare source at the same time. With a key, the places are chosen at
random in a middle part of their cells, as large as ``MAX_OFF`` allows.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.weighted_sampler._permutation import Indices
from headrace.weighted_sampler._shared.random import Words, fold_in, splitmix64

MAX_SOURCES = 2**16  # sources are numbered in 16 bits
MAX_PERIOD = 2**31  # the largest sum of integer weights that is kept exactly; above it products exceed 64 bits
MAX_OFF = 1.5  # draws by which a source may be off its share, so that any stretch of draws is within twice that
_FEW = 512  # draws of a node; fewer are dealt together with those of other nodes
_UNIT = 2**16  # parts of a cell, of which one is chosen

# A source, the places among the positions where it is drawn, and its draw numbers there, from the sequence's start.
Assignment = tuple[int, Indices, Indices]


# -- The tree ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Node:
    """A source, or two nodes that share its draws."""

    weight: int  # draws in one period of the whole tree
    source: int = -1
    children: tuple["Node", ...] = ()  # the heavier and the lighter


def build_tree(weights: Sequence[int]) -> Node:
    """Build the tree of integer weights; its root's weight, at most 2**62, is the period of the sequence."""
    # The second entry breaks ties between equal weights, so that the tree is the same everywhere.
    heap = [(weight, source, Node(weight, source)) for source, weight in enumerate(weights) if weight]
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, _, light), (_, order, heavy) = heapq.heappop(heap), heapq.heappop(heap)
        joined = Node(light.weight + heavy.weight, children=(heavy, light))
        heapq.heappush(heap, (joined.weight, order, joined))
    return heap[0][2]


def off_by(root: Node) -> float:
    """How far a source may be off its share, in draws, where each place is in the middle of its cell.

    >>> off_by(build_tree([1, 1])), round(off_by(build_tree([7, 2, 1])), 2)
    (0.5, 0.83)
    """
    worst, waiting = 0.0, [(root, 0.0)]
    while waiting:
        node, above = waiting.pop()  # the sum of 1 / weight over the node and its ancestors, without the root
        worst = max(worst, node.weight * above / 2) if not node.children else worst
        waiting += [(child, above + 1 / child.weight) for child in node.children]
    return worst


# -- One node ------------------------------------------------------------------------------------------------------


def scaled(counts: Indices, part: int, total: int) -> tuple[Indices, Indices]:
    """Divide ``counts * part`` by ``total`` exactly, for counts and part from 0 to total, up to 2**62.

    Returns:
        Quotients and remainders, each of the shape of ``counts``.

    >>> [found.tolist() for found in scaled(np.array([0, 5, 7]), 3, 7)]
    [[0, 2, 3], [0, 1, 0]]
    """
    if total <= MAX_PERIOD:
        product = counts * part
        quotient = product // total
        return quotient, product - quotient * total
    # The product may need 124 bits, so the counts are taken a few bits at a time, as in long division by hand.
    bits = 63 - total.bit_length() or 1  # of the counts in one step: rest * 2**bits + limb * part < 2**64
    words, found, rest = counts.view(np.uint64), np.zeros(len(counts), np.uint64), np.zeros(len(counts), np.uint64)
    for shift in reversed(range(0, total.bit_length(), bits)):
        limb = (words >> np.uint64(shift)) & np.uint64(2**bits - 1)
        rest = (rest << np.uint64(bits)) + limb * np.uint64(part)
        step = rest // np.uint64(total)
        rest -= step * np.uint64(total)
        found = (found << np.uint64(bits)) + step
    return found.view(np.int64), rest.view(np.int64)


# Of one node, or of one node for each draw.
_Weights = int | Indices


class Interleave:
    """The endless sequence of sources for integer weights, one for each source; 0 leaves a source out.

    A pure function of the weights and, for random places, of a key.

    >>> sequence = Interleave([2, 1])
    >>> sequence.counts(np.array([0, 3, 6, 300])).tolist()
    [[0, 0], [2, 1], [4, 2], [200, 100]]
    """

    def __init__(self, weights: Sequence[int], key: int | None = None) -> None:
        self.sources = len(weights)
        self.root = build_tree(weights)
        off = off_by(self.root)
        spread = 0.0 if key is None or not off else min(1.0, max(0.0, MAX_OFF / off - 1))  # of a cell, at its middle
        self.off_by = off * (1 + spread)  # draws, at most
        self._width = int(_UNIT * spread)
        self._low = (_UNIT - self._width) // 2
        self._nodes = [self.root]  # each before its children
        for node in self._nodes:
            self._nodes += node.children
        self._keys = fold_in(key or 0, np.arange(len(self._nodes)).astype(np.uint64))
        self._first_child = np.zeros(len(self._nodes), np.int64)
        inner = [number for number, node in enumerate(self._nodes) if node.children]
        self._first_child[inner] = 1 + 2 * np.arange(len(inner))
        # Of inner nodes; 1 in place of what leaves do not have.
        self._weight = np.array([node.weight for node in self._nodes])
        self._light = np.array([node.children[1].weight if node.children else 1 for node in self._nodes])
        self._source = np.array([node.source for node in self._nodes])

    def assign(self, positions: Indices) -> tuple[Indices, Indices]:
        """Return the source of each position, shape ``[m]``, and how many draws of that source come before it."""
        sources, draws = np.zeros((2, len(positions)), np.int64)
        waiting = [(0, np.arange(len(positions)), positions)]
        few: list[tuple[int, Indices, Indices]] = []
        while waiting:
            number, at, own = waiting.pop()
            if not self._nodes[number].children:
                sources[at], draws[at] = self._nodes[number].source, own
            elif len(own) < _FEW and self._nodes[number].weight <= MAX_PERIOD:
                few.append((number, at, own))
            else:
                before, is_light = self._dealt(own, number)
                light, heavy = np.flatnonzero(is_light), np.flatnonzero(~is_light)
                child = int(self._first_child[number])
                waiting += [(child, at[heavy], (own - before)[heavy]), (child + 1, at[light], before[light])]
        if few:
            numbers = np.repeat([number for number, _, _ in few], [len(at) for _, at, _ in few])
            self._assign_few(
                numbers,
                np.concatenate([at for _, at, _ in few]),
                np.concatenate([own for _, _, own in few]),
                sources,
                draws,
            )
        return sources, draws

    def _assign_few(self, numbers: Indices, at: Indices, own: Indices, sources: Indices, draws: Indices) -> None:
        """Deal draws of many nodes, level by level, down to the sources."""
        while len(at):
            before, is_light = self._dealt(own, numbers)
            numbers = self._first_child[numbers] + is_light
            own = np.where(is_light, before, own - before)
            source = self._source[numbers]
            done, rest = np.flatnonzero(source >= 0), np.flatnonzero(source < 0)
            sources[at[done]], draws[at[done]] = source[done], own[done]
            numbers, at, own = numbers[rest], at[rest], own[rest]

    def assign_places(self, begins: Indices, length: int, places: Indices) -> tuple[Indices, Indices]:
        """Return one draw of each stretch of ``length`` positions, whose draws are sorted by source.

        Args:
            begins: First positions of the stretches, shape ``[m]``.
            length: Positions of a stretch.
            places: Which of the sorted draws, 0 to ``length - 1``, shape ``[m]``.

        Returns:
            As ``assign``.

        >>> sources, draws = Interleave([2, 1]).assign_places(np.array([6, 6, 6]), 3, np.arange(3))
        >>> sources.tolist(), draws.tolist()
        ([0, 0, 1], [4, 5, 2])
        """
        sources, draws = np.zeros((2, len(begins)), np.int64)
        waiting = [(0, np.arange(len(begins)), begins, begins + length, places)]
        few: list[tuple[int, Indices, Indices, Indices, Indices]] = []
        while waiting:
            number, at, first, stop, place = waiting.pop()
            if not self._nodes[number].children:
                sources[at], draws[at] = self._nodes[number].source, first + place
            elif len(at) < _FEW and self._nodes[number].weight <= MAX_PERIOD:
                few.append((number, at, first, stop, place))
            else:
                if len(at) and np.array_equal(stop[:-1], first[1:]):  # stretches that follow one another
                    bounds = self._dealt(np.append(first, stop[-1]), number)[0]
                    light_first, light_stop = bounds[:-1], bounds[1:]
                else:
                    light_first, light_stop = self._dealt(first, number)[0], self._dealt(stop, number)[0]
                first, stop = first - light_first, stop - light_stop
                is_light = place >= stop - first
                light, heavy = np.flatnonzero(is_light), np.flatnonzero(~is_light)
                child, rest = int(self._first_child[number]), place - (stop - first)
                waiting.append((child, at[heavy], first[heavy], stop[heavy], place[heavy]))
                waiting.append((child + 1, at[light], light_first[light], light_stop[light], rest[light]))
        if few:
            numbers = np.repeat([number for number, *_ in few], [len(at) for _, at, *_ in few])
            at, first, stop, place = (np.concatenate(column) for column in list(zip(*few, strict=True))[1:])
            while len(at):  # level by level
                light_first, light_stop = self._dealt(first, numbers)[0], self._dealt(stop, numbers)[0]
                first, stop = first - light_first, stop - light_stop
                is_light = place >= stop - first
                place = np.where(is_light, place - (stop - first), place)
                first, stop = np.where(is_light, light_first, first), np.where(is_light, light_stop, stop)
                numbers = self._first_child[numbers] + is_light
                source = self._source[numbers]
                done, left = np.flatnonzero(source >= 0), np.flatnonzero(source < 0)
                sources[at[done]], draws[at[done]] = source[done], (first + place)[done]
                numbers, at, first, stop, place = numbers[left], at[left], first[left], stop[left], place[left]
        return sources, draws

    def counts(self, positions: Indices) -> Indices:
        """Count each source's draws before some positions, ``[m]``; returns ``[m, sources]``."""
        counts = np.zeros((len(positions), self.sources), np.int64)
        of_node = {0: positions}
        for number, node in enumerate(self._nodes):
            own = of_node.pop(number)
            if node.children:
                child = int(self._first_child[number])
                before, _ = self._dealt(own, number)
                of_node |= {child: own - before, child + 1: before}
            else:
                counts[:, node.source] = own
        return counts

    def _dealt(self, own: Indices, numbers: int | Indices) -> tuple[Indices, NDArray[np.bool_]]:
        """For draws of a node, or each of its node: the lighter child's draws before it, and whether it is one."""
        weight: _Weights
        light: _Weights
        if isinstance(numbers, int):  # numpy divides by one number much faster than by an array
            weight, light = int(self._weight[numbers]), int(self._light[numbers])
            periods = own // weight
            before, rest = scaled(own - periods * weight, light, weight)
        else:
            weight, light = self._weight[numbers], self._light[numbers]
            periods = own // weight
            product = (own - periods * weight) * light
            before = product // weight
            rest = product - before * weight
        before += periods * light
        # A cell begins at (its number) * weight / light, its first draw is the next whole one: ``gap / light`` later.
        offset = rest // light
        gap = rest - offset * light
        chosen: int | Indices = self._low  # of the cell, in units
        if self._width:
            words: Words = splitmix64(self._keys[numbers] ^ before.view(np.uint64))
            chosen = self._low + (((words >> np.uint64(48)).view(np.int64) * self._width) >> 16)
        # The draw that contains the chosen point; the cell before has the one in which this cell begins.
        place = ((weight >> 16) * chosen + (((weight & 0xFFFF) * chosen) >> 16) - gap) // light
        np.maximum(place, 0, out=place)
        return before + (offset > place), offset == place


def by_source(sources: Indices, draws: Indices, count: int) -> Iterator[Assignment]:
    """Group positions by their source."""
    order = np.argsort(sources.astype(np.uint16), kind="stable")
    counts: NDArray[np.int64] = np.bincount(sources, minlength=count)
    ends = np.cumsum(counts)
    for source in np.flatnonzero(counts).tolist():
        where = order[ends[source] - counts[source] : ends[source]]
        yield source, where, draws[where]
