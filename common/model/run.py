"""Run: what every part of one forward pass shares, made once from a StepBatch.

Turns shares into index tensors and rows. A pass over chunks has rows [C * 64]; a pass of steps
has one row a share and then padding to a whole tile. Owns no memory and knows no weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from common.config.spec import CHUNK
from common.model.batch import Memory, Share, StepBatch
from common.ops.plan import Chunks, Steps
from common.ops.rows import STEP_TILE
from common.ops.table import Ops
from common.parallel.team import Team


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One forward pass. `tile` is the height of matrix products; None multiplies all rows."""

    plan: Chunks | Steps
    memory: Memory
    ops: Ops
    tile: int | None
    rows: int  # of the hidden states, padding included
    real: int  # leading rows that a pass of steps has; equals `rows` in a pass of chunks
    team: Team | None = None  # the ranks that share the weights; None: alone
    chosen: list[Tensor] = field(default_factory=list)  # int64 [rows, k] of each MoE layer so far
    watched: list[Tensor] = field(default_factory=list)  # fp32 [rows] each

    def watch(self, x: Tensor) -> None:
        """x [rows, ...]: remember which rows are finite, whatever is made of them later."""
        self.watched.append(x.flatten(1).sum(1, dtype=torch.float32))  # NaN if one value is not

    def spoilt(self) -> Tensor:
        """bool [rows]: in which rows something watched was not finite."""
        if not self.watched:
            return torch.zeros(self.rows, dtype=torch.bool, device=self.plan.slots.device)
        return ~torch.stack(self.watched).isfinite().all(0)

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [N, K], weight [O, K] -> [N, O]."""
        return self.ops.linear(x, weight, self.tile)

    def reduce(self, x: Tensor) -> Tensor:
        """The sum of what the tensor ranks computed with their cut of a product's inputs.

        Where rows are spread each rank gets its own alone: [rows, ...] -> [rows / ranks, ...].
        """
        if self.team is None:
            return x
        axis = self.team.tensor
        return axis.reduce_scatter(x) if self.team.mesh.spread else axis.all_reduce(x)

    def gather(self, x: Tensor) -> Tensor:
        """All rows, from those that each tensor rank keeps; the same where every rank has all."""
        if self.team is None or not self.team.mesh.spread:
            return x
        return torch.cat(self.team.tensor.all_gather(x))

    def own(self, x: Tensor) -> Tensor:
        """This rank's rows of all; the same where every rank has all."""
        if self.team is None or not self.team.mesh.spread:
            return x
        return x.chunk(self.team.tensor.size)[self.team.seat.tensor] if len(x) else x

    def tokens(self) -> Tensor:
        """bool [rows]: which rows are tokens and not padding."""
        if isinstance(self.plan, Steps):
            return functional.pad(self.plan.slots >= 0, (0, self.rows - self.real))
        lengths = self.plan.lengths.unsqueeze(1)
        inside = torch.arange(CHUNK, device=lengths.device) < lengths
        return inside.flatten()

    def padded(self, x: Tensor) -> Tensor:
        """Rows of the shares [real, ...] -> rows of the pass [rows, ...]."""
        missing = self.rows - len(x)
        if missing == 0:
            return x
        return functional.pad(x, (0, 0) * (x.dim() - 1) + (0, missing))


def prepare(
    batch: StepBatch,
    memory: Memory,
    ops: Ops,
    *,
    exact: bool,
    device: torch.device,
    team: Team | None = None,
) -> Run:
    """Check a batch and lay it out.

    Raises:
        ValueError: a share is empty, off the grid, or owns too few pages; the kind is unknown.
    """
    shares = batch.shares
    check(batch)
    tables = _tables(shares, device)
    slots = torch.tensor([share.slot for share in shares], device=device)
    starts = torch.tensor([share.start for share in shares], device=device)
    if batch.kind == "steps":
        unit = STEP_TILE if exact else 1
        if team is not None and team.mesh.spread:
            unit = math.lcm(unit, team.mesh.tensor)
        rows = -(-len(shares) // unit) * unit
        steps = Steps(slots=slots, starts=starts, tables=tables)
        if ops.plan_steps is not None:
            ops.plan_steps(steps, [share.start for share in shares])
        tile = STEP_TILE if exact else None
        return Run(
            plan=steps,
            memory=memory,
            ops=ops,
            tile=tile,
            rows=rows,
            real=len(shares),
            team=team,
        )
    first, lengths = [0], []
    for share in shares:
        count = len(share.token_ids)
        lengths += [min(CHUNK, count - at) for at in range(0, count, CHUNK)]
        first.append(len(lengths))
    plan = Chunks(
        slots=slots,
        first=torch.tensor(first, device=device),
        starts=starts,
        lengths=torch.tensor(lengths, device=device),
        tables=tables,
    )
    rows = len(lengths) * CHUNK
    tile = CHUNK if exact else None
    return Run(plan=plan, memory=memory, ops=ops, tile=tile, rows=rows, real=rows, team=team)


def empty(memory: Memory, ops: Ops, *, exact: bool, team: Team) -> Run:
    """A pass of no rows, for a rank that only computes for others."""
    none = torch.zeros(0, dtype=torch.int64, device=memory.latent.device)
    plan = Steps(slots=none, starts=none, tables=none.view(0, 0))
    tile = STEP_TILE if exact else None
    return Run(plan=plan, memory=memory, ops=ops, tile=tile, rows=0, real=0, team=team)


def token_rows(batch: StepBatch) -> list[int]:
    """The row of every share's first token, in share order."""
    if batch.kind == "steps":
        return list(range(len(batch.shares)))
    rows, at = [], 0
    for share in batch.shares:
        rows.append(at)
        at += -(-len(share.token_ids) // CHUNK) * CHUNK
    return rows


def check(batch: StepBatch) -> None:
    """Refuse a batch that cannot be laid out; errors as of `prepare`."""
    for share in batch.shares:
        _check(share, batch.kind)


def _check(share: Share, kind: str) -> None:
    count = len(share.token_ids)
    if kind not in ("chunks", "steps"):
        raise ValueError(f"a batch's kind is {kind!r}; it must be 'chunks' or 'steps'")
    if kind == "steps" and count != 1:
        raise ValueError(f"a share of a step has {count} tokens; it must have one")
    if kind == "chunks" and (count == 0 or share.start % CHUNK):
        raise ValueError(f"a share of {count} tokens starts at {share.start}, off the grid")
    if len(share.pages) * CHUNK < share.start + count:
        raise ValueError(
            f"slot {share.slot} has {len(share.pages)} pages for {share.start + count} tokens"
        )


def _tables(shares: tuple[Share, ...], device: torch.device) -> Tensor:
    width = max(len(share.pages) for share in shares)
    rows = [[*share.pages, *[-1] * (width - len(share.pages))] for share in shares]
    return torch.tensor(rows, device=device)
