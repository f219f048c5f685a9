import os
import pickle
from pathlib import Path

import pytest

from headrace.webdatamodule import ShardError
from headrace.webdatamodule.shards.pickles import pack_files
from headrace.webdatamodule.shards.tar import members

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
    assert [name for path in paths for name, _ in members(path)] == [f"sample{i}-x.my.pt" for i in range(5)]
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


def test_a_changed_file_renews_its_shard_only(source: Path) -> None:
    first, second = states(pack(source))
    (source / f"{NAMES[0]}.my.pt").write_bytes(pickle.dumps("longer than before"))
    after = states(pack(source))
    assert after[0] != first
    assert after[1] == second


def test_a_newer_file_of_the_same_size_renews_its_shard(source: Path) -> None:
    paths = pack(source)
    file = source / f"{NAMES[0]}.my.pt"
    file.write_bytes(pickle.dumps(9))
    later = paths[0].stat().st_mtime_ns + 10**9
    os.utime(file, ns=(later, later))
    before = states(paths)
    assert states(pack(source))[0] != before[0]
    assert pickle.dumps(9) in paths[0].read_bytes()


def test_a_missing_shard_of_the_set_is_written(source: Path) -> None:
    paths = pack(source)
    data = paths[1].read_bytes()
    paths[1].unlink()
    assert pack(source)[1].read_bytes() == data


def test_shards_of_other_samples_are_never_touched(source: Path) -> None:
    data = [path.read_bytes() for path in pack(source)]
    with pytest.raises(FileExistsError, match=r"p-000000.tar holds other samples"):
        pack(source, NAMES[1:])
    with pytest.raises(FileExistsError, match="1 shards of prefix 'p' beside"):
        pack(source, n_shards=1)
    assert [path.read_bytes() for path in sorted((source.parent / "tars").iterdir())] == data


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
    with pytest.raises(ValueError, match="without names"):
        pack(source, [])


def test_several_files_a_sample(source: Path) -> None:
    (source / "sample0.x.json").write_text("1")
    [path] = pack_files(source, NAMES[:1], ["my.pt", "json"], source / "t", n_shards=1, prefix="p")
    assert [name for name, _ in members(path)] == ["sample0-x.my.pt", "sample0-x.json"]
