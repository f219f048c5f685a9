"""What a reader of indexed shards does when the files are not what they were."""

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.webdatamodule import (
    DamagedIndexError,
    DamagedShardError,
    IndexedShards,
    IndexVersionError,
    Manifest,
    ManifestError,
    ShardError,
    ShardIndex,
    StaleIndexError,
    index_shards,
    write_tars,
)
from headrace.webdatamodule.shards.index.build import index_shard
from headrace.webdatamodule.shards.index.consolidated import write_set_index
from headrace.webdatamodule.shards.index.shard_index import index_path
from headrace.webdatamodule.shards.reading.open_shards import LruCache

COUNT = 60
REFUSED = (DamagedIndexError, IndexVersionError, StaleIndexError)


def make(folder: Path, byte: int = 7, size: int = 700) -> list[Path]:
    samples = [(f"s{i:02d}", {"a": bytes([byte, i]) * size, "b": b"%d" % i}) for i in range(COUNT)]
    paths = write_tars(samples, folder, n_shards=2)
    index_shards(folder)
    (folder / "manifest.hrs").unlink()  # which would stand in for the shards' own indexes
    return paths


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def flip(path: Path, offset: int, bit: int = 0) -> None:
    overwrite(path, offset, bytes([path.read_bytes()[offset] ^ 1 << bit]))


def member(path: Path, sample: int, column: int) -> tuple[int, int]:
    index = ShardIndex.open(path)
    at = index.span(sample)[0] + column
    return int(index.offsets[at]), int(index.sizes[at])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make(tmp_path_factory.mktemp("whole"))


