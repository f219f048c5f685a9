"""What ``headrace-shards pack`` packs: directories of files, FASTA records, the entries of an LMDB."""

# What the methods of a source do, `SampleSource` says.
# ruff: noqa: D102

from __future__ import annotations

import argparse
import codecs
import gzip
import mmap
import os
import re
import shutil
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from functools import cache, partial
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.webdatamodule._shared.display import counted
from headrace.webdatamodule.shards.errors import ShardError
from headrace.webdatamodule.shards.format.tar import BLOCK, few_samples, split_name
from headrace.webdatamodule.shards.index.checksums import checksum64
from headrace.webdatamodule.shards.index.shard_index import SUFFIX
from headrace.webdatamodule.shards.writing.plan import stored_bytes
from headrace.webdatamodule.shards.writing.sample_sources import Files, FilesOfSample, SampleSource, stamp
from headrace.webdatamodule.shards.writing.shard_builder import check_key
from headrace.webdatamodule.shards.writing.shard_task import KeyedSample

KINDS = ("files", "fasta", "lmdb")
KEYS_FROM = ("id", "number")
_PLAIN = (".fasta", ".fa", ".faa", ".fna", ".ffn", ".frn", ".fas")
_FASTA = (*_PLAIN, *(f"{ending}.gz" for ending in _PLAIN))
_LMDB = (".lmdb", ".mdb")
_OPTIONS = {"split_at": "files", "member": "lmdb", "db": "lmdb", "key_from": "fasta"}
# A ">" that begins a line, or follows a byte order mark: searched for as a letter, which is fast, and then seen to.
_BEGIN = rb">(?:(?<=^>)|(?<=\A\xef\xbb\xbf>))"
_RECORD = re.compile(_BEGIN, re.MULTILINE)
_WITHOUT_LETTERS = re.compile(_BEGIN + rb"[^\r\n]*+\s*+(?=^>|\Z)", re.MULTILINE)
_MEMBERS = ("id.txt", "seq.txt")
_DIGITS = 9
# What writers of LMDBs put beside the samples: TAPE, Open Catalyst, ASE, text recognition, tensorpack.
_COUNTS = {b"length", b"num_examples", b"num-samples", b"nextid", b"deleted_ids", b"metadata", b"__len__", b"__keys__"}
_DATABASE_BYTES = 48  # of the record of a named database in the one that holds the names
_MOST_DATABASES = 128
# Shards of short records grow by the blocks of a tar; below this size nobody minds.
_GROWTH, _MIB = 4, 2**20
_MINDED = 16 * _MIB
PACK = "64K"  # a pack of short texts that is worth its header
Warn = Callable[[str], object]


class Chain(SampleSource):
    """Several sources, one after another."""

    def __init__(self, sources: Sequence[SampleSource]) -> None:
        self._sources = sources
        self._ends = list(accumulate(map(len, sources)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int, /) -> KeyedSample:
        number = bisect_right(self._ends, index)
        return self._sources[number][index - (self._ends[number] - len(self._sources[number]))]

    def names(self) -> Iterable[tuple[str, Iterable[str]]]:
        return chain.from_iterable(source.names() for source in self._sources)

    def stamps(self) -> Iterable[tuple[int, int]]:
        return chain.from_iterable(source.stamps() for source in self._sources)

    def sizes(self) -> npt.NDArray[np.int64]:
        return np.concatenate([source.sizes() for source in self._sources])

    def member_bytes(self) -> Iterable[Mapping[str, int]]:
        return chain.from_iterable(source.member_bytes() for source in self._sources)

    def part(self, start: int, stop: int) -> SampleSource:
        begins = [end - len(source) for end, source in zip(self._ends, self._sources, strict=True)]
        cuts = [
            (source, max(start - begin, 0), min(stop - begin, len(source)))
            for begin, source in zip(begins, self._sources, strict=True)
        ]
        return Chain([source.part(first, last) for source, first, last in cuts if first < last])


def open_source(options: argparse.Namespace, scratch: Path, warn: Warn) -> SampleSource:
    """Open what `pack` is to pack, as its options say: sources of one kind, which is found out by their names.

    `scratch` is a directory for temporary files, `warn` receives warnings.
    """
    paths: list[Path] = options.sources
    kinds = {options.kind} if options.kind else {_kind_of(path) for path in paths}
    if len(kinds) > 1:
        raise ValueError(f"the sources are of several kinds ({', '.join(sorted(kinds))}): pack each kind by itself")
    [found] = kinds
    for name, kind in _OPTIONS.items():
        if getattr(options, name) is not None and found != kind:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} is for {kind}, but the sources are {found}: leave it out")
    if options.keys is not None and (found != "lmdb" or len(paths) > 1):
        raise ValueError("--keys chooses entries of one LMDB: leave it out, or give one LMDB")
    if found == "files":
        for path in paths:
            if not path.is_dir():
                raise NotADirectoryError(f"{str(path)!r} is no directory")
        return find_files(paths, split_at=options.split_at or "first", warn=warn)
    if found == "lmdb":
        wanted = None if options.keys is None else _read_keys(options.keys)
        member = "bin" if options.member is None else options.member
        return Chain([Entries(path, member, wanted, db=options.db, warn=warn) for path in paths])
    records: list[Fasta] = []
    for path in paths:
        plain = _decompressed(path, scratch)
        records.append(Fasta(plain, sum(map(len, records)), name=str(path)))
    if options.key_from != "number":
        try:
            _check_ids(records)
        except (ValueError, ShardError) as error:
            if options.key_from == "id":
                raise ValueError(f"{error}: correct the ids, or pass --key-from number") from error
            warn(f"keys are the records' numbers, as ids cannot be keys: {error}")
        else:
            records = [one.keyed_by_id() for one in records]
    for one in records:
        _warn_of_cut(one, warn)
    if options.bytes_per_pack is None:
        _warn_of_growth(records, warn)
    return Chain(records)


