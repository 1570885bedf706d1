"""Summing: the digests of a request, added up part by part where its memory lies, and read once.

Parts may come in any order and in any cut: a layer's digest is the sum of its parts'. On a CUDA
device adding is one launch on the current stream, whatever the parts are, and reading is one copy
to the host, the only wait. Knows nothing about pools or tickets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from common.ops.digest import reference
from common.ops.digest.reference import Signature
from common.ops.digest.upload import on_host


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A part of a request's memory: row r of all its pages together belongs to layer `at` + r."""

    values: Tensor  # [P, R, ...], contiguous in all but the first two dimensions
    at: int  # place of row 0's layer among the names
    first: int = 0  # logical index of the first word of the first page's rows
    pages: Sequence[int] | None = None  # which pages of `values`, in order; None: all
    tokens: int | None = None  # leading entries of dimension 2 that count; None: all

    @property
    def number(self) -> int:
        """How many pages."""
        return self.values.shape[0] if self.pages is None else len(self.pages)

    @property
    def width(self) -> int:
        """Values of one row."""
        inner = self.values.shape[2:]
        return inner.numel() if self.tokens is None else self.tokens * inner[1:].numel()


class Summing:
    """Digests by "<kind>:<layer>", zero at first."""

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        """Start with nothing added."""
        self.names = tuple(names)
        self._totals = torch.zeros((2, len(self.names)), dtype=torch.int64, device=device)

    def add(self, parts: Sequence[Rows]) -> None:
        """Digest parts and add them; on a device this returns before they are.

        Raises:
            ValueError: a row is not a multiple of 4 bytes.
        """
        self.plan([parts])[0]()

    def plan(self, groups: Sequence[Sequence[Rows]]) -> list[Callable[[], None]]:
        """What adds each group of parts when it is called, in any order; errors as of `add`.

        On a device everything a launch needs is sent now, in one copy, and a call is one launch,
        both on the stream that is current now.
        """
        sums, bad = self._totals
        if sums.is_cuda:
            from common.ops.digest import triton

            return triton.plan(groups, sums, bad)
        return [partial(self._add_here, parts) for parts in groups]

    def _add_here(self, parts: Sequence[Rows]) -> None:
        sums, bad = self._totals
        for part in parts:
            some = part.values if part.pages is None else part.values[list(part.pages)]
            found, finite = reference.digest_pages(some[:, :, : part.tokens], part.first)
            layers = slice(part.at, part.at + found.shape[1])
            sums[layers] += found.sum(0)
            bad[layers] += (~finite).sum(0)

    def add_known(self, at: int, sums: Tensor, finite: Tensor) -> None:
        """Add digests that were taken before.

        Args:
            at: place of the first layer among the names.
            sums: int64 [L].
            finite: bool [L].
        """
        layers = slice(at, at + sums.shape[0])
        self._totals[0, layers] += sums
        self._totals[1, layers] += ~finite

    def signature(self) -> Signature:
        """What was added so far."""
        sums, bad = on_host(self._totals).numpy().view(np.uint64).tolist()
        unsound = zip(self.names, bad, strict=True) if any(bad) else ()
        return Signature(
            sums=dict(zip(self.names, sums, strict=True)),
            unsound=tuple(name for name, how in unsound if how),
        )
