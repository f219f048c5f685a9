"""The sources of an interleaved dataset: their weights, and reading one of them item by item."""

import threading
import warnings
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from fractions import Fraction
from typing import (
    Any,
    Final,
    Generic,
    Literal,
    Protocol,
    TypeAlias,
    TypedDict,
    TypeVar,
    cast,
    get_args,
    runtime_checkable,
)

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.weighted_sampler._arguments import MAX_POSITION, SEED_BOUND, as_choice, as_int, shown
from headrace.weighted_sampler._mixture import MAX_SOURCES, Stage
from headrace.weighted_sampler._semantics import Amounts, normalize, pairs_of, parse_temperature
from headrace.weighted_sampler._states import DIGEST_DIGITS, data_identity, digest
from headrace.weighted_sampler.weights import (
    NamedWeights,
    Weight,
    as_fraction,
    check_names,
    flatten,
    nothing_to_draw,
    tensor_as_array,
)

T = TypeVar("T")
StreamSources: TypeAlias = Mapping[str, Iterable[T]] | Sequence[Iterable[T]]
StreamWeights: TypeAlias = NamedWeights | Sequence[Weight] | NDArray[Any] | torch.Tensor
StreamSchedule: TypeAlias = Sequence[tuple[int, StreamWeights]]
Stopping: TypeAlias = Literal["first_exhausted", "all_exhausted", "drop_exhausted", "endless"]

STOPPINGS: tuple[Stopping, ...] = get_args(Stopping)
BEGINS_AGAIN = ("all_exhausted", "endless")  # rules by which a source that has run out begins again
STREAM_SEMANTICS = ("proportion", "ratio", "temperature")
FINGERPRINT = {"data": DIGEST_DIGITS, "options": DIGEST_DIGITS}  # its parts
END: Final = object()  # in place of an item: the source has no more


@dataclass(frozen=True)
class StreamMixture(Generic[T]):
    """The sources that are drawn from."""

    names: tuple[str, ...]
    sources: tuple[Iterable[T], ...]
    stages: tuple[Stage, ...]
    seed: int
    stopping: Stopping

    def reached(self, stages: int) -> list[str]:
        """The names of the sources that the first stages draw from."""
        weights = zip(*(stage.weights for stage in self.stages[:stages]), strict=True)
        return [name for name, own in zip(self.names, weights, strict=True) if any(own)]

    def fingerprint(self, stages: int | None = None) -> str:
        """Stand for the data that the first stages draw from (16 hex digits), and their options and seed (16)."""
        names = self.reached(len(self.stages) if stages is None else stages)
        place_of = {name: place for place, name in enumerate(self.names)}
        places = [place_of[name] for name in names]
        data = [self.sources[place] for place in places]
        lengths = [len(source) if isinstance(source, Sequence) else None for source in data]
        weights = [(stage.start, [stage.weights[place] for place in places]) for stage in self.stages[:stages]]
        return digest(names, list(map(data_identity, data)), lengths) + digest(weights, self.seed, self.stopping)

    @property
    def begins_again(self) -> bool:
        """Whether a source that has run out begins again."""
        return self.stopping in BEGINS_AGAIN

    @property
    def drops(self) -> bool:
        """Whether a source that has run out is dropped, and the others go on."""
        return self.stopping == "drop_exhausted"

    def over(self, exhausted: Iterable[int], position: int) -> bool:
        """Whether the stream ends at a position, after each source has run out so many times."""
        if self.stopping == "endless":
            return False
        if self.stopping == "first_exhausted":
            return any(exhausted)
        present = bisect_right(self.stages, position, key=lambda stage: stage.start) - 1
        to_come = zip(*(stage.weights for stage in self.stages[present:]), strict=True)
        # A source that no stage draws from any more cannot run out.
        return all(times or not any(weights) for times, weights in zip(exhausted, to_come, strict=True))


