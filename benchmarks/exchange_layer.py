"""One layer's feed-forward half over tensor ranks that hold whole experts, its work laid out
three ways.

`whole`: every rank has all rows, and both sums go to all. `spread`: each keeps its own rows, with
the shared expert whole. `waiting`: as whole, but the shared expert computes after the rows came.
The sum behind the mixer is in each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from common.config.spec import CHUNK, MoeSpec
from common.model.moe import feed_forward
from common.model.run import Run
from common.ops.act import Activation
from common.ops.moe.stack import ExpertStack
from common.ops.plan import Chunks
from common.parallel.collectives import open_axes
from common.parallel.exchange import AllToAll
from common.parallel.mesh import Mesh
from common.parallel.placement import even, routes
from common.parallel.team import Team
from common.weights.tree import MlpWeights, MoeWeights

if TYPE_CHECKING:
    from benchmarks.exchange import Bench

SMALL = {"hidden": 1024, "latent": 512, "width": 256, "experts": 32, "top": 4}
TRUE = {"hidden": 7168, "latent": 3584, "width": 3072, "experts": 896, "top": 16}
SITU = Activation(kind="situ", beta=4.0, linear_beta=25.0)


class Waiting(AllToAll):
    """The definition without overlap."""

    def dispatch(self, *args: Any) -> Callable[[], Any]:
        arrived = super().dispatch(*args)()
        return lambda: arrived


class Layer:
    """One rank's part of the layer."""

    def __init__(self, bench: Bench, way: str, rows: int) -> None:
        self.sizes = TRUE if bench.args.devices else SMALL
        self.bench, self.rows, spread = bench, rows, way == "spread"
        self.mesh = Mesh(tensor=bench.ranks, expert=bench.ranks, spread=spread)
        axes = open_axes(self.mesh, bench.rank, bench.prefixed(way), backend=bench.backend)
        experts, device = self.sizes["experts"], bench.device
        self.dtype = torch.bfloat16 if bench.args.devices else torch.float32
        exchange = Waiting if way == "waiting" else AllToAll
        team = Team(
            mesh=self.mesh,
            seat=self.mesh.seat(bench.rank),
            tensor=axes["tensor"],
            exchange=exchange(axes["expert"]),
            tables=(routes(even(experts, bench.ranks), experts, device),),
            load=torch.zeros(1, experts, dtype=torch.int64, device=device),
        )
        chunks = rows // CHUNK
        one = torch.zeros(1, dtype=torch.int64, device=device)
        plan = Chunks(
            slots=one,
            first=torch.tensor([0, chunks], device=device),
            starts=one,
            lengths=torch.full((chunks,), CHUNK, device=device),
            tables=torch.arange(chunks, device=device)[None],
        )
        none: Any = None
        self.run = Run(
            plan=plan, memory=none, ops=bench.ops(), tile=None, rows=rows, real=rows, team=team
        )
        self.weights, self.spec = self._weights(spread), self._spec()
        draw = torch.Generator().manual_seed(1)
        x = torch.randn(rows, self.sizes["hidden"], generator=draw)
        self.x = (x / bench.ranks).to(device, self.dtype)

    def __call__(self) -> Tensor:
        """From the mixer's parts to what the next mixer reads: all rows."""
        x = self.run.reduce(self.x)
        return self.run.gather(feed_forward(x, self.weights, self.spec, SITU, self.run))

    def _spec(self) -> Any:
        moe = MoeSpec(
            num_experts=self.sizes["experts"],
            top_k=self.sizes["top"],
            num_shared=1,
            width=self.sizes["width"],
            latent=self.sizes["latent"],
            latent_norm=False,
            renormalize=True,
            scaling=1.0,
            num_groups=1,
            top_groups=1,
        )

        class Spec:
            eps = 1e-5

        Spec.moe = moe
        return Spec

    def _weights(self, spread: bool) -> MoeWeights:
        draw = torch.Generator(self.bench.device).manual_seed(3)
        hidden, latent, width, experts, _ = self.sizes.values()

        def normal(*shape: int, dtype: torch.dtype | None = None) -> Tensor:
            made = torch.randn(shape, generator=draw, device=self.bench.device)
            return (made * 0.02).to(dtype or self.dtype)

        router, bias = normal(experts, hidden, dtype=torch.float32), torch.zeros(experts)
        down, up = normal(latent, hidden), normal(hidden, latent)
        gate_up, back = normal(2 * width, hidden), normal(hidden, width)
        ways = 1 if spread else self.bench.ranks
        own = slice(width // ways * (self.bench.rank % ways), None)
        gate, over = (part[own][: width // ways] for part in gate_up.split(width))
        shared = MlpWeights(
            gate_up=torch.cat([gate, over]), down=back[:, own][:, : width // ways].contiguous()
        )
        return MoeWeights(
            router=router,
            bias=bias.to(self.bench.device),
            latent_down=down,
            latent_norm=None,
            latent_up=up,
            experts=self._experts(normal),
            shared=shared,
        )

    def _experts(self, normal: Callable[..., Tensor]) -> ExpertStack:
        _, latent, width, experts, _ = self.sizes.values()
        each = experts // self.bench.ranks
        if not self.bench.args.devices:
            w13, w2 = normal(experts, 2 * width, latent), normal(experts, latent, width)
            own = slice(each * self.bench.rank, each * (self.bench.rank + 1))
            return ExpertStack(w13=w13[own], w2=w2[own])

        def packed(*shape: int, low: int = 0, high: int = 256) -> Tensor:
            empty = torch.empty(shape, dtype=torch.uint8, device=self.bench.device)
            return empty.random_(low, high)

        return ExpertStack(
            w13=packed(each, 2 * width, latent // 2),
            w2=packed(each, latent, width // 2),
            w13_scale=packed(each, 2 * width, latent // 32, low=116, high=121),
            w2_scale=packed(each, latent, width // 32, low=116, high=121),
        )


def measure(bench: Bench, rows: int) -> None:
    """All ways; on the host also whether they agree (on a GPU packed experts differ by way)."""
    layers = {way: Layer(bench, way, rows) for way in ("whole", "spread", "waiting")}
    wanted = layers["whole"]()
    times: dict[str, list[float]] = {way: [] for way in layers}
    for _ in range(3):  # in turns, so that a noisy moment meets all
        for way, layer in layers.items():
            times[way] += bench.time(layer, 10)
    for way, layer in layers.items():
        off = float((layer() - wanted).abs().max() / wanted.abs().max())
        more = {} if bench.args.devices else {"off": float(f"{off:.2g}")}
        bench.say({"what": "layer", "way": way, "rows": rows}, times[way], **more)
