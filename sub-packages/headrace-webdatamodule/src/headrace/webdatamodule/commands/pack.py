"""``headrace-shards pack``: files, FASTA records or the entries of an LMDB to shards."""

from __future__ import annotations

import argparse
import re
import struct
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import xxhash

from headrace.webdatamodule.commands.index import sentence, summary
from headrace.webdatamodule.commands.opening import a_path
from headrace.webdatamodule.commands.output import emit_json, emit_lines
from headrace.webdatamodule.commands.sources import fasta
from headrace.webdatamodule.commands.sources.choosing import KINDS, open_source
from headrace.webdatamodule.commands.sources.source import Source
from headrace.webdatamodule.commands.working import add_workers, positive
from headrace.webdatamodule.shards.writing.write import write_and_tell

HELP = "pack files, pickles, FASTA or an LMDB into shards"
DESCRIPTION = (
    "Pack samples into indexed shards; nothing is unpickled. Files of directories that share a name up to the first dot"
    " are one sample: a.txt and a.json make the sample 'a' with the members 'txt' and 'json', sorted by key. A FASTA"
    " record is a sample whose key is its number, with the members 'id.txt' (the line behind '>') and 'seq.txt' (the"
    " letters); with --key-from id, the key is the first word of that line, its dots and slashes as dashes."
    " An entry of an LMDB is a sample with one member. OUT may not hold other tar files;"
    " packing the same again changes nothing, and completes a run that was stopped."
)
_MOST = 256 << 20
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command's arguments."""
    add = parser.add_argument
    add("sources", nargs="+", type=a_path, metavar="SOURCE", help="directories, FASTA files (.gz too) or LMDBs")
    add("out", type=a_path, metavar="OUT", help="directory of the shards; made if need be")
    add("--from", dest="kind", choices=KINDS, help="what the sources are (default: by their names)")
    size = parser.add_mutually_exclusive_group()
    most = "samples in a shard, at most; shards are equal up to one sample"
    size.add_argument("--samples-per-shard", type=positive, metavar="N", help=most)
    most = "bytes of a shard, at most; 512M is allowed (default 256M)"
    size.add_argument("--bytes-per-shard", type=nbytes, metavar="N", help=most)
    size.add_argument("--n-shards", type=positive, metavar="N", help="number of shards, equal up to one sample")
    add("--prefix", default="shard", metavar="NAME", help="begin of the shards' names (default shard)")
    add("--split-at", choices=("first", "last"), help="dot of a file name that ends the key (default first)")
    add("--member", metavar="NAME", help="member key of an LMDB's values, such as pkl (default bin)")
    add("--key-from", choices=fasta.KEYS_FROM, help="key of a FASTA record (default number); id is its first word")
    add("--keys", type=a_path, metavar="FILE", help="which entries of an LMDB, a key a line (default: all)")
    add_workers(parser)


def run(options: argparse.Namespace) -> int:
    """Pack, and print what was written."""
    apart(options.sources, options.out)
    with tempfile.TemporaryDirectory(prefix="headrace-shards-") as scratch:
        source = open_source(
            options.sources,
            Path(scratch),
            kind=options.kind,
            split_at=options.split_at,
            member=options.member,
            keys=options.keys,
            key_from=options.key_from,
        )
        manifest, kept = write_and_tell(
            source,
            options.out,
            **shard_size(source, options),
            workers=options.workers or 1,
            prefix=options.prefix,
            fingerprint=fingerprint(source.stamps()),
        )
    wrote = len(manifest.shards) - kept
    if options.json:
        emit_json({**summary(options.out, manifest), "kept": kept, "wrote": wrote})
    else:
        emit_lines([sentence("packed", manifest), *([f"kept {kept:,}, wrote {wrote:,} shards"] if kept else [])])
    return 0


def shard_size(source: Source, options: argparse.Namespace) -> dict[str, Any]:
    """How large the shards are to be, in the words of `write_shards`.

    Args:
        source: The samples.
        options: As parsed; at most one of three sizes is given.
    """
    if options.n_shards is not None:
        return {"n_shards": options.n_shards}
    if options.samples_per_shard is not None:
        return {"samples_per_shard": options.samples_per_shard}
    return {"bytes_per_shard": options.bytes_per_shard or _MOST, "sizes": source.sizes()}


def fingerprint(stamps: Iterable[tuple[int, int]]) -> str:
    """16 hexadecimal digits that change with the files that are packed.

    Args:
        stamps: Bytes of each, and the time of its last change.

    >>> fingerprint([(1, 2)]) == fingerprint([(1, 3)])
    False
    """
    digest = xxhash.xxh3_64()
    for one in stamps:
        digest.update(struct.pack("<qq", *one))
    return digest.hexdigest()


def nbytes(word: str) -> int:
    """Read a number of bytes, with or without a unit of 1024, 1024**2 and so on.

    Args:
        word: From the command line.

    Raises:
        argparse.ArgumentTypeError: It is something else.

    >>> nbytes("100"), nbytes("2k"), nbytes("512MiB")
    (100, 2048, 536870912)
    """
    found = re.fullmatch(r"([0-9]+)([KMGT]?)(iB|B)?", word, re.IGNORECASE)
    if not found or not int(found[1]):
        raise argparse.ArgumentTypeError(f"got {word!r}, expected a number of bytes such as 1000000, 512M or 2G")
    return int(found[1]) * _UNITS[found[2].upper()]


def apart(sources: list[Path], out: Path) -> None:
    """Refuse to write into what is read: a second run would pack the shards.

    Args:
        sources: What is read.
        out: Where to write.

    Raises:
        ValueError: One lies in the other.
    """
    for source in sources:
        if out.resolve().is_relative_to(source.resolve()):
            raise ValueError(f"OUT {str(out)!r} lies in the source {str(source)!r}: choose a directory beside it")
