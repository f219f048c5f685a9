"""``headrace-shards cat``: the bytes of a sample."""

from __future__ import annotations

import argparse
import base64
import sys
from pathlib import Path

from headrace.webdatamodule.commands.opening import a_path
from headrace.webdatamodule.commands.output import emit_bytes, emit_json
from headrace.webdatamodule.shards.reading.dataset import IndexedShards
from headrace.webdatamodule.shards.reading.sources import open_index

HELP = "write the bytes of a sample or a member to stdout"
DESCRIPTION = (
    "Write the bytes of one member (KEY.MEMBER) to stdout as they are stored, or those of all members of a sample"
    " (KEY), one after another; where all of several are texts, each begins on a line of its own. Checksums are"
    " verified. With --json, the bytes are in base64."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command's arguments."""
    parser.add_argument("source", type=a_path, metavar="DIR|TAR", help="an indexed directory, or an indexed tar file")
    parser.add_argument("name", metavar="KEY[.MEMBER]", help="of the sample, as ls prints it")


def run(options: argparse.Namespace) -> int:
    """Print the bytes."""
    key, member = parted(options.name)
    index, sample = read(options.source, key, member)
    if options.json:
        plain = [{"member": one, "bytes": len(data), "base64": encoded(data)} for one, data in sample.items()]
        emit_json({"key": key, "index": index, "members": plain})
    else:
        emit_bytes(apart(list(sample.values()), terminal=sys.stdout is not None and sys.stdout.isatty()))
    return 0


def parted(name: str) -> tuple[str, str | None]:
    """Cut a name into a sample's key and a member's, which is None when there is no dot.

    Args:
        name: From the command line; the key ends at the first dot of the last part of the path.

    >>> parted("a.b/c.tar.GZ"), parted("a.b/c")
    (('a.b/c', 'tar.gz'), ('a.b/c', None))
    """
    dot = name.find(".", name.rfind("/") + 1)
    return (name, None) if dot < 0 else (name[:dot], name[dot + 1 :].lower())


def read(source: Path, key: str, member: str | None) -> tuple[int, dict[str, bytes]]:
    """The members to print; no other ones are read, and none is too large.

    Args:
        source: An indexed directory, or an indexed tar file.
        key: The sample's key.
        member: A member's key, in lower case; None for all.

    Returns:
        The sample's position, and its bytes by the keys of members.

    Raises:
        ShardError: Something is missing or damaged.
        ValueError: There is no such sample, or it does not have the member.
    """
    dataset = IndexedShards(source, decode=None)
    try:
        at = dataset.find(key)
    except KeyError:
        raise ValueError(f"there is no sample {key!r} in {str(source)!r}: headrace-shards ls shows all") from None
    index = open_index(dataset.shard_of(at))
    held = index.layout(index.find(key))
    if member is not None and member not in held:
        raise ValueError(f"the sample {key!r} has no member {member!r}, only {', '.join(map(repr, held))}")
    wanted = None if member is None else [member]
    sample = IndexedShards(source, wanted, decode=None, max_bytes=sys.maxsize)[at]
    del sample["__key__"]
    return at, sample


def apart(members: list[bytes], *, terminal: bool) -> list[bytes]:
    r"""Several texts with line ends between them, and at their end on a terminal; all else stays as it is.

    Args:
        members: Their bytes.
        terminal: Whether a person reads them.

    >>> apart([b"a", b"b\n", b"c"], terminal=False), apart([b"a", b"\xff"], terminal=True)
    ([b'a', b'\n', b'b\n', b'c'], [b'a', b'\xff'])
    """
    texts = [data for data in members if data]
    if len(texts) < 2 or not all(map(is_text, texts)):
        return members
    ends = [b"" if data.endswith(b"\n") else b"\n" for data in texts]
    if not terminal:
        ends[-1] = b""
    return [piece for pair in zip(texts, ends, strict=True) for piece in pair if piece]


def is_text(data: bytes) -> bool:
    """Whether bytes are a text in UTF-8.

    Args:
        data: The bytes.
    """
    try:
        return "\0" not in data.decode()
    except UnicodeDecodeError:
        return False


def encoded(data: bytes) -> str:
    """Bytes in base64.

    Args:
        data: The bytes.
    """
    return base64.b64encode(data).decode("ascii")
