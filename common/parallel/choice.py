"""Which body an exchange has: the one that the settings name, or a sentence why it cannot be.

The choice is made once at start; nothing is tried, and nothing falls back.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch

from common.errors import BackendUnsupported
from common.parallel.collectives import Axis
from common.parallel.direct import open_direct
from common.parallel.exchange import AllToAll, Exchange

EXCHANGES = ("all_to_all", "direct", "deep_ep", "nixl_ep", "mega_moe")
PACKAGES = {"deep_ep": "deep_ep", "nixl_ep": "nixl_ep", "mega_moe": "deep_gemm"}
DEEP_EP_CHOICES = 11  # most of one row in DeepEP's low-latency kernels
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
    if name == "direct":
        return open_direct(
            axis, rows=rows, top=top, width=width, dtype=dtype, experts=experts, device=device
        )
    if name not in EXCHANGES:
        raise BackendUnsupported(f"exchange {name!r} is unknown; use {', '.join(EXCHANGES)}")
    raise BackendUnsupported(
        f'exchange "{name}": {_reason(name, top, device)}; set exchange = "all_to_all", or '
        '"direct" where all ranks are on one host'
    )


def _reason(name: str, top: int, device: torch.device) -> str:
    if device.type != "cuda":
        return f"its kernels are for CUDA devices, and the model is on {device.type}"
    if name == "mega_moe":
        major, minor = torch.cuda.get_device_capability(device)
        if major != BLACKWELL:
            return f"it is for SM100 (B200, B300), and this device is SM{major}{minor}"
    if name == "deep_ep" and top > DEEP_EP_CHOICES:
        return f"its kernels take {DEEP_EP_CHOICES} choices a row at most, and this model has {top}"
    if find_spec(PACKAGES[name]) is None:
        return f"the package {PACKAGES[name]} is not installed"
    return "it has no body in this version"
