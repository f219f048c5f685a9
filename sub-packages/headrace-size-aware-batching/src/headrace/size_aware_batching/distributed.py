"""Batches by plan: full, random, equal on every rank, resumable at once."""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed
from numpy.typing import NDArray
from torch.utils.data import Sampler

from headrace.size_aware_batching._budget import CostFunction, cut_sizes, plain_budget, prepare
from headrace.size_aware_batching._options import Options, Oversize, Strategy, fingerprint
from headrace.size_aware_batching._order import SamplerOrder, index_type
from headrace.size_aware_batching._planner import Planner, make_planner
from headrace.size_aware_batching._random import derive
from headrace.size_aware_batching._sharding import TAILS, Steps, Tail, deal_steps, n_steps
from headrace.size_aware_batching._sizes import read_sizes
from headrace.size_aware_batching._validation import one_of
from headrace.size_aware_batching.plan import BatchPlan

VERSION = 1


class DistributedSizeAwareBatchSampler(Sampler[list[int]]):
    """Batches that fill a budget and never exceed it, the same number of them on every rank.

    The list of batches is a function of the sizes, the options, the seed and the epoch alone. Step s gives rank r
    the batch ``s * num_replicas + r`` of that list, so that the world size only decides who reads what. Any
    position is found without going through what stands before it.

    Args:
        sizes: Size of each sample in any unit: array, tensor, sequence or mapping of shape ``[n]`` (or ``[n, k]`` with
            k budgets, the nodes and edges of graphs for example), or a dataset with ``sizes`` or
            ``num_tokens(index)``. An array is not copied: do not change it afterwards.
        max_total_size: Budget of a batch, in the unit of the cost; for sizes of shape ``[n, k]`` a sequence of k.
        strategy: ``"stratified"``: batches of nearly equal sum, count and make-up, and random. ``"sequential"``:
            the order's own order, a batch ends where the next sample would not fit. ``"bucketed"``: neighbours
            in size, for padded batches. ``"packed"``: filled to the brim (best-fit decreasing), for packed
            attention; such batches are less random.
        cost: ``"sum"`` of the sizes; ``"padded"``, count times largest; or ``f(n, largest)`` in any unit, which
            must not fall when n or the largest size grows.
        sampler: Order of the samples, the same on every rank; an index may come repeatedly. One that offers
            ``take(start, stop)`` is only asked for the window that is needed. None for an order of our own.
        shuffle: Whether every epoch has another order. Without, and without a ``sampler``, samples come as they
            stand.
        seed: Key of all randomness, 0 to 2**64 - 1.
        max_items: Largest number of samples in a batch.
        batch_size_multiple: Batches that hold more samples than this hold a multiple of it (``"bucketed"`` and
            ``"sequential"``; the last of a window may not).
        length_multiple: For padded cost: the length of a batch is rounded up to a multiple of this.
        oversize: What to do with a sample that exceeds the budget by itself: ``"raise"``, ``"skip"`` it, or give
            it its ``"own_batch"``, over the budget (samples that take nothing of a budget may stand with it). Those
            samples are in ``oversize_indices`` and in the report.
        tail: What to do when the batches do not divide by the world size: ``"split"`` the longest until they do,
            ``"pad"`` by repeating batches, or ``"drop"`` the last ones. Where there are too few samples to split,
            some are repeated, with a warning that names them.
        num_replicas: World size; that of ``torch.distributed`` by default, looked up when it is needed.
        rank: Rank; likewise.
        max_length: Sizes count as at most this (the samples are cut when they are loaded).
        window: Samples that are planned together. More are tighter, fewer are more random. By default what suits
            the strategy.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If an argument has a value that is not allowed, or a sample is too large and
            ``oversize="raise"``.

    Example:
        >>> sampler = DistributedSizeAwareBatchSampler([4, 1, 3, 2], 5, strategy="sequential", shuffle=False)
        >>> list(sampler)
        [[0, 1], [2, 3]]
    """

    def __init__(
        self,
        sizes: Any,
        max_total_size: float | Sequence[float],
        *,
        strategy: Strategy = "stratified",
        cost: Literal["sum", "padded"] | CostFunction = "sum",
        sampler: Iterable[int] | None = None,
        shuffle: bool = True,
        seed: int = 0,
        max_items: int | None = None,
        batch_size_multiple: int = 1,
        length_multiple: int = 1,
        oversize: Oversize = "raise",
        tail: Tail = "split",
        num_replicas: int | None = None,
        rank: int | None = None,
        max_length: float | None = None,
        window: int | None = None,
    ) -> None:
        self.options = Options(
            strategy, cost, shuffle, max_items, batch_size_multiple, length_multiple, oversize, max_length, window
        )
        one_of("tail", tail, TAILS)
        self.tail: Tail = tail
        self.seed = checked_seed(seed)
        self._replicas, self._rank = checked_world(num_replicas, rank)
        self.sizes = read_sizes(sizes)
        self.max_total_size = plain_budget(max_total_size)
        self._sized = prepare(self.sizes, self.max_total_size, self.options)
        self._given = None if sampler is None else SamplerOrder(sampler, self._sized.kept, len(self.sizes))
        self._listing: Planner | None = None
        self._fingerprint: int | None = None
        self.epoch = 0
        self._start = 0
        self._position = 0
        self._iteration: object = None

    @property
    def sampler(self) -> "EpochSetter":
        """What Lightning looks for: it calls ``batch_sampler.sampler.set_epoch``."""
        return EpochSetter(self)

    @property
    def num_replicas(self) -> int:
        """World size."""
        return world(self._replicas, self._rank)[0]

    @property
    def rank(self) -> int:
        """Rank."""
        return world(self._replicas, self._rank)[1]

    @property
    def oversize_indices(self) -> NDArray[np.int64]:
        """Samples that exceed the budget by themselves, rising: left out, or in batches of their own."""
        return self._sized.oversize

    @property
    def fingerprint(self) -> int:
        """A number that stands for the sizes, the options and the order that decide which batches there are."""
        if self._fingerprint is None:
            order = None if self._given is None else self._given.fingerprint
            self._fingerprint = fingerprint(self.sizes, self.max_total_size, self.options, self._sized.limits, order)
        return self._fingerprint

    def __getstate__(self) -> dict[str, Any]:
        # A listing is large and made anew when it is needed.
        return self.__dict__ | {"_listing": None, "_iteration": None}

    def _key(self) -> int:
        return int(derive(self.seed, self.epoch if self.options.shuffle else 0)[0])

    def _list(self) -> Planner:
        if self._given is not None:
            return make_planner(self._sized, self.options, self._given.order())
        if self._listing is None:
            self._listing = make_planner(self._sized, self.options)
        return self._listing

    def __len__(self) -> int:
        """Return how many batches the next iteration gives each rank: all of the epoch's, or what is left of it.

        Exact. Where the number depends on the order (``"sequential"``, or a ``sampler``), the epoch is planned
        for it; else it is known without.
        """
        return n_steps(self._list().count(self._key(), self._start), self.num_replicas, self.tail)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's batches, from where `load_state_dict` put the sampler, else from the beginning."""
        # All of this runs at the first ``next``: a DataLoader may make an iterator that it never uses.
        replicas, rank = world(self._replicas, self._rank)
        if self._given is not None:
            self._given.refuse_different(replicas)
        begun = self._list()
        position, self._start = self._start, 0
        self._iteration = mine = object()  # only the latest iteration of an epoch says where the sampler stands
        for laid in deal_steps(begun.chunks(self._key(), position), replicas, self.tail):
            offsets = laid.offsets
            if laid.repeated and self.tail == "split":
                warnings.warn(repetition(laid, replicas), stacklevel=2)
            repeated_from = len(offsets) - 1 - laid.repeated
            for first in range(0, len(offsets) - 1, replicas):
                used = int(offsets[min(first + replicas, repeated_from)] - offsets[first])
                position += used
                if self._iteration is mine:
                    self._position = position
                yield laid.indices[offsets[first + rank] : offsets[first + rank + 1]].tolist()
        if self._given is not None:
            self._given.finished()
        if self._iteration is mine:
            self._position = begun.n_samples

    def batch(self, number: int) -> list[int]:
        """Return batch ``number`` of the epoch's global list, whatever the rank.

        Raises:
            IndexError: If there is none.
        """
        found = self._list()
        count = found.count(self._key(), 0)
        if not 0 <= number < count:
            raise IndexError(f"number: got {number}, the epoch has batches 0 to {count - 1}")
        samples: list[int] = found.batch(self._key(), number).tolist()
        return samples

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch to iterate over next; a position that was loaded holds for its own epoch only."""
        epoch = checked_epoch(epoch)
        if epoch != self.epoch:
            self._start = self._position = 0
            self._iteration = None
        self.epoch = epoch
        if self._given is not None:
            self._given.set_epoch(epoch)

    def state_dict(self, position: int | None = None) -> dict[str, int]:
        """Return what it takes to go on from here.

        Args:
            position: Samples of the epoch's list that the training loop has received on all ranks together. By
                default those of the batches that were taken from this sampler, which with workers runs ahead of
                the loop.
        """
        position = self._position if position is None else checked_position(position, self._list().n_samples)
        return {
            "version": VERSION,
            "seed": self.seed,
            "epoch": self.epoch,
            "position": position,
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where a state was taken, at any world size: the rest of the epoch's list is dealt anew.

        Raises:
            ValueError: If the state is of other sizes, options or another seed, or no such state at all.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"state: got {type(state).__name__}, expected what state_dict() returned")
        missing = {"version", "seed", "epoch", "position", "fingerprint"} - set(state)
        if missing:
            raise ValueError(f"state: lacks {sorted(missing)}; it is no state of a {type(self).__name__}")
        self._refuse_other(state)
        if self._given is not None and state["position"]:
            self._given.refuse_forgotten()
        self.set_epoch(state["epoch"])
        position = checked_position(state["position"], self._list().n_samples)
        self._start = self._position = position

    def _refuse_other(self, state: dict[str, int]) -> None:
        mine = {"version": VERSION, "seed": self.seed, "fingerprint": self.fingerprint}
        cures = {
            "version": "it comes from another version of headrace",
            "seed": "construct the sampler with that seed, or begin anew",
            "fingerprint": "the sizes, the budget, the options or the sampler differ from those of the run that saved "
            "it; construct the sampler as then, or begin anew",
        }
        for name, value in mine.items():
            if state[name] != value:
                raise ValueError(f"state[{name!r}]: got {state[name]!r}, this sampler has {value!r}: {cures[name]}")

    def plan(self, epoch: int | None = None) -> BatchPlan:
        """Return all batches of an epoch, for all ranks together; of the present one by default."""
        before = self.epoch, self._start, self._position
        if epoch is not None:
            self.set_epoch(epoch)
        indices, offsets = joined(self._list(), self._key(), len(self.sizes))
        if epoch is not None:
            self.set_epoch(before[0])
            self.epoch, self._start, self._position = before
        budget = self.max_total_size
        return BatchPlan(
            indices,
            offsets,
            cut_sizes(self.sizes, self.options.max_length),
            tuple(budget) if isinstance(budget, list) else (budget,),
            self.options.cost if isinstance(self.options.cost, str) else "function",
            self.oversize_indices,
            self.options.oversize == "skip",
            self.num_replicas,
            self.tail,
            self.options.length_multiple,
        )


class EpochSetter:
    """Passes ``set_epoch`` on to the batch sampler that it belongs to."""

    def __init__(self, owner: DistributedSizeAwareBatchSampler) -> None:
        self._owner = owner

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch to iterate over next."""
        self._owner.set_epoch(epoch)


