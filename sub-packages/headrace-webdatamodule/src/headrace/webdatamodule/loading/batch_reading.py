"""Batches read in a worker, whole or without their damaged samples, and collated there."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple, NoReturn

import torch
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate, get_worker_info

from headrace.webdatamodule.loading.options import Loading, OnError, SeedPer
from headrace.webdatamodule.loading.sample_places import describe_sample
from headrace.webdatamodule.loading.sample_random import SampleRandom, batch_key, is_plain, seeded
from headrace.webdatamodule.loading.worker import (
    WorkerTimeout,
    check_picklable,
    end_with_parent,
    end_workers,
    seed_generators,
    start_workers,
    step_key,
    will_fork,
)
from headrace.webdatamodule.shards import DamagedShardError, DecodeError, IndexedShards, ShardError, UnsafePickleError
from headrace.webdatamodule.shards.reading.local_shards import Upcoming

_AHEAD = 32  # batches announced to each worker; `lookahead` bytes limit how many of them it fetches
_WARNED = 10  # skipped samples that get a warning each
_DAMAGED = (DamagedShardError, DecodeError)


class DamagedSampleWarning(UserWarning):
    """A sample was skipped because it is damaged."""


def warn_of_skipped(sample: SkippedSample, count: int) -> None:
    """Warn of a skipped sample, the `count`-th one, unless there were enough warnings."""
    if count <= _WARNED:
        suffix = "; further ones are counted in report()" if count == _WARNED else ""
        warnings.warn(f"skipped a sample: {sample[1]}{suffix}", DamagedSampleWarning, stacklevel=4)


class Request(NamedTuple):
    """A batch to be read: its number in the epoch, and what its random numbers depend on."""

    indices: Sequence[int]
    keys: Keys
    step: int
    draws: Sequence[int] | None = None  # where samples may repeat; see `SampleRandom`
    ahead: Ahead | None = None
    upcoming: Upcoming | None = None  # when its samples are needed next; None where that is not known


class Ahead(NamedTuple):
    """A worker's next batches, this one included: after those announced before, or in their place (`restart`)."""

    batches: list[Sequence[int]]
    restart: bool


def announced(requests: Iterator[Request], workers: int) -> Iterator[Request]:
    """Add to a worker's requests its next batches: to the first its own and the `_AHEAD` behind, then one more each.

    Torch gives requests to its workers in turn. An error of `requests` is raised after all requests before it.
    """
    coming, failed = deque[Request](), list[Exception]()
    for number in count():
        while len(coming) <= _AHEAD * workers and not failed:
            try:
                coming.append(next(requests))
            except StopIteration:
                break
            except Exception as error:
                failed.append(error)
        if not coming:
            break
        restart = number < workers
        places = range(0, len(coming), workers) if restart else range(_AHEAD * workers, len(coming), workers)
        ahead = Ahead([coming[place].indices for place in places], restart)
        yield coming.popleft()._replace(ahead=ahead)
    if failed:
        raise failed[0]


class Keys(NamedTuple):
    """The keys of the random numbers of an epoch, 64 bits each."""

    steps: int  # of this rank and split
    samples: int


class SkippedSample(NamedTuple):
    """A sample that was skipped: its index in the dataset, and what is wrong with it."""

    sample: int
    message: str


class RawBatch(NamedTuple):
    """A batch before it is collated, without the samples that were skipped; an error is raised in its place."""

    indices: Sequence[int]
    samples: list[Any]
    skipped: list[SkippedSample]
    error: ShardError | None = None
    key: int | None = None  # that seeds its collation


class Delivery(NamedTuple):
    """A batch as it leaves its worker: with the samples that were skipped, or an error in its place.

    `traffic` is what reading took in the worker since its last batch: see `Traffic`.
    """

    batch: Any
    skipped: list[SkippedSample]
    error: ShardError | None
    traffic: Sequence[int] | None = None


