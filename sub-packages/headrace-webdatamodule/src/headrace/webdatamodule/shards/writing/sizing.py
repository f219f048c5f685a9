"""Bytes of samples in a tar file, and their keys, before these are written."""

from __future__ import annotations

from typing import Any, Never

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from headrace.webdatamodule.shards.errors import ShardError
from headrace.webdatamodule.shards.format.tar import BLOCK
from headrace.webdatamodule.shards.writing.storable import member_bytes
from headrace.webdatamodule.shards.writing.task import MapStyle


def stored_bytes(nbytes: int) -> int:
    """Bytes that a member takes in a tar file, its header and padding included.

    >>> stored_bytes(0), stored_bytes(1), stored_bytes(512)
    (512, 1024, 1024)
    """
    return nbytes + -nbytes % BLOCK + BLOCK


def measure(samples: MapStyle) -> tuple[npt.NDArray[np.int64], list[str]]:
    """Ask for each sample once, with a progress bar.

    Args:
        samples: All of them.

    Returns:
        Bytes of each in a tar file, shape [n_samples], and the keys.

    Raises:
        ShardError: A sample cannot be had, or its members are no bytes.
    """
    keys: list[str] = []
    sizes = np.empty(len(samples), np.int64)
    bar: tqdm[Never]
    with tqdm(total=len(samples), desc="measuring", unit="sample", disable=None) as bar:
        for number in range(len(samples)):
            try:
                key, sample = samples[number]
                sizes[number] = sum(stored_bytes(_length(key, one, data)) for one, data in sample.items())
            except Exception as error:
                message = f"sample number {number} cannot be measured: {type(error).__name__}: {error}"
                raise ShardError(message, sample=f"number {number}") from error
            keys.append(key)
            bar.update()
    return sizes, keys


def _length(key: str, suffix: str, data: object) -> int:
    # The length of a memory view, or of an array, counts numbers of several bytes each.
    return len(data if type(data) is bytes else member_bytes(data, sample=key, member=f"{key}.{suffix}"))


def given_sizes(sizes: Any, n_samples: int) -> npt.NDArray[np.int64]:
    """Check the sizes that a caller gives.

    Args:
        sizes: Bytes of each sample.
        n_samples: How many there have to be.

    Raises:
        ValueError: They are no whole numbers of 0 or more, shape [n_samples].
    """
    array = np.asarray(sizes)
    if array.shape != (n_samples,) or array.dtype.kind not in "iu" or (array < 0).any():
        allowed = f"whole numbers of bytes, 0 or more, shape [{n_samples}]"
        raise ValueError(f"sizes must be {allowed}, got {array.dtype} of shape {list(array.shape)}")
    return array.astype(np.int64)
