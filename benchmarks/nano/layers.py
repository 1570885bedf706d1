"""The trainable layers: the project's ops over packed rows, with gradients.

Names of modules and parameters are the checkpoint's, but for a layer's experts, which are stacked.
Weights are kept in fp32 and used in the dtype of the rows. There is no cache here: serving has its
own code (`common.model`), and a test compares the two.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.nano.rounding import straight_through
from common.config.spec import CHUNK, TextSpec
from common.ops.act import Activation, activate
from common.ops.kda import gate as log_decay
from common.ops.kda.reference import normalise, within
from common.ops.moe import route
from common.ops.norm import gated_rms_norm, rms_norm
from common.ops.rows import linear


class Weight(nn.Module):
    """A bare `.weight`: normal with `std` (else one over the root of the width), or filled."""

    def __init__(self, *shape: int, std: float | None = None, fill: float | None = None) -> None:
        super().__init__()
        value = torch.randn(shape) * (shape[-1] ** -0.5 if std is None else std)
        self.weight = nn.Parameter(value if fill is None else torch.full(shape, fill))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] times the weight [out, in]."""
        return linear(x.flatten(0, -2), self.weight.to(x.dtype), None).unflatten(0, x.shape[:-1])


class Kda(nn.Module):
    """The linear-attention mixer with the full-rank output gate."""

    def __init__(self, text: TextSpec) -> None:
        super().__init__()
        spec, hidden = text.kda, text.hidden
        self.heads, self.dim, self.bound = spec.num_heads, spec.head_dim, spec.gate_lower_bound
        for name in "qkv":
            self.add_module(f"{name}_proj", Weight(spec.inner, hidden))
            conv = Weight(spec.inner, 1, spec.conv_taps, std=0.2)
            conv.weight.data[..., -1] += 0.6  # starts near the current token
            self.add_module(f"{name}_conv1d", conv)
        self.b_proj = Weight(self.heads, hidden)
        self.f_a_proj = Weight(self.dim, hidden)
        self.f_b_proj = Weight(spec.inner, self.dim, std=0.3 * self.dim**-0.5)
        self.g_proj = Weight(spec.inner, hidden)
        # One value a head, stored at the length of a head as in the release; the rest is unused.
        stored = torch.full((self.dim,), 9.0)
        stored[: self.heads] = 0.0
        self.A_log = nn.Parameter(stored)
        self.dt_bias = nn.Parameter(torch.empty(spec.inner).uniform_(-7.5, -0.5))
        self.o_norm = Weight(self.dim, fill=1.0)
        self.o_proj = Weight(hidden, spec.inner)

    def forward(self, x: Tensor, real: Tensor, starts: Tensor) -> Tensor:
        """x [B, L, hidden]; real bool [B, L]; starts bool [B, L / 64], a document begins there."""
        raw = torch.stack([m(x) for m in (self.q_proj, self.k_proj, self.v_proj)], 2)
        q, k, v = self._convolve(raw * real[..., None, None]).unbind(2)
        mask = real[..., None, None]
        g = log_decay(
            self.f_b_proj(self.f_a_proj(x)).unflatten(-1, (self.heads, self.dim)),
            self.A_log[: self.heads].exp(),
            self.dt_bias.view(self.heads, self.dim),
            self.bound,
        )
        beta = torch.sigmoid(self.b_proj(x).float())[..., None]
        q, k = normalise(q) * self.dim**-0.5, normalise(k) * mask
        out = delta_rule(q, k, v.float() * mask, g * mask, beta * mask, starts)
        gate = self.g_proj(x).unflatten(-1, (self.heads, self.dim))
        return self.o_proj(gated_rms_norm(out, gate, self.o_norm.weight, 1e-5).flatten(-2))

    def _convolve(self, raw: Tensor) -> Tensor:
        """raw [B, L, 3, inner], zero where padded, -> [B, L, 3, H, D]."""
        convs = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        weight = torch.stack([conv.weight.squeeze(1) for conv in convs])  # [3, inner, taps]
        taps, length = weight.shape[-1], raw.shape[1]
        padded = functional.pad(raw.float(), (0, 0, 0, 0, taps - 1, 0))
        total = sum(padded[:, j : j + length] * weight[..., j] for j in range(taps))
        return functional.silu(total).to(raw.dtype).unflatten(-1, (self.heads, self.dim))


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, starts: Tensor) -> Tensor:
    """The chunked delta rule over rows that hold many documents.

    q, k, g [B, L, H, K], v [B, L, H, V], beta [B, L, H, 1], all fp32; q and k normalised, q scaled,
    padding zero. starts [B, L / 64]: the state is empty there. Returns [B, L, H, V].

    Inside a chunk this is `common.ops.kda`'s own arithmetic. Between chunks a state moves by an
    affine map, S' = A S + B; all of them are composed by doubling, so that depth grows with the
    logarithm of the row's length.
    """
    batch = len(q)
    q, k, v, g, beta = (x.unflatten(1, (-1, CHUNK)).transpose(2, 3) for x in (q, k, v, g, beta))
    flat = (x.flatten(0, 1).contiguous() for x in (q, k, g, beta))  # [B * N, H, 64, .]
    solve, attend, before, after = (x.unflatten(0, (batch, -1)) for x in within(*flat))
    decay = before.exp()
    seen = solve @ (beta * k * decay)
    fresh = solve @ (beta * v)
    left = (k * after.exp()).transpose(-1, -2)  # [B, N, H, K, 64]
    keep = functional.pad((~starts[:, 1:]).float(), (0, 1), value=1.0)[..., None, None, None]
    turn = (torch.diag_embed(decay[..., -1, :]) - left @ seen) * keep
    gain = (left @ fresh) * keep
    state = functional.pad(_compose(turn, gain)[:, :-1], (0, 0) * 3 + (1, 0))
    out = (q * decay) @ state + attend @ (fresh - seen @ state)
    return out.transpose(2, 3).flatten(1, 2)


