"""Choose tokens in a few launches: penalties, mask, filters, noise, arg max, log-probabilities.

A row of logits is cut into tiles of a fixed size, so a row's result does not depend on the batch.
Sums that decide are of integers; filters are `triton_filter` and `triton_select`. Offsets are
64-bit. A row's parameters are a table of 64-bit words, `COLUMNS`; reals in it are float64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.ops.draw import OPEN, SURE
from common.ops.draw.triton_adjust import adjust_kernel
from common.ops.draw.triton_filter import (
    EDGES,
    is_listed,
    list_kernel,
    narrow_kernel,
    searches,
)  # fmt: skip
from common.ops.draw.triton_row import (
    BEST,
    CHANGED,
    IS_DRAWN,
    KEY,
    LEAST,
    MASK,
    ROW,
    SCRIPT,
    gumbel,
    highest,
    logits_tile,
    real,
    scaled_by,
    word_of,
)  # fmt: skip
from common.ops.draw.triton_select import select_kernel

BLOCK = 2048  # ids of a tile; a constant, or bits would depend on the batch
ADJUSTED = 256  # entries of a program
SCAN = {"BLOCK": 512, "num_warps": 1}  # of a program of `narrow_kernel`
PUT = {"BLOCK": 512, "num_warps": 1}  # of `list_kernel`
SEARCH = {"CUTS": 4, "BLOCK": 1024, "num_warps": 16}  # of a program of `select_kernel`


@triton.jit
def survey_kernel(
    x_ptr, x_row, table_ptr, bad_ptr, peak_ptr, sum_ptr, V, tiles, BLOCK: tl.constexpr
):
    """Grid: (rows, tiles). Of the raw logits: bad ones, the best, and the sum of exponentials."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tile * BLOCK + tl.arange(0, BLOCK)
    live = at < V
    x = tl.load(x_ptr + row * x_row + at, mask=live, other=float("-inf"))
    bad = live & ((x != x) | (tl.abs(x) == float("inf")))
    peak = tl.max(x, 0)
    tl.store(bad_ptr + row * tiles + tile, tl.sum(bad.to(tl.int32), 0))
    tl.store(peak_ptr + row * tiles + tile, peak)
    if tl.load(table_ptr + row * ROW + BEST) >= 0:
        tl.store(sum_ptr + row * tiles + tile, tl.sum(tl.exp(x - peak), 0))


