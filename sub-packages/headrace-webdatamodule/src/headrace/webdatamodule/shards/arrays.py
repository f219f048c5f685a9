"""Bytes to arrays: numpy's own files, and safetensors. Nothing that is pickled is loaded."""

from __future__ import annotations

import io
import zipfile
from math import prod
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from headrace.webdatamodule.shards.capped import MAX_BYTES, check_cap, check_zip
from headrace.webdatamodule.shards.errors import DecodeError
from headrace.webdatamodule.shards.pickle_numpy import check_empty

Arrays = dict[str, npt.NDArray[Any]]


def load_npy(data: bytes, max_bytes: int = MAX_BYTES) -> npt.NDArray[Any]:
    """Read an array.

    Args:
        data: A `.npy` file.
        max_bytes: Most bytes that the array may have.

    Returns:
        The array, of the shape that the file says.

    Raises:
        DecodeError: The array is larger, or than the file has bytes.
        ValueError: The bytes are no such file.
    """
    _check_header(io.BytesIO(data), len(data), max_bytes)
    array: npt.NDArray[Any] = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    return array


def load_npz(data: bytes, max_bytes: int = MAX_BYTES) -> Arrays:
    """Read several arrays.

    Args:
        data: A `.npz` file, compressed or not.
        max_bytes: Most bytes that all of it may unpack to.

    Returns:
        The arrays by their names.

    Raises:
        DecodeError: They are larger.
        ValueError: The bytes are no such file.
    """
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        check_zip(archive, max_bytes)
        for entry in archive.infolist():
            with archive.open(entry) as stream:
                if stream.read(6) == np.lib.format.MAGIC_PREFIX:
                    stream.seek(0)
                    _check_header(stream, entry.file_size, max_bytes)
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        return dict(arrays)


def load_safetensors(data: bytes) -> Arrays:
    """Read a file of safetensors.

    Args:
        data: The file; it is not compressed, and the arrays have no more bytes than it.

    Returns:
        The arrays by their names.

    Raises:
        DecodeError: safetensors is not installed, or numpy has no such numbers as the file holds.
    """
    try:
        from safetensors import SafetensorError
        from safetensors.numpy import load
    except ImportError as error:
        cure = "pip install 'headrace-webdatamodule[safetensors]'"
        raise DecodeError(f"this member needs the library safetensors: {cure}, or decode it yourself") from error
    try:
        made = load(data)
    except KeyError as error:
        cure = "give a decoder of your own for it, such as safetensors.torch.load"
        raise DecodeError(f"numpy has no numbers of type {error.args[0]}, which this member holds: {cure}") from error
    except SafetensorError as error:
        raise DecodeError(f"these bytes are no safetensors: {error}") from error
    return {name: array.copy() for name, array in made.items()}  # theirs cannot be written to


def _check_header(stream: Any, nbytes: int, cap: int) -> None:
    dtype, shape = _header(stream)
    count = prod(shape)
    check_empty(dtype, count)
    if dtype.hasobject or min(shape, default=0) < 0:
        return  # numpy says what is wrong
    check_cap(count * dtype.itemsize, cap, "the array has")
    if count * dtype.itemsize > nbytes:
        message = f"the header says {count} items of {dtype}, shape {list(shape)}: more than the {nbytes} bytes hold"
        raise DecodeError(message)


def _header(stream: BinaryIO) -> tuple[np.dtype[Any], tuple[int, ...]]:
    version = np.lib.format.read_magic(stream)
    # The third version is the second one in UTF-8, which changes the names of fields only.
    old = version == (1, 0)
    read = np.lib.format.read_array_header_1_0 if old else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(stream)
    return dtype, shape
