"""``headrace-shards``: pack, index, verify and look into shards on the command line."""

from __future__ import annotations

import argparse
import base64
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import asdict
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from headrace.webdatamodule._shared.display import counted
from headrace.webdatamodule.cli_output import (
    Pieces,
    discard,
    error_text,
    json_list,
    json_pieces,
    say,
    table,
    text_lines,
    texts_apart,
    write_out,
)
from headrace.webdatamodule.cli_sources import KEYS_FROM, KINDS, open_source
from headrace.webdatamodule.shards.errors import (
    DamagedIndexError,
    DamagedShardError,
    DecodeError,
    GroupingError,
    LostColumnsError,
    ManifestError,
    RefusedMemberError,
    ShardError,
    StaleIndexError,
)
from headrace.webdatamodule.shards.globbing import find_shards
from headrace.webdatamodule.shards.index.build import (
    build_index,
    fitting_index,
    index_shards,
    open_listed_shard,
    open_shard_bytes,
    spread,
)
from headrace.webdatamodule.shards.index.manifest import NAME, Manifest
from headrace.webdatamodule.shards.index.shard_index import ShardIndex, index_path
from headrace.webdatamodule.shards.index.verify import Fault, verify_shards
from headrace.webdatamodule.shards.indexed_shards import IndexedShards
from headrace.webdatamodule.shards.reading.local_shards import is_url, open_index
from headrace.webdatamodule.shards.urls import redacted
from headrace.webdatamodule.shards.writing.executor import pool
from headrace.webdatamodule.shards.writing.resume import noted_fingerprint
from headrace.webdatamodule.shards.writing.sample_sources import stamps_fingerprint
from headrace.webdatamodule.shards.writing.write import write_shards

DAMAGE, INPUT, STOPPED = 1, 2, 130
_DAMAGES = (DamagedIndexError, DamagedShardError, DecodeError, GroupingError, RefusedMemberError, StaleIndexError)
_CODES = "exit codes: 0 all is well, 1 faults or damage were found, 2 usage or input is wrong, 130 stopped by Ctrl-C"
_SHARD_BYTES = 256 << 20
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
Outcome = tuple[int, Pieces]  # the exit code, and what to print
Run = Callable[[argparse.Namespace], Outcome]
Argument = tuple[tuple[str, ...], dict[str, Any]]
_COMMANDS: list[tuple[Run, str, str, tuple[Argument, ...]]] = []


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: Words after the command's name; those of the process by default.

    Returns:
        0 when all is well, 1 when faults or damage were found, 2 when the input is wrong, 130 after Ctrl-C. Wrong
        usage ends with `SystemExit` of code 2. Errors are one line on stderr.
    """
    if sys.stderr is None:  # progress bars need one
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - until the process ends
    try:
        options = _parser().parse_args(argv)
        code, pieces = options.run(options)
        write_out(pieces)
    except KeyboardInterrupt:
        discard(sys.stdout)
        return STOPPED
    except (BrokenExecutor, ImportError, OSError, ShardError, TypeError, ValueError) as error:
        say("error", error_text(error))
        missing = isinstance(error.__cause__, FileNotFoundError)
        damaged = isinstance(error, _DAMAGES) or (isinstance(error, ManifestError) and not missing)
        return DAMAGE if damaged else INPUT
    return int(code)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line that names the command only."""

    def error(self, message: str) -> NoReturn:
        say("error", message)
        self.exit(INPUT)


def _parser() -> _Parser:
    text = "Tar shards of samples: pack, index, verify, read."
    made = _Parser(prog="headrace-shards", description=text, epilog=_CODES)
    made.add_argument("--version", action="version", version=f"%(prog)s {version('headrace-webdatamodule')}")
    commands = made.add_subparsers(metavar="COMMAND", required=True)
    for run, summary, description, arguments in _COMMANDS:
        name = run.__name__.strip("_").replace("_", "-")
        parser = commands.add_parser(name, help=summary, description=description, epilog=_CODES)
        for names, options in arguments:
            parser.add_argument(*names, **options)
        parser.add_argument("--json", action="store_true", help="print one JSON document")
        parser.set_defaults(run=run)
    return made


def _arg(*names: str, **options: Any) -> Argument:
    return names, options


