"""What router and encoder must read alike in an image file: format, and the size after orientation.

The router builds the prompt from the size it reads here, the encoder decodes and compares. Only
headers are read: no pixel is decoded, whatever the file claims to hold. The orientation tag counts
where it stands before the pixels. Of an animation, the first frame is the image.
"""

from __future__ import annotations

import io
import struct
import zlib
from dataclasses import dataclass

from PIL import (  # the plugins register their formats
    BmpImagePlugin,
    ExifTags,
    GifImagePlugin,
    Image,
    JpegImagePlugin,
    PngImagePlugin,
    WebPImagePlugin,
)

from common.errors import ImageRejected

FORMATS = tuple(
    plugin.format
    for plugin in (
        PngImagePlugin.PngImageFile,
        JpegImagePlugin.JpegImageFile,
        WebPImagePlugin.WebPImageFile,
        GifImagePlugin.GifImageFile,
        BmpImagePlugin.BmpImageFile,
    )
)
NAMES = "PNG, JPEG, WebP, GIF and BMP"

# What Pillow raises on files that are broken in one way or another.
BROKEN = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    OverflowError,
    ZeroDivisionError,
    AssertionError,
    MemoryError,
    struct.error,
    zlib.error,
)

TRANSPOSES = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
SIDEWAYS = frozenset(TRANSPOSES[orientation] for orientation in (5, 6, 7, 8))


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageHeader:
    """Format, size in pixels as a viewer sees it, and the transposition that gets there."""

    format: str
    width: int
    height: int
    transpose: Image.Transpose | None


def open_image(payload: bytes) -> tuple[Image.Image, ImageHeader]:
    """Open an image without decoding it.

    Raises:
        ImageRejected: not an image, or of a format that is not read here.
    """
    Image.MAX_IMAGE_PIXELS = None  # sizes are bounded by the settings, in words that help
    try:
        image = Image.open(io.BytesIO(payload), formats=FORMATS)
        exif = Image.Image.getexif(image)  # some formats' own way decodes the pixels first
        transpose = TRANSPOSES.get(exif.get(ExifTags.Base.Orientation, 1))
    except BROKEN:
        raise ImageRejected(
            f"the data is no image that can be read; send {NAMES}, whole and undamaged"
        ) from None
    width, height = image.size
    if transpose in SIDEWAYS:
        width, height = height, width
    header = ImageHeader(format=image.format or "", width=width, height=height, transpose=transpose)
    return image, header


def read_header(payload: bytes) -> ImageHeader:
    """The header alone.

    Raises:
        ImageRejected: not an image, or of a format that is not read here.
    """
    image, header = open_image(payload)
    image.close()
    return header
