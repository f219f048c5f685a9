"""The data of a run: where its samples are, their sizes, and their members as files."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from headrace.runs.packages import SIZE_AWARE, WEBDATAMODULE, needed

_NAMED = re.compile(r"([\w.-]+)=(.+)", re.DOTALL)
_LONGEST = 100  # of a part of a file name
ROWS = "samples.json"


def open_data(words: Sequence[str]) -> Any:
    """Open shards: those of one source, in one folder or several, or of several, each named as ``web=shards/web``.

    Returns:
        `IndexedShards`; members stay bytes.
    """
    with needed(WEBDATAMODULE, "--data"):
        from headrace.webdatamodule import IndexedShards
    named = {word: None if Path(word).exists() else _NAMED.fullmatch(word) for word in words}
    if bare := [word for word, match in named.items() if match is None]:
        if len(bare) < len(named):
            raise ValueError(
                "--data must be FOLDER for each folder of one source, or NAME=FOLDER for each of several sources, got "
                + " ".join(words)
            )
        if len(bare) < len(words):
            raise ValueError(f"--data must give each folder once, got {' '.join(words)}")
        source: Any = bare[0] if len(bare) == 1 else [tar for word in bare for tar in _tars(Path(word))]
        return IndexedShards(source, decode=None, max_bytes=sys.maxsize)
    places = {match[1]: match[2] for match in named.values() if match is not None}
    if len(places) < len(words):
        raise ValueError(f"--data must give each name once, got {' '.join(words)}")
    return IndexedShards(places, decode=None, max_bytes=sys.maxsize)


def _tars(place: Path) -> list[Path]:
    """The tars of a folder, as its manifest orders them; else a tar, or a pattern of tars."""
    from headrace.webdatamodule import Manifest

    return [place / entry.name for entry in Manifest.load(place).shards] if place.is_dir() else [place]


def parts_of(data: Any, words: Sequence[str]) -> Sequence[Any]:
    """The shards of each source or folder, in order; a column belongs to a folder."""
    return [data] if len(words) == 1 else [open_data([word]) for word in words]


def check_data(data: Any, n_samples: int, loader: Mapping[str, Any] | None) -> bool:
    """Refuse data that a run did not read; shards may have been appended since.

    Returns:
        Whether the state says which data they were: that of a sampler by itself says their number alone.

    Raises:
        ValueError: They are others.
    """
    own = data.prefix_fingerprint(n_samples) if len(data) >= n_samples else None
    if own is None:
        raise ValueError(
            f"the run has {n_samples} samples, and --data {len(data)}: give every folder of the run, in its order, as "
            "--data A --data B"
        )
    if loader is None:
        return False
    if loader["fingerprint"] != own:
        raise ValueError(
            "--data are not the data of the run: give every folder of the run, in its order, as --data A --data B, or "
            "as --data NAME=A --data NAME=B if they are sources with names of their own. For a dataset of your own "
            "around shards, leave out --data: indices are those of that dataset. The state has "
            f"fingerprint={loader['fingerprint']!r}, --data have {own!r}"
        )
    return True


def read_sizes(name: str, parts: Sequence[Any], column: str | None) -> Any:
    """The size of each sample: a column or a member of the data, or a file as ``headrace-batches`` reads it."""
    if parts and column is None and not {name, name.lower()}.isdisjoint(_names(parts)):
        from headrace.webdatamodule.loading.sizes import sizes_of_shards

        sizes = [sizes_of_shards(part, None, name) for part in parts]
        if len(sizes) == 1:
            return sizes[0]
        import numpy as np

        return np.concatenate(sizes)
    with needed(SIZE_AWARE, "--sizes"):
        from headrace.size_aware_batching.sizes.files import sizes_of_files
    if parts and not Path(name).exists():
        without = any(not part.columns for part in parts)
        cure = "; a column belongs to a folder: give each folder as --data FOLDER, no pattern of tars" * without
        raise ValueError(
            "--sizes must be a file, or a column or a member that all data have, "
            f"{', '.join(sorted(_names(parts)))}; got {name!r}{cure}"
        )
    return sizes_of_files([Path(name)], column)


def _names(parts: Sequence[Any]) -> set[str]:
    each = [{*part.columns, *part.member_keys} for part in parts]
    return set.intersection(*each)


def rows_of_step(step: int, ranks: Sequence[Sequence[Any]], data: Any, sizes: Any = None) -> list[dict[str, Any]]:
    """A row for each sample of each rank; as `ResumableLoader.samples_of_step`, with sizes, and ranges of pieces."""
    rows = []
    for rank, keys in enumerate(ranks):
        for key in keys:
            row = {"step": step, "rank": rank, "index": int(key)}
            if not isinstance(key, int):  # a piece of a long sample
                row |= {"start": int(key.start), "stop": int(key.stop)}
            if data is not None:
                from headrace.webdatamodule.loading.sample_places import sample_place

                row |= sample_place(data, int(key))
            if sizes is not None:
                row["size"] = sizes[int(key)].tolist()
            rows.append(row)
    return rows


def export(rows: Sequence[Mapping[str, Any]], data: Any, folder: Path) -> int:
    """Write the members of samples as files, and the rows with their files as ``samples.json``.

    A file's name begins with the sample's index, and has its key and the member with every special character escaped:
    whatever a key is, the file lies in the folder.

    Returns:
        The number of files of members.

    Raises:
        FileExistsError: The folder has something in it.
        ShardError: A shard is damaged.
    """
    if folder.exists() and next(folder.iterdir(), None) is not None:
        raise FileExistsError(f"{folder}: the folder must be empty, so that nothing is overwritten: choose another one")
    indices = list(dict.fromkeys(row["index"] for row in rows))  # a sample may come on several ranks
    samples = data.__getitems__(indices)  # all of them, so that a damaged one leaves no half of an export
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[int, dict[str, str]] = {index: {} for index in indices}
    for index, sample in zip(indices, samples, strict=True):
        key = _plain(sample.pop("__key__"))
        for member, content in sample.items():
            name = files[index][member] = f"{index:08d}-{key}.{_plain(member)}"
            with (folder / name).open("xb") as file:
                file.write(content)
    listed = [{**row, "files": files[row["index"]]} for row in rows]
    with (folder / ROWS).open("x", encoding="ascii") as file:
        file.write(json.dumps(listed, indent=1) + "\n")
    return sum(map(len, files.values()))


def _plain(text: str) -> str:
    """A text as a part of a file name on every system; a long one is cut."""
    return quote(text, safe="", errors="surrogatepass").replace("~", "%7E")[:_LONGEST]
