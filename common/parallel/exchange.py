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

from common.errors import BackendUnsupported
from common.parallel.collectives import Axis
from common.parallel.placement import Routes


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """Rows that came for this rank's experts, one for each (row, expert), and the way back."""

    rows: Tensor  # [M, Z]
    local: Tensor  # int64 [M], position among this rank's experts
    home: Tensor  # int64 [S], for each row sent: its place in the flattened [N, k]
    shape: tuple[int, int]  # N, k
    sent: tuple[int, ...]  # rows sent to each rank
    received: tuple[int, ...]  # rows received from each rank


class Exchange(Protocol):
    """Both ways between rows and experts. All ranks of the axis call in the same order."""

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

    def combine(self, outputs: Tensor, arrived: Arrived) -> Tensor:
        """Send outputs [M, Z] home: [N, k, Z], zero where a row was not kept."""


class AllToAll:
    """The definition: one row for each (row, expert), in order of ranks, then rows, then ids."""

    def __init__(self, axis: Axis) -> None:
        """`axis` joins the ranks that hold every expert once."""
        self._axis = axis

    def dispatch(
        self, rows: Tensor, ids: Tensor, keep: Tensor, table: Routes
    ) -> Callable[[], Arrived]:
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
        return lambda: Arrived(
            rows=travelling(),
            local=named(),
            home=home,
            shape=(count, top),
            sent=out,
            received=back,
        )

    def combine(self, outputs: Tensor, arrived: Arrived) -> Tensor:
        """See `Exchange`."""
        count, top = arrived.shape
        home = outputs.new_zeros(count * top, outputs.shape[-1])
        home[arrived.home] = self._axis.all_to_all(outputs, arrived.received, arrived.sent)
        return home.view(count, top, outputs.shape[-1])


EXCHANGES = ("all_to_all", "deep_ep", "nixl_ep", "mega_moe")


def open_exchange(name: str, axis: Axis) -> Exchange:
    """The exchange that the settings name.

    Raises:
        BackendUnsupported: it is unknown, or has no body here.
    """
    if name == "all_to_all":
        return AllToAll(axis)
    if name not in EXCHANGES:
        raise BackendUnsupported(f"exchange {name!r} is unknown; use {', '.join(EXCHANGES)}")
    raise BackendUnsupported(
        f'exchange {name!r} has no body in this version; set exchange = "all_to_all"'
    )
