"""Shards on their way to the disk: parts, names, manifests, and disks that are full, read-only or fail."""

import errno
import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from plain_tar import write_tar
from written_sets import check_whole, parts, script, some, tars

from headrace.webdatamodule import ShardError, add_column, index_shards, verify_shards, write_shards, write_tars
from headrace.webdatamodule.shards.format.files import StagedFile, StoppedError
from headrace.webdatamodule.shards.writing.shard_task import remove_parts

pytestmark = pytest.mark.slow


def test_a_part_that_was_removed_stops_its_writer(tmp_path: Path) -> None:
    dead = tmp_path / ".shard-000001.tar.hri.aa-bb.part"
    others = [tmp_path / ".shard-x-000001.tar.aa-bb.part", tmp_path / ".shard-000001.tar.xyz-bb.part", tmp_path / "b"]
    for path in [dead, *others]:
        path.touch()
    with StagedFile(tmp_path / "shard-000000.tar", "cc") as part:
        part.write(b"1")
        remove_parts(tmp_path, "shard", "dd")
        part.write(b"2")
        remove_parts(tmp_path, "shard")
        with pytest.raises(StoppedError):
            part.write(b"3")
        with pytest.raises(StoppedError):
            part.publish()
    assert sorted(tmp_path.iterdir()) == sorted(others)


def mounted(below: Path) -> list[str]:
    """Where something is mounted below a folder."""
    table = Path("/proc/self/mounts")
    places = [line.split()[1] for line in table.read_text().splitlines()] if table.exists() else []
    return [place for place in places if Path(place).is_relative_to(below)]


@pytest.fixture(scope="module", autouse=True)
def nothing_stays_mounted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    yield
    assert mounted(tmp_path_factory.getbasetemp()) == []


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Callable[[Path], Path]]:
    view = tmp_path / "read-only"
    view.mkdir()

    def mount(folder: Path) -> Path:
        for words in (["--bind", str(folder), str(view)], ["-o", "remount,ro,bind", str(view)]):
            if not shutil.which("mount") or subprocess.run(["mount", *words], check=False).returncode:
                pytest.skip("nothing can be mounted here")
        return view

    yield mount
    if mounted(view):  # `is_mount` does not see what is bound to a folder of the same disk
        subprocess.run(["umount", str(view)], check=True)


def test_what_is_complete_need_not_be_writable(tmp_path: Path, read_only: Callable[[Path], Path]) -> None:
    manifest = write_shards(some(20), tmp_path / "out", n_shards=2, workers=1, fingerprint="1")
    view = read_only(tmp_path / "out")
    assert write_shards(some(20), view, n_shards=2, workers=1, fingerprint="1") == manifest
    tars(tmp_path / "out")[1].unlink()
    with pytest.raises(OSError, match=r"Read-only file system: the shard was not written.*shard-000001") as caught:
        write_shards(some(20), view, n_shards=2, workers=1, fingerprint="1")
    assert caught.value.errno == errno.EROFS


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("nbytes", [1000, 3_000_000])
def test_a_file_that_may_not_grow_is_loud(tmp_path: Path, workers: int, nbytes: int) -> None:
    options: dict[str, Any] = {"count": 8, "nbytes": nbytes, "n_shards": 2} if nbytes > 1000 else {}
    done = script(tmp_path, workers=workers, fsize=nbytes * 2 + 7, **options)
    assert done.returncode == 1
    assert f"OSError: [Errno {errno.EFBIG}] File too large: the shard was not written" in done.stderr
    assert "shard-00000" in done.stderr.splitlines()[-1]
    assert (tars(tmp_path), parts(tmp_path)) == ([], [])
    check_whole(tmp_path, **options)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("a small file system cannot be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_is_loud_and_what_is_whole_stays(small_disk: Path, workers: int) -> None:
    done = script(small_disk, workers=workers, nbytes=4000)
    assert done.returncode == 1
    assert f"[Errno {errno.ENOSPC}] No space left on device: the shard was not written" in done.stderr
    assert parts(small_disk) == []
    assert len(tars(small_disk)) < 4
    subprocess.run(["mount", "-o", "remount,size=3m", str(small_disk)], check=True)
    check_whole(small_disk, nbytes=4000)


@pytest.mark.parametrize(
    ("options", "where"), [({"files": 0}, "test_no_more"), ({"trouble": {"60": "hog"}}, "shard-000002")]
)
def test_no_more_file_descriptors_is_loud(tmp_path: Path, options: dict[str, Any], where: str) -> None:
    done = script(tmp_path, workers=1, **options)
    assert done.returncode == 1
    assert f"[Errno {errno.EMFILE}]" in done.stderr
    assert where in done.stderr.splitlines()[-1]
    assert parts(tmp_path) == []
    check_whole(tmp_path)


def test_a_disk_that_fails_is_loud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shards(some(20), tmp_path / "a", n_shards=1)
    folder, calls = tmp_path / "b", list[int]()

    def fail(descriptor: int) -> None:  # no disk that fails can be had here
        calls.append(descriptor)
        if len(calls) == 5:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=r"Input/output error: the shard was not written.*shard-00000") as caught:
        write_shards(some(20), folder, n_shards=4, workers=1)
    assert caught.value.errno == errno.EIO
    assert parts(folder) == []
    assert not (folder / "manifest.json").exists()
    monkeypatch.undo()
    write_shards(some(20), folder, n_shards=4, workers=1)
    assert verify_shards(folder) == []


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_a_file_system_that_syncs_no_directories_is_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    fsync, folder = os.fsync, tmp_path / "set"
    folder.mkdir()

    def refuse(descriptor: int) -> None:  # as old CIFS and vboxsf do, which cannot be had here
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    if number == errno.EIO:
        with pytest.raises(OSError, match=r"Input/output error: '.*set'"):
            write_tars(some(20), folder, n_shards=2)
        return
    write_tars(some(20), folder, n_shards=2)
    index_shards(folder)
    add_column(folder, "n", range(20))
    write_shards(some(20), tmp_path / "other", n_shards=2, columns={"n": range(20)}, workers=1)
    write_shards(iter(some(20)), tmp_path / "stream", samples_per_shard=7)
    assert [verify_shards(place) for place in (folder, tmp_path / "other", tmp_path / "stream")] == [[], [], []]


