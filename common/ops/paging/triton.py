"""Page writes in one launch, without a question to the host."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from common.ops.plan import Chunks, Steps

ROWS = 16  # tokens of a chunk that a program writes


@triton.jit
def write_kernel(
    latent_ptr, latent_row, page_ptr, page_stride, slot_ptr, start_ptr, table_ptr, table_row,
    W: tl.constexpr, T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: rows; a row without a slot is padding."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(slot_ptr + row) < 0:
        return
    start = tl.load(start_ptr + row)
    page = tl.load(table_ptr + row * table_row + start // T).to(tl.int64)
    at = tl.arange(0, BLOCK)
    latent = tl.load(latent_ptr + row * latent_row + at, mask=at < W)
    tl.store(page_ptr + page * page_stride + (start % T) * W + at, latent, mask=at < W)


@triton.jit
def chunk_kernel(
    latent_ptr, page_ptr, page_stride, first_ptr, start_ptr, length_ptr, table_ptr, table_row,
    W: tl.constexpr, T: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (chunks, T / ROWS)."""
    chunk = tl.program_id(0)
    share = 0
    while tl.load(first_ptr + share + 1) <= chunk:
        share += 1
    index = tl.load(start_ptr + share) // T + chunk - tl.load(first_ptr + share)
    page = tl.load(table_ptr + share * table_row + index).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK)
    live = (row < tl.load(length_ptr + chunk))[:, None] & (at < W)[None, :]
    place = row[:, None] * W + at[None, :]
    latent = tl.load(latent_ptr + chunk.to(tl.int64) * (T * W) + place, mask=live)
    tl.store(page_ptr + page * page_stride + place, latent, mask=live)


def write_chunks(latent: Tensor, pages: Tensor, layer: int, plan: Chunks) -> None:
    """See `common.ops.paging.write_chunks`."""
    chunks, tokens, width = latent.shape
    if not chunks:
        return
    view = pages[:, layer]
    chunk_kernel[(chunks, tokens // ROWS)](
        latent.contiguous(), view, view.stride(0), plan.first, plan.starts, plan.lengths,
        plan.tables, plan.tables.stride(0), W=width, T=tokens, ROWS=ROWS,
        BLOCK=triton.next_power_of_2(width),
    )  # fmt: skip


def write_steps(latent: Tensor, pages: Tensor, layer: int, plan: Steps) -> None:
    """See `common.ops.paging.write_steps`."""
    if not latent.shape[0]:
        return
    view, width = pages[:, layer], latent.shape[1]
    write_kernel[(latent.shape[0],)](
        latent, latent.stride(0), view, view.stride(0), plan.slots, plan.starts, plan.tables,
        plan.tables.stride(0), W=width, T=view.shape[1], BLOCK=triton.next_power_of_2(width),
    )  # fmt: skip