@given(st.integers(0, COUNT - 1), st.integers(0, 1), st.integers(0, 1399), st.integers(0, 7))
def test_a_flipped_bit_of_data_is_found_with_its_place(
    whole: list[Path], sample: int, column: int, byte: int, bit: int
) -> None:
    shard, number = whole[sample // 30], sample % 30
    offset, size = member(shard, number, column)
    dataset = IndexedShards(whole[0].parent, decode=None)
    everything = list(dataset)  # and so the shards are open, because on opening some bytes are looked at
    flip(shard, offset + byte % size, bit)
    place = (str(shard), f"s{sample:02d}", f"s{sample:02d}.{'ab'[column]}", offset - 512)
    seen: list[Any] = []
    try:
        for read in (
            lambda: dataset[sample],
            lambda: dataset.__getitems__([1, sample, 59]),
            lambda: seen.extend(one for one in dataset),
        ):
            with pytest.raises(DamagedShardError, match="not those that were indexed") as caught:
                read()
            error = caught.value
            assert (error.shard, error.sample, error.member, error.offset) == place
        assert seen == everything[:sample]
        others = [index for index in range(COUNT) if index != sample]
        assert dataset.__getitems__(others) == [everything[index] for index in others]
    finally:
        flip(shard, offset + byte % size, bit)


def test_the_checks_differ_in_when_they_are_made(tmp_path: Path) -> None:
    second = make(tmp_path)[1]
    offset, size = member(second, 5, 0)
    flip(second, offset + size // 2)
    on_read = IndexedShards(tmp_path, decode=None, verify="read")
    on_open = IndexedShards(tmp_path, decode=None, verify="open")
    never = IndexedShards(tmp_path, decode=None, verify="none")
    assert on_read[36]["b"] == b"36"
    assert on_open[6]["b"] == b"6"
    with pytest.raises(DamagedShardError, match=r"s35\.a"):
        on_read[35]
    with pytest.raises(DamagedShardError, match=r"s35\.a"):
        on_open[36]  # another sample of the same shard
    assert len(never[35]["a"]) == size


def test_open_checks_the_members_that_are_not_read_too(tmp_path: Path) -> None:
    offset, _ = member(make(tmp_path)[0], 5, 0)
    flip(tmp_path / "wdshards-000000.tar", offset)
    assert IndexedShards(tmp_path, ["b"], decode=None)[5] == {"__key__": "s05", "b": b"5"}
    with pytest.raises(DamagedShardError, match=r"s05\.a"):
        IndexedShards(tmp_path, ["b"], decode=None, verify="open")[5]


@pytest.mark.parametrize("check", ["read", "open", "none"])
@pytest.mark.parametrize("left", [0, 1, 511, 512, 20_000, -512, -1])
def test_a_cut_shard_is_an_error(tmp_path: Path, left: int, check: Any) -> None:
    shard = make(tmp_path)[0]
    os.truncate(shard, left % shard.stat().st_size)
    dataset = IndexedShards(tmp_path, decode=None, verify=check)
    for read in (lambda: dataset[0], lambda: dataset.__getitems__([3]), lambda: list(dataset)):
        with pytest.raises(StaleIndexError, match="bytes, but") as caught:
            read()
        assert caught.value.shard == str(shard)
    assert dataset[30]["__key__"] == "s30"


def test_a_shard_that_is_cut_while_it_is_open_does_not_kill_the_process(tmp_path: Path) -> None:
    script = """
import os, sys
from headrace.webdatamodule import StaleIndexError
from headrace.webdatamodule import IndexedShards
dataset = IndexedShards(sys.argv[1], decode=None, verify="none")
iterator = dataset.iterate()
next(iterator), dataset[59]
for name in ("wdshards-000000.tar", "wdshards-000001.tar"):
    os.truncate(os.path.join(sys.argv[1], name), 4096)
found = 0
for read in (lambda: dataset[29], lambda: dataset.__getitems__([59]), lambda: list(iterator)):
    try:
        read()
    except StaleIndexError as error:
        found += "wdshards" in error.shard and "4096 now" in str(error)
sys.exit(found)
"""
    make(tmp_path, size=100_000)
    assert subprocess.run([sys.executable, "-c", script, tmp_path], check=False).returncode == 3


@pytest.mark.parametrize("check", ["read", "open", "none"])
def test_a_replaced_shard_is_an_error_for_who_opens_it(tmp_path: Path, check: Any) -> None:
    folder, other = tmp_path / "a", tmp_path / "b"
    shard, replacement = make(folder)[0], make(other, byte=8)[0]
    dataset = IndexedShards(folder, decode=None, verify=check)
    before = dataset.__getitems__(range(COUNT))
    assert shard.stat().st_size == replacement.stat().st_size
    replacement.replace(shard)
    # The map is one of the old file, which the index fits.
    assert dataset.__getitems__(range(COUNT)) == before
    for later in (IndexedShards(folder, decode=None, verify=check), pickle.loads(pickle.dumps(dataset))):
        with pytest.raises(StaleIndexError, match="other content"):
            later[0]


def test_a_shard_that_is_overwritten_while_it_is_open_is_found(tmp_path: Path) -> None:
    folder, other = tmp_path / "a", tmp_path / "b"
    shard, replacement = make(folder)[0], make(other, byte=8)[0]
    dataset = IndexedShards(folder, decode=None)
    assert dataset[3]["a"][:1] == b"\x07"
    shard.write_bytes(replacement.read_bytes())  # in place
    with pytest.raises(DamagedShardError, match=r"s03\.a"):
        dataset[3]


def test_a_shard_and_its_index_that_are_replaced_together_are_found(tmp_path: Path) -> None:
    folder, other = tmp_path / "a", tmp_path / "b"
    shard, replacement = make(folder)[0], make(other, byte=8)[0]
    listed = IndexedShards([shard], decode=None)
    replacement.replace(shard)
    index_path(replacement).replace(index_path(shard))
    for dataset in (IndexedShards(folder, decode=None), listed):
        with pytest.raises(StaleIndexError, match="the index does not match"):
            dataset[0]
        with pytest.raises(StaleIndexError, match="the index does not match"):
            dataset.sizes("a")
    index_shards(folder)
    assert IndexedShards(folder, decode=None)[0]["a"][:1] == b"\x08"


def test_an_index_that_is_missing_is_an_error(tmp_path: Path) -> None:
    shard = make(tmp_path)[0]
    index_path(shard).unlink()
    dataset = IndexedShards(tmp_path, decode=None)
    with pytest.raises(ShardError, match=r"no index 'wdshards-000000\.tar\.hri'.*index_shards.*wdshards-000000\.tar'"):
        dataset[0]
    assert dataset[30]["__key__"] == "s30"
    with pytest.raises(ShardError, match="no index"):
        IndexedShards([shard])


def test_the_index_of_a_set_stands_in_for_those_of_its_shards(tmp_path: Path) -> None:
    paths = make(tmp_path)
    expected = list(IndexedShards(tmp_path))
    write_set_index(tmp_path, Manifest.load(tmp_path))
    whole = (tmp_path / "manifest.hrs").read_bytes()
    index_path(paths[0]).rename(tmp_path / "kept")
    assert list(IndexedShards(tmp_path)) == expected
    (tmp_path / "kept").rename(index_path(paths[0]))
    for damaged in (b"", whole[:-1], whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:], whole[:40] + b"x" + whole[41:]):
        (tmp_path / "manifest.hrs").write_bytes(damaged)  # then those of the shards are read
        assert list(IndexedShards(tmp_path)) == expected


def test_a_shard_that_is_missing_is_an_error(tmp_path: Path) -> None:
    shard = make(tmp_path)[0]
    shard.unlink()
    with pytest.raises(ShardError, match=r"cannot be opened.*No such file.*restore it.*wdshards-000000\.tar'"):
        IndexedShards(tmp_path)[0]


@given(st.data())
def test_a_damaged_index_is_never_believed(whole: list[Path], data: st.DataObject) -> None:
    path = index_path(whole[1])
    intact = path.read_bytes()
    byte, bit = data.draw(st.integers(0, len(intact) - 1)), data.draw(st.integers(0, 7))
    check: Any = data.draw(st.sampled_from(["read", "open"]))
    try:
        flip(path, byte, bit)
        dataset = IndexedShards(whole[0].parent, decode=None, verify=check)
        for read in (lambda: dataset[COUNT - 1], lambda: dataset.sizes("a"), lambda: dataset.key(-1)):
            with pytest.raises(REFUSED) as caught:  # a flipped version is that of another release
                read()
            assert caught.value.shard == str(whole[1])
        path.write_bytes(intact[:byte])
        with pytest.raises(REFUSED):
            IndexedShards(whole[0].parent, decode=None, verify=check)[COUNT - 1]
    finally:
        path.write_bytes(intact)


def test_a_manifest_that_is_missing_is_an_error(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "manifest.json").unlink()
    for source in (tmp_path, tmp_path / "manifest.json"):
        with pytest.raises((ManifestError, FileNotFoundError)):
            IndexedShards(source)


def test_shards_that_the_manifest_does_not_list_are_not_read(tmp_path: Path) -> None:
    shard = make(tmp_path)[0]
    shutil.copy(shard, tmp_path / "other.tar")
    assert len(IndexedShards(tmp_path)) == Manifest.load(tmp_path).n_samples == COUNT


LIMITED = """
import os, resource, sys
from headrace.webdatamodule import IndexedShards
from headrace.webdatamodule import ShardError
dataset = IndexedShards(sys.argv[1], decode=None, max_open=int(sys.argv[2]) or None)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
count = len(dataset)
if sys.argv[3] == "full":
    taken = []
    try:
        while True:
            taken.append(os.open(sys.argv[1], os.O_RDONLY))
    except OSError:
        pass
    try:
        dataset[0]
    except ShardError as error:
        text = str(error)
        os.close(taken.pop())
        named = "Too many open files" in text and "ulimit -n" in text and error.shard.endswith("000000.tar")
        sys.exit(4 if named else 5)
    sys.exit(6)
keys = ["s%05d" % index for index in range(count)]
for _ in range(2):
    assert [sample["__key__"] for sample in dataset.iterate()] == keys
    order = [index * 7 % count for index in range(count)]
    assert [sample["__key__"] for sample in dataset.__getitems__(order)] == [keys[index] for index in order]
    assert [dataset[index]["__key__"] for index in order[:100]] == [keys[index] for index in order[:100]]
    assert dataset.sizes("a").tolist() == [1] * count
free = os.open(sys.argv[1], os.O_RDONLY)
sys.exit(3)
"""


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many")
    write_tars([(f"s{i:05d}", {"a": b"1"}) for i in range(601)], folder, n_shards=300)
    index_shards(folder)
    return folder


@pytest.mark.parametrize(("max_open", "mode", "code"), [(0, "", 3), (500, "", 3), (8, "", 3), (0, "full", 4)])
@pytest.mark.slow
def test_many_shards_fit_into_few_file_descriptors(many: Path, max_open: int, mode: str, code: int) -> None:
    command = [sys.executable, "-c", LIMITED, str(many), str(max_open), mode]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr


def test_a_list_of_more_shards_than_descriptors_can_be_made(many: Path) -> None:
    script = """
import resource, sys
from pathlib import Path
from headrace.webdatamodule import IndexedShards
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
sys.exit(len(IndexedShards(sorted(Path(sys.argv[1]).glob("*.tar")))) % 256)
"""
    assert subprocess.run([sys.executable, "-c", script, str(many)], check=False).returncode == 601 % 256


def test_a_shard_without_samples_is_passed_over(tmp_path: Path) -> None:
    write_tars([("s0", {"a": b"1"})], tmp_path, n_shards=1)
    for name in ("a.tar", "x.tar", "y.tar"):
        (tmp_path / name).write_bytes(bytes(10240))
        index_shard(tmp_path / name)
    index_shards(tmp_path)
    dataset = IndexedShards(tmp_path, decode=None)
    assert list(dataset) == [dataset[0]] == dataset.__getitems__([-1]) == [{"__key__": "s0", "a": b"1"}]
    assert dataset.sizes("a").tolist() == [1]
    nothing = IndexedShards([tmp_path / "x.tar"])
    assert (len(nothing), list(nothing), nothing.__getitems__([])) == (0, [], [])
    with pytest.raises(IndexError):
        nothing[0]


def test_what_is_open_is_not_opened_again() -> None:
    asked: list[int] = []

    def opened(number: int) -> int:
        asked.append(number)
        return -number

    cache = LruCache(opened, 1)
    assert [cache.get(number) for number in (3, 3, 4, 3)] == [-3, -3, -4, -3]
    assert asked == [3, 4, 3]
