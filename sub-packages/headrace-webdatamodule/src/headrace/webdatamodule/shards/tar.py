"""One tar file: whole under its final name, or not there."""

import io
import os
import re
import secrets
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from headrace.webdatamodule.shards.errors import ShardError

Sample = tuple[str, Mapping[str, bytes]]


def write_tar(path: Path, samples: Iterable[Sample]) -> None:
    """Write one shard: a plain USTAR file whose bytes depend on the samples only.

    Under `path` there is either the whole shard, what was there before, or nothing.

    Args:
        path: Final name of the shard. Its directory exists.
        samples: Pairs of a sample's key and its members, {member key: bytes}.

    Raises:
        ShardError: A key or a member key that no reader could find again; it names the sample.

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


def publish(staged: Mapping[Path, Path]) -> None:
    """Give staged shards their final names.

    Args:
        staged: {final name: temporary name}, all in one directory.
    """
    for path, temporary in staged.items():
        temporary.replace(path)
    for directory in {path.parent for path in staged}:
        sync_directory(directory)


def _write(stream: BinaryIO, samples: Iterable[Sample], *, shard: str) -> None:
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT, encoding="utf-8") as tar:
        for key, sample in samples:
            for name, data in member_names(key, sample, shard=shard):
                tar.addfile(_header(name, len(data), shard=shard, sample=key), io.BytesIO(data))


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


def member_names(key: str, sample: Mapping[str, bytes], *, shard: str) -> Iterator[tuple[str, bytes]]:
    """The members of one sample under the names that they get in the tar file, checked.

    Args:
        key: The sample's key.
        sample: {member key: bytes}.
        shard: Named in errors.

    Yields:
        (member name, bytes).

    Raises:
        ShardError: Names that readers would skip, split elsewhere or take for one.
    """
    check_key(key, shard=shard)
    if not sample:
        raise ShardError("the sample has no members: give at least one", shard=shard, sample=key)
    folded = [suffix.lower() for suffix in sample]  # readers fold the case of member keys
    for suffix, data in sample.items():
        if not re.fullmatch(r"[^/\0]+", suffix) or folded.count(suffix.lower()) > 1:
            allowed = "a text without '/', unlike the sample's other member keys even in lower case"
            raise ShardError(f"the member key {suffix!r} cannot be stored: give {allowed}", shard=shard, sample=key)
        yield f"{key}.{suffix}", data


def check_key(key: str, *, shard: str | None = None) -> None:
    """Refuse a sample key that readers of tar shards would not give back as it is.

    Args:
        key: The sample's key. Readers cut a member's name at its first dot, and skip names that begin
            with two underscores.
        shard: Named in the error.

    Raises:
        ShardError: The key is empty, holds a dot or a NUL, is an absolute path or begins with "__".
    """
    if not key or "." in key or "\0" in key or key.startswith(("/", "__")) or key.endswith("/"):
        message = f"the sample key {key!r} cannot be stored: give a text without dots, not empty,"
        raise ShardError(f"{message} not beginning with '/' or '__', not ending with '/'", shard=shard)


def _header(name: str, size: int, *, shard: str, sample: str) -> tarfile.TarInfo:
    header = tarfile.TarInfo(name)
    header.size = size
    try:
        header.tobuf(tarfile.USTAR_FORMAT, "utf-8", "strict")
    except ValueError as error:
        hint = "a USTAR header holds names to 100 bytes (255 with directories) and members to 8 GiB"
        message = f"the member of {size} bytes does not fit ({error}): {hint}"
        raise ShardError(message, shard=shard, sample=sample, member=name) from error
    return header


def sync_directory(directory: Path) -> None:
    """Bring the names of a directory's files to the disk.

    Args:
        directory: Where files were renamed.
    """
    if os.name == "posix":  # elsewhere a directory cannot be opened
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
