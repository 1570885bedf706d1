"""Read weights from a checkpoint directory: one tensor at a time, straight into its place.

Text rooms never read a vision tensor and the encoder reads nothing else. The peak is the weights
themselves and the largest single tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from common.config.spec import ModelSpec
from common.errors import CheckpointError
from common.ops.quant import unpack_fp8, unpack_mxfp4
from common.weights.build import build_text, build_vision
from common.weights.index import Stored, stored, weight_identity
from common.weights.match import Match, Matcher
from common.weights.shelf import Shelf
from common.weights.tree import TextWeights, VisionWeights

__all__ = ["load_text", "load_vision", "weight_identity"]

DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
}


def load_text(
    directory: Path,
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: bool = False,
    packed: bool = False,
) -> TextWeights:
    """Load the text model.

    Args:
        directory: of `config.json` and safetensors files.
        spec: what `load_spec` read there.
        dtype: of the weights in memory; those the release keeps in fp32 stay so.
        device: where they go.
        progress: show a bar with a rate on stderr.
        packed: keep MXFP4 experts packed; otherwise they become values here, once.

    Raises:
        CheckpointError: a tensor is missing, surplus, misshapen or mistyped; it is named.
    """
    shelf = Shelf(dtype, torch.device(device))
    weights = build_text(spec, shelf, packed=packed)
    _fill(directory, spec, shelf, vision=False, progress=progress)
    return weights


def load_vision(
    directory: Path,
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: bool = False,
) -> VisionWeights:
    """Load tower and projector; arguments and errors as for `load_text`."""
    if spec.vision is None:
        raise CheckpointError(f"{directory} has no vision tower; serve it without an encoder")
    shelf = Shelf(dtype, torch.device(device))
    weights = build_vision(spec.vision, shelf)
    _fill(directory, spec, shelf, vision=True, progress=progress)
    return weights


def _fill(directory: Path, spec: ModelSpec, shelf: Shelf, *, vision: bool, progress: bool) -> None:
    # Every header is judged before the first byte of data is read.
    matches = list(Matcher(shelf.places, spec, vision).run(stored(directory)))
    total = sum(m.main.size + (m.scale.size if m.scale else 0) for m in matches)
    label = "vision weights" if vision else "text weights"
    with tqdm(total=total, unit="B", unit_scale=True, desc=label, disable=not progress) as bar:
        for match in matches:
            _place(match, shelf.dtype, bar.update)


def _place(match: Match, dtype: torch.dtype, count: Callable[[int], object]) -> None:
    value = read(match.main)
    count(match.main.size)
    if match.scale is not None:
        unpack = unpack_mxfp4 if match.main.dtype == "U8" else unpack_fp8
        value = unpack(value, read(match.scale), dtype)
        count(match.scale.size)
    place = match.place
    place.fill(place.dest[match.expert] if place.experts else place.dest, value)


def read(tensor: Stored) -> Tensor:
    """One tensor's bytes as a tensor on the CPU."""
    buffer = bytearray(tensor.size)
    with tensor.file.open("rb") as file:
        file.seek(tensor.offset)
        if file.readinto(buffer) != tensor.size:
            raise CheckpointError(f"{tensor.file} is cut short at {tensor.name}; fetch it again")
    raw = torch.frombuffer(buffer, dtype=torch.uint8)
    return raw.view(DTYPES[tensor.dtype]).view(tensor.shape)
