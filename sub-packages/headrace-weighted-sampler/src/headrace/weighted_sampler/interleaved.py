"""Several iterable datasets interleaved by weight into one stream, which resumes exactly."""

import os
from collections.abc import Iterator, Mapping
from copy import copy, deepcopy
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Generic, TypedDict, TypeVar, cast

import torch
from torch.utils.data import IterableDataset, get_worker_info

from headrace.weighted_sampler._arguments import MAX_POSITION, as_int, listed
from headrace.weighted_sampler._mixture import StreamOrder
from headrace.weighted_sampler._ranks import Mesh, Ranks, process_group
from headrace.weighted_sampler._sources import (
    END,
    SourceReader,
    Sources,
    SourceState,
    fresh_state,
    nested,
    set_source_epoch,
)
from headrace.weighted_sampler._spec import FINGERPRINT, StreamMixture, parse_streams
from headrace.weighted_sampler._states import check_fingerprint, check_keys, check_state
from headrace.weighted_sampler._stopping import Stopping
from headrace.weighted_sampler.schedule import Stage, StreamSchedule, stages_before
from headrace.weighted_sampler.weights import StreamWeights, Weight

T = TypeVar("T")
VERSION = 2  # of the state
_MAX_EPOCH = 2**63 - 1
_OWNER = "InterleavedDataset"  # of states, in messages


@dataclass(frozen=True)
class Stream:
    """Which of the streams that are read at the same time this one is."""

    rank: int = 0
    num_replicas: int = 1
    worker: int = 0  # of the rank's loader; 0 in the main process
    num_workers: int = 1  # 1 in the main process

    def __str__(self) -> str:
        """Name the stream in a message."""
        return f"rank {self.rank} of {self.num_replicas}, worker {self.worker} of {self.num_workers}"


class StreamState(TypedDict):
    """What ``InterleavedDataset.state_dict`` returns.

    Attributes:
        version: Of this layout.
        seed: Of the dataset.
        epoch: The epoch that ``position`` is in.
        position: Items of that epoch that this stream has yielded.
        dropped_at: The position where the latest source was dropped; 0 when none was.
        stream: Which stream, as a dict of four integers.
        fingerprint: Of the sources, the options and the seed.
        sources: The position in each source, by name.
    """

    version: int
    seed: int
    epoch: int
    position: int
    dropped_at: int
    stream: dict[str, int]
    fingerprint: str
    sources: dict[str, SourceState]


