"""Images to arrays of bytes, through Pillow."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from headrace.webdatamodule.shards.capped import MAX_BYTES, check_cap
from headrace.webdatamodule.shards.errors import DecodeError

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile

SUFFIXES = ("png", "jpg", "jpeg", "webp", "bmp", "ppm", "pgm", "pbm", "pnm")
# Formats that run other programs, such as EPS, stay out.
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "PPM")
_MODES = {"1": "L", "L": "L", "LA": "LA", "RGB": "RGB", "RGBA": "RGBA", "CMYK": "RGB", "YCbCr": "RGB"}
_OWN = "give a decoder of your own for it"


def load_image(data: bytes, max_bytes: int = MAX_BYTES) -> npt.NDArray[np.uint8]:
    """Decode an image.

    Args:
        data: An image in one of the formats PNG, JPEG, WebP, BMP or PPM, whatever its name says.
        max_bytes: Most bytes that the array may have; checked before anything is decoded.

    Returns:
        The pixels as they are stored (a camera's "turn me" is not followed), shape [height, width, channels]:
        1 channel for grey, 2 with transparency, 3 for red, green and blue, 4 with transparency. Palettes, CMYK and
        YCbCr become red, green and blue.

    Raises:
        DecodeError: Pillow is not installed; the image is too large, has more than 8 bits a channel or several frames.
        Exception: Whatever Pillow raises for bytes that are no image.
    """
    try:
        from PIL import Image
    except ImportError as error:
        cure = "pip install 'headrace-webdatamodule[images]'"
        raise DecodeError(f"this member needs the library Pillow: {cure}, or decode it yourself") from error
    with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
        mode = _mode(image)
        check_cap(image.width * image.height * len(mode), max_bytes, "the image has")
        image.load()
        pixels: npt.NDArray[np.uint8] = np.array(image if image.mode == mode else image.convert(mode))
    return pixels.reshape(*pixels.shape[:2], len(mode))


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
