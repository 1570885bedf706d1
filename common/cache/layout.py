"""The layout print's facts: what a slot, a page and an embedding row look like on the wire.

Pure arithmetic on a TextSpec; pool sizes are no part of it, since rooms differ in them. Two rooms
whose facts differ would misread each other's bytes, so a ticket carries their print.
"""

from __future__ import annotations

import torch

from common.config.checkpoint import CHUNK, TextSpec

PAGE_TOKENS = CHUNK
STATE_DTYPE = torch.float32


def state_shape(spec: TextSpec) -> tuple[int, ...]:
    """One slot of recurrent state: [kda_layers, heads, V, K]."""
    kda = spec.kda
    return (len(spec.kda_layers), kda.num_heads, kda.head_dim, kda.head_dim)


def conv_shape(spec: TextSpec) -> tuple[int, ...]:
    """One slot of convolution state: [kda_layers, heads, taps - 1, 3 (q, k, v), head_dim]."""
    kda = spec.kda
    return (len(spec.kda_layers), kda.num_heads, kda.conv_taps - 1, 3, kda.head_dim)


def latent_shape(spec: TextSpec) -> tuple[int, ...]:
    """One page of latents: [mla_layers, page_tokens, latent_width]."""
    return (len(spec.mla_layers), PAGE_TOKENS, spec.mla.latent_width)


def size_of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of one slot, page or row."""
    size = dtype.itemsize
    for extent in shape:
        size *= extent
    return size


def wire_layout(spec: TextSpec, dtype: torch.dtype) -> dict[str, object]:
    """Every kind's facts; `print_of` this is the layout print all rooms of a deployment share."""
    return {
        "state": facts(state_shape(spec), STATE_DTYPE, layers=spec.kda_layers),
        "conv": facts(conv_shape(spec), dtype, layers=spec.kda_layers),
        "latent": facts(latent_shape(spec), dtype, layers=spec.mla_layers),
        "embed": facts((spec.hidden,), dtype),
    }


def facts(
    shape: tuple[int, ...], dtype: torch.dtype, *, layers: tuple[int, ...] = ()
) -> dict[str, object]:
    """One kind's facts: shape and size of its unit, its dtype, and the model layers it covers."""
    return {
        "shape": list(shape),
        "dtype": str(dtype).removeprefix("torch."),
        "bytes": size_of(shape, dtype),
        "layers": list(layers),
    }