def _kind_of(path: Path) -> str:
    if not path.exists():
        raise FileNotFoundError(f"there is no {str(path)!r}")
    name = path.name.lower()
    if name.endswith(_LMDB) or (path / "data.mdb").exists():
        return "lmdb"
    if path.is_dir():
        return "files"
    if name.endswith(_FASTA):
        return "fasta"
    allowed = f"a directory, FASTA ({', '.join(_PLAIN)}, each also with .gz) or an LMDB"
    raise ValueError(f"{str(path)!r} cannot be packed: give {allowed}, or say what it is with --from")


# Directories of files


def find_files(directories: Sequence[Path], *, split_at: str = "first", warn: Warn = print) -> Files:
    """Put the files of directories, and of those inside, together to samples.

    A key is the path of a file from the directory on up to a dot of its name, and the rest is the member's key.
    Files of the same key from several directories are one sample.
    "last" for `split_at` means the last dot of the name, where the other dots of the key become dashes.
    """
    samples: dict[str, FilesOfSample] = {}
    left: list[str] = []
    for directory in directories:
        for path in _walk(directory):
            key, member = split_file_name(path.relative_to(directory).as_posix(), split_at)
            if not member or not path.is_file():
                left.append(str(path))
            elif "." in key:
                cure = "rename the directory or move it away, or pass --split-at last, which makes dashes of them"
                raise ValueError(f"{str(path)!r} would be in the sample {key!r}, but keys have no dots: {cure}")
            elif (other := samples.setdefault(key, {}).setdefault(member, str(path))) != str(path):
                message = f"{other!r} and {str(path)!r} would both be its member {member!r}: rename one"
                raise ShardError(message, sample=key)
    names, where = ", ".join(map(repr, left[:3])), ", ".join(repr(str(directory)) for directory in directories)
    if not samples:
        raise ValueError(f"there are no files with an extension in {where}, {f'only {names}' if left else 'nothing'}")
    if left:
        why = "hidden, without an extension, or no plain file"
        warn(f"{counted(len(left), 'file')} not packed, as no part of a sample, such as {names}: {why}")
    dotted = [path for members in samples.values() for member, path in members.items() if "." in member]
    if dotted and (message := few_samples("files", len(dotted), len(samples), dotted[0])):
        warn(message)
    _refuse_shards(samples, where, warn)
    return Files([(key, dict(sorted(samples[key].items()))) for key in sorted(samples)])


def split_file_name(name: str, split_at: str) -> tuple[str, str]:
    """Cut a path into a sample's key and a member's; both are empty for hidden files and those without extension."""
    begin = name.rfind("/") + 1
    if "." not in name[begin:] or name[begin] == ".":
        return "", ""
    key, member = split_name(name, split_at)
    if not member:
        return "", ""
    return (key if split_at == "first" else key.replace(".", "-")), member


def _refuse_shards(samples: dict[str, FilesOfSample], where: str, warn: Warn) -> None:
    tars = {path for members in samples.values() for path in members.values() if path.endswith(".tar")}
    indexed = min((path for path in tars if Path(f"{path}{SUFFIX}").exists()), default=None)
    if indexed:
        message = f"{where} holds shards that are indexed already, such as {indexed!r}"
        raise ValueError(f"{message}: read them as they are, or move them away")
    if tars:
        hint = "if they are shards, headrace-shards index makes them readable as they are"
        warn(f"{len(tars)} tar files are packed as members, such as {min(tars)!r}: {hint}")


