"""Files of this machine."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

from headrace.webdatamodule.shards.errors import DamagedShardError
from headrace.webdatamodule.shards.format.files import open_plain, read_or_map
from headrace.webdatamodule.shards.stores.store import Store


class LocalStore(Store):
    """Files below a folder of this machine; whole files are mapped."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.url = os.fspath(folder)

    def read(self, name: str, limit: int) -> bytes:
        """See `Store`."""
        with os.fdopen(open_plain(self._path(name), DamagedShardError), "rb") as file:
            return file.read(limit + 1)

    def size(self, name: str) -> int:
        """See `Store`."""
        return self._path(name).stat().st_size

    def ranges(self, wanted: Sequence[tuple[str, int, int]]) -> list[bytes]:
        """See `Store`."""
        made = list[bytes]()
        for name, start, stop in wanted:
            with os.fdopen(open_plain(self._path(name), DamagedShardError), "rb", buffering=0) as file:
                made.append(os.pread(file.fileno(), stop - start, start))
        return made

    def map(self, name: str) -> mmap.mmap | bytes:
        """See `Store`."""
        return read_or_map(self._path(name), DamagedShardError, most_read=0)

    def _path(self, name: str) -> Path:
        return Path(self.url, name)
