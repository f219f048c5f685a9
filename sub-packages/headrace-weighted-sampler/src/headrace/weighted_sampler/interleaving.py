"""How many draws each source has had at a position, in closed form: exact shares, never far off on the way.

The sources are the leaves of a binary tree (Huffman, "A method for the construction of minimum-redundancy
codes", 1952, so that frequent sources lie near the root). Of the first ``t`` draws of a node, its heavier
child gets ``t * heavy / weight``, rounded to the nearest integer. So every count is known without counting,
and a source is never more than about one and a half draws away from its share, however long the sequence.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.weighted_sampler.division import rounded_share
from headrace.weighted_sampler.keyed import Indices


@dataclass(frozen=True)
class Node:
    """A source, or two nodes that share its draws.

    Attributes:
        weight: Draws in one period of the whole tree.
        source: Number of the source; -1 for an inner node.
        children: The heavier and the lighter; empty for a source.
    """

    weight: int
    source: int = -1
    children: tuple["Node", ...] = ()


def build_tree(weights: Sequence[int]) -> Node:
    """Build the tree of integer weights.

    Args:
        weights: One a source, not negative, not all zero, with a sum of at most 2**62. Sources of weight 0
            get no leaf.

    Returns:
        The root; its weight is the period of the interleave.

    >>> build_tree([2, 0, 1]).weight
    3
    """
    # The second entry decides between equal weights, so that the tree is the same everywhere.
    heap = [(weight, source, Node(weight, source)) for source, weight in enumerate(weights) if weight]
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, _, light), (_, order, heavy) = heapq.heappop(heap), heapq.heappop(heap)
        joined = Node(light.weight + heavy.weight, children=(heavy, light))
        heapq.heappush(heap, (joined.weight, order, joined))
    return heap[0][2]


def draws_before(root: Node, positions: Indices, sources: int) -> Indices:
    """Count each source's draws before some positions.

    Args:
        root: The tree.
        positions: Shape ``[m]``, from 0 to 2**62.
        sources: Number of sources, those of weight 0 included.

    Returns:
        Shape ``[m, sources]``. Rows add up to the positions, columns never fall, and every period of
        ``root.weight`` positions holds exactly each source's weight.

    >>> draws_before(build_tree([2, 1]), np.array([0, 1, 2, 3, 6]), sources=2).tolist()
    [[0, 0], [1, 0], [1, 1], [2, 1], [4, 2]]
    """
    counts = np.zeros((len(positions), sources), np.int64)
    periods = positions // root.weight
    waiting = [(root, positions - periods * root.weight)]
    while waiting:
        node, own = waiting.pop()
        if node.children:
            heavy, light = node.children
            to_heavy = rounded_share(own, heavy.weight, node.weight)
            waiting += [(heavy, to_heavy), (light, own - to_heavy)]
        else:
            counts[:, node.source] = own + periods * node.weight
    return counts
