"""Choose tokens in a few launches: penalties, mask, filters, noise, arg max, log-probabilities.

A row of logits is cut into tiles of a fixed size, so a row's result does not depend on the batch.
Sums that decide are of integers; filters are `triton_filter`. Offsets are 64-bit. A row's
parameters are a table of 64-bit words, `COLUMNS`; reals in it are float64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.ops.draw.triton_filter import (
    COLUMNS,
    EDGES,
    LEVELS,
    highest,
    kept,
    logits_tile,
    narrow_kernel,
    order_of,
    real,
    scaled_by,
    searches,
    tie_kernel,
)  # fmt: skip

BLOCK = 2048  # ids of a tile; a constant, or bits would depend on the batch
HAS_BIAS, IS_BANNED, IS_SEEN, IS_COUNTED = 1, 2, 4, 8  # of an entry
ID_BITS = 24  # of a word that orders logits, then ids

_ROW = tl.constexpr(len(COLUMNS))
_KEY, _TEMPERATURE, _IS_DRAWN, _SCRIPT, _TOP_K, _TOP_P, _LEAST = (tl.constexpr(i) for i in range(7))
_MASK, _BEST, _REPETITION, _FREQUENCY, _PRESENCE, _CHANGED = (tl.constexpr(i) for i in range(7, 13))
_HAS_BIAS, _IS_BANNED = tl.constexpr(HAS_BIAS), tl.constexpr(IS_BANNED)
_IS_SEEN, _IS_COUNTED = tl.constexpr(IS_SEEN), tl.constexpr(IS_COUNTED)
_ID_BITS, _LAST_ID = tl.constexpr(ID_BITS), tl.constexpr((1 << ID_BITS) - 1)
_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST, _SECOND = tl.constexpr(0xBF58476D1CE4E5B9), tl.constexpr(0x94D049BB133111EB)
_TINY = tl.constexpr(2.0**-52)


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
    if tl.load(table_ptr + row * _ROW + _BEST) >= 0:
        tl.store(sum_ptr + row * tiles + tile, tl.sum(tl.exp(x - peak), 0))


@triton.jit(do_not_specialize=["count"])
def adjust_kernel(
    x_ptr, x_row, table_ptr, entry_ptr, kept_ptr, count, RESTORE: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid: entries. Bias, minimum length and penalties in place; RESTORE undoes them."""
    at = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    live = at < count
    row = tl.load(entry_ptr + at * 4, mask=live, other=0)
    x_at = x_ptr + row * x_row + tl.load(entry_ptr + at * 4 + 1, mask=live, other=0)
    if RESTORE:
        tl.store(x_at, tl.load(kept_ptr + at, mask=live, other=0.0), mask=live)
    else:
        x = tl.load(x_at, mask=live, other=0.0)
        tl.store(kept_ptr + at, x, mask=live)
        word = tl.load(entry_ptr + at * 4 + 2, mask=live, other=0)
        bias = tl.load(entry_ptr + at * 4 + 3, mask=live, other=0).to(tl.float64, bitcast=True)
        table = table_ptr + row * _ROW
        repetition = real(table, _REPETITION).to(tl.float32)
        frequency = real(table, _FREQUENCY).to(tl.float32)
        presence = real(table, _PRESENCE).to(tl.float32)
        x = tl.where(word & _HAS_BIAS != 0, x + bias.to(tl.float32), x)
        x = tl.where(word & _IS_BANNED != 0, float("-inf"), x)
        seen = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
        x = tl.where(word & _IS_SEEN != 0, seen, x)
        less = frequency * (word >> 8).to(tl.float32) + presence
        x = tl.where(word & _IS_COUNTED != 0, x - less, x)
        tl.store(x_at, x, mask=live)