def _command(summary: str, description: str, *arguments: Argument) -> Callable[[Run], Run]:
    def add(run: Run) -> Run:
        _COMMANDS.append((run, summary, description, arguments))
        return run

    return add


# Arguments


def local_path(word: str) -> Path:
    """Read a path; an empty one, as of a variable that is not set, and a URL are refused."""
    if not word:
        raise argparse.ArgumentTypeError("got an empty path, expected the name of a file or directory")
    if is_url(word) and not Path(word).exists():
        cure = "commands work on this machine's files only: give a local path, or read it with IndexedShards in Python"
        raise argparse.ArgumentTypeError(f"got the URL {redacted(word)!r}, but {cure}")
    return Path(word)


def byte_count(word: str) -> int:
    """Read a number of bytes, with or without a unit of 1024, 1024**2 and so on."""
    found = re.fullmatch(r"([0-9]+)([KMGT]?)(iB|B)?", word, re.IGNORECASE)
    if not found or not int(found[1]):
        raise argparse.ArgumentTypeError(f"got {word!r}, expected a number of bytes such as 1000000, 512M or 2G")
    return int(found[1]) * _UNITS[found[2].upper()]


def positive(word: str) -> int:
    """Read a whole number of 1 or more."""
    if not (word.isascii() and word.isdecimal()) or int(word) < 1:
        raise argparse.ArgumentTypeError(f"got {word!r}, expected a whole number of 1 or more")
    return int(word)


_WORKERS = _arg("--workers", type=positive, metavar="N", help="number of processes (default: only this one)")
_DIRECTORY = _arg("directory", type=local_path, metavar="DIR", help="directory of the tar files")
_INDEXED = _arg("source", type=local_path, metavar="DIR|TAR", help="an indexed directory, or an indexed tar file")
_SOURCE = _arg("source", type=local_path, metavar="DIR|TAR", help="an indexed directory, or one tar file")


def _executor(workers: int | None) -> AbstractContextManager[Executor | None]:
    return nullcontext() if workers is None or workers == 1 else pool(workers)


# What is read


def is_set(where: Path) -> bool:
    """Whether a path stands for all shards of a directory, not for one tar file."""
    return where.is_dir() or where.name == NAME


def open_shards(where: Path) -> Iterator[ShardIndex]:
    """The indexes of a directory, a manifest or a tar file, one by one, each seen to be whole and of its shard."""
    if not is_set(where):
        yield _open_tar(where)
        return
    shards = find_shards(where)
    for number in range(len(shards.names)):
        index = shards.open_index(number)
        view = open_listed_shard(Path(shards.path(number)))
        index.check_shard(len(view), view.between)
        yield index


def _open_tar(path: Path) -> ShardIndex:
    index = fitting_index(path)
    if index is not None:
        return index
    if index_path(path).exists():
        say("warning", f"the index of {str(path)!r} is older, damaged or of another shard: the shard itself was read")
    return ShardIndex(build_index(open_shard_bytes(path), shard=str(path)), shard=str(path))


def read_members(source: Path, name: str) -> tuple[int, str, dict[str, bytes]]:
    """The number and the key of a sample, and the members to print, by their keys; no other ones are read."""
    dataset = IndexedShards(source, decode=None)
    if (found := _find(dataset, name)) is None:
        raise ValueError(f"there is no sample {name!r} in {str(source)!r}: headrace-shards ls shows all")
    at, key, member = found
    index = open_index(dataset.shard_of(at))
    there = index.layout(index.find(key))
    if member is not None and member not in there:
        raise ValueError(f"the sample {key!r} has no member {member!r}, only {', '.join(map(repr, there))}")
    wanted = None if member is None else [member]
    sample = IndexedShards(source, wanted, decode=None, max_bytes=sys.maxsize)[at]
    del sample["__key__"]
    return at, key, sample


def _find(dataset: IndexedShards, name: str) -> tuple[int, str, str | None] | None:
    """Return the number and key of the sample that a name begins with, and the member that follows a dot, if any."""
    dots = [match.start() for match in re.finditer(r"\.", name)]
    for key, member in [(name, None), *((name[:dot], name[dot + 1 :].lower()) for dot in reversed(dots))]:
        with suppress(KeyError):
            return dataset.find(key), key, member
    return None


