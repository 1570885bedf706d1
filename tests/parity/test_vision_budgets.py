"""The tower by patch budgets: the definition's rows, whatever else a pass holds."""

from __future__ import annotations

import pytest
import torch

from common.config.checkpoint import load_spec
from common.config.spec import VisionSpec
from common.ops.select import choose_vision
from common.ops.table import REFERENCE, Ops
from common.weights import load_vision
from common.weights.tree import VisionLayerWeights, VisionWeights
from services.encoder.budgets import BudgetTower
from services.encoder.moonvit import MoonVit
from tests.support.golden import write_tiny

GRIDS = [(2, 4), (6, 2), (4, 4), (8, 10), (2, 2)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("vision"), "k3")


def tower(directory, *, exact: bool) -> MoonVit:
    spec = load_spec(directory)
    assert spec.vision is not None
    weights = load_vision(directory, spec, dtype=torch.float32)
    return MoonVit(spec.vision, weights, exact=exact)


def off_by(result: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((result.double() - wanted.double()).norm() / wanted.double().norm())


def picture(grid: tuple[int, int]) -> tuple[torch.Tensor, tuple[int, int]]:
    rows, columns = grid
    return torch.randint(0, 256, (rows * columns, 3, 14, 14), dtype=torch.uint8), grid


def test_any_mix_gets_the_definitions_rows(directory) -> None:
    images = [picture(grid) for grid in GRIDS]
    wanted = tower(directory, exact=True).forward(images)
    budgets = BudgetTower(tower(directory, exact=False), (16, 64, 256))
    for chosen in ([0], [2], [0, 1, 2], [3, 4], [4, 3, 2, 1, 0]):
        found = budgets.forward([images[i] for i in chosen])
        for i, rows in zip(chosen, found, strict=True):
            torch.testing.assert_close(rows, wanted[i], rtol=0, atol=2e-5)


def test_what_a_pass_holds_besides_an_image_never_changes_its_rows(directory) -> None:
    """The same pass with nothing behind the image, with other images, and after a NaN was there."""
    budgets = BudgetTower(tower(directory, exact=False), (128,))
    image, other = picture((8, 10)), picture((6, 4))
    (alone,) = budgets.forward([image])
    assert torch.equal(budgets.forward([image, other])[0], alone)
    held = budgets._passes[128]
    with torch.inference_mode():
        held.places[80:] = float("nan")
    assert torch.equal(budgets.forward([image])[0], alone)
    with torch.inference_mode():
        held.places[80:] = 0.0
        held.pixels[80:] = 255
    assert torch.equal(budgets.forward([image])[0], alone)


def test_more_patches_than_the_largest_budget_are_a_pass_of_their_own(directory) -> None:
    budgets = BudgetTower(tower(directory, exact=False), (16,))
    images = [picture((8, 10)), picture((4, 4))]
    wanted = tower(directory, exact=True).forward(images)
    for rows, golden in zip(budgets.forward(images), wanted, strict=True):
        torch.testing.assert_close(rows, golden, rtol=0, atol=2e-5)
    assert not budgets._passes


def test_a_grid_that_does_not_fit_the_patches_is_refused(directory) -> None:
    pixels, _ = picture((2, 2))
    with pytest.raises(ValueError, match="do not fill a grid"):
        BudgetTower(tower(directory, exact=False), (16,)).forward([(pixels, (2, 4))])


def random_tower(layers: int, ops: Ops, device: str, dtype: torch.dtype) -> MoonVit:
    """The release's widths, few layers; the same weights for every call."""
    generator = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> torch.Tensor:
        values = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        return values.to(dtype).to(device)

    spec = VisionSpec(
        patch=14, merge=2, grid_height=64, grid_width=64, hidden=1024, num_layers=layers,
        num_heads=12, qkv_width=1536, mlp_width=4096, text_hidden=512, projector_eps=1e-5,
    )  # fmt: skip
    blocks = tuple(
        VisionLayerWeights(
            norm0=weight(1024).abs(), norm1=weight(1024).abs(), wqkv=weight(4608, 1024),
            wo=weight(1024, 1536), fc0=weight(4096, 1024), fc1=weight(1024, 4096),
        )
        for _ in range(layers)
    )  # fmt: skip
    weights = VisionWeights(
        patch=weight(1024, 588), pos=weight(64, 64, 1024), layers=blocks, norm=weight(1024).abs(),
        project0=weight(4096, 4096), project2=weight(512, 4096), post_norm=weight(512).abs(),
    )  # fmt: skip
    return MoonVit(spec, weights, ops=ops, exact=False)


@pytest.mark.gpu
def test_a_replayed_pass_equals_the_same_pass_run_eagerly_for_any_mix() -> None:
    device, dtype = torch.device("cuda"), torch.bfloat16
    spec = random_tower(0, REFERENCE, "cpu", dtype).spec
    ops = choose_vision("triton", spec, dtype=dtype, device=device)
    fast, slow = (random_tower(2, chosen, "cuda", dtype) for chosen in (ops, REFERENCE))
    budgets = BudgetTower(fast, (2048, 8192))
    for grids in ([(74, 74)], [(36, 46), (2, 2), (16, 16)], [(30, 40), (10, 8)], [(2, 2)] * 40):
        images = [picture(grid) for grid in grids]
        found = budgets.forward(images)
        total = sum(len(pixels) for pixels, _ in images)
        held = budgets._passes[2048 if total <= 2048 else 8192]
        eager = fast.embed(held.pixels, held.places, held.layout)
        assert torch.equal(torch.cat(found), eager[: total // 4])
        for rows, wanted in zip(found, slow.forward(images), strict=True):
            assert off_by(rows, wanted) < 2e-2
    assert set(budgets._passes) == {2048, 8192}