def parse_streams(
    sources: StreamSources[T],
    weights: StreamWeights,
    seed: int,
    stopping: str,
    semantics: str = "proportion",
    temperature: Weight | None = None,
    schedule: StreamSchedule = (),
) -> StreamMixture[T]:
    """Check the arguments of ``InterleavedDataset``, leave out sources of weight 0, and sort the others by name.

    >>> mixture = parse_streams({"b": [1], "a": [2], "c": [3]}, {"a": 0.25, "b": 0.75, "c": 0}, 0, "endless")
    >>> mixture.names, mixture.stages
    (('a', 'b'), (Stage(start=0, weights=(1, 3)),))
    """
    as_choice("semantics", semantics, STREAM_SEMANTICS)
    rule = cast("Stopping", as_choice("stopping", stopping, STOPPINGS))
    exact_temperature = parse_temperature(semantics, temperature)
    named = _named(sources)
    if len(named) > MAX_SOURCES:
        raise ValueError(f"sources must be at most {MAX_SOURCES}, got {len(named)}; concatenate some of them")
    starts, parsed = [0], [_parse_weights("weights", sources, weights, semantics)]
    for place, (start, later) in enumerate(pairs_of(schedule)):
        starts.append(as_int(f"schedule[{place}] position", start, starts[-1] + 1, MAX_POSITION))
        parsed.append(_parse_weights(f"schedule[{place}] weights", sources, later, semantics))
    if schedule and rule == "drop_exhausted":
        raise ValueError("schedule cannot be followed with stopping='drop_exhausted': give one of the two")
    drawn = {name: source for name, source in named.items() if any(stage[name] for stage in parsed)}
    for name, source in drawn.items():
        _check_source(name, source, rule)
    amounts = Amounts(tuple(1 if semantics == "proportion" else _length(*item) for item in drawn.items()))
    normalized = [
        normalize([stage[name] for name in drawn], amounts, semantics, exact_temperature).weights for stage in parsed
    ]
    stages = tuple(map(Stage, starts, normalized))
    return StreamMixture(tuple(drawn), tuple(drawn.values()), stages, as_int("seed", seed, 0, SEED_BOUND - 1), rule)


def is_one_shot(source: object) -> bool:
    """Whether a source is its own iterator and so cannot begin again."""
    return isinstance(source, Iterator) and iter(source) is source


def set_source_epoch(source: object, epoch: int) -> None:
    """Call ``set_epoch`` of a source that has it."""
    set_epoch = getattr(source, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)


def _named(sources: StreamSources[T]) -> dict[str, Iterable[T]]:
    if not isinstance(sources, Mapping):
        _check_list("sources", sources, "a mapping {name: iterable} or a list of iterables,")
        return {str(place): source for place, source in enumerate(sources)}
    for name in sources:
        if not isinstance(name, str):
            raise TypeError(f"sources must have strings as names, got {shown(name)}")
    return {name: sources[name] for name in sorted(sources)}


def _parse_weights(argument: str, sources: StreamSources[T], weights: object, semantics: str) -> dict[str, Fraction]:
    """The weight of each source, by name."""
    given: Mapping[str, Any]
    if isinstance(sources, Mapping):
        if not isinstance(weights, Mapping):
            raise TypeError(
                f"{argument} must be a mapping {{name: weight}} as sources is one, got {type(weights).__name__}: "
                "the order of a mapping should not decide which source a weight belongs to"
            )
        given, groups = flatten(argument, weights)
        if groups and semantics != "proportion":
            raise ValueError(f"nested {argument} need semantics='proportion', got {semantics!r}")
        check_names(argument, given, sorted(sources), "sources does not hold; it holds")
        exact = {name: as_fraction(f"{argument}[{name!r}]", weight) for name, weight in given.items()}
    else:
        numbers: Any = tensor_as_array(argument, weights)
        _check_list(argument, numbers, "a list, as sources is one,")
        if len(numbers) != len(sources):
            raise ValueError(
                f"{argument} must hold one number per source: got {len(numbers)} for {len(sources)} sources"
            )
        exact = {str(place): as_fraction(f"{argument}[{place}]", weight) for place, weight in enumerate(numbers)}
    if not any(exact.values()):
        raise nothing_to_draw(argument, weights)
    return exact


