"""What is known of all sizes without reading them: facts that are noted for the file that an array maps."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching._files import write_atomically
from headrace.size_aware_batching.planning.fingerprint import array_digest, content_digest

KNOWN_SIZES_VERSION = 1
# A file that is written again within a tick of the file system's clock keeps its time. So facts are noted only for one
# that was left alone for so many nanoseconds before they were found.
SETTLED = 2 * 10**9
_MAPS = Path("/proc/self/maps")  # of Linux; elsewhere no file is known again

Identity = list[str | int]


class KnownSizes:
    """Sizes, and facts of them all; each is found by a pass over them once, and noted for a mapped file.

    Args:
        sizes: Checked, and safe from changes.
        directory: Of the notes.
    """

    def __init__(self, sizes: NDArray[Any], directory: Path) -> None:
        self.sizes, self._directory = sizes, directory
        self._identity, self._since = mapped_file(sizes), time.time_ns()
        self._facts: dict[str, Any] = {}

    @classmethod
    def noted(cls, sizes: Any, directory: Path) -> KnownSizes | None:
        """Return sizes that need no check, as they map a file that was checked and has not changed; else None."""
        if not isinstance(sizes, np.ndarray) or isinstance(sizes, np.ma.MaskedArray):
            return None
        found = cls(np.asarray(sizes), directory)
        if found._identity is None:
            return None
        found._facts = found._read()
        return found if found._facts else None

    @property
    def largest(self) -> int | None:
        """The largest size, where sizes are whole and have one column."""
        if self.sizes.ndim > 1 or self.sizes.dtype.kind not in "iu":
            return None
        return int(self._fact("largest", lambda: int(self.sizes.max(initial=0))))

    @property
    def digest(self) -> str:
        """Stands for the bytes of the array."""
        digest, largest = "digest" not in self._facts, self.largest  # both are in the first note
        found = str(self._fact("digest", lambda: content_digest(self.sizes).hex()))
        if digest and largest is not None:
            self._write()
        return found

    @property
    def fingerprint(self) -> str:
        """Stands for the values in fingerprints, whatever their type."""
        new = "fingerprint" not in self._facts
        found = str(self._fact("fingerprint", lambda: array_digest(self.sizes).hex()))
        if new and "digest" in self._facts:
            self._write()
        return found

    def _fact(self, name: str, find: Callable[[], Any]) -> Any:
        if name not in self._facts:
            self._facts[name] = find()
        return self._facts[name]

    @property
    def _note(self) -> Path:
        name = hashlib.blake2b(json.dumps([KNOWN_SIZES_VERSION, self._identity]).encode(), digest_size=16).hexdigest()
        return self._directory / f"{name}.sizes"

    def _read(self) -> dict[str, Any]:
        """Return the facts of a note; none where it is missing, damaged or of another file."""
        with suppress(OSError, ValueError):
            with self._note.open("rb") as file:
                checksum, _, text = file.read(2**16).partition(b"\n")
            if checksum == _checksum(text):
                note = json.loads(text)
                if note["identity"] == self._identity:
                    facts: dict[str, Any] = note["facts"]
                    return facts
        return {}

    def _write(self) -> None:
        """Note the facts, if the file is the one that they were found in."""
        identity = self._identity
        if identity is None or identity != mapped_file(self.sizes) or self._since - _changed(identity) < SETTLED:
            return
        text = json.dumps({"identity": identity, "facts": self._facts}).encode()
        with suppress(OSError):  # what is not noted is found again
            self._directory.mkdir(parents=True, exist_ok=True)
            write_atomically(self._note, [_checksum(text), b"\n", text])


def mapped_file(sizes: NDArray[Any]) -> Identity | None:
    """Return what tells the file that an array maps from any other file and from its own past and future contents.

    None where it maps none, or where that is not known for certain. Its path, inode, length, times of change and the
    array's place in it: only the system sets the time at which the inode changed.
    """
    plain = sizes.ndim == 1 and sizes.dtype.kind in "iu" and sizes.dtype != np.uint64 and sizes.size > 0
    if not plain or sizes.flags.writeable or not sizes.flags.c_contiguous:
        return None
    with suppress(OSError, ValueError):
        if found := _place_in_file(sizes):
            path, offset = found
            stat = os.stat(path)  # noqa: PTH116 - text of /proc; Path would normalise it
            if _place_in_file(sizes) == found:  # the path still leads to what is mapped
                times = (stat.st_mtime_ns, stat.st_ctime_ns)
                return [path, stat.st_ino, stat.st_size, *times, offset, sizes.dtype.str, len(sizes)]
    return None


def _place_in_file(sizes: NDArray[Any]) -> tuple[str, int] | None:
    """Return the path of the file that an array maps, as the system knows it, and the array's first byte in it."""
    begin = sizes.__array_interface__["data"][0]
    for line in _MAPS.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        span, allowed, offset, _, _, *path = line.split(maxsplit=5)
        first, stop = (int(word, 16) for word in span.split("-"))
        if first <= begin < stop:
            known = path and path[0].startswith("/") and not path[0].endswith(" (deleted)")
            if known and begin + sizes.nbytes <= stop and allowed.startswith("r-"):
                return path[0], int(offset, 16) + begin - first
            return None
    return None


def _changed(identity: Identity) -> int:
    return max(int(identity[3]), int(identity[4]))


def _checksum(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).hexdigest().encode()
