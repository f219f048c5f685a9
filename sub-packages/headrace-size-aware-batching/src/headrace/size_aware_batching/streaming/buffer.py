"""Samples that wait and batches that are ready."""

from typing import Any

import numpy as np

from headrace.size_aware_batching.sampler import Tally, exact
from headrace.size_aware_batching.streaming.rounds import Rounds
from headrace.size_aware_batching.vectors import Number


class Buffer:
    """Samples that wait, and batches that are ready to leave.

    Args:
        rounds: Decides what leaves.
        tally: Counts the batches.
    """

    def __init__(self, rounds: Rounds, tally: Tally) -> None:
        #: Samples that are here.
        self.held = 0
        self._rounds = rounds
        self._tally = tally
        self._number = 0
        self._waiting: list[tuple[int, Any, Number]] = []
        self._ready: list[list[tuple[int, Any, Number]]] = []  # the next one last

    def add(self, position: int, sample: Any, size: Number) -> None:
        """Take a sample in."""
        self._waiting.append((position, sample, size))
        self.held += 1

    def leaving(self, ended: bool = False) -> list[Any]:
        """Return the next batch; there must be a sample.

        Args:
            ended: Whether no sample will follow.
        """
        if not self._ready:
            self._sort(ended)
        batch = self._ready.pop()
        self.held -= len(batch)
        sizes = [size for _, _, size in batch]
        self._tally.close(len(batch), exact(self._rounds.budget.measure(len(batch), max(sizes), sum(sizes))))
        return [sample for _, sample, _ in batch]

    def _sort(self, ended: bool) -> None:
        waiting = self._waiting
        sizes = np.array([size for _, _, size in waiting])
        arrivals = np.array([position for position, _, _ in waiting], np.int64)
        leaving = self._rounds.leaving(sizes, arrivals, self._number, ended)
        self._number += 1
        self._ready = [[waiting[place] for place in batch.tolist()] for batch in reversed(leaving)]
        stays = np.ones(len(waiting), bool)
        stays[np.concatenate(leaving)] = False
        self._waiting = [waiting[place] for place in np.flatnonzero(stays).tolist()]
