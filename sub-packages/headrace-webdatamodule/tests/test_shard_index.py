import io
import mmap
import os
import pickle
import subprocess
import sys
import tarfile
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import webdataset as wds
from hypothesis import given
from hypothesis import strategies as st
from indexed_sets import ALIKE, made
from plain_tar import write_tar

from headrace.webdatamodule import (
    DamagedIndexError,
    IndexedShards,
    IndexVersionError,
    ShardError,
    ShardIndex,
    StaleIndexError,
)
from headrace.webdatamodule.shards.format.tar import group, walk
from headrace.webdatamodule.shards.index.build import build_index
from headrace.webdatamodule.shards.index.checksums import checksum64, fingerprint_ranges
from headrace.webdatamodule.shards.index.container import (
    INDEX_MAGIC,
    INDEX_VERSION,
    MAX_DESCRIPTION_BYTES,
    pack,
    unpack,
)
from headrace.webdatamodule.shards.index.shard_index import index_path

FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
KEYS = st.text(st.characters(codec="utf-8", exclude_characters="./\0") | st.just("\udc80"), min_size=1, max_size=20)
MEMBERS = st.dictionaries(st.sampled_from(["txt", "a.bin", "0", "Cls"]), st.binary(max_size=1500), min_size=1)
SAMPLES = st.dictionaries(KEYS.filter(lambda key: not key.startswith("__")), MEMBERS, max_size=6)
Given = dict[str, dict[str, bytes]]


def tar(samples: Given, kind: int = tarfile.USTAR_FORMAT) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=kind, encoding="utf-8", errors="surrogateescape") as file:
        for key, members in samples.items():
            for suffix, data in members.items():
                header = tarfile.TarInfo(f"{key}.{suffix}")
                header.size = len(data)
                header.mtime = 1.5 if kind == tarfile.PAX_FORMAT else 1
                file.addfile(header, io.BytesIO(data))
    return stream.getvalue()


def numbered(count: int) -> Given:
    return {f"s{n:06d}": {"txt": b"%d" % n * (n % 300), "json": b"{}"} for n in range(count)}


def read_all(index: ShardIndex, data: bytes) -> list[tuple[str, list[tuple[str, bytes]]]]:
    found = []
    for sample, key in enumerate(index.keys):
        start, stop = index.span(sample)
        spans = zip(index.offsets[start:stop], index.sizes[start:stop], strict=True)
        pieces = [data[offset : offset + int(size)] for offset, size in spans]
        assert [checksum64(piece) & 0xFFFFFFFF for piece in pieces] == index.checksums[start:stop].tolist()
        found.append((key, list(zip(index.layout(sample), pieces, strict=True))))
    return found


def reader(data: bytes) -> Callable[[int, int], bytes]:
    return lambda begin, end: data[begin:end]


def lowered(samples: Given) -> list[tuple[str, list[tuple[str, bytes]]]]:
    return [(key, [(k.lower(), v) for k, v in members.items()]) for key, members in samples.items()]


@given(st.sampled_from(FORMATS), SAMPLES)
def test_an_index_finds_what_was_written(kind: int, samples: Given) -> None:
    data = tar(samples, kind)
    index = ShardIndex(build_index(data))
    assert read_all(index, data) == lowered(samples)
    assert (len(index), index.shard_bytes) == (len(samples), len(data))
    assert [index.find(key) for key in samples] == list(range(len(samples)))
    for position in range(index.n_members):
        sample, name = index.locate(position)
        start, stop = index.span(sample)
        assert start <= position < stop
        assert name == f"{index.key(sample)}.{list(samples[index.key(sample)])[position - start]}"
    for member in (*index.member_keys, "nowhere"):
        expected = [
            index.span(s)[0] + index.layout(s).index(member) if member in index.layout(s) else -1
            for s in range(len(index))
        ]
        assert index.positions(member).tolist() == expected
        assert index.positions(member, [0] * bool(samples)).tolist() == expected[:1]
    index.check_self()
    index.check_shard(len(data), reader(data))


