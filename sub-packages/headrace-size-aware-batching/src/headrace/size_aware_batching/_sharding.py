"""From a list of batches to steps: the same number, and batches of like work, on every rank."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from heapq import heapreplace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching._budget import PreparedSizes, sample_work
from headrace.size_aware_batching._random import random_words

Chunk = tuple[NDArray[Any], NDArray[np.int64]]  # samples batch by batch, and where each batch begins

LONGEST_CHUNK = 64  # batches of like work that stay together at most; world sizes that divide it gain most
FEWEST_CHUNKS = 4  # that there are at least, where there are so many batches


def chunk_length(n_batches: int) -> int:
    """Return how many batches of like work stay together: 64, or fewer where that would leave few chunks."""
    return min(LONGEST_CHUNK, 1 << max(0, (n_batches // FEWEST_CHUNKS).bit_length() - 1))


def shuffle_sorted_chunks(work: NDArray[np.float64], key: int, before: int, length: int) -> NDArray[np.int64]:
    """Return where each batch goes: sorted by work, cut into chunks, the chunks shuffled.

    The ranks of a step then get batches of like work. Chunks begin at multiples of ``length`` in the list of the whole
    epoch (``before`` batches come before these), so that the steps of a world size that divides ``length`` lie inside
    one. Incomplete chunks, at both ends, take the batches of least work, which are alike everywhere.

    >>> shuffle_sorted_chunks(np.array([5.0, 1.0, 4.0, 2.0]), key=0, before=3, length=2)[1].item()
    0
    """
    count = len(work)
    head = min(-before % length, count)
    chunks = (count - head) // length
    tail = count - head - chunks * length
    ranked = np.argsort(work, kind="stable")
    words = random_words(key, chunks)
    begins = head + np.argsort(np.argsort(words, kind="stable")) * length
    inside = np.arange(length)
    # Half of the chunks descend instead of ascending: no rank gets the lighter batches of every step.
    rows = np.where((words & np.uint64(1)).astype(bool)[:, None], inside, inside[::-1])
    places = np.empty(count, np.int64)
    places[ranked[:head]] = np.arange(head)
    places[ranked[head : head + tail]] = np.arange(count - tail, count)
    places[ranked[head + tail :].reshape(chunks, length)] = begins[:, None] + rows
    return places


Tail = Literal["split", "pad", "drop"]
TAILS: tuple[Tail, ...] = ("split", "pad", "drop")


@dataclass(frozen=True)
class Steps:
    """Some whole steps: rank r gets batch ``s * num_replicas + r`` of the s-th; ``repeated`` ones come last."""

    indices: NDArray[Any]
    offsets: NDArray[np.int64]
    repeated: int = 0


def n_steps(n_batches: int, num_replicas: int, tail: str) -> int:
    """Return how many steps a list of batches makes.

    >>> n_steps(10, 4, "split"), n_steps(10, 4, "drop")
    (3, 2)
    """
    return n_batches // num_replicas if tail == "drop" else -(-n_batches // num_replicas)


Deal = Callable[[NDArray[Any], int], Chunk | None]  # samples of a step and how many batches they make


def distribute_steps(
    chunks: Iterable[Chunk], num_replicas: int, tail: Tail, deal: Deal | None = None
) -> Iterator[Steps]:
    """Distribute a list of batches to the ranks; yield whole steps as soon as what follows cannot change them.

    A step takes the next ``num_replicas`` batches. With ``tail="split"`` steps near the end take fewer batches and
    ``deal`` their samples to the ranks, or, where it is None or returns that, split the longest; so the last step has
    a batch for each rank. With too few samples for that, batches are repeated, as with ``"pad"``. A step takes the next
    samples of the list and depends on nothing before them: the rest of a list is distributed as it would have been
    after its beginning.
    """
    indices: NDArray[Any] = np.zeros(0, np.int64)
    offsets: NDArray[np.int64] = np.zeros(1, np.int64)
    for part, cuts in chunks:
        indices = np.concatenate([indices, part]) if len(indices) else part
        offsets = np.concatenate([offsets, offsets[-1] + cuts[1:]])
        sure = sure_batches(offsets, num_replicas, tail)
        if sure:
            end = int(offsets[sure])
            yield Steps(indices[:end], offsets[: sure + 1])
            indices, offsets = indices[end:], offsets[sure:] - end
    if len(offsets) > 1:
        yield from last_steps(indices, offsets, num_replicas, tail, deal)


def sure_batches(offsets: NDArray[np.int64], num_replicas: int, tail: Tail) -> int:
    """Return how many batches make whole steps whatever follows."""
    count = len(offsets) - 1
    if tail == "split":
        # With so many samples to spare, the rest can be split into whole steps.
        spare = (offsets[-1] - offsets) - np.arange(count, -1, -1)
        count = int(np.searchsorted(-spare, 1 - num_replicas, side="right")) - 1
    return max(0, count) // num_replicas * num_replicas


def last_steps(
    indices: NDArray[Any], offsets: NDArray[np.int64], num_replicas: int, tail: Tail, deal: Deal | None
) -> Iterator[Steps]:
    """Distribute the rest at the end of the list."""
    planned = offsets
    if tail == "split":
        offsets = split_steps(offsets.tolist(), num_replicas)
    count = len(offsets) - 1
    whole = count // num_replicas * num_replicas
    if deal and whole:
        indices, offsets = indices.copy(), offsets.copy()
        # Not where a step begins: a resume finds nothing before that, and deals alike.
        split = np.isin(offsets[1 : whole + 1], planned, invert=True).reshape(-1, num_replicas).any(axis=1)
        for first in (np.flatnonzero(split) * num_replicas).tolist():
            cuts = offsets[first : first + num_replicas + 1]
            dealt = deal(indices[cuts[0] : cuts[-1]], num_replicas)
            if dealt:
                indices[cuts[0] : cuts[-1]] = dealt[0]
                cuts[:] = cuts[0] + dealt[1]
    if tail == "drop":
        if whole:
            end = int(offsets[whole])
            yield Steps(indices[:end], offsets[: whole + 1])
        return
    missing = -count % num_replicas
    # What is missing is taken once more from the last step's own batches.
    again = [whole + place % (count - whole) for place in range(missing)]
    parts = [indices, *(indices[offsets[batch] : offsets[batch + 1]] for batch in again)]
    lengths = [int(offsets[batch + 1] - offsets[batch]) for batch in again]
    ends = offsets[-1] + np.cumsum(np.array(lengths, np.int64))
    yield Steps(np.concatenate(parts), np.concatenate([offsets, ends]), repeated=missing)


def split_steps(offsets: list[int], num_replicas: int) -> NDArray[np.int64]:
    """Split batches so that they make whole steps, as far as there are samples; return where each begins."""
    pieces, end, count = [0], offsets[-1], len(offsets) - 1
    start, following = 0, 1  # where the rest begins, and the number of the first cut behind that
    while following <= count:
        steps_left = -(-(count - following + 1) // num_replicas)
        stop = offsets[min(following + num_replicas - 1, count)]
        if end - start >= steps_left * num_replicas:
            # Leave one sample a rank for each of the steps that follow.
            stop = min(stop, end - (steps_left - 1) * num_replicas)
        behind = bisect_left(offsets, stop, following)
        pieces += split_longest([start, *offsets[following:behind], stop], num_replicas)[1:]
        start, following = stop, bisect_right(offsets, stop, behind)
    return np.array(pieces, np.int64)


def split_longest(offsets: list[int], n_batches: int) -> list[int]:
    """Halve the longest batches until there are ``n_batches``, as far as there are samples.

    >>> split_longest([0, 4, 5], 4)
    [0, 1, 2, 4, 5]
    """
    cuts = list(offsets)
    while len(cuts) - 1 < n_batches:
        lengths = [b - a for a, b in pairwise(cuts)]
        longest = max(range(len(lengths)), key=lengths.__getitem__)
        if lengths[longest] < 2:
            break
        cuts.insert(longest + 1, cuts[longest] + (lengths[longest] + 1) // 2)
    return cuts


def deal_evenly(sized: PreparedSizes, samples: NDArray[Any], n_batches: int) -> Chunk | None:
    """Make batches of like work from samples that fit into fewer; None where the limits do not let them.

    Sums go to the batch with the least work so far, the largest first (LPT, Graham 1969); batches that are padded are
    neighbours in size, and None where those have several columns or work of their own.

    >>> from headrace.size_aware_batching._budget import Limits
    >>> sized = PreparedSizes(np.array([5, 1, 4, 2]), Limits((8,)), None, np.zeros(0, np.int64))
    >>> samples, offsets = deal_evenly(sized, np.array([0, 1, 2, 3]), 2)
    >>> samples.tolist(), offsets.tolist()
    ([0, 1, 2, 3], [0, 2, 4])
    """
    limits, sizes = sized.limits, sized.sizes[samples]
    if limits.multiple > 1:
        return None
    work = sample_work(sizes, limits, None if sized.work is None else sized.work[samples])
    if limits.capacity is not None:
        if sizes.ndim > 1 or sized.work is not None:
            return None
        order = np.argsort(sizes, kind="stable")[::-1]
        most = np.minimum(limits.capacity(sizes[order]), limits.most_items)
        return samples[order], even_cuts(work[order], most, n_batches)
    heap = [(0.0, 0, batch) for batch in range(n_batches)]
    owner = np.zeros(len(samples), np.int64)
    for place in np.argsort(-work, kind="stable").tolist():
        load, count, batch = heap[0]
        owner[place] = batch
        heapreplace(heap, (load + work[place], count + 1, batch))
    order = np.argsort(owner, kind="stable")
    counts = np.bincount(owner, minlength=n_batches)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    sums = np.add.reduceat(sizes[order], offsets[:-1], axis=0, dtype=np.int64)
    if counts.max() > limits.most_items or (sums > np.array(limits.budgets)).any():
        return None
    return samples[order], offsets


def even_cuts(descending: NDArray[np.float64], most: NDArray[np.int64], n_batches: int) -> NDArray[np.int64]:
    """Cut padded samples into batches whose largest work is least; return where each begins.

    Args:
        descending: Work of each sample, that of a batch being the count times its first.
        most: How many samples a batch may hold that begins with this one.
        n_batches: How many there will be, as far as there are samples.

    >>> even_cuts(np.array([4.0, 2.0, 2.0, 1.0]), np.array([9, 9, 9, 9]), 2).tolist()
    [0, 1, 4]
    """

    def cuts(largest: float) -> list[int]:
        found = [0]
        while found[-1] < len(descending):
            work, left = float(descending[found[-1]]), len(descending) - found[-1]
            fit = left if work * left <= largest else int(largest / work)  # a quotient by almost nothing is infinite
            found.append(found[-1] + min(left, max(1, min(int(most[found[-1]]), fit))))
        return found

    low, high = 0.0, float(descending[0]) * len(descending)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if len(cuts(middle)) <= n_batches + 1 else (middle, high)
    return np.array(split_longest(cuts(high), n_batches), np.int64)
