"""The manifest of a directory of shards: what readers trust, written last."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Never, TypeVar

import xxhash

from headrace.webdatamodule.shards.errors import ManifestError
from headrace.webdatamodule.shards.format.grouping import RESERVED
from headrace.webdatamodule.shards.format.plain_files import read_plain
from headrace.webdatamodule.shards.format.whole import write_whole
from headrace.webdatamodule.shards.index.keys import is_utf8
from headrace.webdatamodule.shards.index.shard_index import ShardIndex
from headrace.webdatamodule.shards.writing.stopped import stopped_write

NAME = "manifest.json"
VERSION = 1
MOST_BYTES = 1 << 26  # some 400,000 shards
_LARGEST = (1 << 63) - 1
_LONGEST = 255  # bytes of a name, on all usual file systems
_Entry = TypeVar("_Entry", "ShardEntry", "ColumnEntry")


@dataclass(frozen=True)
class ShardEntry:
    """One shard of a manifest.

    Args:
        name: File name of the tar file, in the manifest's directory.
        nbytes: Its size.
        samples: How many samples it has.
        index: The checksum of its index, 16 hexadecimal digits; it stands for each byte of the shard.
        skipped: How many of its members are no part of a sample, directories aside.
    """

    name: str
    nbytes: int
    samples: int
    index: str
    skipped: int = 0

    @classmethod
    def of(cls, index: ShardIndex) -> ShardEntry:
        """The entry of a shard that was indexed.

        Args:
            index: The shard's index, which knows the shard's path.
        """
        name, checksum = Path(index.shard).name, f"{index.checksum:016x}"
        return cls(name, index.shard_bytes, index.n_samples, checksum, index.n_skipped)

    def __post_init__(self) -> None:
        _need(is_plain_name(self.name), f"the shard name {self.name!r:.99} leads elsewhere, or is no file name")
        counts = (self.nbytes, self.samples, self.skipped)
        fit = all(type(count) is int and 0 <= count <= _LARGEST for count in counts)
        _need(fit, f"the counts of {self.name!r} are none")
        _need(_is_hex(self.index), f"the index checksum of {self.name!r} is {self.index!r}")


@dataclass(frozen=True)
class ColumnEntry:
    """One column of a manifest: an array with one row for each sample, over all shards.

    Args:
        name: Name of the column.
        dtype: Of the array, as numpy writes it.
        file: File name of the `.npy` file, in the manifest's directory.
        checksum: Of the file, 16 hexadecimal digits.
    """

    name: str
    dtype: str
    file: str
    checksum: str

    def __post_init__(self) -> None:
        _need(_is_text(self.name), f"the column name is {self.name!r}")
        _need(is_plain_name(self.file), f"the file {self.file!r} of a column leads elsewhere, or is no file name")
        _need(_is_text(self.dtype) and _is_hex(self.checksum), f"the column {self.name!r} is not described")


@dataclass(frozen=True)
class Manifest:
    """What a directory of shards holds.

    Args:
        shards: The shards, in the order in which their samples are numbered.
        members: The member keys that occur, sorted.
        columns: Arrays over all samples.

    Raises:
        ManifestError: A name occurs twice, or an entry is not possible.

    >>> manifest = Manifest((ShardEntry("a.tar", 2048, 3, "0" * 16),), ("txt",))
    >>> Manifest.from_json(manifest.to_json()) == manifest
    True
    """

    shards: tuple[ShardEntry, ...]
    members: tuple[str, ...]
    columns: tuple[ColumnEntry, ...] = ()

    def __post_init__(self) -> None:
        for what, names in (("shard", [s.name for s in self.shards]), ("column", [c.name for c in self.columns])):
            _need(len(set(names)) == len(names), f"a {what} is listed twice")
        _need(all(map(is_utf8, self.members)), "a member key is no text")
        _need(len(set(self.members)) == len(self.members), "a member key is listed twice")
        _need(RESERVED.isdisjoint(self.members), "a member key is one that readers use for themselves")
        _need(self.n_samples <= _LARGEST, "there are too many samples")

    @property
    def n_samples(self) -> int:
        """Number of samples in all shards."""
        return sum(shard.samples for shard in self.shards)

    @cached_property
    def fingerprint(self) -> str:
        """32 hexadecimal digits that change with any byte of any shard, and with any column."""
        return xxhash.xxh3_128_hexdigest(json.dumps(asdict(self), separators=(",", ":")).encode())

    def with_column(self, column: ColumnEntry) -> Manifest:
        """The same with one more column, in place of one of the same name.

        Args:
            column: The column.
        """
        others = [entry for entry in self.columns if entry.name != column.name]
        return replace(self, columns=(*others, column))

    def to_json(self) -> str:
        """The text of the file; there is only one for one content."""
        table = {"format": "headrace-shards", "version": VERSION, **asdict(self), "fingerprint": self.fingerprint}
        return json.dumps(table, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Read the text of a manifest.

        Args:
            text: As of `to_json`.

        Raises:
            ManifestError: It is something else, of another version, or does not fit its fingerprint.
        """
        if len(text) > MOST_BYTES:
            raise ManifestError(f"the manifest has {len(text)} bytes, more than the {MOST_BYTES} allowed")
        try:
            table = json.loads(text, object_pairs_hook=_once_each, parse_constant=_no_constant)
        except ManifestError:
            raise
        except (ValueError, RecursionError) as error:
            raise ManifestError(f"the manifest is no JSON ({error}): index the directory again") from error
        _need(isinstance(table, dict) and table.get("format") == "headrace-shards", "this is no manifest of shards")
        version = table.get("version")
        is_ours = type(version) is int and version == VERSION
        _need(is_ours, f"the manifest has version {version!r:.40}, this release reads version {VERSION}")
        members = tuple(_list(table, "members"))
        made = cls(_entries(ShardEntry, table, "shards"), members, _entries(ColumnEntry, table, "columns"))
        _need(table.get("fingerprint") == made.fingerprint, "the fingerprint does not fit the rest of the manifest")
        return made

    @classmethod
    def load(cls, directory: str | Path) -> Manifest:
        """Read the manifest of a directory.

        Args:
            directory: Where the shards lie.

        Raises:
            ManifestError: It is missing or damaged.
        """
        path = Path(directory) / NAME
        try:
            return cls.from_json(read_manifest(directory))
        except FileNotFoundError as error:
            raise ManifestError(_missing(Path(directory))) from error
        except OSError as error:
            raise ManifestError(f"{path} cannot be read ({error}): restore it, or index the directory again") from error
        except ManifestError as error:
            error.message = f"{path}: {error.message}"
            raise

    def save(self, directory: str | Path) -> None:
        """Write the manifest of a directory, to the disk, whole or not at all.

        Args:
            directory: Where the shards lie.
        """
        write_whole(Path(directory) / NAME, self.to_json().encode())


