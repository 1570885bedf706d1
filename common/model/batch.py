"""StepBatch: one forward pass as plain data, passed down as an argument.

A batch is either of *chunks* (prefill: every share starts on the grid of 64 and covers whole grid
chunks, except that the last may be short) or of *steps* (decode: one token a share). It owns no
memory; slots and pages belong to the pools.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One request's part of a forward pass."""

    slot: int  # its KDA state
    pages: tuple[int, ...]  # its MLA pages in order; they cover start + len(token_ids) tokens
    start: int  # tokens already absorbed by slot and pages
    token_ids: tuple[int, ...]  # the tokens of this pass, at least one
    want_logits: bool = True  # of the last token
    embeds: Tensor | None = None  # [k, hidden] rows that replace token embeddings
    embed_at: tuple[int, ...] = ()  # k indices into token_ids, ascending
    lane: int = 0  # of a group of ranks: whose slot and pages these are


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """Many shares of unequal length, of one kind."""

    kind: str  # "chunks" or "steps"
    shares: tuple[Share, ...] = field(default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The pools' tensors, read and updated in place by a forward pass.

    The layer axis counts `spec.kda_layers` (state, conv) or `spec.mla_layers` (latent) in order.
    """

    state: Tensor  # fp32 [slots, kda_layers, heads, V, K]
    conv: Tensor  # model dtype [slots, kda_layers, heads, taps - 1, 3 (q, k, v), head_dim]
    latent: Tensor  # model dtype [pages, mla_layers, 64, latent_width]


class Forward(Protocol):
    """What an engine needs of a model: passes, however they are run."""

    def forward(self, batch: StepBatch, memory: Memory) -> Tensor:
        """fp32 logits [shares with want_logits, vocab]; valid until the next pass."""