def _walk(directory: Path) -> Iterator[Path]:
    def fail(error: OSError) -> None:
        raise error  # a directory that cannot be read is an error, not a gap

    for folder, inside, names in os.walk(directory, onerror=fail):
        inside.sort()
        # Links to directories are not followed, but reported as left out.
        links = [name for name in inside if Path(folder, name).is_symlink()]
        yield from (Path(folder, name) for name in sorted([*names, *links]))


# FASTA


class Fasta(SampleSource):
    """The records of a FASTA file.

    A record's key is its number, or its id as a key can have it; see `safe_key`. Its members are texts: `id.txt`, the
    header line without ">", and `seq.txt`, the letters without white space.
    """

    _by_id = False

    def __init__(self, path: Path, first: int = 0, name: str = "") -> None:
        self.name = name or str(path)
        self._path, self._first = str(path), first
        self._starts, self.without_letters = _record_starts(path, self.name, first)
        self._nbytes = path.stat().st_size

    def keyed_by_id(self) -> Fasta:
        """The same records under their ids."""
        made = copy(self)
        made._by_id = True
        return made

    def ids(self) -> Iterator[str]:
        """The first word of each header line."""
        with Path(self._path).open("rb") as file:
            for number, start in enumerate(self._starts[:-1].tolist(), self._first):
                file.seek(start)
                if (word := _id_of(file.readline()[1:])) is None:
                    raise ValueError(f"{self.name}: record {number} has no id after '>'")
                yield word

    def __len__(self) -> int:
        return self._starts.size - 1

    def __getitem__(self, index: int, /) -> KeyedSample:
        begin, end = self._starts[index : index + 2].tolist()
        with Path(self._path).open("rb") as file:
            if os.fstat(file.fileno()).st_size != self._nbytes:
                raise ValueError(f"{self._path}: the file was changed while it was being packed")
            file.seek(begin)
            line, _, letters = file.read(end - begin).partition(b"\n")
        title, number = line[1:].strip(), self._first + index
        if b"\r" in title:
            raise ValueError(f"{self._path}: record {number} has lines that end with a bare CR: convert them to LF")
        key = safe_key(_id_of(title) or "") if self._by_id else f"{number:0{_DIGITS}d}"
        return key, dict(zip(_MEMBERS, (title, b"".join(letters.split())), strict=True))

    def names(self) -> Iterable[tuple[str, Iterable[str]]]:
        numbers = (f"{number:0{_DIGITS}d}" for number in range(self._first, self._first + len(self)))
        return ((key, _MEMBERS) for key in (map(safe_key, self.ids()) if self._by_id else numbers))

    def stamps(self) -> Iterable[tuple[int, int]]:
        return [stamp(self._path)]

    def sizes(self) -> npt.NDArray[np.int64]:
        return np.diff(self._starts) + 4 * BLOCK  # with line ends counted, and the most of padding

    def member_bytes(self) -> Iterable[Mapping[str, int]]:
        return (dict(zip(_MEMBERS, (0, nbytes), strict=True)) for nbytes in np.diff(self._starts).tolist())

    def part(self, start: int, stop: int) -> SampleSource:
        made = copy(self)
        made._first, made._starts = self._first + start, self._starts[start : stop + 1]
        return made


def _id_of(title: bytes) -> str | None:
    words = title.split(None, 1)
    return words[0].decode() if words else None


def safe_key(word: str) -> str:
    """A record's id as a key: dots, slashes and backslashes become dashes, and so do two leading underscores."""
    return re.sub(r"[./\\\0]", "-", f"--{word[2:]}" if word.startswith("__") else word)


def _record_starts(path: Path, name: str, first: int) -> tuple[npt.NDArray[np.int64], list[int]]:
    """Where the records of a file begin, and where the last one ends: bytes, shape [n_records + 1].

    And the numbers of those without letters, counted from `first`.
    """
    nbytes = path.stat().st_size
    if not nbytes:
        raise ValueError(f"{name}: the file is empty")
    with path.open("rb") as file:
        # Not closed by hand: after Ctrl-C the search still holds the map, which then cannot be closed.
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        starts = np.fromiter((match.start() for match in _RECORD.finditer(data)), np.int64)
        empty = np.fromiter((match.start() for match in _WITHOUT_LETTERS.finditer(data)), np.int64)
        head = data[: min(int(starts[0]) if starts.size else nbytes, 4096)]
    head = head.removeprefix(codecs.BOM_UTF8)
    if head.strip():
        raise ValueError(f"{name}: it does not begin with '>', as a FASTA file does, but with {head.strip()[:24]!r}")
    if not starts.size:
        raise ValueError(f"{name}: the file holds no record")
    starts = np.append(starts, nbytes)
    _refuse_other_encodings(path, starts, name, first)
    return starts, (np.searchsorted(starts, empty) + first).tolist()


