"""Members made to hurt whoever decodes them: each ends in an error that names it, soon and in little memory."""

import io
import json
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch.utils.data import DataLoader

from headrace.webdatamodule import DecodeError, IndexedShards, ShardError, decode_member, index_shards, write_tars
from headrace.webdatamodule.shards import errors
from headrace.webdatamodule.shards.reading.dataset import Finishing

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
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return int(done.stderr.split()[-1]), done.stdout


needs_proc = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures memory as Linux does")

READ = """
from headrace.webdatamodule import IndexedShards, ShardError
begin()
dataset = IndexedShards(sys.argv[1], check=sys.argv[2], max_bytes=1 << 20)
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
    assert IndexedShards(folder, check="open", max_bytes=99)[0]["txt"] == "first"
    with (folder / "a.tar").open("r+b") as file:
        file.seek(30 * MIB)
        file.write(b"x")
    with pytest.raises(ShardError, match="sample 'b'"):
        IndexedShards(folder, check="open", max_bytes=99)[0]


def test_max_bytes_reaches_the_decoders_and_is_checked(tmp_path: Path) -> None:
    write_tars([("a", {"ppm": b"P6\n800 500\n255\n"})], tmp_path, n_shards=1)
    index_shards(tmp_path)
    with pytest.raises(DecodeError, match=r"max_bytes=1000.*sample 'a'"):
        IndexedShards(tmp_path, max_bytes=1000)[0]
    with pytest.raises(ValueError, match="max_bytes must be 1 or more"):
        IndexedShards(tmp_path, max_bytes=0)


def test_many_layouts_do_not_slow_each_sample_down() -> None:
    members = [f"m{i}.txt" for i in range(8000)]
    finish = Finishing(members, None, None, ())
    assert finish.idle

    class Counted(dict[str, Any]):
        asked = 0

        def __contains__(self, key: object) -> bool:
            type(self).asked += 1
            return super().__contains__(key)

    finish = Finishing(members, {}, None, ())
    shard: Any = None
    sample = Counted({"__key__": "a", "m5.txt": b"5"})
    assert finish(sample, shard, 0)["m5.txt"] == "5"
    assert Counted.asked < 10


DECODE = """
import gzip, io, json, pickle, struct, warnings, zipfile
import numpy as np
import PIL.Image, safetensors.numpy, torch
from headrace.webdatamodule import DecodeError, decode_member
import headrace.webdatamodule.shards.decoding.decode
warnings.simplefilter("ignore")
def image(kind, mode, side, **options):
    stream = io.BytesIO()
    PIL.Image.new(mode, (side, side)).save(stream, kind, **options)
    return stream.getvalue()
def npy(array):
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()
def npz(arrays):
    stream = io.BytesIO()
    np.savez_compressed(stream, **arrays)
    return stream.getvalue()
def many(count):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for i in range(count):
            archive.writestr(zipfile.ZipInfo(f"{i}.npy"), b"")
    return stream.getvalue()
def saved(thing):
    stream = io.BytesIO()
    torch.save(thing, stream)
    return stream.getvalue()
def header(tensors):
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text
def rle(width, height, body):
    palette = bytes(1024)
    head = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, len(body), 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", 1078 + len(body), 0, 0, 1078) + head + palette + body
def old(body):
    return b"(l" + body + b"."
key, cap = sys.argv[1], int(sys.argv[2])
data = eval(sys.argv[3])
PIL.Image.open(io.BytesIO(image("WEBP", "RGB", 8))).load()
decode_member("safetensors", safetensors.numpy.save({"a": np.zeros(1)}))
decode_member("pt", saved(torch.zeros(1)))
begin()
try:
    made = decode_member(key, data, max_bytes=cap)
    print("made", type(made).__name__)
except DecodeError as error:
    assert len(str(error)) < 2000, len(str(error))
    print("refused", error)
