"""Page writes of steps in one launch, without a question to the host."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from common.ops.plan import Steps


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


def write_steps(latent: Tensor, pages: Tensor, layer: int, plan: Steps) -> None:
    """See `common.ops.paging.write_steps`."""
    if not latent.shape[0]:
        return
    view, width = pages[:, layer], latent.shape[1]
    write_kernel[(latent.shape[0],)](
        latent, latent.stride(0), view, view.stride(0), plan.slots, plan.starts, plan.tables,
        plan.tables.stride(0), W=width, T=view.shape[1], BLOCK=triton.next_power_of_2(width),
    )  # fmt: skip