def _check_list(name: str, given: object, allowed: str) -> None:
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, (Sequence, np.ndarray)):
        raise TypeError(f"{name} must be {allowed} got {type(given).__name__}")


def _check_source(name: str, source: object, stopping: Stopping) -> None:
    if isinstance(source, (str, bytes)) or not isinstance(source, Iterable):
        raise TypeError(f"sources[{name!r}] must have __iter__ and yield samples, got {type(source).__name__}")
    if stopping in BEGINS_AGAIN and is_one_shot(source):
        raise ValueError(
            f"sources[{name!r}] is an iterator ({type(source).__name__}) and cannot begin again, which "
            f"stopping={stopping!r} needs; give an object whose __iter__ makes a new iterator, or use "
            "stopping='first_exhausted'"
        )


def _length(name: str, source: object) -> int:
    if not isinstance(source, Sized):
        raise TypeError(
            f"sources[{name!r}] must have a length unless semantics='proportion', got {type(source).__name__}; "
            "give it a __len__, or give the shares themselves with semantics='proportion'"
        )
    return as_int(f"len(sources[{name!r}])", len(source), 1)


# -- Reading one source --------------------------------------------------------------------------------------------


@runtime_checkable
class Stateful(Protocol):
    """An object that saves and restores its position, as in torchdata."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore it."""


_HUGGING_FACE = "datasets.iterable_dataset"
_SHUFFLE = "shuffle"  # key in the state of a source that is read again


def is_hugging_face(source: object) -> bool:
    """Whether a source is a stream of Hugging Face's datasets."""
    return any((kind.__module__, kind.__name__) == (_HUGGING_FACE, "IterableDataset") for kind in type(source).__mro__)


def buffered_shuffle(source: object) -> str | None:
    """Return what stands for the order of a stream with a shuffle buffer; None for sources without one.

    The states of such a stream do not hold the buffer: loading one loses what was in it, and datasets only logs that.
    """
    if not is_hugging_face(source):
        return None
    buffered, generators, waiting = False, [], list(vars(source).values())
    for part in waiting:  # grows on the way
        if isinstance(part, (list, tuple)):
            waiting += part
        elif isinstance(part, np.random.Generator):
            generators.append(part.bit_generator.state)
        elif type(part).__module__ == _HUGGING_FACE:
            waiting += vars(part).values()
            buffered |= getattr(part, "buffer_size", 0) > 1
    return digest(generators) if buffered else None


class SourceState(TypedDict):
    """The position in one source."""

    drawn: int  # items of its present pass that were yielded
    exhausted: int  # how often it has run out; the number of its present pass
    source: dict[str, Any] | None  # the source's own state, or what stands for its shuffle where it has a buffer
    iterator: dict[str, Any] | None  # the same of its iterator


def fresh_state() -> SourceState:
    """Return the state of a source that nothing has been drawn from."""
    return SourceState(drawn=0, exhausted=0, source=None, iterator=None)


class Nested(threading.local):
    """How many sources are being read in this thread, one inside the other."""

    depth = 0


nested = Nested()


