"""What the tests of Triton bodies share: where they run, and plans to run on.

Without a GPU the kernels run in Triton's interpreter, in fp32 and on small shapes. The interpreter
turns one-element arrays into numbers, which numpy refuses from 2.4 on.
"""

from __future__ import annotations

import os

import numpy
import pytest
import torch

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported
pytest.importorskip("triton", reason="Triton is not installed")
if not GPU and tuple(int(part) for part in numpy.__version__.split(".")[:2]) >= (2, 4):
    pytest.skip("Triton's interpreter needs numpy below 2.4", allow_module_level=True)

from common.ops.plan import Chunks, Steps  # noqa: E402


def chunk_plan(lengths: list[int], slots: list[int]) -> Chunks:
    """Shares of these lengths, one after another, that start from their slots."""
    first, rows = [0], []
    for length in lengths:
        rows += [min(64, length - at) for at in range(0, length, 64)]
        first.append(len(rows))

    def tensor(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, device=DEVICE)

    return Chunks(
        slots=tensor(slots),
        first=tensor(first),
        starts=tensor([0] * len(lengths)),
        lengths=tensor(rows),
        tables=tensor([0] * len(lengths)).unsqueeze(1),
    )


def step_plan(slots: list[int], starts: list[int], tables: list[list[int]]) -> Steps:
    """One token a share."""
    return Steps(
        slots=torch.tensor(slots, device=DEVICE),
        starts=torch.tensor(starts, device=DEVICE),
        tables=torch.tensor(tables, device=DEVICE),
    )


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Fresh numbers on the device the kernels run on."""
    return torch.randn(shape, device=DEVICE).to(dtype)


def nan_like(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Memory whose unwritten elements show."""
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def off_by(result: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference over the norm of what was wanted; NaN never passes a comparison."""
    return float((result.double() - wanted.double()).norm() / wanted.double().norm())