def _compose(turn: Tensor, gain: Tensor) -> Tensor:
    """State after every chunk of S' = turn S + gain from zero; both [B, N, ...]."""
    hop, count = 1, turn.shape[1]
    while hop < count:
        late = turn[:, hop:]
        gain = torch.cat([gain[:, :hop], gain[:, hop:] + late @ gain[:, :-hop]], 1)
        turn = torch.cat([turn[:, :hop], late @ turn[:, :-hop]], 1)
        hop *= 2
    return gain


class Mla(nn.Module):
    """The latent-attention mixer in its expanded form."""

    def __init__(self, text: TextSpec) -> None:
        super().__init__()
        self.spec, self.eps, hidden = text.mla, text.eps, text.hidden
        spec, rank = text.mla, text.mla.q_lora_rank
        assert rank is not None
        self.q_a_proj = Weight(rank, hidden)
        self.q_a_layernorm = Weight(rank, fill=1.0)
        self.q_b_proj = Weight(spec.num_heads * (spec.nope_dim + spec.rope_dim), rank)
        self.kv_a_proj_with_mqa = Weight(spec.latent_width, hidden)
        self.kv_a_layernorm = Weight(spec.kv_lora_rank, fill=1.0)
        self.kv_b_proj = Weight(spec.num_heads * (spec.nope_dim + spec.v_dim), spec.kv_lora_rank)
        self.g_proj = Weight(spec.num_heads * spec.v_dim, hidden)
        self.o_proj = Weight(hidden, spec.num_heads * spec.v_dim)

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        """x [B, L, hidden]; allowed bool [B, 1, L, L]."""
        spec = self.spec
        q = self.q_b_proj(rms_norm(self.q_a_proj(x), self.q_a_layernorm.weight, self.eps))
        latent, shared = self.kv_a_proj_with_mqa(x).split([spec.kv_lora_rank, spec.rope_dim], -1)
        kv = self.kv_b_proj(rms_norm(latent, self.kv_a_layernorm.weight, self.eps))
        q, kv = (y.unflatten(-1, (spec.num_heads, -1)).transpose(1, 2) for y in (q, kv))
        k, v = kv.split([spec.nope_dim, spec.v_dim], -1)
        k = torch.cat([k, shared[:, None].expand(-1, spec.num_heads, -1, -1)], -1)
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=spec.scale)
        return self.o_proj(out.transpose(1, 2).flatten(-2) * torch.sigmoid(self.g_proj(x)))


