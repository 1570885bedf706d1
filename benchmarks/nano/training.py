"""One training run: the schedule, and the step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from benchmarks.nano.layers import Moe
from benchmarks.nano.network import Network, loss
from benchmarks.nano.optimiser import Muon, split
from benchmarks.nano.packing import Batch

WARM_STEPS = 100


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What changes over a run, by the share of it that is done (`progress`, 0 to 1)."""

    matrix_rate: float = 0.02
    other_rate: float = 2e-3
    flat: float = 0.35  # until here the rate stays
    rounded_from: float = 0.7  # from here on the experts are rounded to MXFP4
    data_from: float = 0.0  # where in the data's curriculum the run starts

    def rate(self, progress: float, step: int) -> float:
        """Factor of the learning rates: warm-up by steps, then flat, then half a cosine to 2 %."""
        fall = max(0.0, progress - self.flat) / (1 - self.flat)
        return min(1.0, (step + 1) / WARM_STEPS) * (0.02 + 0.49 * (1 + math.cos(math.pi * fall)))

    def bias_rate(self, progress: float) -> float:
        """How far a step moves the bias of an expert's choice toward even load."""
        return 2e-3 if progress < 0.5 else 5e-4 if progress < 0.9 else 0.0

    def data(self, progress: float) -> float:
        """Place in the data's curriculum."""
        return self.data_from + (1 - self.data_from) * progress


@dataclass(frozen=True)
class Report:
    """What one step saw, on the device."""

    loss: Tensor
    accuracy: Tensor  # share of the tokens to be learnt whose arg max was right
    loads: Tensor  # tokens by MoE layer and expert


class Trainer:
    """A network, its optimisers, and one step at a time."""

    def __init__(self, network: Network, schedule: Schedule, device: torch.device) -> None:
        self.network = network.to(device)
        self._schedule, self._device = schedule, device
        self._dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._rounded = torch.zeros((), device=device)
        self._steps = count()
        parts = split(network)
        self._muon = Muon(parts.matrices)
        self._others = [*parts.tables, *parts.vectors]
        groups = [
            {"params": parts.tables, "base": 2 * schedule.other_rate},
            {"params": parts.vectors, "base": schedule.other_rate},
        ]
        fused = device.type == "cuda"
        self._adam = torch.optim.AdamW(
            groups,
            lr=schedule.other_rate,
            betas=(0.9, 0.97),
            eps=1e-10,
            weight_decay=0.0,
            fused=fused,
        )
        moes = [module for module in network.modules() if isinstance(module, Moe)]
        self._biases = [moe.gate.e_score_correction_bias for moe in moes]
        self._captured: tuple[torch.cuda.CUDAGraph, Batch, Report] | None = None

    def step(self, batch: Batch, progress: float) -> Report:
        """Forward, backward and one move of every parameter."""
        self._rounded.fill_(float(progress >= self._schedule.rounded_from))
        report = self._gradients(batch)
        scale = self._schedule.rate(progress, next(self._steps))
        torch.nn.utils.clip_grad_norm_(self._others, 1.0, foreach=True)
        for group in self._adam.param_groups:
            group["lr"] = group["base"] * scale
        self._adam.step()
        self._muon.step(self._schedule.matrix_rate * scale)
        with torch.no_grad():
            loads = report.loads
            toward = torch.sign(loads.mean(1, keepdim=True) - loads)
            for bias, move in zip(self._biases, toward, strict=True):
                bias.add_(move, alpha=self._schedule.bias_rate(progress))
        return report

    def capture(self, batch: Batch) -> None:
        """Record forward and backward as a CUDA graph; later batches must have this one's shape.

        About 6,000 small kernels a step would otherwise wait for Python.
        """
        static = batch.to(self._device)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._backward(static)
        torch.cuda.current_stream().wait_stream(side)
        self.network.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            report = self._backward(static)
        self._captured = graph, static, report

    def _gradients(self, batch: Batch) -> Report:
        if self._captured is None:
            self.network.zero_grad(set_to_none=True)
            return self._backward(batch.to(self._device))
        graph, static, report = self._captured
        for name, value in vars(batch).items():
            getattr(static, name).copy_(value, non_blocking=True)
        graph.replay()  # writes the gradients anew
        return report

    def _backward(self, batch: Batch) -> Report:
        hidden, loads = self.network(batch, self._rounded, self._dtype)
        value, accuracy = loss(self.network.logits(hidden), batch)
        value.backward()
        return Report(value.detach(), accuracy.detach(), loads.detach())


def run(trainer: Trainer, batches: Iterator[Batch], steps: int) -> list[Report]:
    """`steps` steps in a row; for short runs and tests."""
    return [trainer.step(next(batches), i / steps) for i in range(steps)]
