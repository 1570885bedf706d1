"""The additive digest and the finite check, one pass over memory and one launch for any parts.

mix(i) depends on the word's index alone: a program works it out once for its words and uses it for
every row. Partial sums meet by 64-bit atomic addition, which is exact in any order. What a program
does stands in a table on the device, so that parts of other shapes compile nothing anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.errors import BackendUnsupported
from common.ops.digest.summing import Rows
from common.ops.digest.upload import on_device

_FIELDS = 16
FIELDS = tl.constexpr(_FIELDS)
_KERNELS: dict[tuple[int, bool, int, int], Any] = {}
_NEVER = 0x7F800000  # for fp32 the second test of a word repeats the first


@triton.jit
def _mix(i):
    """splitmix64(i) | 1 of uint64 numbers."""
    z = i + 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return (z ^ (z >> 31)) | 1


@triton.jit
def _unsound(w, low):
    """Where a word holds an infinity or a NaN: fp32, or two bf16 (`low`: bits of the lower)."""
    return ((w & 0x7F800000) == 0x7F800000) | ((w & low) == low)


@triton.jit(
    do_not_specialize=["parts"], do_not_specialize_on_alignment=["table_ptr", "sum_ptr", "bad_ptr"]
)
def digest_kernel(table_ptr, sum_ptr, bad_ptr, parts, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Grid: for each part, blocks of words x pages x shares of rows. Strides count words."""
    program = tl.program_id(0)
    part = 0
    for other in range(1, parts):
        part = tl.where(program >= tl.load(table_ptr + other * FIELDS), other, part)
    field = table_ptr + part * FIELDS
    program = program - tl.load(field).to(tl.int32)
    address, listed = tl.load(field + 1), tl.load(field + 2)
    page_stride, row_stride = tl.load(field + 3), tl.load(field + 4)
    first, count = tl.load(field + 5), tl.load(field + 6)
    rows, share = tl.load(field + 7), tl.load(field + 8)
    blocks, pages = tl.load(field + 9).to(tl.int32), tl.load(field + 10).to(tl.int32)
    out, out_pitch = tl.load(field + 11), tl.load(field + 12)
    low_bits = tl.load(field + 13).to(tl.int32)
    if ALIGNED:
        row_stride, count = tl.multiple_of(row_stride, 4), tl.multiple_of(count, 4)
    page = ((program // blocks) % pages).to(tl.int64)
    at = (program % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < count
    place = page
    if listed >= 0:
        place = tl.load(table_ptr + listed + page)
    mix = _mix((at + first + page * count).to(tl.uint64))
    low = (mix & 0xFFFFFFFF).to(tl.uint32)
    high = (mix >> 32).to(tl.uint32)
    ones = tl.sum(tl.where(live, mix, 0).to(tl.int64), 0)
    begin = (program // (blocks * pages)).to(tl.int64) * share
    end = tl.minimum(begin + share, rows)
    base = address.to(tl.pointer_type(tl.int32)) + place * page_stride + at
    out += page * out_pitch
    upper, lower = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for row in tl.range(begin, end, num_stages=4):
        words = base + row * row_stride
        if ALIGNED:
            words = tl.multiple_of(words, 16)  # loads of 16 bytes instead of 4
        word = tl.load(words, mask=live, other=0)
        # Zero times what is not finite is NaN, in the units that the sums leave idle.
        upper += word.to(tl.float32, bitcast=True) * 0.0
        lower += (word << 16).to(tl.float32, bitcast=True) * 0.0
        w = word.to(tl.uint32, bitcast=True)
        near = tl.sum(tl.reshape(w.to(tl.uint64) * low.to(tl.uint64), [BLOCK // 4, 4]), 1)
        far = tl.sum(tl.reshape(w * high, [BLOCK // 4, 4]), 1)
        total = tl.sum((near + (far.to(tl.uint64) << 32)).to(tl.int64), 0) + ones
        tl.atomic_add(sum_ptr + out + row, total, sem="relaxed")
    spoilt = (upper != upper) | ((lower != lower) & (low_bits == 0x7F80))
    if tl.max(spoilt.to(tl.int32), 0) != 0:  # rare: find out which rows
        for row in range(begin, end):
            word = tl.load(base + row * row_stride, mask=live, other=0)
            if tl.max(_unsound(word, low_bits).to(tl.int32), 0) != 0:
                tl.store(bad_ptr + out + row, 1)


def plan(
    groups: Sequence[Sequence[Rows]], sums: Tensor, bad: Tensor, *, pitch: int = 0,
    block: int = 2048, programs: int = 1024, num_warps: int = 4,
) -> list[Callable[[], None]]:  # fmt: skip
    """Send what the programs need to know, in one copy; a call then digests a group and adds it.

    Both use the stream that is current now, on its device.

    Args:
        groups: of parts, fp32 or bf16, on one device.
        sums: int64, contiguous; row r of a part adds to place `at` + r.
        bad: int64 of the same places; set where a value is not finite.
        pitch: page p of a part adds that much further on; 0 adds all pages to the same places.
        block: words of a program.
        programs: about how many a part is divided over.
        num_warps: of a program.

    Raises:
        BackendUnsupported: another dtype.
        ValueError: a row is not a multiple of 4 bytes.
    """
    numbers: list[int] = []
    found: list[tuple[int, int, int, bool]] = []  # of each group: its place, parts, programs, align
    for group in groups:
        parts = [part for part in group if part.number and part.values.shape[1] and part.width]
        table: list[int] = []
        listed: list[int] = []
        begin, aligned = 0, True
        for part in parts:
            entry, begin, is_aligned = _entry(
                part, begin, _FIELDS * len(parts) + len(listed), pitch, block, programs
            )
            aligned = aligned and is_aligned
            table += entry
            listed += part.pages or ()
        found.append((len(numbers), len(parts), begin, aligned))
        numbers += [*table, *listed]
    sent = on_device(numbers, sums.device)
    return [
        _launch(sent[at:], sums, bad, parts, begin, aligned, block, num_warps)
        if parts
        else _nothing
        for at, parts, begin, aligned in found
    ]


def _launch(
    table: Tensor, sums: Tensor, bad: Tensor, parts: int, programs: int, aligned: bool, block: int,
    num_warps: int,
) -> Callable[[], None]:  # fmt: skip
    """What launches the kernel on the stream that is current now: 11 us a call, of Triton's 27."""
    given = (table, sums, bad, parts, aligned, block)
    if not isinstance(digest_kernel, triton.JITFunction):  # interpreted
        return lambda: digest_kernel[(programs,)](*given)
    kernel = _compiled(aligned, block, num_warps, table, sums)
    stream = torch.cuda.current_stream(sums.device).cuda_stream
    return partial(kernel[(programs, 1, 1)], *given, stream=stream)


def _compiled(aligned: bool, block: int, num_warps: int, table: Tensor, sums: Tensor) -> Any:
    """The kernel for the current device; the tensors stand for any of their kind."""
    which = (table.get_device(), aligned, block, num_warps)
    if which not in _KERNELS:
        _KERNELS[which] = digest_kernel.warmup(
            table, sums, sums, 1, ALIGNED=aligned, BLOCK=block, num_warps=num_warps, grid=(1,)
        )
    return _KERNELS[which]


def _nothing() -> None:
    """An empty group."""


def digest_pages(values: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
    """See `common.ops.digest.digest_pages`; pages and rows may be strided."""
    return _by_page(Rows(values=values, at=0, first=first))


def digest_listed(
    pool: Tensor, pages: Sequence[int], tokens: int, first: int = 0
) -> tuple[Tensor, Tensor]:
    """See `common.ops.digest.digest_listed`; nothing is gathered."""
    return _by_page(Rows(values=pool, at=0, first=first, pages=pages, tokens=tokens))


def _by_page(part: Rows) -> tuple[Tensor, Tensor]:
    shape = (2, part.number, part.values.shape[1])
    sums, bad = torch.zeros(shape, dtype=torch.int64, device=part.values.device)
    plan([[part]], sums, bad, pitch=shape[2])[0]()
    return sums, bad == 0


def _entry(
    part: Rows, begin: int, listed: int, pitch: int, block: int, programs: int
) -> tuple[list[int], int, bool]:
    """A part's row of the table, the program after its last, and whether all is 16-byte aligned."""
    values = part.values
    if values.dtype not in (torch.float32, torch.bfloat16):
        raise BackendUnsupported(
            f"the Triton digest reads fp32 and bf16, not {values.dtype}; use the reference"
        )
    size, rows, number = values.element_size(), values.shape[1], part.number
    if part.width * size % 4:
        raise ValueError(
            f"a row of {part.width} values of {values.dtype} is not a multiple of 4 bytes"
        )
    count = part.width * size // 4
    blocks = -(-count // block)
    shares = min(rows, max(1, -(-programs // (blocks * number))))
    share = -(-rows // shares)
    strides = [values.stride(at) * size // 4 for at in (0, 1)]
    entry = [
        begin, values.data_ptr(), -1 if part.pages is None else listed, *strides, part.first, count,
        rows, share, blocks, number, part.at, pitch, 0x7F80 if size == 2 else _NEVER, 0, 0,
    ]  # fmt: skip
    aligned = values.data_ptr() % 16 == 0 and not any(n % 4 for n in (*strides, count))
    return entry, begin + blocks * number * -(-rows // share), aligned
