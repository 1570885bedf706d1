"""Numbers to a device and back, through pinned memory, in the order of the current stream.

A copy from pageable memory may wait for what the stream has still to do, and one into it wakes the
host later; torch keeps pinned memory until its copy was made.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def on_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """int64 [len(numbers)] on `device`; the host waits for nothing."""
    held = torch.empty(len(numbers), dtype=torch.int64, pin_memory=device.type == "cuda")
    held.numpy()[:] = numbers
    return held.to(device, non_blocking=True)


def on_host(numbers: Tensor) -> Tensor:
    """The same numbers on the host, which waits for what the stream has still to do."""
    if not numbers.is_cuda:
        return numbers
    held = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    held.copy_(numbers, non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    done.synchronize()
    return held
