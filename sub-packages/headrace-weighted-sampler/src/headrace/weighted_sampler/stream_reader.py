"""One source of a mixture of streams, read item by item."""

import warnings
from collections.abc import Iterable, Iterator
from typing import Any, Final, Generic, Protocol, TypedDict, TypeVar, runtime_checkable

from headrace.weighted_sampler.stream_sources import is_one_shot

T = TypeVar("T")
END: Final = object()  # what a source that has no more gives


@runtime_checkable
class Stateful(Protocol):
    """What can say where it stands and go there again, as torchdata has it."""

    def state_dict(self) -> dict[str, Any]:
        """Say where it stands."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go there."""


class SourceState(TypedDict):
    """Where one source stands.

    Attributes:
        drawn: Items of its present pass that were handed out.
        exhausted: How often it has run out; the number of the pass.
        source: The source's own state, None where it offers none.
        iterator: The same of its iterator.
    """

    drawn: int
    exhausted: int
    source: dict[str, Any] | None
    iterator: dict[str, Any] | None


def fresh_state() -> SourceState:
    """State of a source that nothing has been drawn from."""
    return SourceState(drawn=0, exhausted=0, source=None, iterator=None)


class SourceReader(Generic[T]):
    """Draw items from a source, and begin it again.

    Nothing is begun or restored before the first draw. Pass ``k`` of a source in epoch ``e`` is told
    ``set_epoch(e + k)`` where the source has that method, so that its passes may differ.

    Args:
        name: The source's name, for messages.
        source: The source.
        epoch: The epoch of the stream.
        state: Where to begin.
        begun: Names of the iterators that were begun before; this one's is added.

    >>> reader = SourceReader("a", [7, 8], epoch=0, state=fresh_state(), begun=set())
    >>> [reader.draw(), reader.draw(), reader.draw() is END, reader.drawn]
    [7, 8, True, 2]
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
        """Return the next item, or ``END``.

        Raises:
            RuntimeError: If the source is an iterator that was begun before, or cannot go where its state says.
        """
        if self._iterator is None:
            try:
                self._iterator = self._begin()
            except StopIteration as error:  # would pass for the end of the whole stream
                raise RuntimeError(f"sources[{self.name!r}] raised StopIteration when it was begun") from error
        item = next(self._iterator, END)
        self.drawn += item is not END
        return item

    def end_pass(self) -> None:
        """Note that the source has run out; the next draw begins it again."""
        self.exhausted += 1
        self.drawn = 0
        self._iterator = None
        self._saved = fresh_state()

    def release(self) -> None:
        """Let go of the iterator, and of the files it may hold open; the next draw restores it."""
        self._saved = self.state()
        self._iterator = None

    def state(self) -> SourceState:
        """Say where the source stands."""
        own = self._saved
        source, iterator = own["source"], own["iterator"]
        if self._iterator is not None:
            source, iterator = _state_of(self._source), _state_of(self._iterator)
        return SourceState(drawn=self.drawn, exhausted=self.exhausted, source=source, iterator=iterator)

    def _begin(self) -> Iterator[T]:
        self._refuse_second_time()
        tell_epoch(self._source, self._epoch + self.exhausted)
        source, iterator = self._saved["source"], self._saved["iterator"]
        if source is not None:
            self._stateful(self._source).load_state_dict(source)
        begun = iter(self._source)
        if iterator is not None:
            self._stateful(begun).load_state_dict(iterator)
        if source is None and iterator is None:
            self._skip(begun)
        return begun

    def _stateful(self, part: object) -> Stateful:
        if isinstance(part, Stateful):
            return part
        raise RuntimeError(
            f"the state holds a state for the {type(part).__name__} of sources[{self.name!r}], which has no "
            "load_state_dict; resume with the source it was saved with"
        )

    def _refuse_second_time(self) -> None:
        if not is_one_shot(self._source):
            return
        if self.name in self._begun:
            raise RuntimeError(
                f"sources[{self.name!r}] is an iterator ({type(self._source).__name__}) and was begun before: it "
                "can be read once only; give an object whose __iter__ makes a new iterator"
            )
        self._begun.add(self.name)

    def _skip(self, iterator: Iterator[T]) -> None:
        if not self.drawn:
            return
        warnings.warn(
            f"sources[{self.name!r}] saved no state of its own (state_dict and load_state_dict): to resume, its "
            f"first {self.drawn} items are drawn and dropped",
            stacklevel=2,
        )
        for number in range(self.drawn):
            if next(iterator, END) is END:
                raise RuntimeError(
                    f"sources[{self.name!r}] ended after {number} items, but {self.drawn} had been drawn when the "
                    "state was saved; resume with the data it was saved with"
                )


def tell_epoch(source: object, epoch: int) -> None:
    """Pass the epoch on to a source that has ``set_epoch``."""
    set_epoch = getattr(source, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)


def _state_of(part: object) -> dict[str, Any] | None:
    return part.state_dict() if isinstance(part, Stateful) else None
