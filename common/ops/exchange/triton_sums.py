"""Sums and gathers over ranks through windows: every rank stores its values into all of them.

Two places a rank, used in turn, so that one meeting is enough: a rank that writes a place again has
met all ranks since, and each had read it before. Which turn it is lies on the device (`rounds`), so
a captured pass goes on where an eager one stopped.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.ops.exchange import ALIGN
from common.ops.exchange.triton import meet_kernel
from common.ops.quant.triton import KINDS

BLOCK = 1024  # values that one program moves or adds


@dataclass(frozen=True, slots=True, kw_only=True)
class Shelf:
    """Where the parts of a window lie: int32 flags [ranks], then bytes [2, ranks, room]."""

    ranks: int
    room: int  # bytes of one rank's values at most, a multiple of 4

    @property
    def first(self) -> int:
        """Where the values begin."""
        return -(-self.ranks * 4 // ALIGN) * ALIGN

    @property
    def size(self) -> int:
        """Bytes of a window."""
        return self.first + 2 * self.ranks * self.room


@triton.jit
def put_kernel(
    word_ptr, window_ptr, round_ptr, rank, count,
    RANKS: tl.constexpr, ROOM: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (count / BLOCK, ranks). ROOM counts words of 4 bytes, as `count` does."""
    turn = tl.load(round_ptr) & 1
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(word_ptr + at, mask=at < count)
    window = tl.multiple_of(tl.load(window_ptr + tl.program_id(1)) + FIRST, 16)
    there = window.to(tl.pointer_type(tl.int32)) + (turn * RANKS + rank).to(tl.int64) * ROOM
    tl.store(there + at, word, mask=at < count)


@triton.jit
def sum_kernel(
    own_ptr, round_ptr, out_ptr, count,
    RANKS: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: count / BLOCK. `own_ptr` is this rank's place of values; ROOM counts values."""
    turn = (tl.load(round_ptr) - 1) & 1  # it has been met
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = own_ptr + (turn * RANKS).to(tl.int64) * ROOM + at
    total = tl.load(here, mask=at < count, other=0.0).to(tl.float32)
    for rank in tl.static_range(1, RANKS):
        total += tl.load(here + rank * ROOM, mask=at < count, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=at < count)


@triton.jit
def gather_kernel(
    own_ptr, round_ptr, out_ptr, count, stride,
    RANKS: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (count / BLOCK, ranks). Words; a rank's begin `stride` after the last one's."""
    turn, rank = (tl.load(round_ptr) - 1) & 1, tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(own_ptr + (turn * RANKS + rank).to(tl.int64) * ROOM + at, mask=at < count)
    tl.store(out_ptr + rank.to(tl.int64) * stride + at, word, mask=at < count)


def put(words: Tensor, windows: Tensor, rounds: Tensor, rank: int, shelf: Shelf) -> None:
    """Store int32 `words` (at most the shelf's room) into every window, and meet.

    Args:
        words: contiguous.
        windows: int64 [ranks], addresses as this process sees them.
        rounds: int32 [1], of this rank; counts on with every call, captured or not.
        rank: this one's position.
        shelf: of every window.
    """
    count = words.numel()
    put_kernel[(triton.cdiv(count, BLOCK), shelf.ranks)](
        words, windows, rounds, rank, count,
        RANKS=shelf.ranks, ROOM=shelf.room // 4, FIRST=shelf.first, BLOCK=BLOCK,
    )  # fmt: skip
    meet_kernel[(1,)](windows, rounds, rank, RANKS=shelf.ranks, PHASE=0, num_warps=1)


def added(own: Tensor, rounds: Tensor, out: Tensor, shelf: Shelf) -> None:
    """Add what was put last, of all ranks in order, in fp32, and round once into `out`.

    Args:
        own: uint8, this rank's window.
        rounds: as of `put`.
        out: contiguous bfloat16 or float32; as many bytes as were put.
        shelf: of every window.
    """
    assert out.dtype in KINDS
    values = own[shelf.first :].view(out.dtype)
    sum_kernel[(triton.cdiv(out.numel(), BLOCK),)](
        values, rounds, out, out.numel(),
        RANKS=shelf.ranks, ROOM=shelf.room // out.dtype.itemsize, BLOCK=BLOCK,
    )  # fmt: skip


def gathered(own: Tensor, rounds: Tensor, out: Tensor, count: int, shelf: Shelf) -> None:
    """Copy the `count` words that each rank has put last: into `out[rank, :count]`, int32."""
    words = own[shelf.first :].view(torch.int32)
    gather_kernel[(triton.cdiv(count, BLOCK), shelf.ranks)](
        words, rounds, out, count, out.stride(0),
        RANKS=shelf.ranks, ROOM=shelf.room // 4, BLOCK=BLOCK,
    )  # fmt: skip
