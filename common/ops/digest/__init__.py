"""The additive digest and the finite check, one pass over memory.

Bodies: torch (`reference`) for memory of the host, Triton for memory of a CUDA device. They give
the same integers, so where the bytes lie decides, not a setting. The definition and its test
vectors: docs/protocol.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from common.ops.digest import reference
from common.ops.digest.reference import MASK, Signature, signature, splitmix64
from common.ops.digest.summing import Rows, Summing
from common.ops.digest.upload import on_device

__all__ = [
    "MASK",
    "Rows",
    "Signature",
    "Summing",
    "digest_listed",
    "digest_pages",
    "digest_words",
    "on_device",
    "signature",
    "splitmix64",
]


def digest_words(values: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
    """Digest each row of a tensor, and say whether it is finite.

    Args:
        values: [R, ...] of any floating dtype (bf16 or fp32 on a CUDA device), contiguous in all
            but the first dimension; a row is a multiple of 4 bytes.
        first: logical word index of the first word of every row.

    Returns:
        int64 [R] digests (the bits of the unsigned sum); bool [R], true where all are finite.

    Raises:
        ValueError: a row is not a multiple of 4 bytes.
    """
    sums, finite = digest_pages(values[None], first)
    return sums[0], finite[0]


def digest_pages(values: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
    """The same for pages that follow each other: page p's rows start where page p - 1's ended.

    Args:
        values: [P, R, ...]; row r of all pages together is one layer. Contiguous in all but the
            first two dimensions.
        first: logical word index of page 0's rows.

    Returns:
        int64 [P, R] and bool [P, R].
    """
    if values.is_cuda:
        from common.ops.digest import triton

        return triton.digest_pages(values, first)
    return reference.digest_pages(values, first)


def digest_listed(
    pool: Tensor, pages: Sequence[int], tokens: int, first: int = 0
) -> tuple[Tensor, Tensor]:
    """The same for listed pages of a pool, of which only the leading tokens count.

    Args:
        pool: [pages, R, tokens of a page, W].
        pages: P page numbers.
        tokens: how many tokens of each page are covered.
        first: logical word index of the rows of the first page listed; a page listed is followed
            by the next as if it held `tokens` tokens.

    Returns:
        int64 [P, R] and bool [P, R].
    """
    if pool.is_cuda:
        from common.ops.digest import triton

        return triton.digest_listed(pool, pages, tokens, first)
    return reference.digest_pages(pool[list(pages), :, :tokens], first)
