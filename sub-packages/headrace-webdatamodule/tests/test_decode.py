import contextlib
import gzip
import io
import json
import pickle
import random
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.numpy import save as save_safetensors

from headrace.webdatamodule.shards import DecodeError, UnsafePickleError, decode_member
from headrace.webdatamodule.shards.decoding.json_memory import json_bytes
from headrace.webdatamodule.shards.decoding.limits import gunzip


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise SystemExit('ran')",)


def saved(value: object, zipped: bool = True) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=zipped)
    return file.getvalue()


def npy(array: Any, allow_pickle: bool = False) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=allow_pickle)
    return file.getvalue()


def picture(kind: str, mode: str = "RGB", size: tuple[int, int] = (5, 3)) -> bytes:
    file = io.BytesIO()
    Image.new(mode, size).save(file, kind)
    return file.getvalue()


@pytest.mark.parametrize(
    ("key", "data", "value"),
    [
        ("pyd", pickle.dumps([1, "a"]), [1, "a"]),
        ("tensor.pyd", pickle.dumps(5), 5),
        ("PICKLE", pickle.dumps(5), 5),
        ("pkl.gz", gzip.compress(pickle.dumps(5)), 5),
        ("mydata.pt", pickle.dumps({"a": 1}), {"a": 1}),
        ("txt", "é".encode(), "é"),
        ("json", b'{"a": [1]}', {"a": [1]}),
        ("cls", b"12", 12),
        ("pyd.txt", b"last one wins", "last one wins"),
        ("flac", b"\x00\xff", b"\x00\xff"),
        ("fasta.gz", gzip.compress(b">a"), gzip.compress(b">a")),
        ("", b"x", b"x"),
        ("gz", b"x", b"x"),
    ],
)
def test_last_extension_decides(key: str, data: bytes, value: object) -> None:
    assert decode_member(key, data) == value


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x), max_leaves=8))
def test_json_and_its_gz_round_trip(value: object) -> None:
    data = json.dumps(value).encode()
    assert decode_member("x.json", data) == decode_member("x.json.gz", gzip.compress(data)) == value


def test_arrays() -> None:
    array = np.arange(6.0).reshape(2, 3)
    file = io.BytesIO()
    np.savez_compressed(file, a=array, b=np.array(3))
    arrays = decode_member("npz", file.getvalue())
    np.testing.assert_array_equal(decode_member("x.npy", npy(array)), array)
    np.testing.assert_array_equal(arrays["a"], array)
    assert arrays["b"] == 3


