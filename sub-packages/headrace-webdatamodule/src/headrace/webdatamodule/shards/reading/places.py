"""What was given in the place of shards, and what to say where it is none."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

_PATTERN = re.compile(r"[*?\[]|\{[^{}]*(\.\.|,)[^{}]*\}")
_FAR_PATTERN = re.compile(r"\*[^/?#]*\.tar|\{[0-9]+\.\.[0-9]+\}")


def missing(path: Path) -> FileNotFoundError:
    """The error of a path where nothing is.

    Args:
        path: As it was given.
    """
    if _PATTERN.search(str(path)):
        cure = "patterns and braces are not expanded; give the directory, or a list of tar files"
        return FileNotFoundError(f"there is no {str(path)!r}: {cure}")
    return FileNotFoundError(f"there is no {str(path)!r}: give a directory of shards, its manifest.json or tar files")


def refuse_patterns(urls: Sequence[str]) -> None:
    """Refuse patterns of URLs.

    Args:
        urls: Of shards.

    Raises:
        ValueError: One has braces or asterisks.

    >>> refuse_patterns(["s3://bucket/a-{000000..000005}.tar"])
    Traceback (most recent call last):
    ValueError: 's3://bucket/a-{000000..000005}.tar' is a pattern, and none is expanded: give the directory's URL
    """
    for url in urls:
        if _FAR_PATTERN.search(url):
            raise ValueError(f"{url!r} is a pattern, and none is expanded: give the directory's URL")


def refuse_others(paths: Sequence[Path]) -> None:
    """Refuse a list of shards that holds something else.

    Args:
        paths: As they were given, at least one.

    Raises:
        FileNotFoundError: A pattern.
        ValueError: A directory, or a file that is no tar.
    """
    for path in paths:
        if path.is_dir():
            cure = "a list is one of tar files; for several sources give IndexedWebDataModule {name: directory}"
            raise ValueError(f"{str(path)!r} is a directory: {cure}")
        if not path.exists() and _PATTERN.search(str(path)):
            raise missing(path)
        if path.exists() and not path.name.lower().endswith(".tar") and not _has_index(path):
            raise ValueError(f"{str(path)!r} is not a tar: headrace-shards pack makes shards of files, FASTA and LMDBs")


def _has_index(path: Path) -> bool:
    return os.path.exists(f"{path}.hri")  # noqa: PTH110 - a text
