"""Random numbers of workers: a function of seed, epoch, step and rank, whatever a worker has done before."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
import xxhash
from torch.utils.data import Dataset, get_worker_info

from headrace.webdatamodule.indexed.delivering import Batches, Read

Asked: TypeAlias = tuple[Sequence[int], int, int]  # the samples of a step, the epoch's key, and the step's number


class Steps(Dataset[Any]):
    """Reads the batch of a step. A worker begins each step with random numbers that belong to it.

    So what a transform draws from `random`, numpy's or torch's global generator is the same whichever worker has the
    step, and after a resume. Without workers the process's own generators are left alone.

    Args:
        batches: Reads a batch.
    """

    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def __getitems__(self, asked: Asked) -> Read:
        indices, key, step = asked
        if get_worker_info() is not None:
            seed_everything(step_key(key, step))
        return self.batches.__getitems__(indices)


def step_key(key: int, step: int) -> int:
    """The key of a step.

    Args:
        key: Of the epoch and the rank, 64 bits.
        step: Number of the step, 0 to 2**62.

    Returns:
        64 bits.

    >>> len({step_key(key, step) for key in range(10) for step in range(10)})
    100
    """
    return xxhash.xxh3_64_intdigest(step.to_bytes(8, "little"), seed=key)


def seed_everything(key: int) -> None:
    """Seed the global generators of `random`, numpy and torch's CPU.

    Args:
        key: 64 bits.
    """
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)  # noqa: NPY002 - the one that transforms draw from
    torch.default_generator.manual_seed(key >> 1)
