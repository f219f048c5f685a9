"""The index of a whole set: one file that says what all shards' own indexes say, and is believed only where it fits."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.webdatamodule import (
    DamagedIndexError,
    IndexedShards,
    IndexVersionError,
    Manifest,
    ShardError,
    ShardIndex,
    StaleIndexError,
    add_column,
    index_shards,
    verify_shards,
    write_tars,
)
from headrace.webdatamodule.shards.index.checksums import checksum64
from headrace.webdatamodule.shards.index.consolidated import (
    SET_INDEX_NAME,
    Listed,
    SetIndex,
    head_bytes,
    write_set_index,
)
from headrace.webdatamodule.shards.index.shard_index import index_path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tars([(f"s{n * n:05d}", {"txt": b"x" * n, "cls": b"1"}) for n in range(40)], tmp_path, n_shards=3)
    index_shards(tmp_path)
    return tmp_path


def opened(folder: Path) -> SetIndex:
    index = SetIndex.open(folder, Listed.of(Manifest.load(folder)))
    assert index is not None
    return index


def test_it_says_what_the_shards_own_indexes_say(folder: Path) -> None:
    manifest, index = Manifest.load(folder), opened(folder)
    assert len(index) == 3
    for number, entry in enumerate(manifest.shards):
        path = folder / entry.name
        one, own = index.shard(number, str(path)), ShardIndex.open(path)
        one.check_self()
        assert one.shard == own.shard
        assert bytes(one.data) == index_path(path).read_bytes()
        assert list(one.keys) == list(own.keys)
        assert np.array_equal(one.offsets, own.offsets)


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir()) if sys.platform == "linux" else 0


@pytest.mark.slow
def test_a_large_one_is_one_map(tmp_path: Path) -> None:
    write_tars([(f"{n * n}", {"txt": b""}) for n in range(16_000)], tmp_path, n_shards=4)
    manifest = index_shards(tmp_path)
    before = descriptors()
    index = opened(tmp_path)
    indexes = [index.shard(number, entry.name) for number, entry in enumerate(manifest.shards)]
    assert [one.n_samples for one in indexes] == [4000] * 4
    assert descriptors() - before == (1 if sys.platform == "linux" else 0)
    os.truncate(tmp_path / SET_INDEX_NAME, (tmp_path / SET_INDEX_NAME).stat().st_size - 100)
    assert indexes[0].key(5) == "25"  # it ends before the cut
    with pytest.raises(DamagedIndexError, match=r"the index had \d+ bytes when it was opened"):
        indexes[3].key(5)


def test_a_column_changes_nothing_and_a_shard_all(folder: Path) -> None:
    before = (folder / SET_INDEX_NAME).stat().st_mtime_ns
    add_column(folder, "n", np.arange(40))
    assert len(opened(folder)) == 3
    assert verify_shards(folder) == []
    index_shards(folder)
    assert (folder / SET_INDEX_NAME).stat().st_mtime_ns == before
    write_tars([("t", {"txt": b""})], folder, n_shards=1, prefix="more")
    manifest = index_shards(folder, drop_columns=True)
    assert len(opened(folder)) == 4
    fewer = replace(manifest, shards=manifest.shards[:3])
    assert SetIndex.open(folder, Listed.of(fewer)) is None
    fewer.save(folder)
    assert "belongs to another manifest" in str(verify_shards(folder)[0])


def test_a_set_of_one_shard_has_none(tmp_path: Path) -> None:
    write_tars([("a", {"txt": b""})], tmp_path, n_shards=1)
    (tmp_path / SET_INDEX_NAME).touch()
    manifest = index_shards(tmp_path)
    assert not (tmp_path / SET_INDEX_NAME).exists()
    assert SetIndex.open(tmp_path, Listed.of(manifest)) is None


def test_an_index_that_is_not_the_manifests_is_not_taken_in(folder: Path) -> None:
    manifest = Manifest.load(folder)
    first, second, _ = manifest.shards
    index_path(folder / first.name).write_bytes(index_path(folder / second.name).read_bytes())
    kept = (folder / SET_INDEX_NAME).read_bytes()
    with pytest.raises(StaleIndexError, match="does not match the manifest"):
        write_set_index(folder, manifest, force=True)
    assert (folder / SET_INDEX_NAME).read_bytes() == kept
    assert not list(folder.glob(".*"))


def test_an_index_in_it_that_is_not_the_manifests_is_not_read(folder: Path) -> None:
    manifest = Manifest.load(folder)
    data = bytearray((folder / SET_INDEX_NAME).read_bytes())
    swapped = replace(manifest, shards=(manifest.shards[0], *manifest.shards[:0:-1]))
    data[16:32] = Listed.of(swapped).fingerprint
    begin = head_bytes(3)
    data[begin - 8 : begin] = checksum64(bytes(data[: begin - 8])).to_bytes(8, "little")
    index = SetIndex(bytes(data), Listed.of(swapped))
    assert index.shard(0, "a").n_samples == 13
    for number in (1, 2):
        with pytest.raises(StaleIndexError, match="in that of the set does not match"):
            index.shard(number, "b")


def check_all(data: bytes, manifest: Manifest) -> None:
    for number in range(3):
        SetIndex(data, Listed.of(manifest)).shard(number, "a.tar").check_self()


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_each_changed_byte_is_found(tmp_path_factory: pytest.TempPathFactory, at: int, change: int) -> None:
    folder = tmp_path_factory.getbasetemp() / "changed"
    if not folder.exists():
        write_tars([(f"{n * n}", {"txt": b"%d" % n}) for n in range(9)], folder, n_shards=3)
        index_shards(folder)
    manifest = Manifest.load(folder)
    data = bytearray((folder / SET_INDEX_NAME).read_bytes())
    data[at % len(data)] ^= change
    with pytest.raises((DamagedIndexError, IndexVersionError, StaleIndexError)):
        check_all(bytes(data), manifest)


def test_each_cut_is_found_and_named(folder: Path) -> None:
    manifest, data = Manifest.load(folder), (folder / SET_INDEX_NAME).read_bytes()
    for length in [*range(100), len(data) - 1, len(data) // 2]:
        with pytest.raises(DamagedIndexError):
            SetIndex(data[:length], Listed.of(manifest))
    with pytest.raises(DamagedIndexError, match="it is cut"):
        SetIndex(data + b"0", Listed.of(manifest))
    (folder / SET_INDEX_NAME).write_bytes(data[:-1])
    with pytest.raises(DamagedIndexError, match=SET_INDEX_NAME):
        SetIndex.open(folder, Listed.of(manifest))
    [fault] = verify_shards(folder)
    assert "it is cut; index the directory again" in fault.message
    index_shards(folder)
    assert verify_shards(folder) == []


def test_damage_inside_is_a_fault_that_force_repairs(folder: Path) -> None:
    data = bytearray((folder / SET_INDEX_NAME).read_bytes())
    data[-1] ^= 1
    (folder / SET_INDEX_NAME).write_bytes(data)
    [fault] = verify_shards(folder)
    assert "with force=True" in fault.message
    index_shards(folder, force=True)
    assert verify_shards(folder) == []


def test_what_is_no_plain_file_is_refused(folder: Path) -> None:
    (folder / SET_INDEX_NAME).unlink()
    os.mkfifo(folder / SET_INDEX_NAME)
    with pytest.raises(ShardError, match="a FIFO"):
        SetIndex.open(folder, Listed.of(Manifest.load(folder)))


KILLED = """
import os, sys
from pathlib import Path
from headrace.webdatamodule import Manifest
from headrace.webdatamodule.shards.index import consolidated
consolidated._head = lambda *_: os._exit(9)
consolidated.write_set_index(Path(sys.argv[1]), Manifest.load(sys.argv[1]), force=True)
"""


@pytest.mark.slow
def test_who_dies_while_writing_it_leaves_the_old_one(folder: Path) -> None:
    kept = (folder / SET_INDEX_NAME).read_bytes()
    assert subprocess.run([sys.executable, "-c", KILLED, str(folder)], check=False).returncode == 9
    assert (folder / SET_INDEX_NAME).read_bytes() == kept
    assert verify_shards(folder) == []


def test_a_column_that_is_a_fifo_is_refused(folder: Path) -> None:
    [column] = add_column(folder, "n", range(40)).columns
    (folder / column.file).unlink()
    os.mkfifo(folder / column.file)
    with pytest.raises(ShardError, match="a FIFO"):
        IndexedShards(folder).column("n")