class SourceReader(Generic[T]):
    """Draw items from a source, and begin it again; nothing is begun or restored before the first draw.

    In epoch ``e`` of the stream the source's ``k``-th pass begins with ``set_epoch(e + k)``, where the source has that
    method. ``begun`` holds the names of sources that do not begin anew by themselves, and this one's is added: one-shot
    iterators that were begun before, and streams of Hugging Face that hold a state that was loaded.
    """

    def __init__(self, name: str, source: Iterable[T], epoch: int, state: SourceState, begun: set[str]) -> None:
        self.name = name
        self.drawn = state["drawn"]
        self.exhausted = state["exhausted"]
        self._source = source
        self._epoch = epoch
        self._saved = state
        self._begun = begun
        self._iterator: Iterator[T] | None = None

    def draw(self) -> object:
        """Return the next item, or ``END``; RuntimeError if the source cannot be begun or resumed."""
        nested.depth += 1
        try:
            if self._iterator is None:
                self._iterator = self._begin()
            item = next(self._iterator, END)
        except StopIteration as error:  # would look like the end of the whole stream
            raise RuntimeError(f"sources[{self.name!r}] raised StopIteration when it was begun") from error
        finally:
            nested.depth -= 1
        self.drawn += item is not END
        return item

    def end_pass(self) -> None:
        """Count that the source has run out; the next draw begins it again."""
        self.exhausted += 1
        self.drawn = 0
        self._iterator = None
        self._saved = fresh_state()

    def release(self) -> None:
        """Drop the iterator, and the files it may hold open; the next draw restores it."""
        self._saved = self.state()
        self._iterator = None

    def state(self) -> SourceState:
        """Return the position in the source."""
        source, iterator = self._saved["source"], self._saved["iterator"]
        if self._iterator is not None:
            shuffle = buffered_shuffle(self._source)
            if shuffle is not None:
                source = {_SHUFFLE: shuffle}
            else:
                source = self._source.state_dict() if isinstance(self._source, Stateful) else None
            iterator = self._iterator.state_dict() if isinstance(self._iterator, Stateful) else None
        return SourceState(drawn=self.drawn, exhausted=self.exhausted, source=source, iterator=iterator)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_saved": self.state(), "_iterator": None}  # a copy restores an iterator of its own

    def _begin(self) -> Iterator[T]:
        if is_one_shot(self._source):
            if self.name in self._begun:
                raise RuntimeError(
                    f"sources[{self.name!r}] is an iterator ({type(self._source).__name__}) and was begun before: it "
                    "can be read once only; give an object whose __iter__ makes a new iterator"
                )
            self._begun.add(self.name)
        set_source_epoch(self._source, self._epoch + self.exhausted)
        source, iterator = self._saved["source"], self._saved["iterator"]
        shuffle = buffered_shuffle(self._source)
        if shuffle is not None:
            self._refuse_another_shuffle(source, shuffle)
            source = None  # read again
        if source is not None:
            self._stateful(self._source).load_state_dict(source)
            if is_hugging_face(self._source):
                self._begun.add(self.name)
        elif is_hugging_face(self._source) and self.name in self._begun:
            self._stateful(self._source).load_state_dict({})  # else it begins where the loaded state stands, again
        begun = iter(self._source)
        if iterator is not None:
            self._stateful(begun).load_state_dict(iterator)
        if source is None and iterator is None:
            reason = "no state of its own (state_dict and load_state_dict)"
            self._skip(begun, reason if shuffle is None else "a shuffle buffer, which its own state leaves out")
        return begun

    def _refuse_another_shuffle(self, saved: Mapping[str, Any] | None, shuffle: str) -> None:
        if saved is not None and saved.get(_SHUFFLE, shuffle) != shuffle:  # states of earlier releases do not hold it
            raise RuntimeError(
                f"sources[{self.name!r}] is shuffled in another order than when the state was saved; shuffle it with "
                "the same seed in every run: shuffle(seed=..., buffer_size=...)"
            )

    def _stateful(self, part: object) -> Stateful:
        if isinstance(part, Stateful):
            return part
        raise RuntimeError(
            f"the state holds a state for the {type(part).__name__} of sources[{self.name!r}], which has no "
            "load_state_dict; resume with the source it was saved with"
        )

    def _skip(self, iterator: Iterator[T], reason: str) -> None:
        if not self.drawn:
            return
        warnings.warn(
            f"sources[{self.name!r}] has {reason}: to resume, its first {self.drawn} items are read and dropped",
            stacklevel=2,
        )
        for number in range(self.drawn):
            if next(iterator, END) is END:
                raise RuntimeError(
                    f"sources[{self.name!r}] ended after {number} items, but {self.drawn} had been drawn when the "
                    "state was saved; resume with the data it was saved with"
                )
