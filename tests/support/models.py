"""Models and memory for tests: load once, allocate small pools, run whole requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from common.config.checkpoint import load_spec
from common.config.spec import CHUNK, ModelSpec, TextSpec
from common.model.batch import Memory, Share, StepBatch
from common.model.text import TextModel
from common.weights import load_text
from common.weights.tree import TextWeights


@dataclass(frozen=True)
class Loaded:
    """A text model with its spec and weights."""

    spec: ModelSpec
    weights: TextWeights
    model: TextModel
    dtype: torch.dtype


def load(
    directory: Path, dtype: torch.dtype = torch.float32, packed: bool = False, **options
) -> Loaded:
    spec = load_spec(directory)
    weights = load_text(directory, spec, dtype=dtype, packed=packed)
    return Loaded(spec, weights, TextModel(spec.text, weights, **options), dtype)


def allocate(
    spec: TextSpec, *, slots: int, pages: int, dtype=torch.float32, fill: float = float("nan")
) -> Memory:
    """Pools filled with `fill`: what is read before it was written shows."""
    kda = spec.kda
    heads = (slots, len(spec.kda_layers), kda.num_heads)
    return Memory(
        state=torch.full((*heads, kda.head_dim, kda.head_dim), fill),
        conv=torch.full((*heads, kda.conv_taps - 1, 3, kda.head_dim), fill, dtype=dtype),
        latent=torch.full(
            (pages, len(spec.mla_layers), CHUNK, spec.mla.latent_width), fill, dtype=dtype
        ),
    )


@dataclass
class Request:
    """A request that owns a slot and pages, fed by hand."""

    slot: int
    pages: tuple[int, ...]
    absorbed: int = 0

    def share(self, tokens: Iterable[int], **more) -> Share:
        """The next share; counts its tokens as absorbed."""
        ids = tuple(int(t) for t in tokens)
        share = Share(slot=self.slot, pages=self.pages, start=self.absorbed, token_ids=ids, **more)
        self.absorbed += len(ids)
        return share


def chunks(*shares: Share) -> StepBatch:
    return StepBatch(kind="chunks", shares=shares)


def steps(*shares: Share) -> StepBatch:
    return StepBatch(kind="steps", shares=shares)


def pages_for(tokens: int) -> int:
    return -(-tokens // CHUNK)


def alone(loaded: Loaded, prompt: Sequence[int], following: Sequence[int]) -> Tensor:
    """Logits after the prompt and after each token of `following`, [1 + len(following), vocab]."""
    total = pages_for(len(prompt) + len(following))
    memory = allocate(loaded.spec.text, slots=1, pages=total, dtype=loaded.dtype)
    request = Request(0, tuple(range(total)))
    rows = [loaded.model.forward(chunks(request.share(prompt)), memory)]
    rows += [loaded.model.forward(steps(request.share([t])), memory) for t in following]
    return torch.cat(rows)
