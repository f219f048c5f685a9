import errno
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, wait
from pathlib import Path

import pickle_packer
import pytest

from headrace.webdatamodule import (
    IndexedShards,
    LostColumnsError,
    Manifest,
    ShardError,
    add_column,
    verify_shards,
    write_tars,
)
from headrace.webdatamodule.shards.index.build import build_index
from headrace.webdatamodule.shards.writing import executor
from headrace.webdatamodule.shards.writing.pack_files import list_members, pack_files

pytestmark = pytest.mark.slow

NAMES = [f"sample{i}.x" for i in range(5)]


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return exec, ("raise SystemExit('ran')",)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "pickles"
    folder.mkdir()
    for i, name in enumerate(NAMES):
        (folder / f"{name}.my.pt").write_bytes(pickle.dumps(i))
    return folder


def pack(source: Path, names: list[str] = NAMES, n_shards: int | None = 2) -> list[Path]:
    return pack_files(source, names, ["my.pt"], source.parent / "tars", n_shards=n_shards, prefix="p")


def states(paths: list[Path]) -> list[tuple[int, int]]:
    return [(path.stat().st_ino, path.stat().st_mtime_ns) for path in paths]


def test_files_are_copied_under_keys_without_dots(source: Path) -> None:
    paths = pack(source)
    assert [name for path in paths for name, _ in list_members(path)] == [f"sample{i}-x.my.pt" for i in range(5)]
    assert pickle.dumps(3) in paths[1].read_bytes()


def test_nothing_is_unpickled_while_writing(source: Path) -> None:
    (source / f"{NAMES[0]}.my.pt").write_bytes(pickle.dumps(Evil()))
    assert len(pack(source)) == 2


@pytest.mark.parametrize(("asked", "written"), [(None, 5), (9, 5), (5, 5), (1, 1)])
def test_the_number_of_shards(source: Path, asked: int | None, written: int) -> None:
    assert len(pack(source, n_shards=asked)) == written


def test_a_complete_set_is_kept(source: Path) -> None:
    before = states(pack(source))
    assert states(pack(source)) == before


def test_a_changed_file_renews_the_set(source: Path) -> None:
    before = states(pack(source))
    (source / f"{NAMES[0]}.my.pt").write_bytes(pickle.dumps("longer than before"))
    after = states(pack(source))
    assert not set(after) & set(before)
    assert states(pack(source)) == after


@pytest.mark.parametrize("seconds", [1, -1000])
def test_a_file_of_the_same_size_and_another_time_renews_the_set(source: Path, seconds: int) -> None:
    paths = pack(source)
    file = source / f"{NAMES[0]}.my.pt"
    file.write_bytes(pickle.dumps(9))
    when = paths[0].stat().st_mtime_ns + seconds * 10**9  # an older file may have been copied here
    os.utime(file, ns=(when, when))
    before = states(paths)
    assert states(pack(source))[0] != before[0]
    assert pickle.dumps(9) in paths[0].read_bytes()


