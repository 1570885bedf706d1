"""top_k and top_p: launches that find a row's border and choose from what lies above it.

Nothing is sorted. A border is the least word (`triton_row`) that a filter keeps: the largest with
enough at or above it, by number (top_k) or by weight in fixed point (top_p). A launch adds up the
row at sixteen edges, a second at sixteen between two of them (not where few words are left), and a
third lists what is kept for sure and what may be; the last is `triton_select`. Edges follow the
logits' values: evenly cut, their bits would crowd around zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

from common.ops.draw import OPEN, SURE
from common.ops.draw.triton_row import (
    ID_SHIFT,
    ROW,
    TEMPERATURE,
    TOP,
    TOP_K,
    TOP_P,
    highest,
    logits_tile,
    order_of,
    real,
    scaled_by,
    value_of,
    weight_of,
    word_of,
)  # fmt: skip

EDGES = 16

_EDGES, _SURE, _OPEN = tl.constexpr(EDGES), tl.constexpr(SURE), tl.constexpr(OPEN)
_DEEP = tl.constexpr(28.5)  # below the best by so much, over the temperature, weights are zero
_FAR = tl.constexpr(400.0)  # below the best, for numbers; any
_FEW = tl.constexpr(OPEN // 2)
_NARROW = tl.constexpr(1 << 21)  # orders, a quarter of a power of two: values lie evenly in them
_VALUED = tl.constexpr(6)  # cuts by value at most; around zero they do not come to an end


@triton.jit
def searches(table):
    """Whether a row has top_k or top_p."""
    return (tl.load(table + TOP_K) > 0) | (real(table, TOP_P) < 1.0)


@triton.jit
def is_listed(table, count_ptr, row):
    """Whether a row's choice comes from its list."""
    is_whole = (tl.load(count_ptr + row * 2) <= _SURE) & (tl.load(count_ptr + row * 2 + 1) <= _OPEN)
    return searches(table) & is_whole


@triton.jit
def _first_edges(table, peak):
    """Sixteen orders, rising from 0, that follow the logits' values; uint32."""
    number = tl.arange(0, _EDGES)
    deep = (number * -1 + _EDGES).to(tl.float64) / _EDGES
    by_weight = deep * deep * _DEEP * real(table, TEMPERATURE)
    depth = tl.where(tl.load(table + TOP_K) > 0, deep * deep * deep * _FAR, by_weight)
    return tl.where(number == 0, 0, order_of((peak.to(tl.float64) - depth).to(tl.float32)))