class BatchDataset(Dataset[Any]):
    """Reads whole batches, in the workers of a `DataLoader`; with `__getitems__` where the dataset has that."""

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[list[Any]], Any] | None,
        on_error: OnError,
        seed_per: SeedPer = "step",
    ) -> None:
        self.dataset, self.on_error = dataset, on_error
        self._collate_fn = default_collate if collate_fn is None else collate_fn
        self._by_sample = seed_per == "sample"
        # A subclass with a `__getitems__` of its own is read by that.
        ours = getattr(type(dataset), "__getitems__", None) is IndexedShards.__getitems__
        self.shards: IndexedShards | None = dataset if ours else None
        self.looks_ahead = self.shards is not None and self.shards.looks_ahead
        self.keeps_samples = self.shards is not None and self.shards.keeps_samples
        self._checked = False
        key = None if isinstance(dataset, IndexedShards) else getattr(dataset, "key", None)
        self._key_of: Callable[[int], Any] | None = key if callable(key) else None

    def __getitems__(self, request: Request | Sequence[int]) -> RawBatch:
        indices: Sequence[int] = request  # type: ignore[assignment]
        random, key = None, None
        if isinstance(request, Request):
            indices = request.indices
            if self.shards is not None:
                batches, restart = request.ahead or ((), False)
                self.shards.announce(batches, restart=restart, next_use=request.upcoming)
            if self._by_sample:
                if not is_plain(self.dataset):
                    random = SampleRandom(request.keys.samples, indices, request.draws)
                if self._collate_fn is not default_collate:
                    key = batch_key(request.keys.samples, indices, request.draws)
            elif get_worker_info() is not None:  # else the process's own generators are left alone
                seed_generators(step_key(request.keys.steps, request.step))
        try:
            if random is None:
                return self._read(indices, key)
            with random:
                return self._read(indices, key, random)
        except StopIteration as error:  # which a loop would take for the end of the epoch
            raise_explained(error, "a transform")
        except ShardError as error:
            if get_worker_info() is None:
                raise
            # As a value it reaches the trainer unchanged; what a worker raises is made anew from its text there.
            return RawBatch(indices, [], [], error)

    def _samples(self, indices: Sequence[int], random: SampleRandom | None = None, first: int = 0) -> list[Any]:
        """Read samples, which are those of the batch from its place `first` on."""
        dataset = self.dataset
        read = getattr(dataset, "__getitems__", None)
        if random is None:
            return [dataset[index] for index in indices] if read is None else self._read_by(read, indices)
        samples: list[Any] = []
        if self.shards is not None:
            return self.shards.read(indices, lambda place: random.begin(first + place))
        for place, index in enumerate(indices, first):
            random.begin(place)
            samples += [self.dataset[index]] if read is None else self._read_by(read, [index])
        return samples

    def _read_by(self, read: Callable[[Sequence[int]], list[Any]], indices: Sequence[int]) -> list[Any]:
        samples = read(indices)
        if _count(samples) != len(indices):
            raise _wrong_answer(self.dataset, f"asked for {len(indices)}, got {_described(samples)}")
        if self._key_of is not None:
            self._check_keys(indices, samples, self._key_of)
        return samples

    def _check_keys(self, indices: Sequence[int], samples: Sequence[Any], key_of: Callable[[int], Any]) -> None:
        """Refuse samples in another order, where each has a `__key__` that the dataset's `key(index)` tells, too."""
        for index, sample in zip(indices, samples, strict=True):
            if not isinstance(sample, Mapping) or "__key__" not in sample:
                return
            if sample["__key__"] == (key := key_of(int(index))):
                continue
            try:
                alone = self.dataset[index]
            except NotImplementedError:
                alone = self.dataset.__getitems__([index])[0]
            if isinstance(alone, Mapping) and alone.get("__key__") == sample["__key__"]:
                self._key_of = None  # keys of another form
                return
            got = f"index {index} is {key!r}, got {sample['__key__']!r} in its place"
            raise _wrong_answer(self.dataset, got)

    def _read(self, indices: Sequence[int], key: int | None, random: SampleRandom | None = None) -> RawBatch:
        try:
            return RawBatch(indices, self._samples(indices, random), [], None, key)
        except _DAMAGED as error:
            if self.on_error == "raise" or isinstance(error, UnsafePickleError):
                raise
        return self._one_by_one(indices, key, random)

    def _one_by_one(self, indices: Sequence[int], key: int | None, random: SampleRandom | None) -> RawBatch:
        read, samples = list[int](), list[Any]()
        skipped, last = list[SkippedSample](), ShardError("")
        for place, index in enumerate(indices):
            try:
                samples += self._samples([index], random, place)
                read.append(index)
            except _DAMAGED as error:
                if isinstance(error, UnsafePickleError):
                    raise
                skipped.append(SkippedSample(int(index), f"{type(error).__name__}: {error}"))
                last = error
        if not read:
            message = f"no sample of a batch of {len(skipped)} can be read, and every rank needs a batch"
            last.message += f"; {message}: repair the shards, or leave those samples out of them"
            raise last
        return RawBatch(read, samples, skipped, None, key)

    def collate(self, read: RawBatch) -> Delivery:
        """Make a batch; the `collate_fn` of the `DataLoader`."""
        if read.error is not None:
            return Delivery(None, [], read.error)
        try:
            if read.key is None:
                batch = self._collate_fn(read.samples)
            else:
                with seeded(read.key):
                    batch = self._collate_fn(read.samples)
            if not self._checked and get_worker_info() is not None:
                check_picklable(batch)  # the first one of each worker; to pickle all twice would cost too much
                self._checked = True
            return Delivery(batch, read.skipped, None, None if self.shards is None else self.shards.take_traffic())
        except Exception as error:
            shown = ", ".join(describe_sample(self.dataset, int(index)) for index in read.indices[:5])
            suffix = " ..." if len(read.indices) > 5 else ""
            raise_explained(error, "collate_fn", f"in collate_fn, of {len(read.indices)} samples: {shown}{suffix}")


