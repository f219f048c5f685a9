"""Indexes, manifests and shards that someone made to hurt: typed errors, soon, and never a killed process."""

import copy
import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.webdatamodule import IndexedShards, Manifest, ShardError, add_column, index_shards, verify_shards
from headrace.webdatamodule.shards.errors import (
    DamagedIndexError,
    DamagedShardError,
    ManifestError,
    RefusedMemberError,
)
from headrace.webdatamodule.shards.format.tar import walk
from headrace.webdatamodule.shards.index.build import build_index, map_file
from headrace.webdatamodule.shards.index.container import MOST_DESCRIBED, pack, unpack
from headrace.webdatamodule.shards.index.manifest import MOST_BYTES, NAME
from headrace.webdatamodule.shards.index.shard_index import ShardIndex, index_path
from headrace.webdatamodule.shards.interop import energon_path, import_energon
from headrace.webdatamodule.shards.reading.dataset import member_sizes
from headrace.webdatamodule.shards.reading.shard_reader import Mapped, OpenShard
from headrace.webdatamodule.shards.writing.write import write_tars

END = bytes(1024)
UNLIKE = [("b", {"txt": b"1"}), ("a", {"txt": b"2", "cls": b"3"}), ("ccc", {"txt": b"45"})]
ALIKE = [(f"s{n:03d}", {"txt": b"%d" % n, "cls": b""}) for n in range(70)]
Pairs = list[tuple[str, dict[str, bytes]]]


def made(folder: Path, samples: Pairs) -> Path:
    [path] = write_tars(samples, folder, n_shards=1)
    index_shards(folder)
    return path


