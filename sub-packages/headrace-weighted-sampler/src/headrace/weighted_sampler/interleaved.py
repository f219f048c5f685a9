"""Several iterable datasets interleaved by weight into one stream, which resumes exactly."""

from __future__ import annotations  # help() shows the names of types, not the unions behind them

import os
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from copy import copy, deepcopy
from dataclasses import asdict, dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Any, Generic, Literal, TypedDict, TypeVar, cast

from torch.utils.data import IterableDataset, get_worker_info

from headrace.weighted_sampler._arguments import MAX_POSITION, listed, shown
from headrace.weighted_sampler._mixture import StreamOrder
from headrace.weighted_sampler._mixture_arguments import FINGERPRINT, StreamMixture, parse_streams
from headrace.weighted_sampler._shared.checks import checked_int
from headrace.weighted_sampler._shared.display import counted, never_raises
from headrace.weighted_sampler._shared.ranks import (
    Mesh,
    Ranks,
    process_group,
    refuse_sharding_again,
    warning_of_whole_stream,
)
from headrace.weighted_sampler._shared_cursor import SharedEpochCursor
from headrace.weighted_sampler._sources import (
    END,
    SourceIterator,
    Sources,
    SourceState,
    fresh_state,
    nested,
    set_source_epoch,
)
from headrace.weighted_sampler._states import STATE_VERSION, check_fingerprint, check_keys, check_state
from headrace.weighted_sampler._token_stream import TokenStreamOrder
from headrace.weighted_sampler.schedule import Stage, StreamSchedule, stages_before
from headrace.weighted_sampler.weights import StreamWeights, Weight

T = TypeVar("T")
_MAX_EPOCH = 2**63 - 1
_OWNER = "InterleavedDataset"  # of states, in messages
_FRACTION = re.compile(r"-?\d{1,400}(/[1-9]\d{0,400})?")


@dataclass(frozen=True)
class Reader:
    """A process that reads its own stream: a worker of a rank."""

    rank: int = 0
    num_replicas: int = 1
    worker: int = 0  # of the rank's loader; 0 in the main process
    num_workers: int = 1  # 1 in the main process

    def __str__(self) -> str:
        """Name the reader in a message."""
        return f"rank {self.rank} of {self.num_replicas}, worker {self.worker} of {self.num_workers}"


class StreamState(TypedDict):
    """The state that ``InterleavedDataset.state_dict`` returns.

    Attributes:
        version: Version of this layout.
        seed: Seed of the dataset.
        epoch: The epoch of ``position``.
        position: Number of items that this stream has yielded in that epoch.
        dropped_at: The position where the latest source was dropped; 0 if none was.
        behind: With ``per="token"``, ``{name: tokens}`` by which each source is behind its share, as fractions such as
            ``"7/3"``; else empty.
        stream: The rank and worker of the stream, as a dict of four integers.
        fingerprint: Fingerprint of the sources, the options and the seed.
        sources: The position in each source, by name.
    """

    version: int
    seed: int
    epoch: int
    position: int
    dropped_at: int
    behind: dict[str, str]
    stream: dict[str, int]
    fingerprint: str
    sources: dict[str, SourceState]


@dataclass(frozen=True)
class _Resume:
    """Where the next iteration begins."""

    process: int  # the process that loaded the state, or created the copy
    state: StreamState
    loaded: bool  # False for a copy: then the state is the original's position


