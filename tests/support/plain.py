"""One process, the plain way: the whole prompt through the chunk form, then one token at a time.

No pool, no page table, no scheduler and no StepBatch: contiguous tensors and loops, written from
the formulas. It shares the loading of weights with the product, and nothing of its forward pass,
so that two rooms can be held against something that cannot share their mistakes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as f

from common.config.spec import ModelSpec, TextSpec
from common.ops.quant import unpack_mxfp4
from common.weights.tree import KdaWeights, MlaWeights, MlpWeights, MoeWeights, TextWeights


@dataclass
class History:
    """What one request remembers: per layer KDA state and raw rows, or all latents so far."""

    state: dict[int, Tensor] = field(default_factory=dict)  # [H, V, K]
    raw: dict[int, Tensor] = field(default_factory=dict)  # [taps - 1, 3 H K]
    latent: dict[int, Tensor] = field(default_factory=dict)  # [T, rank + rope]


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = x.float()
    return (y / (y.square().mean(-1, keepdim=True) + eps).sqrt() * weight.float()).to(x.dtype)


class Plain:
    """A text model over one request."""

    def __init__(self, weights: TextWeights, spec: TextSpec) -> None:
        self.w, self.spec, self.past = weights, spec, History()

    @torch.inference_mode()
    def feed(self, ids: Sequence[int], embeds: Tensor | None = None, embed_at=()) -> Tensor:
        """Absorb tokens; fp32 logits of every one of them, [len(ids), vocab].

        More than one token goes through the chunk form, which must be the request's first call.
        """
        p = self.w.embed[torch.tensor(ids)]
        if embeds is not None and len(embed_at):
            p[torch.tensor(embed_at)] = embeds.to(p.dtype)
        y = self._blocks(p) if self.spec.residual_block else self._stream(p)
        return (rms(y, self.w.norm, self.spec.eps) @ self.w.head.T).float()

    def _stream(self, p: Tensor) -> Tensor:
        for i, w in enumerate(self.w.layers):
            p = p + self._mixer(i, rms(p, w.input_norm, self.spec.eps))
            p = p + self._ffn(w.ffn, rms(p, w.post_norm, self.spec.eps))
        return p

    def _blocks(self, p: Tensor) -> Tensor:
        bank: list[Tensor] = []
        for i, w in enumerate(self.w.layers):
            x = rms(self._mix([*bank, p], w.mixer_score), w.input_norm, self.spec.eps)
            starts = i % self.spec.residual_block == 0
            if starts:
                bank.append(p)
            a = self._mixer(i, x)
            p = a if starts else p + a
            x = rms(self._mix([*bank, p], w.ffn_score), w.post_norm, self.spec.eps)
            p = p + self._ffn(w.ffn, x)
        return self._mix([*bank, p], self.w.out_score)

    def _mix(self, sources: list[Tensor], score: Tensor) -> Tensor:
        if len(sources) == 1:
            return sources[0]
        v = torch.stack(sources).float()  # [n, T, D]
        s = (v * score).sum(-1) / (v.square().mean(-1) + self.spec.eps).sqrt()
        return (s.softmax(0).unsqueeze(-1) * v).sum(0).to(sources[0].dtype)

    def _mixer(self, i: int, x: Tensor) -> Tensor:
        w = self.w.layers[i].mixer
        return self._kda(i, w, x) if isinstance(w, KdaWeights) else self._mla(i, w, x)

    def _kda(self, i: int, w: KdaWeights, x: Tensor) -> Tensor:
        c = self.spec.kda
        h, d = c.num_heads, c.head_dim
        sizes = [3 * c.inner, c.inner if c.full_rank_gate else d, d, h]
        raw, gate, fa, b = (x @ w.inputs.T).split(sizes, -1)
        gate = gate if w.g_b is None else gate @ w.g_b.T
        z = (fa @ w.f_b.T).float().view(-1, h, d) + w.dt_bias
        if c.gate_lower_bound is None:
            g = -w.rate[:, None] * f.softplus(z)
        else:
            g = c.gate_lower_bound * torch.sigmoid(w.rate[:, None] * z)
        beta = torch.sigmoid(b.float())
        past = self.past.raw.get(i, raw.new_zeros(c.conv_taps - 1, 3 * c.inner))
        window = torch.cat([past, raw])
        self.past.raw[i] = window[-(c.conv_taps - 1) :]
        kernel = w.conv.permute(1, 2, 3, 0).reshape(3 * c.inner, 1, -1)
        u = f.conv1d(window.float().T[None], kernel, groups=3 * c.inner)[0].T
        q, k, v = f.silu(u).to(x.dtype).float().view(-1, 3, h, d).unbind(1)
        q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
        state = self.past.state.get(i, torch.zeros(h, d, d))
        form = step if len(x) == 1 else chunk_form
        o, self.past.state[i] = form(q * d**-0.5, k, v, g, beta, state)
        o = rms(o.to(x.dtype).float(), w.o_norm, 1e-5) * torch.sigmoid(gate.float().view(-1, h, d))
        return o.to(x.dtype).flatten(1) @ w.out.T

    def _mla(self, i: int, w: MlaWeights, x: Tensor) -> Tensor:
        c, eps = self.spec.mla, self.spec.eps
        gated = c.num_heads * c.v_dim if c.output_gate else 0
        q, latent, gate = (x @ w.inputs.T).split(
            [len(w.inputs) - c.latent_width - gated, c.latent_width, gated], -1
        )
        if w.q_b is not None:
            q = rms(q, w.q_norm, eps) @ w.q_b.T
        q = q.view(len(x), c.num_heads, -1)
        entry = torch.cat(
            [rms(latent[:, : c.kv_lora_rank], w.kv_norm, eps), latent[:, c.kv_lora_rank :]], 1
        )
        past = self.past.latent.get(i)
        entry = entry if past is None else torch.cat([past, entry])
        self.past.latent[i] = entry
        kv = torch.einsum("tr,hor->tho", entry[:, : c.kv_lora_rank], w.kv_b)
        shared = entry[:, None, c.kv_lora_rank :].expand(-1, c.num_heads, -1)
        k, v = torch.cat([kv[..., : c.nope_dim], shared], -1), kv[..., c.nope_dim :]
        score = torch.einsum("shd,thd->hst", q, k).float() * c.scale
        t, s = len(entry), len(x)
        score = score.masked_fill(torch.arange(t) > torch.arange(t - s, t)[:, None], -torch.inf)
        out = torch.einsum("hst,thv->shv", score.softmax(-1).to(x.dtype), v).flatten(1)
        return (out * torch.sigmoid(gate) if c.output_gate else out) @ w.out.T

    def _act(self, gate_up: Tensor) -> Tensor:
        g, u = gate_up.float().chunk(2, -1)
        if self.spec.activation == "silu":
            return (f.silu(g) * u).to(gate_up.dtype)
        beta, lam = self.spec.situ_beta, self.spec.situ_linear_beta
        u = u if lam is None else lam * torch.tanh(u / lam)
        return (beta * torch.tanh(g / beta) * torch.sigmoid(g) * u).to(gate_up.dtype)

    def _mlp(self, w: MlpWeights, x: Tensor) -> Tensor:
        return self._act(x @ w.gate_up.T) @ w.down.T

    def _ffn(self, w: MlpWeights | MoeWeights, x: Tensor) -> Tensor:
        if isinstance(w, MlpWeights):
            return self._mlp(w, x)
        moe = self.spec.moe
        assert moe.num_groups == 1
        scores = torch.sigmoid(x.float() @ w.router.T)
        index = (scores + w.bias).topk(moe.top_k, -1).indices
        weight = scores.gather(-1, index)
        weight = weight / weight.sum(-1, keepdim=True) if moe.renormalize else weight
        z = x if w.latent_down is None else x @ w.latent_down.T
        r = torch.zeros(z.shape)
        for e in index.unique().tolist():
            row, place = (index == e).nonzero(as_tuple=True)
            up, down = expert(w, e, x.dtype)
            y = self._act(z[row] @ up.T) @ down.T
            r[row] += moe.scaling * weight[row, place, None] * y.float()
        r = r.to(x.dtype)
        r = r if w.latent_norm is None else rms(r, w.latent_norm, self.spec.eps)
        r = r if w.latent_up is None else r @ w.latent_up.T
        return r if w.shared is None else r + self._mlp(w.shared, x)


def expert(w: MoeWeights, e: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    s = w.experts
    if s.w13_scale is None:
        return s.w13[e], s.w2[e]
    return tuple(
        unpack_mxfp4(x[e], y[e], dtype) for x, y in ((s.w13, s.w13_scale), (s.w2, s.w2_scale))
    )


def step(q, k, v, g, beta, state):
    """One token, [1, H, .]: decay, predict, correct, read."""
    state = state * g[0].exp()[:, None]
    error = v[0] - torch.einsum("hvk,hk->hv", state, k[0])
    state = state + torch.einsum("hv,hk->hvk", beta[0, :, None] * error, k[0])
    return torch.einsum("hvk,hk->hv", state, q[0])[None], state


def chunk_form(q, k, v, g, beta, state, size: int = 64):
    """Whole prompt, [T, H, .], in chunks of 64 with a triangular solve and pairwise decays."""
    outs = []
    for at in range(0, len(q), size):
        qc, kc, vc, gc = (x[at : at + size].transpose(0, 1) for x in (q, k, v, g))  # [H, C, .]
        bc = beta[at : at + size].T.unsqueeze(-1)
        cum = gc.cumsum(1)
        n = cum.shape[1]
        later = torch.ones(n, n, dtype=torch.bool).triu(1)[:, :, None]
        pair = (cum[:, :, None] - cum[:, None]).masked_fill(later, -torch.inf).exp()  # [H, C, C, K]
        m = bc * torch.einsum("hid,hjd,hijd->hij", kc, kc, pair).tril(-1)
        p = torch.einsum("hid,hjd,hijd->hij", qc, kc, pair)
        rhs = bc * (vc - torch.einsum("hck,hvk->hcv", kc * cum.exp(), state))
        y = torch.linalg.solve_triangular(m, rhs, upper=False, unitriangular=True)
        outs.append(torch.einsum("hck,hvk->hcv", qc * cum.exp(), state) + p @ y)
        rest = kc * (cum[:, -1:] - cum).exp()
        state = state * cum[:, -1].exp()[:, None] + torch.einsum("hcv,hck->hvk", y, rest)
    return torch.cat(outs, 1).transpose(0, 1), state


def greedy(
    weights: TextWeights,
    spec: ModelSpec | TextSpec,
    prompt_ids: Sequence[int],
    num_tokens: int,
    embeds: Tensor | None = None,
    embed_at: Sequence[int] = (),
) -> tuple[list[int], list[float]]:
    """The greedy continuation of a prompt, with each token's log-probability."""
    logits = full_logits(weights, spec, prompt_ids, num_tokens, embeds, embed_at)
    tokens = logits.argmax(-1)
    chosen = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    return tokens.tolist(), chosen.tolist()


def full_logits(
    weights: TextWeights,
    spec: ModelSpec | TextSpec,
    prompt_ids: Sequence[int],
    num_tokens: int,
    embeds: Tensor | None = None,
    embed_at: Sequence[int] = (),
    following: Sequence[int] | None = None,
) -> Tensor:
    """fp32 logits [num_tokens, vocab] from the prompt's last token on.

    Each next token is the best one, or, with `following`, the one given there.
    """
    text = spec.text if isinstance(spec, ModelSpec) else spec
    model = Plain(weights, text)
    rows = [model.feed(prompt_ids, embeds, embed_at)[-1]]
    while len(rows) < num_tokens:
        token = int(rows[-1].argmax()) if following is None else following[len(rows) - 1]
        rows.append(model.feed([token])[-1])
    return torch.stack(rows)