# Commands


@_command(
    "pack files, pickles, FASTA or an LMDB into shards",
    "Pack samples into indexed shards; nothing is unpickled. Files of directories that share a name up to the"
    " first dot are one sample: a.txt and a.json make the sample 'a' with the members 'txt' and 'json', sorted by"
    " key. A FASTA record is a sample with the members 'id.txt' (the header line without '>') and 'seq.txt' (the"
    " letters). Its key is its id, the first word of the header line, with dashes for dots and slashes; or its number,"
    " if ids repeat. An entry of an LMDB is a sample with one member; known counts, such as 'length', are left out."
    " OUT must not hold other tar files; packing the same sources again changes nothing, or completes an interrupted"
    " run.",
    _arg("sources", nargs="+", type=local_path, metavar="SOURCE", help="directories, FASTA files (.gz too) or LMDBs"),
    _arg("out", type=local_path, metavar="OUT", help="output directory; created if it does not exist"),
    _arg("--from", dest="kind", choices=KINDS, help="type of the sources (default: from their names)"),
    _arg(
        "--samples-per-shard",
        type=positive,
        metavar="N",
        help="maximum samples in a shard; shards differ by at most one",
    ),
    _arg(
        "--bytes-per-shard",
        type=byte_count,
        metavar="N",
        help="maximum size of a shard, such as 512M (default 256M)",
    ),
    _arg("--n-shards", type=positive, metavar="N", help="number of shards; they differ by at most one sample"),
    _arg(
        "--bytes-per-pack",
        type=byte_count,
        metavar="N",
        help="write small samples together, N bytes of data in one member of the tar, such as 64K: short texts take an"
        " eighth of the disk, and webdataset needs a stage to unpack them (default: each file of a sample is a member)",
    ),
    _arg("--prefix", default="shard", metavar="NAME", help="first part of the shards' names (default shard)"),
    _arg("--split-at", choices=("first", "last"), help="dot of a file name that ends the key (default first)"),
    _arg("--member", metavar="NAME", help="member key of an LMDB's values, such as pkl (default bin)"),
    _arg("--key-from", choices=KEYS_FROM, help="key of a FASTA record (default: id if all differ, else number)"),
    _arg("--overwrite", action="store_true", help="replace existing shards, for example after files have changed"),
    _arg("--db", metavar="NAME", help="database of an LMDB that holds several under names"),
    _arg("--keys", type=local_path, metavar="FILE", help="file of the LMDB keys to pack, one per line (default: all)"),
    _WORKERS,
)
def _pack(options: argparse.Namespace) -> Outcome:
    names = ("samples_per_shard", "bytes_per_shard", "n_shards")
    given = {name: getattr(options, name) for name in names if getattr(options, name)}
    if len(given) > 1:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ValueError(f"{flags} exclude one another: give one of them")
    for source in options.sources:  # a second run would pack the shards
        if options.out.resolve().is_relative_to(source.resolve()):
            raise ValueError(f"OUT {str(options.out)!r} lies in the source {str(source)!r}: choose one beside it")
    with tempfile.TemporaryDirectory(prefix="headrace-shards-") as scratch:
        samples = open_source(options, Path(scratch), lambda message: say("warning", message))
        if not given or "bytes_per_shard" in given:
            packs = options.bytes_per_pack
            sizes = samples.packed_sizes(packs) if packs else samples.sizes()
            given = {"bytes_per_shard": _SHARD_BYTES, **given, "sizes": sizes}
        samples.check()
        fingerprint = stamps_fingerprint(samples.stamps())
        noted = noted_fingerprint(options.out, options.prefix)
        if noted not in (None, fingerprint) and not options.overwrite:
            message = f"{str(options.out)!r} holds shards of other files, or of files that have changed since"
            raise FileExistsError(f"{message}: pass --overwrite, or choose another directory")
        before = {path: path.stat().st_mtime_ns for path in options.out.glob("*.tar")}
        manifest = write_shards(
            samples,
            options.out,
            **given,
            bytes_per_pack=options.bytes_per_pack,
            workers=options.workers or 1,
            prefix=options.prefix,
            fingerprint=fingerprint,
            overwrite=options.overwrite,
        )
        kept = sum(path.exists() and path.stat().st_mtime_ns == saved for path, saved in before.items())
    wrote = len(manifest.shards) - kept
    if options.json:
        return 0, json_pieces({**_summary(options.out, manifest), "kept": kept, "wrote": wrote})
    return 0, text_lines(
        [_sentence("packed", manifest), *([f"kept {counted(kept, 'shard')}, wrote {wrote:,}"] if kept else [])]
    )


