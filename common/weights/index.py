"""What a checkpoint directory holds: names, shapes, dtypes and where the bytes lie.

Reads the headers of safetensors files, and the index file where there is one; never a tensor.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from common.errors import CheckpointError

INDEX = "model.safetensors.index.json"
_MOVED = re.compile(r"^language_model\.(layers|embed_tokens|norm|output_attn_res_)")
_SAMPLE, _SAMPLES = 4096, 16


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One tensor in a safetensors header; `__metadata__` reads as an entry without dtype."""

    dtype: str = ""
    shape: tuple[int, ...] = ()
    data_offsets: tuple[int, int] = (0, 0)


class _Index(msgspec.Struct, gc=False):
    weight_map: dict[str, str]


_header: msgspec.json.Decoder[dict[str, Entry]] = msgspec.json.Decoder(dict[str, Entry])
_index: msgspec.json.Decoder[_Index] = msgspec.json.Decoder(_Index)


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor in a file; `name` is the release's spelling, `file` and `offset` locate it."""

    name: str
    dtype: str  # as safetensors spells it: BF16, F32, U8, F8_E4M3 ...
    shape: tuple[int, ...]
    file: Path
    offset: int  # of the first byte in the file
    size: int  # bytes


def stored(directory: Path) -> Iterator[Stored]:
    """Every tensor of a checkpoint, file by file, in order of its bytes.

    Raises:
        CheckpointError: no file, a broken header, a name that occurs twice, or an index that
            disagrees with the files.
    """
    listed = _listed(directory)
    files = sorted(set(listed.values())) if listed else _files(directory)
    seen: dict[str, str] = {}
    for name in files:
        path = directory / name
        start, header = read_header(path)
        size = path.stat().st_size - start
        for key, entry in sorted(header.items(), key=_begin):
            if key in seen:
                raise CheckpointError(f"tensor {key} is in {seen[key]} and in {name}; remove one")
            if listed and listed.get(key) != name:
                raise CheckpointError(f"{INDEX} does not place {key} in {name}, which holds it")
            seen[key] = name
            begin, end = entry.data_offsets
            if end > size:
                raise CheckpointError(f"{path} is cut short: {key} ends beyond it; fetch it again")
            offset = start + begin
            yield Stored(official(key), entry.dtype, entry.shape, path, offset, end - begin)
    for key, name in listed.items():
        if key not in seen:
            raise CheckpointError(f"{INDEX} places {key} in {name}, which does not hold it")


def official(name: str) -> str:
    """The release's spelling of a name that lacks `model.` after `language_model.`."""
    return _MOVED.sub(r"language_model.model.\1", name)


def read_header(path: Path) -> tuple[int, dict[str, Entry]]:
    """The offset of the first tensor byte of a safetensors file, and its header."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if not 2 <= length <= 1 << 30:
                raise ValueError(f"a header of {length} bytes")
            header = _header.decode(file.read(length))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; the checkpoint is incomplete") from None
    except (struct.error, ValueError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path} is not a safetensors file: {error}") from None
    header.pop("__metadata__", None)
    return 8 + length, header


def weight_identity(directory: Path) -> str:
    """A print of a checkpoint's weights: headers, file sizes and bytes sampled evenly, in hex.

    Cheap at any size, and different for any two checkpoints that were trained, quantised or cut
    differently. It does not detect a flipped bit; digests of content do.
    """
    total = hashlib.blake2b(digest_size=16)
    for name in sorted(set(_listed(directory).values())) or _files(directory):
        path = directory / name
        start, _ = read_header(path)
        size = path.stat().st_size
        total.update(f"{name} {size}\n".encode())
        with path.open("rb") as file:
            total.update(file.read(start))
            for i in range(_SAMPLES):
                file.seek(start + (size - start) * i // _SAMPLES)
                total.update(file.read(_SAMPLE))
    return total.hexdigest()


def _begin(item: tuple[str, Entry]) -> int:
    return item[1].data_offsets[0]


def _files(directory: Path) -> list[str]:
    if (directory / "model.safetensors").exists():
        return ["model.safetensors"]
    names = sorted(path.name for path in directory.glob("*.safetensors"))
    if not names:
        raise CheckpointError(f"{directory} holds no .safetensors file")
    return names


def _listed(directory: Path) -> dict[str, str]:
    path = directory / INDEX
    if not path.exists():
        return {}
    try:
        return _index.decode(path.read_bytes()).weight_map
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{path} is not an index: {error}") from None
