"""Members to samples, by webdataset's rule: the name up to the first dot is the key, the rest is the member's."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from headrace.webdatamodule.shards.errors import GroupingError
from headrace.webdatamodule.shards.format.headers import BLOCK
from headrace.webdatamodule.shards.format.walking import Member

META = re.compile(r"__[^/]*__($|/)")
RESERVED = frozenset(("__key__", "__url__", "__local_path__"))


@dataclass(frozen=True)
class Skipped:
    """A member that is no part of a sample.

    Args:
        name: Its path in the tar file.
        offset: Where its data begin, in bytes.
        reason: "directory", "label", "no extension", "hidden" or "meta".
    """

    name: str
    offset: int
    reason: str


@dataclass
class Samples:
    """The samples of a shard.

    Args:
        keys: Of the samples, in order.
        layouts: The different tuples of member keys, as written, with their numbers.
        layout_of: The number of each sample's layout.
        offsets: Where each member's data begin, in bytes; those of all samples in a row.
        sizes: Bytes of data of each member.
        skipped: What is no part of a sample.
        end: Where the last member's blocks end.
    """

    keys: list[str] = field(default_factory=list)
    layouts: dict[tuple[str, ...], int] = field(default_factory=dict)
    layout_of: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    end: int = 0


def group(members: Iterable[Member], *, shard: str = "") -> Samples:
    """Put members together that belong to one sample.

    As webdataset does, names without an extension and names whose first part begins and ends with two
    underscores are skipped; so are hidden files, which it would take for members of a sample "folder/".

    Args:
        members: As of `walk`, in the order of the tar file.
        shard: Path or URL, named in errors.

    Returns:
        The samples, and what was skipped.

    Raises:
        GroupingError: A sample's members do not stand together, or two of them have one key.

    >>> names = ["a/1.txt", "a/1.CLS", "a/2.txt", "README"]
    >>> found = group([Member(name, 512, 0, 0, "file") for name in names])
    >>> found.keys, found.layouts, [skipped.name for skipped in found.skipped]
    (['a/1', 'a/2'], {('txt', 'CLS'): 0, ('txt',): 1}, ['README'])
    """
    samples, seen = Samples(), set[str]()
    current, suffixes = None, list[str]()
    for member in members:
        samples.end = member.offset + member.size + -member.size % BLOCK
        reason = skip_reason(member)
        if reason:
            samples.skipped.append(Skipped(member.name, member.offset, reason))
            continue
        key, suffix = split_name(member.name)
        if key != current:
            if key in seen:
                message = "the sample was closed already: put its members next to one another"
                raise GroupingError(message, shard=shard, sample=key, member=member.name, offset=member.offset - BLOCK)
            _close(samples, suffixes, shard)
            seen.add(key)
            samples.keys.append(key)
            current, suffixes = key, []
        suffixes.append(suffix)
        samples.offsets.append(member.offset)
        samples.sizes.append(member.size)
    _close(samples, suffixes, shard)
    return samples


def skip_reason(member: Member) -> str:
    """Why a member is no part of a sample; empty when it is one.

    >>> [skip_reason(Member(name, 512, 0, 0, "file")) for name in ("a.b/c", "a/.b", "__a__/b.c", "__a.b")]
    ['no extension', 'hidden', 'meta', '']
    """
    if member.kind != "file":
        return member.kind
    begin = member.name.rfind("/") + 1
    dot = member.name.find(".", begin)
    if dot <= begin:
        return "hidden" if dot == begin else "no extension"
    return "meta" if member.name.startswith("__") and META.match(member.name) else ""


def split_name(name: str) -> tuple[str, str]:
    """The sample's key and the member's, cut at the first dot of the last part of the path.

    Args:
        name: Path of a member that has such a dot.

    >>> split_name("a.b/c.tar.gz")
    ('a.b/c', 'tar.gz')
    """
    dot = name.index(".", name.rfind("/") + 1)
    return name[:dot], name[dot + 1 :]


def _close(samples: Samples, suffixes: list[str], shard: str) -> None:
    if not suffixes:
        return
    layout = tuple(suffixes)
    if layout not in samples.layouts:
        _check_layout(samples, layout, shard)
    samples.layout_of.append(samples.layouts.setdefault(layout, len(samples.layouts)))


def _check_layout(samples: Samples, layout: tuple[str, ...], shard: str) -> None:
    folded: set[str] = set()
    for suffix, offset in zip(layout, samples.offsets[-len(layout) :], strict=True):
        message = ""
        if suffix.lower() in folded:
            message = "the sample has two members of this key, case aside: rename or remove one"
        elif suffix.lower() in RESERVED:
            message = "the member has a key that readers use for themselves: rename it"
        if message:
            key = samples.keys[-1]
            raise GroupingError(message, shard=shard, sample=key, member=f"{key}.{suffix}", offset=offset - BLOCK)
        folded.add(suffix.lower())