"""

BOMBS = [
    ("txt.gz", "gzip.compress(b'a' * 30_000_000 + '\\U0001F600'.encode())"),
    ("txt.gz", "gzip.compress('\\u0101'.encode() + b'a' * 30_000_000)"),
    ("json.gz", "gzip.compress(b'[' + b'[],' * 4_000_000 + b'0]')"),
    ("json.gz", "gzip.compress(b'[' + b'{},' * 4_000_000 + b'0]')"),
    ("json", "b'[' + b'{\"a\":1},' * 700_000 + b'0]'"),
    ("json", "b'{' + b','.join(b'\"%d\":%d' % (i, i + 999) for i in range(500_000)) + b'}'"),
    ("json", "b'[' + b','.join(b'1e%d' % (i % 9) for i in range(2_000_000)) + b']'"),
    ("json", "b'[\"' + b'a' * 20_000_000 + b'\\\\ud83d\\\\ude00\"]'"),
    ("json", "('[' * 9_000_000).encode()"),
    ("json.gz", "gzip.compress(('[' + '[],' * 4_000_000 + '0]').encode('utf-16'))"),
    ("json", "b'[' + b'\"ab\",' * 1_100_000 + b'0]'"),
    ("json", "('[' + '\"\\u0101\",' * 700_000 + '0]').encode()"),
    ("json", "b'[' + b','.join(b'{\"%x\":\"v\",\":%x\":1}' % (i, i) for i in range(130_000)) + b']'"),
    ("json", "b'[' + b'300,' * 2_000_000 + b'x' + b'\"\"' * 900_000 + b'uuu' * 900_000"),
    ("json", "b'[' + b','.join(b'{\"%x\\\\\\\\\":[]}' % i for i in range(200_000)) + b']'"),
    ("cls.gz", "gzip.compress(b'x' * 60_000_000)"),
    ("pkl", "b'\\x80\\x04(' + b'\\x8f' * 2_000_000 + b'l.'"),
    ("pkl", "b'\\x80\\x04(' + b']' * 3_000_000 + b'l.'"),
    ("pkl", "b'\\x80\\x04(' + b'N\\x94' * 2_000_000 + b'l.'"),
    ("pkl.gz", "gzip.compress(pickle.dumps([[] for _ in range(3_000_000)]))"),
    ("pkl.gz", "gzip.compress(pickle.dumps(set(range(600_000))))"),
    ("pkl", "pickle.dumps(list(map(str, range(2_000_000))))"),
    ("pkl", "b'\\x80\\x02ccollections\\ndeque\\nq\\x00(' + b'h\\x00)R' * 300_000 + b'l.'"),
    ("pkl", "b'V' + b'a' * 20_000_000 + b'\\\\U0001F600\\n.'"),
    ("pkl", "b'c' + b'a' * 30_000_000 + b'\\nb\\n.'"),
    ("pkl", "b'X' + struct.pack('<I', 20_000_004) + b'a' * 20_000_000 + '\\U0001F600'.encode() + b'.'"),
    ("pkl.gz", "gzip.compress(pickle.dumps(np.zeros(45_000_000, 'u1')))"),
    ("pkl.gz", "gzip.compress(pickle.dumps(np.zeros(45_000_000, 'u1'), 2))"),
    ("pt.gz", "gzip.compress(saved(torch.zeros(45_000_000, dtype=torch.uint8)))"),
    ("pt", "saved([torch.zeros(1) for _ in range(30_000)])"),
    ("npy.gz", "gzip.compress(npy(np.zeros(45_000_000, 'u1')))"),
    ("npy.gz", "gzip.compress(b'\\x93NUMPY\\x02\\x00' + struct.pack('<I', 60_000_000) + b' ' * 60_000_000)"),
    ("npz", "npz({'a': np.zeros(60_000_000, 'u1')})"),
    ("npz", "npz({'a': np.zeros(40_000_000, 'u1'), 'b': np.zeros(40_000_000, 'u1')})"),
    ("npz", "many(120_000)"),
    ("npz", "many(40_000)"),
    (
        "safetensors",
        "header({f't{i}': {'dtype': 'F32', 'shape': [0], 'data_offsets': [0, 0]} for i in range(200_000)})",
    ),
    ("safetensors.gz", "gzip.compress(safetensors.numpy.save({'a': np.zeros(30_000_000, 'u1')}))"),
    ("png", "image('PNG', 'P', 6000)"),
    ("png", "image('PNG', 'P', 3200)"),
    ("png", "image('PNG', '1', 7000)"),
    ("png", "image('PNG', 'RGB', 3000)"),
    ("png", "image('PNG', 'LA', 3600)"),
    ("jpg", "image('JPEG', 'RGB', 2000, progressive=True)"),
    ("jpg", "image('JPEG', 'CMYK', 2100, progressive=True)"),
    ("webp", "image('WEBP', 'RGBA', 1600, lossless=True)"),
    ("webp", "image('WEBP', 'RGBA', 4000, lossless=True)"),
    ("bmp", "rle(4000, 1500, b'\\xff\\x00' * 16_000 + b'\\x00\\x01')"),
    ("bmp", "rle(30_000, 1, b'\\x00\\x02\\xff\\xff' * 40 + b'\\x00\\x01')"),
    ("ppm", "b'P6 4000 2500 255\\n' + bytes(30_000_000)"),
    ("ppm", "b'P3 1800 1800 255\\n' + b'0 ' * 9_720_000"),
]


@needs_proc
@pytest.mark.parametrize(
    ("key", "data"),
    [pytest.param(*bomb, marks=() if number % 4 == 0 else pytest.mark.nightly) for number, bomb in enumerate(BOMBS)],
)
def test_decoding_takes_no_more_than_the_cap_and_some(key: str, data: str) -> None:
    cap = 64 * MIB
    grown, told = peak(DECODE, key, cap, data)
    assert told.startswith(("made", "refused")), told
    assert grown < cap + 64 * MIB, told


def test_a_jpeg_of_a_thousand_scans_is_refused() -> None:
    stream = io.BytesIO()
    Image.new("RGB", (64, 64)).save(stream, "JPEG", progressive=True)
    data = stream.getvalue()
    begin, end = data.rindex(b"\xff\xda"), len(data) - 2
    assert decode_member("jpg", data).shape == (64, 64, 3)
    with pytest.raises(DecodeError, match=r"has 10\d\d scans, and may have 100"):
        decode_member("jpg", data[:end] + 1000 * data[begin:end] + data[end:])


def npy(shape: str, body: bytes = b"", descr: str = "'<f8'") -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + body


@pytest.mark.parametrize(
    "shape",
    [
        "(-2, -3)",
        "(-1,)",
        "(-4, 2)",
        "(-2147483648, -2147483648)",
        "(4294967296, 4294967296, 1)",
        "(0, 9223372036854775808)",
        "(18446744073709551616, 0)",
        f"({10**400}, 0)",
        f"({10**400},)",
        "(2, 1.5)",
        "(0, 4611686018427387903)",
        "(3,)",
    ],
)
@pytest.mark.parametrize("key", ["npy", "npz"])
def test_impossible_shapes_are_refused(key: str, shape: str) -> None:
    data = npy(shape, bytes(16))
    if key == "npz":
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w") as archive:
            archive.writestr("a.npy", data)
        data = stream.getvalue()
    with pytest.raises(DecodeError) as caught:
        decode_member(key, data, max_bytes=1 << 20)
    assert caught.value.member == key
    assert len(str(caught.value)) < 700


def test_two_arrays_of_one_name_are_refused() -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("a.npy", npy("(1,)", bytes(8)))
        archive.writestr("a", npy("(1,)", bytes(8)))
    with pytest.raises(DecodeError, match="two arrays have the name 'a'"):
        decode_member("npz", stream.getvalue())


def every_kind(kind: type[ShardError]) -> set[type[ShardError]]:
    return {kind}.union(*map(every_kind, kind.__subclasses__()))


@pytest.mark.parametrize("kind", sorted(every_kind(ShardError), key=str))
def test_every_error_survives_the_way_from_a_worker(kind: type[ShardError]) -> None:
    error = kind("what {is} wrong", shard="a.tar", sample="s", member="s.txt", offset=512)
    made = pickle.loads(pickle.dumps(error))
    assert type(made) is kind
    assert vars(made) == vars(error)
    assert str(made) == str(error) == "what {is} wrong (shard 'a.tar', sample 's', member 's.txt', offset 512)"
    assert made.args == error.args


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
    with pytest.raises(kind, match=place):
        list(loader)


RECORDS = {
    "small dicts": "[{'x': 12, 'y': 34}] * 500_000",
    "boxes": "[{'id': i, 'bbox': [i + 0.5, i + 0.25, 9.5, 8.5], 'area': i / 7, 'iscrowd': 0} for i in range(60_000)]",
    "edges": "[[i + 300, i * 7 % 9000 + 300] for i in range(500_000)]",
    "tokens": "[i * 7919 % 50_000 for i in range(1_200_000)]",
    "words": "['word%d' % (i % 5000) for i in range(700_000)]",
    "marks in texts": "[{'text': 'a[b]: {c}, \"d\" ' * 60} for i in range(8_000)]",
    "by name": "{'id%d' % i: {'x': i, 'y': i + 999} for i in range(200_000)}",
}
COUNT = """
import json
from headrace.webdatamodule.shards.decoding.json_memory import json_bytes
data = json.dumps(eval(sys.argv[1])).encode()
begin()
made = json.loads(data)
print(json_bytes(data))
"""


@needs_proc
@pytest.mark.parametrize(
    "record",
    [pytest.param(name, marks=() if number % 3 == 0 else pytest.mark.nightly) for number, name in enumerate(RECORDS)],
)
def test_json_of_ordinary_records_is_counted_closely(record: str) -> None:
    grown, told = peak(COUNT, RECORDS[record])
    assert grown - 4 * MIB < int(told) < 2 * grown + 4 * MIB


def test_json_of_50_mb_is_read() -> None:
    data = b"[" + b",".join([b'{"x":12,"y":34}'] * 3_125_000) + b"]"
    assert len(decode_member("json", data)) == 3_125_000


def test_text_in_json_is_no_structure() -> None:
    data = json.dumps(["[{,:" * 2_000_000]).encode()
    assert decode_member("json", data, max_bytes=8 * len(data)) == json.loads(data)


@pytest.mark.nightly
def test_pickles_of_protocol_2_are_counted_by_what_they_take() -> None:
    array = np.random.default_rng(0).random(25_000_000)
    assert np.array_equal(decode_member("pkl", pickle.dumps(array, 2)), array)


def test_latin_text_in_a_pickle_is_counted_by_what_it_takes() -> None:
    array = np.random.default_rng(0).random(1_000_000)
    data = pickle.dumps(array, 2)
    assert np.array_equal(decode_member("pkl", data, max_bytes=8 * array.nbytes), array)
