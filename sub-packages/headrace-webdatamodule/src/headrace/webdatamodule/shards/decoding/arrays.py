"""Bytes to arrays: numpy's own files, and safetensors. Nothing that is pickled is loaded."""

from __future__ import annotations

import io
import zipfile
from math import prod
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from headrace.webdatamodule.shards.decoding.capped import MAX_BYTES, Room, open_zip, room_of, shown
from headrace.webdatamodule.shards.decoding.numpy_pickle import check_empty
from headrace.webdatamodule.shards.errors import DecodeError

Arrays = dict[str, npt.NDArray[Any]]
# What an array takes beside its numbers, while safetensors or a zip file is read.
_TENSOR, _ENTRY = 2048, 512
_HEADER = 1 << 16  # numpy itself reads less, but asks for all of it first
_KIND = 100  # characters of a dtype that are shown


def load_npy(data: bytes, max_bytes: int | Room = MAX_BYTES) -> npt.NDArray[Any]:
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
    _check_header(io.BytesIO(data), len(data), room_of(max_bytes))
    array: npt.NDArray[Any] = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    return array


def load_npz(data: bytes, max_bytes: int | Room = MAX_BYTES) -> Arrays:
    """Read several arrays.

    Args:
        data: A `.npz` file, compressed or not.
        max_bytes: Most bytes that all of it may unpack to.

    Returns:
        The arrays by their names.

    Raises:
        DecodeError: They are larger, or two have one name.
        ValueError: The bytes are no such file.
    """
    room = room_of(max_bytes)
    made: Arrays = {}
    with open_zip(data, room) as archive:
        room.take(_ENTRY * len(archive.infolist()), "the arrays' names take")
        for entry in archive.infolist():
            name = entry.filename.removesuffix(".npy")
            if name in made:
                raise DecodeError(f"two arrays have the name {name[:200]!r}")
            made[name] = _entry(archive, entry, room)
    return made


def _entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, room: Room) -> Any:
    with archive.open(entry) as stream:
        if stream.read(6) != np.lib.format.MAGIC_PREFIX:
            room.take(entry.file_size, "an entry that is no array takes")
            stream.seek(0)
            return stream.read()  # as numpy does
        stream.seek(0)
        _check_header(stream, entry.file_size)
        stream.seek(0)
        return np.lib.format.read_array(stream, allow_pickle=False)


def load_safetensors(data: bytes, max_bytes: int | Room = MAX_BYTES) -> Arrays:
    """Read a file of safetensors.

    Args:
        data: The file; it is not compressed, and the arrays have no more bytes than it.
        max_bytes: Most bytes that all that is made of it may take.

    Returns:
        The arrays by their names.

    Raises:
        DecodeError: There are too many; safetensors is not installed, or numpy has no such numbers as the file holds.
    """
    try:
        from safetensors import SafetensorError
        from safetensors.numpy import load
    except ImportError as error:
        cure = "pip install 'headrace-webdatamodule[safetensors]'"
        raise DecodeError(f"this member needs the library safetensors: {cure}, or decode it yourself") from error
    header = data[8 : 8 + int.from_bytes(data[:8], "little")]
    what = "the tensors and their names take"
    room_of(max_bytes).take(2 * len(data) + 8 * len(header) + _TENSOR * header.count(b"{"), what)
    try:
        made = load(data)
    except KeyError as error:
        cure = "give a decoder of your own for it, such as safetensors.torch.load"
        raise DecodeError(f"numpy has no numbers of type {error.args[0]}, which this member holds: {cure}") from error
    except SafetensorError as error:
        raise DecodeError(f"these bytes are no safetensors: {error}") from error
    for name in made:
        made[name] = made[name].copy()  # theirs cannot be written to
    return made


def _check_header(stream: Any, nbytes: int, room: Room | None = None) -> None:
    dtype, shape = _header(stream)
    if min(shape, default=0) < 0 or max(shape, default=0) >= 1 << 62:
        raise DecodeError(f"the header says shape [{', '.join(map(shown, shape))}]: no array has such a dimension")
    count = prod(shape)
    check_empty(dtype, count)
    if dtype.hasobject:
        return  # numpy says what is wrong
    if room is not None:
        room.take(count * dtype.itemsize, "the array has")
    if count * dtype.itemsize > nbytes:
        kind, shape_said = str(dtype)[:_KIND], ", ".join(map(shown, shape))
        said = f"{shown(count)} items of {kind}, shape [{shape_said}]"
        raise DecodeError(f"the header says {said}: more than the {nbytes} bytes hold")


def _header(stream: BinaryIO) -> tuple[np.dtype[Any], tuple[int, ...]]:
    version = np.lib.format.read_magic(stream)
    # The third version is the second one in UTF-8, which changes the names of fields only.
    old = version == (1, 0)
    length = stream.read(2 if old else 4)
    stream.seek(-len(length), io.SEEK_CUR)
    if int.from_bytes(length, "little") > _HEADER:
        raise DecodeError(f"the header of the array has more than {_HEADER} bytes")
    read = np.lib.format.read_array_header_1_0 if old else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(stream)
    return dtype, shape
