"""Bytes of a member to an object, by the member's extension. No extension runs code.

webdataset's own ``.decode()`` unpickles and calls ``torch.load``; this module takes its place.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Collection
from json.scanner import make_scanner
from math import prod
from operator import methodcaller
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from headrace.webdatamodule.shards.decoding.allowed import AllowedClass, AllowedClassError, AllowedClasses
from headrace.webdatamodule.shards.decoding.limits import MAX_BYTES, MemoryBudget, gunzip, open_zip, shown, text_bytes
from headrace.webdatamodule.shards.decoding.numpy_pickle import check_empty
from headrace.webdatamodule.shards.decoding.torch_pickle import TorchUnpickler, load_torch_zip
from headrace.webdatamodule.shards.decoding.unpickler import checked_load
from headrace.webdatamodule.shards.errors import DecodeError, ShardError

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile

_Decoder = Callable[[bytes, Collection[AllowedClass], MemoryBudget], Any]
Arrays = dict[str, npt.NDArray[Any]]
# What an array takes beside its numbers, while safetensors or a zip file is read.
_PER_TENSOR, _PER_ENTRY = 2048, 512
_MAX_HEADER = 1 << 16  # numpy itself reads less, but asks for all of it first
_MAX_SHOWN = 100  # characters of a dtype that are shown
SUFFIXES = ("png", "jpg", "jpeg", "webp", "bmp", "ppm", "pgm", "pbm", "pnm")
# Formats that run other programs, such as EPS, stay out.
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "PPM")
_MODES = {"1": "L", "L": "L", "LA": "LA", "RGB": "RGB", "RGBA": "RGBA", "CMYK": "RGB", "YCbCr": "RGB"}
# Bytes that Pillow holds for a pixel, where they are not four; and those that its decoders hold besides.
_PIXEL = {"1": 1, "L": 1, "P": 1}
_CODEC = {"PNG": 1, "JPEG": 8, "MPO": 8, "WEBP": 16, "BMP": 4, "PPM": 6}
_MAX_SCANS = 100  # a progressive JPEG has about ten
_STRIP = 1 << 20  # pixels
_OWN_DECODER = "give a decoder of your own for it"
# Protocol 2, then torch's magic number: what torch.save wrote before it wrote zip files.
_LEGACY_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."

# Longer texts are no integers that Python reads.
_MAX_DIGITS = 1 << 16
# What the objects of a byte of JSON take at the most: "[]," makes a list of 88 bytes.
_PER_JSON_BYTE = 64
_MAX_REASON = 500
_JSON_SPACE = " \t\n\r"
# The C function that `json.loads` ends in; its stub is wrong.
_scan_json: Callable[[str, int], tuple[Any, int]] = make_scanner(json.JSONDecoder())  # type: ignore[arg-type]


def load_npy(data: bytes, max_bytes: int = MAX_BYTES) -> npt.NDArray[Any]:
    """Read an array."""
    return _npy(data, (), MemoryBudget(max_bytes))


def _npz(data: bytes, _allowed: Collection[AllowedClass], budget: MemoryBudget) -> Arrays:
    """Read several arrays by their names."""
    made: Arrays = {}
    with open_zip(data, budget) as archive:
        budget.reserve(_PER_ENTRY * len(archive.infolist()), "the arrays' names take")
        for entry in archive.infolist():
            name = entry.filename.removesuffix(".npy")
            if name in made:
                raise DecodeError(f"two arrays have the name {name[:200]!r}")
            made[name] = _entry(archive, entry, budget)
    return made


def _entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, budget: MemoryBudget) -> Any:
    with archive.open(entry) as stream:
        if stream.read(6) != np.lib.format.MAGIC_PREFIX:
            budget.reserve(entry.file_size, "an entry that is no array takes")
            stream.seek(0)
            return stream.read()  # as numpy does
        stream.seek(0)
        _check_header(stream, entry.file_size)
        stream.seek(0)
        return np.lib.format.read_array(stream, allow_pickle=False)


def _safetensors(data: bytes, _allowed: Collection[AllowedClass], budget: MemoryBudget) -> Arrays:
    """Read tensors as arrays by their names."""
    try:
        from safetensors import SafetensorError
        from safetensors.numpy import load
    except ImportError as error:
        cure = "pip install 'headrace-webdatamodule[safetensors]'"
        raise DecodeError(f"this member needs the library safetensors: {cure}, or decode it yourself") from error
    header = data[8 : 8 + int.from_bytes(data[:8], "little")]
    what = "the tensors and their names take"
    budget.reserve(2 * len(data) + 8 * len(header) + _PER_TENSOR * header.count(b"{"), what)
    try:
        made = load(data)
    except KeyError as error:
        cure = "give a decoder of your own for it, such as safetensors.torch.load"
        raise DecodeError(f"numpy has no numbers of type {error.args[0]}, which this member holds: {cure}") from error
    except SafetensorError as error:
        raise DecodeError(f"these bytes are no safetensors: {error}") from error
    for name in made:
        made[name] = made[name].copy()  # theirs cannot be written to
    return made


def _check_header(
    stream: Any, nbytes: int, budget: MemoryBudget | None = None
) -> tuple[np.dtype[Any], tuple[int, ...], bool]:
    """The type, the shape and whether it is stored column by column, of an array that its bytes can hold."""
    dtype, shape, in_columns = _header(stream)
    if min(shape, default=0) < 0 or max(shape, default=0) >= 1 << 62:
        raise DecodeError(f"the header says shape [{', '.join(map(shown, shape))}]: no array has such a dimension")
    count = prod(shape)
    check_empty(dtype, count)
    if dtype.hasobject:
        return dtype, shape, in_columns  # numpy says what is wrong
    if budget is not None:
        budget.reserve(count * dtype.itemsize, "the array has")
    if count * dtype.itemsize > nbytes:
        kind, shape_said = str(dtype)[:_MAX_SHOWN], ", ".join(map(shown, shape))
        said = f"{shown(count)} items of {kind}, shape [{shape_said}]"
        raise DecodeError(f"the header says {said}: more than the {nbytes} bytes hold")
    return dtype, shape, in_columns


def _header(stream: BinaryIO) -> tuple[np.dtype[Any], tuple[int, ...], bool]:
    version = np.lib.format.read_magic(stream)
    # The third version is the second one in UTF-8, which changes the names of fields only.
    old = version == (1, 0)
    length = stream.read(2 if old else 4)
    stream.seek(-len(length), io.SEEK_CUR)
    if int.from_bytes(length, "little") > _MAX_HEADER:
        raise DecodeError(f"the header of the array has more than {_MAX_HEADER} bytes")
    read = np.lib.format.read_array_header_1_0 if old else np.lib.format.read_array_header_2_0
    shape, in_columns, dtype = read(stream)
    return dtype, shape, in_columns


def _image(data: bytes, _allowed: Collection[AllowedClass], budget: MemoryBudget) -> npt.NDArray[np.uint8]:
    """The pixels as they are stored (EXIF orientation is ignored), shape [height, width, channels].

    Grey has 1 channel, with transparency 2; colours have 3, with transparency 4; palettes and CMYK become colours.
    """
    try:
        from PIL import Image
    except ImportError as error:
        cure = "pip install 'headrace-webdatamodule[images]'"
        raise DecodeError(f"this member needs the library Pillow: {cure}, or decode it yourself") from error
    with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
        mode = _mode(image)
        _check_size(image, len(mode), budget)
        _check_scans(data, image.format)
        image.load()
        pixels: npt.NDArray[np.uint8] = np.empty((image.height, image.width, len(mode)), np.uint8)
        step = max(1, _STRIP // image.width)
        for top in range(0, image.height, step):  # Pillow copies what it hands over, twice
            strip = image.crop((0, top, image.width, min(top + step, image.height)))
            part = np.asarray(strip if strip.mode == mode else strip.convert(mode))
            pixels[top : top + step] = part.reshape(-1, image.width, len(mode))
    return pixels


def _check_size(image: ImageFile, channels: int, budget: MemoryBudget) -> None:
    count = image.width * image.height
    budget.reserve(count * channels, "the image has")
    # A run in a BMP file may lead 255 rows past the end.
    stored = count + (256 * image.width if image.format == "BMP" else 0)
    budget.reserve(stored * (_PIXEL.get(image.mode, 4) + _CODEC[str(image.format)]), "to decode the image takes")


def _check_scans(data: bytes, kind: str | None) -> None:
    scans = data.count(b"\xff\xda") if kind in ("JPEG", "MPO") else 0
    if scans > _MAX_SCANS:  # each of them goes over all pixels
        raise DecodeError(f"the image has {scans} scans, and may have {_MAX_SCANS}: write it again, or {_OWN_DECODER}")


def _mode(image: ImageFile) -> str:
    # An MPO is the JPEG of a photo, with a preview or another view after it: the photo is what was asked for.
    if image.format != "MPO" and getattr(image, "is_animated", False):
        raise DecodeError(f"the image has several frames, of which this would read one: {_OWN_DECODER}")
    if image.mode == "P":
        return "RGBA" if "transparency" in image.info else "RGB"
    if image.mode not in _MODES or any(_is_deep(tile[0], tile[3]) for tile in image.tile):
        raise DecodeError(f"the image (mode {image.mode!r}) has other than 8 bits a channel: {_OWN_DECODER}")
    return _MODES[image.mode]


def _is_deep(codec: str, arguments: Any) -> bool:
    # Pillow drops the lower 8 of 16 bits without a warning where its mode has no room for them.
    parts = arguments if isinstance(arguments, tuple) else (arguments,)
    if codec.startswith("ppm"):  # the second part is the largest value
        return any(type(part) is int and part > 255 for part in parts[1:])
    return any(isinstance(part, str) and part.endswith((";16B", ";16L", ";16N")) for part in parts)


def _text(data: bytes, _allowed: Collection[AllowedClass], budget: MemoryBudget) -> str:
    if 5 * len(data) > budget.left:
        budget.reserve(text_bytes(data), "the text takes")
    return data.decode("utf-8")


def _json(data: bytes, _allowed: Collection[AllowedClass], budget: MemoryBudget) -> Any:
    budget.reserve(_PER_JSON_BYTE * len(data), f"the objects of {len(data)} bytes of JSON may take")
    return json.loads(data)


def _small_json(data: bytes) -> Any:
    """`json.loads` at half its cost: texts that are no plain UTF-8, or no JSON, are left to that."""
    try:
        text = data.decode()
        made, end = _scan_json(text, 0)
        if end == len(text) or not text[end:].strip(_JSON_SPACE):
            return made
    except (StopIteration, ValueError):
        pass
    return json.loads(data)


def _integer(data: bytes, _allowed: Collection[AllowedClass], _budget: MemoryBudget) -> int:
    if len(data) > _MAX_DIGITS:
        raise DecodeError(f"{len(data)} bytes are no integer: it may have {_MAX_DIGITS}, and Python reads 4300 digits")
    return int(data)


def _unpickled(data: bytes, allowed: Collection[AllowedClass], budget: MemoryBudget) -> Any:
    file = io.BytesIO(data)
    made = checked_load(TorchUnpickler(file, AllowedClasses(allowed), budget))
    rest = len(data) - file.tell()
    if rest:
        raise DecodeError(f"{rest} bytes follow the pickle; a member holds one pickle and nothing else")
    return made


def _torch(data: bytes, allowed: Collection[AllowedClass], budget: MemoryBudget) -> Any:
    if data[:4] == b"PK\x03\x04":
        return load_torch_zip(data, AllowedClasses(allowed), budget)
    if data.startswith(_LEGACY_TORCH):
        raise DecodeError(
            "torch.save wrote this in its old format, which is not read; load it with torch where you trust "
            "it and save it again with torch.save of version 1.6 or later"
        )
    return _unpickled(data, allowed, budget)


def _npy(data: bytes, _allowed: Collection[AllowedClass], budget: MemoryBudget) -> npt.NDArray[Any]:
    stream = io.BytesIO(data)
    dtype, shape, in_columns = _check_header(stream, len(data), budget)
    if dtype.names or dtype.hasobject or dtype.subdtype or not dtype.itemsize:  # the rare ones are left to numpy
        array: npt.NDArray[Any] = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
        return array
    # To have numpy read the header once more would take most of the time of a small array.
    flat = np.frombuffer(data, dtype, prod(shape), stream.tell()).copy()
    return flat.reshape(shape[::-1]).T if in_columns else flat.reshape(shape)


_DECODERS: dict[str, _Decoder] = {
    **dict.fromkeys(("pyd", "pickle", "pkl"), _unpickled),
    **dict.fromkeys(("pt", "pth"), _torch),
    **dict.fromkeys(("txt", "text", "transcript"), _text),
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), _integer),
    **dict.fromkeys(("json", "jsn"), _json),
    "npy": _npy,
    "npz": _npz,
    "safetensors": _safetensors,
    **dict.fromkeys(SUFFIXES, _image),
}


# What needs no account while it is small: how it is made, and how many bytes that takes for each of the member's own,
# these included, at the most. Most members of most sets are of these kinds.
_SMALL: dict[str, tuple[Callable[[bytes], Any], int]] = {
    **dict.fromkeys(("txt", "text", "transcript"), (methodcaller("decode", "utf-8"), 1 + 5)),
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), (int, 1)),
    **dict.fromkeys(("json", "jsn"), (_small_json, 1 + _PER_JSON_BYTE)),
}


def decode_member(
    key: str, data: bytes, *, allowed_classes: Collection[AllowedClass] = (), max_bytes: int = MAX_BYTES
) -> Any:
    """Decode one member of a sample by its last extension.

    ======================  ==========================================================================
    pyd pickle pkl          :func:`restricted_loads`
    pt pth                  what ``torch.save`` writes, on the CPU; or a bare pickle, as above
    json jsn                parsed
    txt text transcript     ``str`` (UTF-8)
    cls cls2 index inx id   ``int``
    npy; npz                array; dict of arrays; never with pickled objects inside
    safetensors             dict of arrays; needs the extra `safetensors`
    png jpg jpeg webp bmp   array of uint8, shape [height, width, channels]; needs the extra `images`
    ppm pgm pbm pnm         the same
    any of these with .gz   decompressed first
    anything else           the bytes as they are (also .gz of anything else)
    ======================  ==========================================================================

    Args:
        key: The member's key inside the sample, such as "tensor.pyd" or "json.gz". Case does not matter.
        data: The member's bytes.
        allowed_classes: Classes or functions that pickles may use; see :func:`restricted_loads`.
        max_bytes: Maximum memory in bytes, for the member, its decompressed form and the decoded object together. The
            default of 2 GiB allows arrays and images of 1 GiB, and pickled arrays of 700 MB. JSON counts as 64 bytes of
            memory per byte, so the default allows 33 MB of JSON. A large pickle counts as 256 bytes per instruction.

    Returns:
        The object.

    Raises:
        DecodeError: The bytes do not match the extension or need too much memory, or the library that reads them is not
            installed; the error names the member.
        UnsafePickleError: A pickle uses a class or function that is not allowed.
        ValueError: An entry of `allowed_classes` is not a class, function or name.

    >>> decode_member("meta.json", b'{"a": 1}')
    {'a': 1}
    >>> decode_member("raw", b"12")
    b'12'
    """
    decoder = member_decoder(key, allowed_classes, max_bytes)
    return data if decoder is None else decoder(data)


def member_decoder(
    key: str, allowed_classes: Collection[AllowedClass] = (), max_bytes: int = MAX_BYTES
) -> MemberDecoder | None:
    """What `decode_member` does for one key; None where the bytes stay as they are."""
    *_, before, last = ("", "", *key.lower().split("."))
    kind = before if last == "gz" else last
    return MemberDecoder(key, kind, last, allowed_classes, max_bytes) if kind in _DECODERS else None


class MemberDecoder:
    """Decodes the members of one key.

    Attributes:
        make: Decodes members that need no account of their memory; its errors are not explained.
        most: Most bytes of such a member; -1 for none.
    """

    def __init__(
        self, key: str, kind: str, last: str, allowed_classes: Collection[AllowedClass], max_bytes: int
    ) -> None:
        self._key, self._last, self._decode = key, last, _DECODERS[kind]
        self._allowed, self._max_bytes = allowed_classes, max_bytes
        self.make, per_byte = _SMALL.get(kind, (int, 0))
        self.most = min(max_bytes // per_byte, _MAX_DIGITS) if per_byte and last == kind else -1

    def __call__(self, data: bytes) -> Any:
        """Decode a member's bytes."""
        try:
            if len(data) <= self.most:
                return self.make(data)
            budget = MemoryBudget(self._max_bytes)
            budget.reserve(len(data), "the member has")
            return self._decode(gunzip(data, budget) if self._last == "gz" else data, self._allowed, budget)
        except ShardError as error:
            error.member = self._key
            raise
        except AllowedClassError:
            raise
        except Exception as error:  # zipfile, tokenize and numpy raise a dozen kinds for damaged bytes
            raise self.explained(error) from error

    def explained(self, error: Exception) -> DecodeError:
        """What to raise in place of an error of `make`, or of a library."""
        message = f"these bytes are no {self._last}: {type(error).__name__}: {str(error)[:_MAX_REASON]}"
        return DecodeError(message, member=self._key)