def test_torch_files_keep_what_tensors_share() -> None:
    base = torch.arange(6.0).reshape(2, 3)
    made = decode_member("pt", saved({"a": base, "b": base.t(), "c": [torch.nn.Parameter(base.clone())]}))
    assert torch.equal(made["a"], base)
    assert made["b"].stride() == (1, 3)
    made["a"][0, 1] = 99
    assert made["b"][1, 0] == 99
    assert isinstance(made["c"][0], torch.nn.Parameter)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.bool, torch.complex64, torch.uint16, torch.float8_e4m3fn]
)
def test_torch_files_of_every_kind(dtype: torch.dtype) -> None:
    tensor = torch.tensor([0, 1, 1]).to(dtype)
    made = decode_member("pth", saved(tensor))
    assert made.dtype == dtype
    assert torch.equal(made.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize(
    ("key", "data"),
    [
        ("pyd", pickle.dumps(Evil())),
        ("pkl.gz", gzip.compress(pickle.dumps(Evil()))),
        ("mydata.pt", pickle.dumps(Evil())),
        ("pt", saved(Evil())),
    ],
)
def test_code_is_refused_and_the_member_named(key: str, data: bytes) -> None:
    with pytest.raises(UnsafePickleError, match=r"builtins\.exec.*allowed_classes") as caught:
        decode_member(key, data)
    assert caught.value.member == key


def zip_of(entries: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return file.getvalue()


def entries_of(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_a_torch_file_whose_storage_is_short_is_refused() -> None:
    entries = entries_of(saved(torch.arange(100)))
    forged = {name: b"" if name.endswith("data/0") else data for name, data in entries.items()}
    assert torch.equal(decode_member("pt", zip_of(entries)), torch.arange(100))
    with pytest.raises(DecodeError, match="800 bytes holds 0"):
        decode_member("pt", zip_of(forged))


@pytest.mark.parametrize(
    ("key", "data"),
    [
        ("pyd", b""),
        ("pyd", pickle.dumps([1, 2])[:-3]),
        ("pyd", pickle.dumps(1) + pickle.dumps(2)),
        ("json", b"{"),
        ("json", b"[" * 100_000),
        ("txt", b"\xff"),
        ("cls", b"one"),
        ("npy", b"\x93NUMPY"),
        ("npy", npy(np.arange(100))[:-1]),
        ("npy", npy(np.array([None]), allow_pickle=True)),
        ("npz", b"PK\x03\x04"),
        ("pt", b"PK\x03\x04"),
        ("pt", zip_of({"a/constants.pkl": b"", "b": b""})),
        ("pt", saved(torch.arange(3))[:-100]),
        ("pt", saved(torch.arange(3), zipped=False)),
        ("txt.gz", b"no gzip"),
        ("txt.gz", gzip.compress(b"abc" * 100)[:-9]),
        ("txt.gz", gzip.compress(b"abc")[:-6] + b"123456"),
    ],
)
def test_damage_is_an_error_that_names_the_member(key: str, data: bytes) -> None:
    with pytest.raises(DecodeError) as caught:
        decode_member(key, data)
    assert caught.value.member == key


@pytest.mark.parametrize(
    ("key", "data"),
    [
        ("txt.gz", gzip.compress(b"0" * 1001)),
        ("npz", zip_of({"a.npy": npy(np.zeros(1001, np.uint8))})),
        ("pt", zip_of({"a/data.pkl": pickle.dumps("0" * 1001)})),
        ("npy", npy(np.zeros(1001, np.uint8))),
        ("npy.gz", gzip.compress(npy(np.zeros(1001, np.uint8)))),
        ("safetensors", save_safetensors({"a": np.zeros(1001, np.uint8)})),
        ("safetensors.gz", gzip.compress(save_safetensors({"a": np.zeros(1001, np.uint8)}))),
        ("png", picture("PNG", size=(334, 1))),
        ("jpeg", picture("JPEG", size=(1, 334))),
        ("pgm.gz", gzip.compress(picture("PPM", "L", size=(1001, 1)))),
        ("txt", b"0" * 1001),
    ],
)
def test_bombs_stop_at_the_cap(key: str, data: bytes) -> None:
    with pytest.raises(DecodeError, match="max_bytes=1000"):
        decode_member(key, data, max_bytes=1000)
    decode_member(key, data, max_bytes=10_000)


@given(st.binary(max_size=200), st.integers(0, 200))
def test_gunzip_gives_all_or_raises(data: bytes, cap: int) -> None:
    packed = gzip.compress(data)
    if len(data) <= cap:
        assert gunzip(packed, cap) == data
    else:
        with pytest.raises(DecodeError):
            gunzip(packed, cap)


@given(
    st.sampled_from(["pyd", "pt", "npy", "npz", "json", "txt", "cls", "txt.gz", "safetensors", "png", "jpg"]),
    st.binary(max_size=300),
)
def test_any_bytes_decode_or_raise_a_decode_error(key: str, data: bytes) -> None:
    with contextlib.suppress(DecodeError):
        decode_member(key, data)


def test_a_wrong_allowed_class_is_the_callers_error() -> None:
    with pytest.raises(ValueError, match=r"module\.QualifiedName"):
        decode_member("pyd", pickle.dumps(1), allowed_classes=["nodots"])


def header(text: str) -> bytes:
    """A .npy file of this header and no data."""
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode("latin-1")


HEADERS = [
    "{'descr': (",
    "'''",
    "\x00",
    "  {\n 1\n",
    " \n\t1\n  2",
    "{'descr': 'f8', 'fortran_order': False, 'shape': (\n",
    "{'descr': 'f8', 'fortran_order': False, 'shape': (1,), 'x': 1}\n",
    "{'descr': 'f8', 'fortran_order': False, 'shape': (10**30,)}\n",
    "{'descr': 'f8', 'fortran_order': False, 'shape': (100000000000000,)}\n",
    "{'descr': 'f8', 'fortran_order': False, 'shape': (1000000000000000000000000,)}\n",
    "{'descr': 'f8', 'fortran_order': False, 'shape': (-4,)}\n",
    "{'descr': '|V0', 'fortran_order': False, 'shape': (100000000000000000,)}\n",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (500000000,)}\n",
    "{'descr': ('f8',1,2,3), 'fortran_order': False, 'shape': ()}\n",
    "{'descr': [('a','f8'),('a','f8')], 'fortran_order': False, 'shape': ()}\n",
]


@pytest.mark.parametrize("text", HEADERS)
@pytest.mark.parametrize("key", ["npy", "npz"])
def test_damaged_headers_of_arrays(key: str, text: str) -> None:
    data = header(text)
    with pytest.raises(DecodeError) as caught:
        decode_member(key, data if key == "npy" else zip_of({"a.npy": data}))
    assert caught.value.member == key


def test_arrays_of_items_without_bytes() -> None:
    array = np.empty((2, 3), "V0")
    assert decode_member("npy", npy(array)).shape == (2, 3)


def test_sparse_tensors_in_a_file_of_torch_are_not_taken_for_a_bomb() -> None:
    tensor = torch.ones(1 << 18).to_sparse()
    assert torch.equal(decode_member("pt", saved(tensor)).to_dense(), tensor.to_dense())


WHOLE = {
    "safetensors": save_safetensors({"a": np.arange(4.0), "b": np.ones((2, 3), np.uint8)}),
    "png": picture("PNG"),
    "jpg": picture("JPEG"),
    "webp": picture("WEBP"),
    "bmp": picture("BMP"),
    "ppm": picture("PPM"),
    "png.gz": gzip.compress(picture("PNG", "LA")),
    "npy": npy(np.arange(6.0).reshape(2, 3)),
    "npz": zip_of({"a.npy": npy(np.arange(9))}),
    "pt": saved({"a": torch.arange(4.0)}),
    "pyd": pickle.dumps([np.arange(3), {"a": torch.arange(2)}]),
    "json.gz": gzip.compress(b"[1]"),
    "json": b'[1,"a\xc3\xa4"]',
    "cls": b"12",
    "txt": "a\u00e9".encode(),
}


def damaged(data: bytes, chance: random.Random) -> bytes:
    made = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4))):
        made[chance.randrange(len(made))] = chance.randrange(256)
    return bytes(made[: chance.randrange(len(made))] if chance.random() < 0.2 else made)


