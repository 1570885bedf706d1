"""The last launch of top_k and top_p: a row's border, searched in its list, and the choice from it.

A program a row cuts the stretch of the open words again and again (`triton_filter`), and draws from
the list. Where the sure ones are too many for the list, the draw over tiles takes the border; where
the open ones are, the program goes over the whole row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from common.ops.draw import OPEN, SURE
from common.ops.draw.triton_filter import EDGES, narrowed, next_edges, searches, stretch
from common.ops.draw.triton_row import (
    ID_SHIFT,
    KEY,
    LAST_ID,
    LEAST,
    ROW,
    TOP_K,
    TOP_P,
    gumbel,
    highest,
    logits_tile,
    order_of,
    real,
    scaled_by,
    value_of,
    weight_of,
    word_of,
)  # fmt: skip

_EDGES, _SURE, _OPEN = tl.constexpr(EDGES), tl.constexpr(SURE), tl.constexpr(OPEN)


@triton.jit
def _words(
    x_ptr, x_row, table, mask_ptr, mask_row, list_ptr, row, at, sure, last, from_list, V
):  # fmt: skip
    """Words of a row's list, the `sure` ones first, or of the row; -1 from `last` on."""
    word = tl.full(at.shape, -1, tl.int64)
    if from_list:
        place = row * (_SURE + _OPEN) + tl.where(at < sure, at, at - sure + _SURE)
        word = tl.load(list_ptr + place, mask=at < last, other=-1)
    else:
        x = logits_tile(x_ptr, x_row, table, mask_ptr, mask_row, row, at, V)
        word = tl.where(at < V, word_of(x, at), -1)
    return word


@triton.jit
def _searched(
    x_ptr, x_row, table, mask_ptr, mask_row, list_ptr, row, first, sure, last, from_list, V,
    peak, low, high, above, needed, BY_MASS: tl.constexpr, CUTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The border: all that is kept is at or above it, and nothing else."""
    held = tl.full([], 2, tl.int32)  # words in the stretch; alone, one is the border
    cuts = tl.full([], 0, tl.int32)
    while (held > 1) & (high - low > 1):
        edges = next_edges(low, high, cuts, CUTS)
        sums = tl.zeros([BLOCK, CUTS], tl.int64)
        counts = tl.zeros([BLOCK], tl.int32)
        for start in range(first, last, BLOCK):
            at = start + tl.arange(0, BLOCK)
            word = _words(
                x_ptr, x_row, table, mask_ptr, mask_row, list_ptr, row, at, sure, last, from_list, V
            )
            inside = (word >= low) & (word < high)
            amount = inside.to(tl.int64)
            if BY_MASS:
                amount = tl.where(inside, weight_of(scaled_by(value_of(word), table, peak)), 0)
            sums += tl.where(word[:, None] >= edges[None, :], amount[:, None], 0)
            counts += inside.to(tl.int32)
        held = tl.sum(counts, 0)
        low, high, above, _ = narrowed(edges, tl.sum(sums, 0), above, needed, high, CUTS)
        cuts += 1
    return low


@triton.jit(do_not_specialize=["rows"])
def select_kernel(
    x_ptr, x_row, table_ptr, mask_ptr, mask_row, peak_ptr, sum_ptr, count_ptr, list_ptr,
    border_ptr, score_ptr, id_ptr, V, tiles, rows, TILES: tl.constexpr, CUTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: rows. The border of both filters, and the choice of a listed row."""
    row = tl.program_id(0).to(tl.int64)
    table = table_ptr + row * ROW
    if searches(table) == 0:
        return
    peak = highest(peak_ptr, row, tiles, TILES)
    low, high, above, _ = stretch(table, sum_ptr, row, rows, peak, True)
    sure = tl.load(count_ptr + row * 2).to(tl.int32)
    open_ = tl.load(count_ptr + row * 2 + 1).to(tl.int32)
    is_whole = (sure <= _SURE) & (open_ <= _OPEN)
    from_list = open_ <= _OPEN
    first, last = tl.where(from_list, sure, 0), tl.where(from_list, sure + open_, V)
    total = tl.load(sum_ptr + row * _EDGES)
    k, p = tl.load(table + TOP_K), real(table, TOP_P)
    if k > 0:
        low = _searched(
            x_ptr, x_row, table, mask_ptr, mask_row, list_ptr, row, first, sure, last, from_list, V,
            peak, low, high, above, k.to(tl.float64), False, CUTS, BLOCK,
        )  # fmt: skip
        high, above = (order_of(peak).to(tl.int64) + 1) << ID_SHIFT, above * 0
        from_list = is_whole
        first, last = first * 0, tl.where(is_whole, sure + open_, V)
    if p < 1.0:
        if k > 0:
            sums = tl.zeros([BLOCK], tl.int64)
            for start in range(first, last, BLOCK):
                at = start + tl.arange(0, BLOCK)
                word = _words(
                    x_ptr, x_row, table, mask_ptr, mask_row, list_ptr, row, at, sure, last,
                    from_list, V,
                )  # fmt: skip
                mass = weight_of(scaled_by(value_of(word), table, peak))
                sums += tl.where(word >= low, mass, 0)
            total = tl.sum(sums, 0)
        low = _searched(
            x_ptr, x_row, table, mask_ptr, mask_row, list_ptr, row, first, sure, last, from_list, V,
            peak, low, high, above, total.to(tl.float64) * p, True, CUTS, BLOCK,
        )  # fmt: skip
    tl.store(border_ptr + row, low)
    if is_whole:
        best = tl.full([BLOCK], float("-inf"), tl.float64)
        ids = tl.full([BLOCK], LAST_ID, tl.int64)
        last = sure + open_
        for start in range(0, last, BLOCK):
            at = start + tl.arange(0, BLOCK)
            word = _words(
                x_ptr, x_row, table, mask_ptr, mask_row, list_ptr, row, at, sure, last, is_whole, V
            )
            own = (word & LAST_ID) ^ LAST_ID
            scaled = scaled_by(value_of(word), table, peak)
            left = (word >= low) & (scaled >= real(table, LEAST))
            score = tl.where(left, gumbel(tl.load(table + KEY), own) + scaled, float("-inf"))
            better = (score > best) | ((score == best) & (own < ids))
            best, ids = tl.where(better, score, best), tl.where(better, own, ids)
        top = tl.max(best, 0)
        chosen = tl.min(tl.where(best == top, ids, LAST_ID), 0)
        at = tl.arange(0, TILES)
        score = tl.where(at == 0, top, float("-inf"))
        tl.store(score_ptr + row * tiles + at, score, mask=at < tiles)
        tl.store(id_ptr + row * tiles + at, chosen.to(tl.int32), mask=at < tiles)
