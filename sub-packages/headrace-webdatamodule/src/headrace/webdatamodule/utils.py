"""`pickles_to_tars`: files of pickles to tar shards that webdataset and headrace read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from headrace.webdatamodule._shared.checks import checked_int
from headrace.webdatamodule.shards.format.files import expanded, output_directory
from headrace.webdatamodule.shards.writing.pack_files import pack_files

__all__ = ["pickles_to_tars"]


def pickles_to_tars(
    dir_input: str | os.PathLike[str],
    input_prefix_subset: Iterable[str],
    input_suffix: str | Iterable[str],
    dir_output: str | os.PathLike[str],
    output_prefix: str,
    func_output_data: Callable[[str, dict[str, bytes]], Mapping[str, Any]] | None = None,
    min_num_shards: int | None = None,
) -> None:
    """Pack `{dir_input}/{name}.{suffix}` into `{dir_output}/{output_prefix}-000000.tar` and so on, with indexes.

    The bytes are copied; nothing is unpickled. A shard gets its name when it is on the disk, whole. When the function
    is called again, shards are kept while the sizes and times of the files stay the same; when one changes, all are
    written again. After a run that was killed, the next one writes the rest.

    Args:
        dir_input: Directory of the files.
        input_prefix_subset: The names of the samples; dots become dashes in their keys.
        input_suffix: Suffix of the files, or several, which are also the member keys.
        dir_output: Where to write; made if need be.
        output_prefix: First part of the shards' names.
        func_output_data: Makes a sample of its key and {suffix: bytes}: a dictionary of "__key__" and {member key:
            bytes}. None keeps the bytes under their suffixes. With a function, shards are always written anew.
        min_num_shards: Number of shards, but not more than samples. None: 16, or as many as keep shards below 256 MiB.

    Raises:
        FileNotFoundError: Files are missing; raised before anything is written.
        FileExistsError: Other tar files, or shards that hold other samples, lie there.
        TypeError: `min_num_shards` is no int.
        ValueError: There are no names, one of these numbers is not allowed, or `dir_output` is a URL.
        ShardError: Two names get the same key, or a sample cannot be stored.
        ManifestError: Files have changed, and a manifest has columns that belong to the shards as they are.

    >>> import pickle, tempfile
    >>> from pathlib import Path
    >>> from headrace.webdatamodule import IndexedShards
    >>> source, target = tempfile.mkdtemp(), tempfile.mkdtemp()
    >>> for i in range(4):
    ...     _ = Path(source, f"sample{i}.mydata.pt").write_bytes(pickle.dumps(i))
    >>> pickles_to_tars(source, [f"sample{i}" for i in range(4)], "mydata.pt", target, "myshards", min_num_shards=2)
    >>> sorted(path.name for path in Path(target).glob("*.tar"))
    ['myshards-000000.tar', 'myshards-000001.tar']
    """
    if isinstance(input_prefix_subset, str):
        raise ValueError(f"input_prefix_subset must be a list of names, got the text {input_prefix_subset!r}")
    if min_num_shards is not None:
        min_num_shards = checked_int("min_num_shards", min_num_shards, 1, cure="None takes a fitting number")
    suffixes = [input_suffix] if isinstance(input_suffix, str) else list(input_suffix)
    pack_files(
        expanded(dir_input),
        list(input_prefix_subset),
        suffixes,
        output_directory("dir_output", dir_output),
        n_shards=min_num_shards,
        prefix=output_prefix,
        convert=func_output_data,
    )
