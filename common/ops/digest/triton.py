"""The additive digest and the finite check, one pass over memory.

mix(i) depends on the word's index alone: a program works it out once for its words and uses it for
every row. Partial sums meet by 64-bit atomic addition, which is exact in any order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.errors import BackendUnsupported


@triton.jit
def _mix(i):
    """splitmix64(i) | 1 of uint64 numbers."""
    z = i + 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return (z ^ (z >> 31)) | 1


@triton.jit
def _unsound(w, HALVES: tl.constexpr):
    """Where a word holds an infinity or a NaN: fp32, or two bf16."""
    bad = (w & 0x7F800000) == 0x7F800000
    if HALVES:
        bad = bad | ((w & 0x7F80) == 0x7F80)
    return bad


@triton.jit
def digest_kernel(
    words_ptr, page_ptr, page_stride, row_stride, sum_ptr, bad_ptr, first, pitch, count, rows,
    share,
    PAGED: tl.constexpr, HALVES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of words, pages, shares of rows). Strides count words."""
    page = tl.program_id(1).to(tl.int64)
    place = page
    if PAGED:
        place = tl.load(page_ptr + page).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < count
    mix = _mix((at + first + page * pitch).to(tl.uint64))
    low = (mix & 0xFFFFFFFF).to(tl.uint32)
    high = (mix >> 32).to(tl.uint32)
    ones = tl.sum(tl.where(live, mix, 0).to(tl.int64), 0)
    begin = tl.program_id(2).to(tl.int64) * share
    end = tl.minimum(begin + share, rows)
    base = words_ptr + place * page_stride + at
    worst = tl.zeros([BLOCK], tl.int1)
    for row in tl.range(begin, end, num_stages=4):
        word = tl.load(base + row * row_stride, mask=live, other=0)
        worst = worst | _unsound(word, HALVES)
        w = word.to(tl.uint32, bitcast=True)
        product = w.to(tl.uint64) * low.to(tl.uint64) + ((w * high).to(tl.uint64) << 32)
        total = tl.sum(product.to(tl.int64), 0) + ones
        tl.atomic_add(sum_ptr + page * rows + row, total, sem="relaxed")
    if tl.max(worst.to(tl.int32), 0) != 0:  # rare: find out which rows
        for row in range(begin, end):
            word = tl.load(base + row * row_stride, mask=live, other=0)
            if tl.max(_unsound(word, HALVES).to(tl.int32), 0) != 0:
                tl.store(bad_ptr + page * rows + row, 1)


def digest_pages(values: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
    """See `common.ops.digest.digest_pages`; pages and rows may be strided."""
    return launch(values, None, values.shape[0], values[0, 0].numel(), first)


def digest_listed(
    pool: Tensor, pages: Tensor, tokens: int, first: int = 0
) -> tuple[Tensor, Tensor]:
    """The same for listed pages of a pool, without gathering them.

    Args:
        pool: [pages, R, tokens of a page, W]. pages: integers [P].
        tokens: only the first so many tokens of each page are covered.
        first: logical word index of the rows of the first page listed.

    Returns:
        int64 [P, R] and bool [P, R].
    """
    return launch(pool, pages, pages.shape[0], tokens * pool.shape[3], first)


def launch(
    values: Tensor, pages: Tensor | None, number: int, width: int, first: int, *, block: int = 2048,
    programs: int = 2048, num_warps: int = 4,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Digest `width` values of each row of `number` pages."""
    if values.dtype not in (torch.float32, torch.bfloat16):
        raise BackendUnsupported(
            f"the Triton digest reads fp32 and bf16, not {values.dtype}; use the reference"
        )
    size, rows = values.element_size(), values.shape[1]
    if width * size % 4:
        raise ValueError(f"a row of {width} values of {values.dtype} is not a multiple of 4 bytes")
    count = width * size // 4
    sums = torch.zeros((number, rows), dtype=torch.int64, device=values.device)
    bad = torch.zeros((number, rows), dtype=torch.int32, device=values.device)
    if number and rows and count:
        blocks = triton.cdiv(count, block)
        shares = min(rows, max(1, triton.cdiv(programs, blocks * number)))
        share = triton.cdiv(rows, shares)
        digest_kernel[(blocks, number, triton.cdiv(rows, share))](
            values.view(torch.int32), pages, values.stride(0) * size // 4,
            values.stride(1) * size // 4,
            sums, bad, first, count, count, rows, share,
            PAGED=pages is not None, HALVES=size == 2, BLOCK=block, num_warps=num_warps,
        )  # fmt: skip
    return sums, bad == 0
