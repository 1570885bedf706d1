"""Random numbers that are looked up: one for every (seed, choice, position, purpose, id).

There is no generator and no state, so the number of a token does not depend on what was drawn
before it, on the other rows of a batch, or on the replica; a replay finds the same numbers again.
The integers are equal bit for bit on every device. The module knows nothing of logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SAMPLE = 0  # purposes: one number is never used for two decisions

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def row_key(*, seed: int, choice: int, position: int, purpose: int = SAMPLE) -> int:
    """Fold what names a decision into one signed 64-bit key. The seed counts modulo 2**64."""
    key = 0
    for field in (purpose, seed, choice, position):
        key = _mix((key ^ (field & _MASK)) + _GAMMA)
    return _signed(key)


def row_keys(
    seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int], purpose: int = SAMPLE
) -> NDArray[np.int64]:
    """`row_key` of many rows at once, int64 [rows]."""
    key = np.zeros(len(seeds), dtype=np.uint64)
    for fields in ([purpose] * len(seeds), seeds, choices, positions):
        words = np.array([field & _MASK for field in fields], dtype=np.uint64)
        z = (key ^ words) + np.uint64(_GAMMA)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(_FIRST)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(_SECOND)
        key = z ^ (z >> np.uint64(31))
    return key.view(np.int64)


def bits(keys: Tensor, vocab: int) -> Tensor:
    """Give 64 random bits to every (row, vocabulary id).

    Args:
        keys: int64 [R], from `row_key`.
        vocab: number of ids V.

    Returns:
        int64 [R, V]; element (r, i) is output i of SplitMix64 started at `keys[r]`.
    """
    steps = torch.arange(1, vocab + 1, device=keys.device, dtype=torch.int64)
    z = keys[:, None] + steps * _signed(_GAMMA)  # wraps, as does every product below
    z = _fold(z, 30).mul_(_signed(_FIRST))
    z = _fold(z, 27).mul_(_signed(_SECOND))
    return _fold(z, 31)


def gumbel(keys: Tensor, vocab: int) -> Tensor:
    """Give a standard Gumbel value to every (row, vocabulary id); float64 [R, V].

    The arg max of `log-weights + gumbel` is a draw with those weights. 52 bits make the uniform
    number, offset by half a step: it is exact in float64 and never 0 or 1, so the result is finite
    (-3.61 to 36.74).
    """
    uniform = (bits(keys, vocab) >> 12 & (1 << 52) - 1).double()
    uniform.add_(0.5).mul_(2.0**-52)
    return uniform.log_().neg_().log_().neg_()


def _fold(z: Tensor, shift: int) -> Tensor:
    """Exclusive-or with the logical right shift; torch's `>>` copies the sign, hence the mask."""
    return z ^ (z >> shift).bitwise_and_((1 << (64 - shift)) - 1)


def _mix(z: int) -> int:
    """The finaliser of SplitMix64 on an unsigned integer."""
    z &= _MASK
    z = ((z ^ (z >> 30)) * _FIRST) & _MASK
    z = ((z ^ (z >> 27)) * _SECOND) & _MASK
    return z ^ (z >> 31)


def _signed(value: int) -> int:
    """The same 64 bits as a two's-complement integer."""
    return value - (1 << 64) if value >> 63 else value