@_command(
    "index the tar files of a directory",
    "Write an index beside each tar file of a directory, and manifest.json last. Indexes that fit are kept: those that"
    " are newer than their shard, and have its size and three pieces of its content.",
    _DIRECTORY,
    _arg(
        "--split-at",
        choices=("first", "last"),
        default="first",
        help="dot of a member's name that ends the key (default first, as webdataset has it)",
    ),
    _arg("--drop-columns", action="store_true", help="drop columns that belong to other shards"),
    _arg("--force", action="store_true", help="index all shards again, also those whose indexes seem to fit"),
    _WORKERS,
)
def _index(options: argparse.Namespace) -> Outcome:
    with warnings.catch_warnings(record=True) as caught, _executor(options.workers) as executor:
        warnings.simplefilter("always", UserWarning)
        try:
            manifest = index_shards(
                options.directory,
                executor=executor,
                split_at=options.split_at,
                drop_columns=options.drop_columns,
                force=options.force,
            )
        except LostColumnsError as error:
            raise ValueError(f"{error} (on the command line --drop-columns)") from error
        except ManifestError as error:  # nothing is damaged: a write was stopped
            raise ValueError(str(error)) from error
    for one in caught:
        say("warning", str(one.message))
    if options.json:
        return 0, json_pieces(_summary(options.directory, manifest))
    return 0, text_lines([_sentence("indexed", manifest)])


def _summary(directory: Path, manifest: Manifest) -> dict[str, Any]:
    return {
        "directory": str(directory),
        "shards": len(manifest.shards),
        "samples": manifest.n_samples,
        "bytes": sum(shard.nbytes for shard in manifest.shards),
        "skipped": sum(shard.skipped for shard in manifest.shards),
        "members": list(manifest.members),
        "columns": [column.name for column in manifest.columns],
        "fingerprint": manifest.fingerprint,
    }


def _sentence(done: str, manifest: Manifest) -> str:
    nbytes = sum(shard.nbytes for shard in manifest.shards)
    counts = f"{counted(len(manifest.shards), 'shard')}, {counted(manifest.n_samples, 'sample')}, {nbytes:,} bytes"
    return f"{done} {counts}, members: {', '.join(manifest.members)}"


@_command(
    "read everything and report each fault",
    "Read all bytes of shards, indexes, columns and manifest, and print each fault. With --decode, also decode each"
    " sample, as training does, and print those that cannot be decoded. Exits with 1 if there is a fault.",
    _DIRECTORY,
    _arg("--decode", action="store_true", help="also decode each sample, by extension; pickles are loaded safely"),
    _WORKERS,
)
def _verify(options: argparse.Namespace) -> Outcome:
    with _executor(options.workers) as executor:
        faults = verify_shards(options.directory, executor=executor)
        if options.decode:
            paths = sorted(path for path in options.directory.glob("*.tar") if not path.name.startswith("."))
            faults += chain.from_iterable(spread(undecodable, paths, executor, what="decoding"))
    code = DAMAGE if faults else 0
    if options.json:
        return code, json_pieces({"directory": str(options.directory), "faults": [asdict(fault) for fault in faults]})
    return code, text_lines([*map(str, faults), counted(len(faults), "fault")])


def undecodable(path: Path) -> list[Fault]:
    """The samples of a shard whose bytes are what was indexed, but cannot be decoded."""
    faults = list[Fault]()
    try:
        with closing(IndexedShards(path)) as shards:
            for number in range(len(shards)):
                try:
                    shards[number]
                except DecodeError as error:
                    faults.append(Fault.of(error))
                except ShardError:  # its bytes are damaged, which was found already
                    continue
    except (OSError, ShardError):  # so is the whole shard, or its index
        return faults
    return faults


