"""From a list of batches to steps: the same number, and batches of like work, on every rank."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching.planning.costs import reduced
from headrace.size_aware_batching.planning.curriculum import Competence, draw_order
from headrace.size_aware_batching.planning.last_step import Balance, Batches, last_steps
from headrace.size_aware_batching.planning.options import Tail
from headrace.size_aware_batching.planning.shuffles import random_words

# Chunks that there are at least, where there are so many batches. 1, 4, 16: of 63 padded batches the largest of 8 ranks
# has 1.039, 1.031, 1.210 times the mean work.
FEWEST_CHUNKS = 4


def chunk_length(n_batches: int, balanced_ranks: int) -> int:
    """Return how many batches of like work stay together: one for each rank, or a divisor where that leaves few chunks.

    >>> [chunk_length(n_batches, 64) for n_batches in (1000, 100, 3)], chunk_length(100, 48)
    ([64, 16, 1], 24)
    """
    most = min(balanced_ranks, max(1, n_batches // FEWEST_CHUNKS))
    return next(length for length in range(most, 0, -1) if balanced_ranks % length == 0)


def shuffle_sorted_chunks(
    work: NDArray[np.float64], key: int, before: int, length: int, competence: Competence | None = None
) -> NDArray[np.int64]:
    """Return where each batch goes: sorted by work, cut into chunks, the chunks shuffled.

    The ranks of a step then get batches of like work. Chunks begin at multiples of ``length`` in the list of the whole
    epoch (``before`` batches come before these), so that the steps of a world size that divides ``length`` lie inside
    one. Incomplete chunks, at both ends, take the batches of least work, which are alike everywhere. Where there is a
    ``competence``, each next chunk is drawn from the share of least work that it allows.

    >>> shuffle_sorted_chunks(np.array([5.0, 1.0, 4.0, 2.0]), key=0, before=3, length=2)[1].item()
    0
    """
    count = len(work)
    head = min(-before % length, count)
    chunks = (count - head) // length
    rest = count - head - chunks * length
    ranked = np.argsort(work, kind="stable")
    words = random_words(key, chunks)
    if competence is None:
        turn = np.argsort(np.argsort(words, kind="stable"))
    else:
        turn = draw_order(words, competence(before + head + np.arange(chunks) * length))
    begins = head + turn * length
    inside = np.arange(length)
    # Half of the chunks descend instead of ascending: no rank gets the lighter batches of every step.
    rows = np.where((words & np.uint64(1)).astype(bool)[:, None], inside, inside[::-1])
    places = np.empty(count, np.int64)
    places[ranked[:head]] = np.arange(head)
    places[ranked[head : head + rest]] = np.arange(count - rest, count)
    places[ranked[head + rest :].reshape(chunks, length)] = begins[:, None] + rows
    return places


@dataclass(frozen=True)
class Dealt:
    """Some whole steps: rank r gets batch ``s * num_replicas + r`` of the s-th; ``repeated`` ones come last.

    ``places`` are those of the samples in the list, from the first one on; None where they are in its order.
    """

    indices: NDArray[Any]
    offsets: NDArray[np.int64]
    repeated: int = 0
    places: NDArray[np.int64] | None = None

    def draws(self, position: int) -> NDArray[np.int64]:
        """Return where the samples are in the list of the epoch, of which these steps begin at a position."""
        return position + (np.arange(len(self.indices)) if self.places is None else self.places)


def n_steps(n_batches: int, num_replicas: int, tail: str) -> int:
    """Return how many steps a list of batches makes.

    >>> n_steps(10, 4, "split"), n_steps(10, 4, "drop")
    (3, 2)
    """
    return n_batches // num_replicas if tail == "drop" else -(-n_batches // num_replicas)


def autocorrelation(sizes: NDArray[Any], steps: NDArray[np.int64]) -> float:
    """Return the correlation of the mean size in a step with that in the next one; ``steps`` are offsets in the sizes.

    NaN with fewer than three steps, or if all have the same mean.

    >>> autocorrelation(np.array([1, 2, 3, 4]), np.arange(5)), autocorrelation(np.array([1, 3, 1, 3]), np.arange(5))
    (1.0, -1.0)
    """
    if len(steps) < 4:
        return math.nan
    means = reduced(np.add, sizes, steps) / np.diff(steps)
    now, following = means[:-1] - means[:-1].mean(), means[1:] - means[1:].mean()
    spread = float(np.sqrt((now**2).sum() * (following**2).sum()))
    return float((now * following).sum()) / spread if spread > 1e-9 * float((means**2).sum()) else math.nan


def distribute_steps(
    batches: Iterable[Batches], num_replicas: int, tail: Tail, balance: Balance | None = None
) -> Iterator[Dealt]:
    """Distribute a list of batches to the ranks; yield whole steps as soon as what follows cannot change them.

    A step takes the next ``num_replicas`` batches. With ``tail="split"`` steps near the end take fewer batches, and
    ``balance`` makes a batch for each rank of their samples. Without it, or where it returns None, the longest batches
    are halved. Where there are too few samples, batches are repeated, as with ``"pad"``. A step takes the next samples
    of the list and depends on nothing before them: after a resume the rest is distributed the same way.
    """
    indices: NDArray[Any] = np.zeros(0, np.int64)
    offsets: NDArray[np.int64] = np.zeros(1, np.int64)
    for samples, begins in batches:
        indices = np.concatenate([indices, samples]) if len(indices) else samples
        offsets = np.concatenate([offsets, offsets[-1] + begins[1:]])
        sure = sure_batches(offsets, num_replicas, tail)
        if sure:
            end = int(offsets[sure])
            yield Dealt(indices[:end], offsets[: sure + 1])
            indices, offsets = indices[end:], offsets[sure:] - end
    if len(offsets) > 1:
        rest = Dealt(*last_steps(indices, offsets, num_replicas, tail, balance))
        if len(rest.offsets) > 1:
            yield rest


def last_known(distributed: Iterable[Dealt]) -> Iterator[tuple[Dealt, bool]]:
    """Yield steps, and whether they are the last ones; those that follow are made first."""
    before: Dealt | None = None
    for steps in distributed:
        if before is not None:
            yield before, False
        before = steps
    if before is not None:
        yield before, True


def distribute_packed(packed: Iterable[Batches], num_replicas: int) -> Iterator[Dealt]:
    """Distribute optimizer steps one by one, each of which is packed for this number of ranks.

    Their samples are the same at any number of ranks, and their order is not. So the last place of a step stands for
    all of its samples; of equal ones the earlier have those before it.
    """
    for samples, offsets in packed:
        places, done = len(samples) - 1 - copies_after(samples), 0
        for steps in distribute_steps([(samples, offsets)], num_replicas, "split"):
            yield replace(steps, places=places[steps.draws(done)] - done)
            done += int(steps.offsets[len(steps.offsets) - 1 - steps.repeated])


def copies_after(samples: NDArray[Any]) -> NDArray[np.int64]:
    """Return how often each sample comes once more.

    >>> copies_after(np.array([7, 5, 7, 7])).tolist()
    [2, 0, 1, 0]
    """
    order = np.argsort(samples, kind="stable")
    ordered, after = samples[order], np.empty(len(samples), np.int64)
    after[order] = np.searchsorted(ordered, ordered, side="right") - 1 - np.arange(len(samples))
    return after


def sure_batches(offsets: NDArray[np.int64], num_replicas: int, tail: Tail) -> int:
    """Return how many batches make whole steps whatever follows."""
    count = len(offsets) - 1
    if tail == "split":
        # With so many samples to spare, the rest can be split into whole steps.
        spare = (offsets[-1] - offsets) - np.arange(count, -1, -1)
        count = int(np.searchsorted(-spare, 1 - num_replicas, side="right")) - 1
    return max(0, count) // num_replicas * num_replicas