@pytest.mark.parametrize("waits", [True, False])
def test_a_file_that_changes_while_it_is_packed_renews_the_set(
    source: Path, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, read, saved = source / f"{NAMES[0]}.my.pt", Path.read_bytes, pickle.dumps(9)

    def read_and_save(path: Path) -> bytes:
        data = read(path)
        if path == file:
            path.write_bytes(saved)  # another process saves it, and then the rest is packed
        if waits:
            time.sleep(0.05)
        return data

    assert len(saved) == file.stat().st_size
    monkeypatch.setattr(Path, "read_bytes", read_and_save)
    paths = pack(source)
    monkeypatch.undo()
    assert saved not in paths[0].read_bytes()
    assert saved in pack(source)[0].read_bytes()
    after = states(paths)
    assert states(pack(source)) == after
    assert verify_shards(source.parent / "tars") == []


def test_a_missing_shard_of_the_set_is_written(source: Path) -> None:
    paths = pack(source)
    data = paths[1].read_bytes()
    paths[1].unlink()
    assert pack(source)[1].read_bytes() == data


def test_shards_of_other_samples_are_never_touched(source: Path) -> None:
    data = [path.read_bytes() for path in pack(source)]
    with pytest.raises(FileExistsError, match=r"p-000000.tar holds other samples"):
        pack(source, NAMES[1:])
    with pytest.raises(FileExistsError, match="1 shard of prefix 'p' beside"):
        pack(source, n_shards=1)
    assert [path.read_bytes() for path in sorted((source.parent / "tars").glob("*.tar"))] == data


def test_a_file_that_is_no_tar_is_not_touched(source: Path) -> None:
    (source.parent / "tars").mkdir()
    (source.parent / "tars" / "p-000000.tar").write_text("my notes")
    with pytest.raises(FileExistsError, match="other samples"):
        pack(source)
    assert (source.parent / "tars" / "p-000000.tar").read_text() == "my notes"


def test_a_missing_file_is_named_before_anything_is_written(source: Path) -> None:
    (source / f"{NAMES[4]}.my.pt").unlink()
    with pytest.raises(FileNotFoundError, match=r"1 of 5 files are missing, first .*sample4.x.my.pt"):
        pack(source)
    assert not (source.parent / "tars").exists()


def test_names_that_get_the_same_key_are_named(source: Path) -> None:
    with pytest.raises(ShardError, match=r"'sample0.x' and 'sample0-x' get the same sample key 'sample0-x'"):
        pack(source, ["sample0.x", "sample0-x"])


def test_no_names(source: Path) -> None:
    with pytest.raises(ValueError, match="there are no names"):
        pack(source, [])


def test_several_files_a_sample(source: Path) -> None:
    (source / "sample0.x.json").write_text("1")
    [path] = pack_files(source, NAMES[:1], ["my.pt", "json"], source / "t", n_shards=1, prefix="p")
    assert [name for name, _ in list_members(path)] == ["sample0-x.my.pt", "sample0-x.json"]


# Indexes and manifests


def test_the_directory_is_ready_for_indexed_shards(source: Path) -> None:
    pack(source)
    folder = source.parent / "tars"
    assert verify_shards(folder) == []
    shards = IndexedShards(folder, decode=None)
    assert [(s["__key__"], s["my.pt"]) for s in shards] == [(f"sample{i}-x", pickle.dumps(i)) for i in range(5)]
    names = {f"p-00000{i}.tar{end}" for i in range(2) for end in ("", ".hri")}
    names |= {"manifest.json", "manifest.hrs", "p.plan.json"}
    assert {path.name for path in folder.iterdir()} == names


@pytest.mark.parametrize(
    ("harm", "kept"),
    [
        ("manifest.*", {0, 1}),
        ("p-000000.tar.hri", {1}),
        ("p-000001.tar.hri", {0}),
        ("*.hri", set()),
        ("p.plan.json", set()),
    ],
)
def test_what_is_missing_is_written_again(source: Path, harm: str, kept: set[int]) -> None:
    paths = pack(source)
    folder, before = source.parent / "tars", states(paths)
    data = [path.read_bytes() for path in paths]
    for path in folder.glob(harm):
        path.unlink()
    after = states(pack(source))
    assert {number for number in range(2) if after[number] == before[number]} == kept
    assert [path.read_bytes() for path in paths] == data
    assert verify_shards(folder) == []


def test_shards_of_the_same_samples_that_another_writer_made_are_written_again(source: Path) -> None:
    folder = source.parent / "tars"
    samples = [(f"sample{i}-x", {"my.pt": b"who knows"}) for i in range(5)]
    write_tars(samples, folder, n_shards=2, prefix="p")
    assert pickle.dumps(3) in pack(source)[1].read_bytes()
    assert verify_shards(folder) == []


def test_a_changed_file_changes_the_manifest(source: Path) -> None:
    pack(source)
    folder = source.parent / "tars"
    first = Manifest.load(folder).fingerprint
    (source / f"{NAMES[0]}.my.pt").write_bytes(pickle.dumps("longer than before"))
    pack(source)
    assert Manifest.load(folder).fingerprint != first
    assert verify_shards(folder) == []


def test_columns_stay_with_their_shards_and_are_not_lost_in_silence(source: Path) -> None:
    pack(source)
    folder = source.parent / "tars"
    add_column(folder, "tokens", range(5))
    pack(source)
    assert [column.name for column in Manifest.load(folder).columns] == ["tokens"]
    (source / f"{NAMES[0]}.my.pt").write_bytes(pickle.dumps("longer than before"))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for _ in range(2):
        with pytest.raises(LostColumnsError) as caught:
            pack(source)
        assert caught.value.columns == ("tokens",)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_second_set_in_the_same_directory_is_refused(source: Path) -> None:
    folder = source.parent / "tars"
    pack(source, NAMES[:3])
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(FileExistsError, match="a manifest is for one set"):
        pack_files(source, NAMES[3:], ["my.pt"], folder, n_shards=1, prefix="q")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("waits", [True, False])
def test_a_file_that_goes_away_is_named_and_the_rest_is_whole(
    source: Path, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Path.read_bytes

    def gone(path: Path) -> bytes:
        if waits:
            time.sleep(0.05)
        if path.name.startswith("sample4"):
            path.unlink()
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", gone)
    with pytest.raises(ShardError, match=r"failed to read sample 4: FileNotFoundError.*p-000001.tar"):
        pack(source)
    monkeypatch.undo()
    folder = source.parent / "tars"
    left = {path.name for path in folder.iterdir()}
    assert left - {"p-000000.tar", "p-000000.tar.hri"} == {"p.plan.json"}  # the other shard may have been stopped
    assert ("p-000000.tar" in left) == ("p-000000.tar.hri" in left)
    (source / f"{NAMES[4]}.my.pt").write_bytes(b"again")
    pack(source)
    assert verify_shards(folder) == []


def test_a_shard_that_has_its_name_gets_its_index_when_another_one_fails(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named, stopped = threading.Event(), threading.Event()
    read, replace = Path.read_bytes, Path.replace

    def failing(path: Path) -> bytes:
        if path.name.startswith("sample4"):
            assert named.wait(60)
            raise OSError("gone")
        return read(path)

    def naming(path: Path, target: Path) -> Path:
        if target.name == "p-000000.tar.hri":  # the tar file has its name: now the other shard fails
            named.set()
            assert stopped.wait(60)
        return replace(path, target)

    def look_again(futures: set[Future[object]], timeout: float) -> object:  # the parts have been removed once
        stopped.set()
        return wait(futures, timeout)

    monkeypatch.setattr(Path, "read_bytes", failing)
    monkeypatch.setattr(Path, "replace", naming)
    monkeypatch.setattr(executor, "wait", look_again)
    with pytest.raises(ShardError, match="failed to read sample 4"):
        pack(source)
    names = {path.name for path in (source.parent / "tars").iterdir()}
    assert names == {"p-000000.tar", "p-000000.tar.hri", "p.plan.json"}


def test_a_file_that_goes_away_is_named_where_other_shards_are_kept(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack(source)
    (source / f"{NAMES[4]}.my.pt").write_bytes(b"another")
    read = Path.read_bytes

    def gone(path: Path) -> bytes:
        if path.name.startswith("sample4"):
            path.unlink()
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", gone)
    with pytest.raises(ShardError, match=r"failed to read sample 4: FileNotFoundError.*p-000001.tar"):
        pack(source)


def test_what_is_up_to_date_need_not_be_writable(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = pack(source)

    def refuse(*_: object) -> None:  # root may write everywhere
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "replace", refuse)
    assert pack(source) == paths
    paths[0].unlink()
    with pytest.raises(OSError, match=r"Read-only file system: the shard was not written.*p-000000.tar"):
        pack(source)


def packer(source: Path, stuck: str) -> "subprocess.Popen[str]":
    script = [sys.executable, str(Path(__file__).with_name("pickle_packer.py"))]
    words = (source, source.parent / "tars", COUNT, stuck)
    return subprocess.Popen([*script, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


COUNT = 60


@pytest.mark.parametrize("stuck", [35, *(pytest.param(one, marks=pytest.mark.nightly) for one in (0, 59))])
def test_kill_nine_and_again(source: Path, stuck: int) -> None:
    for i in range(COUNT):
        (source / f"sample{i}.pt").write_bytes(pickle.dumps(b"x" * 10 * i))
    folder = source.parent / "tars"
    with packer(source, f"sample{stuck}") as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "stuck\n"  # it ends by itself when it does not come so far
        finally:
            process.kill()
        assert process.wait() == -signal.SIGKILL
    assert list(folder.glob(".*.part"))
    assert not (folder / "manifest.json").exists()
    paths = sorted(folder.glob("*.tar"))
    assert len(paths) == 5  # all but one
    for path in paths:
        build_index(path.read_bytes())  # whole
    before = dict(zip(paths, states(paths), strict=True))
    pickle_packer.pack(source, folder, COUNT)
    assert len(list(folder.glob("*.tar"))) == 6
    after = sorted(folder.glob("*.tar"))
    assert before.items() <= dict(zip(after, states(after), strict=True)).items()
    assert verify_shards(folder) == []
    assert not list(folder.glob(".*"))
    keys = [sample["__key__"] for sample in IndexedShards(folder, decode=None)]
    assert keys == [f"sample{i}" for i in range(COUNT)]
