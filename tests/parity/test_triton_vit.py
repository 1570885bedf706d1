"""Rotation and attention of the vision tower against their definitions."""

# ruff: noqa: I001 - the support module settles how kernels run, so it comes before them.
from __future__ import annotations

import pytest
import torch

from tests.support.triton_ops import DEVICE, nan_like, off_by, randn

from common.ops import vit
from common.ops.vit import triton as fast
from services.encoder.moonvit import lay_out, moved

pytestmark = pytest.mark.filterwarnings(  # of the interpreter: numpy scalars, masked overflows
    "ignore::DeprecationWarning", "ignore::RuntimeWarning"
)


def angles(sides: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    steps = torch.arange(dim // 4, device=DEVICE)
    angle = torch.arange(sides, device=DEVICE).unsqueeze(1) * 10000.0 ** (-4.0 * steps / dim)
    return angle.cos(), angle.sin()


def test_images_of_every_size_attend_within_themselves() -> None:
    """One patch more than a block, one less, tiny ones; rows of no image are not finite."""
    grids = [(2, 2), (10, 13), (127, 1), (16, 8), (3, 7)]
    layout, _, _ = lay_out(grids, 1, rows=500, tiles=12)
    layout = moved(layout, DEVICE)
    used = sum(rows * columns for rows, columns in grids)
    qkv = nan_like(500, 3, 2, 32)
    qkv[:used] = randn(used, 3, 2, 32)
    mine, theirs = qkv.clone(), qkv.clone()
    tables = angles(130, 32)
    fast.rotate(mine, layout, *tables)
    vit.rotate(theirs, layout, *tables)
    assert off_by(mine[:used], theirs[:used]) < 1e-6
    out, wanted = fast.attend(mine, layout, keys=64), vit.attend(theirs, layout)
    assert off_by(out[:used], wanted[:used]) < 1e-5


@pytest.mark.gpu
def test_images_of_the_release_attend_as_defined_beyond_two_to_the_31_elements() -> None:
    grids = [(74, 74), (36, 46), (2, 2), (156, 276)]
    used = sum(rows * columns for rows, columns in grids)
    front = 480_000  # images begin behind 2^31 elements of queries, keys and values
    layout, _, _ = lay_out(grids, 2, rows=used)
    tiles = layout.tiles + front
    places = torch.cat([torch.zeros(front, 2, dtype=torch.int64), layout.places])
    layout = moved(vit.Layout(places=places, tiles=tiles, cells=layout.cells), DEVICE)
    qkv = torch.empty(front + used, 3, 12, 128, device="cuda", dtype=torch.bfloat16)
    qkv[front:] = randn(used, 3, 12, 128, dtype=torch.bfloat16)
    assert front * qkv.stride(0) > 2**31
    mine, theirs = qkv, qkv[front:].clone()
    near = vit.Layout(places=layout.places[front:], tiles=layout.tiles - front, cells=layout.cells)
    tables = angles(512, 128)
    fast.rotate(mine, layout, *tables)
    vit.rotate(theirs, near, *tables)
    assert off_by(mine[front:], theirs) < 4e-3
    assert off_by(fast.attend(mine, layout)[front:], vit.attend(theirs, near)) < 6e-3
