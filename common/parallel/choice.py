"""Which body an exchange has: the one that the settings name, or a sentence why it cannot be.

The choice is made once at start; nothing is tried, and nothing falls back.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from common.errors import BackendUnsupported
from common.parallel.collectives import Axis
from common.parallel.direct import open_direct
from common.parallel.exchange import AllToAll, Exchange
from common.parallel.nixl_ep_open import open_nixl_ep

EXCHANGES = ("all_to_all", "direct", "nixl_ep", "deep_ep", "mega_moe")
BLACKWELL = 10  # MegaMoE's compute capability, and SiTU's inside a fused kernel


def open_exchange(
    name: str,
    axis: Axis,
    *,
    rows: int,
    top: int,
    width: int,
    experts: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Exchange:
    """The exchange that the settings name; all ranks of the axis call this together.

    Args:
        name: one of `EXCHANGES`.
        axis: the ranks that hold every expert once.
        rows: most rows of one rank in a pass.
        top: experts that a row chooses.
        width: values of a row.
        experts: places of this rank's share.
        dtype: of rows.
        device: of the model.

    Raises:
        BackendUnsupported: it is unknown, or cannot run here; the sentence says why and what to do.
    """
    if name == "all_to_all":
        return AllToAll(axis)
    if name in OPENERS:
        return OPENERS[name](
            axis, rows=rows, top=top, width=width, dtype=dtype, experts=experts, device=device
        )
    if name not in EXCHANGES:
        raise BackendUnsupported(f"exchange {name!r} is unknown; use {', '.join(EXCHANGES)}")
    raise BackendUnsupported(
        f'exchange "{name}": {_reason(name, device)}; set decode.exchange = "all_to_all", or '
        '"direct" where all ranks are on one host'
    )


OPENERS: dict[str, Callable[..., Exchange]] = {"direct": open_direct, "nixl_ep": open_nixl_ep}


def _reason(name: str, device: torch.device) -> str:
    if device.type != "cuda":
        return f"its kernels are for CUDA devices, and the model is on {device.type}"
    if name == "deep_ep":
        return (
            "it has no body: its package (sgl-deep-ep 0.1.2.post1) is pinned to torch 2.14.1 and "
            "needs NCCL 2.29 or later and NVSHMEM 3, beside which it was never tried"
        )
    major, minor = torch.cuda.get_device_capability(device)
    if major != BLACKWELL:
        return (
            "with packed experts and SiTU it is for SM100 (B200, B300), and this device is "
            f"SM{major}{minor}"
        )
    return (
        "it has no body: its buffer wants one of torch's own process groups, which ranks here do "
        "not make; docs/ranks.md says what a body owes"
    )
