import io
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image

from headrace.webdatamodule.shards import DecodeError, decode_member


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


def test_a_header_of_a_large_image_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(DecodeError, match=r"120000000 bytes.*max_bytes=1000000"):
        decode_member("ppm", b"P6\n8000 5000\n255\n", max_bytes=1_000_000)


def test_formats_that_run_programs_are_no_images() -> None:
    with pytest.raises(DecodeError, match="no png"):
        decode_member("png", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