@triton.jit
def peak_kernel(
    x_ptr, x_row, table_ptr, mask_ptr, mask_row, peak_ptr, V, tiles, BLOCK: tl.constexpr
):
    """Grid: (rows, tiles). The best of a row that was adjusted or masked."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    table = table_ptr + row * ROW
    if tl.load(table + CHANGED) == 0:
        return
    at = tile * BLOCK + tl.arange(0, BLOCK)
    x = logits_tile(x_ptr, x_row, table, mask_ptr, mask_row, row, at, V)
    tl.store(peak_ptr + row * tiles + tile, tl.max(x, 0))


@triton.jit
def draw_kernel(
    x_ptr, x_row, table_ptr, mask_ptr, mask_row, peak_ptr, count_ptr, border_ptr, score_ptr,
    id_ptr, V, tiles, FILTERED: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, tiles). A tile's best id: of the logits, or with noise of those left."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    table = table_ptr + row * ROW
    if FILTERED:  # noqa: SIM102 - the outer one is decided when the kernel is compiled
        if is_listed(table, count_ptr, row):
            return
    at = tile * BLOCK + tl.arange(0, BLOCK)
    x = logits_tile(x_ptr, x_row, table, mask_ptr, mask_row, row, at, V)
    score = x.to(tl.float64)
    if tl.load(table + IS_DRAWN) == 1:
        peak = highest(peak_ptr, row, tiles, TILES)
        scaled = scaled_by(x, table, peak)
        left = (at < V) & (scaled >= real(table, LEAST))
        if FILTERED:  # noqa: SIM102
            if searches(table):
                left = left & (word_of(x, at) >= tl.load(border_ptr + row))
        score = tl.where(left, gumbel(tl.load(table + KEY), at) + scaled, float("-inf"))
    best = tl.max(score, 0)
    tl.store(score_ptr + row * tiles + tile, best)
    tl.store(id_ptr + row * tiles + tile, tl.min(tl.where(score == best, at, V), 0))


@triton.jit
def finish_kernel(
    x_ptr, x_row, table_ptr, bad_ptr, raw_ptr, sum_ptr, peak_ptr, score_ptr, id_ptr, out_ptr, V,
    tiles, out_row, TILES: tl.constexpr,
):  # fmt: skip
    """Grid: rows. Token, bad logits, whether nothing may come, log-probability of the token, and
    the logarithm of the sum of exponentials; the last two as float64."""
    row = tl.program_id(0).to(tl.int64)
    at, table = tl.arange(0, TILES), table_ptr + row * ROW
    live, place = at < tiles, row * tiles + at
    score = tl.load(score_ptr + place, mask=live, other=float("-inf"))
    ids = tl.load(id_ptr + place, mask=live, other=V)
    token = tl.min(tl.where(score == tl.max(score, 0), ids, V), 0).to(tl.int64)
    script = tl.load(table + SCRIPT)
    token = tl.where(script >= 0, script, tl.minimum(token, V - 1))
    best_left = tl.max(tl.load(peak_ptr + place, mask=live, other=float("-inf")), 0)
    stuck = (tl.load(table + MASK) >= 0) & (script < 0) & (best_left == float("-inf"))
    out = out_ptr + row * out_row
    tl.store(out, token)
    tl.store(out + 1, tl.sum(tl.load(bad_ptr + place, mask=live, other=0), 0).to(tl.int64))
    tl.store(out + 2, stuck.to(tl.int64))
    if tl.load(table + BEST) >= 0:
        raw = tl.load(raw_ptr + place, mask=live, other=float("-inf"))
        peak = tl.max(raw, 0)
        parts = tl.load(sum_ptr + place, mask=live, other=0.0) * tl.exp(raw - peak)
        total = peak.to(tl.float64) + tl.log(tl.sum(parts.to(tl.float64), 0))
        own = tl.load(x_ptr + row * x_row + token).to(tl.float64)
        tl.store(out + 3, (own - total).to(tl.int64, bitcast=True))
        tl.store(out + 4, total.to(tl.int64, bitcast=True))


@triton.jit
def _extract(word, out_ptr, MOST: tl.constexpr):
    """Write the largest words, best first; they are different from each other."""
    for i in range(MOST):
        best = tl.max(word, 0)
        tl.store(out_ptr + i, best)
        word = tl.where(word == best, -1, word)


@triton.jit
def best_kernel(
    x_ptr, x_row, table_ptr, word_ptr, V, tiles, MOST: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid: (rows, tiles). A tile's best raw logits as words: order above, the id's complement."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(table_ptr + row * ROW + BEST) <= 0:
        return
    at = tile * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_row + at, mask=at < V, other=float("-inf"))
    word = tl.where(at < V, word_of(x, at), -1)
    _extract(word, word_ptr + (row * tiles + tile) * MOST, MOST)


@triton.jit
def join_kernel(
    table_ptr, word_ptr, out_ptr, tiles, out_row, MOST: tl.constexpr, WORDS: tl.constexpr
):
    """Grid: rows. The best of all tiles, behind what `finish_kernel` wrote."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(table_ptr + row * ROW + BEST) <= 0:
        return
    at = tl.arange(0, WORDS)
    word = tl.load(word_ptr + row * tiles * MOST + at, mask=at < tiles * MOST, other=-1)
    _extract(word, out_ptr + row * out_row + 5, MOST)


