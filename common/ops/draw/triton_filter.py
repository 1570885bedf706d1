"""What every kernel of sampling knows of a row, and the borders of top_k and top_p.

A border is found without sorting: every launch cuts a stretch of the logits' order into sixteen and
adds up what lies at or above each edge, by number (top_k) or by weight in fixed point (top_p). The
first edges follow the logits' values, the later ones halve what is left evenly; a tile without a
logit in the stretch has nothing to do. Equals on the border are told apart by their ids.
"""

from __future__ import annotations

import triton
import triton.language as tl

LEVELS, EDGES = 9, 16  # of a search: one by value, eight that take four bits each
COLUMNS = (  # of a row's table, 64 bits each
    "key", "temperature", "is_drawn", "script", "top_k", "top_p", "least", "mask", "best",
    "repetition", "frequency", "presence", "changed",
)  # fmt: skip

_ROW = tl.constexpr(len(COLUMNS))
_KEY, _TEMPERATURE, _IS_DRAWN, _SCRIPT, _TOP_K, _TOP_P, _LEAST = (tl.constexpr(i) for i in range(7))
_MASK, _BEST, _REPETITION, _FREQUENCY, _PRESENCE, _CHANGED = (tl.constexpr(i) for i in range(7, 13))
_LEVELS, _EDGES = tl.constexpr(LEVELS), tl.constexpr(EDGES)
_TOP = tl.constexpr(1 << 32)  # above every order
_DEEP = tl.constexpr(28.5)  # below the best by so much, over the temperature, weights are zero
_ROUND = tl.constexpr(2.0**52)  # adding and taking it away rounds to the nearest whole, even
_FIXED = tl.constexpr(2.0**40)  # as in the definition


@triton.jit
def real(row_ptr, column):
    """A float64 of a row's table."""
    return tl.load(row_ptr + column).to(tl.float64, bitcast=True)


