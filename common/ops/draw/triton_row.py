"""What every kernel of sampling knows of a row: its table, its logits, their order and their noise.

A row's parameters are a table of 64-bit words, `COLUMNS`; reals in it are float64. A logit and its
id are one word, the logit's order above the id's complement: a larger word is a better id, and no
two of a row are equal.
"""

from __future__ import annotations

import triton
import triton.language as tl

COLUMNS = (
    "key", "temperature", "is_drawn", "script", "top_k", "top_p", "least", "mask", "best",
    "repetition", "frequency", "presence", "changed", "is_early", "entries", "size", "saved",
    "place", "entry",
)  # fmt: skip
ID_BITS = 24  # of a word

ROW = tl.constexpr(len(COLUMNS))
KEY, TEMPERATURE, IS_DRAWN, SCRIPT, TOP_K, TOP_P = (tl.constexpr(i) for i in range(6))
LEAST, MASK, BEST, REPETITION, FREQUENCY, PRESENCE = (tl.constexpr(i) for i in range(6, 12))
CHANGED, IS_EARLY, ENTRIES, SIZE, SAVED, PLACE, ENTRY = (tl.constexpr(i) for i in range(12, 19))
ID_SHIFT, LAST_ID = tl.constexpr(ID_BITS), tl.constexpr((1 << ID_BITS) - 1)
TOP = tl.constexpr(1 << (32 + ID_BITS))  # above every word

_ROUND = tl.constexpr(2.0**52)  # adding and taking it away rounds to the nearest whole, even
_FIXED = tl.constexpr(2.0**40)  # as in the definition
_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST, _SECOND = tl.constexpr(0xBF58476D1CE4E5B9), tl.constexpr(0x94D049BB133111EB)
_TINY = tl.constexpr(2.0**-52)


@triton.jit
def real(table, column):
    """A float64 of a row's table."""
    return tl.load(table + column).to(tl.float64, bitcast=True)


@triton.jit
def logits_tile(x_ptr, x_row, table, mask_ptr, mask_row, row, at, V):
    """Ids `at` of a row as the mask leaves them; minus infinity for what may not come."""
    live = at < V
    x = tl.load(x_ptr + row * x_row + at, mask=live, other=float("-inf"))
    place = tl.load(table + MASK)
    if place >= 0:
        byte = tl.load(mask_ptr + place * mask_row + at // 8, mask=live, other=0).to(tl.int32)
        x = tl.where((byte >> (at % 8).to(tl.int32)) & 1 == 1, x, float("-inf"))
    return x


@triton.jit
def order_of(x):
    """Logits as unsigned integers of the same order; both zeros are one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def word_of(x, at):
    """Logits and their ids, int64."""
    return (order_of(x).to(tl.int64) << ID_SHIFT) | (at ^ LAST_ID)


@triton.jit
def value_of(word):
    """The logit of a word."""
    order = word >> ID_SHIFT
    bits = tl.where(order >> 31 == 1, order - 0x80000000, 0xFFFFFFFF - order)
    return bits.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def scaled_by(x, table, peak):
    """Logits over the temperature, below their best; float64."""
    temperature = real(table, TEMPERATURE)
    return x.to(tl.float64) / temperature - peak.to(tl.float64) / temperature


@triton.jit
def weight_of(scaled):
    """exp in fixed point, int64."""
    return ((tl.exp(scaled) * _FIXED + _ROUND) - _ROUND).to(tl.int64)


@triton.jit
def highest(peak_ptr, row, tiles, TILES: tl.constexpr):
    """The best of a row."""
    at = tl.arange(0, TILES)
    return tl.max(tl.load(peak_ptr + row * tiles + at, mask=at < tiles, other=float("-inf")), 0)


@triton.jit
def gumbel(key, at):
    """Noise of a row and ids; float64, from the same bits as everywhere."""
    z = key.to(tl.uint64, bitcast=True) + (at + 1).to(tl.uint64) * _GAMMA
    z = (z ^ (z >> 30)) * _FIRST
    z = (z ^ (z >> 27)) * _SECOND
    z = z ^ (z >> 31)
    uniform = ((z >> 12).to(tl.int64).to(tl.float64) + 0.5) * _TINY
    return -tl.log(-tl.log(uniform))
