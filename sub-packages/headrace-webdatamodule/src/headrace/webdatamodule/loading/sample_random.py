"""The random numbers of a sample: a function of the seed, the epoch and the sample, wherever it is read."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset, get_worker_info

from headrace.webdatamodule._shared.random import fold_in, key_of
from headrace.webdatamodule.loading.worker import seed_generators
from headrace.webdatamodule.shards import IndexedShards

_EPOCH = int.from_bytes(b"samples", "little")  # keeps the key apart from those of orders and steps
_WHOLE = (list, tuple, range, np.ndarray, torch.Tensor, TensorDataset)


def epoch_key(seed: int, epoch: int) -> int:
    """The key of the samples of an epoch, 64 bits."""
    return int(fold_in(seed, epoch, _EPOCH)[0])


class SampleRandom:
    """The random numbers of a batch's samples, as they are read one after another.

    Inside it, each sample seeds the global generators, which the training process has back at the end, and
    `sample_rng()` is the sample's.

    Args:
        key: That of the epoch.
        indices: The batch's samples.
        draws: For each its position in the epoch's order, or how often it came before; None where none comes twice.
    """

    def __init__(self, key: int, indices: Sequence[int], draws: Sequence[int] | None) -> None:
        self._key, self._indices, self._draws = key, indices, draws
        self._states: tuple[Any, ...] | None = None
        self._sample: tuple[int, int] | None = None  # index and draw
        self._generator: np.random.Generator | None = None

    def __enter__(self) -> None:
        self._states = generator_states() if get_worker_info() is None else None
        self._token: Token[SampleRandom | None] = _reading.set(self)

    def __exit__(self, *_: object) -> None:
        _reading.reset(self._token)
        if self._states is not None:
            put_back(self._states)

    def begin(self, place: int) -> None:
        """The sample at this place of the batch is read next."""
        self._sample = int(self._indices[place]), 0 if self._draws is None else int(self._draws[place])
        self._generator = None
        seed_generators(key_of(self._key, self._sample))

    def generator(self) -> np.random.Generator | None:
        """That of the sample which is read; None before the first one."""
        if self._generator is None and self._sample is not None:
            index, draw = (word % 2**64 for word in self._sample)
            key, counter = np.array([self._key, index], np.uint64), np.array([0, 0, 0, draw], np.uint64)
            self._generator = np.random.Generator(np.random.Philox(key=key, counter=counter))
        return self._generator


_reading: ContextVar[SampleRandom | None] = ContextVar("headrace_sample", default=None)


def sample_rng() -> np.random.Generator:
    """Return the random generator of the sample being read; call it in a `__getitem__`, a transform or a decoder.

    The loader must have `seed_per="sample"`. The numbers depend only on the loader's seed, the epoch and the sample:
    they are the same with any number of ranks and workers, and after a resume. If a sample repeats in an epoch, it gets
    different numbers each time. Within a sample, every call returns the same generator: a `numpy.random.Philox` keyed
    with (seed, epoch, index).

    Raises:
        RuntimeError: No loader with `seed_per="sample"` is reading a sample.

    >>> from headrace.webdatamodule import ResumableLoader
    >>> class Noisy:
    ...     def __len__(self):
    ...         return 3
    ...     def __getitem__(self, index):
    ...         return f"{index} {sample_rng().normal():.2f}"
    >>> for batches in [[0, 1], [2]], [[2, 1, 0]]:
    ...     print(list(ResumableLoader(Noisy(), batches, collate_fn=list, seed_per="sample")))
    [['0 -0.68', '1 -0.02'], ['2 0.32']]
    [['2 0.32', '1 -0.02', '0 -0.68']]
    """
    reading = _reading.get()
    generator = None if reading is None else reading.generator()
    if generator is None:
        raise RuntimeError(
            "sample_rng() is the generator of the sample that a loader with seed_per='sample' reads, and none is being "
            "read: give seed_per='sample' to the loader or data module, and call it in the dataset's __getitem__, a "
            "transform or a decoder"
        )
    return generator


def batch_key(key: int, indices: Sequence[int], draws: Sequence[int] | None) -> int:
    """The key of a batch's collation, by the epoch's and its samples."""
    return key_of(key ^ 1, map(int, [*indices, *(() if draws is None else draws)]))


@contextmanager
def seeded(key: int) -> Iterator[None]:
    """Seed the global generators for a while; in the training process they are put back afterwards."""
    states = generator_states() if get_worker_info() is None else None
    try:
        seed_generators(key)
        yield
    finally:
        if states is not None:
            put_back(states)


def generator_states() -> tuple[Any, ...]:
    """The states of the global generators of `random`, numpy and torch's CPU."""
    return random.getstate(), np.random.get_state(), torch.default_generator.get_state()  # noqa: NPY002 - the one that transforms draw from


def put_back(states: tuple[Any, ...]) -> None:
    """Give the global generators these states."""
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002 - as above
    torch.default_generator.set_state(states[2])


def is_plain(dataset: Any) -> bool:
    """Whether reading a dataset is known to run no code of the user's, so that nothing random is drawn."""
    if type(dataset) is IndexedShards:
        return not dataset.runs_own_code
    if type(dataset) is Subset:
        return is_plain(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(map(is_plain, dataset.datasets))
    if type(dataset).__module__.partition(".")[0] == "datasets" and hasattr(dataset, "with_format"):
        return (getattr(dataset, "format", None) or {}).get("type") != "custom"  # of Hugging Face, without a transform
    return type(dataset) in _WHOLE
