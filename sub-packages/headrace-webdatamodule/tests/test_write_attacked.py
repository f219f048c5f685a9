"""A directory that somebody prepared, and shards that rotted between two runs of the writer."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from headrace.webdatamodule import (
    IndexedShards,
    ManifestError,
    ShardError,
    add_column,
    verify_shards,
    write_shards,
)

SAMPLES = [(f"s{i:03d}", {"txt": b"%d" % i * 300}) for i in range(300)]

WRITE = """
import sys
from headrace.webdatamodule import write_shards
write_shards([("a", {"t": b"x"}), ("b", {"t": b"y"})], sys.argv[1], n_shards=2, workers=1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", [".headrace.lock", "shard.plan.json", ".shard-000000.tar.0-ab.part"])
def test_a_fifo_in_the_way_keeps_nobody_waiting(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    done = subprocess.run([sys.executable, "-c", WRITE, str(tmp_path)], capture_output=True, text=True, check=False)
    if name == ".headrace.lock":
        assert done.returncode == 0, done.stderr
        assert verify_shards(tmp_path) == []
    else:
        assert done.returncode == 1
        assert name in done.stderr


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / ".headrace.lock").symlink_to(tmp_path / "elsewhere")
    write_shards(SAMPLES, tmp_path / "set", n_shards=1, workers=1)
    assert not (tmp_path / "elsewhere").exists()


def test_what_rotted_where_the_next_run_looks_is_written_again(tmp_path: Path) -> None:
    write_shards(SAMPLES, tmp_path, n_shards=3, workers=1)
    shard = tmp_path / "shard-000001.tar"
    times = shard.stat()
    data = bytearray(shard.read_bytes())
    at = data.index(SAMPLES[150][1]["txt"])  # the middle sample
    data[at + 7] ^= 1
    shard.write_bytes(data)
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
    (tmp_path / "manifest.json").unlink()
    write_shards(SAMPLES, tmp_path, n_shards=3, workers=1)
    assert verify_shards(tmp_path) == []


@pytest.mark.parametrize("count", [60, 300_000], ids=["read", "mapped"])
def test_a_column_that_rotted_is_an_error(tmp_path: Path, count: int) -> None:
    write_shards([(f"s{i}", {"t": b"x"}) for i in range(60)], tmp_path, n_shards=1, workers=1)
    add_column(tmp_path, "tokens", np.arange(60 * (count // 60)).reshape(60, -1))
    (file,) = tmp_path.glob("tokens*.npy")
    data = bytearray(file.read_bytes())
    data[-8] ^= 64
    file.write_bytes(data)
    with pytest.raises(ManifestError, match="not those that were stored"):
        IndexedShards(tmp_path).column("tokens")


class Three:
    def __len__(self) -> int:
        return 3

    def __getitem__(self, number: int) -> tuple[str, dict[str, bytes]]:
        return f"k{number}", {"t": b"x"}


def test_a_class_is_a_function_that_makes_the_samples(tmp_path: Path) -> None:
    assert write_shards(Three, tmp_path, n_shards=1, workers=1).n_samples == 3


def test_a_directory_in_place_of_a_shard_is_named(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises((OSError, ShardError), match=r"manifest\.json"):
        write_shards(SAMPLES, tmp_path, n_shards=1, workers=1)
