"""Pictures from recipes: a background and shapes, as the bundled checkpoint learnt to see them.

A recipe names width, height, background and shapes (kind, colour, centre x and y, radius r). Every
pixel is decided by whole numbers, so the bytes are the same everywhere.
"""

from __future__ import annotations

import base64
import hashlib
import io
from typing import Any

import numpy as np
from PIL import Image

PAINT = {
    "red": (220, 30, 30),
    "green": (30, 160, 50),
    "blue": (40, 70, 220),
    "yellow": (245, 220, 30),
    "orange": (245, 135, 20),
    "purple": (130, 40, 160),
    "pink": (250, 150, 195),
    "cyan": (40, 210, 220),
    "white": (255, 255, 255),
    "grey": (150, 150, 150),
    "black": (10, 10, 10),
}


def covers(kind: str, dx: np.ndarray, dy: np.ndarray, r: int) -> np.ndarray:
    """Which pixels at the offsets (dx, dy) from its centre a shape of radius `r` covers."""
    box = (np.abs(dx) <= r) & (np.abs(dy) <= r)
    if kind == "circle":
        return box & (dx**2 + dy**2 <= r**2)
    if kind == "square":
        return box & (8 * np.maximum(np.abs(dx), np.abs(dy)) <= 7 * r)
    if kind == "triangle":
        return box & (2 * np.abs(dx) - dy <= r)
    if kind == "cross":
        return box & (3 * np.minimum(np.abs(dx), np.abs(dy)) <= r)
    raise ValueError(f"no shape is called {kind!r}")


def pixels(recipe: dict[str, Any]) -> np.ndarray:
    """uint8 [height, width, 3]; with a transparent background, [height, width, 4]."""
    height, width = recipe["height"], recipe["width"]
    clear = recipe["background"] == "transparent"
    canvas = np.zeros((height, width, 4), np.uint8)
    if not clear:
        canvas[...] = (*PAINT[recipe["background"]], 255)
    y, x = np.mgrid[:height, :width]
    for shape in recipe["shapes"]:
        inside = covers(shape["shape"], x - shape["x"], y - shape["y"], shape["r"])
        canvas[inside] = (*PAINT[shape["color"]], 255)
    return canvas if clear else canvas[..., :3]


def fingerprint(recipe: dict[str, Any]) -> str:
    """sha256 over the raw pixels, as the held-out cases give it."""
    return hashlib.sha256(pixels(recipe).tobytes()).hexdigest()


def png(recipe: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels(recipe))).save(buffer, "PNG")
    return buffer.getvalue()


def data_uri(payload: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(payload).decode()}"


def as_sent(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A case's messages as a client sends them: every recipe a PNG data URI."""

    def part(item: dict[str, Any]) -> dict[str, Any]:
        if item["type"] != "image":
            return item
        return {"type": "image_url", "image_url": {"url": data_uri(png(item["recipe"]))}}

    return [
        message | {"content": [part(item) for item in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]
