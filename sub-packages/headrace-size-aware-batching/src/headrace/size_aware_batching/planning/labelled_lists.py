"""Lists of batches of one label each: those of every label, merged, each with its share of any part of the epoch.

The samples of a label are planned as a list of their own, as full and as random as without labels. The merged list is
cut into parts of some steps. Every part takes the next batches of every list, as many as its share, to within one. In a
part, batches are sorted by work, so that the ranks of a step get batches of like work, of whatever labels; or, where a
step is to have one label, those of each label by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching._shared.random import fold_in, splitmix64
from headrace.size_aware_batching.planning.batch_list import (
    BatchList,
    GroupedList,
    OrderedList,
    StrataList,
    WindowedList,
    in_sequence,
)
from headrace.size_aware_batching.planning.costs import reduced
from headrace.size_aware_batching.planning.distribution import chunk_length, shuffle_sorted_chunks
from headrace.size_aware_batching.planning.last_step import Batches
from headrace.size_aware_batching.planning.options import SamplerOptions
from headrace.size_aware_batching.planning.order import Order, built_in_order
from headrace.size_aware_batching.planning.prepared import PreparedSizes
from headrace.size_aware_batching.planning.shuffles import random_words
from headrace.size_aware_batching.planning.strategies import BatchLists, build_strata, window_starts

# Steps and batches of a part, at least.
STEPS, FEWEST_BATCHES = 32, 512
OF_LABEL, PHASES = 9, 10  # what keys are for: the list of a label, and where its batches fall into parts


class LabelledLists:
    """Makes the list of each epoch of samples that have labels.

    Args:
        sized: Sizes ready for planning, and labels.
        options: Of the sampler.
    """

    def __init__(self, sized: PreparedSizes, options: SamplerOptions) -> None:
        self.sized, self.options = sized, options

    @cached_property
    def _of_labels(self) -> dict[int, BatchLists]:
        """What makes the list of each label that some sample has, by the label's number."""
        sized, options = self.sized, self.options
        kept = np.arange(len(sized.sizes)) if sized.kept is None else sized.kept
        samples = dict(by_label(kept, sized))
        return {label: BatchLists(replace(sized, kept=own, labels=None), options) for label, own in samples.items()}

    def known_count(self) -> int | None:
        """Return the number of batches of every epoch, if it is known without planning or sorting."""
        if "_of_labels" not in vars(self):
            return None
        counts = [lists.known_count() for lists in self._of_labels.values()]
        return None if None in counts else sum(count or 0 for count in counts)

    def batches_before(self, epoch: int) -> int:
        """Return about how many batches come before an epoch."""
        return sum(lists.batches_before(epoch) for lists in self._of_labels.values())

    def of_epoch(self, key: int, balanced_ranks: int, epoch: int = 0, order: Order | None = None) -> BatchList:
        """Return the batches of an epoch; ``order`` is that of a user's sampler, None for one of our own."""
        sized, options = self.sized, self.options
        n_samples = sized.n_samples if order is None else order.n_samples
        if not n_samples:
            return OrderedList(built_in_order(None, 0, None), sized.sizes, sized.limits)
        merger = Merger(sized, balanced_ranks, options.label_per == "step")
        if order is not None:
            starts = window_starts(sized, options, n_samples)
            return WindowedList(order, starts, WindowOfLabels(sized, options, merger).plan, key)
        of_labels = self._of_labels
        lists = [lists.of_epoch(label_key(key, label), merger.unit, epoch) for label, lists in of_labels.items()]
        return MergedList(Parts(lists, merger, key), np.array([*of_labels]), merger, key)


def by_label(samples: NDArray[Any], sized: PreparedSizes) -> list[tuple[int, NDArray[Any]]]:
    """Return the samples of each label that some of them have, in their order."""
    if sized.labels is None:
        return [(0, samples)]
    numbers = sized.labels[samples]
    order = np.argsort(numbers, kind="stable")
    counts = np.bincount(numbers)
    stops = np.cumsum(counts)
    present = np.flatnonzero(counts)
    return [(label, samples[order[stops[label] - counts[label] : stops[label]]]) for label in present.tolist()]