@triton.jit
def logits_tile(x_ptr, x_row, row_ptr, mask_ptr, mask_row, row, at, V):
    """A tile of a row as the mask leaves it; minus infinity for what may not come."""
    live = at < V
    x = tl.load(x_ptr + row * x_row + at, mask=live, other=float("-inf"))
    place = tl.load(row_ptr + _MASK)
    if place >= 0:
        byte = tl.load(mask_ptr + place * mask_row + at // 8, mask=live, other=0).to(tl.int32)
        x = tl.where((byte >> (at % 8).to(tl.int32)) & 1 == 1, x, float("-inf"))
    return x


@triton.jit
def order_of(x):
    """Logits as unsigned integers of the same order; both zeros are one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 == 1, ~bits, bits | 0x80000000)


@triton.jit
def scaled_by(x, row_ptr, peak):
    """Logits over the temperature, below their best; float64."""
    temperature = real(row_ptr, _TEMPERATURE)
    return x.to(tl.float64) / temperature - peak.to(tl.float64) / temperature


@triton.jit
def _weight(scaled):
    """exp in fixed point, int64."""
    return ((tl.exp(scaled) * _FIXED + _ROUND) - _ROUND).to(tl.int64)


@triton.jit
def highest(peak_ptr, row, tiles, TILES: tl.constexpr):
    """The best of a row."""
    at = tl.arange(0, TILES)
    return tl.max(tl.load(peak_ptr + row * tiles + at, mask=at < tiles, other=float("-inf")), 0)


@triton.jit
def searches(table, PHASE: tl.constexpr):
    """Whether a row has the filter of a phase: top_k in phase 0, top_p in phase 1."""
    if PHASE == 0:
        return tl.load(table + _TOP_K) > 0
    return real(table, _TOP_P) < 1.0


@triton.jit
def _value_of(order):
    """The logit of an order."""
    bits = tl.where(order >> 31 == 1, order - 0x80000000, 0xFFFFFFFF - order)
    return bits.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def _edges(table, low, high, level, peak):
    """Where a level cuts the stretch from `low` to `high`; the first edge is `low`."""
    number = tl.arange(0, _EDGES)
    deep = (number * -1 + _EDGES).to(tl.float64) / _EDGES
    value = peak.to(tl.float64) - deep * deep * _DEEP * real(table, _TEMPERATURE)
    by_value = order_of(value.to(tl.float32)).to(tl.int64)
    step = (high - low + _EDGES - 1) // _EDGES
    edges = tl.where(level == 0, by_value, low + number.to(tl.int64) * step)
    return tl.where(number == 0, low, edges)


@triton.jit
def _stretch(table, state_ptr, sum_ptr, row, rows, level, peak, PHASE: tl.constexpr):
    """Where a phase's border lies before a level: from, to, and what lies above."""
    low, high, above = (
        tl.full([], 0, tl.int64),
        tl.full([], _TOP, tl.int64),
        tl.full([], 0, tl.int64),
    )
    if level > 0:
        at = state_ptr + ((PHASE * (_LEVELS + 1) + level - 1) * rows + row) * 3
        low, high, above = tl.load(at), tl.load(at + 1), tl.load(at + 2)
        number = tl.arange(0, _EDGES)
        sums = sum_ptr + (PHASE * _LEVELS * rows + row) * _EDGES
        found = tl.load(sums + (level - 1) * rows * _EDGES + number)
        edges = _edges(table, low, high, level - 1, peak)
        needed = tl.load(table + _TOP_K).to(tl.float64)
        if PHASE == 1:
            border, more, _ = after_top_k(table, state_ptr, sum_ptr, row, rows, peak)
            found += tl.where((edges <= border) & (border < high), more, 0)
            needed = (tl.load(sums) + more).to(tl.float64) * real(table, _TOP_P)
        enough = ((above + found).to(tl.float64) >= needed) | (number == 0)
        best = tl.max(tl.where(enough, number, 0), 0)
        next_ = number == best + 1
        above += tl.sum(tl.where(next_, found, 0), 0)
        low = tl.sum(tl.where(number == best, edges, 0), 0)
        high = tl.minimum(high, tl.min(tl.where(next_, edges, _TOP), 0))
    return low, high, above


@triton.jit
def after_top_k(table, state_ptr, sum_ptr, row, rows, peak):
    """The border of top_k (-1 without), the weight of the equals on it that stay, and how many ids
    lie above it."""
    k = tl.load(table + _TOP_K)
    border, more, above = (
        tl.full([], -1, tl.int64),
        tl.full([], 0, tl.int64),
        tl.full([], 0, tl.int64),
    )
    if k > 0:
        border, _high, above = _stretch(table, state_ptr, sum_ptr, row, rows, _LEVELS, peak, 0)
        more = (k - above) * _weight(scaled_by(_value_of(border), table, peak))
    return border, more, above


@triton.jit(do_not_specialize=["rows", "level"])
def narrow_kernel(
    x_ptr, x_row, table_ptr, mask_ptr, mask_row, peak_ptr, state_ptr, sum_ptr, V, tiles, rows,
    level, PHASE: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, tiles). How much lies in the stretch at or above each of a level's edges."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    table = table_ptr + row * _ROW
    if searches(table, PHASE) == 0:
        return
    peak = highest(peak_ptr, row, tiles, TILES)
    low, high, above = _stretch(table, state_ptr, sum_ptr, row, rows, level, peak, PHASE)
    if tile == 0:
        state = state_ptr + ((PHASE * (_LEVELS + 1) + level) * rows + row) * 3
        tl.store(state, low)
        tl.store(state + 1, high)
        tl.store(state + 2, above)
    if high - low <= 1:
        return
    at = tile * BLOCK + tl.arange(0, BLOCK)
    x = logits_tile(x_ptr, x_row, table, mask_ptr, mask_row, row, at, V)
    order = tl.where(at < V, order_of(x).to(tl.int64), -1)
    inside = (order >= low) & (order < high)
    if PHASE == 1:
        border, _more, _ = after_top_k(table, state_ptr, sum_ptr, row, rows, peak)
        inside = inside & (order > border)
    if tl.max(inside.to(tl.int32), 0) == 1:
        if PHASE == 0:
            amount = inside.to(tl.int64)
        else:
            amount = tl.where(inside, _weight(scaled_by(x, table, peak)), 0)
        edges = _edges(table, low, high, level, peak)
        number = tl.arange(0, _EDGES)
        base = sum_ptr + ((PHASE * _LEVELS + level) * rows + row) * _EDGES
        for n in tl.static_range(_EDGES):
            edge = tl.sum(tl.where(number == n, edges, 0), 0)
            found = tl.sum(tl.where(order >= edge, amount, 0), 0)
            if found > 0:
                tl.atomic_add(base + n, found)


@triton.jit
def _border(table, state_ptr, sum_ptr, row, rows, peak):
    """The border of both filters."""
    border, _more, _ids = after_top_k(table, state_ptr, sum_ptr, row, rows, peak)
    if searches(table, 1):
        border, _high, _above = _stretch(table, state_ptr, sum_ptr, row, rows, _LEVELS, peak, 1)
    return border


@triton.jit(do_not_specialize=["rows"])
def tie_kernel(
    x_ptr, x_row, table_ptr, mask_ptr, mask_row, peak_ptr, state_ptr, sum_ptr, tie_ptr, V, tiles,
    rows, TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, tiles). A tile's ids on the border."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    table = table_ptr + row * _ROW
    if (searches(table, 0) == 0) & (searches(table, 1) == 0):
        return
    peak = highest(peak_ptr, row, tiles, TILES)
    border = _border(table, state_ptr, sum_ptr, row, rows, peak)
    at = tile * BLOCK + tl.arange(0, BLOCK)
    x = logits_tile(x_ptr, x_row, table, mask_ptr, mask_row, row, at, V)
    order = tl.where(at < V, order_of(x).to(tl.int64), -1)
    tl.store(tie_ptr + row * tiles + tile, tl.sum((order == border).to(tl.int32), 0))


@triton.jit
def kept(
    table, state_ptr, sum_ptr, tie_ptr, order, row, rows, tile, tiles, peak, TILES: tl.constexpr
):
    """Which ids of a tile the filters leave; equals on the border by their ids."""
    border, more, ids_above = after_top_k(table, state_ptr, sum_ptr, row, rows, peak)
    number = tl.arange(0, TILES)
    earlier = tl.load(tie_ptr + row * tiles + number, mask=number < tile, other=0)
    most = tl.full([], 0x7FFFFFFF, tl.int64)  # of the equals
    if border >= 0:
        most = tl.load(table + _TOP_K) - ids_above
    before, weight = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    enough = tl.full([], 1.0, tl.float64)
    if searches(table, 1):
        last = border
        border, _high, before = _stretch(table, state_ptr, sum_ptr, row, rows, _LEVELS, peak, 1)
        if border > last:
            most = tl.full([], 0x7FFFFFFF, tl.int64)
        weight = _weight(scaled_by(_value_of(border), table, peak))
        total = tl.load(sum_ptr + (_LEVELS * rows + row) * _EDGES) + more
        enough = total.to(tl.float64) * real(table, _TOP_P)
    tie = order == border
    nth = tl.sum(earlier, 0) + tl.cumsum(tie.to(tl.int32), 0) - 1
    within = (before + nth * weight).to(tl.float64) < enough
    return (order > border) | (tie & within & (nth < most))
