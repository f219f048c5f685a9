import io
import json
import multiprocessing
import random
import tarfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from indexed_sets import UNLIKE, made

from headrace.webdatamodule import Fault, Manifest, ShardError, add_column, index_shards, verify_shards
from headrace.webdatamodule.shards.format.tar import walk
from headrace.webdatamodule.shards.index.manifest import NAME
from headrace.webdatamodule.shards.index.shard_index import index_path

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def tar(kind: int, count: int) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=kind) as file:
        for number in range(count):
            for suffix, data in (("txt", b"x" * (37 * number)), ("json", b"{}")):
                header = tarfile.TarInfo(f"s{number:04d}{'long' * 30 * (kind == tarfile.GNU_FORMAT)}.{suffix}")
                header.size = len(data)
                header.mtime = 1.5 if kind == tarfile.PAX_FORMAT else 1
                file.addfile(header, io.BytesIO(data))
    return stream.getvalue()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    for name, kind in FORMATS.items():
        (folder / f"{name}.tar").write_bytes(tar(kind, 50))
    index_shards(folder)
    add_column(folder, "n", np.arange(150))
    assert verify_shards(folder) == []
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    for path in whole.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


class Damage:
    """Changes a file, and changes it back."""

    def __init__(self, path: Path, data: bytes) -> None:
        self.path, self.data, self.before = path, data, path.read_bytes()

    def __enter__(self) -> None:
        self.path.write_bytes(self.data)

    def __exit__(self, *_: object) -> None:
        self.path.write_bytes(self.before)


def flip(path: Path, bit: int) -> Damage:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    return Damage(path, bytes(data))


def places(folder: Path, count: int, seed: int) -> Iterator[tuple[Path, int]]:
    # Every second one hits a shard, the others an index, the manifest or the column.
    draw, files = random.Random(seed), sorted(folder.iterdir())
    tars, others = [f for f in files if f.suffix == ".tar"], [f for f in files if f.suffix != ".tar"]
    for turn in range(count):
        path = draw.choice(others if turn % 2 else tars)
        yield path, draw.randrange(path.stat().st_size)


def check_flips(folder: Path, count: int, seed: int) -> None:
    members = {path: list(walk(path.read_bytes())) for path in folder.glob("*.tar")}
    for path, byte in places(folder, count, seed):
        with flip(path, 8 * byte + byte % 8):
            faults = verify_shards(folder)
        assert faults, (path, byte)
        assert path.suffix != ".tar" or {fault.shard for fault in faults} == {str(path)}
        hit = [m for m in members.get(path, []) if m.offset <= byte < m.offset + m.size]
        if hit:
            expected = (str(path), hit[0].name.partition(".")[0], hit[0].name, hit[0].offset - 512)
            assert [(f.shard, f.sample, f.member, f.offset) for f in faults] == [expected]
    assert verify_shards(folder) == []


def check_cuts(folder: Path, count: int, seed: int) -> None:
    for path, length in places(folder, count, seed):
        with Damage(path, path.read_bytes()[:length]):
            faults = verify_shards(folder)
        assert faults, (path, length)
        assert path.suffix != ".tar" or {fault.shard for fault in faults} == {str(path)}
    assert verify_shards(folder) == []


@pytest.mark.slow
def test_100_flipped_bits_are_found(folder: Path) -> None:
    check_flips(folder, 100, seed=0)


@pytest.mark.slow
def test_100_cuts_are_found(folder: Path) -> None:
    check_cuts(folder, 100, seed=1)


@pytest.mark.nightly
def test_1000_flipped_bits_are_found(folder: Path) -> None:
    check_flips(folder, 1000, seed=2)


@pytest.mark.nightly
def test_1000_cuts_are_found(folder: Path) -> None:
    check_cuts(folder, 1000, seed=3)


@pytest.mark.parametrize("name", ["ustar", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("gnu", "pax"))])
@pytest.mark.slow
def test_each_byte_of_some_samples_is_watched_over(folder: Path, name: str, pytestconfig: pytest.Config) -> None:
    path = folder / f"{name}.tar"
    members = list(walk(path.read_bytes()))[10:13]
    for byte in range(members[0].start, members[2].start, 7 if pytestconfig.getoption("--nightly") else 29):
        with flip(path, 8 * byte):
            faults = verify_shards(folder)
        assert faults, byte
        # What no checksum of the format covers is narrowed down to 64 members; all else to the member.
        inside = [f for f in faults if f.offset is not None and members[0].start <= f.offset <= members[1].offset]
        assert inside or "was changed" in faults[0].message, (byte, faults)
    for byte in range(path.stat().st_size - 1024, path.stat().st_size, 100):
        with flip(path, 8 * byte):
            assert verify_shards(folder)[0].shard == str(path)


