import contextlib
import errno
import io
import multiprocessing
import os
import re
import shutil
import subprocess
import tarfile
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from command_line import run
from indexed_sets import UNLIKE, made

from headrace.webdatamodule import (
    ChangedShardWarning,
    DamagedShardError,
    IndexedShards,
    IndexVersionError,
    Manifest,
    ManifestError,
    RefusedMemberError,
    ShardError,
    ShardIndex,
    SkippedMembersWarning,
    add_column,
    index_shards,
    verify_shards,
    write_tars,
)
from headrace.webdatamodule.shards.format.files import StagedFile
from headrace.webdatamodule.shards.index.build import build_index, fitting_index, open_shard_bytes
from headrace.webdatamodule.shards.index.consolidated import SET_INDEX_NAME
from headrace.webdatamodule.shards.index.container import INDEX_VERSION
from headrace.webdatamodule.shards.index.manifest import NAME
from headrace.webdatamodule.shards.index.shard_index import index_path
from headrace.webdatamodule.shards.reading.shard_reader import ShardReader, map_shard


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
    assert sorted(path.suffix for path in folder.iterdir()) == [".hri"] * 3 + [".hrs", ".json"] + [".tar"] * 3


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


def test_an_index_of_another_release_is_never_rewritten_in_silence(folder: Path) -> None:
    manifest = index_shards(folder)
    path = index_path(sorted(folder.glob("*.tar"))[0])
    data = path.read_bytes()
    later = data[:8] + (INDEX_VERSION + 1).to_bytes(4, "little") + data[12:]
    path.write_bytes(later)
    shard = path.with_suffix("")
    for read in (partial(fitting_index, shard), partial(index_shards, folder), partial(IndexedShards, [shard])):
        with pytest.raises(IndexVersionError, match=r"upgrade headrace, or index again with force=True \(--force\)"):
            read()
    [fault] = [fault for fault in verify_shards(folder) if fault.shard]
    assert "another release of headrace" in fault.message
    assert path.read_bytes() == later
    assert index_shards(folder, force=True) == manifest
    assert verify_shards(folder) == []


def test_an_index_of_a_set_of_another_release_is_never_rewritten_in_silence(folder: Path) -> None:
    index_shards(folder)
    path = folder / SET_INDEX_NAME
    data = path.read_bytes()
    later = data[:8] + (9).to_bytes(4, "little") + data[12:]
    path.write_bytes(later)
    with pytest.raises(IndexVersionError, match=r"manifest.hrs: .*version 9"):
        index_shards(folder)
    assert path.read_bytes() == later
    assert [sample["__key__"] for sample in IndexedShards(folder, decode=None)]  # from the shards' own indexes
    index_shards(folder, force=True)
    assert path.read_bytes() == data


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
    with pytest.raises(DamagedShardError, match="the header is damaged"):
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


@pytest.mark.parametrize("force", [False, True])
def test_data_that_changed_under_an_index_are_warned_of(folder: Path, force: bool) -> None:
    """A new index takes damaged bytes as right, so this is the last moment to say so."""
    index_shards(folder)
    paths = sorted(folder.glob("*.tar"))
    good = [path.read_bytes() for path in paths]

    def damage(path: Path, *samples: int) -> None:
        index, data = ShardIndex.open(path), bytearray(path.read_bytes())
        for sample in samples:
            data[int(index.offsets[index.span(sample)[0]])] ^= 1
        path.write_bytes(data)

    damage(paths[1], 4)
    with pytest.warns(ChangedShardWarning, match=r"wdshards-000001.tar has .* before: member 's014.txt'\. The new"):
        index_shards(folder, force=force)
    assert verify_shards(folder) == []
    damage(paths[1], 3, 5)
    damage(paths[2], 0)
    with pytest.warns(ChangedShardWarning, match=r"2 members, the first of them 's013.txt' \(such shards: 2\)"):
        index_shards(folder, force=force)
    for path, data in zip(paths, good, strict=True):
        path.write_bytes(data)
    with pytest.warns(ChangedShardWarning, match=r"before: 3 members, the first of them 's013.txt'"):
        index_shards(folder, force=force)


@pytest.mark.parametrize(
    ("nbytes", "message"),
    [
        (512 + 99, "the header promises 100 bytes of data, but 99 follow: the shard is cut"),
        (512 + 100, "the shard is cut in the padding after the member's data"),
        (512 + 400, "the shard is cut in the padding after the member's data"),
    ],
)
def test_a_shard_that_is_cut_says_where(tmp_path: Path, nbytes: int, message: str) -> None:
    [tar] = write_tars([("a", {"txt": bytes(100)})], tmp_path, n_shards=1)
    os.truncate(tar, nbytes)
    with pytest.raises(DamagedShardError, match=f"{message}.*copy or download it again.*'a.txt', offset 0"):
        index_shards(tmp_path)


