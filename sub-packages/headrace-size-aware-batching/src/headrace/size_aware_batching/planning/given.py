"""An order that the user's sampler gives, read in windows where it allows that."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from numbers import Integral
from operator import index
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import RandomSampler, SequentialSampler

from headrace.size_aware_batching.planning.orders import Given

PIECE = 2**20


class GivenOrder:
    """Wraps a sampler.

    Args:
        sampler: Iterable of indices. With ``take(start, stop)`` it is asked for windows; how many positions an
            epoch has then says ``epoch_length`` or ``total_size``, else ``len``.
        kept: Samples that are planned, rising; None for all.
        n_samples: Number of samples of the dataset.

    Raises:
        TypeError: If it is not iterable, or only once.
        ValueError: If it deals samples to ranks by itself and cannot be asked for those of all ranks.
    """

    def __init__(self, sampler: Iterable[int], kept: NDArray[np.int64] | None, n_samples: int) -> None:
        if isinstance(sampler, np.ndarray | torch.Tensor):
            sampler = sampler.tolist()  # whose own take is another one
        if not hasattr(sampler, "take") and not hasattr(sampler, "__iter__"):
            raise TypeError(f"sampler: got {type(sampler).__name__}, expected an iterable of indices")
        if isinstance(sampler, Iterator):
            raise TypeError(
                f"sampler: got {type(sampler).__name__}, which gives its indices once only; every epoch reads the "
                "order anew, so give an iterable, such as a list or a torch sampler"
            )
        replicas = getattr(sampler, "num_replicas", 1)
        if not hasattr(sampler, "take") and replicas > 1:
            raise ValueError(
                f"sampler: {type(sampler).__name__} deals samples to {replicas} ranks by "
                "itself; give an order of all samples, the batches are dealt to the ranks here"
            )
        self.sampler: Any = sampler
        self.kept = kept
        self.n_samples = n_samples
        self._positions: NDArray[Any] | None = None

    @property
    def fingerprint(self) -> int:
        """A number that stands for the order, as far as the sampler can be told from others.

        Its own ``fingerprint``, the values of a list or an array, or else its class and length.
        """
        own = getattr(self.sampler, "fingerprint", None)
        if isinstance(own, Integral):
            return int(own)
        digest = hashlib.blake2b(f"{type(self.sampler).__name__} {self._length()}".encode(), digest_size=8)
        if isinstance(self.sampler, Sequence | np.ndarray):
            digest.update(np.asarray(self.sampler).astype("<i8").tobytes())
        return int.from_bytes(digest.digest(), "little")

    def refuse_different(self, n_replicas: int) -> None:
        """Refuse an order that every rank would draw for itself, or that is meant for other ranks or another begin.

        Raises:
            ValueError: If there are several ranks and a `RandomSampler` has no generator, if the sampler was given
                another number of ranks, or if it waits to go on from a position.
        """
        if n_replicas > 1 and isinstance(self.sampler, RandomSampler) and self.sampler.generator is None:
            raise ValueError(
                "sampler: a RandomSampler without a generator draws another order on every rank; give it "
                "generator=torch.Generator().manual_seed(...), or leave out sampler: shuffle=True does the same here"
            )

        own = getattr(self.sampler, "num_replicas", 1)
        if own not in (1, n_replicas):
            raise ValueError(
                f"sampler: {type(self.sampler).__name__} was made for {own} ranks, but the batches are dealt to "
                f"{n_replicas}; give num_replicas and rank to the batch sampler, which deals, and not to its sampler"
            )
        begin = getattr(self.sampler, "position", 0)
        if isinstance(begin, Integral) and begin:
            raise ValueError(
                f"sampler: {type(self.sampler).__name__} is to go on from position {begin}, but the batches are those "
                "of the whole epoch; resume with the batch sampler's own load_state_dict, and leave its sampler alone"
            )

    def refuse_forgotten(self) -> None:
        """Refuse to resume inside an order that cannot be had again.

        Raises:
            ValueError: If the sampler draws another order each time and knows no epochs.
        """
        fixed = isinstance(self.sampler, Sequence | np.ndarray | SequentialSampler)
        if not fixed and not hasattr(self.sampler, "take") and not hasattr(self.sampler, "set_epoch"):
            raise ValueError(
                f"sampler: {type(self.sampler).__name__} has neither set_epoch(epoch) nor take(start, stop), so that "
                "the order of the interrupted epoch cannot be had again; leave out sampler, or give one that has either"
            )

    def order(self) -> Given:
        """Return the order of the present epoch."""
        if self.kept is None and hasattr(self.sampler, "take"):
            return Given(self._length(), self._take)
        if self._positions is None:
            self._positions = self._read()
        positions = self._positions
        return Given(len(positions), lambda start, stop: positions[start:stop])

    def finished(self) -> None:
        """Forget the order: the next epoch asks for it anew."""
        self._positions = None

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to a sampler that knows epochs."""
        self._positions = None
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def _length(self) -> int:
        for name in ("epoch_length", "total_size"):
            if hasattr(self.sampler, name):
                return int(getattr(self.sampler, name))
        return len(self.sampler)

    def _take(self, start: int, stop: int) -> NDArray[Any]:
        taken = self._checked(np.asarray(self.sampler.take(start, stop)))
        if taken.shape != (stop - start,):
            raise ValueError(
                f"sampler: take({start}, {stop}) gave shape {taken.shape}, expected ({stop - start},): the epoch has "
                f"{self._length()} positions by its epoch_length, total_size or len"
            )
        return taken

    def _read(self) -> NDArray[Any]:
        if hasattr(self.sampler, "take"):
            length = self._length()
            parts = [self._take(start, min(start + PIECE, length)) for start in range(0, length, PIECE)]
            taken = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        else:
            taken = self._checked(np.fromiter(map(index, self.sampler), np.int64))
        if self.kept is None:
            return taken
        known = np.zeros(self.n_samples, bool)
        known[self.kept] = True
        return taken[known[taken]]

    def _checked(self, taken: NDArray[Any]) -> NDArray[Any]:
        if len(taken) and not (taken.min() >= 0 and taken.max() < self.n_samples):
            bad = taken[(taken < 0) | (taken >= self.n_samples)][0]
            raise IndexError(f"sampler: gave index {bad}, but there are sizes for 0 to {self.n_samples - 1}")
        return taken
