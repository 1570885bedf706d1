"""The text model: embeddings, layers, final norm, logits.

Reads and updates slots and pages in place. With `exact` (the reference path) a request's bits
depend on its own tokens and their place on the grid of 64 alone: not on its neighbours, its
position in the batch, or the number of passes its prompt was divided over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.config.spec import TextSpec
from common.model import kda, mla
from common.model.batch import Memory, StepBatch
from common.model.load import ExpertLoad
from common.model.moe import activation_of, feed_forward, idle
from common.model.residual import Blocks, Residual, Stream
from common.model.run import Run, empty, prepare, token_rows
from common.ops.plan import Steps
from common.ops.rows import STEP_TILE
from common.ops.table import REFERENCE, Ops
from common.parallel.mesh import narrowed
from common.parallel.team import Team
from common.weights.tree import KdaWeights, MoeWeights, TextWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """Hidden states for a draft model, [tokens, D] per captured layer, shares in order."""

    layers: tuple[int, ...]  # 0-based; the state after that layer
    states: tuple[Tensor, ...]


class TextModel:
    """Weights, shapes and op bodies; holds nothing of any request."""

    def __init__(
        self,
        spec: TextSpec,
        weights: TextWeights,
        *,
        ops: Ops = REFERENCE,
        exact: bool = True,
        team: Team | None = None,
    ) -> None:
        """Bind a checkpoint's weights.

        Args:
            spec: shapes of the text model.
            weights: what `load_text` returned.
            ops: the bodies chosen for this device.
            exact: multiply in fixed row tiles; False multiplies all rows at once.
            team: the ranks that share the weights, which are then this rank's; None: alone.
        """
        self.spec = spec if team is None else narrowed(spec, team.mesh)
        self.weights, self.team = weights, team
        self.ops, self._exact, self._act = ops, exact, activation_of(spec)
        is_counting = team is None and spec.moe_layers
        self._load = ExpertLoad(spec, weights.embed.device) if is_counting else None

    def forward(self, batch: StepBatch, memory: Memory) -> Tensor:
        """One pass.

        A share with start 0 begins from zero state whatever its slot held. Padding touches
        neither slots nor pages.

        Args:
            batch: shares of one kind, at least one, with distinct slots.
            memory: the pools' tensors; slots and pages of the shares are updated in place.

        Returns:
            fp32 logits [shares with want_logits, vocab], in share order; NaN where an output of
            linear attention of the share was not finite.
        """
        return self.capture(batch, memory, layers=(), convention="prefix")[0]

    @torch.inference_mode()
    def capture(
        self,
        batch: StepBatch,
        memory: Memory,
        *,
        layers: Sequence[int],
        convention: str,
        after: Callable[[int], None] | None = None,
    ) -> tuple[Tensor, Features]:
        """One pass that also returns hidden states after some layers, for a draft model.

        Args:
            batch: as for `forward`.
            memory: as for `forward`.
            layers: 0-based layers, ascending; the state after a layer is captured.
            convention: "prefix", the running sum; or "stream", what the next reader would read
                before its norm. They are the same thing without attention residuals.
            after: called with each layer's number when all that it writes was launched.

        Returns:
            Logits as of `forward`, and the captured states of all tokens without padding.
        """
        if convention not in ("prefix", "stream"):
            raise ValueError(f"a convention is {convention!r}; it must be 'prefix' or 'stream'")
        run = prepare(
            batch,
            memory,
            self.ops,
            exact=self._exact,
            device=self.weights.embed.device,
            team=self.team,
        )
        reset(batch, memory)
        residual = self._residual(self._embed(batch, run))
        real = _real_rows(batch) if layers else None
        states = []
        for layer in range(self.spec.num_layers):
            self._layer(layer, residual, run)
            if after is not None:
                after(layer)
            if layer in layers:
                prefix = residual.prefix_after if convention == "prefix" else None
                state = prefix() if prefix else residual.stream_after(layer)
                states.append(run.gather(state)[real])
        self._count(run)
        features = Features(layers=tuple(layers), states=tuple(states))
        return self._logits(batch, residual, run), features

    @torch.inference_mode()
    def step(self, ids: Tensor, plan: Steps, memory: Memory, out: Tensor | None = None) -> Tensor:
        """A pass of steps over tensors alone: nothing is read on the host, so a graph may hold it.

        Args:
            ids: int64 [B], one token a row.
            plan: where the rows belong; rows may be padding.
            memory: the pools' tensors; what the rows own is updated in place.
            out: fp32 [B, vocab], to be filled.

        Returns:
            fp32 logits [B, vocab], NaN as of `forward`; of padding they mean nothing.
        """
        team = self.team
        assert team is None or not team.mesh.spread, "rows of recorded steps are not spread"
        rows, tile = len(ids), STEP_TILE if self._exact else None
        run = Run(
            plan=plan, memory=memory, ops=self.ops, tile=tile, rows=rows, real=rows, team=team
        )
        residual = self._residual(self._look_up(ids, run))
        for layer in range(self.spec.num_layers):
            self._layer(layer, residual, run)
        self._count(run)
        logits = self.ops.linear(residual.result(slice(None)), self.weights.head, tile)
        if run.watched:
            logits = logits.masked_fill(run.spoilt().unsqueeze(1), torch.nan)
        if team is not None:
            logits = torch.cat(team.tensor.all_gather(logits), -1)[:, : self.spec.vocab]
        return logits.float() if out is None else out.copy_(logits)

    def load(self) -> list[list[int]]:
        """Rows of steps that chose each expert since the start, by MoE layer; waits for them."""
        counts: list[list[int]] = [] if self._load is None else self._load.counts.tolist()
        return counts

    def _count(self, run: Run) -> None:
        if self._load is not None and isinstance(run.plan, Steps):
            self._load.count(run.chosen, run.tokens())

    @torch.inference_mode()
    def idle(self, memory: Memory) -> None:
        """Take part in a pass of other lanes without a request of one's own.

        Returns when every MoE layer's exchange is over; nothing to do where nothing is exchanged.
        """
        if self.team is None or self.team.exchange is None:
            return
        spec = self.spec
        run = empty(memory, self.ops, exact=self._exact, team=self.team)
        for ordinal, layer in enumerate(spec.moe_layers):
            ffn = self.weights.layers[layer].ffn
            assert isinstance(ffn, MoeWeights)
            idle(ordinal, ffn, spec.moe.latent or spec.hidden, spec, self._act, run)

    def _residual(self, embedded: Tensor) -> Residual:
        kind = Stream if self.spec.residual_block is None else Blocks
        return kind(self.weights, self.spec, self.ops, embedded)

    def _layer(self, layer: int, residual: Residual, run: Run) -> None:
        spec, w = self.spec, self.weights.layers[layer]
        x = run.gather(residual.to_mixer(layer))
        if isinstance(w.mixer, KdaWeights):
            out = kda.mix(x, w.mixer, spec.kda, spec.kda_layers.index(layer), run)
        else:
            out = mla.mix(x, w.mixer, spec.mla, spec.eps, spec.mla_layers.index(layer), run)
        residual.from_mixer(layer, out)
        ordinal = spec.moe_layers.index(layer) if isinstance(w.ffn, MoeWeights) else 0
        fed = feed_forward(residual.to_ffn(layer), w.ffn, spec, self._act, run, ordinal)
        residual.from_ffn(fed)

    def _embed(self, batch: StepBatch, run: Run) -> Tensor:
        """[rows, D], of them this rank's; image rows replaced, padding embedded as token 0."""
        table = self.weights.embed
        ids = torch.zeros(run.rows, dtype=torch.int64)
        rows = token_rows(batch)
        for row, share in zip(rows, batch.shares, strict=True):
            ids[row : row + len(share.token_ids)] = torch.tensor(share.token_ids)
        hidden = self._look_up(ids.to(table.device), run)
        for row, share in zip(rows, batch.shares, strict=True):
            if share.embeds is not None and share.embed_at:
                at = torch.tensor(share.embed_at, device=table.device) + row
                hidden[at] = share.embeds.to(table.device, table.dtype)
        return run.own(hidden)

    def _look_up(self, ids: Tensor, run: Run) -> Tensor:
        """Rows of the table; each tensor rank adds those of its part of the vocabulary."""
        table = self.weights.embed
        if run.team is None or run.team.tensor.size == 1:
            return table[ids]
        local = ids - run.team.seat.tensor * len(table)
        own = (local >= 0) & (local < len(table))
        found = table[local.clamp(0, len(table) - 1)] * own.unsqueeze(1)
        return run.team.tensor.all_reduce(found)

    def _logits(self, batch: StepBatch, residual: Residual, run: Run) -> Tensor:
        last = [
            row + len(share.token_ids) - 1
            for row, share in zip(token_rows(batch), batch.shares, strict=True)
            if share.want_logits
        ]
        head = self.weights.head
        if not last:
            return torch.zeros(0, self.spec.vocab, device=head.device)
        final = _finished(residual, torch.tensor(last, device=head.device), run)
        logits = self.ops.linear(final, head, STEP_TILE if self._exact else None).float()
        _spoil(logits, batch, run)
        if run.team is None:
            return logits
        return torch.cat(run.team.tensor.all_gather(logits), -1)[:, : self.spec.vocab]


