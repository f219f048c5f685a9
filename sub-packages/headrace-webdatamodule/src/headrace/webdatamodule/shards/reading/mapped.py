"""The bytes of a tar file, mapped, and checked to be those that were indexed."""

from __future__ import annotations

import mmap
import os

from headrace.webdatamodule.shards.errors import StaleIndexError
from headrace.webdatamodule.shards.format.files import open_plain
from headrace.webdatamodule.shards.index.shard_index import ShardIndex
from headrace.webdatamodule.shards.reading.belonging import check_belongs


class Mapped:
    """A memory map of a shard; it stays what it is when the file is replaced under its name.

    Args:
        index: Of the shard; it names the file.
        verified: Whether the checksum of each member is compared when it is read: then damage of a few samples is
            left to those reads, and the others stay readable.

    Attributes:
        data: The bytes; a slice of them is a copy.

    Raises:
        OSError: The file cannot be opened.
        DamagedShardError: It is a directory, a FIFO or a device.
        StaleIndexError: It is another one than was indexed.
    """

    def __init__(self, index: ShardIndex, *, verified: bool = False) -> None:
        self.path, self.nbytes = index.shard, index.shard_bytes
        self.data: bytes | mmap.mmap = b""
        with os.fdopen(open_plain(self.path), "rb", buffering=0) as file:
            if file.seek(0, 2):  # an empty file cannot be mapped
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        check_belongs(index, self.data, verified=verified)

    def check_size(self) -> None:
        """See whether the file was cut since: to read behind its end would kill the process.

        This comes before each read of a few samples. A cut in the microseconds between is not seen; it needs someone
        who writes into the file itself, as replacing it under its name leaves the map as it was.

        Raises:
            StaleIndexError: It was.
        """
        if isinstance(self.data, mmap.mmap) and self.data.size() != self.nbytes:
            message = f"the shard had {self.nbytes} bytes when it was opened, and has {self.data.size()} now"
            raise StaleIndexError(f"{message}: restore it, and make the dataset again", shard=self.path)
