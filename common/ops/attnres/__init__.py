"""Attention residuals: what a sublayer reads is a mixture of earlier blocks and the prefix."""

from __future__ import annotations

from torch import Tensor

from common.ops.attnres import reference


def read(
    prefix: Tensor,
    bank: Tensor,
    readable: int,
    score: Tensor,
    *,
    eps: float,
    pending: Tensor | None = None,
    norm: Tensor | None = None,
    write_row: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Fold, mix, and optionally norm and store: one read of the residual memory.

    With p = prefix + pending (rounded to the dtype of `prefix`) and sources v_0..v_(n-1) = the
    bank's first n = `readable` rows, v_n = p:

        s_j = (sum_d score[d] v_j[d]) / sqrt(mean_d v_j[d]^2 + eps)
        mix = sum_j softmax(s)_j v_j

    The un-normalised sources are mixed, in fp32, and rounded once; n = 0 gives p itself. A row
    written in the same call is not a source of it.

    Args:
        prefix: [N, D], the running prefix; not changed.
        bank: [N, R, D], same dtype; row `write_row` is overwritten with p.
        readable: rows of the bank that are sources, 0 <= readable <= R.
        score: fp32 [D], norm weight times projection.
        eps: of the scores and of the norm.
        pending: [N, D] added to the prefix first; None for nothing.
        norm: [D] weight of an RMS norm of the mixture; None returns the mixture.
        write_row: bank row that receives p; None for no write.

    Returns:
        The mixture, normed where asked, [N, D], and p [N, D]; dtype of `prefix`.
    """
    return reference.read(
        prefix,
        bank,
        readable,
        score,
        eps=eps,
        pending=pending,
        norm=norm,
        write_row=write_row,
    )
