"""Where the names of members are cut into a sample's key and a member's: at their first dot, or at their last."""

import io
import json
import tarfile
import warnings
from pathlib import Path
from typing import Any

import pytest
from command_line import run

from headrace.webdatamodule import GroupingError, IndexedShards, ShardIndex, index_shards, verify_shards

NAMES = [f"chr{chromosome}.{number}.txt" for chromosome in range(3) for number in range(100)]
FEW = "300 members make only 3 samples, as names such as .chr0.0.txt. are cut at their first dot: "
FEW += r'pass split_at="last".*--split-at last'


def tar_of(folder: Path, names: list[str], name: str = "a.tar") -> Path:
    folder.mkdir(exist_ok=True)
    with tarfile.open(folder / name, "w") as tar:
        for number, member in enumerate(names):
            data = b"%d" % number
            header = tarfile.TarInfo(member)
            header.size = len(data)
            tar.addfile(header, io.BytesIO(data))
    return folder


def test_ids_with_dots_that_become_few_samples_are_warned_of(tmp_path: Path) -> None:
    folder = tar_of(tmp_path / "tars", NAMES)
    for _ in range(2):  # also when the index is kept
        with pytest.warns(UserWarning, match=FEW):
            assert index_shards(folder).n_samples == 3
    done = run("index", folder)
    assert done.returncode == 0
    assert b"300 members make only 3 samples" in done.stderr


def test_a_cut_at_the_last_dot_makes_a_sample_of_each_file(tmp_path: Path) -> None:
    folder = tar_of(tmp_path / "tars", NAMES)
    tar_of(folder, ["x.y.cls", "d.1/x.z.cls", "d.1/x.z.txt", ".hidden.txt", "README"], "b.tar")
    with pytest.warns(UserWarning, match="2 members will not be read"):
        manifest = index_shards(folder, split_at="last")
    assert (manifest.n_samples, manifest.members) == (302, ("cls", "txt"))
    shards = IndexedShards(folder)
    assert [shards.key(number) for number in range(300)] == [name.removesuffix(".txt") for name in NAMES]
    assert shards[301] == {"__key__": "d.1/x.z", "cls": 1, "txt": "2"}
    assert verify_shards(folder) == []
    for name, printed in (("chr1.0.txt", b"100"), ("chr1.0", b"100"), ("d.1/x.z.txt", b"2"), ("d.1/x.z", b"1\n2")):
        assert run("cat", folder, name).stdout == printed
    assert run("cat", folder, "chr1.0.cls").returncode == 2
    assert b"README" in run("index", folder, "--split-at", "last").stderr


def test_another_cut_makes_another_index(tmp_path: Path) -> None:
    folder = tar_of(tmp_path / "tars", ["a.1.txt", "a.2.txt"])
    assert index_shards(folder).n_samples == 1
    assert index_shards(folder, split_at="last").n_samples == 2
    before = (folder / "a.tar.hri").stat().st_mtime_ns
    assert index_shards(folder, split_at="last").n_samples == 2
    assert (folder / "a.tar.hri").stat().st_mtime_ns == before
    assert ShardIndex.open(folder / "a.tar").split_at == "last"
    found = run("index", folder, "--split-at", "last", "--json")
    assert json.loads(found.stdout)["samples"] == 2
    data = bytearray((folder / "a.tar").read_bytes())
    data[512] ^= 1
    (folder / "a.tar").write_bytes(data)
    [fault] = verify_shards(folder)
    assert (fault.sample, fault.member) == ("a.1", "a.1.txt")
    data[512] ^= 1
    (folder / "a.tar").write_bytes(data)
    (folder / "a.tar.hri").unlink()
    [fault] = verify_shards(folder)
    assert fault.message == "the index is missing: index the shard"
    assert index_shards(folder).n_samples == 1


def test_members_that_are_not_adjacent_name_the_other_cut(tmp_path: Path) -> None:
    folder = tar_of(tmp_path / "tars", ["a.1.txt", "b.1.txt", "a.2.txt"])
    with pytest.raises(GroupingError, match=r'next to one another, or pass split_at="last" if the dots'):
        index_shards(folder)
    assert index_shards(folder, split_at="last").n_samples == 3
    folder = tar_of(tmp_path / "others", ["a.txt", "b.txt", "a.cls"])
    with pytest.raises(GroupingError) as raised:
        index_shards(folder)
    assert "split_at" not in str(raised.value)


def test_samples_of_many_members_are_no_reason_to_warn(tmp_path: Path) -> None:
    names = [f"s{number}.view{view}.txt" for number in range(4) for view in range(15)]
    plain = [f"s{number}.view{view}" for number in range(4) for view in range(50)]
    for number, some in enumerate((names, plain)):
        folder = tar_of(tmp_path / f"tars{number}", some)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert index_shards(folder).n_samples == 4


@pytest.mark.parametrize("wrong", ["middle", "", None, 1])
def test_a_cut_elsewhere_is_refused(wrong: Any, tmp_path: Path) -> None:
    folder = tar_of(tmp_path / "tars", ["a.1.txt"])
    with pytest.raises(ValueError, match=f"split_at must be 'first' or 'last', got {wrong!r}"):
        index_shards(folder, split_at=wrong)


def test_packing_warns_and_cuts_alike(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    for name in NAMES:
        (source / name).write_text(name)
    done = run("pack", source, tmp_path / "out")
    assert done.returncode == 0
    assert b"300 files make only 3 samples, as names such as" in done.stderr
    assert b"--split-at last" in done.stderr
    done = run("pack", source, tmp_path / "other", "--split-at", "last")
    assert done.stderr == b""
    assert len(IndexedShards(tmp_path / "other")) == 300