# numpy's reader evaluates a damaged header, and Python's parser has something to say about it.
@pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("times", [60, pytest.param(4000, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("key", WHOLE)
def test_damaged_members_decode_or_raise_a_decode_error(key: str, times: int) -> None:
    chance, named = random.Random(times), []
    assert decode_member(key, WHOLE[key]) is not None
    for _ in range(times):
        try:
            decode_member(key, damaged(WHOLE[key], chance))
        except DecodeError as error:
            named.append(error.member)
    assert set(named) == {key}


BOMB = """
import resource, sys
from headrace.webdatamodule.shards import DecodeError, decode_member
import gzip, io, zipfile, PIL.Image, PIL.PngImagePlugin
key, data = sys.argv[1], open(sys.argv[2], "rb").read()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    decode_member(key, data, max_bytes=32 << 20)
except DecodeError as error:
    assert key in str(error), error
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux only")
@pytest.mark.parametrize(
    ("key", "data"),
    [
        ("txt.gz", lambda: gzip.compress(bytes(200 << 20), 1)),
        ("npz", lambda: zip_of({"a.npy": npy(np.zeros(200 << 20, np.uint8))})),
        ("npy", lambda: header("{'descr': '<f8', 'fortran_order': False, 'shape': (30000000,)}\n")),
        ("png", lambda: picture("PNG", "L", (9000, 9000))),
    ],
    ids=["gz", "npz", "npy", "png"],
)
def test_bombs_take_little_more_memory_than_the_cap(key: str, data: Callable[[], bytes], tmp_path: Path) -> None:
    (tmp_path / "bomb").write_bytes(data())
    command = [sys.executable, "-c", BOMB, key, str(tmp_path / "bomb")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= (32 + 64) << 10


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def needed(value: object, keys: set[str]) -> int:
    """Bytes of all objects that parsing makes for a value; equal keys are one text, and small things are there."""
    if isinstance(value, int | str | None):
        there = (
            value is None or value in range(-5, 257) or (isinstance(value, str) and len(value) < 2 and value < "\u0100")
        )
        return 0 if there else sys.getsizeof(value)
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    fresh = [key for key in value if key not in keys] if isinstance(value, dict) else []
    keys.update(fresh)
    return sys.getsizeof(value) + sum(needed(one, keys) for one in [*inner, *fresh])


@given(JSON, st.booleans(), st.sampled_from([None, 2]), st.integers(2, 40))
def test_json_takes_no_more_than_is_counted(value: object, escape: bool, indent: int | None, part: int) -> None:
    data = json.dumps(value, ensure_ascii=escape, indent=indent).encode("utf-8", "surrogatepass")
    most = needed(json.loads(data), set())
    assert most <= json_bytes(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headrace.webdatamodule.shards.decoding.json_memory._PART", part)
        patch.setattr("headrace.webdatamodule.shards.decoding.json_memory._LONG", 2 * part)
        assert most <= json_bytes(data)
