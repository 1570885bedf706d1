"""sum_i (w_i + 1) * mix(i) mod 2^64 over little-endian 32-bit words, in torch.

`mix(i) = splitmix64(i) | 1` and `i` is the word's *logical* index, so sums over parts of a layer
add up to the layer's. Torch has no unsigned 64-bit arithmetic: int64 wraps around to the same
bits, and only the conversion to Python's integers knows about the sign. Knows nothing about
pools or tickets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

MASK = (1 << 64) - 1
_PIECE_WORDS = 1 << 22  # words digested at a time: 32 MiB as 64-bit numbers
_TABLE_WORDS = 1 << 22  # the longest table of mix() kept, 32 MiB; beyond it mix is computed anew


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """What memory holds: digests by "<kind>:<layer>", and the names that are not finite."""

    sums: dict[str, int] = field(default_factory=dict)
    unsound: tuple[str, ...] = ()

    def __or__(self, other: Signature) -> Signature:
        """Both together; the names must differ."""
        if twice := self.sums.keys() & other.sums.keys():
            raise ValueError(f"signed twice: {sorted(twice)}")
        return Signature(sums=self.sums | other.sums, unsound=self.unsound + other.unsound)

    def __add__(self, other: Signature) -> Signature:
        """Sums of shards of the same layers; the names must be the same."""
        if self.sums.keys() != other.sums.keys():
            raise ValueError(
                f"shards of different layers: {sorted(self.sums.keys() ^ other.sums.keys())}"
            )
        sums = {name: (value + other.sums[name]) & MASK for name, value in self.sums.items()}
        return Signature(sums=sums, unsound=tuple(sorted({*self.unsound, *other.unsound})))


def splitmix64(i: int) -> int:
    """The mixing function on Python integers: the definition, for tests and documents."""
    z = (i + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def digest_pages(values: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
    """See `common.ops.digest.digest_pages`."""
    rows = values.flatten(2)
    if rows.shape[2] * rows.element_size() % 4:
        raise ValueError(
            f"a row of {rows.shape[2]} values of {rows.dtype} is not a multiple of 4 bytes"
        )
    words = rows.view(torch.int32)
    pages, layers, count = words.shape
    weights = _weights(first, pages * count, values.device).view(pages, 1, count)
    step = max(1, _PIECE_WORDS // max(1, pages * layers))
    sums = torch.zeros((pages, layers), dtype=torch.int64, device=values.device)
    for at in range(0, count, step):  # pieces, so that the 64-bit copies stay small
        piece = words[:, :, at : at + step].to(torch.int64).bitwise_and_(0xFFFFFFFF).add_(1)
        sums += piece.mul_(weights[:, :, at : at + step]).sum(2)
    return sums, torch.isfinite(rows).all(2)


def signature(kind: str, layers: Sequence[int], sums: Tensor, finite: Tensor) -> Signature:
    """Name the digests of one kind.

    Args:
        kind: "state", "conv", "latent" and so on.
        layers: the model's layer numbers, L of them.
        sums: int64 [L].
        finite: bool [L].
    """
    names = [f"{kind}:{layer}" for layer in layers]
    values = [value & MASK for value in sums.tolist()]  # the only wait for the device
    sound = finite.tolist()
    return Signature(
        sums=dict(zip(names, values, strict=True)),
        unsound=tuple(name for name, ok in zip(names, sound, strict=True) if not ok),
    )


def _weights(first: int, count: int, device: torch.device) -> Tensor:
    """mix(first) .. mix(first + count - 1): int64 [count]."""
    end = first + count
    if end > _TABLE_WORDS:
        return _mix(torch.arange(first, end, dtype=torch.int64, device=device))
    return _table(1 << (end - 1).bit_length() if end > 1 else 1, device)[first:end]


@lru_cache(maxsize=16)
def _table(words: int, device: torch.device) -> Tensor:
    return _mix(torch.arange(words, dtype=torch.int64, device=device))


def _mix(i: Tensor) -> Tensor:
    z = i + _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shift(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * _signed(0x94D049BB133111EB)
    return (z ^ _shift(z, 31)) | 1


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical shift: int64's own is arithmetic."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
