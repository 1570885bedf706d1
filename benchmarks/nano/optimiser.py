"""Muon for the matrices inside the network; which parameters it gets, and what AdamW gets."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# Coefficients of five Newton-Schulz steps, each x <- a x + (b s + c s^2) x with s = x x^T. They
# bring every singular value near one, fast at first and precise at the end.
STEPS = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
TABLES = ("embed_tokens", "lm_head", "pos_emb")
# Matrices that are not maps between hidden spaces.
VECTORS = ("conv1d", "res_proj", ".b_proj", ".gate.weight", "patch_embed")


@dataclass(frozen=True)
class Split:
    """Trained parameters by how they are trained."""

    matrices: list[Tensor]  # Muon
    tables: list[Tensor]  # AdamW, twice the rate
    vectors: list[Tensor]  # AdamW


def split(network: nn.Module) -> Split:
    """Sort a network's parameters; those that want no gradient are left out."""
    found = Split([], [], [])
    for name, parameter in network.named_parameters():
        if not parameter.requires_grad:
            continue
        if any(part in name for part in TABLES):
            found.tables.append(parameter)
        elif parameter.ndim < 2 or any(part in name for part in VECTORS):
            found.vectors.append(parameter)
        else:
            found.matrices.append(parameter)
    return found


def orthogonal(x: Tensor) -> Tensor:
    """The nearest (semi-)orthogonal matrices, roughly; x [N, short, long]. bf16 on a GPU."""
    x = x.bfloat16() if x.is_cuda else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for a, b, c in STEPS:
        square = x @ x.mT
        x = a * x + (b * square + c * (square @ square)) @ x
    return x.float()


class Muon:
    """Momentum, then the nearest orthogonal matrix; matrices of one shape go together.

    Tall matrices are handled transposed, and their update grows with the root of their aspect.
    Parameters of three dimensions are stacks of matrices.
    """

    def __init__(self, matrices: list[Tensor], *, momentum: float = 0.95, decay: float = 0.02):
        self._momentum, self._decay = momentum, decay
        self._groups: dict[tuple[int, int], list[Tensor]] = {}
        for matrix in matrices:
            short, long = sorted(matrix.shape[-2:])
            self._groups.setdefault((short, long), []).append(matrix)
        self._memory = {
            shape: torch.zeros_like(torch.cat([_flat(m) for m in group]))
            for shape, group in self._groups.items()
        }

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Move every matrix along its gradient."""
        for (short, long), group in self._groups.items():
            gradient = torch.cat([_flat(m.grad) for m in group if m.grad is not None])
            memory = self._memory[short, long]
            memory.lerp_(gradient, 1 - self._momentum)
            update = orthogonal(gradient.lerp(memory, self._momentum))
            counts = [m.numel() // (short * long) for m in group]
            for matrix, part in zip(group, update.split(counts), strict=True):
                if matrix.shape[-2] > matrix.shape[-1]:
                    part = part.mT * math.sqrt(long / short)
                matrix.mul_(1 - rate * self._decay).sub_(part.reshape(matrix.shape), alpha=rate)


def _flat(matrix: Tensor) -> Tensor:
    """[..., rows, columns] to [N, short, long]."""
    rows, columns = matrix.shape[-2:]
    return (matrix.mT if rows > columns else matrix).reshape(-1, *sorted((rows, columns)))
