"""Members to objects: what each extension gives, and that damage and bombs end in an error that names the member."""

import contextlib
import gzip
import io
import json
import pickle
import random
import struct
import subprocess
import sys
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from PIL import Image
from safetensors.numpy import save
from safetensors.numpy import save as save_safetensors
from safetensors.torch import save as save_torch

from headrace.webdatamodule import DecodeError, UnsafePickleError, decode_member
from headrace.webdatamodule.shards.decoding.decode import Arrays, load_npy
from headrace.webdatamodule.shards.decoding.limits import MemoryBudget, gunzip


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
        ("jsn", b'{"a": [1]}', {"a": [1]}),
        ("transcript", "é".encode(), "é"),
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


@pytest.mark.slow
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
        assert gunzip(packed, MemoryBudget(cap)) == data
    else:
        with pytest.raises(DecodeError):
            gunzip(packed, MemoryBudget(cap))


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


SHAPES = array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
KINDS = st.sampled_from(["<f8", "<f4", "<i8", "<i2", "|u1", "|b1"])
ARRAYS = st.tuples(KINDS, SHAPES).flatmap(lambda one: arrays(*one))


@pytest.mark.slow
@given(st.dictionaries(st.text(min_size=1).filter(lambda name: name != "__metadata__"), ARRAYS, max_size=4))
def test_safetensors_round_trip(tensors: Arrays) -> None:
    made = decode_member("x.safetensors", save(tensors))
    assert made.keys() == tensors.keys()
    for name, array in tensors.items():
        assert made[name].dtype == array.dtype
        assert made[name].flags.writeable
        np.testing.assert_array_equal(made[name], array)


def test_numbers_that_numpy_lacks_are_named() -> None:
    data = save_torch({"a": torch.zeros(3, dtype=torch.bfloat16)})
    with pytest.raises(DecodeError, match=r"BF16.*safetensors\.torch\.load"):
        decode_member("safetensors", data)


@given(arrays("<f4", SHAPES), st.sampled_from([(1, 0), (2, 0), (3, 0)]))
def test_every_version_of_npy(array: npt.NDArray[np.float32], version: tuple[int, int]) -> None:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version)
    np.testing.assert_array_equal(load_npy(file.getvalue()), array)


def test_npy_with_names_in_unicode() -> None:
    array = np.zeros(3, np.dtype([("\u5024", "<f8"), ("\u00e9\u0085", "<i2")]))
    file = io.BytesIO()
    np.lib.format.write_array(file, array, (3, 0))
    assert load_npy(file.getvalue()).dtype == array.dtype


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "blocked", "extra"),
    [("safetensors", "safetensors", "safetensors"), ("png", "PIL", "images"), ("jpg.gz", "PIL", "images")],
)
def test_libraries_stay_optional(key: str, blocked: str, extra: str) -> None:
    script = f"""
import gzip, sys
sys.modules[{blocked!r}] = None
from headrace.webdatamodule import DecodeError, decode_member
assert decode_member("json", b"[1]") == [1]
try:
    decode_member({key!r}, gzip.compress(b"x"))
except DecodeError as error:
    assert "headrace-webdatamodule[{extra}]" in str(error), error
    assert error.member == {key!r}
else:
    sys.exit(3)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_libraries_are_not_loaded_before_they_are_used() -> None:
    script = """