class _ChosenEpoch:
    """The epoch of the next iteration, and whether ``set_epoch`` chose it after the last one began.

    In shared memory, so that workers that live for several epochs learn of a new one. A worker's own ``set_epoch``,
    for a dataset that is a source of another one, stays in that worker: the others may be in another epoch of it.
    """

    def __init__(self) -> None:
        # Epoch; calls of set_epoch; calls before the latest iteration; which loader's workers made that iteration.
        self._shared: torch.Tensor = torch.zeros(4, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self._own: tuple[int, int, bool] | None = None  # of a worker: epoch, calls it has seen, whether it is pending

    def _local(self) -> tuple[int, int, bool] | None:
        return self._own if self._own is not None and self._own[1] == int(self._shared[1]) else None

    @property
    def value(self) -> int:
        own = self._local()
        return int(self._shared[0]) if own is None else own[0]

    @property
    def pending(self) -> bool:
        """Whether the epoch was chosen by ``set_epoch`` and no iteration has begun since."""
        if (own := self._local()) is not None:
            return own[2]
        calls, iterated, loader = self._shared[1:].tolist()
        # Workers of one loader begin one after the other; for each of them the epoch is still to come.
        return bool(calls > iterated or (calls and loader and loader == _loader()))

    def choose(self, epoch: int) -> None:
        if get_worker_info() is None:
            self._shared[0] = epoch
            self._shared[1] += 1
        else:
            self._own = epoch, int(self._shared[1]), True

    def begin(self) -> None:
        """Note that an iteration has begun."""
        if (own := self._local()) is not None:
            self._own = own[0], own[1], False
        else:
            self._shared[2] = self._shared[1]
            self._shared[3] = _loader()

    def resume(self, epoch: int) -> None:
        """Take the epoch of a state."""
        if (own := self._local()) is not None:
            self._own = epoch, own[1], False
        else:
            self._shared[0] = epoch
            self._shared[2] = self._shared[1]
            self._shared[3] = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._shared.share_memory_()  # type: ignore[no-untyped-call]  # copies of a tensor are not


@dataclass(frozen=True)
class _Resume:
    """Where the next iteration begins."""

    process: int  # that loaded the state, or made the copy
    state: StreamState
    loaded: bool  # else it is the position of the dataset that this one is a copy of


def _loader() -> int:
    """A number that the workers of one loader's iteration have in common; 0 in the main process."""
    worker = get_worker_info()
    return 0 if worker is None else worker.seed - worker.id


class InterleavedDataset(IterableDataset[T]):
    """Interleave iterable datasets by weight; the source at any position is a pure function of seed and weights.

    Every source is read in its own order, nothing is read ahead, and no source is begun before its first item is
    needed. Sources shard their data among ranks and workers themselves (``split_by_node`` and ``split_by_worker`` of
    WebDataset; every worker reads the whole of a plain list). Every (rank, worker) is a stream of its own, with exact
    shares: within about one and a half items at the end of every 1,024 items. A source whose share of a stream stays
    below half an item may not occur in it. Streams end at different lengths unless they are ``endless``; use that with
    a fixed number of steps for ranks that step together.

    Stopping:

    - ``first_exhausted``: when a source is due that has no more items.
    - ``all_exhausted``: when each source has run out once, or the rest of the schedule gives it weight 0; until then a
      source that has run out begins again.
    - ``drop_exhausted``: when all sources have run out; one that has is dropped, and the others keep their proportions.
    - ``endless``: never; every source begins again.

    The end of a source shows when it is due again. Hugging Face's ``interleave_datasets`` ends right after its last
    item.

    In epoch ``e`` the ``k``-th time a source begins, its ``set_epoch(e + k)`` is called, where it has that method.
    Resuming is exact for sources that yield the same items again in the same epoch, or whose own state holds all that
    decides the next ones. A ``datasets.IterableDataset`` with a shuffle buffer leaves it out of its states, so it is
    read again up to where it was, which costs reading; shuffled without a ``seed``, it cannot resume, and that raises.
    Iterating again without ``set_epoch`` gives the same epoch from its beginning, also after a ``break``. A copy
    (``copy.copy``, ``copy.deepcopy``, ``pickle``) goes on where ``state_dict()`` stands; loader workers begin anew.

    Args:
        sources: ``{name: iterable}``, or a list of iterables.
        weights: ``{name: weight}``, or a list, array or tensor of weights: proportions that need not add up to 1,
            which stand for the decimals that were written. 0 leaves a source out.
        seed: From 0 to 2**64 - 1.
        stopping: ``"first_exhausted"``, ``"all_exhausted"``, ``"drop_exhausted"`` or ``"endless"``.
        semantics: The meaning of a weight. ``"proportion"``: the source's share of the items. ``"ratio"``: multiplies
            ``len(source)``. ``"temperature"``: the share is ``(weight * len(source)) ** (1 / temperature)``.
        temperature: For ``semantics="temperature"``: 1 keeps the proportions of the sizes, more evens them out.
        schedule: ``[(position, weights), ...]``, positions rising: from that item of each stream and epoch on, other
            weights hold. A resumed run may change it behind the end of the window of 1,024 that holds its position.
        num_replicas: Number of data-parallel ranks. By default the world size of ``torch.distributed``, or 1 when that
            is not initialised, looked up when an iteration begins.
        rank: This rank, from 0. Looked up in the same way.
        mesh: The data-parallel ranks as a 1-D ``DeviceMesh``, or anything with ``size()`` and ``get_local_rank()``,
            in place of ``num_replicas`` and ``rank``. Ranks that share data then read the same stream.

    Raises:
        TypeError: If an argument is of another type, or a source cannot be iterated.
        ValueError: If names or lengths do not fit, no weight is above 0, one is negative, NaN or infinite, a source
            that has to begin again is an iterator, or ``mesh`` is given beside ``num_replicas`` or ``rank``.

    >>> sources = {"web": list("abc"), "books": ["D"]}
    >>> dataset = InterleavedDataset(sources, {"web": 0.75, "books": 0.25}, stopping="endless")
    >>> stream = iter(dataset)
    >>> items = [next(stream) for _ in range(1024)]
    >>> items.count("D"), items.count("a")
    (256, 256)
    >>> state = dataset.state_dict()
    >>> following = [next(stream) for _ in range(9)]
    >>> state["position"], state["sources"]["books"]["exhausted"]
    (1024, 255)
    """

    def __init__(
        self,
        sources: Sources[T],
        weights: StreamWeights,
        *,
        seed: int = 0,
        stopping: Stopping = "first_exhausted",
        semantics: str = "proportion",
        temperature: Weight | None = None,
        schedule: StreamSchedule = (),
        num_replicas: int | None = None,
        rank: int | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        self._mixture = parse_streams(sources, weights, seed, stopping, semantics, temperature, schedule)
        self._ranks = Ranks(num_replicas, rank, mesh)
        self._ranks_when_sent: tuple[int, int] | None = None  # for workers that have no process group
        self._chosen = _ChosenEpoch()
        self._begun: set[str] = set()
        self._resume: _Resume | None = None
        self._latest: InterleavedIterator[T] | None = None

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration."""
        return self._chosen.value

    @property
    def fingerprint(self) -> str:
        """Hex digits that stand for the sources, the weights, the stopping rule and the seed.

        Of the data it knows the names, the lengths of lists, and the ``fingerprint`` of sources that have one.
        """
        return self._mixture.fingerprint()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration and pass it on to the sources that have ``set_epoch``.

        A loaded state holds for its own epoch only: another epoch drops it.

        Args:
            epoch: From 0 to 2**63 - 1.
        """
        number = as_int("epoch", epoch, 0, _MAX_EPOCH)
        if number != self.epoch:
            self._resume = self._latest = None
        self._chosen.choose(number)
        for name, source in zip(self._mixture.names, self._mixture.sources, strict=True):
            try:
                set_source_epoch(source, number)
            except Exception as error:
                error.add_note(f"raised by set_epoch({number}) of sources[{name!r}]")
                raise

    def __iter__(self) -> "InterleavedIterator[T]":
        """Begin this process's stream, or resume a loaded state, the first time after loading it."""
        self._latest = self._iterator()
        self._resume = None
        return self._latest

    def state_dict(self) -> StreamState:
        """Return the position of the latest iteration, or where the next one begins when there was none."""
        return (self._latest or self._iterator()).state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration resume from ``state``. Costs nothing until then.

        A state of an older epoch than one chosen by ``set_epoch`` and not yet iterated is ignored, because loaders may
        load a state as late as in ``iter()``.

        Args:
            state: As returned by ``state_dict`` of the dataset or of an iterator.

        Raises:
            TypeError: If it is not a mapping, or a value has another type.
            ValueError: If it was saved with other sources or options, or another seed.
        """
        checked = check_stream_state(state, self._mixture)
        if self._chosen.pending and checked["epoch"] < self.epoch:
            return
        self._latest = None
        self._resume = _Resume(os.getpid(), checked, loaded=True)
        self._chosen.resume(checked["epoch"])

    def _iterator(self) -> "InterleavedIterator[T]":
        iterator = InterleavedIterator(self._mixture, self._chosen, self._stream(), self._begun)
        if (resume := self._resume) is None:
            return iterator
        if get_worker_info() is not None and resume.process != os.getpid():
            if resume.loaded:
                raise RuntimeError(
                    "load_state_dict was called in another process than this loader worker; every worker needs a "
                    "state of its own: use torchdata's StatefulDataLoader, or num_workers=0"
                )
        elif resume.loaded or not nested.depth:  # else the dataset that this one is a source of knows the position
            iterator.load_state_dict(resume.state)
        return iterator

    def _stream(self) -> Stream:
        worker = get_worker_info()
        if worker is None:
            num_replicas, rank = self._ranks.current()
            return Stream(rank, num_replicas)
        sent = self._ranks_when_sent if process_group() is None else None
        num_replicas, rank = sent or self._ranks.current()
        return Stream(rank, num_replicas, worker.id, worker.num_workers)

    def __getstate__(self) -> dict[str, Any]:
        """A copy begins where this one's ``state_dict()`` stands.

        A spawned worker begins anew. It has no process group and no mesh: it receives the ranks.
        """
        try:
            ranks: tuple[int, int] | None = self._ranks.current()
        except ValueError:  # not known yet; the copy will look them up
            ranks = None
        asked = self._ranks if self._ranks.mesh is None or ranks is None else Ranks(*ranks)
        resume = self._resume
        if self._latest is not None:
            resume = _Resume(os.getpid(), self._latest.state_dict(), loaded=False)
        own = {"_latest": None, "_resume": resume, "_ranks": asked, "_ranks_when_sent": ranks}
        return {**self.__dict__, **own}

    def __copy__(self) -> "InterleavedDataset[T]":
        made = object.__new__(type(self))
        made.__dict__.update(self.__getstate__(), _chosen=deepcopy(self._chosen))  # an epoch of its own
        return made


class InterleavedIterator(Iterator[T], Generic[T]):
    """One iteration of an ``InterleavedDataset``, with a state of its own.

    Attributes:
        position: Items yielded.
    """

    def __init__(self, mixture: StreamMixture[T], chosen: _ChosenEpoch, stream: Stream, begun: set[str]) -> None:
        self._mixture = mixture
        self._chosen = chosen
        self._stream = stream
        self._begun = begun
        self._later_stages = {stage.start for stage in mixture.stages[1:]}
        self._failed: Exception | None = None
        self._started = self._over = False
        self._go_to(chosen.value, 0)

    def __next__(self) -> T:
        """Draw from the source that is due.

        Raises:
            RuntimeError: If a source has failed before: a generator that has raised is at its end, and going on would
                silently lose the rest of it.
        """
        if self._failed is not None:
            raise RuntimeError(
                "this iteration has ended with an error of a source; begin a new one, or load a state "
                f"({type(self._failed).__name__}: {self._failed})"
            ) from self._failed
        if not self._started:
            self._chosen.begin()
            self._started = True
        while not self._over:
            reader = self._readers[self._order.source_at(self.position - self._dropped_at)]
            try:
                item = reader.draw()
                if item is END:
                    self._exhausted(reader)
                    continue
            except Exception as error:
                self._failed = error
                error.add_note(
                    f"raised by sources[{reader.name!r}], item {reader.drawn} of its pass {reader.exhausted}, at "
                    f"position {self.position} of epoch {self._epoch} ({self._stream})"
                )
                raise
            self.position += 1
            if self.position in self._later_stages:
                self._over = self._ended()
            return cast(T, item)
        for reader in self._readers:
            reader.release()
        raise StopIteration

    def state_dict(self) -> StreamState:
        """Return the position of this iteration."""
        mixture = self._mixture
        stages = stages_before(mixture.stages, self.position, 0, MAX_POSITION)
        reached = set(mixture.reached(stages))
        return StreamState(
            version=VERSION,
            seed=mixture.seed,
            epoch=self._epoch,
            position=self.position,
            dropped_at=self._dropped_at,
            stream=asdict(self._stream),
            fingerprint=mixture.fingerprint(stages),
            # Copied, because a source may return a state that it keeps changing.
            sources={reader.name: deepcopy(reader.state()) for reader in self._readers if reader.name in reached},
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from ``state``. Costs nothing until the next item is needed.

        Raises:
            TypeError: If it is not a mapping, or a value has another type.
            ValueError: If it was saved with other sources or options, another seed, or by another stream.
        """
        checked = check_stream_state(state, self._mixture)
        if self._chosen.pending and checked["epoch"] < self._chosen.value:
            return
        saved = Stream(**checked["stream"])
        if saved != self._stream:
            raise ValueError(
                f"state was saved by {saved}, this stream is {self._stream}: every stream reads its own part of the "
                "data, so save a state on every rank, load each where it was saved, and keep the numbers of ranks and "
                "workers (torchdata's StatefulDataLoader does it for the workers)"
            )
        self._go_to(checked["epoch"], checked["position"], checked["dropped_at"], checked["sources"])

    def _go_to(
        self, epoch: int, position: int, dropped_at: int = 0, sources: Mapping[str, SourceState] = MappingProxyType({})
    ) -> None:
        self._epoch, self.position = epoch, position
        self._readers = [
            SourceReader(name, source, epoch, sources.get(name, fresh_state()), self._begun)
            for name, source in zip(self._mixture.names, self._mixture.sources, strict=True)
        ]
        self._failed, self._started = None, False
        self._set_order(dropped_at)

    def _set_order(self, dropped_at: int) -> None:
        """Order the sources that have not been dropped, from a position on."""
        mixture, stream, exhausted = self._mixture, self._stream, [reader.exhausted for reader in self._readers]
        self._dropped_at, self._over = dropped_at, self._ended()
        if not self._over:
            stages = mixture.stages
            dropped = sum(map(bool, exhausted)) if mixture.rule.at_end == "drop" else 0
            if dropped:
                left = zip(stages[0].weights, exhausted, strict=True)
                stages = (Stage(0, tuple(0 if ended else weight for weight, ended in left)),)
            self._order = StreamOrder(stages, mixture.seed, self._epoch, stream.rank, stream.worker, dropped)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_readers": [copy(reader) for reader in self._readers]}

    def _ended(self) -> bool:
        return self._mixture.over([reader.exhausted for reader in self._readers], self.position)

    def _exhausted(self, reader: SourceReader[T]) -> None:
        """A source has no more items: the stream ends, or the source begins again or is dropped."""
        at_end = self._mixture.rule.at_end
        if at_end == "again" and not reader.drawn:
            raise self._empty(reader)
        reader.end_pass()
        if at_end == "drop":
            self._set_order(self.position)
        else:
            self._over = self._ended()

    def _empty(self, reader: SourceReader[T]) -> RuntimeError:
        return RuntimeError(
            f"sources[{reader.name!r}] is empty on this stream ({self._stream}), so "
            f"stopping={self._mixture.stopping!r} would restart it forever; give every worker of every rank some of "
            "it (at least one shard each), or give it weight 0"
        )


def check_stream_state(state: Mapping[str, Any], mixture: StreamMixture[Any]) -> StreamState:
    """Return a state that belongs to this mixture, or refuse it."""
    check_state(_OWNER, state, StreamState.__required_keys__, VERSION, mixture.seed, FINGERPRINT)
    position = as_int("state['position']", state["position"], 0, MAX_POSITION // 2)
    check_keys("state['sources']", state["sources"], (), _OWNER)
    stages = stages_before(mixture.stages, position, 0, MAX_POSITION)
    names, own = sorted(state["sources"]), sorted(mixture.reached(stages))
    if names != own:
        raise ValueError(
            f"state was saved with the sources {listed(names)}, this dataset draws from {listed(own)} there; "
            "resume with the sources it was saved with"
        )
    faults = {
        "data": "other data in the sources",
        "options": "other weights or another stopping rule, or an earlier part of the schedule differs",
    }
    fingerprint = mixture.fingerprint(stages)
    check_fingerprint(state["fingerprint"], fingerprint, FINGERPRINT, faults)
    keys = asdict(Stream())
    check_keys("state['stream']", state["stream"], keys, _OWNER)
    return StreamState(
        version=VERSION,
        seed=mixture.seed,
        epoch=as_int("state['epoch']", state["epoch"], 0, _MAX_EPOCH),
        position=position,
        dropped_at=as_int("state['dropped_at']", state["dropped_at"], 0, position),
        stream={key: as_int(f"state['stream'][{key!r}]", state["stream"][key], 0) for key in keys},
        fingerprint=fingerprint,
        sources={name: _check_source_state(name, state["sources"][name]) for name in own},
    )


def _check_source_state(name: str, state: Mapping[str, Any]) -> SourceState:
    what = f"state['sources'][{name!r}]"
    check_keys(what, state, SourceState.__required_keys__, _OWNER)
    drawn, exhausted = (as_int(f"{what}[{key!r}]", state[key], 0, MAX_POSITION) for key in ("drawn", "exhausted"))
    return SourceState(drawn=drawn, exhausted=exhausted, source=state["source"], iterator=state["iterator"])