def run(
    logits: Tensor, table: Tensor, masks: Tensor, *, most: int, entries: int, longest: int,
    changed: bool, filtered: bool,
) -> Tensor:  # fmt: skip
    """Enqueue everything; the host waits for nothing.

    Args:
        logits: float32 [R, V], contiguous, V below 2^24; changed in between, restored at the end.
        table: int64 [R, COLUMNS]; `entries` is the address of a row's `size` entries, int32
            [size, 3] on the device: id, what happens (above it how often the id came), and bias
            (float32 bits). `place` is where `entry` (id, and what happens above it) is written
            before they are used, -1 for nowhere; `saved` is where in a buffer of all rows' entries
            the row's begin.
        masks: uint8 [masked rows, bytes], a bit an id.
        most: best ids of any row.
        entries: of all rows.
        longest: entries of any row.
        changed: whether any row is adjusted or masked.
        filtered: whether any row has top_k or top_p.

    Returns:
        int64 [R, 5 + most]: token, bad logits, whether no token was left, its log-probability and
        the log of the sum of exponentials (float64 bits, where asked for), and the best as words
        of order and id; -1 where there is none.
    """
    (rows, vocab), device = logits.shape, logits.device
    tiles = triton.cdiv(vocab, BLOCK)
    width = triton.next_power_of_2(tiles)
    grid, x = (rows, tiles), (logits, logits.stride(0))
    masked = (masks, masks.stride(0))

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    bad = empty(rows, tiles, dtype=torch.int32)
    raw, sums, score = (
        empty(rows, tiles, dtype=kind) for kind in (torch.float32, torch.float32, torch.float64)
    )
    ids = empty(rows, tiles, dtype=torch.int32)
    out = torch.full((rows, 5 + most), -1, dtype=torch.int64, device=device)
    survey_kernel[grid](*x, table, bad, raw, sums, vocab, tiles, BLOCK=BLOCK)
    if most:
        words = empty(rows, tiles, most, dtype=torch.int64)
        best_kernel[grid](*x, table, words, vocab, tiles, MOST=most, BLOCK=BLOCK)
        join_kernel[(rows,)](
            table, words, out, tiles, out.stride(0), MOST=most,
            WORDS=triton.next_power_of_2(tiles * most), num_warps=8,
        )  # fmt: skip
    peak, saved = raw, empty(entries, dtype=torch.float32)
    adjusted = (rows, triton.cdiv(longest, ADJUSTED))
    if entries:
        adjust_kernel[adjusted](
            *x, table, saved, vocab, RESTORE=False, BLOCK=ADJUSTED, enable_fp_fusion=False
        )
    if changed:
        peak = raw.clone()
        peak_kernel[grid](*x, table, *masked, peak, vocab, tiles, BLOCK=BLOCK)
    given, sizes = (*x, table, *masked, peak), {"TILES": width, "BLOCK": BLOCK}
    counts = border = ids  # without filters nobody reads them
    if filtered:
        zeros = torch.zeros(2 * rows * (EDGES + 1), dtype=torch.int64, device=device)
        found, counts = zeros[: 2 * rows * EDGES], zeros[2 * rows * EDGES :]
        border = empty(rows, dtype=torch.int64)
        listed = empty(rows, SURE + OPEN, dtype=torch.int64)
        parts = (rows, triton.cdiv(vocab, SCAN["BLOCK"]))
        for again in (False, True):
            narrow_kernel[parts](
                *given, found, vocab, tiles, rows, AGAIN=again, TILES=width, **SCAN
            )
        parts = (rows, triton.cdiv(vocab, PUT["BLOCK"]))
        list_kernel[parts](*given, found, counts, listed, vocab, tiles, rows, TILES=width, **PUT)
        select_kernel[(rows,)](
            *given, found, counts, listed, border, score, ids, vocab, tiles, rows, TILES=width,
            **SEARCH,
        )  # fmt: skip
    draw_kernel[grid](*given, counts, border, score, ids, vocab, tiles, FILTERED=filtered, **sizes)
    if entries:
        adjust_kernel[adjusted](*x, table, saved, vocab, RESTORE=True, BLOCK=ADJUSTED)
    finish_kernel[(rows,)](
        *x, table, bad, raw, sums, peak, score, ids, out, vocab, tiles, out.stride(0), TILES=width
    )
    return out
