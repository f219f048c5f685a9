"""Tar files as Python's own `tarfile` writes them, to compare ours with."""

import io
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from headrace.webdatamodule.shards.writing.shard_task import ShardFile


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
    with ShardFile(path) as shard:
        for key, sample in samples:
            shard.add(key, sample)
        shard.finish_tar()
        shard.publish()