def one(folder: Path, match: str, **place: object) -> Fault:
    faults = verify_shards(folder)
    assert len(faults) == 1, faults
    assert match in faults[0].message
    for key, value in place.items():
        assert getattr(faults[0], key) == value, faults
    return faults[0]


def test_a_header_that_was_sealed_again_is_found(folder: Path) -> None:
    path = folder / "ustar.tar"
    data = bytearray(path.read_bytes())
    member = list(walk(bytes(data)))[20]
    data[member.start + 108 : member.start + 124] = data[member.start + 108 : member.start + 124][::-1]  # uid and gid
    with Damage(path, bytes(data)):
        one(folder, "a header, padding or a skipped member between bytes", shard=str(path), sample="s0000")


def test_padding_that_was_written_on_is_found(folder: Path) -> None:
    path = folder / "gnu.tar"
    data = bytearray(path.read_bytes())
    member = list(walk(bytes(data)))[2]
    data[member.offset + member.size + 5] = 1
    with Damage(path, bytes(data)):
        place = {"member": member.name, "offset": member.offset + member.size + 5}
        one(folder, "the padding after the data was changed", shard=str(path), **place)


def test_a_lost_page_is_found_with_all_that_it_held(folder: Path) -> None:
    path = folder / "ustar.tar"
    data = path.read_bytes()
    members = list(walk(data))
    begin = 8192
    with Damage(path, data[:begin] + bytes(4096) + data[begin + 4096 :]):
        faults = verify_shards(folder)
    lost = [m for m in members if m.offset < begin + 4096 and m.offset + m.size > begin]
    damaged = [fault.member for fault in faults if "bytes of data are damaged" in fault.message]
    assert damaged == [m.name for m in lost]
    assert any("lost" in fault.message for fault in faults)


def test_a_cut_shard_says_how_many_members_are_gone(folder: Path) -> None:
    path = folder / "ustar.tar"
    data = path.read_bytes()
    member = list(walk(data))[90]
    with Damage(path, data[: member.start]):
        messages = [fault.message for fault in verify_shards(folder)]
    assert len(messages) == 3
    assert f"the shard has {member.start} bytes, but {len(data)} when it was indexed" in messages[0]
    assert "two blocks of zeros that end a tar file are missing" in messages[1]
    assert "the data of 10 members" in messages[2]


def test_another_shard_under_the_name_is_found(folder: Path) -> None:
    path = folder / "ustar.tar"
    other = path.read_bytes().replace(b"xxxx", b"yyyy")
    with Damage(path, other):
        faults = verify_shards(folder)
    assert len(faults) == 49
    assert all("bytes of data are damaged" in fault.message for fault in faults)
    with Damage(path, tar(tarfile.USTAR_FORMAT, 51)):
        messages = [fault.message for fault in verify_shards(folder)]
    assert any("another member here than its index says" in message for message in messages)


def test_missing_and_extra_files_are_named(folder: Path) -> None:
    path = folder / "ustar.tar"
    data, index = path.read_bytes(), index_path(path).read_bytes()
    path.unlink()
    one(folder, "the shard is missing", shard=str(path))
    path.write_bytes(data)
    index_path(path).unlink()
    one(folder, "the index is missing", shard=str(path))
    index_path(path).write_bytes(index)
    (folder / "more.tar").write_bytes(data)
    one(folder, "not in the manifest", shard=str(folder / "more.tar"))
    (folder / "more.tar").unlink()
    (folder / "more.tar.hri").write_bytes(index)
    one(folder, "more.tar.hri: the index has no shard")
    (folder / "more.tar.hri").unlink()
    [column] = Manifest.load(folder).columns
    (folder / column.file).unlink()
    one(folder, "the file of the column 'n' is missing")


def test_without_a_manifest_the_shards_are_still_checked(folder: Path) -> None:
    (folder / NAME).unlink()
    one(folder, "there is no manifest.json")
    path = folder / "gnu.tar"
    with flip(path, 8 * list(walk(path.read_bytes()))[4].offset):
        assert [fault.shard for fault in verify_shards(folder)] == [None, str(path)]


def test_a_damaged_index_does_not_accuse_the_shard(folder: Path) -> None:
    path = folder / "ustar.tar"
    with flip(index_path(path), 8 * 1500):
        one(folder, "arrays of the index are damaged", shard=str(path))
        with flip(path, 8 * list(walk(path.read_bytes()))[4].offset):
            messages = [fault.message for fault in verify_shards(folder)]
            assert messages[1:] == ["the shard does not match the manifest"]
        with Damage(path, path.read_bytes()[:5000]):
            assert len(verify_shards(folder)) == 2
    index_path(path).unlink()
    with Damage(path, b""):
        one(folder, "0 bytes", shard=str(path))


