"""The trainable model: text over packed rows, pictures, and the loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.nano.layers import Kda, Mla, Mlp, Moe, Weight
from benchmarks.nano.packing import Batch
from benchmarks.nano.tower import Vision
from common.config.spec import CHUNK, ModelSpec, TextSpec
from common.ops import attnres


class Layer(nn.Module):
    """One layer's parameters; `TextModel` runs them."""

    def __init__(self, text: TextSpec, index: int) -> None:
        super().__init__()
        self.self_attn = Kda(text) if index in text.kda_layers else Mla(text)
        if index in text.moe_layers:
            self.block_sparse_moe = Moe(text)
        else:
            self.mlp = Mlp(text, text.dense_width)
        norms = ("input_layernorm", "post_attention_layernorm")
        for name in (*norms, "self_attention_res_norm", "mlp_res_norm"):
            self.add_module(name, Weight(text.hidden, fill=1.0))
        self.self_attention_res_proj = Weight(1, text.hidden, fill=0.0)
        self.mlp_res_proj = Weight(1, text.hidden, fill=0.0)


@dataclass(frozen=True)
class Rows:
    """What the mixers need to know of a batch."""

    real: Tensor  # bool [B, L]
    starts: Tensor  # bool [B, L / 64], a document begins
    allowed: Tensor  # bool [B, 1, L, L], causal inside each document


def to_rows(document: Tensor) -> Rows:
    """document [B, L]: number of the document of each row, -1 for padding."""
    heads = document[:, ::CHUNK]
    starts = functional.pad(heads[:, 1:] != heads[:, :-1], (1, 0), value=True)
    length = document.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=document.device).tril()
    allowed = (document[:, :, None] == document[:, None, :]) & causal
    return Rows(document >= 0, starts, allowed[:, None])


class TextModel(nn.Module):
    """Embedding, layers and the residual memory that runs through them."""

    def __init__(self, text: TextSpec) -> None:
        super().__init__()
        assert text.residual_block is not None
        self.eps, self.block = text.eps, text.residual_block
        self.embed_tokens = Weight(text.vocab, text.hidden, std=0.5)
        self.layers = nn.ModuleList(Layer(text, i) for i in range(text.num_layers))
        self.norm = Weight(text.hidden, fill=1.0)
        self.output_attn_res_norm = Weight(text.hidden, fill=1.0)
        self.output_attn_res_proj = Weight(1, text.hidden, fill=0.0)

    def forward(self, prefix: Tensor, rows: Rows, rounded: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings [B, L, hidden] to normed outputs, and tokens by MoE layer and expert."""
        blocks: list[Tensor] = []
        loads: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            x = self._read(
                blocks,
                prefix,
                layer.self_attention_res_norm,
                layer.self_attention_res_proj,
                layer.input_layernorm,
            )
            if isinstance(layer.self_attn, Kda):
                mixed = layer.self_attn(x, rows.real, rows.starts)
            else:
                mixed = layer.self_attn(x, rows.allowed)
            if i % self.block == 0:
                blocks.append(prefix)
                prefix = mixed
            else:
                prefix = prefix + mixed
            x = self._read(
                blocks,
                prefix,
                layer.mlp_res_norm,
                layer.mlp_res_proj,
                layer.post_attention_layernorm,
            )
            if hasattr(layer, "mlp"):
                fed = layer.mlp(x)
            else:
                fed, load = layer.block_sparse_moe(x, rows.real, rounded)
                loads.append(load)
            prefix = prefix + fed
        out = self._read(
            blocks, prefix, self.output_attn_res_norm, self.output_attn_res_proj, self.norm
        )
        return out, torch.stack(loads)

    def _read(
        self, blocks: list[Tensor], prefix: Tensor, norm: Weight, proj: Weight, after: Weight
    ) -> Tensor:
        """The mixture of earlier blocks and the prefix, normed."""
        score = (norm.weight.float() * proj.weight.float()).flatten()
        flat = prefix.flatten(0, -2)
        bank = torch.stack([b.flatten(0, -2) for b in blocks] or [flat], 1)
        mixed, _ = attnres.read(flat, bank, len(blocks), score, eps=self.eps, norm=after.weight)
        return mixed.unflatten(0, prefix.shape[:-1])


class Network(nn.Module):
    """The whole model."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        assert spec.vision is not None
        self.language_model = nn.Module()
        self.language_model.model = TextModel(spec.text)
        self.language_model.lm_head = Weight(spec.text.vocab, spec.text.hidden, std=0.02)
        self.vision = Vision(spec.vision)

    def forward(self, batch: Batch, rounded: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Normed outputs [B, L, hidden], and tokens by MoE layer and expert."""
        text = self.language_model.model
        features = self.vision(batch.patches, batch.grid, dtype).flatten(0, 1)
        row = batch.image_row.long()
        embedded = text.embed_tokens.weight[batch.ids.long()].to(dtype)
        shown = features[row.clamp_min(0)]
        return text(
            torch.where((row >= 0)[..., None], shown, embedded), to_rows(batch.document), rounded
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [..., vocab]."""
        return self.language_model.lm_head(hidden).float()


def loss(logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Mean loss of the tokens to be learnt, and the share of them that is the arg max."""
    target, weight = batch.target.long(), batch.weight
    each = functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    total = weight.sum().clamp_min(1.0)
    right = ((logits.argmax(-1) == target) * weight).sum()
    return (each * weight.flatten()).sum() / total, right / total