@pytest.mark.parametrize("by_command", [False, True])
def test_an_older_shard_of_the_same_size_names_the_cure(tmp_path: Path, by_command: bool) -> None:
    """As `rsync --times` brings it: size and time say nothing, and the three pieces that are compared are equal."""
    [tar] = write_tars([(f"s{number}", {"bin": bytes(20_000)}) for number in range(3)], tmp_path, n_shards=1)
    index_shards(tmp_path)
    data = bytearray(tar.read_bytes())
    data[10_000] = 1
    tar.write_bytes(data)
    os.utime(tar, (1, 1))
    index_shards(tmp_path)
    cure = r"index the shard again with force=True \(--force\)"
    with pytest.raises(DamagedShardError, match=f"not those that were indexed.*{cure}"):
        IndexedShards(tmp_path)[0]
    [fault] = verify_shards(tmp_path)
    assert re.search(cure, fault.message)
    with pytest.warns(ChangedShardWarning) if not by_command else contextlib.nullcontext():
        if by_command:
            assert run("index", tmp_path, "--force").returncode == 0
        else:
            index_shards(tmp_path, force=True)
    assert verify_shards(tmp_path) == []
    assert IndexedShards(tmp_path)[0]["bin"][10_000 - 512] == 1


def test_a_shard_of_other_members_replaces_another_without_a_warning(folder: Path) -> None:
    index_shards(folder)
    for path in folder.glob("*.tar"):
        path.touch()
    index_shards(folder, force=True)
    for samples in (
        [(f"s{n:03d}", {"txt": b"y" * (n + 1), "cls": b"1"}) for n in range(30)],  # other sizes
        [(f"t{n:03d}", {"txt": b"y" * (n + 1), "cls": b"2"}) for n in range(30)],  # other keys
        [(f"t{n:03d}", {"txt": b"y" * (n + 1), "cl": b"3"}) for n in range(30)],  # other members
    ):
        for path in folder.glob("*.tar"):
            path.unlink()
        write_tars(samples, folder, n_shards=3)
        index_shards(folder)
    for path in folder.glob("*.hri"):
        path.write_bytes(path.read_bytes()[:-1])
    index_shards(folder)


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
    os.truncate(folder / NAME, 100)
    with pytest.raises(ManifestError, match="index the directory again"):
        IndexedShards(folder)
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


def test_force_indexes_all_shards_anew(folder: Path) -> None:
    first = index_shards(folder)
    before = times(folder)
    assert index_shards(folder, force=True) == first
    assert times(folder) == before  # the same bytes are not written again
    index_shards(folder)
    for path in folder.glob("*.tar"):
        data = bytearray(path.read_bytes())
        offsets = ShardIndex.open(path).offsets.tolist()
        data[next(at for at in offsets if at > 5000)] ^= 1  # in none of the pieces that are compared
        when = path.stat().st_mtime_ns
        path.write_bytes(data)
        os.utime(path, ns=(when, when))
    assert index_shards(folder) == first
    with pytest.warns(ChangedShardWarning, match=r"\(such shards: 3\)"):
        assert index_shards(folder, force=True) != first


