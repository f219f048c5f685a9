"""Tar files that are compressed, whatever their name: each door says so, by which program, and how to unpack them."""

import bz2
import gzip
import lzma
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import webdataset as wds
from command_line import run
from streams import flat, loader
from streams import write as write_plain

from headrace.webdatamodule import (
    DamagedShardError,
    IndexedShards,
    ShardError,
    StaleIndexError,
    index_shards,
    verify_shards,
)

COUNT = 6


def zstd(data: bytes) -> bytes:
    """A frame of stored blocks, as RFC 8878 has it."""
    blocks = [data[begin : begin + (1 << 16)] for begin in range(0, len(data), 1 << 16)]
    heads = [len(block) << 3 | (number == len(blocks) - 1) for number, block in enumerate(blocks)]
    frame = b"\x28\xb5\x2f\xfd\xa0" + len(data).to_bytes(4, "little")
    return frame + b"".join(head.to_bytes(3, "little") + block for head, block in zip(heads, blocks, strict=True))


KINDS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "zstd": zstd,
}


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def compress(folder: Path, kind: str) -> list[Path]:
    paths = sorted(folder.glob("*.tar"))
    for path in paths:
        path.write_bytes(KINDS[kind](path.read_bytes()))
    return paths


def told(kind: str) -> str:
    return rf"compressed with {kind}.*`{kind} -dc .*`"


def test_the_command_that_is_told_makes_shards_of_them(tmp_path: Path) -> None:
    [path] = compress(write_plain(tmp_path, [COUNT]), "gzip")
    with pytest.raises(DamagedShardError) as caught:
        index_shards(tmp_path)
    command = re.search("`(.*)`", str(caught.value))
    assert command
    made = command[1].replace("COMPRESSED", path.name).replace("PLAIN", "plain")
    subprocess.run(made, shell=True, check=True, cwd=tmp_path)
    (tmp_path / "plain").replace(path)
    assert index_shards(tmp_path).n_samples == COUNT


@pytest.mark.parametrize("count", [1, 300])  # less and more than one block of 512 bytes
def test_indexing_says_what_compressed_them(tmp_path: Path, kind: str, count: int) -> None:
    compress(write_plain(tmp_path, [count]), kind)
    with pytest.raises(DamagedShardError, match=told(kind)) as caught:
        index_shards(tmp_path)
    assert caught.value.shard == str(tmp_path / "wdshards-000000.tar")
    ended = run("index", str(tmp_path))
    assert ended.returncode != 0
    assert re.search(told(kind), ended.stderr.decode())


def test_reading_says_what_compressed_them_after_they_were_indexed(tmp_path: Path, kind: str) -> None:
    index_shards(write_plain(tmp_path, [COUNT]))
    dataset = IndexedShards(tmp_path)
    compress(tmp_path, kind)
    with pytest.raises(StaleIndexError, match=told(kind)):
        dataset[0]
    assert any(re.search(told(kind), fault.message) for fault in verify_shards(tmp_path))


def test_reading_says_what_compressed_them_where_there_is_no_index(tmp_path: Path, kind: str) -> None:
    [path] = compress(write_plain(tmp_path, [COUNT]), kind)
    with pytest.raises(ShardError, match=told(kind)):
        IndexedShards(path)
    path.unlink()
    with pytest.raises(ShardError, match="no index"):
        IndexedShards(write_plain(tmp_path, [COUNT]) / path.name)


def test_streams_read_them_where_python_does(tmp_path: Path, kind: str) -> None:
    compress(write_plain(tmp_path, [COUNT, COUNT]), kind)
    if kind != "zstd" or sys.version_info >= (3, 14):
        assert flat(loader(tmp_path, 2 * COUNT)) == list(range(2 * COUNT))
        return
    with pytest.raises(ShardError, match=told(kind)) as caught:
        list(loader(tmp_path, 2 * COUNT))
    assert caught.value.shard == str(tmp_path / "wdshards-000000.tar")
    write_plain(tmp_path, [COUNT])
    with pytest.warns(UserWarning, match=told(kind)):
        assert flat(loader(tmp_path, COUNT, kwargs_wds={"handler": wds.warn_and_continue})) == list(range(COUNT))


@pytest.mark.parametrize("ending", [".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst"])
def test_a_directory_of_nothing_else_is_told(tmp_path: Path, ending: str) -> None:
    for path in write_plain(tmp_path, [1, 1]).glob("*.tar"):
        path.rename(path.with_suffix(ending))
    match = rf"2 compressed ones.*wdshards-000000{re.escape(ending)}.*decompress"
    with pytest.raises(FileNotFoundError, match=match):
        index_shards(tmp_path)
    with pytest.raises(ShardError, match=match):
        IndexedShards(tmp_path)
    with pytest.raises(FileNotFoundError, match=match):
        list(loader(tmp_path, 2))
    with pytest.raises(ValueError, match="decompress"):
        IndexedShards(tmp_path / f"wdshards-000000{ending}")


def test_a_plain_tar_whose_first_name_looks_compressed_is_read(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.USTAR_FORMAT) as file:
        file.addfile(tarfile.TarInfo("BZh91AY&SY.txt"))
    index_shards(tmp_path)
    assert IndexedShards(tmp_path / "a.tar")[0]["txt"] == ""
