"""MoonViT: patches of images to rows of the text model's width.

Every image attends within itself. On the exact path its rows fill matrix tiles of its own, so an
image's bits do not depend on the others of its batch. Knows nothing of files, colours or prompts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from common.config.spec import CHUNK, VisionSpec
from common.ops.table import REFERENCE, Ops
from common.ops.vit import TILE as BLOCK
from common.ops.vit import Layout
from common.weights.tree import VisionLayerWeights, VisionWeights

TILE = CHUNK  # rows of one matrix product on the reference path
NORM_EPS = torch.finfo(torch.float32).eps  # the tower's norms are built without an epsilon
THETA = 10000.0  # base of the rotation's frequencies
Grid = tuple[int, int]  # rows and columns of an image's patches


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
        self._cos: Tensor | None = None  # fp32 [sides, head_dim / 4], of the places known so far
        self._sin: Tensor | None = None

    @torch.inference_mode()
    def forward(self, images: Sequence[tuple[Tensor, Grid]]) -> list[Tensor]:
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
        grids = [self.checked(pixels, grid) for pixels, grid in images]
        layout, begins, tokens = lay_out(grids, self.spec.merge, align=self._tile or 1)
        device, rows = self.weights.patch.device, len(layout.places)
        pixels = torch.zeros((rows, self.weights.patch.shape[1]), dtype=torch.uint8, device=device)
        places = torch.zeros(
            (rows, self.spec.hidden), dtype=self.weights.patch.dtype, device=device
        )
        for (image, grid), begin in zip(images, begins, strict=True):
            pixels[begin : begin + len(image)] = image.flatten(1).to(device)
            places[begin : begin + len(image)] = self.positions(grid)
        self.know(max(max(grid) for grid in grids))
        out = self.embed(pixels, places, moved(layout, device))
        sizes = [rows * columns // self.spec.merge**2 for rows, columns in grids]
        return [out[at : at + size].clone() for at, size in zip(tokens, sizes, strict=True)]

    def checked(self, pixels: Tensor, grid: Grid) -> Grid:
        """The grid, if the patches fill it."""
        height, width = grid
        if height * width != len(pixels) or height % self.spec.merge or width % self.spec.merge:
            raise ValueError(f"{len(pixels)} patches do not fill a grid of {height} x {width}")
        return grid

    def know(self, sides: int) -> None:
        """Have the angles of places up to `sides` ready."""
        if self._cos is not None and len(self._cos) >= sides:
            return
        dim, device = self.spec.qkv_width // self.spec.num_heads, self.weights.patch.device
        frequency = THETA ** (-4.0 * torch.arange(dim // 4, device=device) / dim)
        angle = torch.arange(sides, device=device).unsqueeze(1) * frequency
        self._cos, self._sin = angle.cos(), angle.sin()

    def embed(self, pixels: Tensor, places: Tensor, layout: Layout) -> Tensor:
        """Rows of patches to rows of tokens; every shape is that of the arguments.

        Args:
            pixels: uint8 [N, 3 * patch^2].
            places: [N, hidden], what `positions` gives for each row.
            layout: where images lie.

        Returns:
            [len(layout.cells) / merge^2, text_hidden].
        """
        w, ops = self.weights, self._ops
        x = (pixels.float() / 127.5 - 1).to(w.patch.dtype)
        hidden = ops.linear(x, w.patch, self._tile) + places
        for layer in w.layers:
            hidden = self._block(hidden, layer, layout)
        hidden = ops.rms_norm(hidden, w.norm, NORM_EPS)
        cells = hidden[layout.cells].view(-1, self.spec.merge**2 * self.spec.hidden)
        wide = functional.gelu(ops.linear(cells, w.project0, self._tile))
        out = ops.linear(wide, w.project2, self._tile)
        return ops.rms_norm(out, w.post_norm, self.spec.projector_eps)

    def positions(self, grid: Grid) -> Tensor:
        """The learned table at a grid's size, [patches, hidden] in the dtype of the weights."""
        table = self.weights.pos.float()
        if grid != tuple(table.shape[:2]):
            planes = table.permute(2, 0, 1).unsqueeze(0)
            planes = functional.interpolate(planes, grid, mode="bilinear", align_corners=False)
            table = planes[0].permute(1, 2, 0)
        return table.flatten(0, 1).to(self.weights.patch.dtype)

    def _block(self, x: Tensor, w: VisionLayerWeights, layout: Layout) -> Tensor:
        ops, tile = self._ops, self._tile
        assert self._cos is not None and self._sin is not None
        qkv = ops.linear(ops.rms_norm(x, w.norm0, NORM_EPS), w.wqkv, tile)
        qkv = qkv.unflatten(-1, (3, self.spec.num_heads, -1))
        ops.vit_rotate(qkv, layout, self._cos, self._sin)
        x = x + ops.linear(ops.vit_attend(qkv, layout), w.wo, tile)
        inner = ops.linear(ops.rms_norm(x, w.norm1, NORM_EPS), w.fc0, tile)
        return x + ops.linear(functional.gelu(inner, approximate="tanh"), w.fc1, tile)


def lay_out(
    grids: Sequence[Grid], merge: int, *, align: int = 1, rows: int = 0, tiles: int = 0
) -> tuple[Layout, list[int], list[int]]:
    """Tables of a pass over images, on the CPU.

    Args:
        grids: of the images.
        merge: side of a cell.
        align: images begin at multiples of it, among patches and among tokens.
        rows: at least so many rows; the rest belongs to none.
        tiles: at least so many blocks.

    Returns:
        The tables, the first row and the first token of each image.
    """
    places, cells = [torch.zeros((0, 2), dtype=torch.int64)], [torch.zeros(0, dtype=torch.int64)]
    blocks: list[list[int]] = []
    begins, tokens, at, token = [], [], 0, 0
    for height, width in grids:
        count = height * width
        row, column = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        padded = -(-count // align) * align
        place = torch.stack([column.flatten(), row.flatten()], -1)
        places.append(functional.pad(place, (0, 0, 0, padded - count)))
        number = torch.arange(at, at + count).view(height // merge, merge, width // merge, merge)
        cell = number.transpose(1, 2).flatten()
        missing = -(count // merge**2) % align * merge**2
        cells.append(functional.pad(cell, (0, missing), value=at))
        blocks += [[start, at, at + count] for start in range(at, at + count, BLOCK)]
        begins.append(at)
        tokens.append(token)
        at, token = at + padded, token + len(cells[-1]) // merge**2
    blocks += [[-1, -1, -1]] * (tiles - len(blocks))
    place, cell = torch.cat(places), torch.cat(cells)
    place = functional.pad(place, (0, 0, 0, max(0, rows - len(place))))
    cell = functional.pad(cell, (0, max(0, rows - len(cell))))
    return Layout(places=place, tiles=torch.tensor(blocks), cells=cell), begins, tokens


def moved(layout: Layout, device: torch.device) -> Layout:
    """The same tables on a device."""
    return Layout(
        places=layout.places.to(device),
        tiles=layout.tiles.to(device),
        cells=layout.cells.to(device),
    )
