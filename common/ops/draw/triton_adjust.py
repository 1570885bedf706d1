"""Bias, minimum length and penalties: a row's few ids are changed in place, and changed back.

What an entry says is told in `common.ops.draw`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from common.ops import draw
from common.ops.draw.triton_row import (
    ENTRIES,
    ENTRY,
    FREQUENCY,
    IS_EARLY,
    PLACE,
    PRESENCE,
    REPETITION,
    ROW,
    SAVED,
    SIZE,
    real,
)  # fmt: skip

_HAS_BIAS, _IS_STOP = tl.constexpr(draw.HAS_BIAS), tl.constexpr(draw.IS_STOP)
_IS_SEEN, _COUNT_SHIFT = tl.constexpr(draw.IS_SEEN), tl.constexpr(draw.COUNT_SHIFT)


@triton.jit
def adjust_kernel(
    x_ptr, x_row, table_ptr, saved_ptr, V, RESTORE: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid: (rows, blocks of entries). Bias, minimum length and penalties in place, after the one
    entry that is new was written to its place; RESTORE undoes them."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    table = table_ptr + row * ROW
    size = tl.load(table + SIZE)
    if block * BLOCK >= size:
        return
    at = block * BLOCK + tl.arange(0, BLOCK)
    live = at < size
    entry = tl.load(table + ENTRIES).to(tl.pointer_type(tl.int32)) + at * 3
    saved = saved_ptr + tl.load(table + SAVED) + at
    id = tl.load(entry, mask=live, other=0)
    what = tl.load(entry + 1, mask=live, other=0)
    if not RESTORE:
        fresh, word = at == tl.load(table + PLACE), tl.load(table + ENTRY)
        id = tl.where(fresh, (word & 0xFFFFFFFF).to(tl.int32), id)
        what = tl.where(fresh, (word >> 32).to(tl.int32), what)
        tl.store(entry, id, mask=fresh)
        tl.store(entry + 1, what, mask=fresh)
    x_at = x_ptr + row * x_row + id
    live = live & (id >= 0) & (id < V)
    if RESTORE:
        tl.store(x_at, tl.load(saved, mask=live, other=0.0), mask=live)
    else:
        x = tl.load(x_at, mask=live, other=0.0)
        tl.store(saved, x, mask=live)
        bias = tl.load(entry + 2, mask=live, other=0).to(tl.float32, bitcast=True)
        repetition = real(table, REPETITION).to(tl.float32)
        frequency = real(table, FREQUENCY).to(tl.float32)
        presence = real(table, PRESENCE).to(tl.float32)
        count = what >> _COUNT_SHIFT
        x = tl.where(what & _HAS_BIAS != 0, x + bias, x)
        is_banned = (what & _IS_STOP != 0) & (tl.load(table + IS_EARLY) == 1)
        x = tl.where(is_banned, float("-inf"), x)
        seen = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
        x = tl.where((what & _IS_SEEN != 0) | (count > 0), seen, x)
        x = tl.where(count > 0, x - (frequency * count.to(tl.float32) + presence), x)
        tl.store(x_at, x, mask=live)
