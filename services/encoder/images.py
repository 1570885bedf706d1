"""Image bytes to the patches the vision tower reads: decode, orient, resize, fill, pad, cut.

The prompt was built from the header by the router; an image that turns out to have another size, or
another content than its digest says, is refused here. Nothing is kept and no tensor is made.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from common.config.image_grid import ImageGrid, ImageRules, image_grid
from common.contract.image_header import BROKEN, open_image
from common.contract.messages import ImageRef
from common.errors import ImageRejected

Pixels = NDArray[np.uint8]

DIGEST_BYTES = 16  # BLAKE2b-128


@dataclass(frozen=True, slots=True, kw_only=True)
class Patches:
    """One image: uint8 [rows * columns, 3, 14, 14], row by row. Model input: u8 / 127.5 - 1."""

    pixels: Pixels
    grid: ImageGrid


def image_digest(payload: bytes) -> bytes:
    """The digest that names an image's content."""
    return hashlib.blake2b(payload, digest_size=DIGEST_BYTES).digest()


def prepare(payload: bytes, ref: ImageRef, rules: ImageRules) -> Patches:
    """Patches of the image that `ref` stands for in the prompt.

    Raises:
        ImageRejected: the bytes are not those of the digest, do not decode, or decode to a size
            that the prompt was not built with.
    """
    if image_digest(payload) != ref.digest:
        raise ImageRejected("the image's bytes are not those the prompt was built with")
    image, header = open_image(payload)
    with image:
        grid = image_grid(header.width, header.height, rules)
        if (header.width, header.height, grid.tokens) != (ref.width, ref.height, ref.tokens):
            raise ImageRejected(
                f"the image is {header.width}x{header.height} with {grid.tokens} tokens, but the "
                f"prompt was built for {ref.width}x{ref.height} with {ref.tokens}"
            )
        try:
            image.load()
            if header.transpose is not None:
                image = image.transpose(header.transpose)
            if image.size != (ref.width, ref.height):
                raise ImageRejected(
                    f"the image decodes to {image.width}x{image.height}, but its header says "
                    f"{ref.width}x{ref.height}"
                )
            pixels = _rgb(image, grid, rules)
        except BROKEN:
            raise ImageRejected(
                f"the {header.format} image is cut short or damaged; send it whole"
            ) from None
    return Patches(pixels=patchify(_pad(pixels, grid, rules.patch), rules.patch), grid=grid)


def _rgb(image: Image.Image, grid: ImageGrid, rules: ImageRules) -> Pixels:
    """Resized pixels uint8 [height, width, 3]; where they are transparent, a chessboard shows."""
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))  # Pillow would clip
    transparent = image.has_transparency_data
    if image.size != (grid.width, grid.height):
        image = image.resize((grid.width, grid.height), Image.Resampling.BICUBIC)
    if not transparent:
        return np.asarray(image.convert("RGB"))
    rgba = np.asarray(image.convert("RGBA")).astype(np.float32)
    alpha = rgba[..., 3:] / 255.0  # [height, width, 1]
    board = _chessboard(grid.height, grid.width, rules)[..., None]
    filled: Pixels = (alpha * rgba[..., :3] + (1.0 - alpha) * board).astype(np.uint8)
    return filled


def _chessboard(height: int, width: int, rules: ImageRules) -> NDArray[np.float32]:
    """White and gray squares [height, width], white in the top left corner."""
    rows = np.arange(height)[:, None] // rules.square
    columns = np.arange(width)[None, :] // rules.square
    return np.where((rows + columns) % 2 == 1, rules.gray, rules.white).astype(np.float32)


def _pad(pixels: Pixels, grid: ImageGrid, patch: int) -> Pixels:
    """Zeros at the right and at the bottom, up to whole tokens."""
    height, width, _ = pixels.shape
    padding = ((0, grid.rows * patch - height), (0, grid.columns * patch - width), (0, 0))
    return np.pad(pixels, padding)


def patchify(pixels: Pixels, patch: int) -> Pixels:
    """Cut [height, width, 3] into [rows * columns, 3, patch, patch], row by row."""
    rows, columns = pixels.shape[0] // patch, pixels.shape[1] // patch
    cut = pixels.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 4, 1, 3)
    return np.ascontiguousarray(cut).reshape(rows * columns, 3, patch, patch)