def _refuse_other_encodings(path: Path, starts: npt.NDArray[np.int64], name: str, first: int) -> None:
    """Refuse what is no UTF-8, which would fail when it is read: members are texts."""
    with path.open("rb") as file:
        if all(piece.isascii() for piece in iter(partial(file.read, _MIB), b"")):
            return
        for number, (begin, end) in enumerate(pairwise(starts.tolist()), first):
            file.seek(begin)
            try:
                file.read(end - begin).decode()
            except UnicodeDecodeError as error:
                message = f"{name}: record {number} has text that is no UTF-8, at byte {begin + error.start}"
                raise ValueError(f"{message}: convert the file, such as with `iconv -f latin1 -t utf-8`") from error


def _warn_of_cut(records: Fasta, warn: Warn) -> None:
    """Warn of records without letters: a file that was cut ends in one."""
    if found := records.without_letters:
        more = f", and so have {len(found) - 1:,} more" if len(found) > 1 else ""
        warn(f"{records.name}: record {found[0]} has no letters{more}: is the file cut?")


def _warn_of_growth(records: Sequence[Fasta], warn: Warn) -> None:
    """Warn where shards take many times the bytes of the records: each of a record's two members takes two blocks."""
    nbytes = np.concatenate([one.sizes() for one in records]) - 4 * BLOCK
    held, shards = int(nbytes.sum()), int(np.maximum(4 * BLOCK, nbytes + 3 * BLOCK).sum())
    if shards >= max(_GROWTH * held, _MINDED):
        warn(
            f"the shards take about {shards / held:.0f} times the bytes of the records, {shards / _MIB:,.0f} MiB for "
            f"{held / _MIB:,.1f}: in a tar each member takes {2 * BLOCK} bytes or more, and a record has two. "
            f"Pass --bytes-per-pack {PACK}, which writes many records into one member of the tar, where only "
            "headrace reads them; or keep them as columns of a Parquet table, for MapDataModule"
        )


def _check_ids(records: Sequence[Fasta]) -> None:
    """Refuse ids that cannot be keys: one is missing or too long, or two give the same key."""
    keyed = [one.keyed_by_id() for one in records]
    for one in keyed:
        one.check()
    hashes = np.fromiter((checksum64(safe_key(word).encode()) for one in keyed for word in one.ids()), np.uint64)
    values, counts = np.unique(hashes, return_counts=True)
    repeated = set(values[counts > 1].tolist())
    seen: dict[str, tuple[str, str]] = {}
    for one in keyed if repeated else ():
        for word in one.ids():
            key = safe_key(word)
            if checksum64(key.encode()) not in repeated:
                continue
            if key in seen:
                other, file = seen[key]
                raise ValueError(f"{other!r} in {file} and {word!r} in {one.name} both give the key {key!r}")
            seen[key] = word, one.name


def _decompressed(path: Path, scratch: Path) -> Path:
    """A FASTA file that is not compressed, since records are read at random."""
    if not path.name.lower().endswith(".gz"):
        return path
    target = scratch / f"{len(list(scratch.iterdir()))}.fasta"
    try:
        with gzip.open(path, "rb") as packed, target.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked, 1 << 20)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: the file is cut or damaged: {error}") from error
    shutil.copystat(path, target)  # it is as old as what it was made of
    return target


# LMDB