@triton.jit
def peak_kernel(
    x_ptr, x_row, table_ptr, mask_ptr, mask_row, peak_ptr, V, tiles, BLOCK: tl.constexpr
):
    """Grid: (rows, tiles). The best of a row that was adjusted or masked."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    table = table_ptr + row * _ROW
    if tl.load(table + _CHANGED) == 0:
        return
    at = tile * BLOCK + tl.arange(0, BLOCK)
    x = logits_tile(x_ptr, x_row, table, mask_ptr, mask_row, row, at, V)
    tl.store(peak_ptr + row * tiles + tile, tl.max(x, 0))


@triton.jit
def _gumbel(key, at):
    """Noise of a row and ids; float64, from the same bits as everywhere."""
    z = key.to(tl.uint64, bitcast=True) + (at + 1).to(tl.uint64) * _GAMMA
    z = (z ^ (z >> 30)) * _FIRST
    z = (z ^ (z >> 27)) * _SECOND
    z = z ^ (z >> 31)
    uniform = ((z >> 12).to(tl.int64).to(tl.float64) + 0.5) * _TINY
    return -tl.log(-tl.log(uniform))


@triton.jit(do_not_specialize=["rows"])
def draw_kernel(
    x_ptr, x_row, table_ptr, mask_ptr, mask_row, peak_ptr, state_ptr, sum_ptr, tie_ptr, score_ptr,
    id_ptr, V, tiles, rows, FILTERED: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, tiles). A tile's best id: of the logits, or with noise of those left."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    table = table_ptr + row * _ROW
    at = tile * BLOCK + tl.arange(0, BLOCK)
    x = logits_tile(x_ptr, x_row, table, mask_ptr, mask_row, row, at, V)
    score = x.to(tl.float64)
    if tl.load(table + _IS_DRAWN) == 1:
        peak = highest(peak_ptr, row, tiles, TILES)
        scaled = scaled_by(x, table, peak)
        left = (at < V) & (scaled >= real(table, _LEAST))
        if FILTERED:  # noqa: SIM102 - the outer one is decided when the kernel is compiled
            if searches(table, 0) | searches(table, 1):
                order = tl.where(at < V, order_of(x).to(tl.int64), -1)
                left = left & kept(
                    table, state_ptr, sum_ptr, tie_ptr, order, row, rows, tile, tiles, peak, TILES
                )
        score = tl.where(left, _gumbel(tl.load(table + _KEY), at) + scaled, float("-inf"))
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
    at, table = tl.arange(0, TILES), table_ptr + row * _ROW
    live, place = at < tiles, row * tiles + at
    score = tl.load(score_ptr + place, mask=live, other=float("-inf"))
    ids = tl.load(id_ptr + place, mask=live, other=V)
    token = tl.min(tl.where(score == tl.max(score, 0), ids, V), 0).to(tl.int64)
    script = tl.load(table + _SCRIPT)
    token = tl.where(script >= 0, script, tl.minimum(token, V - 1))
    best_left = tl.max(tl.load(peak_ptr + place, mask=live, other=float("-inf")), 0)
    stuck = (tl.load(table + _MASK) >= 0) & (script < 0) & (best_left == float("-inf"))
    out = out_ptr + row * out_row
    tl.store(out, token)
    tl.store(out + 1, tl.sum(tl.load(bad_ptr + place, mask=live, other=0), 0).to(tl.int64))
    tl.store(out + 2, stuck.to(tl.int64))
    if tl.load(table + _BEST) >= 0:
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
    if tl.load(table_ptr + row * _ROW + _BEST) <= 0:
        return
    at = tile * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_row + at, mask=at < V, other=float("-inf"))
    word = tl.where(at < V, (order_of(x).to(tl.int64) << _ID_BITS) | (_LAST_ID - at), -1)
    _extract(word, word_ptr + (row * tiles + tile) * MOST, MOST)


@triton.jit
def join_kernel(
    table_ptr, word_ptr, out_ptr, tiles, out_row, MOST: tl.constexpr, WORDS: tl.constexpr
):
    """Grid: rows. The best of all tiles, behind what `finish_kernel` wrote."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(table_ptr + row * _ROW + _BEST) <= 0:
        return
    at = tl.arange(0, WORDS)
    word = tl.load(word_ptr + row * tiles * MOST + at, mask=at < tiles * MOST, other=-1)
    _extract(word, out_ptr + row * out_row + 5, MOST)


def run(
    logits: Tensor, table: Tensor, entries: Tensor, masks: Tensor, *, most: int, changed: bool,
    by_count: bool, by_mass: bool,
) -> Tensor:  # fmt: skip
    """Enqueue everything; the host waits for nothing.

    Args:
        logits: float32 [R, V], contiguous, V below 2^24; changed in between, restored at the end.
        table: int64 [R, COLUMNS].
        entries: int64 [n, 4]: row, id (one of a row once), what happens and above it how often the
            id came, bias.
        masks: uint8 [masked rows, bytes], a bit an id.
        most: best ids of any row.
        changed: whether any row is adjusted or masked.
        by_count: whether any row has top_k.
        by_mass: whether any row has top_p.

    Returns:
        int64 [R, 5 + most]: token, bad logits, whether no token was left, its log-probability and
        the log of the sum of exponentials (float64 bits, where asked for), and the best as words
        of order and id; -1 where there is none.
    """
    (rows, vocab), device = logits.shape, logits.device
    tiles = triton.cdiv(vocab, BLOCK)
    width = triton.next_power_of_2(tiles)
    grid, x = (rows, tiles), (logits, logits.stride(0))
    masked = (masks, masks.shape[1])

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
    count, peak = entries.shape[0], raw
    saved = empty(count, dtype=torch.float32)
    if count:
        adjust_kernel[(triton.cdiv(count, 256),)](
            *x, table, entries, saved, count, RESTORE=False, BLOCK=256, enable_fp_fusion=False
        )
    if changed:
        peak = raw.clone()
        peak_kernel[grid](*x, table, *masked, peak, vocab, tiles, BLOCK=BLOCK)
    ties = state = found = ids  # without filters nobody reads them
    sizes = {"TILES": width, "BLOCK": BLOCK}
    if by_count or by_mass:
        ties = empty(rows, tiles, dtype=torch.int32)
        state = empty(2, LEVELS + 1, rows, 3, dtype=torch.int64)
        found = torch.zeros((2, LEVELS, rows, EDGES), dtype=torch.int64, device=device)
        given = (*x, table, *masked, peak, state, found)
        for phase, wanted in enumerate((by_count, by_mass)):
            for level in range(LEVELS if wanted else 0):
                narrow_kernel[grid](*given, vocab, tiles, rows, level, PHASE=phase, **sizes)
        tie_kernel[grid](*given, ties, vocab, tiles, rows, **sizes)
    draw_kernel[grid](
        *x, table, *masked, peak, state, found, ties, score, ids, vocab, tiles, rows,
        FILTERED=by_count or by_mass, **sizes,
    )  # fmt: skip
    if count:
        adjust_kernel[(triton.cdiv(count, 256),)](
            *x, table, entries, saved, count, RESTORE=True, BLOCK=256
        )
    finish_kernel[(rows,)](
        *x, table, bad, raw, sums, peak, score, ids, out, vocab, tiles, out.stride(0), TILES=width
    )
    return out
