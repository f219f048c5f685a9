"""Members made to hurt whoever decodes them: each ends in an error that names it, soon and in little memory."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from headrace.webdatamodule import DecodeError, IndexedShards, ShardError, index_shards, write_tars
from headrace.webdatamodule.shards import errors
from headrace.webdatamodule.shards.decoding.sample_decoder import SampleDecoder

pytestmark = pytest.mark.slow


MIB = 1 << 20


def header(name: str, size: int) -> bytes:
    octal = b"%011o\0" % size if size < 8**11 else b"\x80" + size.to_bytes(11, "big")
    block = bytearray(name.encode().ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2 + octal + b"0" * 11 + b"\0")
    block += b" " * 8 + b"0" + bytes(100) + b"ustar\x0000" + bytes(247)
    block = block[:512]
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def sparse(folder: Path, size: int) -> Path:
    """A shard with a small member, one of `size` zeros that take no room, and a small one."""
    folder.mkdir(exist_ok=True)
    with (folder / "a.tar").open("wb") as file:
        file.write(header("a.txt", 5) + b"first".ljust(512, b"\0") + header("b.txt", size))
        file.truncate(1536 + size + -size % 512)
        file.seek(0, 2)
        file.write(header("c.txt", 4) + b"last".ljust(512, b"\0") + bytes(1024))
    index_shards(folder)
    return folder


def peak(script: str, *arguments: object) -> tuple[int, str]:
    """By how many bytes a script raises the memory of its process after its own `begin()`, and what it prints."""
    before = """
import re, sys
from pathlib import Path
def rss(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10
def begin():
    global base
    Path("/proc/self/clear_refs").write_text("5")
    base = rss("VmRSS")
"""
    after = "\nprint(rss('VmHWM') - base, file=sys.stderr)\n"
    command = [sys.executable, "-c", before + script + after, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stderr.split()[-1]), done.stdout


needs_proc = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures memory as Linux does")


READ = """
from headrace.webdatamodule import IndexedShards, ShardError
begin()
dataset = IndexedShards(sys.argv[1], verify=sys.argv[2], max_bytes=1 << 20)
for read in (lambda: dataset[1], lambda: dataset.__getitems__([0, 1]), lambda: list(dataset.iterate(1))):
    try:
        read()
    except ShardError as error:
        print(type(error).__name__, error)
print(dataset[2]["txt"])
"""


@needs_proc
@pytest.mark.parametrize("check", ["read", "open", "none"])
def test_a_large_member_is_refused_before_it_is_read(tmp_path: Path, check: str) -> None:
    grown, told = peak(READ, sparse(tmp_path, 400 * MIB), check)
    expected = "DecodeError the member has 419430400 bytes, which is more than max_bytes=1048576"
    assert told.count(expected) == 3
    assert told.count("sample 'b', member 'b.txt', offset 1024") == 3
    assert told.endswith("last\n")
    assert grown < 65 * MIB or check == "open"  # a map that was read through counts as memory


def test_what_comes_before_a_large_member_is_given(tmp_path: Path) -> None:
    samples = IndexedShards(sparse(tmp_path, 9 * MIB), max_bytes=8 * MIB).iterate()
    assert next(samples)["txt"] == "first"
    with pytest.raises(DecodeError, match=r"more than max_bytes=8388608.*sample 'b'"):
        next(samples)
    with pytest.raises(DecodeError, match="max_bytes=8388608"):
        IndexedShards(tmp_path, decode=None, max_bytes=8 * MIB)[1]
    assert len(IndexedShards(tmp_path, decode=None)[1]["txt"]) == 9 * MIB


def test_a_large_member_that_is_not_asked_for_does_no_harm(tmp_path: Path) -> None:
    write_tars([("a", {"bin": bytes(9000), "txt": b"small"})], tmp_path, n_shards=1)
    index_shards(tmp_path)
    assert IndexedShards(tmp_path, ["txt"], max_bytes=100)[0]["txt"] == "small"
    with pytest.raises(DecodeError, match=r"9000 bytes.*leave it out of keys"):
        IndexedShards(tmp_path, max_bytes=100)[0]


def test_check_open_reads_large_members_too(tmp_path: Path) -> None:
    folder = sparse(tmp_path, 40 * MIB)
    assert IndexedShards(folder, verify="open", max_bytes=99)[0]["txt"] == "first"
    with (folder / "a.tar").open("r+b") as file:
        file.seek(30 * MIB)
        file.write(b"x")
    with pytest.raises(ShardError, match="sample 'b'"):
        IndexedShards(folder, verify="open", max_bytes=99)[0]


def test_max_bytes_reaches_the_decoders_and_is_checked(tmp_path: Path) -> None:
    write_tars([("a", {"ppm": b"P6\n800 500\n255\n"})], tmp_path, n_shards=1)
    index_shards(tmp_path)
    with pytest.raises(DecodeError, match=r"max_bytes=1000.*sample 'a'"):
        IndexedShards(tmp_path, max_bytes=1000)[0]
    with pytest.raises(ValueError, match="max_bytes must be an int >= 1"):
        IndexedShards(tmp_path, max_bytes=0)


def test_many_layouts_do_not_slow_each_sample_down() -> None:
    members = [f"m{i}.txt" for i in range(8000)]
    finish = SampleDecoder(members, None, None, ())
    assert finish.is_noop

    class Counted(dict[str, Any]):
        asked = 0

        def __contains__(self, key: object) -> bool:
            type(self).asked += 1
            return super().__contains__(key)

    finish = SampleDecoder(members, {}, None, ())
    shard: Any = None
    sample = Counted({"__key__": "a", "m5.txt": b"5"})
    assert finish(sample, shard, 0)["m5.txt"] == "5"
    assert Counted.asked < 10


def as_it_is(batch: Any) -> Any:
    return batch


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("fault", ["decode", "size", "damage"])
def test_a_worker_tells_kind_and_place(tmp_path: Path, fault: str) -> None:
    texts = [b"fine"] * 1000 + [b"\xff" * 600] + [b"fine"] * 1000  # what opening looks at is not among them
    write_tars([(f"s{i}", {"txt": text}) for i, text in enumerate(texts)], tmp_path, n_shards=1)
    index_shards(tmp_path)
    (path,) = tmp_path.glob("*.tar")
    dataset: Any = IndexedShards(tmp_path, max_bytes=500 if fault == "size" else 10_000)
    if fault == "damage":
        with path.open("r+b") as file:
            file.seek(1_024_000 + 512 + 60)
            file.write(b"?")
    loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=[[3, 1000]], num_workers=1, collate_fn=as_it_is)
    kind = errors.DamagedShardError if fault == "damage" else DecodeError
    place = r"\(shard '.*\.tar', sample 's1000', member 's1000\.txt', offset 1024000\)"
    running: Any = iter(loader)
    try:
        with pytest.raises(kind, match=place):
            list(running)
    finally:
        running._shutdown_workers()  # left to the garbage collection, it takes 5 seconds