class Entries(SampleSource):
    """The entries of an LMDB. Bytes are copied as they are: nothing is unpickled."""

    def __init__(
        self, path: Path, member: str, keys: Sequence[str] | None = None, *, db: str | None = None, warn: Warn
    ) -> None:
        self._path, self._member, self._db = str(path), member, db
        wanted = None if keys is None else [os.fsencode(key) for key in keys]
        with self._reading(buffers=True) as reading:
            pairs = ((bytes(key), len(value)) for key, value in reading.cursor())
            found = list(pairs) if wanted is None else [(key, self._length(reading, key)) for key in wanted]
            if db is None:
                self._refuse_databases([key for key, size in found if size == _DATABASE_BYTES])
        if wanted is None:
            if counts := ", ".join(repr(os.fsdecode(key)) for key, _ in found if key in _COUNTS):
                message = f"{self._path}: the entries {counts} describe the others and are not packed"
                warn(f"{message}: if they are samples, list all keys to pack in a file for --keys")
            found = [(key, size) for key, size in found if key not in _COUNTS]
        if not found:
            raise ValueError(f"{self._path}: the LMDB holds no entries")
        self._keys = [key for key, _ in found]
        self._nbytes = np.array([size for _, size in found], np.int64)
        self._refuse_keys()

    def _refuse_databases(self, keys: Sequence[bytes]) -> None:
        """Refuse the records of named databases: these are no samples."""
        if names := list(_databases(self._path, keys)):
            message = f"{self._path}: the LMDB holds the named databases {', '.join(map(repr, names))}"
            raise ValueError(f"{message}: choose one with --db")

    def _refuse_keys(self) -> None:
        """Refuse keys that no sample can have."""
        for key in self._keys:
            try:
                check_key(_sample_key(key))
            except ShardError as error:
                message = f"{self._path}: the entry {key!r} cannot be packed: {error.message}"
                cure = "list the keys to pack in a file for --keys, or write the samples in Python with write_shards"
                raise ValueError(f"{message}; {cure}") from error

    def _length(self, reading: Any, key: bytes) -> int:
        value = reading.get(key)
        if value is None:
            raise ValueError(f"{self._path}: the LMDB has no entry {os.fsdecode(key)!r}: correct --keys")
        return len(value)

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: int, /) -> KeyedSample:
        key = self._keys[index]
        with self._reading() as reading:
            value = reading.get(key)
        if value is None:
            raise ValueError(f"{self._path}: the entry {os.fsdecode(key)!r} was removed while it was being packed")
        return _sample_key(key), {self._member: value}

    def names(self) -> Iterable[tuple[str, Iterable[str]]]:
        return ((_sample_key(key), (self._member,)) for key in self._keys)

    def stamps(self) -> Iterable[tuple[int, int]]:
        path = Path(self._path)
        return [stamp(path / "data.mdb" if path.is_dir() else path)]

    def sizes(self) -> npt.NDArray[np.int64]:
        return np.array([stored_bytes(size) for size in self._nbytes.tolist()], np.int64)

    def member_bytes(self) -> Iterable[Mapping[str, int]]:
        return ({self._member: size} for size in self._nbytes.tolist())

    def part(self, start: int, stop: int) -> SampleSource:
        made = copy(self)
        made._keys, made._nbytes = self._keys[start:stop], self._nbytes[start:stop]
        return made

    @contextmanager
    def _reading(self, *, buffers: bool = False) -> Iterator[Any]:
        try:
            import lmdb
        except ImportError as error:
            raise ImportError("reading an LMDB needs the package lmdb: pip install lmdb") from error
        try:
            opened = _open_lmdb(self._path, os.getpid())
            db = None if self._db is None else opened.open_db(os.fsencode(self._db), create=False)
            with opened.begin(db=db, buffers=buffers) as reading:
                yield reading
        except (lmdb.IncompatibleError, lmdb.NotFoundError) as error:
            raise ValueError(f"{self._path}: there is no database {self._db!r} in the LMDB: correct --db") from error
        except lmdb.Error as error:
            raise ValueError(f"{self._path}: it cannot be read as an LMDB: {error}") from error


@cache  # the package opens a database once in a process; an environment must not cross a fork
def _open_lmdb(path: str, process: int) -> Any:  # noqa: ARG001 - a part of what is remembered
    import lmdb

    folder = Path(path).is_dir()
    return lmdb.open(
        path, subdir=folder, readonly=True, create=False, lock=False, readahead=False, max_dbs=_MOST_DATABASES
    )


def _databases(path: str, keys: Sequence[bytes]) -> Iterator[str]:
    """Those keys that name databases."""
    import lmdb

    for key in keys:
        with suppress(lmdb.IncompatibleError, lmdb.DbsFullError):
            _open_lmdb(path, os.getpid()).open_db(key, create=False)
            yield os.fsdecode(key)


def _sample_key(key: bytes) -> str:
    return os.fsdecode(key).replace(".", "-")


def _read_keys(path: Path) -> list[str]:
    keys = [os.fsdecode(line) for line in path.read_bytes().splitlines() if line]
    if not keys:
        raise ValueError(f"{str(path)!r} holds no keys: write one a line")
    return keys