def test_an_index_of_another_time_is_found(folder: Path) -> None:
    path = folder / "ustar.tar"
    path.write_bytes(tar(tarfile.USTAR_FORMAT, 3))
    old = (folder / NAME).read_bytes()
    index_shards(folder, drop_columns=True)
    (folder / NAME).write_bytes(old)
    stale, other = verify_shards(folder)
    assert "manifest.hrs: the index of the set belongs to another manifest" in stale.message
    assert "the index does not match the manifest" in other.message
    assert other.shard == str(path)


def test_a_manifest_of_other_white_space_is_found(folder: Path) -> None:
    path = folder / NAME
    path.write_text(json.dumps(json.loads(path.read_text())))
    one(folder, "the text was changed, though not what it says")


def test_processes_find_the_same(folder: Path) -> None:
    for name in FORMATS:
        flip(folder / f"{name}.tar", 8 * 700).__enter__()
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as processes:
        faults = verify_shards(str(folder), executor=processes)
    assert faults == verify_shards(folder)
    assert len(faults) >= 3


def test_an_empty_shard_is_whole(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(bytes(10240))
    index_shards(tmp_path)
    assert verify_shards(tmp_path) == []
    with Damage(tmp_path / "a.tar", bytes(1024)):
        one(tmp_path, "the shard has 1024 bytes, but 10240 when it was indexed", offset=1024)
    with flip(tmp_path / "a.tar", 70_000):
        assert verify_shards(tmp_path)


def test_no_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotADirectoryError, match="no directory"):
        verify_shards(tmp_path / "none")


def test_a_fault_reads_like_an_error() -> None:
    error = ShardError("bad", shard="a.tar", sample="s", member="s.txt", offset=512)
    assert str(Fault.of(error)) == str(error)
    assert str(Fault("bad")) == "bad"


@pytest.mark.parametrize("members", [(), ("txt",), ("cls", "txt", "zzz")])
def test_wrong_members_of_a_manifest_are_a_fault(tmp_path: Path, members: tuple[str, ...]) -> None:
    made(tmp_path, UNLIKE)
    replace(Manifest.load(tmp_path), members=members).save(tmp_path)
    [fault] = verify_shards(tmp_path)
    assert "but the shards have ['cls', 'txt']" in fault.message


@pytest.mark.parametrize("change", [{"samples": 4}, {"skipped": 1}, {"nbytes": 1}])
def test_wrong_counts_of_a_manifest_are_a_fault(tmp_path: Path, change: dict[str, Any]) -> None:
    made(tmp_path, UNLIKE)
    manifest = Manifest.load(tmp_path)
    replace(manifest, shards=(replace(manifest.shards[0], **change),)).save(tmp_path)
    assert [fault.shard for fault in verify_shards(tmp_path)] == [str(tmp_path / manifest.shards[0].name)]


def test_a_column_of_another_form_than_the_manifest_says_is_a_fault(tmp_path: Path) -> None:
    made(tmp_path, UNLIKE)
    [column] = add_column(tmp_path, "n", [1, 2, 3]).columns
    replace(Manifest.load(tmp_path), columns=(replace(column, dtype="<f4"),)).save(tmp_path)
    [fault] = verify_shards(tmp_path)
    assert "not <f4" in fault.message


@pytest.mark.slow
def test_many_faults_take_no_time(tmp_path: Path) -> None:
    path = made(tmp_path, [(f"{n:05d}", {"txt": b"1"}) for n in range(5_000)])
    data = bytearray(path.read_bytes())
    for at in range(512, 5_000 * 1024, 1024):
        data[at + 511] = 1
    path.write_bytes(data)
    assert len(verify_shards(tmp_path)) == 5_000


def test_a_shard_of_a_name_that_no_manifest_may_have_is_read(tmp_path: Path) -> None:
    path = made(tmp_path, UNLIKE)
    odd = tmp_path / "a:b.tar"
    path.rename(odd)
    index_path(path).rename(index_path(odd))
    (tmp_path / NAME).unlink()
    data = bytearray(odd.read_bytes())
    data[512] ^= 1
    odd.write_bytes(data)
    unlisted, damaged = verify_shards(tmp_path)
    assert "manifest" in unlisted.message
    assert (damaged.shard, damaged.sample is not None) == (str(odd), True)