@_command(
    "list samples",
    "List samples, one per line: key, members and bytes of data, separated by tabs. With --long, list members, one per"
    " line: shard, offset of the data, bytes, XXH3 checksum (32 bits) and name. Control characters are escaped.",
    _SOURCE,
    _arg("--long", action="store_true", help="print one line per member"),
)
def _ls(options: argparse.Namespace) -> Outcome:
    indexes: Iterable[ShardIndex]
    if is_set(options.source):
        for _ in open_shards(options.source):  # nothing is printed when a shard is damaged
            pass
        indexes = open_shards(options.source)
    else:
        indexes = list(open_shards(options.source))
    if options.json:
        items = (sample for index in indexes for sample in _plain_samples(index))
        return 0, json_list({"source": str(options.source)}, "samples", items)
    lines = _long_lines if options.long else _short_lines
    return 0, text_lines(line for index in indexes for line in lines(index))


class _Member(NamedTuple):
    suffix: str
    offset: int
    size: int
    checksum: str
    name: str


def _samples(index: ShardIndex) -> Iterator[list[_Member]]:
    """The members of each sample."""
    values = zip(index.offsets.tolist(), index.sizes.tolist(), index.checksums.tolist(), strict=True)
    for key, layout in zip(index.keys, index.layout_numbers.tolist(), strict=True):
        suffixes = index.suffixes[layout]
        yield [
            _Member(suffix, offset, size, f"{checksum:08x}", f"{key}.{suffix}")
            for suffix, (offset, size, checksum) in zip(suffixes, islice(values, len(suffixes)), strict=True)
        ]


def _short_lines(index: ShardIndex) -> Iterator[str]:
    for key, members in zip(index.keys, _samples(index), strict=True):
        yield f"{_cell(key)}\t{_cell(','.join(one.suffix for one in members))}\t{sum(one.size for one in members)}"


def _long_lines(index: ShardIndex) -> Iterator[str]:
    shard = _cell(Path(index.shard).name)
    for one in chain.from_iterable(_samples(index)):
        yield f"{shard}\t{one.offset}\t{one.size}\t{one.checksum}\t{_cell(one.name)}"


def _plain_samples(index: ShardIndex) -> Iterator[dict[str, Any]]:
    for key, members in zip(index.keys, _samples(index), strict=True):
        parts = [
            {
                "member": one.suffix.lower(),
                "name": one.name,
                "offset": one.offset,
                "bytes": one.size,
                "xxh3": one.checksum,
            }
            for one in members
        ]
        yield {"key": key, "shard": index.shard, "bytes": sum(one.size for one in members), "members": parts}


def _cell(text: str) -> str:
    return text.replace("\t", "\\t")  # a tab inside a name would look like the one between columns


@_command(
    "write the bytes of a sample or a member to stdout",
    "Write the bytes of one member (KEY.MEMBER) to stdout as they are stored, or of all members of a sample"
    " (KEY), one after another; if all of them are text, each begins on a new line. Checksums are verified. With"
    " --json, the bytes are in base64.",
    _INDEXED,
    _arg("name", metavar="KEY[.MEMBER]", help="key of the sample, as ls prints it"),
)
def _cat(options: argparse.Namespace) -> Outcome:
    at, key, sample = read_members(options.source, options.name)
    if options.json:
        plain = [
            {"member": one, "bytes": len(data), "base64": base64.b64encode(data).decode()}
            for one, data in sample.items()
        ]
        return 0, json_pieces({"key": key, "index": at, "members": plain})
    return 0, texts_apart(list(sample.values()), terminal=sys.stdout is not None and sys.stdout.isatty())


@_command(
    "print counts and sizes",
    "Print how many shards, samples and bytes there are, and how large the members are.",
    _SOURCE,
)
def _info(options: argparse.Namespace) -> Outcome:
    document = describe(options.source)
    return 0, json_pieces(document) if options.json else text_lines(_info_lines(document))


