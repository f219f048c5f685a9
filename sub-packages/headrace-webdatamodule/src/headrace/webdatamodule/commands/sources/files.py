"""Directories of files: those that share a name up to the first dot are one sample."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headrace.webdatamodule.commands.output import warn
from headrace.webdatamodule.commands.sources.source import Sample, Source, stamp
from headrace.webdatamodule.shards.errors import ShardError
from headrace.webdatamodule.shards.index.shard_index import SUFFIX
from headrace.webdatamodule.shards.writing.plan import stored_bytes

Members = dict[str, str]


class Files(Source):
    """The samples of some directories, sorted by key. Bytes are copied as they are: nothing is unpickled.

    Args:
        samples: Pairs of a key and {member key: path}.
    """

    def __init__(self, samples: Sequence[tuple[str, Members]]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def _sample(self, index: int) -> Sample:
        key, members = self._samples[index]
        return key, {member: Path(path).read_bytes() for member, path in members.items()}

    def keys(self) -> Iterable[str]:
        """As of `Source`."""
        return (key for key, _ in self._samples)

    def stamps(self) -> Iterable[tuple[int, int]]:
        """As of `Source`."""
        return (stamp(path) for _, members in self._samples for path in members.values())

    def part(self, start: int, stop: int) -> Source:
        """As of `Source`."""
        return Files(self._samples[start:stop])

    def sizes(self) -> npt.NDArray[np.int64]:
        """As of `Source`."""
        files = ([stored_bytes(Path(path).stat().st_size) for path in members.values()] for _, members in self._samples)
        return np.array([sum(sizes) for sizes in files], np.int64)


def find_files(directories: Sequence[Path], *, split_at: str = "first") -> Files:
    """Put the files of directories, and of those inside, together to samples.

    A key is the path of a file from the directory on up to a dot of its name, and the rest is the member's key.
    Files of the same key from several directories are one sample.

    Args:
        directories: Where to look.
        split_at: Which dot ends the key: the "first" one, as readers of shards have it, or the "last" one, where the
            other dots of the key become dashes.

    Returns:
        The samples.

    Raises:
        ShardError: Two files would be the same member.
        ValueError: There is no file that could be a member, a directory's name would put a dot into a key, or there
            are shards.
    """
    samples: dict[str, Members] = {}
    left: list[str] = []
    for directory in directories:
        for path in _walk(directory):
            key, member = parted(path.relative_to(directory).as_posix(), split_at)
            if not member or not path.is_file():
                left.append(str(path))
            elif "." in key:
                cure = "rename the directory or move it away, or pass --split-at last, which makes dashes of them"
                raise ValueError(f"{str(path)!r} would be in the sample {key!r}, but keys have no dots: {cure}")
            elif (other := samples.setdefault(key, {}).setdefault(member, str(path))) != str(path):
                message = f"{other!r} and {str(path)!r} would both be its member {member!r}: rename one"
                raise ShardError(message, sample=key)
    names = ", ".join(map(repr, left[:3]))
    if not samples:
        found = f"only {names}" if left else "nothing"
        raise ValueError(f"there are no files with an extension in {_names(directories)}, {found}")
    if left:
        warn(
            f"{len(left)} files are no part of a sample and are not packed, such as {names}: they are hidden, have no"
            " extension or are no plain files"
        )
    _refuse_shards(samples, directories)
    return Files([(key, dict(sorted(samples[key].items()))) for key in sorted(samples)])


def parted(name: str, split_at: str) -> tuple[str, str]:
    """Cut a path into a sample's key and a member's; both are empty for hidden files and those without extension.

    Args:
        name: The path, with "/" between its parts.
        split_at: "first" or "last".

    >>> parted("a/b.c.txt", "first"), parted("a/b.c.txt", "last"), parted("a/.b", "first")
    (('a/b', 'c.txt'), ('a/b-c', 'txt'), ('', ''))
    """
    begin = name.rfind("/") + 1
    dot = name.find(".", begin) if split_at == "first" else name.rfind(".", begin)
    if dot <= begin or name[begin] == "." or dot == len(name) - 1:
        return "", ""
    key = name[:dot]
    return (key if split_at == "first" else key.replace(".", "-")), name[dot + 1 :]


def _refuse_shards(samples: dict[str, Members], directories: Sequence[Path]) -> None:
    tars = {path for members in samples.values() for path in members.values() if path.endswith(".tar")}
    indexed = min((path for path in tars if Path(f"{path}{SUFFIX}").exists()), default=None)
    if indexed:
        message = f"{_names(directories)} holds shards that are indexed already, such as {indexed!r}"
        raise ValueError(f"{message}: read them as they are, or move them away")
    if tars:
        hint = "if they are shards, headrace-shards index makes them readable as they are"
        warn(f"{len(tars)} tar files are packed as members, such as {min(tars)!r}: {hint}")


def _walk(directory: Path) -> Iterator[Path]:
    # Directories that cannot be read are an error, not a gap.
    for folder, inside, names in os.walk(directory, onerror=_raise):
        inside.sort()
        # Links to directories are not followed, but named as what is left.
        links = [name for name in inside if Path(folder, name).is_symlink()]
        yield from (Path(folder, name) for name in sorted([*names, *links]))


def _raise(error: OSError) -> None:
    raise error


def _names(directories: Sequence[Path]) -> str:
    return ", ".join(repr(str(directory)) for directory in directories)