class _Requests(Sampler[Request]):
    """The batch sampler of torch's `DataLoader`: the requests of the iteration that begins."""

    def __init__(self) -> None:
        self.next: Iterator[Request] = iter(())

    def __iter__(self) -> Iterator[Request]:
        return self.next  # the same one when it is asked twice, as torch does


class BatchReader:
    """Torch's `DataLoader` over a `BatchDataset`, for one iteration after another."""

    def __init__(self, dataset: BatchDataset, loading: Loading) -> None:
        self._requests, self._timeout = _Requests(), WorkerTimeout(loading.timeout)
        self._batches: Iterator[Any] = iter(())
        self._shards = dataset.shards
        self._workers = loading.num_workers if dataset.looks_ahead else 0  # that get announcements
        self._reads_here = loading.num_workers == 0 and not loading.of_torch()["pin_memory"]
        self._torch: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=self._requests,  # type: ignore[arg-type]  # gives what the dataset's __getitems__ takes
            collate_fn=dataset.collate,  # type: ignore[arg-type]  # of what its __getitems__ gives
            generator=torch.Generator(),  # else torch would draw from the process's own
            worker_init_fn=end_with_parent,
            **loading.of_torch(),
        )

    def start(self, requests: Iterator[Request]) -> None:
        """Begin an iteration; the first one starts the workers."""
        if self._shards is not None:
            self._shards.announce(restart=True)  # which writes what was read without workers
        self._requests.next = announced(requests, self._workers) if self._workers else requests
        running = self._torch._iterator
        if self._shards is not None and will_fork(self._torch):
            self._shards.share_with_workers()
        if running is not None:  # torch waits for what the workers are reading, with no more patience than this
            running._timeout = self._timeout.timeout
        self._batches = self._read_here() if self._reads_here else start_workers(self._torch)
        if running is not None:
            running._timeout = self._timeout.seconds

    def _read_here(self) -> Iterator[Delivery]:
        """The batches without workers; torch's `DataLoader` would take as long for its records as for small batches."""
        dataset = self._torch.dataset
        for request in self._requests.next:
            yield dataset.collate(dataset.__getitems__(request))  # type: ignore[attr-defined]  # it is a BatchDataset

    def next(self) -> Delivery | None:
        """The next batch; None at the end."""
        batch: Delivery | None = self._timeout.next_of(self._batches, self._torch)
        return batch

    @property
    def iterator(self) -> Any:
        """Torch's iterator with the workers; None without workers."""
        return self._torch._iterator

    @iterator.setter
    def iterator(self, iterator: Any) -> None:
        running = self._torch._iterator
        if iterator is None and running is not None:
            end_workers(running)
        self._torch._iterator = iterator

    def close(self) -> None:
        """End the workers; the next iteration starts others."""
        self.iterator = None


def _count(samples: Any) -> int | None:
    """How many samples a dataset's `__getitems__` returned; None if it is no list, as a generator or columns are."""
    if isinstance(samples, list):
        return len(samples)
    try:
        count = len(samples)
        if count:
            samples[0]
    except (TypeError, KeyError):
        return None
    return count


def _described(samples: Any) -> str:
    count, kind = _count(samples), type(samples).__name__
    return f"a {kind}" if count is None else f"{count} (a {kind})"


def _wrong_answer(dataset: Any, got: str) -> ValueError:
    return ValueError(
        f"{type(dataset).__name__}.__getitems__ must return a list with one sample for each index, in their order, "
        f"{got}: to leave samples out, leave them out of the batch sampler's indices; without __getitems__ they are "
        "read one by one"
    )


def raise_explained(error: Exception, where: str, *notes: str) -> NoReturn:
    """Raise an error with notes; instead of a StopIteration, which a loop would take for its own end, another one."""
    for note in notes:
        error.add_note(note)
    if not isinstance(error, StopIteration):
        raise error
    instead = RuntimeError(f"{where} raised StopIteration, as next() does of an exhausted iterator")
    instead.__notes__ = getattr(error, "__notes__", [])
    raise instead from error