@pytest.fixture
def disk_order(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What was brought to the disk, and what got its name, in the order in which that ended."""
    order, fsync, replace = list[tuple[str, str]](), os.fsync, os.replace

    def note_fsync(descriptor: int) -> None:
        fsync(descriptor)
        order.append(("fsync", str(Path(f"/proc/self/fd/{descriptor}").readlink())))

    def note_replace(source: Any, target: Any) -> None:
        order.append(("name", str(target)))
        order[order.index(("fsync", str(source)))] = ("fsync", str(target))  # whatever it was called then
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    return order


def write_here(samples: Any, folder: Path, *, stream: bool, **options: Any) -> None:
    """Write in this process, as it is the one that is watched; a list may be written by others on a slow machine."""
    given = {"samples_per_shard": 1, **options}
    if stream:
        write_shards(iter(samples), folder, **given)
    else:
        write_shards(samples, folder, workers=1, **given)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs Linux's list of open files")
@pytest.mark.parametrize("stream", [False, True])
def test_a_name_follows_its_bytes_to_the_disk_and_the_manifest_follows_all_names(
    tmp_path: Path, stream: bool, disk_order: list[tuple[str, str]]
) -> None:
    write_here(some(100), tmp_path, stream=stream, columns={"n": range(100)})
    names = [name for what, name in disk_order if what == "name"]
    assert {Path(name).name for name in names} == {path.name for path in tmp_path.iterdir()}
    for name in names:
        assert disk_order.index(("fsync", name)) < disk_order.index(("name", name))
    assert names[-1] == str(tmp_path / "manifest.json")
    shards = [name for name in names if name.endswith((".tar", ".hri"))]
    assert len(shards) == 200
    last, manifest = (disk_order.index(("name", name)) for name in (shards[-1], names[-1]))
    assert ("fsync", str(tmp_path)) in disk_order[last:manifest]
    assert disk_order[-1] == ("fsync", str(tmp_path))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs Linux's list of open files")
@pytest.mark.parametrize("stream", [False, True])
def test_the_directory_is_brought_to_the_disk_once_for_all_shards(
    tmp_path: Path, stream: bool, disk_order: list[tuple[str, str]]
) -> None:
    counts = []
    for number in (10, 100):
        folder = tmp_path / str(number)
        write_here(some(number), folder, stream=stream)
        counts.append(disk_order.count(("fsync", str(folder))))
        assert len(list(folder.glob("*.tar"))) == number
    assert counts[0] == counts[1]
    assert sum(what == "name" and name.endswith("plan.json") for what, name in disk_order) <= 4  # twice a write


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs Linux's list of open files")
def test_the_directory_is_brought_to_the_disk_once_for_all_indexes(
    tmp_path: Path, disk_order: list[tuple[str, str]]
) -> None:
    for number, (key, sample) in enumerate(some(50)):
        write_tar(tmp_path / f"{number:02d}.tar", [(key, sample)])
    del disk_order[:]
    index_shards(tmp_path)
    names = [name for what, name in disk_order if what == "name"]
    assert len(names) == 52
    for name in names:
        assert disk_order.index(("fsync", name)) < disk_order.index(("name", name))
    indexes = disk_order.index(("name", [name for name in names if name.endswith(".hri")][-1]))
    assert ("fsync", str(tmp_path)) not in disk_order[:indexes]
    manifest = disk_order.index(("name", str(tmp_path / "manifest.json")))
    assert ("fsync", str(tmp_path)) in disk_order[indexes:manifest]
    assert disk_order[-1] == ("fsync", str(tmp_path))


def test_what_was_finished_before_an_error_gets_its_name(tmp_path: Path) -> None:
    class Failing(list[Any]):
        def __getitem__(self, number: Any) -> Any:
            if number == 29:
                raise RuntimeError("no such luck")
            return super().__getitem__(number)

    for samples in (lambda: Failing(some(40)), (Failing(some(40))[number] for number in range(40))):
        folder = tmp_path / str(callable(samples))
        with pytest.raises(ShardError, match="failed to read sample 29"):
            write_shards(samples, folder, samples_per_shard=1, workers=1)
        assert len(tars(folder)) == (29 if callable(samples) else 28)  # the last one of a stream may not be full
        assert parts(folder) == []