import sys
from headrace.webdatamodule import decode_member
sys.exit(3 if {name.partition(".")[0] for name in sys.modules} & {"PIL", "safetensors", "fsspec", "torch"} else 0)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_safetensors_does_not_load_torch() -> None:
    script = """
import sys, numpy
from safetensors.numpy import save
from headrace.webdatamodule import decode_member
decode_member("safetensors", save({"a": numpy.arange(3)}))
sys.exit(3 if "torch" in sys.modules else 0)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def written(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


PIXELS = st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4)).flatmap(lambda s: arrays(np.uint8, s))


@given(PIXELS)
def test_png_gives_the_pixels_back(pixels: npt.NDArray[np.uint8]) -> None:
    image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    made = decode_member("x.png", written(image, "PNG"))
    assert made.dtype == np.uint8
    assert made.flags.writeable
    np.testing.assert_array_equal(made, pixels)


@pytest.mark.parametrize("key", ["png", "jpg", "jpeg", "webp", "bmp", "ppm"])
@pytest.mark.parametrize("width", [1, 300])
def test_every_format_has_height_width_channels(key: str, width: int) -> None:
    kind = {"jpg": "JPEG"}.get(key, key.upper())
    made = decode_member(key, written(Image.new("RGB", (width, 2), (200, 200, 200)), kind))
    assert made.shape == (2, width, 3)
    assert abs(made.astype(int) - 200).max() <= 2


@pytest.mark.parametrize(
    ("mode", "kind", "channels"),
    [("1", "PNG", 1), ("L", "PPM", 1), ("LA", "PNG", 2), ("P", "PNG", 3), ("RGBA", "WEBP", 4), ("CMYK", "JPEG", 3)],
)
def test_channels(mode: str, kind: str, channels: int) -> None:
    assert decode_member("png", written(Image.new(mode, (5, 3)), kind)).shape == (3, 5, channels)


def test_a_palette_with_a_transparent_colour_has_four_channels() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putpixel((1, 0), 1)
    made = decode_member("png", written(image, "PNG", transparency=1))
    assert made.tolist() == [[[10, 20, 30, 255], [40, 50, 60, 0]]]


def deep_png() -> bytes:
    def chunk(name: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + name + data + zlib.crc32(name + data).to_bytes(4, "big")

    head = (1).to_bytes(4, "big") * 2 + bytes([16, 2, 0, 0, 0])
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(7))) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


@pytest.mark.parametrize(
    "data",
    [
        written(Image.new("I;16", (2, 2)), "PNG"),
        deep_png(),
        b"P6\n2 2\n65535\n" + bytes(24),
        b"P5\n2 2\n65535\n" + bytes(8),
    ],
)
def test_sixteen_bits_are_not_halved_in_silence(data: bytes) -> None:
    with pytest.raises(DecodeError, match=r"8 bits a channel.*decoder of your own"):
        decode_member("png", data)


def test_one_frame_is_not_taken_for_all() -> None:
    frames = [Image.new("RGB", (4, 4), (shade, 0, 0)) for shade in (0, 255)]
    data = written(frames[0], "WEBP", save_all=True, append_images=frames[1:])
    with pytest.raises(DecodeError, match="several frames"):
        decode_member("webp", data)


def mpo(progressive: bool = False) -> bytes:
    """What phones and stereo cameras write under the name of a JPEG: the photo, and a preview or another view."""
    gradient = np.linspace(0, 255, 24 * 16 * 3).astype(np.uint8).reshape(24, 16, 3)
    views = [Image.fromarray(gradient), Image.new("RGB", (4, 4), (255, 0, 0))]
    return written(views[0], "MPO", save_all=True, append_images=views[1:], progressive=progressive, quality=100)


@pytest.mark.parametrize("progressive", [False, True])
def test_the_photo_of_an_mpo_is_its_first_frame(progressive: bool) -> None:
    data = mpo(progressive)
    assert Image.open(io.BytesIO(data)).format == "MPO"
    made = decode_member("jpg", data)
    assert np.array_equal(made, np.asarray(Image.open(io.BytesIO(data))))
    assert made.shape == (24, 16, 3)
    with pytest.raises(DecodeError, match="scans, and may have 100"):
        decode_member("jpeg", data + b"\xff\xda" * 101)


def test_a_header_of_a_large_image_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(DecodeError, match=r"120000000 bytes.*max_bytes=1000000"):
        decode_member("ppm", b"P6\n8000 5000\n255\n", max_bytes=1_000_000)


def test_formats_that_run_programs_are_no_images() -> None:
    with pytest.raises(DecodeError, match="no png"):
        decode_member("png", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")


def bzip_bomb(name: str, content: bytes) -> bytes:
    """A zip file that promises 100 bytes and unpacks to 64 MiB."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr(name, content + bytes(1 << 26))
    data = bytearray(stream.getvalue())
    at = data.rfind(b"PK\x01\x02")
    data[at + 24 : at + 28] = struct.pack("<I", 100)
    return bytes(data)


@pytest.mark.parametrize(
    ("key", "name", "content"), [("pt", "a/data.pkl", b"\x80\x02K\x01."), ("npz", "a.npy", b"\x93NUMPY\x01\x00")]
)
@pytest.mark.slow
def test_a_zip_bomb_of_bzip2_is_not_unpacked(key: str, name: str, content: bytes) -> None:
    bomb = bzip_bomb(name, content)
    tracemalloc.start()
    try:
        with pytest.raises(DecodeError, match="is packed by method 12; store or deflate it"):
            decode_member(key, bomb, max_bytes=1 << 20)
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


