"""Numbers sent to a device in the order of its stream, without the host waiting for either.

A copy from pageable memory may wait for what the stream has still to do; from pinned memory it does
not, and torch keeps the pinned memory until the copy was made.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor


def on_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """int64 [len(numbers)] on `device`."""
    held = torch.empty(len(numbers), dtype=torch.int64, pin_memory=device.type == "cuda")
    if numbers:
        held.copy_(torch.frombuffer(array("q", numbers), dtype=torch.int64))
    return held.to(device, non_blocking=True)
