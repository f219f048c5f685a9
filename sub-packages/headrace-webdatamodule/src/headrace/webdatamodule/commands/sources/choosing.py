"""Paths on the command line to one source of samples."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace.webdatamodule.commands.sources import entries, fasta
from headrace.webdatamodule.commands.sources.files import find_files
from headrace.webdatamodule.commands.sources.source import Chain, Source

KINDS = ("files", "fasta", "lmdb")
_FOR = {"--split-at": "files", "--member": "lmdb", "--key-from": "fasta"}


def kind_of(path: Path) -> str:
    """What a path holds, by its form and name.

    Args:
        path: A directory or a file.

    Raises:
        FileNotFoundError: There is nothing.
        ValueError: It is a file of another kind.
    """
    if not path.exists():
        raise FileNotFoundError(f"there is no {str(path)!r}")
    name = path.name.lower()
    if name.endswith(entries.ENDINGS) or (path / "data.mdb").exists():
        return "lmdb"
    if path.is_dir():
        return "files"
    if name.endswith(fasta.ENDINGS):
        return "fasta"
    allowed = f"a directory, FASTA ({', '.join(fasta.PLAIN)}, each also with .gz) or an LMDB"
    raise ValueError(f"{str(path)!r} cannot be packed: give {allowed}, or say what it is with --from")


def open_source(
    paths: Sequence[Path],
    scratch: Path,
    *,
    kind: str | None = None,
    split_at: str | None = None,
    member: str | None = None,
    keys: Path | None = None,
    key_from: str | None = None,
) -> Source:
    """Open what is to be packed.

    Args:
        paths: All of one kind.
        scratch: A directory for temporary files.
        kind: One of `KINDS`; by the paths when None.
        split_at: For files; see `find_files`. "first" when None.
        member: For LMDBs; see `Entries`. "bin" when None.
        keys: For one LMDB: a file with one key a line; all keys when None.
        key_from: For FASTA; see `Fasta`. "number" when None.

    Returns:
        The samples.

    Raises:
        OSError: Something cannot be read.
        ShardError: Files do not fit together.
        ValueError: The paths are of several kinds, or do not hold what they should.
    """
    kinds = {kind} if kind else {kind_of(path) for path in paths}
    if len(kinds) > 1:
        raise ValueError(f"the sources are of several kinds ({', '.join(sorted(kinds))}): pack each kind by itself")
    _refuse_unused(kinds, {"--split-at": split_at, "--member": member, "--key-from": key_from})
    if keys is not None and (kinds != {"lmdb"} or len(paths) > 1):
        raise ValueError("--keys chooses entries of one LMDB: leave it out, or give one LMDB")
    if kinds == {"files"}:
        for path in paths:
            if not path.is_dir():
                raise NotADirectoryError(f"{str(path)!r} is no directory")
        return find_files(paths, split_at=split_at or "first")
    if kinds == {"lmdb"}:
        wanted = None if keys is None else read_keys(keys)
        return Chain([entries.Entries(path, "bin" if member is None else member, wanted) for path in paths])
    return _records(paths, scratch, key_from or "number")


def read_keys(path: Path) -> list[str]:
    """Read keys, one a line; empty lines do not count.

    Args:
        path: The file.

    Raises:
        ValueError: There are none.
    """
    keys = [os.fsdecode(line) for line in path.read_bytes().splitlines() if line]
    if not keys:
        raise ValueError(f"{str(path)!r} holds no keys: write one a line")
    return keys


def _refuse_unused(kinds: set[str], options: Mapping[str, str | None]) -> None:
    for name, value in options.items():
        if value is not None and kinds != {_FOR[name]}:
            found = ", ".join(sorted(kinds))
            raise ValueError(f"{name} is for {_FOR[name]}, but the sources are {found}: leave it out")


def _records(paths: Sequence[Path], scratch: Path, key_from: str) -> Source:
    records: list[fasta.Fasta] = []
    first = 0
    for path in paths:
        records.append(fasta.Fasta(fasta.plain(path, scratch), first, name=str(path), key_from=key_from))
        first += len(records[-1])
    if key_from == "id":
        fasta.refuse_twins(records)
    return Chain(records)
