"""Write a random checkpoint with true widths and few layers and experts, for measuring on a GPU.

Values are drawn from one pool of random numbers at offsets keyed by the tensor's name: quick to
write, the same for the same seed, of sane magnitude, and of no meaning.
"""

from __future__ import annotations

import copy
import json
import math
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.config.checkpoint import parse_spec
from common.config.release import RELEASE
from common.config.spec import ModelSpec
from common.errors import ConfigError
from common.weights.build import build_text, build_vision
from common.weights.load import DTYPES
from common.weights.match import FLOATS
from common.weights.shelf import Place, Shelf
from common.weights.write import Planned, write_sharded

POOL = 1 << 22  # random numbers drawn once
SHARD_BYTES = 8 << 30


def write_slice(
    out: Path,
    *,
    first: int,
    last: int,
    experts: int | None = None,
    config: Mapping[str, Any] = RELEASE,
    vision: bool = False,
    seed: int = 0,
    shard_bytes: int = SHARD_BYTES,
) -> list[str]:
    """Write layers `first` to `last` (0-based, both included) of a model as a checkpoint.

    Args:
        out: directory to make.
        first: first layer kept; it becomes layer 0.
        last: last layer kept.
        experts: routed experts kept; None keeps all.
        config: a `config.json` that gives the widths; the release's by default.
        vision: write the vision tower too.
        seed: of the values.
        shard_bytes: bound on one file's data.

    Returns:
        The shards' file names.

    Raises:
        ConfigError: the layers or experts are not in the model.
    """
    cut = slice_config(config, first=first, last=last, experts=experts, vision=vision)
    spec = parse_spec(cut)
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(cut, indent=2) + "\n")
    return write_sharded(out, planned(spec), shard_bytes, _Pool(seed).values)


def slice_config(
    config: Mapping[str, Any], *, first: int, last: int, experts: int | None, vision: bool
) -> dict[str, Any]:
    """The configuration of the slice; arguments and errors as of `write_slice`."""
    cut: dict[str, Any] = copy.deepcopy(dict(config))
    text = cut.get("text_config", cut)
    whole = parse_spec(config).text
    if not 0 <= first <= last < whole.num_layers:
        raise ConfigError(f"layers {first}-{last} are not in 0-{whole.num_layers - 1}")
    kept = range(first, last + 1)
    text["num_hidden_layers"] = len(kept)
    linear = text["linear_attn_config"]
    linear["kda_layers"] = [i - first + 1 for i in whole.kda_layers if i in kept]
    linear["full_attn_layers"] = [i - first + 1 for i in whole.mla_layers if i in kept]
    text["first_k_dense_replace"] = sum(i not in whole.moe_layers for i in kept)
    if experts is not None:
        if not whole.moe.top_k <= experts <= whole.moe.num_experts:
            allowed = f"{whole.moe.top_k} to {whole.moe.num_experts}"
            raise ConfigError(f"{experts} experts; take {allowed}, of which a token uses the least")
        text["num_experts"] = experts
    if not vision:
        cut.pop("vision_config", None)
    return cut


def planned(spec: ModelSpec) -> Iterator[Planned]:
    """Every tensor of a checkpoint of this shape, in the release's formats, layer by layer."""
    shelf = Shelf(torch.bfloat16, torch.device("meta"))
    build_text(spec, shelf, packed=spec.quantization == "mxfp4")
    if spec.vision is not None:
        build_vision(spec.vision, shelf)
    for name, place in shelf.places.items():
        dtype = {"model": FLOATS[spec.text.dtype], "float": "F32", "u8": "U8"}[place.kind]
        for each in _names(name, place):
            yield Planned(each, dtype, place.shapes[0])


def _names(name: str, place: Place) -> list[str]:
    return [name.replace("*", str(i)) for i in range(place.experts)] if place.experts else [name]


class _Pool:
    """Random numbers and bytes drawn once; a tensor takes a run that its name picks."""

    def __init__(self, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self._normal = torch.randn(POOL, generator=draw)
        self._bytes = torch.randint(0, 256, (4 * POOL,), generator=draw, dtype=torch.uint8)

    def values(self, tensor: Planned) -> bytes:
        """The bytes of one tensor."""
        if tensor.name.endswith("_scale"):
            # Codes have a root mean square near 3: this makes a row of products about 1.
            exponent = round(-1.6 - 0.5 * math.log2(tensor.shape[-1] * 32))
            return bytes([127 + exponent]) * tensor.size
        if tensor.dtype == "U8":
            return self._take(self._bytes, tensor.name, tensor.size).numpy().tobytes()
        normal = self._take(self._normal, tensor.name, math.prod(tensor.shape))
        value = _floats(tensor, normal).to(DTYPES[tensor.dtype])
        return value.view(torch.uint8).numpy().tobytes()

    def _take(self, pool: Tensor, name: str, count: int) -> Tensor:
        start = zlib.crc32(name.encode()) % len(pool)
        rest = count - (len(pool) - start)
        if rest <= 0:
            return pool[start : start + count]
        return torch.cat([pool[start:], *[pool] * (rest // len(pool)), pool[: rest % len(pool)]])


def _floats(tensor: Planned, normal: Tensor) -> Tensor:
    name = tensor.name
    if "norm" in name and not name.endswith("proj.weight"):
        return 1 + 0.1 * normal
    if name.endswith("A_log"):
        return 0.5 * normal
    if name.endswith("dt_bias"):
        return normal - 2
    if name.endswith("e_score_correction_bias"):
        return 0.01 * normal
    scale: float = tensor.shape[-1] ** -0.5
    return normal * scale
