"""What stands for a set of shards: the same wherever it lies, and another one after any change of a shard."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from headrace.webdatamodule._shared.digest import text_digest
from headrace.webdatamodule.shards.index.checksums import content_fingerprint, fingerprint_ranges

_END_OF_TAR = 8192  # bytes that are left out of the last piece: a tar file may end with 10 KiB of zeros


def shards_fingerprint(samples: Sequence[int], checksums: Sequence[int]) -> str:
    """Of indexed shards: the numbers of their samples and the checksums of their indexes, without columns."""
    return text_digest(repr((tuple(samples), tuple(checksums))))


def sources_fingerprint(fingerprints: Sequence[tuple[str, str]]) -> str:
    """Of several sets, by their names and fingerprints; the name of an only one decides nothing."""
    if len(fingerprints) == 1:
        return fingerprints[0][1]
    return text_digest("\n".join(f"{name}\t{fingerprint}" for name, fingerprint in fingerprints))


def files_fingerprint(tars: Iterable[str]) -> str:
    """Of shards without an index: name, size and three pieces of each; more would have to read all of it."""
    return text_digest(repr([(Path(tar).name, _content(tar)) for tar in tars]))


def _content(tar: str) -> int:
    with open(tar, "rb") as file:  # noqa: PTH123 - the path is text already
        shard_bytes, pieces = file.seek(0, os.SEEK_END), list[bytes]()
        for begin, end in fingerprint_ranges(shard_bytes, max(0, shard_bytes - _END_OF_TAR)):
            file.seek(begin)
            pieces.append(file.read(end - begin))
    return content_fingerprint(shard_bytes, pieces)
