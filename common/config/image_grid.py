"""Pure arithmetic of images: from a picture's size to its resized size, patch grid and tokens.

The router counts tokens with it, the encoder cuts patches by it; a prompt and its embeddings agree
because both read this page. It never opens an image.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRules:
    """How the checkpoint wants its images, from `preprocessor_config.json`."""

    patch: int = 14  # pixels a side
    merge: int = 2  # patches a side of one token
    patch_limit: int = 65536  # most patches after resizing, before padding
    side_limit: int = 512  # most patches on one side
    square: int = 8  # side of the chessboard behind transparent pixels
    white: int = 255
    gray: int = 180


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageGrid:
    """A picture's place in the model: pixels after resizing, then rows and columns of patches."""

    width: int
    height: int
    rows: int
    columns: int
    tokens: int

    @property
    def patches(self) -> int:
        """Number of patches, padding included."""
        return self.rows * self.columns


def image_grid(width: int, height: int, rules: ImageRules) -> ImageGrid:
    """The grid of a picture of `width` x `height` pixels. Pictures shrink to fit, none grows."""
    side = rules.side_limit * rules.patch
    area = max(1, width // rules.patch) * max(1, height // rules.patch)
    scale = min(1.0, math.sqrt(rules.patch_limit / area), side / width, side / height)
    new_width = min(max(1, int(width * scale)), side)
    new_height = min(max(1, int(height * scale)), side)
    cell = rules.patch * rules.merge
    across, down = -(-new_width // cell), -(-new_height // cell)
    return ImageGrid(
        width=new_width,
        height=new_height,
        rows=down * rules.merge,
        columns=across * rules.merge,
        tokens=across * down,
    )


def load_image_rules(directory: Path) -> ImageRules:
    """Read `preprocessor_config.json` of a checkpoint directory.

    Raises:
        CheckpointError: the file is missing, is not JSON, or asks for what is not built here.
    """
    path = directory / "preprocessor_config.json"
    try:
        config = json.loads(path.read_text())["media_proc_cfg"]
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; a checkpoint with vision needs it") from None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} has no readable `media_proc_cfg`: {error}") from None
    try:
        return parse_image_rules(config)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: {error} in `media_proc_cfg`") from None


def parse_image_rules(config: Mapping[str, Any]) -> ImageRules:
    """Rules from a `media_proc_cfg`; the chessboard's keys occur with and without a prefix.

    Raises:
        KeyError, ValueError: a key is missing, or holds what is not built here.
    """
    board = {
        key.removeprefix("chessboard_"): v for key, v in config["transparent_bg_config"].items()
    }
    built = {"pattern": "chessboard", "square_on_top_left": True}
    for key, value in built.items():
        if board[key] != value:
            raise ValueError(f"{key} is {board[key]!r}, only {value!r} is built")
    if config["transparent_bg_fill_stage"] != "after_resize":
        raise ValueError("transparent_bg_fill_stage must be after_resize")
    if config["fixed_output_tokens"] is not None:
        raise ValueError("fixed_output_tokens is not built")
    if {*config["image_mean"], *config["image_std"]} != {0.5}:
        raise ValueError("image_mean and image_std must be 0.5")
    return ImageRules(
        patch=config["patch_size"],
        merge=config["merge_kernel_size"],
        patch_limit=config["in_patch_limit"],
        side_limit=config["patch_limit_on_one_side"],
        square=board["square_size"],
        white=board["white_value"],
        gray=board["gray_value"],
    )
