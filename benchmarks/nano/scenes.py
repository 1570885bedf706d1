"""Simple pictures: a recipe (plain JSON) says what is in one, `pixels` paints it.

Painting is integer arithmetic on pixel centres without smoothing, so a recipe gives the same bytes
everywhere. A seed gives the same recipes for ever: the order of the draws is part of the format.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np

Recipe = dict[str, Any]

COLORS = {
    "red": (220, 30, 30),
    "green": (30, 160, 50),
    "blue": (40, 70, 220),
    "yellow": (245, 220, 30),
    "orange": (245, 135, 20),
    "purple": (130, 40, 160),
    "pink": (250, 150, 195),
    "cyan": (40, 210, 220),
}
SHAPES = ("circle", "square", "triangle", "cross")
# In the order in which weights are given; "transparent" has no colour.
BACKGROUNDS = {
    "black": ((10, 10, 10), 3),
    "grey": ((150, 150, 150), 3),
    "transparent": (None, 2),
    "white": ((255, 255, 255), 4),
}
PLACES = {
    "top left": "at the top left",
    "top right": "at the top right",
    "bottom left": "at the bottom left",
    "bottom right": "at the bottom right",
    "centre": "in the centre",
    "left": "on the left",
    "right": "on the right",
    "top": "at the top",
    "bottom": "at the bottom",
}

SHORT_SIDE, LONG_SIDE, ANY_SIDE = (56, 96), (168, 224), (112, 224)


@dataclass(frozen=True)
class Canvas:
    """A picture's size, where its shapes go in reading order, and the room each has."""

    width: int
    height: int
    cells: list[tuple[str, int, int]]  # place, x and y of the middle
    room: int


def _canvas(rng: random.Random, count: int, small: bool) -> Canvas:
    if small:
        layouts = ["single"] if count == 1 else ["wide", "tall"]
    elif count == 4:
        layouts = ["grid"]
    else:
        layouts = ["grid", "grid", "wide", "tall"] + ["single"] * (2 if count == 1 else 0)
    layout = rng.choice(layouts)
    if layout == "single":
        width, height = rng.randint(*SHORT_SIDE), rng.randint(*SHORT_SIDE)
        return Canvas(width, height, [("centre", width // 2, height // 2)], min(width, height))
    if layout == "grid":
        width, height = rng.randint(*ANY_SIDE), rng.randint(*ANY_SIDE)
        room = min(width, height) // 2
        if count == 1 and rng.random() < 0.2:
            return Canvas(width, height, [("centre", width // 2, height // 2)], room)
        cells = [
            (f"{row} {column}", width * x // 4, height * y // 4)
            for row, y in (("top", 1), ("bottom", 3))
            for column, x in (("left", 1), ("right", 3))
        ]
    elif layout == "wide":
        width, height = rng.randint(*LONG_SIDE), rng.randint(*SHORT_SIDE)
        names = (("left", 1), ("centre", 3), ("right", 5))
        cells = [(name, width * x // 6, height // 2) for name, x in names]
        room = min(width // 3, height)
    else:
        width, height = rng.randint(*SHORT_SIDE), rng.randint(*LONG_SIDE)
        names = (("top", 1), ("centre", 3), ("bottom", 5))
        cells = [(name, width // 2, height * y // 6) for name, y in names]
        room = min(width, height // 3)
    taken = sorted(rng.sample(range(len(cells)), count))
    return Canvas(width, height, [cells[i] for i in taken], room)


def draw(rng: random.Random, count: int, *, distinct: bool, small: bool = False) -> Recipe:
    """A recipe with `count` shapes (1 to 4).

    `distinct` lets every kind and every colour occur once at most. `small` keeps one side short.
    """
    canvas = _canvas(rng, count, small)
    palette = sorted(COLORS)
    if distinct:
        kinds, colors = rng.sample(SHAPES, count), rng.sample(palette, count)
    else:
        kinds = [rng.choice(SHAPES) for _ in range(count)]
        colors = [rng.choice(palette) for _ in range(count)]
    shapes = []
    for (place, x, y), kind, color in zip(canvas.cells, kinds, colors, strict=True):
        size = rng.choice(("small", "large"))
        largest = max(20, min(32, canvas.room // 2 - 3))
        radius = rng.randint(9, 12) if size == "small" else rng.randint(20, largest)
        slack = max(0, canvas.room // 2 - radius - 2)
        x, y = x + rng.randint(-slack, slack), y + rng.randint(-slack, slack)
        look = {"shape": kind, "color": color, "size": size}
        shapes.append(look | {"place": place, "x": x, "y": y, "r": radius})
    weights = [weight for _, weight in BACKGROUNDS.values()]
    background = rng.choices(list(BACKGROUNDS), weights)[0]
    size = {"width": canvas.width, "height": canvas.height}
    return size | {"background": background, "shapes": shapes}


def pixels(recipe: Recipe) -> np.ndarray:
    """uint8 [height, width, 3], or [height, width, 4] with a transparent background."""
    color, _ = BACKGROUNDS[recipe["background"]]
    channels = 4 if color is None else 3
    image = np.zeros((recipe["height"], recipe["width"], channels), np.uint8)
    if color is not None:
        image[:] = color
    y, x = np.ogrid[: recipe["height"], : recipe["width"]]
    for shape in recipe["shapes"]:
        paint = (*COLORS[shape["color"]], 255)[:channels]
        image[_inside(shape["shape"], x - shape["x"], y - shape["y"], shape["r"])] = paint
    return image


def _inside(kind: str, x: np.ndarray, y: np.ndarray, r: int) -> np.ndarray:
    """Which pixels a shape around (0, 0) covers; nothing lies outside the square of radius r."""
    if kind == "circle":
        return x * x + y * y <= r * r
    if kind == "square":
        return (8 * abs(x) <= 7 * r) & (8 * abs(y) <= 7 * r)
    if kind == "triangle":  # the tip is up
        return (2 * abs(x) <= y + r) & (y <= r)
    bars = (3 * abs(x) <= r) | (3 * abs(y) <= r)
    return bars & (abs(x) <= r) & (abs(y) <= r)


def listing(parts: list[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


def sentence(recipe: Recipe) -> str:
    """One sentence that names size, colour, kind and place of every shape in reading order."""
    parts = [
        f"a {s['size']} {s['color']} {s['shape']} {PLACES[s['place']]}" for s in recipe["shapes"]
    ]
    text = listing(parts)
    return f"{text[0].upper()}{text[1:]}."


def names(recipe: Recipe) -> str:
    """Colour and kind of every shape: "red circle and blue cross"."""
    return listing([f"{s['color']} {s['shape']}" for s in recipe["shapes"]])
