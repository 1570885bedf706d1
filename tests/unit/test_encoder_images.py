from __future__ import annotations

import hashlib
import io
import json

import numpy as np
import pytest
from PIL import Image, ImageOps
from safetensors.numpy import load_file

from common.config.image_grid import (
    ImageRules,
    image_grid,
    load_image_rules,
    parse_image_rules,
)
from common.contract.image_header import read_header
from common.contract.messages import ImageRef
from common.errors import CheckpointError, ImageRejected
from services.encoder.images import image_digest, prepare
from tests.support.golden import GOLDEN, NANO

FACTS = json.loads((GOLDEN / "images.json").read_text())
RULES = parse_image_rules(FACTS["media_proc_cfg"])


def ref(payload: bytes, **other) -> ImageRef:
    header = read_header(payload)
    grid = image_grid(header.width, header.height, RULES)
    facts = {
        "digest": image_digest(payload),
        "width": header.width,
        "height": header.height,
        "tokens": grid.tokens,
    }
    return ImageRef(**(facts | other))


def patches(payload: bytes):
    return prepare(payload, ref(payload), RULES)


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def gradient(width: int, height: int, bands: int = 3) -> np.ndarray:
    values = np.arange(width * height * bands) * 7 % 256
    return values.astype(np.uint8).reshape(height, width, bands)


@pytest.mark.parametrize("size", FACTS["sizes"])
def test_a_size_gets_the_grid_of_other_implementations(size):
    width, height = map(int, size.split("x"))
    grid, known = image_grid(width, height, RULES), FACTS["sizes"][size]
    assert [grid.width, grid.height] == known["resized"]
    assert [1, grid.rows, grid.columns] == known["grid_thw"]
    assert grid.tokens == known["tokens"] and grid.patches == 4 * grid.tokens


def test_the_rules_are_read_from_the_checkpoint():
    assert load_image_rules(NANO) == RULES == ImageRules()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("transparent_bg_fill_stage", "before_resize"),
        ("image_mean", [0.4] * 3),
        ("patch_size", None),
    ],
)
def test_rules_that_are_not_built_are_refused(tmp_path, key, value):
    config = FACTS["media_proc_cfg"] | {key: value}
    if value is None:
        del config[key]
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": config}))
    with pytest.raises(CheckpointError, match=key):
        load_image_rules(tmp_path)


@pytest.mark.parametrize("name", FACTS["images"])
def test_an_image_gets_the_patches_of_other_implementations(name):
    known = FACTS["images"][name]
    payload = (GOLDEN / known["file"]).read_bytes()
    header = read_header(payload)
    assert [header.width, header.height] == known["oriented_size"]
    got = patches(payload)
    assert [1, got.grid.rows, got.grid.columns] == known["grid_thw"]
    assert got.pixels.shape == (known["patches"], 3, 14, 14) and got.pixels.dtype == np.uint8
    stored = load_file(GOLDEN / "images.safetensors")[name]
    rows = known.get("sampled_patches", list(range(known["patches"])))
    np.testing.assert_array_equal(got.pixels[rows], stored)
    assert hashlib.sha256(got.pixels.tobytes()).hexdigest() == known["pixels_u8_sha256"]


@pytest.mark.parametrize("orientation", range(1, 10))
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_the_orientation_tag_is_followed(orientation, kind):
    image = Image.fromarray(gradient(56, 28))
    exif = Image.Exif()
    exif[274] = orientation
    payload = encoded(image, kind, exif=exif)
    with Image.open(io.BytesIO(payload)) as opened:
        upright = encoded(ImageOps.exif_transpose(opened), "PNG", exif=b"")
    np.testing.assert_array_equal(patches(payload).pixels, patches(upright).pixels)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16"])
def test_every_mode_becomes_rgb(mode):
    if mode == "I;16":
        image = Image.fromarray((np.arange(40 * 30, dtype=np.uint16) * 54).reshape(30, 40))
    else:
        image = Image.fromarray(gradient(40, 30)).convert(mode)
    payload = encoded(image, "JPEG" if mode == "CMYK" else "PNG")
    assert patches(payload).pixels.shape == (16, 3, 14, 14)


def test_sixteen_bits_are_scaled_and_not_clipped():
    payload = encoded(Image.fromarray(np.full((28, 28), 0x8001, dtype=np.uint16)))
    assert set(np.unique(patches(payload).pixels)) == {0x80}


def test_a_transparent_colour_of_an_rgb_image_shows_the_chessboard():
    payload = encoded(Image.new("RGB", (28, 28), (1, 2, 3)), transparency=(1, 2, 3))
    assert set(np.unique(patches(payload).pixels)) == {180, 255}


def test_the_first_frame_of_an_animation_is_the_image():
    frames = [Image.new("RGB", (28, 28), colour) for colour in ("red", "blue")]
    payload = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert (patches(payload).pixels[0, :, 0, 0] == (255, 0, 0)).all()


def test_another_size_than_the_prompts_is_refused():
    payload = encoded(Image.new("RGB", (28, 28)))
    with pytest.raises(ImageRejected, match=r"28x28 .* 28x56"):
        prepare(payload, ref(payload, height=56), RULES)
    with pytest.raises(ImageRejected, match="2"):
        prepare(payload, ref(payload, tokens=2), RULES)


def test_other_bytes_than_the_prompts_are_refused():
    payload = encoded(Image.new("RGB", (28, 28)))
    with pytest.raises(ImageRejected, match="bytes"):
        prepare(payload, ref(payload, digest=bytes(16)), RULES)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
@pytest.mark.parametrize("keep", [0.3, 0.6, 0.9])
def test_a_file_cut_short_is_refused(kind, keep):
    rng = np.random.default_rng(0)
    payload = encoded(Image.fromarray(rng.integers(0, 256, (64, 64, 3), np.uint8)), kind)
    short = payload[: int(len(payload) * keep)]
    with pytest.raises(ImageRejected):
        patches(short)


@pytest.mark.parametrize(
    "payload", [b"", b"not an image", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"<svg/>"]
)
def test_what_is_no_image_is_refused_naming_the_formats(payload):
    with pytest.raises(ImageRejected, match="PNG, JPEG, WebP, GIF and BMP"):
        read_header(payload)


def test_damaged_files_never_raise_anything_else():
    rng = np.random.default_rng(1)
    picture = Image.fromarray(rng.integers(0, 256, (20, 20, 3), np.uint8))
    whole = [encoded(picture, kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP")]
    refused = 0
    for payload in whole * 40:
        damaged = bytearray(payload)
        for at in rng.integers(0, len(damaged), 4):
            damaged[at] = rng.integers(0, 256)
        try:
            header = read_header(bytes(damaged))
            if header.width * header.height < 100_000:  # the router's settings bound it too
                patches(bytes(damaged))
        except ImageRejected:
            refused += 1
    assert refused > 20
