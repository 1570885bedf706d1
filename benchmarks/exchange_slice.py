"""The slice of `benchmarks.slice` as one of several lanes: own requests, own share of experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from benchmarks.slice import SMALL, SPEC, memory, normal, weights
from benchmarks.step import step_plan
from common.config.spec import TextSpec
from common.model.batch import Memory
from common.model.text import TextModel
from common.ops.plan import Steps
from common.parallel.collectives import SOLO
from common.parallel.nixl_ep import NixlEp
from common.parallel.placement import even, routes
from common.parallel.team import Team
from common.weights.tree import MoeWeights, TextWeights

if TYPE_CHECKING:
    from benchmarks.exchange import Bench

_held: dict[TextSpec, TextWeights] = {}


def shrunk(bench: Bench) -> TextSpec:
    """The slice, of true width unless a trial was asked for."""
    return SMALL if bench.args.small else SPEC


def share_of_weights(bench: Bench, spec: TextSpec) -> TextWeights:
    """The slice's weights with a share of its experts, and a router for all of them; made once."""
    if spec not in _held:
        torch.manual_seed(0)
        count = spec.moe.num_experts
        moe = dataclasses.replace(spec.moe, num_experts=count // bench.ranks)
        made = weights(dataclasses.replace(spec, moe=moe))
        router = normal(count, spec.hidden, dtype=torch.float32)
        bias = normal(count, dtype=torch.float32)
        layers = [
            dataclasses.replace(one, ffn=dataclasses.replace(one.ffn, router=router, bias=bias))
            if isinstance(one.ffn, MoeWeights)
            else one
            for one in made.layers
        ]
        _held[spec] = dataclasses.replace(made, layers=tuple(layers))
    return _held[spec]


def lane_team(bench: Bench, spec: TextSpec, exchange: str, batch: int, dtype: torch.dtype) -> Team:
    """This rank's team over one exchange, as a lane of its own."""
    device, count, layers = bench.device, spec.moe.num_experts, spec.moe_layers
    moe = spec.moe
    return Team(
        mesh=bench.mesh,
        seat=bench.mesh.seat(bench.rank),
        tensor=SOLO,
        exchange=bench.open(
            exchange,
            batch,
            top=moe.top_k,
            width=moe.latent or spec.hidden,
            experts=-(-count // bench.ranks),
            dtype=dtype,
        ),
        tables=tuple(routes(even(count, bench.ranks), count, device) for _ in layers),
        load=torch.zeros(len(layers), count, dtype=torch.int64, device=device),
    )


def lane_pools(
    bench: Bench, spec: TextSpec, batch: int, context: int
) -> tuple[torch.Tensor, Steps, Memory]:
    """This rank's tokens, where its requests lie, and their memory."""
    plan = step_plan(batch, context)
    pools = memory(spec, batch, int(plan.tables.max()) + 1)
    draw = torch.Generator().manual_seed(bench.rank)
    ids = torch.randint(0, spec.vocab, (batch,), generator=draw).to(bench.device)
    return ids, plan, pools


class Lane:
    """One rank's requests, and its model over either exchange."""

    def __init__(self, bench: Bench, batch: int, context: int) -> None:
        self._bench, self._batch, self._spec = bench, batch, shrunk(bench)
        self._models: dict[str, TextModel] = {}
        self._ids, self._plan, self._memory = lane_pools(bench, self._spec, batch, context)

    def model(self, name: str) -> TextModel:
        """The slice over an exchange, opened by all ranks together when it is first asked for."""
        if name not in self._models:
            bench, spec = self._bench, self._spec
            team = lane_team(bench, spec, name, self._batch, torch.bfloat16)
            held = share_of_weights(bench, spec)
            self._models[name] = TextModel(spec, held, ops=bench.ops(), exact=False, team=team)
        return self._models[name]

    def forget(self, name: str) -> None:
        """Give an exchange's memory back; all ranks together, after their last step over it."""
        team = self._models.pop(name).team
        if team is not None and isinstance(team.exchange, NixlEp):
            team.exchange.close()
        torch.cuda.empty_cache()

    def fresh(self) -> None:
        """Empty the states, so that a pass gives what the one before gave."""
        self._memory.state.zero_()
        self._memory.conv.zero_()

    def call(self, name: str) -> Callable[[], torch.Tensor]:
        """One step: logits of every row."""
        model = self.model(name)
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