def _finished(residual: Residual, rows: Tensor, run: Run) -> Tensor:
    """The normed result of rows of the pass; spread ones each from the rank that has it."""
    if run.team is None or not run.team.mesh.spread:
        return residual.result(rows)
    each = run.rows // run.team.tensor.size
    local = rows - run.team.seat.tensor * each
    own = (local >= 0) & (local < each)
    found = residual.result(local.clamp(0, each - 1))
    return run.team.tensor.all_reduce(torch.where(own.unsqueeze(1), found, 0))


def reset(batch: StepBatch, memory: Memory) -> None:
    """Empty the slots of requests that begin."""
    for share in batch.shares:
        if share.start == 0:
            memory.state[share.slot] = 0
            memory.conv[share.slot] = 0


def _spoil(logits: Tensor, batch: StepBatch, run: Run) -> None:
    """Make a share's logits NaN if a watched value of one of its tokens was not finite.

    Whoever samples then ends that request, even where a later body swallowed the value.
    """
    if not run.watched:
        return
    spoilt, rows = run.spoilt().cpu(), token_rows(batch)
    if not spoilt.any():
        return
    asking = [(r, s) for r, s in zip(rows, batch.shares, strict=True) if s.want_logits]
    for index, (row, share) in enumerate(asking):
        if spoilt[row : row + len(share.token_ids)].any():
            logits[index] = torch.nan


def _real_rows(batch: StepBatch) -> Tensor:
    """Rows of all tokens, padding left out."""
    rows = zip(token_rows(batch), batch.shares, strict=True)
    return torch.tensor([row + i for row, share in rows for i in range(len(share.token_ids))])
