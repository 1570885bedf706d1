"""MoonViT: patches of images to rows of the text model's width.

Every image attends within itself, and its rows fill matrix tiles of its own, so an image's bits
do not depend on the others of its batch. Knows nothing of files, colours or prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from common.config.spec import CHUNK, VisionSpec
from common.ops.table import REFERENCE, Ops
from common.weights.tree import VisionLayerWeights, VisionWeights

TILE = CHUNK  # rows of one matrix product on the reference path
NORM_EPS = torch.finfo(torch.float32).eps  # the tower's norms are built without an epsilon
THETA = 10000.0  # base of the rotation's frequencies


@dataclass(frozen=True, slots=True, kw_only=True)
class _Image:
    """One image's place in the batch of patches, and its angles."""

    rows: slice  # of its real patches
    cos: Tensor  # fp32 [patches, 1, head_dim / 2]
    sin: Tensor


class MoonVit:
    """Tower and projector; holds weights and shapes alone."""

    def __init__(
        self,
        spec: VisionSpec,
        weights: VisionWeights,
        *,
        ops: Ops = REFERENCE,
        exact: bool = True,
    ) -> None:
        """Bind a checkpoint's weights; `exact` multiplies in fixed row tiles."""
        self.spec, self.weights = spec, weights
        self._ops, self._tile = ops, TILE if exact else None

    @torch.inference_mode()
    def forward(self, images: Sequence[tuple[Tensor, tuple[int, int]]]) -> list[Tensor]:
        """Embed images.

        Args:
            images: for each image uint8 [patches, 3, patch, patch], row by row, and its grid
                (rows, columns), both multiples of the merge.

        Returns:
            For each image [patches / merge^2, text_hidden] in the dtype of the weights.

        Raises:
            ValueError: a grid does not have as many cells as there are patches, or is not a
                multiple of the merge.
        """
        w = self.weights
        hidden = torch.cat([self._patches(pixels, grid) for pixels, grid in images])
        places = self._places([grid for _, grid in images])
        for layer in w.layers:
            hidden = self._block(hidden, layer, places)
        hidden = self._ops.rms_norm(hidden, w.norm, NORM_EPS)
        cells = [
            self._merge(hidden[place.rows], grid)
            for place, (_, grid) in zip(places, images, strict=True)
        ]
        return self._project(cells)

    def _patches(self, pixels: Tensor, grid: tuple[int, int]) -> Tensor:
        """One image's patches with positions, padded to whole tiles, [rows, D]."""
        height, width = grid
        if height * width != len(pixels) or height % self.spec.merge or width % self.spec.merge:
            raise ValueError(f"{len(pixels)} patches do not fill a grid of {height} x {width}")
        w = self.weights
        x = pixels.to(w.patch.device).flatten(1).float() / 127.5 - 1
        x = self._ops.linear(x.to(w.patch.dtype), w.patch, self._tile)
        return self._whole_tiles(x + self._positions(grid).to(x.dtype))

    def _positions(self, grid: tuple[int, int]) -> Tensor:
        """The learned table at a grid's size, fp32 [patches, D]."""
        table = self.weights.pos.float()
        if grid != tuple(table.shape[:2]):
            planes = table.permute(2, 0, 1).unsqueeze(0)
            planes = functional.interpolate(planes, grid, mode="bilinear", align_corners=False)
            table = planes[0].permute(1, 2, 0)
        return table.flatten(0, 1)

    def _places(self, grids: list[tuple[int, int]]) -> list[_Image]:
        places, at = [], 0
        for height, width in grids:
            count = height * width
            cos, sin = self._angles(height, width)
            places.append(_Image(rows=slice(at, at + count), cos=cos, sin=sin))
            at += count if self._tile is None else -(-count // self._tile) * self._tile
        return places

    def _angles(self, height: int, width: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the 2-D rotation: even pairs turn by column, odd ones by row."""
        dim = self.spec.qkv_width // self.spec.num_heads
        device = self.weights.patch.device
        steps = torch.arange(dim // 4, device=device)
        frequency = THETA ** (-4.0 * steps / dim)
        row, column = torch.meshgrid(
            torch.arange(height, device=device), torch.arange(width, device=device), indexing="ij"
        )
        angle = torch.stack([column.flatten(), row.flatten()], -1)  # [patches, 2]
        turned = (angle.unsqueeze(1) * frequency.unsqueeze(-1)).flatten(1).unsqueeze(1)
        return turned.cos(), turned.sin()

    def _block(self, x: Tensor, w: VisionLayerWeights, places: list[_Image]) -> Tensor:
        ops, tile = self._ops, self._tile
        qkv = ops.linear(ops.rms_norm(x, w.norm0, NORM_EPS), w.wqkv, tile)
        qkv = qkv.unflatten(-1, (3, self.spec.num_heads, -1))
        attended = x.new_zeros(len(x), self.spec.qkv_width)
        for place in places:
            q, k, v = qkv[place.rows].unbind(1)
            q, k = (_rotate(y, place.cos, place.sin) for y in (q, k))
            q, k, v = (y.transpose(0, 1).unsqueeze(0) for y in (q, k, v))
            out = functional.scaled_dot_product_attention(q, k, v)
            attended[place.rows] = out[0].transpose(0, 1).flatten(1)
        x = x + ops.linear(attended, w.wo, tile)
        inner = ops.linear(ops.rms_norm(x, w.norm1, NORM_EPS), w.fc0, tile)
        return x + ops.linear(functional.gelu(inner, approximate="tanh"), w.fc1, tile)

    def _merge(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """Patches [rows * columns, D] to cells of merge x merge, [tokens, merge^2 * D]."""
        side = self.spec.merge
        cells = x.view(grid[0] // side, side, grid[1] // side, side, -1)
        return cells.transpose(1, 2).flatten(2).flatten(0, 1)

    def _project(self, cells: list[Tensor]) -> list[Tensor]:
        """[tokens, merge^2 * D] of each image -> [tokens, text_hidden] of each image."""
        w, ops, tile = self.weights, self._ops, self._tile
        padded = [self._whole_tiles(x) for x in cells]
        wide = functional.gelu(ops.linear(torch.cat(padded), w.project0, tile))
        out = ops.rms_norm(ops.linear(wide, w.project2, tile), w.post_norm, self.spec.projector_eps)
        parts = out.split([len(x) for x in padded])
        return [part[: len(x)].clone() for part, x in zip(parts, cells, strict=True)]

    def _whole_tiles(self, x: Tensor) -> Tensor:
        missing = 0 if self._tile is None else -len(x) % self._tile
        return functional.pad(x, (0, 0, 0, missing))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn neighbouring pairs of x [patches, heads, head_dim], in fp32."""
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2).to(x.dtype)
