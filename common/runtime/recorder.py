"""Recorder: work on fixed tensors, done again: as a CUDA graph, or, elsewhere, by running it.

Knows nothing of what the work is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

WARM = 2  # passes before a capture: kernels are compiled and libraries set up
Call = Callable[[], object]


class Recorder(Protocol):
    """Turns work on fixed tensors into something that does it again."""

    def record(self, work: Call) -> Call:
        """`work` may run any number of times meanwhile."""


class Eager:
    """Runs the work itself each time."""

    def record(self, work: Call) -> Call:
        """See `Recorder`."""
        work()
        return work


class Cuda:
    """Captures the work; all graphs share one pool of memory, since one runs at a time."""

    def __init__(self) -> None:
        """Begin with an empty pool."""
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Call) -> Call:
        """See `Recorder`."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM):
                work()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads may ask the device things meanwhile: the transfer agent's does.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work()
        return graph.replay


def settle(logits: Tensor) -> None:
    """Wait until the pass that these logits are of has ended."""
    if logits.is_cuda:
        torch.cuda.current_stream(logits.device).synchronize()
