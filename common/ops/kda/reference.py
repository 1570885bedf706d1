"""Kimi delta attention in torch.

The chunked form never takes the exponential of a positive number: the decay between two rows is a
product of a prefix and a suffix of neighbouring halves, built up by doubling from single rows to
the whole chunk. So it holds for any gate, bounded or not, and every factor is exact to rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from common.ops.plan import Chunks, Steps


def gate(logits: Tensor, rate: Tensor, bias: Tensor, lower_bound: float | None) -> Tensor:
    """See `common.ops.kda.gate`."""
    z = logits.float() + bias
    rate = rate.unsqueeze(-1)
    if lower_bound is None:
        return -rate * functional.softplus(z)
    return lower_bound * torch.sigmoid(rate * z)


def normalise(x: Tensor) -> Tensor:
    """x [..., K] to fp32 of unit length; the epsilon is added to the sum of squares."""
    y = x.float()
    return y * torch.rsqrt(y.pow(2).sum(-1, keepdim=True) + 1e-6)


def chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    layer: int,
    plan: Chunks,
) -> Tensor:
    """See `common.ops.kda.chunks`."""
    rows = q.shape[1]
    lengths = plan.lengths.to(q.device)
    real = (torch.arange(rows, device=q.device) < lengths.unsqueeze(1)).view(-1, rows, 1, 1)
    q, k = normalise(q) * q.shape[-1] ** -0.5, normalise(k) * real
    v, g, beta = v.float() * real, g * real, beta.unsqueeze(-1) * real
    q, k, v, g, beta = (x.transpose(1, 2).contiguous() for x in (q, k, v, g, beta))  # [C, H, 64, .]
    solve, attend, prefix, suffix = within(q, k, g, beta)
    decay = prefix.exp()
    q_in, k_in, k_out = q * decay, k * decay, k * suffix.exp()
    out = torch.empty_like(v)
    bounds = plan.first.tolist()
    for share, slot in enumerate(plan.slots.tolist()):
        s = state[slot, layer]  # [H, V, K]
        for c in range(bounds[share], bounds[share + 1]):
            read = s.transpose(1, 2)
            y = solve[c] @ (beta[c] * (v[c] - k_in[c] @ read))
            out[c] = q_in[c] @ read + attend[c] @ y
            s = s * decay[c, :, -1:] + y.transpose(1, 2) @ k_out[c]
        state[slot, layer] = s
    return out.transpose(1, 2)


def within(q: Tensor, k: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a chunk does to itself; q, k, g [C, H, T, K], beta [C, H, T, 1], T a power of two.

    With D(j, i) = exp(g_(j+1) + ... + g_i) and M the strictly lower part of
    beta_i sum_d k_i k_j D(j, i):

    Returns:
        (I + M)^-1 [C, H, T, T]; the lower part, diagonal included, of sum_d q_i k_j D(j, i)
        [C, H, T, T]; the sums of g up to and including a row, and after it, [C, H, T, K].
    """
    shape, rows = g.shape, g.shape[2]
    prefix, suffix = g.flatten(0, 1).unsqueeze(2), torch.zeros_like(g).flatten(0, 1).unsqueeze(2)
    attend = (q * k).sum(-1).view(-1, rows, 1, 1)
    solve = torch.ones_like(attend)
    q, k, beta = (x.flatten(0, 1) for x in (q, k, beta))
    half = 1
    while half < rows:  # blocks of `half` rows, [C * H, rows / half, half, .], pair up
        total = prefix[:, :, -1:]
        grow, fade = prefix[:, 1::2].exp(), suffix[:, ::2].exp()
        low_k, low_q = (_halves(x, half)[:, 1::2] * grow for x in (k, q))
        high = (_halves(k, half)[:, ::2] * fade).transpose(-1, -2)
        mixed = _halves(beta, half)[:, 1::2] * (low_k @ high)
        solve = _join(solve, -(solve[:, 1::2] @ (mixed @ solve[:, ::2])))
        attend = _join(attend, low_q @ high)
        prefix = torch.cat([prefix[:, ::2], prefix[:, 1::2] + total[:, ::2]], 2)
        suffix = torch.cat([suffix[:, ::2] + total[:, 1::2], suffix[:, 1::2]], 2)
        half *= 2
    square = (*shape[:2], rows, rows)
    return solve.view(square), attend.view(square), prefix.view(shape), suffix.view(shape)


def _halves(x: Tensor, half: int) -> Tensor:
    pairs: Tensor = x.unflatten(1, (-1, half))
    return pairs


def _join(blocks: Tensor, corner: Tensor) -> Tensor:
    """Diagonal blocks [B, n, s, s] and the corners below [B, n/2, s, s] -> [B, n/2, 2s, 2s]."""
    upper = torch.cat([blocks[:, ::2], torch.zeros_like(corner)], -1)
    lower = torch.cat([corner, blocks[:, 1::2]], -1)
    return torch.cat([upper, lower], -2)


def steps(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    layer: int,
    plan: Steps,
) -> Tensor:
    """See `common.ops.kda.steps`."""
    rows, real = plan.real()
    if real is not plan:
        out = torch.zeros(v.shape, dtype=torch.float32, device=v.device)
        out[rows] = steps(q[rows], k[rows], v[rows], g[rows], beta[rows], state, layer, real)
        return out
    q, k = normalise(q) * q.shape[-1] ** -0.5, normalise(k)
    s, out = recurrence(q, k, v.float(), g, beta, state[plan.slots, layer])
    state[plan.slots, layer] = s
    return out


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token by the definition; q, k, g [B, H, K], v [B, H, V], beta [B, H], state [B, H, V, K].

    q and k are normalised and q scaled. Any float dtype. Returns the new state and o [B, H, V].
    """
    state = state * g.exp().unsqueeze(-2)
    error = v - (state @ k.unsqueeze(-1)).squeeze(-1)
    state = state + (beta.unsqueeze(-1) * error).unsqueeze(-1) * k.unsqueeze(-2)
    return state, (state @ q.unsqueeze(-1)).squeeze(-1)