def use(index: ShardIndex) -> None:
    """Everything that a reader does with an index; a shard that was not indexed ends it early."""
    index.check_self()
    for sample in {0, index.n_samples // 2, index.n_samples - 1} if index.n_samples else set[int]():
        index.find(index.key(sample))
        index.locate(index.span(sample)[0])
        index.layout(sample)
    for member in index.member_keys:
        member_sizes(index, member, missing=0)
    assert index.n_skipped >= 0
    assert (index.offsets + index.sizes <= index.shard_bytes).all()


def forged(path: Path, description: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
    index_path(path).write_bytes(pack(description, arrays))


# --- 1: an index with right checksums and wrong numbers

HUGE = [-1, 1, 2**31, 2**32 - 1, 2**63, 2**64, 10**18, 10**400]
ODD: list[Any] = [
    *HUGE,
    "",
    "x",
    "\ud800",
    None,
    [],
    {},
    [[]],
    [["__key__"]],
    [["a", "A"]],
    [[1]],
    1.5,
    True,
    {"a": 2**70},
]
BENT = [np.zeros(3, np.uint8), np.array([0, 1, 2**63, 5], np.uint64), np.array([2**32 - 1] * 3, np.uint32)]


@pytest.fixture(scope="module", params=[UNLIKE, ALIKE], ids=["unlike", "alike"])
def shard(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("shard"), request.param)


def forgeries(path: Path) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    description, arrays, *_ = unpack(memoryview(build_index(path.read_bytes())))
    for key in description:
        for value in ODD:
            yield {**description, key: value}, arrays
    for key in description["keys"]:
        for value in ODD:
            yield {**description, "keys": {**description["keys"], key: value}}, arrays
    for name in (*arrays, "layout_of", "starts", "key_ends"):
        for array in BENT:
            yield description, {**arrays, name: array}
        was = arrays.get(name, arrays["blocks"])
        for at in {0, was.size // 2, was.size - 1}:
            for value in (0, int(was[at]) + 1, np.iinfo(was.dtype).max):
                bent = was.copy()
                bent[at] = min(value, int(np.iinfo(was.dtype).max))
                yield description, {**arrays, name: bent}


def test_a_forged_index_is_refused_or_harmless(shard: Path) -> None:
    kept = index_path(shard).read_bytes()
    refused = 0
    for description, arrays in forgeries(shard):
        forged(shard, description, arrays)
        for check in (True, False):
            try:
                index = ShardIndex.open(shard)
                use(index)
                read = OpenShard(index, Mapped(index), None, verify=check)
                read.some(range(len(index)), [])
                for _ in read.between(0, len(index)):
                    pass
            except (ShardError, KeyError) as error:  # KeyError: a key that is not found
                refused += not isinstance(error, KeyError)
        faults = verify_shards(shard.parent)
        assert faults or index_path(shard).read_bytes() == kept, (description, arrays)
    index_path(shard).write_bytes(kept)
    assert refused > 200


@pytest.mark.parametrize(
    "change",
    [
        {"samples": 10**18, "layouts": []},
        {"samples": 10**18, "layouts": [[]]},
        {"keys": {"prefix": "s", "first": 0, "step": 1, "width": 10**9, "suffix": ""}},
        {"keys": {"prefix": "s", "first": 0, "step": 1, "width": -1, "suffix": ""}},
        {"keys": {"prefix": 3, "first": 0, "step": 1, "width": 1, "suffix": ""}},
        {"keys": {"prefix": "s" * 10**6, "first": 0, "step": 1, "width": 1, "suffix": ""}},
        {"layouts": [["__key__", "cls"]]},
        {"layouts": [["txt", "TXT"]]},
        {"shard_bytes": 2**63},
        {"end": 2**62},
        {"skipped": {"meta": 2**64}},
    ],
)
def test_what_cannot_be_is_refused_at_opening(tmp_path: Path, change: dict[str, Any]) -> None:
    path = made(tmp_path, ALIKE)
    description, arrays, *_ = unpack(memoryview(index_path(path).read_bytes()))
    forged(path, {**description, **change}, arrays)
    with pytest.raises(DamagedIndexError, match="does not fit together") as caught:
        ShardIndex.open(path)
    assert caught.value.shard == str(path)


def test_a_description_without_end_is_refused(tmp_path: Path) -> None:
    path = made(tmp_path, ALIKE)
    head = bytearray(index_path(path).read_bytes())
    head[12:16] = (MOST_DESCRIBED + 8).to_bytes(4, "little")
    index_path(path).write_bytes(head + bytes(MOST_DESCRIBED))
    with pytest.raises(DamagedIndexError, match="more than the 16777216 allowed"):
        ShardIndex.open(path)
    with pytest.raises(ShardError, match="the names of members take"):
        pack({"layouts": [["x" * MOST_DESCRIBED]]}, {})


# --- 2: what verify did not see


@pytest.mark.parametrize("change", [{"skipped": {"meta": 0}}, {"skipped_names": ["a"]}, {"spots": 7}])
def test_an_index_that_differs_in_no_byte_of_the_shard_is_a_fault(tmp_path: Path, change: dict[str, Any]) -> None:
    path = made(tmp_path, UNLIKE)
    description, arrays, *_ = unpack(memoryview(index_path(path).read_bytes()))
    forged(path, {**description, **change}, arrays)
    index = ShardIndex.open(path)
    manifest = Manifest.load(tmp_path)
    replace(manifest, shards=(replace(manifest.shards[0], index=f"{index.checksum:016x}"),)).save(tmp_path)
    [fault] = verify_shards(tmp_path)
    assert "the index is another one than indexing gives" in fault.message
    assert fault.shard == str(path)


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


# --- 3: files that are cut while they are used

CUT = """
import os, sys
from headrace.webdatamodule import IndexedShards, ShardError
folder, cut, way, check = sys.argv[1:]
data = IndexedShards(folder, decode=None, check=check)
data[0]
coming = data.iterate()
next(coming)
os.truncate(cut, 4096)
ways = {
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
    print(type(error).__name__, error.shard)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shard whose index is mapped, because it is large: its keys are listed."""
    folder = tmp_path_factory.mktemp("large")
    path = made(folder, [(f"{n * n}", {"txt": b"1", "cls": b""}) for n in range(12_000)])
    assert index_path(path).stat().st_size > 1 << 18
    return path


@pytest.mark.skipif(sys.platform == "win32", reason="there a mapped file cannot be cut")
@pytest.mark.parametrize("way", ["item", "batch", "rows", "keys", "sizes", "find"])
@pytest.mark.parametrize("suffix", ["", ".hri"])
def test_a_file_that_is_cut_while_it_is_mapped_kills_nobody(large: Path, tmp_path: Path, way: str, suffix: str) -> None:
    for file in large.parent.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    cut = tmp_path / f"{large.name}{suffix}"
    command = [sys.executable, "-c", CUT, str(tmp_path), str(cut), way, "none"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    index_alone = way in ("keys", "sizes", "find")
    expected = "" if index_alone and not suffix else "StaleIndexError" if not suffix else "DamagedIndexError"
    if way == "find" and not suffix:  # a key that there is not
        assert (done.returncode, "KeyError" in done.stderr) == (1, True)
        return
    assert (done.returncode, done.stdout.split(" ")[0].strip()) == (0, expected), done.stderr


def test_a_shard_that_is_cut_while_it_is_indexed_is_an_error(large: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(large.read_bytes())
    data = map_file(path)
    assert data[0:512] == large.read_bytes()[:512]
    os.truncate(path, 600_000)
    with pytest.raises(DamagedShardError, match="was cut while it was read") as caught:
        build_index(data, shard=str(path))
    assert caught.value.shard == str(path)
    assert caught.value.offset is not None


@given(st.lists(st.tuples(st.integers(0, 700_000), st.integers(0, 300_000)), max_size=30))
def test_an_open_file_gives_the_bytes_of_any_place(large: Path, spans: list[tuple[int, int]]) -> None:
    data, whole = map_file(large), large.read_bytes()
    for begin, size in spans:
        assert data[begin : begin + size] == whole[begin : begin + size]
        assert data[begin + size : begin + size + 512] == whole[begin + size : begin + size + 512]
    assert data[len(whole) - 3 : len(whole) + 9] == whole[-3:]
    assert data[len(whole) + 5 : len(whole) + 9] == b""


# --- 4: what is no plain file


def instead(path: Path, what: str) -> None:
    path.unlink(missing_ok=True)
    if what == "fifo":
        os.mkfifo(path)
    elif what == "directory":
        path.mkdir()
    elif what == "endless":
        path.symlink_to("/dev/zero")


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such files there")
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


def test_an_endless_manifest_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / NAME).open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    with pytest.raises(ManifestError, match=f"{MOST_BYTES + 1} bytes, more than the {MOST_BYTES} "):
        Manifest.load(tmp_path)


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such files there")
def test_a_column_or_a_foreign_index_that_is_a_fifo_is_refused(tmp_path: Path) -> None:
    path = made(tmp_path, UNLIKE)
    [column] = add_column(tmp_path, "n", [1, 2, 3]).columns
    instead(tmp_path / column.file, "fifo")
    instead(energon_path(path), "fifo")
    with pytest.raises(ManifestError, match="a FIFO"):
        IndexedShards(tmp_path).column("n")
    with pytest.raises(DamagedIndexError, match="a FIFO"):
        import_energon(path)


# --- 5: manifests

BAD: list[tuple[str, Any]] = [
    *[(key, value) for key in ("samples", "nbytes", "skipped") for value in (10**400, 2**63, -1, True, 1.0, "1", None)],
    *[("name", value) for value in ("\ud800.tar", "x" * 300, "é" * 200, "a\0", "", 3, None, "a/b.tar", "NUL:")],
    *[("index", value) for value in ("", "0" * 17, "g" * 16, 3, "\ud800" * 16)],
]


@pytest.mark.parametrize(("key", "value"), BAD)
def test_a_manifest_that_says_what_cannot_be_is_refused(key: str, value: Any, tmp_path: Path) -> None:
    made(tmp_path, UNLIKE)
    table = json.loads((tmp_path / NAME).read_text())
    wrong = copy.deepcopy(table)
    wrong["shards"][0][key] = value
    (tmp_path / NAME).write_text(json.dumps(wrong))
    with pytest.raises(ManifestError, match="index the directory again") as caught:
        Manifest.load(tmp_path)
    assert len(str(caught.value)) < 1000
    assert verify_shards(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        '{"format": "headrace-shards", "version": NaN}',
        '{"format": "headrace-shards", "version": 1, "version": 1}',
        '{"format": "headrace-shards", "version": true}',
        '{"format": "headrace-shards", "version": %s}' % ("9" * 5000),
        "[" * 100_000,
        "Infinity",
        "\ufeff{}",
        "",
    ],
)
def test_a_manifest_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ManifestError):
        Manifest.from_json(text)


@pytest.mark.parametrize("members", [["txt", "txt"], ["\ud800"], ["__key__"], [3], ["txt", None]])
def test_members_that_cannot_be_are_refused(members: list[Any]) -> None:
    with pytest.raises(ManifestError):
        Manifest((), tuple(members))


# --- 6: what took time by the square


def tar(names: list[str]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as file:
        for name in names:
            file.addfile(tarfile.TarInfo(name))
    return stream.getvalue()


@pytest.mark.parametrize(
    "names",
    [[f"one.{n:x}" for n in range(40_000)], [f"{n:05d}.{n % 8000:x}" for n in range(16_000)]],
    ids=["members", "layouts"],
)
def test_many_members_or_layouts_take_no_time(tmp_path: Path, names: list[str]) -> None:
    (tmp_path / "a.tar").write_bytes(tar(names))
    manifest = index_shards(tmp_path)
    assert len(manifest.members) == len({name.partition(".")[2] for name in names})
    index = ShardIndex.open(tmp_path / "a.tar")
    read = OpenShard(index, Mapped(index), None, verify=True)
    found: list[Any] = []
    read.some(range(len(index)), found)
    assert sum(map(len, found)) == len(names) + len(found)
    for member in manifest.members[:200]:
        assert member_sizes(index, member, missing=0).sum() == 0
    assert verify_shards(tmp_path) == []


def test_many_faults_take_no_time(tmp_path: Path) -> None:
    path = made(tmp_path, [(f"{n:05d}", {"txt": b"1"}) for n in range(20_000)])
    data = bytearray(path.read_bytes())
    for at in range(512, 20_000 * 1024, 1024):
        data[at + 511] = 1
    path.write_bytes(data)
    assert len(verify_shards(tmp_path)) == 20_000


def test_energons_rule_takes_no_time(tmp_path: Path) -> None:
    name = "a/" * 200_000 + "x"
    data = member("././@LongLink", name.encode() + b"\0", b"L") + member("x", b"") + END
    (tmp_path / "a.tar").write_bytes(data)
    energon_path(tmp_path / "a.tar").write_bytes(np.array([len(data) - 1024], "<u8").tobytes())
    assert len(import_energon(tmp_path / "a.tar")) == 0


# --- 7: several extended headers before one member


def member(name: str, data: bytes, kind: bytes = b"0") -> bytes:
    header = tarfile.TarInfo(name)
    header.size, header.type = len(data), kind
    return header.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % 512)


def pax(kind: bytes, key: str, value: str) -> bytes:
    body = f" {key}={value}\n".encode()
    length = next(n for n in range(len(body), len(body) + 5) if n == len(str(n)) + len(body))
    return member("pax", b"%d" % length + body, kind)


WORDS = st.sampled_from(["one.txt", "two.txt"])
HEADERS = st.one_of(
    st.builds(lambda word: member("././@LongLink", word.encode() + b"\0", b"L"), WORDS),
    st.builds(lambda kind, word: pax(kind, "path", word), st.sampled_from([b"x", b"g"]), WORDS),
    st.builds(lambda kind: pax(kind, "mtime", "1"), st.sampled_from([b"x", b"g"])),
    st.just(member("././@LongLink", b"to\0", b"K")),
)


@given(st.lists(HEADERS, max_size=4))
def test_a_name_is_the_one_that_others_read_or_refused(tmp_path_factory: pytest.TempPathFactory, parts: Any) -> None:
    data = b"".join(parts) + member("plain.txt", b"abc") + END
    path = tmp_path_factory.mktemp("tar") / "a.tar"
    path.write_bytes(data)
    command = ["tar", "tf", path.name]
    told = subprocess.run(command, cwd=path.parent, capture_output=True, text=True, check=False)
    with tarfile.open(path) as file:
        gnu, python = told.stdout.split(), file.getnames()
    assert told.returncode == 0, told.stderr
    if gnu == python:
        assert [one.name for one in walk(data)] == gnu
    else:
        with pytest.raises(RefusedMemberError, match="several extended headers give the member the path") as caught:
            list(walk(data, shard="a.tar"))
        assert caught.value.shard == "a.tar"


def test_extended_headers_without_end_are_refused() -> None:
    data = pax(b"x", "path", "a.txt") * 1000 + member("plain.txt", b"") + END
    with pytest.raises(RefusedMemberError, match="more than 16 extended headers before one member"):
        list(walk(data))
