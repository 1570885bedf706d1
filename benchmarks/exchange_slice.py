"""The slice of `benchmarks.slice` as one of several lanes: own requests, own share of experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from benchmarks.slice import SPEC, memory, normal, weights
from benchmarks.step import step_plan
from common.model.text import TextModel
from common.parallel.collectives import SOLO
from common.parallel.placement import even, routes
from common.parallel.team import Team
from common.weights.tree import MoeWeights, TextWeights

if TYPE_CHECKING:
    from benchmarks.exchange import Bench

_held: dict[int, TextWeights] = {}


def share_of_weights(ranks: int) -> TextWeights:
    """The slice's weights with a share of its experts, and a router for all of them; made once."""
    if not _held:
        torch.manual_seed(0)
        count = SPEC.moe.num_experts
        moe = dataclasses.replace(SPEC.moe, num_experts=count // ranks)
        made = weights(dataclasses.replace(SPEC, moe=moe))
        router = normal(count, SPEC.hidden, dtype=torch.float32)
        bias = normal(count, dtype=torch.float32)
        layers = [
            dataclasses.replace(one, ffn=dataclasses.replace(one.ffn, router=router, bias=bias))
            if isinstance(one.ffn, MoeWeights)
            else one
            for one in made.layers
        ]
        _held[0] = dataclasses.replace(made, layers=tuple(layers))
    return _held[0]


class Lane:
    """One rank's requests, and its model over either exchange."""

    def __init__(self, bench: Bench, batch: int, context: int) -> None:
        device, count = bench.device, SPEC.moe.num_experts
        held, ops = share_of_weights(bench.ranks), bench.ops()
        self._models: dict[str, TextModel] = {}
        for name in ("all_to_all", "direct"):
            team = Team(
                mesh=bench.mesh,
                seat=bench.mesh.seat(bench.rank),
                tensor=SOLO,
                exchange=bench.open(name, batch),
                tables=tuple(
                    routes(even(count, bench.ranks), count, device) for _ in SPEC.moe_layers
                ),
                load=torch.zeros(len(SPEC.moe_layers), count, dtype=torch.int64, device=device),
            )
            self._models[name] = TextModel(SPEC, held, ops=ops, exact=False, team=team)
        self._plan = step_plan(batch, context)
        pages = int(self._plan.tables.max()) + 1
        self._memory = memory(SPEC, batch, pages)
        draw = torch.Generator().manual_seed(bench.rank)
        self._ids = torch.randint(0, SPEC.vocab, (batch,), generator=draw).to(device)

    def fresh(self) -> None:
        """Empty the states, so that a pass gives what the one before gave."""
        self._memory.state.zero_()
        self._memory.conv.zero_()

    def call(self, name: str) -> Callable[[], torch.Tensor]:
        """One step: logits of every row."""
        model = self._models[name]
        return lambda: model.step(self._ids, self._plan, self._memory)

    def eager(self, name: str) -> torch.Tensor:
        self.fresh()
        return self.call(name)()

    def captured(self, name: str) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """A graph of one step, and where its logits will be."""
        self.fresh()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = self.call(name)()
        return graph, out
