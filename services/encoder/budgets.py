"""The tower by patch budgets: passes of few sizes, which a device captures and replays.

A pass of a budget has that many rows whatever images it holds; rows behind the last image belong to
none and change no other. On a device every budget is captured into a CUDA graph at its first use:
what differs between two mixes of images lies in tables that are copied in before the replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.ops.vit import TILE, Layout
from services.encoder.moonvit import Grid, MoonVit, lay_out, moved

SIDES = 512  # largest place along an axis that a release's image can have
MOST_IMAGES = 64  # of one pass
STEP = 1024  # patches; passes beyond the largest budget are multiples of it


@dataclass(slots=True, kw_only=True)
class _Pass:
    """The buffers of one budget, and how to run it."""

    pixels: Tensor  # uint8 [rows, 3 * patch^2]
    places: Tensor  # [rows, hidden]
    layout: Layout
    run: Callable[[], Tensor]


class BudgetTower:
    """`MoonVit.forward` for any mix of images, in passes of fixed sizes."""

    def __init__(self, tower: MoonVit, budgets: Sequence[int]) -> None:
        """Bind a tower that multiplies all rows at once; `budgets` are patches of a pass."""
        self._tower = tower
        self._budgets = sorted(budgets)
        self._passes: dict[int, _Pass] = {}
        tower.know(SIDES)

    @torch.inference_mode()
    def forward(self, images: Sequence[tuple[Tensor, Grid]]) -> list[Tensor]:
        """Embed images, as `MoonVit.forward` does; more than `MOST_IMAGES` in several passes."""
        done: list[Tensor] = []
        for first in range(0, len(images), MOST_IMAGES):
            done += self._forward(images[first : first + MOST_IMAGES])
        return done

    def _forward(self, images: Sequence[tuple[Tensor, Grid]]) -> list[Tensor]:
        spec = self._tower.spec
        grids = [self._tower.checked(pixels, grid) for pixels, grid in images]
        total = sum(len(pixels) for pixels, _ in images)
        fits = [budget for budget in self._budgets if budget >= total]
        rows = fits[0] if fits else -(-total // STEP) * STEP
        held = self._passes.get(rows) or self._make(rows, keep=bool(fits))
        layout, begins, tokens = lay_out(grids, spec.merge, rows=rows, tiles=len(held.layout.tiles))
        held.layout.places.copy_(layout.places)
        held.layout.tiles.copy_(layout.tiles)
        held.layout.cells.copy_(layout.cells)
        known = {grid: self._tower.positions(grid) for grid in set(grids)}
        for (pixels, grid), begin in zip(images, begins, strict=True):
            held.pixels[begin : begin + len(pixels)].copy_(pixels.flatten(1))
            held.places[begin : begin + len(pixels)].copy_(known[grid])
        out = held.run()
        sizes = [height * width // spec.merge**2 for height, width in grids]
        return [out[at : at + size].clone() for at, size in zip(tokens, sizes, strict=True)]

    def _make(self, rows: int, *, keep: bool) -> _Pass:
        """Buffers of a pass of `rows` patches; captured where the device can and it is kept."""
        w = self._tower.weights.patch
        layout, _, _ = lay_out([], self._tower.spec.merge, rows=rows, tiles=_tiles(rows))
        made = _Pass(
            pixels=torch.zeros((rows, w.shape[1]), dtype=torch.uint8, device=w.device),
            places=torch.zeros((rows, w.shape[0]), dtype=w.dtype, device=w.device),
            layout=moved(layout, w.device),
            run=lambda: self._tower.embed(made.pixels, made.places, made.layout),
        )
        if keep:
            if w.is_cuda:
                made.run = _captured(made.run)
            self._passes[rows] = made
        return made


def _tiles(rows: int) -> int:
    """Blocks of queries that any mix of images needs at most."""
    return rows // TILE + MOST_IMAGES


def _captured(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Run once, so that kernels are compiled, then capture; what is returned replays."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay
