import multiprocessing
import os
import tarfile
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from headrace.webdatamodule.shards.errors import DamagedShardError, ManifestError
from headrace.webdatamodule.shards.index.build import SkippedMembersWarning, fitting_index, index_shards
from headrace.webdatamodule.shards.index.manifest import NAME, Manifest, add_column
from headrace.webdatamodule.shards.index.shard_index import ShardIndex, index_path
from headrace.webdatamodule.shards.writing.write import write_tars


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tars([(f"s{n:03d}", {"txt": b"x" * n, "cls": b"1"}) for n in range(30)], tmp_path, n_shards=3)
    return tmp_path


def times(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.hri")}


def test_each_shard_gets_an_index_and_the_manifest_names_all(folder: Path) -> None:
    manifest = index_shards(folder)
    assert manifest == Manifest.load(folder)
    assert [(shard.name, shard.samples) for shard in manifest.shards] == [
        (f"wdshards-{n:06d}.tar", 10) for n in range(3)
    ]
    assert manifest.members == ("cls", "txt")
    assert manifest.n_samples == 30
    for shard in manifest.shards:
        index = ShardIndex.open(folder / shard.name)
        assert shard.nbytes == (folder / shard.name).stat().st_size == index.shard_bytes
        assert shard.index == f"{index.checksum:016x}"
    assert sorted(path.suffix for path in folder.iterdir()) == [".hri"] * 3 + [".json"] + [".tar"] * 3


def test_processes_and_threads_make_the_same(folder: Path) -> None:
    one = index_shards(folder)
    for path in folder.glob("*.hri"):
        path.unlink()
    (folder / NAME).unlink()
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as processes:
        assert index_shards(str(folder), executor=processes) == one
    with ThreadPoolExecutor(2) as threads:
        assert index_shards(folder, executor=threads) == one
    assert Manifest.load(folder) == one


def test_indexes_of_unchanged_shards_are_kept(folder: Path) -> None:
    first = index_shards(folder)
    before = times(folder)
    assert index_shards(folder) == first
    assert times(folder) == before


def test_indexes_that_do_not_fit_are_made_anew(folder: Path) -> None:
    first = index_shards(folder)
    a, b, c = sorted(folder.glob("*.tar"))
    broken = bytearray(index_path(a).read_bytes())
    broken[-1] ^= 1
    index_path(a).write_bytes(broken)
    index_path(b).write_bytes(index_path(c).read_bytes())
    index_path(c).unlink()
    assert [fitting_index(path) for path in (a, b, c)] == [None] * 3
    assert index_shards(folder) == first
    assert all(fitting_index(path) for path in (a, b, c))


def test_a_shard_that_is_younger_than_its_index_is_read_again(folder: Path) -> None:
    index_shards(folder)
    path = next(folder.glob("*.tar"))
    when = index_path(path).stat().st_mtime_ns
    os.utime(path, ns=(when, when))
    assert fitting_index(path) is not None
    os.utime(path, ns=(when + 1, when + 1))
    assert fitting_index(path) is None


def test_a_replaced_shard_of_the_same_size_is_read_again(folder: Path) -> None:
    first = index_shards(folder)
    a, b, _ = sorted(folder.glob("*.tar"))
    assert a.stat().st_size == b.stat().st_size
    when = a.stat().st_mtime_ns
    a.write_bytes(b.read_bytes().replace(b"s01", b"s91").replace(b"x", b"y"))
    os.utime(a, ns=(when, when))
    with pytest.raises(DamagedShardError, match="checksum does not fit"):
        index_shards(folder)
    assert Manifest.load(folder) == first


def test_a_damaged_shard_is_named_and_the_manifest_stays(folder: Path) -> None:
    first = index_shards(folder)
    path = sorted(folder.glob("*.tar"))[1]
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(DamagedShardError) as caught:
        index_shards(folder)
    assert caught.value.shard == str(path)
    with ThreadPoolExecutor(2) as threads, pytest.raises(DamagedShardError):
        index_shards(folder, executor=threads)
    path.write_bytes(b"")
    with pytest.raises(DamagedShardError, match="0 bytes"):
        index_shards(folder)
    assert Manifest.load(folder) == first


def test_skipped_members_are_warned_of(folder: Path) -> None:
    with tarfile.open(folder / "more.tar", "w") as file:
        for name in ("README", "a.txt", "__x__/y.json", "LICENSE"):
            file.addfile(tarfile.TarInfo(name))
    for _ in range(2):  # also when the index is kept
        with pytest.warns(
            SkippedMembersWarning, match=r"3 members .* such as 'README', '__x__/y.json', 'LICENSE' in more\.tar"
        ):
            manifest = index_shards(folder)
        assert [shard.skipped for shard in manifest.shards] == [3, 0, 0, 0]


def test_columns_are_kept_while_the_shards_are_the_same(folder: Path) -> None:
    index_shards(folder)
    manifest = add_column(folder, "n", np.arange(30))
    assert index_shards(folder) == manifest
    write_tars([("t", {"txt": b""})], folder, n_shards=1, prefix="more")
    with pytest.raises(ManifestError, match=r"others than when these columns were made: n\. Pass drop_columns=True"):
        index_shards(folder)
    assert Manifest.load(folder) == manifest
    assert index_shards(folder, drop_columns=True).columns == ()


def test_a_damaged_manifest_is_replaced(folder: Path) -> None:
    first = index_shards(folder)
    (folder / NAME).write_text("{")
    assert index_shards(folder) == first


def test_a_directory_without_shards_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".hidden.tar").touch()
    with pytest.raises(FileNotFoundError, match=r"no \.tar files"):
        index_shards(tmp_path)


def test_a_copy_of_the_files_is_the_same_set(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    first = index_shards(folder)
    copy = tmp_path_factory.mktemp("copy")
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    assert index_shards(copy) == first


def test_a_place_that_is_no_directory_is_named(folder: Path) -> None:
    path = folder / "wdshards-000000.tar"
    with pytest.raises(FileNotFoundError, match=r"000000\.tar' is no directory: give the one that"):
        index_shards(path)
    with pytest.raises(FileNotFoundError, match=r"there is no directory '.*nowhere'"):
        index_shards(folder / "nowhere")
