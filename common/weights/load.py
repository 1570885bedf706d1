"""Read weights from a checkpoint directory: one tensor at a time, straight into its place.

Text rooms never read a vision tensor and the encoder reads nothing else. The peak is the weights
themselves and the largest single tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from common.config.spec import ModelSpec
from common.errors import CheckpointError
from common.ops.quant import unpack_fp8, unpack_mxfp4
from common.weights.build import build_text, build_vision
from common.weights.index import Stored, stored, weight_identity
from common.weights.match import Match, Matcher
from common.weights.shares import WHOLE, Cut, Shard
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
    shard: Shard = WHOLE,
) -> TextWeights:
    """Load the text model.

    Args:
        directory: of `config.json` and safetensors files.
        spec: what `load_spec` read there.
        dtype: of the weights in memory; those the release keeps in fp32 stay so.
        device: where they go.
        progress: show a bar with a rate on stderr.
        packed: keep MXFP4 experts packed; otherwise they become values here, once.
        shard: the part of one rank, which alone is read (FP8 matrices are read whole, then cut).

    Raises:
        CheckpointError: a tensor is missing, surplus, misshapen or mistyped; it is named.
    """
    shelf = Shelf(dtype, torch.device(device), is_padded=not shard.is_whole)
    weights = build_text(spec, shelf, packed=packed, shard=shard)
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
    matches = [m for m in Matcher(shelf.places, spec, vision).run(stored(directory)) if is_read(m)]
    total = sum(size for m in matches for size in sizes(m))
    label = "vision weights" if vision else "text weights"
    with tqdm(total=total, unit="B", unit_scale=True, desc=label, disable=not progress) as bar:
        for match in matches:
            _place(match, shelf.dtype, bar.update)


def is_read(match: Match) -> bool:
    """Whether this rank needs the match: its expert is its own, and its cut is not empty."""
    place = match.place
    if place.experts and match.expert not in place.owned:
        return False
    return place.cut is None or place.cut.start < place.cut.stop


def sizes(match: Match) -> list[int]:
    """Bytes read of the tensor and of its scale."""
    cut, parts = match.place.cut, [match.main, *([match.scale] if match.scale else [])]
    if cut is None or _is_fp8(match):
        return [part.size for part in parts]
    return [part.size * (cut.stop - cut.start) // cut.total for part in parts]


def _is_fp8(match: Match) -> bool:
    return match.main.dtype == "F8_E4M3"


def _place(match: Match, dtype: torch.dtype, count: Callable[[int], object]) -> None:
    place = match.place
    value = _value(match, place.cut, dtype)
    for size in sizes(match):
        count(size)
    place.fill(place.dest[place.owned.index(match.expert)] if place.experts else place.dest, value)


def _value(match: Match, cut: Cut | None, dtype: torch.dtype) -> Tensor:
    main, scale = match.main, match.scale
    if scale is None:
        return read(main, cut)
    if _is_fp8(match):
        # Its scales stand for squares that a cut may cross.
        whole = unpack_fp8(read(main), read(scale), dtype)
        return whole if cut is None else whole.narrow(cut.dim, cut.start, cut.stop - cut.start)
    if cut is None or cut.dim == 0:
        return unpack_mxfp4(read(main, cut), read(scale, cut), dtype)
    return unpack_mxfp4(read(main, cut.divided(2)), read(scale, cut.divided(32)), dtype)


def read(tensor: Stored, cut: Cut | None = None) -> Tensor:
    """One tensor, or a cut of it, from its file to the CPU."""
    dtype = DTYPES[tensor.dtype]
    shape, offset, size = list(tensor.shape), tensor.offset, tensor.size
    if cut is not None:
        if cut.dim > 0:
            return _columns(tensor, cut)
        row = tensor.size // tensor.shape[0]
        shape[0] = cut.stop - cut.start
        offset, size = offset + cut.start * row, shape[0] * row
    buffer = bytearray(size)
    with tensor.file.open("rb") as file:
        file.seek(offset)
        if file.readinto(buffer) != size:
            raise CheckpointError(f"{tensor.file} is cut short at {tensor.name}; fetch it again")
    return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).view(shape)


def _columns(tensor: Stored, cut: Cut) -> Tensor:
    """Columns `cut` of a matrix: the file is mapped, and only their pages are touched."""
    rows, columns = tensor.shape
    each = tensor.size // (rows * columns)
    mapped = np.memmap(
        tensor.file, np.uint8, mode="c", offset=tensor.offset, shape=(rows, columns * each)
    )
    part = np.ascontiguousarray(mapped[:, cut.start * each : cut.stop * each])
    return torch.from_numpy(part).view(DTYPES[tensor.dtype])
