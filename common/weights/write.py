"""Write safetensors shards and their index, tensor by tensor, without holding a shard in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from common.weights.index import INDEX

ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "U8": 1, "F8_E4M3": 1}


@dataclass(frozen=True, slots=True)
class Planned:
    """A tensor to be written."""

    name: str
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


Source = Callable[[Planned], bytes]


def write_sharded(
    directory: Path, tensors: Iterable[Planned], shard_bytes: int, source: Source | None
) -> list[str]:
    """Write tensors in order as shards of at most `shard_bytes` each (one tensor at least).

    Args:
        directory: where the shards and the index go.
        tensors: what to write.
        shard_bytes: bound on a shard's data.
        source: gives a tensor's bytes; None writes true headers over sparse files without data.

    Returns:
        The shards' file names.
    """
    shards: list[list[Planned]] = [[]]
    room = shard_bytes
    for tensor in tensors:
        if shards[-1] and tensor.size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(tensor)
        room -= tensor.size
    count = len(shards)
    names = [f"model-{i + 1:05}-of-{count:06}.safetensors" for i in range(count)]
    for name, shard in zip(names, shards, strict=True):
        _write_shard(directory / name, shard, source)
    placed = {t.name: name for name, shard in zip(names, shards, strict=True) for t in shard}
    total = sum(t.size for shard in shards for t in shard)
    index = {"metadata": {"total_size": total}, "weight_map": placed}
    (directory / INDEX).write_text(json.dumps(index))
    return names


def _write_shard(path: Path, tensors: Sequence[Planned], source: Source | None) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        offsets = [at, at + tensor.size]
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
        at += tensor.size
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        if source is None:
            file.truncate(8 + len(raw) + at)
            return
        for tensor in tensors:
            file.write(source(tensor))
