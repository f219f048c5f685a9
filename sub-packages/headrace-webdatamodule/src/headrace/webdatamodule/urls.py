"""Where shards are, and which places are refused."""

import os
import re
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import webdataset as wds

from headrace.webdatamodule.shards.writing.plan import find_shards


def check_place(name: str, place: object, *, allow_pipe: bool) -> str:
    """Refuse places that are no local directory; `pipe:` is for those who ask for it.

    webdataset opens a URL by its scheme: `pipe:` runs a shell, others start curl or a cloud's command
    line. A place in a configuration file must not do so unseen.

    Args:
        name: The argument's name, for errors.
        place: What was given.
        allow_pipe: Whether `pipe:` was asked for.

    Returns:
        The place as text.

    Raises:
        TypeError: Neither text nor a path.
        ValueError: A URL that is not allowed.

    >>> check_place("dirs_tars_wds[Split.train]", "pipe:cat a.tar", allow_pipe=False)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: dirs_tars_wds[Split.train] is 'pipe:cat a.tar', which would run a shell command...
    """
    if not isinstance(place, str | os.PathLike):
        raise TypeError(f"{name} must be the path of a directory, got {place!r}")
    text = os.fspath(place)
    scheme = scheme_of(text)
    if scheme == "pipe" and not allow_pipe:
        cure = "If you trust where this text comes from, say allow_pipe=True; otherwise give a local directory"
        raise ValueError(f"{name} is {text!r}, which would run a shell command. {cure}")
    if scheme not in ("", "file", "pipe"):
        cure = "copy the shards to a local directory and give that"
        raise ValueError(f"{name} is {text!r}: shards are not read from {scheme!r} URLs; {cure}")
    return text


def scheme_of(place: str) -> str:
    """The URL scheme of a place in lower case, "" for a path.

    Args:
        place: A path or a URL. A single letter before the colon is a drive, not a scheme.

    >>> [scheme_of(place) for place in ("/data", "C:/data", "PIPE:cat a", "s3://bucket/a", "file:///data")]
    ['', '', 'pipe', 's3', 'file']
    """
    match = re.match(r"\s*([a-zA-Z][a-zA-Z0-9+.-]+):", place)
    return match[1].lower() if match else ""


def local_directory(place: str) -> Path:
    """The absolute path of a place that `check_place` let pass and that is not `pipe:`.

    Args:
        place: A path or a `file:` URL.

    Returns:
        An absolute path: no text that begins with a slash is taken for a URL later on.
    """
    path = url2pathname(urlsplit(place).path) if scheme_of(place) == "file" else place
    return Path(path).expanduser().absolute()


def shard_urls(place: str, prefix: str) -> list[str]:
    """The shards of a place, sorted.

    Args:
        place: What `check_place` returned.
        prefix: Begin of the shards' names.

    Returns:
        Absolute paths; or, for `pipe:`, the commands, with webdataset's braces expanded.

    Raises:
        FileNotFoundError: There are none.
    """
    if scheme_of(place) == "pipe":
        return [str(url) for url in wds.shardlists.expand_urls(place.strip())]
    directory = local_directory(place)
    shards = find_shards(directory, prefix)
    if not shards:
        what = "has no shard" if directory.is_dir() else "is no directory, so there is no shard"
        raise FileNotFoundError(f"{directory} {what} named {prefix}-*.tar. {_cure(directory)}")
    return [str(shard) for shard in shards]


def prefixes(directory: Path) -> list[str]:
    """The prefixes of the shards that lie in a directory, sorted.

    Args:
        directory: Where to look; need not exist.
    """
    names = (path.stem for path in directory.glob("*-*.tar") if not path.name.startswith("."))
    return sorted({name.rpartition("-")[0] for name in names} - {""})


def _cure(directory: Path) -> str:
    found = prefixes(directory)
    if not found:
        return "Correct dirs_tars_wds or prefix_tars_wds, or write the shards first"
    if len(found) == 1:
        return f"The shards there have another prefix: say prefix_tars_wds={found[0]!r}"
    named = ", ".join(map(repr, found[:5])) + (f" and {len(found) - 5} more" if len(found) > 5 else "")
    return f"The shards there have the prefixes {named}: say which with prefix_tars_wds, such as {found[0]!r}"
