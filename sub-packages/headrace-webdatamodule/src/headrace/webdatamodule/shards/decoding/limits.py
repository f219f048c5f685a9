"""How many bytes decoding a member may take: checked before they are allocated."""

from __future__ import annotations

import gzip
import io
import zipfile
from typing import BinaryIO

import numpy as np

from headrace.webdatamodule.shards.errors import DecodeError

MAX_BYTES = 1 << 31
# Deflate packs at most 258 bytes into two bits.
_MOST_PER_BYTE = 1032
# What Python makes of an entry of 46 bytes in a zip file's directory takes some 1,500 bytes.
_PER_DIRECTORY_BYTE, _SMALL_DIRECTORY = 40, 1 << 20


class MemoryBudget:
    """How many bytes decoding one member may still take."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes, self.used = max_bytes, 0

    @property
    def left(self) -> int:
        """Bytes that are free."""
        return self.max_bytes - self.used

    def reserve(self, nbytes: int, what: str = "the member unpacks to") -> None:
        """Count bytes that are about to be allocated."""
        if nbytes > self.left:
            beside = f" (beside {self.used} that are in use)" if self.used else ""
            message = f"{what} {shown(nbytes)} bytes or more{beside}, which is more than max_bytes={self.max_bytes}"
            raise DecodeError(f"{message}; raise max_bytes if the member is right")
        self.used += nbytes


def shown(number: int) -> str:
    """A number in digits, or about how large it is."""
    return str(number) if number.bit_length() < 100 else f"2**{number.bit_length() - 1}"


def open_zip(data: bytes, budget: MemoryBudget) -> zipfile.ZipFile:
    """Open a zip file, unless it unpacks to too much, or its packing says nothing about how much that is."""
    file = _Guarded(data, max(_SMALL_DIRECTORY, budget.left // _PER_DIRECTORY_BYTE))
    archive = zipfile.ZipFile(file)
    file.most = -1
    entries = archive.infolist()
    budget.reserve(sum(entry.file_size for entry in entries))
    for entry in entries:
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            name = entry.filename[:200]
            raise DecodeError(f"{name!r} is packed by method {entry.compress_type}; store or deflate it")
    return archive


class _Guarded(io.BytesIO):
    """Bytes of which a zip file's directory reads only some."""

    def __init__(self, data: bytes, most: int) -> None:
        super().__init__(data)
        self.most = most

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and 0 <= self.most < size:
            message = f"the directory of the zip file has {size} bytes, more than the {self.most} that max_bytes allows"
            raise DecodeError(f"{message}; raise max_bytes if that is meant to be")
        return super().read(size)


def gunzip(data: bytes, budget: MemoryBudget) -> bytes:
    """Decompress, but not without end."""
    # The reader allocates what it is asked for, however little comes.
    most = min(budget.left, len(data) * _MOST_PER_BYTE)
    stream: BinaryIO = io.BytesIO(data)
    with gzip.GzipFile(fileobj=stream) as file:
        plain = file.read(most + 1)
    budget.reserve(len(plain))
    return plain


def text_bytes(data: bytes) -> int:
    """Bytes that are allocated to make text of UTF-8, at the most: each character takes what the widest one does."""
    if data.isascii():
        return len(data)
    characters, top = 0, 0
    for begin in range(0, len(data), 1 << 20):
        part = np.frombuffer(data, np.uint8, min(1 << 20, len(data) - begin), begin)
        characters += int(np.count_nonzero((part & 0xC0) != 0x80))
        top = max(top, int(part.max()))
    return len(data) + characters * (4 if top >= 0xF0 else 2 if top >= 0xC4 else 1)
