"""Several streams mixed by weight into one, with exact shares, and resumable where the streams are."""

import os
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch.utils.data import IterableDataset, get_worker_info

from headrace.weighted_sampler.checks import WORD, integer
from headrace.weighted_sampler.stopping import Stopping
from headrace.weighted_sampler.stream_iterator import InterleavedIterator
from headrace.weighted_sampler.stream_reader import tell_epoch
from headrace.weighted_sampler.stream_sources import Sources, StreamWeights, build_mixture
from headrace.weighted_sampler.stream_state import Stream, StreamState, check_stream_state
from headrace.weighted_sampler.world import process_group

T = TypeVar("T")


class InterleavedDataset(IterableDataset[T]):
    """Mix iterable datasets by weight; which source comes at a position is known without any state.

    Every source is read in its own order, nothing is read ahead, and nothing is touched before the first item
    is asked for. Sources share out their data among ranks and workers themselves (``split_by_node`` and
    ``split_by_worker`` of WebDataset; a plain list is read whole by every worker). Every (rank, worker) is a
    stream of its own, with exact shares: within about one and a half items at the end of every 1,024 items. A
    source whose share of a stream stays below half an item need not occur in it. Streams end at different
    lengths unless they are ``endless``, which is what ranks that step together want, with a fixed number of steps.

    Stopping:

    - ``first_exhausted``: at the first turn of a source that has no more.
    - ``all_exhausted``: at the turn where the last source that had not yet run out has no more; until then a
      source that has run out begins again.
    - ``endless``: never; every source begins again.

    Nothing being read ahead, a source's end shows at its next turn, whereas Hugging Face's
    ``interleave_datasets`` looks ahead and ends right after a source's last item, and Megatron Energon's blend
    drops the source and goes on with the others.

    Pass ``k`` of a source in epoch ``e`` is told ``set_epoch(e + k)`` where it has that method. Resuming is
    exact for sources that give the same items again in the same pass, or whose own state says where they stand.

    Args:
        sources: ``{name: iterable}``, or a list of iterables.
        weights: ``{name: weight}``, or a list of weights: proportions that need not add up to 1, counted as the
            decimals you wrote. 0 leaves a source out.
        seed: From 0 to 2**64 - 1.
        stopping: ``"first_exhausted"``, ``"all_exhausted"`` or ``"endless"``.

    Raises:
        TypeError: If an argument is of another type, or a source cannot be iterated.
        ValueError: If names or lengths do not fit, no weight is above 0, one is negative, NaN or infinite, or
            a source that has to begin again is an iterator.

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
        self, sources: Sources[T], weights: StreamWeights, *, seed: int = 0, stopping: Stopping = "first_exhausted"
    ) -> None:
        self._mixture = build_mixture(sources, weights, seed, stopping)
        # In shared memory, so that workers which live for several epochs learn of a new one.
        self._epoch = torch.zeros(1, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self._begun: set[str] = set()
        self._resume: tuple[int, StreamState] | None = None
        self._latest: InterleavedIterator[T] | None = None
        self._rank_when_sent = (1, 0)

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration."""
        return int(self._epoch[0])

    @property
    def fingerprint(self) -> str:
        """Names the sources, the weights and the stopping rule, not the data."""
        return self._mixture.fingerprint

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration and pass it on to the sources that have ``set_epoch``.

        Another epoch than that of a loaded state lets go of the state.

        Args:
            epoch: From 0 to 2**63 - 1.
        """
        number = integer("epoch", epoch, 0, WORD // 2 - 1)
        if number != self.epoch:
            self._resume = self._latest = None
        self._epoch[0] = number
        for name, source in zip(self._mixture.names, self._mixture.sources, strict=True):
            try:
                tell_epoch(source, number)
            except Exception as error:
                error.add_note(f"raised by set_epoch({number}) of sources[{name!r}]")
                raise

    def __iter__(self) -> "InterleavedIterator[T]":
        """Begin this process's stream, or go on from a loaded state, the first time after loading it."""
        self._latest = self._iterator()
        self._resume = None
        return self._latest

    def state_dict(self) -> StreamState:
        """Say where the latest iteration stands, or where the next one begins when there was none."""
        return (self._latest or self._iterator()).state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on where ``state`` was saved. Costs nothing until then.

        Args:
            state: As ``state_dict`` made it, of the dataset or of an iterator.

        Raises:
            ValueError: If it belongs to other sources, weights, another seed or stopping rule.
        """
        checked = check_stream_state(state, self._mixture)
        self._resume = (os.getpid(), checked)
        self._latest = None
        self._epoch[0] = checked["epoch"]

    def _iterator(self) -> "InterleavedIterator[T]":
        iterator = InterleavedIterator(self._mixture, self.epoch, self._stream(), self._begun)
        if self._resume is not None:
            process, state = self._resume
            if process != os.getpid():
                raise RuntimeError(
                    "load_state_dict was called in another process than this loader worker; every worker needs a "
                    "state of its own: use torchdata's StatefulDataLoader, or num_workers=0"
                )
            iterator.load_state_dict(state)
        return iterator

    def _stream(self) -> Stream:
        worker = get_worker_info()
        if worker is None:
            world_size, rank = process_group() or (1, 0)
            return Stream(rank, world_size)
        world_size, rank = process_group() or self._rank_when_sent
        return Stream(rank, world_size, worker.id, worker.num_workers)

    def __getstate__(self) -> dict[str, Any]:
        """A worker that is not forked has no process group: it is told the rank on the way."""
        return {**self.__dict__, "_latest": None, "_rank_when_sent": process_group() or self._rank_when_sent}
