"""Exchange: rows travel to the ranks that hold their experts, and the experts' outputs come back.

`AllToAll` over torch.distributed is the definition; a faster body with the same promises may stand
in for it. What an expert computes is not known here. Rows that are padding are not sent and not
counted; a rank without rows takes part all the same, for its experts may be wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from common.parallel.collectives import Axis
from common.parallel.placement import Routes


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """Rows that came for this rank's experts, one for each (row, expert)."""

    rows: Tensor  # [M, Z]
    local: Tensor  # int64 [M], position among this rank's experts; beyond them: no row
    shape: tuple[int, int]  # N, k of the rows that left here


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted(Arrived):
    """The same with what was counted for the way."""

    home: Tensor  # int64 [S], for each row sent: its place in the flattened [N, k]
    sent: tuple[int, ...]  # rows sent to each rank
    received: tuple[int, ...]  # rows received from each rank


class Exchange(Protocol):
    """Both ways between rows and experts. All ranks of the axis call in the same order."""

    recordable: bool  # whether a captured pass may hold it: nothing waits for the host

    def dispatch(
        self, rows: Tensor, ids: Tensor, keep: Tensor, table: Routes
    ) -> Callable[[], Arrived]:
        """Send rows to their experts; what is returned waits for those that come here.

        What is computed between the two overlaps with the rows' way.

        Args:
            rows: [N, Z]; N may be 0.
            ids: int64 [N, k], logical experts.
            keep: bool [N]; rows that are not kept go nowhere.
            table: where each expert is, in shares that are the positions on the axis.
        """

    def combine(self, outputs: Tensor, arrived: Arrived, weights: Tensor) -> Tensor:
        """Send outputs home and add up what a row's experts made of it.

        Args:
            outputs: [M, Z], of the rows that arrived.
            arrived: of `dispatch`.
            weights: fp32 [N, k].

        Returns:
            [N, Z] of the outputs' dtype, zero where a row was not kept; summed in fp32 in ascending
            order of ids and rounded once, so that it has the bits of a single rank's.
        """

    def check(self) -> None:
        """Look back at earlier passes, without waiting for the device; called before each pass.

        Raises:
            RoomLost: a rank fell silent in one, and what was computed since is void.
        """


class AllToAll:
    """The definition: one row for each (row, expert), in order of ranks, then rows, then ids."""

    recordable = False

    def __init__(self, axis: Axis) -> None:
        """`axis` joins the ranks that hold every expert once."""
        self._axis = axis

    def dispatch(
        self, rows: Tensor, ids: Tensor, keep: Tensor, table: Routes
    ) -> Callable[[], Counted]:
        """See `Exchange`."""
        count, top = ids.shape
        spread = torch.arange(count, device=ids.device).unsqueeze(1) + self._axis.index
        share, local = table.find(ids, spread)
        wanted = keep.unsqueeze(1).expand(-1, top).flatten().nonzero().squeeze(1)
        to = share.flatten()[wanted]
        home = wanted[to.argsort(stable=True)]
        sent = torch.bincount(to, minlength=self._axis.size)
        ones = [1] * self._axis.size
        received = self._axis.all_to_all(sent, ones, ones)
        out, back = tuple(sent.tolist()), tuple(received.tolist())
        travelling = self._axis.begin_all_to_all(rows[home // top], out, back)
        named = self._axis.begin_all_to_all(local.flatten()[home], out, back)
        return lambda: Counted(
            rows=travelling(),
            local=named(),
            home=home,
            shape=(count, top),
            sent=out,
            received=back,
        )

    def combine(self, outputs: Tensor, arrived: Arrived, weights: Tensor) -> Tensor:
        """See `Exchange`."""
        assert isinstance(arrived, Counted)
        count, top = arrived.shape
        home = outputs.new_zeros(count * top, outputs.shape[-1])
        home[arrived.home] = self._axis.all_to_all(outputs, arrived.received, arrived.sent)
        chosen = home.view(count, top, outputs.shape[-1])
        total = weights[:, :1] * chosen[:, 0].float()
        for j in range(1, top):
            total = total + weights[:, j : j + 1] * chosen[:, j].float()
        return total.to(outputs.dtype)

    def check(self) -> None:
        """Nothing to look at: a collective that lacks a rank raises by itself."""