@triton.jit
def next_edges(low, high, cuts, EDGES: tl.constexpr):
    """Words that cut a stretch, from its beginning on: by value, or evenly where that is as good or
    was done in vain (`cuts` were before)."""
    number = tl.arange(0, EDGES)
    by_value = ((high - low) >> ID_SHIFT > _NARROW) & (low > 0) & (cuts < _VALUED)
    first, last = value_of(low).to(tl.float64), value_of(high).to(tl.float64)
    value = first + (last - first) * (number.to(tl.float64) / EDGES)
    valued = order_of(value.to(tl.float32)).to(tl.int64) << ID_SHIFT
    even = low + number.to(tl.int64) * ((high - low + EDGES - 1) // EDGES)
    return tl.where(number == 0, low, tl.maximum(tl.where(by_value, valued, even), low))


@triton.jit
def narrowed(edges, found, above, needed, high, EDGES: tl.constexpr):
    """The stretch between two edges with the border, what lies above it, and what in it."""
    number = tl.arange(0, EDGES)
    enough = ((above + found).to(tl.float64) >= needed) | (number == 0)
    best = tl.max(tl.where(enough, number, 0), 0)
    low = tl.sum(tl.where(number == best, edges, 0), 0)
    high = tl.minimum(high, tl.min(tl.where(number == best + 1, edges, TOP), 0))
    beyond = tl.sum(tl.where(number == best + 1, found, 0), 0)
    within = tl.sum(tl.where(number == best, found, 0), 0) - beyond
    return low, high, above + beyond, within


@triton.jit
def _needed(table, sum_ptr, row):
    """How much a row's first filter wants: top_k where there is one."""
    needed = tl.load(table + TOP_K).to(tl.float64)
    if needed <= 0:
        needed = tl.load(sum_ptr + row * _EDGES).to(tl.float64) * real(table, TOP_P)
    return needed


@triton.jit
def stretch(table, sum_ptr, row, rows, peak, AGAIN: tl.constexpr):
    """Where the first filter's border lies by the sums of the first launch, or also by those made
    AGAIN; what lies above it; and whether they are made again for this row."""
    number, needed = tl.arange(0, _EDGES), _needed(table, sum_ptr, row)
    found = tl.load(sum_ptr + row * _EDGES + number)
    edges = _first_edges(table, peak).to(tl.int64) << ID_SHIFT
    top = (order_of(peak).to(tl.int64) + 1) << ID_SHIFT
    low, high, above, within = narrowed(edges, found, tl.full([], 0, tl.int64), needed, top, _EDGES)
    again = (tl.load(table + TOP_K) <= 0) | (within > _FEW)
    if AGAIN:  # noqa: SIM102 - the outer one is decided when the kernel is compiled
        if again:
            found = tl.load(sum_ptr + (rows + row) * _EDGES + number)
            edges = next_edges(low, high, 0, _EDGES)
            low, high, above, _ = narrowed(edges, found, above, needed, high, _EDGES)
    return low, high, above, again


@triton.jit
def _add_up(place, edges, amount, most, sum_ptr):
    """Add what lies at or above each edge; nothing lies above `most`."""
    number = tl.arange(0, _EDGES)
    for n in tl.static_range(_EDGES):
        edge = tl.sum(tl.where(number == n, edges, 0), 0)
        if edge <= most:
            found = tl.sum(tl.where(place >= edge, amount, 0), 0)
            tl.atomic_add(sum_ptr + n, found.to(tl.int64), sem="relaxed")


@triton.jit(do_not_specialize=["rows"])
def narrow_kernel(
    x_ptr, x_row, table_ptr, mask_ptr, mask_row, peak_ptr, sum_ptr, V, tiles, rows,
    AGAIN: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, blocks). How much lies at or above each of the first edges; AGAIN, of edges
    between two of them."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    table = table_ptr + row * ROW
    if searches(table) == 0:
        return
    peak = highest(peak_ptr, row, tiles, TILES)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < V
    if AGAIN:
        low, high, _above, again = stretch(table, sum_ptr, row, rows, peak, False)
        if again == 0:
            return
        x = logits_tile(x_ptr, x_row, table, mask_ptr, mask_row, row, at, V)
        place, edges = word_of(x, at), next_edges(low, high, 0, _EDGES)
        inside = inside & (place >= low) & (place < high)
        most = tl.max(tl.where(inside, place, -1), 0)
        base = sum_ptr + (rows + row) * _EDGES
    else:
        x = logits_tile(x_ptr, x_row, table, mask_ptr, mask_row, row, at, V)
        place, edges = order_of(x), _first_edges(table, peak)
        most = order_of(tl.max(x, 0))
        base = sum_ptr + row * _EDGES
    if tl.load(table + TOP_K) > 0:
        _add_up(place, edges, inside.to(tl.int32), most, base)
    else:
        weight = tl.where(inside, weight_of(scaled_by(x, table, peak)), 0)
        _add_up(place, edges, weight, most, base)


@triton.jit(do_not_specialize=["rows"])
def list_kernel(
    x_ptr, x_row, table_ptr, mask_ptr, mask_row, peak_ptr, sum_ptr, count_ptr, list_ptr, V, tiles,
    rows, TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, blocks). Put a row's words into its list, in any order: those that are kept for
    sure, and behind `_SURE` places those that may be."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    table = table_ptr + row * ROW
    if searches(table) == 0:
        return
    peak = highest(peak_ptr, row, tiles, TILES)
    low, high, _above, _again = stretch(table, sum_ptr, row, rows, peak, True)
    at = block * BLOCK + tl.arange(0, BLOCK)
    x = logits_tile(x_ptr, x_row, table, mask_ptr, mask_row, row, at, V)
    word = word_of(x, at)
    own = list_ptr + row * (_SURE + _OPEN)
    wanted = (at < V) & (word >= high)
    _put(own, count_ptr + row * 2, word, wanted, _SURE)
    wanted = (at < V) & (word >= low) & (word < high)
    _put(own + _SURE, count_ptr + row * 2 + 1, word, wanted, _OPEN)


@triton.jit
def _put(list_ptr, count_ptr, word, wanted, ROOM: tl.constexpr):
    """Append words, as far as there is room; all are counted."""
    count = tl.sum(wanted.to(tl.int32), 0)
    if count > 0:
        place = tl.atomic_add(count_ptr, count, sem="relaxed")
        place += tl.cumsum(wanted.to(tl.int32), 0) - 1
        tl.store(list_ptr + place, word, mask=wanted & (place < ROOM))
