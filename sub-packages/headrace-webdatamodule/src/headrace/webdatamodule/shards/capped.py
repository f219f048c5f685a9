"""How many bytes a member may become: checked before they are allocated."""

from __future__ import annotations

import gzip
import io
import zipfile

from headrace.webdatamodule.shards.errors import DecodeError

MAX_BYTES = 1 << 31
# Deflate packs at most 258 bytes into two bits.
_MOST_PER_BYTE = 1032


def check_cap(nbytes: int, cap: int, what: str = "the member unpacks to") -> None:
    """Refuse what is too large.

    Args:
        nbytes: Bytes that are about to be allocated.
        cap: The most that is allowed.
        what: Begin of the error's sentence.

    Raises:
        DecodeError: When it is more; it names both numbers.

    >>> check_cap(10, 10)
    """
    if nbytes > cap:
        cure = "raise max_bytes if that is meant to be"
        raise DecodeError(f"{what} {nbytes} bytes or more, which is more than max_bytes={cap}; {cure}")


def check_zip(archive: zipfile.ZipFile, cap: int) -> None:
    """Refuse a zip file that unpacks to too much, or whose packing says nothing about how much that is.

    Args:
        archive: The zip file, opened.
        cap: The most bytes that all of it may unpack to.

    Raises:
        DecodeError: It is larger, or packed by another method than deflate: the unpacker of those does not stop at
            the size that the file promises.
    """
    entries = archive.infolist()
    check_cap(sum(entry.file_size for entry in entries), cap)
    for entry in entries:
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise DecodeError(f"{entry.filename!r} is packed by method {entry.compress_type}; store or deflate it")


def gunzip(data: bytes, max_bytes: int = MAX_BYTES) -> bytes:
    """Decompress, but not without end.

    Args:
        data: Bytes in gzip format.
        max_bytes: Most bytes that may come out.

    Returns:
        The decompressed bytes.

    Raises:
        DecodeError: When more than `max_bytes` would come out.

    >>> gunzip(gzip.compress(b"abc"))
    b'abc'
    """
    # The reader allocates what it is asked for, however little comes.
    most = min(max_bytes, len(data) * _MOST_PER_BYTE)
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
        plain = file.read(most + 1)
    check_cap(len(plain), most)
    return plain
