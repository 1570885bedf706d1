"""The exchange of decode batches by NIXL's expert-parallel kernels, over NVLink and RDMA.

The package's low-latency kernels send rows to their experts, packed by expert, and bring outputs
back; they wait on the device, so a captured pass holds them. What they do not take (a width, many
choices) is made to fit, and outputs are added up as the definition does:
`common/ops/exchange/packing.py`.

A rank that does not answer within `TIMEOUT_MS` is left out by the kernels from then on, in silence.
Here its absence makes every output NaN, and `check` ends the group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from common.errors import BackendUnsupported, RoomLost
from common.ops.exchange.packing import Packing
from common.parallel.exchange import Arrived
from common.parallel.placement import Routes

PACKAGE, MODULE = "nixl-cu13", "nixl_ep_cu13"
TIMEOUT_MS = 30_000  # of a wait for one rank in one kernel
INSTEAD = 'set decode.exchange = "all_to_all", or "direct" where all ranks are on one host'


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed(Arrived):
    """Rows without gaps, and what the way back needs."""

    came: Tensor  # [experts, slots, wide], as the library laid the rows
    place: Tensor  # int32 [places], of each row in it; -1: no row
    chosen: Tensor  # int32 [N * parts, each]
    handle: Any  # the library's


class NixlEp:
    """One rank's end; see `common.parallel.exchange.Exchange`."""

    recordable = True

    def __init__(self, buffer: Any, rank: int, packing: Packing, device: torch.device) -> None:
        """`buffer` is the package's, connected to all ranks."""
        self._buffer, self._rank, self._packing = buffer, rank, packing
        self._silent = torch.zeros(packing.ranks, dtype=torch.int32, device=device)
        self._told = torch.zeros(packing.ranks, dtype=torch.int32)
        if device.type == "cuda":
            self._told = self._told.pin_memory()
        self._home = buffer.get_local_buffer_tensor(
            torch.bfloat16,
            torch.Size([packing.returns, packing.stride]),
            offset=packing.home,
            use_rdma_buffer=True,
        )
        # No row is added up by the package: outputs are only wanted where they came back.
        self._no_ids = torch.empty(0, packing.each, dtype=torch.int32, device=device)
        self._no_weights = torch.empty(0, packing.each, device=device)

    def dispatch(
        self, rows: Tensor, ids: Tensor, keep: Tensor, table: Routes
    ) -> Callable[[], Arrived]:
        """See `Exchange`.

        Raises:
            BackendUnsupported: the batch exceeds the registered buffer.
        """
        count, most = len(ids), self._packing.rows
        if count > most:
            raise BackendUnsupported(
                f"{count} rows exceed the nixl_ep exchange's buffer, which was registered for "
                f"{most}; raise decode.max_batch, or {INSTEAD}"
            )
        spread = torch.arange(count, device=ids.device).unsqueeze(1) + self._rank
        share, local = table.find(ids, spread)
        return self._begin(rows.contiguous(), share, local, keep)

    def _begin(
        self, rows: Tensor, share: Tensor, local: Tensor, keep: Tensor
    ) -> Callable[[], Packed]:
        from common.ops.exchange import triton_packing

        p, shape = self._packing, (len(rows), share.shape[1])
        out, chosen = triton_packing.leave(rows, share, local, keep, p)
        came, counts, handle, _, arrive = self._buffer.dispatch(
            out, chosen, p.cap, p.ranks * p.experts, use_fp8=False, return_recv_hook=True
        )

        def wait(sent: tuple[Tensor, Tensor] = (out, chosen)) -> Packed:  # they live until then
            arrive()
            found, where, place = triton_packing.unpack(came, counts, p)
            return Packed(
                rows=found,
                local=where,
                shape=shape,
                came=came,
                place=place,
                chosen=sent[1],
                handle=handle,
            )

        return wait

    def combine(self, outputs: Tensor, arrived: Arrived, weights: Tensor) -> Tensor:
        """See `Exchange`; NaN everywhere when a rank fell silent."""
        from common.ops.exchange import triton_packing

        assert isinstance(arrived, Packed)
        self._send_back(outputs, arrived, self._no_ids, self._no_weights)
        self._buffer.query_mask_buffer(self._silent)
        return triton_packing.add_up(
            self._home, arrived.chosen, weights.contiguous(), self._silent, self._packing
        )

    def prove(self) -> None:
        """One round of known rows over all ranks, which call this together.

        Raises:
            BackendUnsupported: a rank did not answer, or outputs do not lie where they should.
        """
        from common.ops.exchange import triton_packing

        p, device = self._packing, self._silent.device
        count, every = min(p.rows, 4), p.ranks * p.experts
        rows = torch.arange(count * p.width, device=device).view(count, -1) % 251 - 125
        first = torch.arange(count, device=device).unsqueeze(1) * 3 + self._rank
        ids = (first + torch.arange(p.top, device=device) * max(1, every // p.top)) % every
        weights = (torch.arange(p.top, device=device).expand(count, -1) + 1) / p.top
        keep = torch.ones(count, dtype=torch.bool, device=device)
        arrived = self._begin(rows.to(torch.bfloat16) / 64, ids // p.experts, ids % p.experts, keep)
        came = arrived()
        factor = 1 + (came.local + self._rank * p.experts) / every
        theirs = self._send_back(
            (came.rows * factor.unsqueeze(1)).to(torch.bfloat16),
            came,
            came.chosen,
            torch.nn.functional.pad(weights, (0, p.parts * p.each - p.top)).view(-1, p.each),
        )
        self._buffer.query_mask_buffer(self._silent)
        ours = triton_packing.add_up(self._home, came.chosen, weights, self._silent, p)
        theirs = theirs.view(count, p.parts, p.wide)[..., : p.width].float().sum(1)
        if not torch.allclose(ours.float(), theirs, rtol=2**-6, atol=2**-5):
            raise BackendUnsupported(
                'exchange "nixl_ep" found outputs of a first round elsewhere than where '
                f"{PACKAGE} 1.4 and 1.5 put them, or rank {self._rank} had no answer from ranks "
                f"{self._silent.nonzero().flatten().tolist()}; {INSTEAD}"
            )

    def _send_back(self, outputs: Tensor, arrived: Packed, ids: Tensor, weights: Tensor) -> Tensor:
        """Outputs to where their rows came from; returns the package's sums for these choices."""
        from common.ops.exchange import triton_packing

        triton_packing.pack(outputs.contiguous(), arrived.place, arrived.came, self._packing)
        sums, _, arrive = self._buffer.combine(
            arrived.came, ids, weights, arrived.handle, return_recv_hook=True
        )
        arrive()
        return sums  # type: ignore[no-any-return]

    def check(self) -> None:
        """See `Exchange`."""
        if bool(self._told.any()):
            silent = self._told.nonzero().flatten().tolist()
            raise RoomLost(
                f"ranks {silent} of an expert group did not answer rank {self._rank} within "
                f"{TIMEOUT_MS / 1000:g} s on the device; what was computed since is void, and the "
                "group ends"
            )
        self._told.copy_(self._silent, non_blocking=True)

    def close(self) -> None:
        """Give the registered memory back; all ranks, after their last round."""
        self._buffer.destroy()
