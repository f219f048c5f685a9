"""Small optimizer steps: all ways, breadth first. Pure."""

from __future__ import annotations

import numpy as np

from headrace.size_aware_batching.planning.micro_batches.samples import Ints, Meet, Samples

SMALL = 12  # samples, at most, of a step that is searched
KEPT = 2048  # partial plans that are kept


def search(samples: Samples, n_rows: int, n_ranks: int, meet: Meet) -> Ints | None:
    """Return the best micro-batches of a beam search, numbered rank by rank for ``meet="step"``, None if none fits.

    Samples are placed one by one, the largest first; of all partial plans those are kept whose least possible value is
    smallest, evenly loaded ones first. Of micro-batches, or ranks, that are equal as yet only the first is tried.
    """
    length, n_batches, budgets = len(samples), n_rows * n_ranks, samples.budgets
    load = np.zeros((1, n_batches, len(budgets)), np.int64)
    work = np.zeros((1, n_batches), np.int64)
    count = np.zeros((1, n_batches), np.int64)
    at = np.zeros((1, 0), np.int64)
    left = int(samples.work.sum())
    short = max(0, left.bit_length() - 28)  # bits to leave out, so that squares are exact
    number = np.arange(n_batches)
    for sample in range(length):
        size, weight = samples.sizes[sample], int(samples.work[sample])
        left -= weight
        allowed = (load + size <= budgets).all(axis=2)
        empty = count == 0
        if meet == "micro_batch":  # of the empty ones the first
            allowed &= ~empty | (empty.argmax(axis=1)[:, None] == number)
        else:  # of the empty ones of a rank the first; of the empty ranks the first
            of_rank = empty.reshape(-1, n_ranks, n_rows)
            allowed &= ~empty | (of_rank.argmax(axis=2)[:, :, None] == np.arange(n_rows)).reshape(empty.shape)
            unused = of_rank.all(axis=2)
            first = ~unused | (unused.argmax(axis=1)[:, None] == np.arange(n_ranks))
            allowed &= first.repeat(n_rows, axis=1)
        # The samples that are left have to fill what is empty.
        allowed &= (empty.sum(axis=1)[:, None] - empty) <= length - 1 - sample
        state, batch = np.nonzero(allowed)
        if not len(state):
            return None
        new = np.arange(len(state))
        work = work[state]
        work[new, batch] += weight
        if meet == "micro_batch":
            rows = np.sort(work, axis=1)[:, ::-1].reshape(len(work), n_rows, n_ranks)
            highest = rows[:, :, 0].sum(axis=1)
            room = n_ranks * highest - work.sum(axis=1)
            value = highest + np.maximum(0, -(-(left - room) // n_ranks))
            even = (rows[:, :, 0] - rows[:, :, -1]).sum(axis=1)
        else:
            totals = work.reshape(len(work), n_ranks, n_rows).sum(axis=2)
            value = np.maximum(totals.max(axis=1), -(-(work.sum(axis=1) + left) // n_ranks))
            even = ((totals >> short) ** 2).sum(axis=1)
        kept = np.lexsort((even, value))[:KEPT] if len(state) > KEPT or sample == length - 1 else new
        state, batch, work = state[kept], batch[kept], work[kept]
        load, count, at = load[state], count[state], np.concatenate([at[state], batch[:, None]], axis=1)
        new = new[: len(kept)]
        load[new, batch] += size
        count[new, batch] += 1
    found: Ints = at[0]
    return found
