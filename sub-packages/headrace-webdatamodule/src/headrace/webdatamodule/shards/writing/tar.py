"""One tar file: whole under its final name, or not there."""

import os
import secrets
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from headrace.webdatamodule.shards.format.files import publish
from headrace.webdatamodule.shards.writing.recording import CHUNK, Recording

Sample = tuple[str, Mapping[str, bytes]]


def write_tar(path: Path, samples: Iterable[Sample]) -> None:
    """Write one shard: a plain USTAR file whose bytes depend on the samples only.

    Under `path` there is either the whole shard, what was there before, or nothing.

    Args:
        path: Final name of the shard. Its directory exists.
        samples: Pairs of a sample's key and its members, {member key: bytes}.

    Raises:
        ShardError: A sample that no reader could find again, or that a tar file cannot hold; it names the sample.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> write_tar(folder / "a-000000.tar", [("one", {"txt": b"1"}), ("two", {"txt": b"22"})])
    >>> list(members(folder / "a-000000.tar"))
    [('one.txt', 1), ('two.txt', 2)]
    """
    publish({path: stage_tar(path, samples)})


def stage_tar(path: Path, samples: Iterable[Sample]) -> Path:
    """Write a shard, to the disk, under a temporary name beside its final one.

    Args:
        path: Final name of the shard.
        samples: As for `write_tar`.

    Returns:
        The temporary name, which no reader's glob finds. Nothing is left behind when an error occurs.
    """
    # The token keeps two writers apart, also on two hosts; the leading dot keeps readers' globs away.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with temporary.open("wb") as stream:
            _write(stream, samples, shard=str(path))
            stream.flush()
            os.fsync(stream.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def _write(stream: BinaryIO, samples: Iterable[Sample], *, shard: str) -> None:
    recording = Recording(shard)
    for key, sample in samples:
        recording.add(key, sample)
        if recording.pending >= CHUNK:
            stream.write(recording.take())
    stream.write(recording.finish())


def members(path: Path) -> Iterator[tuple[str, int]]:
    """Names and sizes in bytes of a shard's members, in order, read from the headers alone.

    Args:
        path: A tar file.

    Yields:
        (member name, size).
    """
    with tarfile.open(path, mode="r:", encoding="utf-8") as tar:
        for header in tar:
            yield header.name, header.size
