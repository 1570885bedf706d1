"""The vision tower and projector against another implementation, image by image and together."""

from __future__ import annotations

import pytest
import torch

from common.config.checkpoint import load_spec
from common.weights import load_vision
from services.encoder.moonvit import MoonVit
from tests.support.golden import NANO, tensors, write_tiny

COUNT = len({key.split(".")[0] for key in tensors("k3_vision")})


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    torch.set_num_threads(1)
    return write_tiny(tmp_path_factory.mktemp("vision"), "k3")


def tower(directory, dtype=torch.float32) -> MoonVit:
    spec = load_spec(directory)
    assert spec.vision is not None
    return MoonVit(spec.vision, load_vision(directory, spec, dtype=dtype))


def image(i: int) -> tuple[torch.Tensor, tuple[int, int]]:
    data = tensors("k3_vision")
    _, height, width = data[f"image{i}.grid_thw"].tolist()
    return data[f"image{i}.pixels_u8"], (height, width)


def test_all_golden_images_in_one_batch(directory) -> None:
    ours = tower(directory).forward([image(i) for i in range(COUNT)])
    for i, rows in enumerate(ours):
        golden = tensors("k3_vision")[f"image{i}.embeddings"]
        torch.testing.assert_close(rows, golden, rtol=0, atol=5e-5)


def test_bfloat16_stays_near_the_golden_embeddings(directory) -> None:
    """The values' standard deviation is 1; bf16 keeps 8 bits through two blocks."""
    ours = tower(directory, torch.bfloat16).forward([image(i) for i in range(COUNT)])
    for i, rows in enumerate(ours):
        golden = tensors("k3_vision")[f"image{i}.embeddings"]
        assert (rows.float() - golden).abs().max() < 0.15
        assert (rows.float() - golden).square().mean().sqrt() < 0.02


EACH = tuple(range(COUNT))


@pytest.mark.parametrize("order", [EACH, EACH[::-2], EACH[1::2], EACH[-2::-2]])
def test_an_images_bits_do_not_depend_on_the_others(directory, order) -> None:
    model = tower(directory)
    together = model.forward([image(i) for i in order])
    for i, rows in zip(order, together, strict=True):
        assert torch.equal(rows, model.forward([image(i)])[0])


def test_a_grid_that_does_not_fit_the_patches_is_refused(directory) -> None:
    pixels, _ = image(0)
    for grid in [(2, 3), (1, 4)]:
        with pytest.raises(ValueError, match="do not fill a grid"):
            tower(directory).forward([(pixels, grid)])


def test_nanos_tower_embeds_a_picture_of_one_cell() -> None:
    (rows,) = tower(NANO).forward([(torch.zeros(4, 3, 14, 14, dtype=torch.uint8), (2, 2))])
    assert rows.shape == (1, 256) and rows.isfinite().all()
