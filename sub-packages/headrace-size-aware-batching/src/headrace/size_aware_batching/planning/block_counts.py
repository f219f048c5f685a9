"""How many batches each block has, noted in a file that all ranks and later runs read and write."""

from __future__ import annotations

import os
import zlib
from contextlib import suppress
from pathlib import Path

from headrace.size_aware_batching._shared.warnings import warn

BLOCK_COUNTS_VERSION = 1


class BlockCounts:
    """Numbers of batches, a line for each block: the block, its batches, the checksum of its sizes, and of the line.

    Lines are only appended, each by one write. What is damaged, as where two machines wrote at once, is counted again.

    Args:
        directory: Of the file; it is made when the first line is written.
        fingerprint: Of what decides the batches, and a checksum of some of the sizes.
    """

    def __init__(self, directory: Path, fingerprint: str) -> None:
        self._path = directory / f"{fingerprint}-{BLOCK_COUNTS_VERSION}.batches"
        self._read = 0  # bytes of the file that were read
        self._found: dict[int, tuple[int, str]] = {}

    def get(self, block: int) -> tuple[int, str] | None:
        """Return the batches of a block and the checksum of its sizes; None where nobody has noted them."""
        if block not in self._found:
            with suppress(OSError), self._path.open("rb") as file:
                file.seek(self._read)
                lines, _, _ = file.read().rpartition(b"\n")
                self._read += len(lines) + 1 if lines else 0
                for line in lines.split(b"\n"):
                    words, _, checksum = line.rpartition(b" ")
                    if checksum == _checksum(words):
                        number, count, sizes = words.decode().split()
                        self._found[int(number)] = int(count), sizes
        return self._found.get(block)

    def add(self, block: int, count: int, sizes: str) -> None:
        """Note the batches of a block; where that cannot be written, warn."""
        self._found[block] = count, sizes
        words = f"{block} {count} {sizes}".encode()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                os.write(file, words + b" " + _checksum(words) + b"\n")
            finally:
                os.close(file)
        except OSError as error:
            warn(
                f"plan_cache={str(self._path.parent)!r} must be a directory that can be written to, got {error}: every "
                "process counts all blocks itself"
            )


def _checksum(words: bytes) -> bytes:
    return f"{zlib.crc32(words):08x}".encode()
