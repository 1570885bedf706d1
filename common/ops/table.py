"""Ops: which body serves each op, as one value that is made at start and handed down.

The fields are the public functions of the families, which are their torch definitions; a faster
body with the same signature and promises may stand in for any of them. `kda_mix` is the one op that
is defined by others: convolution, gate, delta rule and gated norm, one after another, which is what
the model does when there is no body for all of it. `plan_steps` is what a body of `mla_steps` wants
to know on the host before a pass of steps. Nothing falls back here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from common.ops import act, attnres, conv, kda, mla, moe, norm, paging, rows, vit


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops:
    """One body for each op that the model calls; signatures are those of the families."""

    linear: Callable[..., Tensor] = rows.linear
    widened: Callable[..., Tensor] = rows.widened
    rms_norm: Callable[..., Tensor] = norm.rms_norm
    gated_rms_norm: Callable[..., Tensor] = norm.gated_rms_norm
    activate: Callable[..., Tensor] = act.activate
    residual_read: Callable[..., tuple[Tensor, Tensor]] = attnres.read
    conv_chunks: Callable[..., Tensor] = conv.conv_chunks
    conv_steps: Callable[..., Tensor] = conv.conv_steps
    kda_gate: Callable[..., Tensor] = kda.gate
    kda_chunks: Callable[..., Tensor] = kda.chunks
    kda_steps: Callable[..., Tensor] = kda.steps
    kda_mix: Callable[..., Tensor] | None = None
    write_chunks: Callable[..., None] = paging.write_chunks
    write_steps: Callable[..., None] = paging.write_steps
    mla_chunks: Callable[..., Tensor] = mla.attend_chunks
    mla_steps: Callable[..., Tensor] = mla.attend_steps
    plan_steps: Callable[..., None] | None = None
    route: Callable[..., tuple[Tensor, Tensor]] = moe.route
    experts: Callable[..., Tensor] = moe.experts
    vit_rotate: Callable[..., None] = vit.rotate
    vit_attend: Callable[..., Tensor] = vit.attend


REFERENCE = Ops()
