"""One iteration over a mixture of streams."""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any, Generic, TypeVar, cast

from headrace.weighted_sampler.stopping import RULES
from headrace.weighted_sampler.stream_order import StreamOrder
from headrace.weighted_sampler.stream_reader import END, SourceReader, fresh_state
from headrace.weighted_sampler.stream_sources import StreamMixture
from headrace.weighted_sampler.stream_state import Stream, StreamState, check_stream, check_stream_state, make_state

T = TypeVar("T")


class InterleavedIterator(Iterator[T], Generic[T]):
    """One iteration of an ``InterleavedDataset``, with a state of its own.

    Attributes:
        position: Items handed out.
    """

    def __init__(self, mixture: StreamMixture[T], epoch: int, stream: Stream, begun: set[str]) -> None:
        self._mixture = mixture
        self._stream = stream
        self._begun = begun
        self._failed: Exception | None = None
        self._go_to(make_state(mixture, epoch, 0, stream, {name: fresh_state() for name in mixture.names}))

    def __next__(self) -> T:
        """Draw from the source whose turn it is.

        Raises:
            RuntimeError: If a source has failed before: a generator that has raised is at its end, and to go on
                would leave out the rest of it without a word.
        """
        if self._failed is not None:
            raise RuntimeError(
                "this iteration has ended with an error of a source; begin a new one, or load a state "
                f"({type(self._failed).__name__}: {self._failed})"
            ) from self._failed
        if self._over:
            raise StopIteration
        reader = self._readers[self._order.source_at(self.position)]
        try:
            item = self._draw(reader)
        except Exception as error:
            self._failed = error
            error.add_note(
                f"raised by sources[{reader.name!r}], item {reader.drawn} of its pass {reader.exhausted}, at position "
                f"{self.position} of epoch {self._epoch} ({self._stream})"
            )
            raise
        if item is END:
            for other in self._readers:
                other.release()
            raise StopIteration
        self.position += 1
        return cast(T, item)

    def state_dict(self) -> StreamState:
        """Say where this iteration stands."""
        # A source may hand out a state that it goes on changing.
        sources = {reader.name: deepcopy(reader.state()) for reader in self._readers}
        return make_state(self._mixture, self._epoch, self.position, self._stream, sources)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was saved. Costs nothing until the next item is asked for.

        Raises:
            ValueError: If it belongs to other sources, weights, another seed, stopping rule or stream.
        """
        checked = check_stream_state(state, self._mixture)
        check_stream(checked, self._stream)
        self._go_to(checked)

    def _go_to(self, state: StreamState) -> None:
        self._epoch = state["epoch"]
        self.position = state["position"]
        stream, mixture = self._stream, self._mixture
        self._order = StreamOrder(mixture.weights, mixture.seed, self._epoch, stream.rank, stream.worker)
        self._readers = [
            SourceReader(name, source, self._epoch, state["sources"][name], self._begun)
            for name, source in zip(mixture.names, mixture.sources, strict=True)
        ]
        self._over = self._ended()
        self._failed = None

    def _ended(self) -> bool:
        return RULES[self._mixture.stopping](reader.exhausted for reader in self._readers)

    def _draw(self, reader: SourceReader[T]) -> object:
        """An item, from the source's next pass if need be; ``END`` where the stream ends."""
        item = reader.draw()
        if item is not END:
            return item
        if not reader.drawn and self._mixture.stopping != "first_exhausted":
            raise _empty(reader, self._stream)
        reader.end_pass()
        self._over = self._ended()
        if self._over:
            return END
        item = reader.draw()
        if item is END:
            raise _empty(reader, self._stream)
        return item


def _empty(reader: SourceReader[Any], stream: Stream) -> RuntimeError:
    return RuntimeError(
        f"sources[{reader.name!r}] yields nothing when begun ({stream}): it can never be exhausted or repeated. Give "
        "every worker of every rank some of it (at least one shard each), or give it weight 0"
    )
