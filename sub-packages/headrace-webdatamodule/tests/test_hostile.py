"""Shards and members made to hurt: each ends in an error that names it, soon and in little memory."""

import io
import struct
import tracemalloc
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.webdatamodule import (
    DecodeError,
    IndexedShards,
    Manifest,
    RefusedMemberError,
    add_column,
    decode_member,
    index_shards,
    write_tars,
)
from headrace.webdatamodule.shards.index.manifest import ColumnEntry

END = bytes(1024)


def header(name: str, size: int, kind: bytes = b"0") -> bytes:
    octal = b"%011o\0" % size if size < 8**11 else b"\x80" + size.to_bytes(11, "big")
    block = bytearray(name.encode().ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2 + octal + b"0" * 11 + b"\0")
    block += b" " * 8 + kind + bytes(100) + b"ustar\x0000" + bytes(247)
    block = block[:512]
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def member(name: str, data: bytes, kind: bytes = b"0") -> bytes:
    return header(name, len(data), kind) + data + bytes(-len(data) % 512)


def bzip_bomb(name: str, content: bytes) -> bytes:
    """A zip file that promises 100 bytes and unpacks to 256 MiB."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr(name, content + bytes(1 << 28))
    data = bytearray(stream.getvalue())
    at = data.rfind(b"PK\x01\x02")
    data[at + 24 : at + 28] = struct.pack("<I", 100)
    return bytes(data)


@pytest.mark.parametrize(
    ("key", "name", "content"), [("pt", "a/data.pkl", b"\x80\x02K\x01."), ("npz", "a.npy", b"\x93NUMPY\x01\x00")]
)
def test_a_zip_bomb_of_bzip2_is_not_unpacked(key: str, name: str, content: bytes) -> None:
    bomb = bzip_bomb(name, content)
    tracemalloc.start()
    try:
        with pytest.raises(DecodeError, match="is packed by method 12; store or deflate it"):
            decode_member(key, bomb, max_bytes=1 << 20)
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


@pytest.mark.nightly
def test_a_sparse_file_of_six_gib_is_read_around(tmp_path: Path) -> None:
    with (tmp_path / "a.tar").open("wb") as file:
        file.write(header("a.txt", 6 << 30))
        file.seek(6 << 30, io.SEEK_CUR)
        file.write(member("b.txt", b"small") + END)
    if (tmp_path / "a.tar").stat().st_blocks * 512 > 1 << 30:
        pytest.skip("this file system has no holes")
    index_shards(tmp_path)
    dataset = IndexedShards(tmp_path, check="none")
    assert [sample["txt"] for sample in dataset.iterate(1)] == [dataset[1]["txt"]] == ["small"]
    assert dataset.sizes("txt").tolist() == [6 << 30, 5]


@pytest.mark.parametrize("kind", [b"x", b"L", b"g"])
def test_an_extended_header_of_a_gib_is_refused(tmp_path: Path, kind: bytes) -> None:
    with (tmp_path / "a.tar").open("wb") as file:
        file.write(header("long", 1 << 30, kind))
        file.seek(1 << 30, io.SEEK_CUR)
        file.write(member("a.txt", b"") + END)
    with pytest.raises(RefusedMemberError, match="an extended header has 1073741824 bytes") as caught:
        index_shards(tmp_path)
    assert caught.value.offset == 0


def test_a_manifest_cannot_have_a_shard_removed_as_a_column(tmp_path: Path) -> None:
    write_tars([("a", {"txt": b"1"})], tmp_path, n_shards=1)
    [entry] = index_shards(tmp_path).shards
    for file in (entry.name, f"{entry.name}.hri", "manifest.json"):
        replace(Manifest.load(tmp_path), columns=(ColumnEntry("tok", "<i8", file, "0" * 16),)).save(tmp_path)
        add_column(tmp_path, "tok", [3])
        assert {path.name for path in tmp_path.iterdir()} >= {entry.name, f"{entry.name}.hri", "manifest.json"}
    [before] = Manifest.load(tmp_path).columns
    add_column(tmp_path, "tok", [4])
    assert not (tmp_path / before.file).exists()  # the column that was replaced is
