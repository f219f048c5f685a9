"""Reading one source of a stream item by item: start, resume, repeat."""

import re
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Generic, Protocol, TypeAlias, TypedDict, TypeVar, runtime_checkable

import numpy as np

from headrace.weighted_sampler._states import digest

T = TypeVar("T")
Sources: TypeAlias = Mapping[str, Iterable[T]] | Sequence[Iterable[T]]

END: Final = object()  # in place of an item: the source is exhausted


def is_one_shot(source: object) -> bool:
    """Whether a source is its own iterator and so cannot restart."""
    return isinstance(source, Iterator) and iter(source) is source


def set_source_epoch(source: object, epoch: int) -> None:
    """Call ``set_epoch`` of a source that has it."""
    set_epoch = getattr(source, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)


@runtime_checkable
class Stateful(Protocol):
    """An object that saves and restores its position, as in torchdata."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore it."""


_HUGGING_FACE = "datasets.iterable_dataset"
_HELD = ("ex_iterable", "ex_iterables", "kwargs")  # by a step of a stream
_SHUFFLE = "shuffle"  # key in the state of a source that is reread


def is_hugging_face(source: object) -> bool:
    """Whether a source is a Hugging Face ``IterableDataset``."""
    return any((kind.__module__, kind.__name__) == (_HUGGING_FACE, "IterableDataset") for kind in type(source).__mro__)


def buffered_shuffle(source: object) -> str | None:
    """Return a digest of the order of a stream with a shuffle buffer; None for sources without one.

    The states of such a stream omit the buffer: loading one loses the buffered items, and datasets only logs that.
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


def hugging_face_identity(source: object) -> list[object] | None:
    """What tells one stream from another without reading it: columns, steps, names of files, rows; else None.

    Its own state does not say which stream it is of, and over another one it gives wrong items or none.
    """
    if not is_hugging_face(source):
        return None
    found: list[object] = [getattr(source, "column_names", None)]
    waiting: list[Any] = [getattr(source, "_ex_iterable", None)]
    for part in waiting:  # grows on the way
        if isinstance(part, (list, tuple)):
            waiting += part
        elif isinstance(part, Mapping):
            waiting += part.values()
        elif isinstance(part, str):
            found.append(_file_name(part))
        elif hasattr(part, "num_rows"):
            found.append(part.num_rows)
        elif type(part).__module__ == _HUGGING_FACE:
            found.append(type(part).__name__)
            waiting += [value for name, value in vars(part).items() if name in _HELD]
    return found


def _file_name(place: str) -> str:
    """The name of a file, which may lie elsewhere in another run; of a set on the hub all but the revision."""
    if place.startswith("hf://"):
        return re.sub("@[^/]*", "", place)
    return re.split(r"[/\\]", place.partition("?")[0])[-1]


class SourceState(TypedDict):
    """The position in one source."""

    drawn: int  # items yielded in the current pass
    exhausted: int  # how often the source was exhausted; the number of the current pass
    source: dict[str, Any] | None  # the source's own state, or a digest of its shuffle if it has a buffer
    iterator: dict[str, Any] | None  # the own state of its iterator


def fresh_state() -> SourceState:
    """Return the state of a source that nothing has been drawn from."""
    return SourceState(drawn=0, exhausted=0, source=None, iterator=None)


class Nested(threading.local):
    """How many sources are being read in this thread, one inside the other."""

    depth = 0


nested = Nested()


class SourceIterator(Generic[T]):
    """Draws items from a source and repeats it. It does not open or restore the source before the first draw.

    In epoch ``e`` of the stream the source's ``k``-th pass begins with ``set_epoch(e + k)``, if the source has that
    method. ``begun`` collects the names of sources that do not restart by themselves: one-shot iterators that were
    begun before, and Hugging Face streams with a loaded state.
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
        """Return the next item, or ``END``; RuntimeError if the source cannot start or resume."""
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
        """Count an exhausted pass; the next draw begins the next pass."""
        self.exhausted += 1
        self.drawn = 0
        self._iterator = None
        self._saved = fresh_state()

    def release(self) -> None:
        """Drop the iterator, and files that it may keep open; the next draw restores it."""
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
                    "can be read only once; give an object whose __iter__ returns a new iterator"
                )
            self._begun.add(self.name)
        set_source_epoch(self._source, self._epoch + self.exhausted)
        source, iterator = self._saved["source"], self._saved["iterator"]
        shuffle = buffered_shuffle(self._source)
        if shuffle is not None:
            self._refuse_another_shuffle(source, shuffle)
            source = None  # reread instead
        if source is not None:
            self._stateful(self._source).load_state_dict(source)
            if is_hugging_face(self._source):
                self._begun.add(self.name)
        elif is_hugging_face(self._source) and self.name in self._begun:
            self._stateful(self._source).load_state_dict({})  # else it would resume from the loaded state again
        begun = iter(self._source)
        if iterator is not None:
            self._stateful(begun).load_state_dict(iterator)
        if source is None and iterator is None:
            reason = "no state of its own (state_dict and load_state_dict)"
            self._skip(begun, reason if shuffle is None else "a shuffle buffer, which its own state omits")
        return begun

    def _refuse_another_shuffle(self, saved: Mapping[str, Any] | None, shuffle: str) -> None:
        if saved is not None and saved.get(_SHUFFLE) != shuffle:
            raise RuntimeError(
                f"sources[{self.name!r}] is shuffled in another order than when the state was saved; shuffle it with "
                "the same seed in every run: shuffle(seed=..., buffer_size=...)"
            )

    def _stateful(self, part: object) -> Stateful:
        if isinstance(part, Stateful):
            return part
        raise RuntimeError(
            f"the state has an entry for the {type(part).__name__} of sources[{self.name!r}], which has no "
            "load_state_dict; resume with the source of the saved run"
        )

    def _skip(self, iterator: Iterator[T], reason: str) -> None:
        if not self.drawn:
            return
        warnings.warn(
            f"sources[{self.name!r}] has {reason}: to resume, its first {self.drawn} items are reread and discarded",
            stacklevel=2,
        )
        for number in range(self.drawn):
            if next(iterator, END) is END:
                raise RuntimeError(
                    f"sources[{self.name!r}] ended after {number} items, but {self.drawn} had been drawn when the "
                    "state was saved; resume with the data of the saved run"
                )