def test_it_finds_what_webdataset_wrote(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with wds.TarWriter(str(path)) as writer:
        for number in range(20):
            writer.write({"__key__": f"deep/{number:04d}", "txt": "x" * number, "cls": number})
    data = path.read_bytes()
    found = read_all(ShardIndex(build_index(data)), data)
    assert [(key, dict(members)["txt"]) for key, members in found] == [
        (f"deep/{number:04d}", b"x" * number) for number in range(20)
    ]


def test_it_finds_what_gnu_tar_wrote(tmp_path: Path) -> None:
    names = [f"in/{part}{'x' * 120}{number}.txt" for part in "ab" for number in range(3)]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert subprocess.run(["tar", "--sort=name", "-cf", "a.tar", "in"], cwd=tmp_path, check=False).returncode == 0
    data = (tmp_path / "a.tar").read_bytes()
    index = ShardIndex(build_index(data))
    assert read_all(index, data) == [(name[:-4], [("txt", name.encode())]) for name in names]
    assert index.skipped == {"directory": 1}
    assert index.n_skipped == 0


@given(SAMPLES)
def test_the_same_shard_has_the_same_index(samples: Given) -> None:
    assert build_index(tar(samples)) == build_index(memoryview(tar(samples)))


@pytest.mark.slow
def test_two_members_take_less_than_28_bytes_a_sample() -> None:
    index = build_index(tar(numbered(5000)))
    assert len(index) / 5000 < 24.5


def test_opening_does_not_read_what_only_checksums_tell() -> None:
    packed = build_index(tar(numbered(1000)))
    description, arrays, *_ = unpack(memoryview(packed))
    noise = np.random.default_rng(0).integers(0, 1 << 32, 2000, np.uint32)
    assert ShardIndex(pack(description, {**arrays, "checksums": noise})).checksums.tolist() == noise.tolist()
    head = len(packed) - len(unpack(memoryview(packed)).body)
    broken = bytearray(packed)
    broken[-1] ^= 1  # in the last frame
    index = ShardIndex(bytes(broken))
    assert (len(index), index.key(999), head < 600) == (1000, "s000999", True)
    with pytest.raises(DamagedIndexError, match="arrays of the index are damaged"):
        index.check_self()


@pytest.mark.slow
def test_small_indexes_are_read_and_large_ones_mapped(large: Path, tmp_path: Path) -> None:
    for path, count, mapped in ((made(tmp_path, ALIKE), len(ALIKE), False), (large, 12_000, True)):
        for allowed in (True, False):
            index = ShardIndex.open(path, mapped=allowed)
            assert (len(index), isinstance(index.data.obj, mmap.mmap)) == (count, mapped and allowed)
            index.check_size()


def test_an_index_travels_to_other_processes(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(tar(numbered(1000)))
    index_path(path).write_bytes(build_index(path.read_bytes()))
    index = ShardIndex.open(path)
    packed = pickle.dumps(index)
    assert len(packed) < 500
    code = "import pickle, sys; i = pickle.load(sys.stdin.buffer); sys.exit(i.find('s000777') != 777)"
    assert subprocess.run([sys.executable, "-c", code], input=packed, check=False).returncode == 0
    again = pickle.loads(pickle.dumps(ShardIndex(build_index(path.read_bytes()), shard="s3://x/a.tar")))
    assert (again.shard, again.checksum) == ("s3://x/a.tar", index.checksum)
    index_path(path).write_bytes(build_index(tar(numbered(10))))
    with pytest.raises(StaleIndexError, match="replaced"):
        pickle.loads(packed)


def test_skipped_members_are_counted_and_named(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as file:
        for name in ("README", "a.txt", "__x__/y.z", *(f"no{n}" for n in range(50))):
            file.addfile(tarfile.TarInfo(name))
    index = ShardIndex(build_index(path.read_bytes()))
    assert index.skipped == {"no extension": 51, "meta": 1}
    assert index.n_skipped == 52
    assert index.skipped_names[:2] == ("README", "__x__/y.z")
    assert len(index.skipped_names) == 16


def test_a_shard_without_samples_has_an_index() -> None:
    index = ShardIndex(build_index(bytes(10240)))
    assert (len(index), index.n_members, list(index.keys), index.positions("txt").tolist()) == (0, 0, [], [])
    with pytest.raises(KeyError):
        index.find("a")


def test_another_shard_is_told_apart() -> None:
    data = tar(numbered(200))
    index = ShardIndex(build_index(data), shard="s.tar")
    for other in (data + bytes(512), data[:-512], tar({f"t{k}": v for k, v in numbered(200).items()})):
        with pytest.raises(StaleIndexError, match="replaced, cut or damaged") as caught:
            index.check_shard(len(other), reader(other))
        assert caught.value.shard == "s.tar"
    assert sum(end - begin for begin, end in index.fingerprint_ranges()) == 3 * 4096


def test_a_member_beyond_4_gib_is_found(tmp_path: Path) -> None:
    header = tarfile.TarInfo("a.txt")
    header.size = 5 << 30
    path = tmp_path / "a.tar"
    with path.open("wb") as file:  # a sparse file: it takes no room
        file.write(header.tobuf(tarfile.GNU_FORMAT))
        file.seek(5 << 30, os.SEEK_CUR)
        file.write(tar({"b": {"txt": b"1"}}))
    assert path.stat().st_blocks < 1000
    with path.open("rb") as shard, mmap.mmap(shard.fileno(), 0, access=mmap.ACCESS_READ) as data:
        samples = group(walk(data))
    assert samples.sizes == [5 << 30, 1]


@pytest.fixture(scope="module")
def packed() -> bytes:
    return build_index(tar({"b": {"txt": b"1"}, "a": {"txt": b"2", "cls": b"3"}, "ccc": {"txt": b""}}))


def test_each_flipped_bit_is_found(packed: bytes) -> None:
    for bit in range(8 * len(packed)):
        broken = bytearray(packed)
        broken[bit // 8] ^= 1 << bit % 8
        with pytest.raises(IndexVersionError if 64 <= bit < 96 else DamagedIndexError):
            ShardIndex(bytes(broken)).check_self()


def test_each_cut_is_found_at_opening(packed: bytes, tmp_path: Path) -> None:
    for length in range(len(packed)):
        with pytest.raises(DamagedIndexError):
            ShardIndex(packed[:length], shard="s.tar")
    with pytest.raises(DamagedIndexError, match="longer than it says"):
        ShardIndex(packed + bytes(8))
    path = index_path(tmp_path / "a.tar")
    path.touch()
    with pytest.raises(DamagedIndexError, match="no index"):
        ShardIndex.open(tmp_path / "a.tar")
    with pytest.raises(FileNotFoundError):
        ShardIndex.open(tmp_path / "b.tar")


def test_another_version_is_refused(packed: bytes) -> None:
    for version in (INDEX_VERSION - 1, INDEX_VERSION + 1):
        other = INDEX_MAGIC + version.to_bytes(4, "little") + packed[12:]
        with pytest.raises(IndexVersionError, match=rf"\(version {version}, this one reads 1\): upgrade"):
            ShardIndex(other)


def test_a_written_shard_is_indexed(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", numbered(10).items())
    assert len(ShardIndex(build_index((tmp_path / "a.tar").read_bytes()))) == 10


def test_a_description_without_end_is_refused(tmp_path: Path) -> None:
    path = made(tmp_path, ALIKE)
    head = bytearray(index_path(path).read_bytes())
    head[12:16] = (MAX_DESCRIPTION_BYTES + 8).to_bytes(4, "little")
    index_path(path).write_bytes(head + bytes(MAX_DESCRIPTION_BYTES))
    with pytest.raises(DamagedIndexError, match="more than 16777216"):
        ShardIndex.open(path)
    with pytest.raises(ShardError, match="the names of members take"):
        pack({"layouts": [["x" * MAX_DESCRIPTION_BYTES]]}, {})


def read_cut(folder: Path, cut: Path, way: str, said: Path) -> None:
    """Cut a file below its map, and read on; the error goes to `said`, and what else is raised ends the process."""
    data = IndexedShards(folder, decode=None, verify="none")
    data[0]
    coming = data.iterate()
    next(coming)
    os.truncate(cut, 4096)
    ways: dict[str, Callable[[], object]] = {
        "item": lambda: data[len(data) - 1],
        "batch": lambda: data.__getitems__([5, len(data) - 1]),
        "rows": lambda: list(coming),
        "keys": lambda: data.key(len(data) - 1),
        "sizes": lambda: data.sizes("txt"),
        "find": lambda: data.find("nowhere"),
    }
    try:
        ways[way]()
    except ShardError as error:
        said.write_text(type(error).__name__)
    except KeyError:
        said.write_text("KeyError")
    except BaseException:
        said.write_text(traceback.format_exc())
        raise


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shard whose index is mapped, because it is large: its keys are listed."""
    folder = tmp_path_factory.mktemp("large")
    path = made(folder, [(f"{n * n}", {"txt": b"1", "cls": b""}) for n in range(12_000)])
    assert index_path(path).stat().st_size > 1 << 18
    return path


@pytest.mark.parametrize("way", ["item", "batch", "rows", "keys", "sizes", "find"])
@pytest.mark.parametrize("suffix", ["", ".hri"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_file_that_is_cut_while_it_is_mapped_kills_nobody(large: Path, tmp_path: Path, way: str, suffix: str) -> None:
    for file in large.parent.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    cut = tmp_path / f"{large.name}{suffix}"
    said = tmp_path / "said.txt"
    process = get_context("fork").Process(target=read_cut, args=(tmp_path, cut, way, said))
    process.start()
    process.join(60)
    index_alone = way in ("keys", "sizes", "find")
    expected = "" if index_alone and not suffix else "StaleIndexError" if not suffix else "DamagedIndexError"
    if way == "find" and not suffix:
        expected = "KeyError"  # a key that there is not
    assert (process.exitcode, said.read_text() if said.exists() else "") == (0, expected)


def test_arrays_come_back_and_three_pieces_stand_for_a_shard() -> None:
    found = unpack(memoryview(pack({"a": 1}, {"x": np.arange(3, dtype=np.uint16)})))
    assert (found.description, found.arrays["x"].tolist()) == ({"a": 1}, [0, 1, 2])
    assert fingerprint_ranges(10240, 5632) == [(0, 4096), (2816, 6912), (1536, 5632)]