def restricted_loads(data: bytes, allowed_classes: Collection[AllowedClass] = (), max_bytes: int = MAX_BYTES) -> Any:
    """Unpickle data without running code that the pickle chooses.

    It loads tensors (always onto the CPU), parameters, numpy arrays, scalars and dtypes, and Python's builtin
    containers and numbers. Every other class or function is refused, with an error that names it. A class as a value is
    also refused, unless it is a builtin or a numpy scalar class. A pickle may hold at most 1,000 object arrays and
    10,000 defaultdicts, and nest keys at most 100 levels deep, because more could overflow the C stack. Copies that its
    calls make count as memory, and each instruction of a large pickle counts as 256 bytes.

    Args:
        data: The bytes of one pickle, of any protocol.
        allowed_classes: Further classes or functions that the pickle may use: the objects, or their names as
            "module.QualifiedName". The pickle can call them with any arguments.
        max_bytes: Maximum bytes of the loaded objects; memory that the `allowed_classes` take is not counted.

    Returns:
        The object.

    Raises:
        UnsafePickleError: The pickle uses a class or function that is not allowed; the message names it.
        DecodeError: The pickle is incomplete, needs too much memory, or is followed by more bytes.
        TypeError: `data` is not bytes.
        ValueError: An entry of `allowed_classes` is not a class, function or name.

    >>> import pickle
    >>> restricted_loads(pickle.dumps({"x": [1, 2.5]}))
    {'x': [1, 2.5]}
    >>> import fractions
    >>> half = pickle.dumps(fractions.Fraction(1, 2))
    >>> restricted_loads(half)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    headrace.webdatamodule.shards.errors.UnsafePickleError: the pickle asks for fractions.Fraction, which ...
    >>> restricted_loads(half, allowed_classes=[fractions.Fraction])
    Fraction(1, 2)
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        raise TypeError(f"data must be bytes, got {type(data).__name__}")
    return _unpickled(bytes(data), allowed_classes, MemoryBudget(max_bytes))
