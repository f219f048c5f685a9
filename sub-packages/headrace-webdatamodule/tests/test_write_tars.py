from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.webdatamodule import IndexedShards, ShardError, index_shards, write_shards, write_tars
from headrace.webdatamodule.shards.writing.pack_files import list_members
from headrace.webdatamodule.shards.writing.plan import (
    shards_of_prefix,
)
from headrace.webdatamodule.utils import pickles_to_tars


def samples(n: int) -> list[tuple[str, dict[str, bytes]]]:
    return [(f"s{i}", {"txt": b"%d" % i}) for i in range(n)]


@pytest.mark.parametrize(
    ("n_shards", "allowed"), [(0, ">= 1"), (-1, ">= 1"), (4, "from 1 to the number of samples, 3")]
)
def test_no_shard_may_be_empty(tmp_path: Path, n_shards: int, allowed: str) -> None:
    with pytest.raises(ValueError, match=f"n_shards must be an int {allowed}, got {n_shards}: no shard may be empty"):
        write_tars(samples(3), tmp_path / "new", n_shards=n_shards)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("n_shards", [2.0, "2", True, None])
def test_a_number_of_shards_that_is_none(tmp_path: Path, n_shards: Any) -> None:
    with pytest.raises(TypeError, match=f"n_shards must be an int >= 1, got {n_shards!r}"):
        write_tars(samples(3), tmp_path / "new", n_shards=n_shards)


@pytest.mark.parametrize("url", ["s3://bucket/a", Path("s3://bucket/a"), "file:///a", "simplecache::s3://bucket/a"])
def test_a_url_is_no_directory_to_write_to(url: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").touch()
    writers: dict[str, Callable[[], object]] = {
        "directory": lambda: write_tars(samples(3), url, n_shards=1),
        "directory ": lambda: write_shards(samples(3), url, n_shards=1),
        "directory  ": lambda: write_shards(iter(samples(3)), url, samples_per_shard=1),
        "dir_output": lambda: pickles_to_tars(tmp_path, ["a"], "txt", url, "p"),
    }
    for name, writer in writers.items():
        with pytest.raises(
            ValueError, match=f"{name.strip()} must be a local one, got .*: write the shards, then copy"
        ):
            writer()
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_a_folder_with_a_colon_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_tars(samples(3), "run: 3/train", n_shards=1)
    write_tars(samples(3), "3:00/train", n_shards=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3:00", "run: 3"]


def test_samples_keep_their_order_over_the_shards(tmp_path: Path) -> None:
    paths = write_tars(samples(10), tmp_path / "deep" / "er", n_shards=3, prefix="mine")
    assert [path.name for path in paths] == [f"mine-00000{i}.tar" for i in range(3)]
    assert [name for path in paths for name, _ in list_members(path)] == [f"s{i}.txt" for i in range(10)]
    assert paths == shards_of_prefix(tmp_path / "deep" / "er", "mine")


def test_samples_are_asked_for_one_by_one(tmp_path: Path) -> None:
    class Lazy(list[tuple[str, dict[str, bytes]]]):
        asked: list[object] = []  # noqa: RUF012 - one test, one list

        def __getitem__(self, position):  # type: ignore[no-untyped-def] # list's overloads, spied on
            self.asked.append(position)
            return super().__getitem__(position)

    write_tars(Lazy(samples(4)), tmp_path, n_shards=2)
    assert Lazy.asked == [0, 1, 2, 3]


def test_a_key_that_occurs_twice_leaves_no_shard(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match=r"'s0' occurs twice, first in wdshards-000000.tar"):
        write_tars([*samples(3), samples(1)[0]], tmp_path, n_shards=2)
    assert not list(tmp_path.iterdir())


def test_a_failed_rewrite_keeps_the_whole_old_set(tmp_path: Path) -> None:
    old = [path.read_bytes() for path in write_tars(samples(4), tmp_path, n_shards=2)]
    with pytest.raises(ShardError):
        write_tars([("other", {"x": b""}), ("bad.key", {"x": b""})], tmp_path, n_shards=2)
    assert [path.read_bytes() for path in sorted(tmp_path.iterdir())] == old


def test_shards_of_an_earlier_larger_set_are_not_taken_for_data(tmp_path: Path) -> None:
    write_tars(samples(5), tmp_path, n_shards=5)
    with pytest.raises(FileExistsError, match=r"2 shards .* beside the 3 .*wdshards-000003.tar"):
        write_tars(samples(5), tmp_path, n_shards=3)
    assert len(write_tars(samples(5), tmp_path, n_shards=3, prefix="other")) == 3
    assert len(write_tars(samples(7), tmp_path, n_shards=5)) == 5


def test_a_home_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    paths = write_tars(samples(3), "~/tars", n_shards=1)
    assert paths == [tmp_path / "home" / "tars" / "wdshards-000000.tar"]
    assert not (tmp_path / "~").exists()
    index_shards("~/tars")
    assert len(IndexedShards("~/tars")) == 3


@pytest.mark.parametrize("key", [3, ["s0"], None])
def test_a_key_that_is_no_text_is_refused(tmp_path: Path, key: Any) -> None:
    with pytest.raises(ShardError, match="must be a pair of a text"):
        write_tars([*samples(3), (key, {"x": b""})], tmp_path, n_shards=2)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "samples", [[("a", {"txt": b"1"}, 3)], ["abc"], [3], {0: ("a", {"txt": b"1"}), "b": ("b", {"txt": b"1"})}]
)
def test_what_gives_no_pairs_is_told_with_its_number(tmp_path: Path, samples: Any) -> None:
    with pytest.raises(ShardError, match=r"failed to read sample [01]: \w+Error: .*shard .*000000.tar"):
        write_tars(samples, tmp_path, n_shards=1)
    assert list(tmp_path.iterdir()) == []
