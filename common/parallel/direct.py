"""Direct: the exchange of decode batches by stores into other ranks' memory, without the host.

Shapes depend on the batch alone and nothing waits for the host, so a captured pass holds it. For
ranks of one host (`window.py`); a row travels once for each expert that it chose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from common.errors import BackendUnsupported
from common.ops.exchange import Layout
from common.parallel.collectives import Axis
from common.parallel.exchange import Arrived
from common.parallel.placement import Routes
from common.parallel.window import Window, open_window


@dataclass(frozen=True, slots=True, kw_only=True)
class InPlace(Arrived):
    """Rows as they lie in the window; places without one have an expert that does not exist."""

    keep: Tensor  # bool [N]
    wanted: Tensor  # int32 [ranks * places]


class Direct:
    """One rank's end; see `common.parallel.exchange.Exchange`."""

    recordable = True

    def __init__(self, rank: int, window: Window, layout: Layout, experts: int) -> None:
        """`experts` are this rank's places, the first number that is no expert's."""
        self._rank, self._windows, self._layout = rank, window.addresses, layout
        self._experts, own = experts, window.own
        self._window = own
        count = layout.ranks * layout.places
        self._wanted = own[layout.wanted :].view(torch.int32)[:count]
        self._inbox = self._rows(layout.inbox, count)
        self._home = self._rows(layout.home, layout.places)
        self._rounds = torch.zeros(2, dtype=torch.int32, device=own.device)

    def dispatch(
        self, rows: Tensor, ids: Tensor, keep: Tensor, table: Routes
    ) -> Callable[[], Arrived]:
        """See `Exchange`.

        Raises:
            BackendUnsupported: the batch exceeds the window.
        """
        count, top = ids.shape
        if count * top > self._layout.places:
            raise BackendUnsupported(
                f"{count} rows of {top} choices exceed the direct exchange's window of "
                f"{self._layout.places} places; raise decode.max_batch, or set "
                'decode.exchange = "all_to_all"'
            )
        from common.ops.exchange import triton

        spread = torch.arange(count, device=ids.device).unsqueeze(1) + self._rank
        share, local = table.find(ids, spread)
        rows = rows.contiguous()
        triton.send(rows, share, local, keep, self._windows, self._rank, self._layout)

        def wait() -> Arrived:
            triton.meet(self._windows, self._rounds, self._rank, self._layout, phase=0)
            none = torch.where(self._wanted < 0, self._experts, self._wanted)
            return InPlace(
                rows=self._inbox,
                local=none.to(torch.int64),
                shape=(count, top),
                keep=keep,
                wanted=self._wanted,
            )

        return wait

    def combine(self, outputs: Tensor, arrived: Arrived, weights: Tensor) -> Tensor:
        """See `Exchange`."""
        from common.ops.exchange import triton

        assert isinstance(arrived, InPlace)
        triton.answer(outputs.contiguous(), arrived.wanted, self._windows, self._layout)
        triton.meet(self._windows, self._rounds, self._rank, self._layout, phase=1)
        return triton.add_up(self._home, weights, arrived.keep)

    def check(self) -> None:
        """Nothing to look at: a pass that lacks a rank does not end."""

    def _rows(self, offset: int, count: int) -> Tensor:
        layout = self._layout
        size = count * layout.width * layout.dtype.itemsize
        part = self._window[offset : offset + size].view(layout.dtype)
        return part.view(count, layout.width)


def open_direct(
    axis: Axis, *, rows: int, top: int, width: int, dtype: torch.dtype, experts: int,
    device: torch.device,
) -> Direct:  # fmt: skip
    """Share windows for passes of at most `rows` rows a rank; all ranks call this together.

    Raises:
        BackendUnsupported: as of `open_window`, or rows are of a dtype that is not moved.
    """
    if dtype not in (torch.bfloat16, torch.float32):
        raise BackendUnsupported(f'exchange "direct" moves bfloat16 or float32, not {dtype}')
    layout = Layout(ranks=axis.size, places=rows * top, width=width, dtype=dtype)
    return Direct(axis.index, open_window(axis, layout.size, device), layout, experts)