def read_manifest(directory: str | Path) -> bytes:
    """The bytes of a directory's manifest.

    Args:
        directory: Where the shards lie.

    Raises:
        ManifestError: It is no plain file, or too large for a manifest.
        OSError: It cannot be read.
    """
    return read_plain(Path(directory) / NAME, ManifestError, most=MOST_BYTES)


def is_plain_name(name: object) -> bool:
    r"""Whether a name is one of a file that lies in the directory itself, on each system.

    >>> [is_plain_name(name) for name in ("a.tar", "../a.tar", "/a.tar", "c:a.tar", "a\\b", ".", "", 3)]
    [True, False, False, False, False, False, False, False]
    """
    if not is_utf8(name) or len(name.encode("utf-8", "surrogateescape")) > _LONGEST:
        return False
    return bool(re.fullmatch(r"[^/\\:\0]+", name)) and name not in (".", "..")


def _missing(folder: Path) -> str:
    stopped = stopped_write(folder)
    if stopped:
        return f"there is no {NAME}: {stopped}"
    if folder.is_dir() and not any(folder.glob("*.tar")):
        cure = "give a directory of shards, or write some with write_shards"
        return f"there are no .tar files in {str(folder)!r}, and so there is no {NAME}: {cure}"
    return f"there is no {NAME} in {str(folder)!r}: call index_shards on that directory first"


def _is_text(value: object) -> bool:
    return is_utf8(value) and value != ""


def _is_hex(value: object) -> bool:
    return isinstance(value, str) and bool(re.fullmatch("[0-9a-f]{16}", value))


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    _need(len(table) == len(pairs), "a name occurs twice in one object")
    return table


def _no_constant(name: str) -> Never:
    raise ManifestError(f"the manifest says {name}, which is no number: index the directory again")


def _list(table: Mapping[str, Any], key: str) -> list[Any]:
    value = table.get(key)
    _need(isinstance(value, list), f"{key!r} is no list")
    return value if isinstance(value, list) else []


def _entries(kind: type[_Entry], table: Mapping[str, Any], key: str) -> tuple[_Entry, ...]:
    names = [field.name for field in fields(kind)]
    entries = _list(table, key)
    fit = all(isinstance(entry, dict) and sorted(entry) == sorted(names) for entry in entries)
    _need(fit, f"{key!r} is no list of objects with {', '.join(names)}")
    return tuple(kind(**entry) for entry in entries)


def _need(holds: object, message: str) -> None:
    if not holds:
        raise ManifestError(f"{message}: index the directory again")
