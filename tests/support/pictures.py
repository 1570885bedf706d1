"""Images of the HTTP cases, from the words that describe them."""

from __future__ import annotations

import base64
import io
import re
import struct
import zlib
from functools import cache

import numpy as np
from PIL import Image

from tests.support.scenes import data_uri


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def solid(colour: str, size: tuple[int, int] = (28, 28)) -> bytes:
    return encoded(Image.new("RGB", size, colour))


def slope() -> Image.Image:
    """56x28: pixel (x, y) is (4x mod 256, 8y mod 256, 40)."""
    y, x = np.mgrid[:28, :56]
    blue = np.full_like(x, 40)
    return Image.fromarray(np.stack([4 * x % 256, 8 * y % 256, blue], -1).astype(np.uint8))


def turned(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[274] = orientation
    return encoded(slope(), exif=exif)


def one_bit(width: int, height: int) -> bytes:
    """A one-colour 1-bit PNG, written without holding its pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    packer = zlib.compressobj(9)
    row = bytes((width + 7) // 8 + 1)
    packed = b"".join(packer.compress(row * 100) for _ in range(height // 100)) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")
    )


def gif(*colours: str) -> bytes:
    frames = [Image.new("RGB", (28, 28), colour) for colour in colours]
    return encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])


@cache
def picture(words: str) -> str | None:
    """A URI for the image that `words` describe; None when they are not known here."""
    if words.startswith("data:image/"):
        return words
    if words.startswith("empty payload: "):
        return words.removeprefix("empty payload: ")
    if many := re.fullmatch(r"28x28 GIF, frame 1 (\w+), frame 2 (\w+); (\d+) frames", words):
        return data_uri(gif(*(many[1 + i % 2] for i in range(int(many[3])))), "image/gif")
    known = {
        "28x28 solid red RGB PNG as a data URI": lambda: data_uri(solid("red")),
        "28x28 solid red PNG": lambda: data_uri(solid("red")),
        "28x28 solid blue PNG": lambda: data_uri(solid("blue")),
        "a valid 28x28 PNG with its last 40 bytes cut off, base64 correct": (
            lambda: data_uri(solid("red")[:-40])
        ),
        "the ASCII text 'not an image', base64 correct": lambda: data_uri(b"not an image"),
        "data:;base64,<28x28 red PNG>": (
            lambda: "data:;base64," + base64.b64encode(solid("red")).decode()
        ),
        "run with 1x1, 1x2000 and 2000x1 RGB PNG": lambda: data_uri(solid("red", (1, 1))),
        "30000x30000 one-colour 1-bit PNG (compresses to roughly 110 KB)": (
            lambda: data_uri(one_bit(30000, 30000))
        ),
        "28x28 GIF, frame 1 red, frame 2 blue; second run with 500 frames": (
            lambda: data_uri(gif("red", "blue"), "image/gif")
        ),
        "56x28 RGB PNG, pixel (x,y) = (4x mod 256, 8y mod 256, 40), with EXIF Orientation 6": (
            lambda: data_uri(turned(6))
        ),
        "the same pixels already rotated 90 degrees clockwise to 28x56, no EXIF": (
            lambda: data_uri(encoded(slope().transpose(Image.Transpose.ROTATE_270)))
        ),
    }
    make = known.get(words)
    return make() if make else None