@pytest.mark.parametrize("copied", [False, True])
def test_a_complete_directory_need_not_be_writable(tmp_path: Path, folder: Path, copied: bool) -> None:
    manifest = index_shards(folder)
    if copied:  # the shards came after their indexes
        for path in folder.glob("*.tar"):
            path.touch()
    view = tmp_path / "read-only"
    view.mkdir()
    for words in (["--bind", str(folder), str(view)], ["-o", "remount,ro,bind", str(view)]):
        if not shutil.which("mount") or subprocess.run(["mount", *words], check=False).returncode:
            pytest.skip("nothing can be mounted here")
    try:
        assert index_shards(view) == manifest
        assert index_shards(view, force=True) == manifest
        (folder / SET_INDEX_NAME).unlink()
        assert index_shards(view) == manifest  # readers can do without it
        index_path(next(folder.glob("*.tar"))).unlink()
        with pytest.raises(OSError, match="Read-only file system"):
            index_shards(view)
    finally:
        subprocess.run(["umount", str(view)], check=True)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shard of more than a megabyte."""
    return made(tmp_path_factory.mktemp("large"), [(f"{n * n}", {"txt": b"1", "cls": b""}) for n in range(1200)])


def test_a_shard_that_is_cut_while_it_is_indexed_is_an_error(large: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(large.read_bytes())
    data = open_shard_bytes(path)
    assert data[0:512] == large.read_bytes()[:512]
    os.truncate(path, 600_000)
    with pytest.raises(DamagedShardError, match="was cut while it was read") as caught:
        build_index(data, shard=str(path))
    assert caught.value.shard == str(path)
    assert caught.value.offset is not None


def instead(path: Path, what: str) -> None:
    path.unlink(missing_ok=True)
    if what == "fifo":
        os.mkfifo(path)
    elif what == "directory":
        path.mkdir()
    elif what == "endless":
        path.symlink_to("/dev/zero")


@pytest.mark.parametrize("what", ["fifo", "directory", "endless"])
@pytest.mark.parametrize("suffix", ["", ".hri", NAME])
def test_what_is_no_plain_file_is_refused(tmp_path: Path, what: str, suffix: str) -> None:
    path = made(tmp_path, UNLIKE)
    wrong = tmp_path / NAME if suffix == NAME else Path(f"{path}{suffix}")
    instead(wrong, what)
    kind = {"fifo": "a FIFO", "directory": "a directory", "endless": "a device"}[what]
    with pytest.raises(ShardError, match=f"this is {kind}, not a plain file"):
        IndexedShards(tmp_path)[0]
    faults = [fault for fault in verify_shards(tmp_path) if f"this is {kind}" in fault.message]
    assert len(faults) == 1
    if suffix == "":
        with pytest.raises(DamagedShardError, match=kind):
            index_shards(tmp_path)


def tar(names: list[str]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as file:
        for name in names:
            file.addfile(tarfile.TarInfo(name))
    return stream.getvalue()


@pytest.mark.parametrize(
    "names",
    [[f"one.{n:x}" for n in range(10_000)], [f"{n:05d}.{n % 2000:x}" for n in range(4_000)]],
    ids=["members", "layouts"],
)
@pytest.mark.slow
def test_many_members_or_layouts_take_no_time(tmp_path: Path, names: list[str]) -> None:
    (tmp_path / "a.tar").write_bytes(tar(names))
    manifest = index_shards(tmp_path)
    assert len(manifest.members) == len({name.partition(".")[2] for name in names})
    index = ShardIndex.open(tmp_path / "a.tar")
    read = ShardReader(index, map_shard(index), None, verify=True)
    found = read.read_many(range(len(index)))
    assert sum(map(len, found)) == len(names) + len(found)
    for member in manifest.members[:200]:
        assert (index.positions(member) >= 0).any()
    assert verify_shards(tmp_path) == []


END = bytes(1024)


def plain_header(name: str, size: int, kind: bytes = b"0") -> bytes:
    octal = b"%011o\0" % size if size < 8**11 else b"\x80" + size.to_bytes(11, "big")
    block = bytearray(name.encode().ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2 + octal + b"0" * 11 + b"\0")
    block += b" " * 8 + kind + bytes(100) + b"ustar\x0000" + bytes(247)
    block = block[:512]
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def plain_member(name: str, data: bytes, kind: bytes = b"0") -> bytes:
    return plain_header(name, len(data), kind) + data + bytes(-len(data) % 512)


@pytest.mark.nightly
def test_a_sparse_file_of_six_gib_is_read_around(tmp_path: Path) -> None:
    with (tmp_path / "a.tar").open("wb") as file:
        file.write(plain_header("a.txt", 6 << 30))
        file.seek(6 << 30, io.SEEK_CUR)
        file.write(plain_member("b.txt", b"small") + END)
    if (tmp_path / "a.tar").stat().st_blocks * 512 > 1 << 30:
        pytest.skip("this file system has no holes")
    index_shards(tmp_path)
    dataset = IndexedShards(tmp_path, verify="none")
    assert [sample["txt"] for sample in dataset.iterate(1)] == [dataset[1]["txt"]] == ["small"]
    assert dataset.sizes("txt").tolist() == [6 << 30, 5]


@pytest.mark.parametrize("kind", [b"x", b"L", b"g"])
def test_an_extended_header_of_a_gib_is_refused(tmp_path: Path, kind: bytes) -> None:
    with (tmp_path / "a.tar").open("wb") as file:
        file.write(plain_header("long", 1 << 30, kind))
        file.seek(1 << 30, io.SEEK_CUR)
        file.write(plain_member("a.txt", b"") + END)
    with pytest.raises(RefusedMemberError, match="an extended header has 1073741824 bytes") as caught:
        index_shards(tmp_path)
    assert caught.value.offset == 0


@pytest.mark.parametrize("reason", [errno.EACCES, errno.EPERM, errno.EROFS])
@pytest.mark.parametrize("later", [False, True])
def test_a_folder_that_cannot_be_written_to_names_the_way_out(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, reason: int, later: bool
) -> None:
    """As root writes everywhere, the one call that makes a file fails as in such a folder."""
    begin = StagedFile.begin

    def fails(staged: StagedFile) -> StagedFile:
        if staged.path.parent == folder and not (later and staged.path.suffix == ".hri"):
            raise OSError(reason, os.strerror(reason), str(staged.temporary))
        return begin(staged)

    monkeypatch.setattr(StagedFile, "begin", fails)
    monkeypatch.setattr(StagedFile, "__enter__", fails)
    told = rf"beside the shards, as '{folder}' is read-only .*: make a folder of symbolic links .* and index that"
    with pytest.raises(PermissionError, match=told):
        index_shards(folder)
    links = tmp_path_factory.mktemp("links")
    for path in folder.glob("*.tar"):
        (links / path.name).symlink_to(path)
    assert index_shards(links).n_samples == len(IndexedShards(links)) == 30
    assert IndexedShards(links)[7]["__key__"] == "s007"


def test_an_empty_folder_names_the_folders_in_it_that_have_shards(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "set" / "a").mkdir(parents=True)
    for path in folder.glob("*.tar"):
        path.rename(tmp_path / "set" / "a" / path.name)
    with pytest.raises(
        FileNotFoundError, match=rf"no .tar files in .*: index each by itself, such as '{tmp_path}/set/a'"
    ):
        index_shards(tmp_path / "set")
