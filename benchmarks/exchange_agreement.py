"""How far two exchanges are apart in the same step, and whether either is further from the truth.

The step of `benchmarks.exchange_slice` in bf16 over the all-to-all and over the direct exchange,
tiles free and fixed (`exact`), each beside the same step computed in fp32 by the ops' definitions
over the same weights; that one over the direct exchange as well. `plain` adds a row's outputs up as
the all-to-all does: product by product, where the direct exchange's kernel fuses product and sum.
Rows are counted whose experts were chosen otherwise in some layer: there logits jump, however small
the difference that turned a choice. `sums` are the first MoE layer's outputs, before any choice can
have changed its inputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.exchange_slice import lane_pools, lane_team, share_of_weights, shrunk
from common.model.batch import Memory
from common.model.text import TextModel
from common.ops.plan import Steps
from common.ops.table import REFERENCE, Ops
from common.parallel.direct import Direct
from common.parallel.exchange import Arrived
from common.weights.tree import TextWeights

if TYPE_CHECKING:
    from benchmarks.exchange import Bench


@dataclasses.dataclass(frozen=True)
class Seen:
    """What one way of computing the step gave."""

    logits: Tensor  # fp32 [rows, vocab]
    ids: tuple[Tensor, ...]  # int64 [rows, k] of each MoE layer
    sums: Tensor  # [rows, width] of the first MoE layer


class Step:
    """One rank's requests."""

    def __init__(self, bench: Bench, batch: int, context: int) -> None:
        self.bench, self.batch = bench, batch
        self.spec = shrunk(bench)
        self.ids, self.plan, self.pools = lane_pools(bench, self.spec, batch, context)

    def seen(self, way: str, ops: Ops, held: TextWeights, dtype: torch.dtype, exact: bool) -> Seen:
        """Compute it once, over fresh states; the way's first word is the exchange."""
        ids: list[Tensor] = []
        sums: list[Tensor] = []

        def route(*args: Any, **more: Any) -> tuple[Tensor, Tensor]:
            found: tuple[Tensor, Tensor] = ops.route(*args, **more)
            ids.append(found[0].clone())
            return found

        team = lane_team(self.bench, self.spec, way.split()[0], self.batch, dtype)
        exchange: Any = team.exchange
        combine = plainly(exchange) if "plain" in way else exchange.combine

        def keep(*args: Any) -> Tensor:
            sums.append(combine(*args).clone())
            return sums[-1]

        exchange.combine = keep
        model = TextModel(
            self.spec, held, ops=dataclasses.replace(ops, route=route), team=team, exact=exact
        )
        self.pools.state.zero_()
        self.pools.conv.zero_()
        pools = Memory(
            state=self.pools.state,
            conv=self.pools.conv.to(dtype),
            latent=self.pools.latent.to(dtype),
        )
        plan = Steps(slots=self.plan.slots, starts=self.plan.starts, tables=self.plan.tables)
        logits = model.step(self.ids, plan, pools)
        return Seen(logits=logits, ids=tuple(ids), sums=sums[0])


def plainly(direct: Direct) -> Callable[..., Tensor]:
    """The direct exchange's way back, summed by the definition's operations."""
    back = direct.combine

    def combine(outputs: Tensor, arrived: Arrived, weights: Tensor) -> Tensor:
        back(outputs, arrived, weights)
        count, top = weights.shape
        home = direct._home[: count * top].view(count, top, -1)
        total = weights[:, :1] * home[:, 0].float()
        for j in range(1, top):
            total = total + weights[:, j : j + 1] * home[:, j].float()
        return total.to(outputs.dtype)

    return combine


def in_fp32(held: TextWeights) -> TextWeights:
    """The same weights as fp32 values; packed experts stay."""

    def wide(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.float() if value.dtype == torch.bfloat16 else value
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return dataclasses.replace(
                value, **{f.name: wide(getattr(value, f.name)) for f in dataclasses.fields(value)}
            )
        return tuple(map(wide, value)) if isinstance(value, tuple) else value

    found: TextWeights = wide(held)
    return found


def apart(one: Seen, other: Seen) -> dict[str, Any]:
    """The largest difference of logits over the largest logit, in all and by unturned rows."""
    turned = torch.stack([(a != b).any(-1) for a, b in zip(one.ids, other.ids, strict=True)])
    rows, scale = turned.any(0), other.logits.abs().max()
    off = (one.logits - other.logits).abs().amax(-1) / scale
    sums = (one.sums.float() - other.sums.float()).abs()
    same = ~turned[0]  # the first MoE layer's own choices
    return {
        "off": float(f"{float(off.max()):.3g}"),
        "off_median_row": float(f"{float(off.median()):.3g}"),
        "off_unturned": float(f"{float(off[~rows].max()):.3g}") if (~rows).any() else None,
        "turned_rows": int(rows.sum()),
        "turned_by_layer": turned.sum(1).tolist(),
        "sums_off": float(f"{float(sums[same].max() / other.sums.float().abs().max()):.3g}"),
        "sums_differing": float(f"{float((sums[same] != 0).float().mean()):.3g}"),
    }


def measure(bench: Bench, batch: int, context: int) -> None:
    """Print how far each way is from the others; errors are the first rank's rows'."""
    step, held = Step(bench, batch, context), share_of_weights(bench, shrunk(bench))
    case = {"what": "agreement", "batch": batch, "context": context}
    names = ["all_to_all", "direct", "direct plain", "all_to_all exact", "direct exact"]
    names.append("direct exact plain")
    if not bench.args.devices:
        names = ["all_to_all"]
    ways = {}
    for name in names:
        exact = "exact" in name
        ways[name] = step.seen(name, bench.ops(exact=exact), held, torch.bfloat16, exact)
    for name in names:
        other = "all_to_all exact" if "exact" in name else "all_to_all"
        if name != other:
            bench.note({**case, "of": name, "to": other, **apart(ways[name], ways[other])})
    wide = in_fp32(held)
    truth = step.seen("all_to_all", REFERENCE, wide, torch.float32, exact=False)
    if bench.args.devices:
        ways["direct fp32"] = step.seen("direct", REFERENCE, wide, torch.float32, exact=False)
    for name, way in ways.items():
        bench.note({**case, "of": name, "to": "all_to_all fp32", **apart(way, truth)})