DECODE = """
import re, sys
from pathlib import Path
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
def rss(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10
def grown(key, data, cap):
    Path("/proc/self/clear_refs").write_text("5")
    base = rss("VmRSS")
    try:
        decode_member(key, data, max_bytes=cap)
    except DecodeError as error:
        assert len(str(error)) < 2000, len(str(error))
    return rss("VmHWM") - base
PIL.Image.open(io.BytesIO(image("WEBP", "RGB", 8))).load()
decode_member("safetensors", safetensors.numpy.save({"a": np.zeros(1)}))
decode_member("pt", saved(torch.zeros(1)))
cap, bombs = json.loads(sys.argv[1])
print(json.dumps([grown(key, eval(data), cap) for key, data in bombs]))
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


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures memory as Linux does")
@pytest.mark.parametrize(
    "bombs",
    [BOMBS[::9], *(pytest.param([bomb], marks=pytest.mark.nightly) for bomb in BOMBS)],
    ids=["some", *(f"{number}-{key}" for number, (key, _) in enumerate(BOMBS))],
)
def test_decoding_takes_no_more_than_the_cap_and_some(bombs: list[tuple[str, str]]) -> None:
    cap = 64 << 20
    command = [sys.executable, "-c", DECODE, json.dumps([cap, bombs])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    grown = dict(zip(map(str, bombs), json.loads(done.stdout), strict=True))
    assert max(grown.values()) < cap + (64 << 20), grown


def test_a_jpeg_of_a_thousand_scans_is_refused() -> None:
    stream = io.BytesIO()
    Image.new("RGB", (64, 64)).save(stream, "JPEG", progressive=True)
    data = stream.getvalue()
    begin, end = data.rindex(b"\xff\xda"), len(data) - 2
    assert decode_member("jpg", data).shape == (64, 64, 3)
    with pytest.raises(DecodeError, match=r"has 10\d\d scans, and may have 100"):
        decode_member("jpg", data[:end] + 1000 * data[begin:end] + data[end:])


def npy_of(shape: str, body: bytes = b"", descr: str = "'<f8'") -> bytes:
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
    data = npy_of(shape, bytes(16))
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
        archive.writestr("a.npy", npy_of("(1,)", bytes(8)))
        archive.writestr("a", npy_of("(1,)", bytes(8)))
    with pytest.raises(DecodeError, match="two arrays have the name 'a'"):
        decode_member("npz", stream.getvalue())


def test_json_needs_64_bytes_for_each_of_its_own() -> None:
    data = b"[" + b",".join([b'{"x":12,"y":34}'] * 100) + b"]"
    assert len(decode_member("json", data, max_bytes=65 * len(data))) == 100
    with pytest.raises(DecodeError, match=r"the objects of \d+ bytes of JSON may take \d+ bytes or more"):
        decode_member("json", data, max_bytes=64 * len(data))


@pytest.mark.nightly
def test_pickles_of_protocol_2_are_counted_by_what_they_take() -> None:
    array = np.random.default_rng(0).random(25_000_000)
    assert np.array_equal(decode_member("pkl", pickle.dumps(array, 2)), array)


def test_latin_text_in_a_pickle_is_counted_by_what_it_takes() -> None:
    array = np.random.default_rng(0).random(1_000_000)
    data = pickle.dumps(array, 2)
    assert np.array_equal(decode_member("pkl", data, max_bytes=8 * array.nbytes), array)


# Plain, with spaces around, in other encodings, with a mark, with surrogates, and what is none.
JSON = [
    *(
        b"1",
        b" 1",
        b"1 \n\t\r",
        b"\n[1]\n",
        b"1\x0b",
        b"1\xc2\xa0",
        b"\xe2\x80\xa81",
        b"[1] [2]",
        b"1,",
        b"[1,]",
        b"NaN",
        b"-",
    ),
    *('"\u00e4"'.encode(encoding) for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32")),
    *(
        b'"\xed\xa0\x80"',
        b'"\xff"',
        b'"\x00"',
        b"1\x00",
        b"\x001",
        b"1\x00\x00\x00",
        b"",
        b" ",
        b"tru",
        b'{"a"',
        b'{"a": 1, "a": 2}',
    ),
]


def read_json(read: Callable[[bytes], Any], data: bytes) -> str:
    """What comes of some bytes: an object or a reason."""
    try:
        return repr(read(data))
    except DecodeError as error:
        return error.message
    except ValueError as error:
        return f"these bytes are no json: {type(error).__name__}: {error}"


@pytest.mark.parametrize("data", JSON)
def test_small_json_is_what_pythons_own_reader_makes_of_it(data: bytes) -> None:
    assert read_json(partial(decode_member, "json"), data) == read_json(json.loads, data)