def joined(batches: Planner, epoch_key: int, n_samples: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return all batches of an epoch as one list, written where they belong as they are planned."""
    indices = np.empty(batches.n_samples, index_type(n_samples))
    counts, filled = [], 0
    for part, offsets in batches.chunks(epoch_key, 0):
        indices[filled : filled + len(part)] = part
        counts.append(np.diff(offsets).astype(np.int32))
        filled += len(part)
    return indices, np.concatenate([[0], np.cumsum(np.concatenate([np.zeros(0, np.int32), *counts]), dtype=np.int64)])


def checked_seed(seed: Any) -> int:
    """Return the seed as an integer of 64 bits."""
    if isinstance(seed, bool) or not hasattr(seed, "__index__"):
        raise TypeError(f"seed: got {seed!r}, expected an integer")
    if not 0 <= int(seed) < 2**64:
        raise ValueError(f"seed: got {seed!r}, allowed are 0 to 2**64 - 1")
    return int(seed)


def checked_epoch(epoch: Any) -> int:
    """Return the epoch as an integer."""
    if isinstance(epoch, bool) or not hasattr(epoch, "__index__"):
        raise TypeError(f"epoch: got {epoch!r}, expected an integer")
    if not 0 <= int(epoch) < 2**63:
        raise ValueError(f"epoch: got {epoch!r}, expected 0 or more")
    return int(epoch)


def checked_position(position: Any, n_samples: int) -> int:
    """Return a position as a plain integer."""
    if isinstance(position, bool) or not isinstance(position, Integral):
        raise TypeError(f"position: got {position!r}, expected an integer")
    if not 0 <= int(position) <= n_samples:
        raise ValueError(f"position: got {position}, allowed are 0 to {n_samples}, the samples of an epoch")
    return int(position)


def repetition(laid: Steps, n_replicas: int) -> str:
    """Say which samples a last step repeats because there are too few to split."""
    again = laid.indices[laid.offsets[-1 - laid.repeated] :].tolist()
    return (
        f"tail='split': the last batches hold too few samples for one on each of {n_replicas} ranks; {laid.repeated} "
        f"ranks get samples once more: {again[:10]}{' ...' if len(again) > 10 else ''}"
    )


def checked_world(num_replicas: int | None, rank: int | None) -> tuple[int | None, int | None]:
    """Refuse a world size or a rank that cannot be."""
    if num_replicas is not None and (not hasattr(num_replicas, "__index__") or int(num_replicas) < 1):
        raise ValueError(f"num_replicas: got {num_replicas!r}, expected 1 or more")
    if rank is not None and (not hasattr(rank, "__index__") or int(rank) < 0):
        raise ValueError(f"rank: got {rank!r}, expected 0 or more")
    if num_replicas is not None and rank is not None and rank >= num_replicas:
        raise ValueError(f"rank: got {rank}, allowed are 0 to {num_replicas - 1} with num_replicas={num_replicas}")
    return num_replicas, rank


def world(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Return world size and rank: as given, else of the process group, else 1 and 0."""
    joined_group = torch.distributed.is_available() and torch.distributed.is_initialized()
    if num_replicas is None:
        num_replicas = torch.distributed.get_world_size() if joined_group else 1
    if rank is None:
        if not joined_group and num_replicas > 1:
            raise ValueError(
                f"rank: not given, with num_replicas={num_replicas} and no process group to ask: give it, or call "
                "torch.distributed.init_process_group first"
            )
        rank = torch.distributed.get_rank() if joined_group else 0
    if rank >= num_replicas:
        raise ValueError(f"rank: got {rank}, allowed are 0 to {num_replicas - 1}")
    return int(num_replicas), int(rank)
