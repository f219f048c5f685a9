"""Images to arrays of bytes, through Pillow."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from headrace.webdatamodule.shards.decoding.capped import MAX_BYTES, Room, room_of
from headrace.webdatamodule.shards.errors import DecodeError

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile

SUFFIXES = ("png", "jpg", "jpeg", "webp", "bmp", "ppm", "pgm", "pbm", "pnm")
# Formats that run other programs, such as EPS, stay out.
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "PPM")
_MODES = {"1": "L", "L": "L", "LA": "LA", "RGB": "RGB", "RGBA": "RGBA", "CMYK": "RGB", "YCbCr": "RGB"}
# Bytes that Pillow holds for a pixel, where they are not four; and those that its decoders hold besides.
_PIXEL = {"1": 1, "L": 1, "P": 1}
_CODEC = {"PNG": 1, "JPEG": 8, "WEBP": 16, "BMP": 4, "PPM": 6}
_SCANS = 100  # a progressive JPEG has about ten
_STRIP = 1 << 20  # pixels
_OWN = "give a decoder of your own for it"


def load_image(data: bytes, max_bytes: int | Room = MAX_BYTES) -> npt.NDArray[np.uint8]:
    """Decode an image.

    Args:
        data: An image in one of the formats PNG, JPEG, WebP, BMP or PPM, whatever its name says.
        max_bytes: Most bytes that the array and Pillow's own pixels may take together; checked before anything is
            decoded.

    Returns:
        The pixels as they are stored (a camera's "turn me" is not followed), shape [height, width, channels]:
        1 channel for grey, 2 with transparency, 3 for red, green and blue, 4 with transparency. Palettes, CMYK and
        YCbCr become red, green and blue.

    Raises:
        DecodeError: Pillow is not installed; the image is too large, has more than 8 bits a channel, several frames
            or more than 100 scans.
        Exception: Whatever Pillow raises for bytes that are no image.
    """
    try:
        from PIL import Image
    except ImportError as error:
        cure = "pip install 'headrace-webdatamodule[images]'"
        raise DecodeError(f"this member needs the library Pillow: {cure}, or decode it yourself") from error
    with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
        mode = _mode(image)
        _check_size(image, len(mode), room_of(max_bytes))
        _check_scans(data, image.format)
        image.load()
        pixels: npt.NDArray[np.uint8] = np.empty((image.height, image.width, len(mode)), np.uint8)
        step = max(1, _STRIP // image.width)
        for top in range(0, image.height, step):  # Pillow copies what it hands over, twice
            strip = image.crop((0, top, image.width, min(top + step, image.height)))
            part = np.asarray(strip if strip.mode == mode else strip.convert(mode))
            pixels[top : top + step] = part.reshape(-1, image.width, len(mode))
    return pixels


def _check_size(image: ImageFile, channels: int, room: Room) -> None:
    count = image.width * image.height
    room.take(count * channels, "the image has")
    # A run in a BMP file may lead 255 rows past the end.
    stored = count + (256 * image.width if image.format == "BMP" else 0)
    room.take(stored * (_PIXEL.get(image.mode, 4) + _CODEC[str(image.format)]), "to decode the image takes")


def _check_scans(data: bytes, kind: str | None) -> None:
    scans = data.count(b"\xff\xda") if kind == "JPEG" else 0
    if scans > _SCANS:  # each of them goes over all pixels
        raise DecodeError(f"the image has {scans} scans, and may have {_SCANS}: write it again, or {_OWN}")


def _mode(image: ImageFile) -> str:
    if getattr(image, "is_animated", False):
        raise DecodeError(f"the image has several frames, of which this would read one: {_OWN}")
    if image.mode == "P":
        return "RGBA" if "transparency" in image.info else "RGB"
    if image.mode not in _MODES or any(_is_deep(tile[0], tile[3]) for tile in image.tile):
        raise DecodeError(f"the image (mode {image.mode!r}) has other than 8 bits a channel: {_OWN}")
    return _MODES[image.mode]


def _is_deep(codec: str, arguments: Any) -> bool:
    # Pillow leaves half of 16 bits away without a word where the mode has no room for them.
    parts = arguments if isinstance(arguments, tuple) else (arguments,)
    if codec.startswith("ppm"):  # the second part is the largest value
        return any(type(part) is int and part > 255 for part in parts[1:])
    return any(isinstance(part, str) and part.endswith((";16B", ";16L", ";16N")) for part in parts)