def describe(source: Path) -> dict[str, Any]:
    """Counts and sizes of some shards, as `json` can write them."""
    shards, sizes = [], dict[str, list[Any]]()
    for index in open_shards(source):
        beside = index_path(index.shard)
        shards.append(
            {
                "name": Path(index.shard).name,
                "samples": index.n_samples,
                "bytes": index.shard_bytes,
                "packs": index.packs,
                "index_bytes": beside.stat().st_size if beside.exists() else None,
                "skipped": index.n_skipped,
                "skipped_names": list(index.skipped_names),
            }
        )
        for member in index.member_keys:
            positions = index.positions(member)
            sizes.setdefault(member, []).append(index.sizes[positions[positions >= 0]])
    manifest = Manifest.load(source if source.is_dir() else source.parent) if is_set(source) else None
    return {
        "source": str(source),
        "samples": sum(shard["samples"] for shard in shards),
        "bytes": sum(shard["bytes"] for shard in shards),
        "members": {member: _spread(sizes[member]) for member in sorted(sizes)},
        "columns": [{"name": one.name, "dtype": one.dtype} for one in manifest.columns] if manifest else [],
        "fingerprint": manifest.fingerprint if manifest else None,
        "shards": shards,
    }


def _spread(parts: Sequence[Any]) -> dict[str, int | float]:
    sizes = np.concatenate(parts).astype(np.uint64)
    middle = float(np.median(sizes))
    return {
        "samples": sizes.size,
        "bytes": int(sizes.sum()),
        "min": int(sizes.min()),
        "median": int(middle) if middle.is_integer() else middle,
        "max": int(sizes.max()),
    }


def _info_lines(document: dict[str, Any]) -> Iterator[str]:
    shards = document["shards"]
    yield f"{counted(len(shards), 'shard')}, {counted(document['samples'], 'sample')}, {document['bytes']:,} bytes"
    members = [{"member": name, **one} for name, one in document["members"].items()]
    yield from _table(members, "member", "samples", "bytes", "min", "median", "max")
    if document["columns"]:
        columns = [{"column": one["name"], **one} for one in document["columns"]]
        yield from _table(columns, "column", "dtype")
    heads = ["shard", "samples", "bytes", *(["packs"] if any(one["packs"] for one in shards) else []), "skipped"]
    yield from _table([{"shard": one["name"], **one} for one in shards], *heads)


def _table(rows: Iterable[dict[str, Any]], *heads: str) -> list[str]:
    return ["", *table([heads, *([row[head] for head in heads] for row in rows)])]


@_command(
    "print the size of each sample",
    "Print the bytes of one member of each sample, or the values of a column, one line per sample in the order of"
    " the shards: `headrace-shards sizes out/ seq.txt > lengths.txt`, for `headrace-batches lengths.txt --budget"
    " N`. A column takes precedence over a member of the same name; several numbers are separated by spaces.",
    _INDEXED,
    _arg("name", metavar="MEMBER|COLUMN", help="member or column to print; `info` lists them"),
)
def _sizes(options: argparse.Namespace) -> Outcome:
    sizes = sizes_to_print(IndexedShards(options.source), options.name)
    if options.json:
        return 0, json_pieces({"source": str(options.source), "name": options.name, "sizes": sizes.tolist()})
    return 0, text_lines(" ".join(map(repr, row)) for row in sizes.reshape(len(sizes), -1).tolist())


def sizes_to_print(shards: IndexedShards, name: str) -> npt.NDArray[Any]:
    """A column's values, or the bytes of a member: shape [n_samples] or [n_samples, k]."""
    if name not in shards.columns:
        if name.lower() not in shards.member_keys:
            have = ", ".join([*shards.member_keys, *sorted(shards.columns)])
            raise ValueError(f"there is neither a member nor a column {name!r}, but {have}: name one of these")
        return shards.sizes(name)
    values = np.asarray(shards.column(name))
    if values.dtype.kind not in "iuf" or values.ndim > 2 or 0 in values.shape[1:]:
        raise ValueError(f"column {name!r} holds {values.dtype} of shape {list(values.shape[1:])}, not sizes")
    if values.dtype.kind == "f":
        values = values.astype(np.float64)
        if not np.isfinite(values).all():
            at = int(np.argmin(np.isfinite(values).reshape(len(values), -1).all(axis=1)))
            raise ValueError(f"column {name!r} holds {values[at]} for sample {shards.key(at)!r}, not a size")
    return values


if __name__ == "__main__":
    sys.exit(main())