def label_key(key: int, label: int) -> int:
    """Return the key of a label's list."""
    return int(fold_in(key, label, OF_LABEL)[0])


@dataclass(frozen=True)
class Merger:
    """Merges batches of several labels.

    Args:
        sized: The sizes that they were planned by.
        balanced_ranks: Number of ranks for which steps are balanced.
        per_step: Whether the batches of a step have one label.
    """

    sized: PreparedSizes
    balanced_ranks: int
    per_step: bool

    @property
    def unit(self) -> int:
        """Number of batches of a label, of like work, that stay together."""
        return self.balanced_ranks if self.per_step else 1

    def merged(self, parts: Sequence[Batches], key: int, before: int = 0) -> Batches:
        """Return the batches of all labels, in the order of the list; ``before`` batches come before them in it."""
        samples = np.concatenate([samples for samples, _ in parts])
        lengths = np.concatenate([np.diff(offsets) for _, offsets in parts])
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        work = self._work(samples, offsets)
        if self.per_step:
            counts = np.array([len(offsets) - 1 for _, offsets in parts])
            places = np.lexsort((work, np.repeat(np.arange(len(parts)), counts)))
            order = places[Runs.of_labels(counts, self.unit, key).places()]
        else:
            length = chunk_length(len(work), self.balanced_ranks)
            order = np.argsort(shuffle_sorted_chunks(work, key, before, length))
        inside, offsets = in_sequence(offsets[:-1][order], lengths[order])
        return samples[inside], offsets

    def _work(self, samples: NDArray[Any], offsets: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the work of each batch."""
        if self.sized.work is not None:
            return reduced(np.add, self.sized.work[samples], offsets)
        work = self.sized.cost.work(self.sized.sizes[samples], self.sized.limits)
        each: NDArray[np.float64] = work(np.arange(len(samples))[None], offsets)[0]
        return each


@dataclass(frozen=True)
class Runs:
    """Runs of batches of one label, label by label, of a number of batches; the first of a label may be shorter.

    Args:
        labels: The label of each run, by its place among the labels.
        lengths: Its number of batches.
        sequence: The runs in the order of the list: those of a label at equal distances, about.
        falling: Whether the batches of a run come in descending order of work: no rank gets the lighter ones always.
    """

    labels: NDArray[np.int64]
    lengths: NDArray[np.int64]
    sequence: NDArray[np.int64]
    falling: NDArray[np.bool_]

    @classmethod
    def of_labels(cls, counts: NDArray[np.int64], length: int, key: int) -> Runs:
        """Cut so many batches of each label into runs.

        >>> runs = Runs.of_labels(np.array([4, 3]), 2, key=0)
        >>> runs.labels.tolist(), runs.lengths.tolist()
        ([0, 0, 1, 1], [2, 2, 1, 2])
        """
        n_runs = -(-counts // length)
        labels, firsts = np.repeat(np.arange(len(counts)), n_runs), np.cumsum(n_runs) - n_runs
        lengths = np.full(len(labels), length)
        lengths[firsts[counts > 0]] = (counts[counts > 0] - 1) % length + 1
        words = random_words(key, len(labels))
        turn = np.empty(len(labels), np.int64)
        turn[np.lexsort((words, labels))] = np.arange(len(labels)) - firsts[labels]
        moment = (turn + (splitmix64(words) >> np.uint64(11)) * 2.0**-53) / n_runs[labels]
        return cls(labels, lengths, np.argsort(moment, kind="stable"), (words & np.uint64(1)).astype(bool))

    def places(self) -> NDArray[np.int64]:
        """Return the places of the batches, sorted by label and work, in the order of the list."""
        begins = (np.cumsum(self.lengths) - self.lengths)[self.sequence]
        lengths = self.lengths[self.sequence]
        places, _ = in_sequence(begins, lengths)
        mirrored = np.repeat(2 * begins + lengths - 1, lengths) - places
        in_turn: NDArray[np.int64] = np.where(np.repeat(self.falling[self.sequence], lengths), mirrored, places)
        return in_turn

    def labels_of_batches(self) -> NDArray[np.int64]:
        """Return the label of each batch in the order of the list."""
        return np.repeat(self.labels[self.sequence], self.lengths[self.sequence])


class Parts:
    """The parts of a merged list, and the position where each begins: every part has its share of each list.

    Args:
        lists: Of each label.
        merger: Says how many batches of a label stay together.
        key: Of the epoch.
    """

    def __init__(self, lists: Sequence[BatchList], merger: Merger, key: int) -> None:
        self.lists, self._unit = lists, merger.unit
        self._counts = np.array([each.count() for each in lists], np.int64)
        self._units = -(-self._counts // self._unit)
        together = max(FEWEST_BATCHES, STEPS * merger.balanced_ranks)
        self.count = max(1, round(int(self._counts.sum()) / together))
        phases = random_words(int(fold_in(key, PHASES)[0]), len(lists)) % np.uint64(self.count)
        self._phases = phases.astype(np.int64)
        self._starts: dict[int, int] = {}

    def cuts(self, part: int) -> NDArray[np.int64]:
        """Return how many batches of each list come before a part."""
        whole = (self._units * part + self._phases) // self.count
        before: NDArray[np.int64] = np.minimum(whole * self._unit, self._counts)
        return before

    def batches(self, part: int) -> list[Batches]:
        """Return the batches of a part, list by list."""
        cuts = zip(self.lists, self.cuts(part).tolist(), self.cuts(part + 1).tolist(), strict=True)
        return [each.span(first, stop) for each, first, stop in cuts]

    def __len__(self) -> int:
        return self.count + 1

    def __getitem__(self, part: int) -> int:
        part %= len(self)
        if part not in self._starts:
            cuts = zip(self.lists, self.cuts(part).tolist(), strict=True)
            self._starts[part] = sum(each.position_of(cut) if cut else 0 for each, cut in cuts)
        return self._starts[part]


class MergedList(GroupedList):
    """The batches of an epoch, part by part.

    Args:
        parts: Of which lists the batches come.
        labels: The label of each list.
        merger: Merges the batches of a part.
        key: Of the epoch.
    """

    def __init__(self, parts: Parts, labels: NDArray[np.int64], merger: Merger, key: int) -> None:
        super().__init__(parts)
        self.parts, self.labels, self.merger, self.key = parts, labels, merger, key

    @cached_property
    def before(self) -> NDArray[np.int64]:
        """Number of batches before each part."""
        return np.array([self.parts.cuts(part).sum() for part in range(len(self.parts))])

    def _key(self, part: int) -> int:
        return int(fold_in(self.key, part, 1)[0])

    def plan_group(self, group: int) -> Batches:
        """Merge the batches of a part."""
        return self.merger.merged(self.parts.batches(group), self._key(group), int(self.before[group]))

    def labels_of_batches(self, labels: NDArray[Any]) -> NDArray[Any]:
        """Return the label of each batch; where a step has one label they are known without planning."""
        if not self.merger.per_step:
            return super().labels_of_batches(labels)
        runs = (
            Runs.of_labels(self.parts.cuts(part + 1) - self.parts.cuts(part), self.merger.unit, self._key(part))
            for part in range(self.parts.count)
        )
        known: NDArray[np.int64] = self.labels[np.concatenate([each.labels_of_batches() for each in runs])]
        return known


@dataclass(frozen=True)
class WindowOfLabels:
    """Plans a window of a user's order: the samples of each label by themselves.

    Args:
        sized: Sizes ready for planning, and labels.
        options: Of the sampler.
        merger: Merges the batches of all labels.
    """

    sized: PreparedSizes
    options: SamplerOptions
    merger: Merger

    def plan(self, samples: NDArray[Any], key: int) -> Batches:
        """Return the batches of a window."""
        parts = []
        for label, own in by_label(samples, self.sized):
            strata = build_strata(self.sized, self.options, own, n_windows=1, key=label_key(key, label))
            parts.append(StrataList(strata, label_key(key, label), self.merger.unit).group(0))
        return self.merger.merged(parts, key)