class Mlp(nn.Module):
    """A gated feed-forward network: the dense layer's, and the shared experts'."""

    def __init__(self, text: TextSpec, width: int) -> None:
        super().__init__()
        self.activation = _activation(text)
        self.gate_proj = Weight(width, text.hidden)
        self.up_proj = Weight(width, text.hidden)
        self.down_proj = Weight(text.hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] to the same."""
        both = torch.cat([self.gate_proj(x), self.up_proj(x)], -1)
        return self.down_proj(activate(both, self.activation))


class Gate(nn.Module):
    """The router's weight, and the bias of its choice: load moves it, not a gradient."""

    def __init__(self, text: TextSpec) -> None:
        super().__init__()
        experts = text.moe.num_experts
        self.weight = nn.Parameter(torch.randn(experts, text.hidden) * text.hidden**-0.5)
        self.e_score_correction_bias = nn.Parameter(torch.zeros(experts), requires_grad=False)


class Moe(nn.Module):
    """Latent experts: every expert is computed on every token and weighed, zero if not chosen."""

    def __init__(self, text: TextSpec) -> None:
        super().__init__()
        moe, hidden = text.moe, text.hidden
        assert moe.latent is not None
        self.spec, self.eps, self.activation = moe, text.eps, _activation(text)
        self.gate = Gate(text)
        self.routed_expert_down_proj = Weight(moe.latent, hidden)
        self.routed_expert_norm = Weight(moe.latent, fill=1.0)
        self.routed_expert_up_proj = Weight(hidden, moe.latent)
        size = (moe.num_experts, moe.width, moe.latent)
        self.w1 = nn.Parameter(torch.randn(size) * moe.latent**-0.5)
        self.w3 = nn.Parameter(torch.randn(size) * moe.latent**-0.5)
        wide = (moe.num_experts, moe.latent, moe.width)
        self.w2 = nn.Parameter(torch.randn(wide) * moe.width**-0.5)
        self.shared_experts = Mlp(text, moe.width * moe.num_shared)

    def forward(self, x: Tensor, real: Tensor, rounded: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, L, hidden] to the same, and tokens by expert [E].

        `rounded` is 0 or 1: with 1 the experts have the values MXFP4 stores.
        """
        share = self._shares(x)
        load = ((share.detach() > 0) & real[..., None]).float().flatten(0, 1).sum(0)
        w1, w3, w2 = (straight_through(w, rounded).to(x.dtype) for w in (self.w1, self.w3, self.w2))
        z = self.routed_expert_down_proj(x)
        both = functional.linear(z, torch.cat([w1, w3], 1).flatten(0, 1))
        inner = activate(both.unflatten(-1, (len(w1), -1)), self.activation)  # [B, L, E, F]
        inner = (inner * share[..., None].to(x.dtype)).flatten(-2)
        out = functional.linear(inner, w2.transpose(0, 1).flatten(1))
        out = rms_norm(out, self.routed_expert_norm.weight, self.eps)
        return self.routed_expert_up_proj(out) + self.shared_experts(x), load

    def _shares(self, x: Tensor) -> Tensor:
        """fp32 [B, L, E]: each expert's share of a token."""
        weight = self.gate.weight.to(x.dtype).float()
        logits = functional.linear(x.float(), weight).flatten(0, 1)
        ids, shares = route(
            logits,
            self.gate.e_score_correction_bias,
            top_k=self.spec.top_k,
            num_groups=self.spec.num_groups,
            top_groups=self.spec.top_groups,
            renormalize=self.spec.renormalize,
            scaling=self.spec.scaling,
        )
        return torch.zeros_like(logits).scatter(1, ids, shares).unflatten(0, x.shape[:2])


def _activation(text: TextSpec) -> Activation:
    return Activation(kind=text.activation, beta=text.situ_beta, linear_beta=text.situ_linear_beta)
