"""Tar files as Python's own `tarfile` writes them, to compare ours with."""

import io
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from headrace.webdatamodule import write_tars


def made_by_tarfile(samples: Iterable[tuple[str, Mapping[str, bytes]]]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT, encoding="utf-8") as tar:
        for key, sample in samples:
            for suffix, data in sample.items():
                header = tarfile.TarInfo(f"{key}.{suffix}")
                header.size = len(data)
                tar.addfile(header, io.BytesIO(data))
    return stream.getvalue()


def write_tar(path: Path, samples: Iterable[tuple[str, Mapping[str, bytes]]]) -> None:
    """Write one tar file without an index."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        [made] = write_tars(list(samples), folder, n_shards=1)
        made.replace(path)