class InterleavedDataset(IterableDataset[T]):
    """Interleave iterable datasets by weight; the source at any position is a pure function of seed and weights.

    Every source is read in its own order, without prefetching, and opened when its first item is needed. Sources shard
    their data among ranks and workers themselves (with ``split_by_node`` and ``split_by_worker`` in WebDataset); a
    plain list is not sharded: every worker reads all of it. Every (rank, worker) has its own stream with exact shares:
    within about one and a half items after any number of items. A source whose share of a stream stays below half an
    item may not occur in it. Streams have different lengths unless they are ``endless``; for synchronised ranks, use
    ``endless`` with a fixed number of steps.

    The stream ends:

    - ``first_exhausted``: when the next source has no more items.
    - ``all_exhausted``: when each source has been exhausted once, or the rest of the schedule gives it weight 0; until
      then exhausted sources repeat.
    - ``drop_exhausted``: when all sources are exhausted; an exhausted source is dropped, and the others keep their
      proportions.
    - ``endless``: never; every source repeats.

    The end of a source is detected at its next draw. Hugging Face's ``interleave_datasets`` ends right after the last
    item.

    In epoch ``e``, pass ``k`` of a source (counted from 0) begins with its ``set_epoch(e + k)``, if it has that method.
    A resume is exact for sources that yield the same items again in the same epoch, or whose own state fully determines
    the next items. The state of a ``datasets.IterableDataset`` with a shuffle buffer omits the buffer, so such a source
    is reread up to its position. If it was shuffled without a ``seed``, a resume raises an error. A new iteration
    without ``set_epoch`` repeats the epoch from its beginning, also after a ``break``. A copy (``copy.copy``,
    ``copy.deepcopy``, ``pickle``) continues from ``state_dict()``; loader workers start over.

    Args:
        sources: ``{name: iterable}``, or a list of iterables.
        weights: ``{name: weight}``, or a list, array or tensor of weights: proportions that need not add up to 1. A
            float counts as its shortest decimal form. Weight 0 leaves a source out.
        seed: From 0 to 2**64 - 1.
        stopping: ``"first_exhausted"``, ``"all_exhausted"``, ``"drop_exhausted"`` or ``"endless"``.
        semantics: The meaning of a weight. ``"proportion"``: the source's share of the items. ``"ratio"``: multiplies
            ``len(source)``. ``"temperature"``: the share is proportional to ``(weight * len(source)) **
            (1 / temperature)``.
        temperature: For ``semantics="temperature"``: 1 keeps the shares by size, larger values flatten them.
        schedule: ``[(position, weights), ...]`` with increasing positions: these weights apply from that item of each
            stream and epoch. A resumed run may change it after its position.
        per: ``"sample"``, or ``"token"``: then the weights are shares of the tokens. The next item comes from the
            source that is furthest behind, so each source of a stream is always within about one longest item of its
            share. Needs ``semantics="proportion"``.
        sizeof: For ``per="token"``, a function that returns the number of tokens of an item, an int >= 0.
        num_replicas: Number of data-parallel ranks. By default the world size of ``torch.distributed``, or 1 if that
            is not initialised, read at the start of an iteration.
        rank: This rank, from 0. Read in the same way.
        mesh: The data-parallel ranks as a 1-D ``DeviceMesh``, or an object with ``size()`` and ``get_local_rank()``,
            in place of ``num_replicas`` and ``rank``. Ranks that share data then read the same stream.

    Raises:
        TypeError: If an argument has the wrong type, or a source cannot be iterated.
        ValueError: If names or lengths do not match, no weight is above 0, a weight is negative, NaN or infinite, a
            source that must repeat is an iterator, or ``mesh`` is combined with ``num_replicas`` or ``rank``.

    >>> sources = {"web": list("abc"), "books": ["D"]}
    >>> dataset = InterleavedDataset(sources, {"web": 0.75, "books": 0.25}, stopping="endless")
    >>> stream = iter(dataset)
    >>> items = [next(stream) for _ in range(1000)]
    >>> items.count("D"), items.count("a")
    (250, 250)
    >>> state = dataset.state_dict()
    >>> following = [next(stream) for _ in range(9)]
    >>> state["position"], state["sources"]["books"]["exhausted"]
    (1000, 249)
    """

    def __init__(
        self,
        sources: Sources[T],
        weights: StreamWeights,
        *,
        seed: int = 0,
        stopping: Literal["first_exhausted", "all_exhausted", "drop_exhausted", "endless"] = "first_exhausted",
        semantics: Literal["proportion", "ratio", "temperature"] = "proportion",
        temperature: Weight | None = None,
        schedule: StreamSchedule = (),
        per: Literal["sample", "token"] = "sample",
        sizeof: Callable[[T], int] | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        self._mixture = parse_streams(sources, weights, seed, stopping, semantics, temperature, schedule, per, sizeof)
        self._ranks = Ranks(num_replicas, rank, mesh)
        self._ranks_when_sent: tuple[int, int] | None = None  # for workers that have no process group
        self._cursor = SharedEpochCursor()
        self._begun: set[str] = set()
        self._resume: _Resume | None = None
        self._latest: InterleavedIterator[T] | None = None  # of those that have begun

    @never_raises
    def __repr__(self) -> str:
        mixture = self._mixture
        try:
            num_replicas, rank = self._ranks.current()
            ranks = f"rank {rank} of {num_replicas}"
        except ValueError:
            ranks = "ranks not known yet"
        position = self._resume.state["position"] if self._resume is not None else 0
        if self._latest is not None:
            position = self._latest.position
        return (
            f"{type(self).__name__}({counted(len(mixture.names), 'source')}, "
            f"{mixture.stopping!r}, {ranks}, epoch {self.epoch} at {position:,}, seed {mixture.seed})"
        )

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration."""
        return self._cursor.epoch

    @property
    def fingerprint(self) -> str:
        """Hex digest of the sources, the weights, the stopping rule and the seed.

        Of the data, it covers the names, the lengths of lists, the ``fingerprint`` of sources that have one, and of
        other Hugging Face streams the columns, the steps, and the names of the files or the numbers of rows.
        """
        return self._mixture.fingerprint()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration and call ``set_epoch`` of the sources that have it.

        A loaded state applies only to its own epoch: choosing another epoch discards it.

        Args:
            epoch: From 0 to 2**63 - 1.
        """
        number = checked_int("epoch", epoch, 0, _MAX_EPOCH)
        if self._cursor.choose(number):
            self._resume = self._latest = None
        for name, source in zip(self._mixture.names, self._mixture.sources, strict=True):
            try:
                set_source_epoch(source, number)
            except Exception as error:
                error.add_note(f"raised by set_epoch({number}) of sources[{name!r}]")
                raise

    def __iter__(self) -> InterleavedIterator[T]:
        """Return this process's stream; it begins, and resumes from a loaded state, with its first item."""
        for source in self._mixture.sources:
            if message := warning_of_whole_stream(source, self._ranks):
                warnings.warn(message, stacklevel=2)
        return InterleavedIterator(self, self._reader())

    def state_dict(self) -> StreamState:
        """Return the position of the latest iteration, or the start of the next one if there was none."""
        return (self._latest or iter(self)).state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume the next iteration from ``state``; the call itself reads no data.

        An iterator that has not yielded an item resumes there, too. One that has yielded an item is not affected. If
        ``set_epoch`` has chosen an epoch that was not iterated yet, a state of an older epoch is ignored, because
        loaders may load a state as late as in ``iter()``.

        Args:
            state: The result of ``state_dict`` of the dataset or of an iterator.

        Raises:
            TypeError: If ``state`` is not a mapping, or a value has the wrong type.
            ValueError: If ``state`` was saved with other sources or options, or another seed.
        """
        checked = check_stream_state(state, self._mixture)
        if self._cursor.resume(checked["epoch"], checked["position"]):
            self._latest, self._resume = None, _Resume(os.getpid(), checked, loaded=True)

    def _start(self) -> StreamState | None:
        """Where the next iteration begins; None for the beginning of the epoch."""
        if (resume := self._resume) is None:
            return None
        if get_worker_info() is not None and resume.process != os.getpid():
            if resume.loaded:
                raise RuntimeError(
                    "load_state_dict was called in another process than this loader worker; every worker needs its "
                    "own state: use torchdata's StatefulDataLoader, or num_workers=0"
                )
            return None
        # A copy that is a source of another dataset begins where that one puts it.
        return resume.state if resume.loaded or not nested.depth else None

    def _begin(self, iterator: InterleavedIterator[T]) -> None:
        """Make an iteration the latest one."""
        self._latest, self._resume = iterator, None

    def _reader(self) -> Reader:
        worker = get_worker_info()
        if worker is None:
            num_replicas, rank = self._ranks.current()
            return Reader(rank, num_replicas)
        sent = self._ranks_when_sent if process_group() is None else None
        num_replicas, rank = sent or self._ranks.current()
        return Reader(rank, num_replicas, worker.id, worker.num_workers)

    def __getstate__(self) -> dict[str, Any]:
        """A copy continues from this object's ``state_dict()``.

        A spawned worker starts over. It has no process group and no mesh, so it receives the ranks.
        """
        try:
            ranks: tuple[int, int] | None = self._ranks.current()
        except ValueError:  # not known yet; the copy will read them itself
            ranks = None
        asked = self._ranks if self._ranks.mesh is None or ranks is None else Ranks(*ranks)
        resume = self._resume
        if self._latest is not None:
            resume = _Resume(os.getpid(), self._latest.state_dict(), loaded=False)
        changed = {"_latest": None, "_resume": resume, "_ranks": asked, "_ranks_when_sent": ranks}
        return {**self.__dict__, **changed}

    def __copy__(self) -> InterleavedDataset[T]:
        made = object.__new__(type(self))
        made.__dict__.update(self.__getstate__(), _cursor=deepcopy(self._cursor))  # an epoch of its own
        return made


class InterleavedIterator(Iterator[T], Generic[T]):
    """One iteration of an ``InterleavedDataset``, with its own state."""

    def __init__(self, dataset: InterleavedDataset[T], reader: Reader) -> None:
        self._dataset: InterleavedDataset[T] | None = dataset  # None in a copy
        self._mixture = dataset._mixture
        self._cursor = dataset._cursor
        self._begun = dataset._begun
        self._reader = reader
        self._later_stages = {stage.start for stage in self._mixture.stages[1:]}
        self._order: StreamOrder | TokenStreamOrder
        self._failed: Exception | None = None
        self._started = self._over = False
        self._iteration: object = None  # what stands for it
        self._waits = True  # until the first item: it begins where the dataset is put until then
        self._settle()

    @never_raises
    def __repr__(self) -> str:
        sources = len(self._sources)
        return (
            f"{type(self).__name__}({counted(sources, 'source')}, {self._reader}, epoch {self._epoch} at "
            f"{self.position:,})"
        )

    @property
    def position(self) -> int:
        """Items yielded."""
        self._settle()
        return self._position

    def __next__(self) -> T:
        """Draw from the source of the next position.

        Raises:
            RuntimeError: If a source has failed before: a generator that has raised is finished, and continuing would
                silently lose the rest of it.
        """
        if self._failed is not None:
            raise RuntimeError(
                "this iteration has ended with an error of a source; begin a new iteration, or load a state "
                f"({type(self._failed).__name__}: {self._failed})"
            ) from self._failed
        if not self._started:
            self._settle()
            self._waits = False
            if self._dataset is not None:
                self._dataset._begin(self)
            if self._reader.num_replicas > 1:
                refuse_sharding_again("num_replicas=1 and rank=0")
            self._iteration = self._cursor.begin()
            self._started = True
        while not self._over:
            place = self._position - self._dropped_at
            number = self._order.source_at(place)
            source = self._sources[number]
            try:
                item = source.draw()
                if item is END:
                    self._exhausted(source)
                    continue
                if isinstance(self._order, TokenStreamOrder):
                    self._order.add(place, number, self._mixture.size_of(cast(T, item)))
            except Exception as error:
                self._failed = error
                error.add_note(
                    f"raised by sources[{source.name!r}], item {source.drawn} of its pass {source.exhausted}, at "
                    f"position {self._position} of epoch {self._epoch} ({self._reader})"
                )
                raise
            if self._cursor.iteration is not self._iteration:  # another place was chosen: one warning
                self._cursor.move(self._iteration, self._position, self._dataset)
            self._position += 1
            if self._position in self._later_stages:
                self._over = self._ended()
            return cast(T, item)
        for source in self._sources:
            source.release()
        raise StopIteration

    def state_dict(self) -> StreamState:
        """Return the position of this iteration."""
        self._settle()
        mixture = self._mixture
        stages = stages_before(mixture.stages, self._position)
        reached = set(mixture.reached(stages))
        return StreamState(
            version=STATE_VERSION,
            seed=mixture.seed,
            epoch=self._epoch,
            position=self._position,
            dropped_at=self._dropped_at,
            behind=self._behind(reached),
            stream=asdict(self._reader),
            fingerprint=mixture.fingerprint(stages),
            # Copied, because a source may return a state that it keeps changing.
            sources={source.name: deepcopy(source.state()) for source in self._sources if source.name in reached},
        )

    def _behind(self, reached: Collection[str]) -> dict[str, str]:
        if not isinstance(self._order, TokenStreamOrder):
            return {}
        named = zip(self._mixture.names, self._order.behind, strict=True)
        return {name: str(own) for name, own in named if name in reached}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from ``state``; the call itself reads no data.

        Raises:
            TypeError: If ``state`` is not a mapping, or a value has the wrong type.
            ValueError: If ``state`` was saved with other sources or options, another seed, or by another stream.
        """
        checked = check_stream_state(state, self._mixture)
        if self._cursor.overrules(checked["epoch"]):
            return
        self._resume(checked)
        self._waits = False
        if self._dataset is not None:
            self._dataset._begin(self)

    def _settle(self) -> None:
        """Go to where the dataset was put, before the first item."""
        if not self._waits:
            return
        if self._dataset is None or (state := self._dataset._start()) is None:
            self._go_to(self._cursor.epoch, 0)
        else:
            self._resume(state)

    def _resume(self, checked: StreamState) -> None:
        saved = Reader(**checked["stream"])
        if saved != self._reader:
            raise ValueError(
                f"state was saved by {saved}, this stream is {self._reader}: every stream reads its own part of the "
                "data, so save a state on every rank, load each where it was saved, and keep the numbers of ranks and "
                "workers (torchdata's StatefulDataLoader does this for the workers)"
            )
        self._go_to(checked["epoch"], checked["position"], checked["dropped_at"], checked["sources"], checked["behind"])

    def _go_to(
        self,
        epoch: int,
        position: int,
        dropped_at: int = 0,
        sources: Mapping[str, SourceState] = MappingProxyType({}),
        behind: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._epoch, self._position = epoch, position
        self._sources = [
            SourceIterator(name, source, epoch, sources.get(name, fresh_state()), self._begun)
            for name, source in zip(self._mixture.names, self._mixture.sources, strict=True)
        ]
        self._failed, self._started = None, False
        self._set_order(dropped_at, behind)

    def _set_order(self, dropped_at: int, behind: Mapping[str, str] = MappingProxyType({})) -> None:
        """Order the sources that have not been dropped, from a position on."""
        mixture, reader, exhausted = self._mixture, self._reader, [source.exhausted for source in self._sources]
        self._dropped_at, self._over = dropped_at, self._ended()
        stages = mixture.stages
        dropped = sum(map(bool, exhausted)) if mixture.rule.at_end == "drop" and not self._over else 0
        if dropped:
            left = zip(stages[0].weights, exhausted, strict=True)
            stages = (Stage(0, tuple(0 if ended else weight for weight, ended in left)),)
        stream = self._epoch, reader.rank, reader.worker
        if mixture.sizeof is None:
            self._order = StreamOrder(stages, mixture.seed, *stream, dropped)
        else:
            known = [Fraction(behind.get(name, 0)) for name in mixture.names]
            self._order = TokenStreamOrder(stages, mixture.seed, stream, known)

    def __getstate__(self) -> dict[str, Any]:
        """A copy continues from here, and the dataset knows nothing of it."""
        self._settle()
        sources = [copy(source) for source in self._sources]
        return {**self.__dict__, "_sources": sources, "_dataset": None, "_waits": False}

    def _ended(self) -> bool:
        return self._mixture.over([source.exhausted for source in self._sources], self._position)

    def _exhausted(self, source: SourceIterator[T]) -> None:
        """Handle an exhausted source: it repeats, is dropped, or ends the stream."""
        at_end = self._mixture.rule.at_end
        if at_end == "again" and not source.drawn:
            raise self._empty(source)
        source.end_pass()
        if at_end == "drop":
            self._set_order(self._position)
        else:
            self._over = self._ended()

    def _empty(self, source: SourceIterator[T]) -> RuntimeError:
        return RuntimeError(
            f"sources[{source.name!r}] is empty on this stream ({self._reader}), so "
            f"stopping={self._mixture.stopping!r} would restart it forever; give every worker of every rank a part of "
            "it (at least one shard), or set its weight to 0"
        )


def check_stream_state(state: Mapping[str, Any], mixture: StreamMixture[Any]) -> StreamState:
    """Return a state that belongs to this mixture, or refuse it."""
    check_state(_OWNER, state, StreamState.__required_keys__, mixture.seed, FINGERPRINT)
    position = checked_int("state['position']", state["position"], 0, MAX_POSITION // 2)
    check_keys("state['sources']", state["sources"], (), _OWNER)
    stages = stages_before(mixture.stages, position)
    names, own = sorted(state["sources"]), sorted(mixture.reached(stages))
    if names != own:
        raise ValueError(
            f"state was saved with the sources {listed(names)}, this dataset draws from {listed(own)} there; "
            "resume with the sources of the saved run"
        )
    faults = {
        "data": "other data in the sources",
        "options": "other weights or another stopping rule, or an earlier part of the schedule differs",
    }
    fingerprint = mixture.fingerprint(stages)
    check_fingerprint(state["fingerprint"], fingerprint, FINGERPRINT, faults)
    keys = asdict(Reader())
    check_keys("state['stream']", state["stream"], keys, _OWNER)
    return StreamState(
        version=STATE_VERSION,
        seed=mixture.seed,
        epoch=checked_int("state['epoch']", state["epoch"], 0, _MAX_EPOCH),
        position=position,
        dropped_at=checked_int("state['dropped_at']", state["dropped_at"], 0, position),
        behind=_check_behind(state["behind"], own if mixture.sizeof else ()),
        stream={key: checked_int(f"state['stream'][{key!r}]", state["stream"][key], 0) for key in keys},
        fingerprint=fingerprint,
        sources={name: _check_source_state(name, state["sources"][name]) for name in own},
    )


def _check_behind(behind: Mapping[str, Any], names: Collection[str]) -> dict[str, str]:
    check_keys("state['behind']", behind, names, _OWNER)
    for name, own in behind.items():
        if not isinstance(own, str) or not _FRACTION.fullmatch(own):
            raise ValueError(f"state['behind'][{name!r}] must be a fraction such as '7/3', got {shown(own)}")
    return dict(behind)


def _check_source_state(name: str, state: Mapping[str, Any]) -> SourceState:
    what = f"state['sources'][{name!r}]"
    check_keys(what, state, SourceState.__required_keys__, _OWNER)
    drawn, exhausted = (checked_int(f"{what}[{key!r}]", state[key], 0, MAX_POSITION) for key in ("drawn", "exhausted"))
    return SourceState(drawn=drawn, exhausted=exhausted, source=state["source"], iterator=state["iterator"])
