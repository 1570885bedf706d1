"""The trainable vision tower and projector: many pictures at once, 256 patch slots each."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.nano.layers import Weight
from benchmarks.nano.packing import SIDE, SLOTS
from common.config.spec import VisionSpec
from common.ops.norm import rms_norm

EPS = torch.finfo(torch.float32).eps  # of the tower's own norms


class Grids(nn.Module):
    """Tables for every size of picture, (h, w) both even and at most 16; not stored."""

    def __init__(self, vision: VisionSpec) -> None:
        super().__init__()
        sizes = [(h, w) for h in range(2, SIDE + 1, 2) for w in range(2, SIDE + 1, 2)]
        table = (vision.grid_height, vision.grid_width)
        cells = table[0] * table[1]
        head = vision.qkv_width // vision.num_heads
        speeds = 10000.0 ** (-4.0 * torch.arange(head // 4) / head)
        unit = torch.eye(cells).view(1, cells, *table)
        spread = torch.zeros(len(sizes), SLOTS, cells)
        angles = torch.zeros(len(sizes), SLOTS, head // 2)
        order = torch.zeros(len(sizes), SLOTS, dtype=torch.long)
        for i, (h, w) in enumerate(sizes):
            used = h * w
            weights = functional.interpolate(unit, (h, w), mode="bilinear", align_corners=False)
            spread[i, :used] = weights[0].flatten(1).t()
            y, x = (
                a.flatten() for a in torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
            )
            # Pairs of channels turn by the column and by the row in turn, both at one speed.
            both = torch.stack([x[:, None] * speeds, y[:, None] * speeds], -1)
            angles[i, :used] = both.flatten(1)
            slot = torch.arange(used).view(h // 2, 2, w // 2, 2)
            order[i, :used] = slot.transpose(1, 2).flatten()  # 2 x 2 neighbours together
        self.register_buffer("spread", spread, persistent=False)
        self.register_buffer("angles", angles, persistent=False)
        self.register_buffer("order", order, persistent=False)

    def index(self, grid: Tensor) -> Tensor:
        """Row of the tables for patches down and across, int32 [I, 2]."""
        half = grid.long() // 2 - 1
        return half[:, 0] * (SIDE // 2) + half[:, 1]


class Block(nn.Module):
    """One layer of the tower."""

    def __init__(self, vision: VisionSpec) -> None:
        super().__init__()
        hidden, qkv, wide = vision.hidden, vision.qkv_width, vision.mlp_width
        self.heads = vision.num_heads
        self.norm0 = Weight(hidden, fill=1.0)
        self.norm1 = Weight(hidden, fill=1.0)
        self.wqkv = Weight(3 * qkv, hidden)
        self.wo = Weight(hidden, qkv, std=0.3 * qkv**-0.5)
        self.mlp = nn.Module()
        self.mlp.fc0 = Weight(wide, hidden)
        self.mlp.fc1 = Weight(hidden, wide, std=0.3 * wide**-0.5)

    def forward(self, x: Tensor, angles: Tensor, allowed: Tensor) -> Tensor:
        """x [I, SLOTS, hidden], angles [I, 1, SLOTS, D / 2], allowed [I, 1, 1, SLOTS]."""
        qkv = self.wqkv(rms_norm(x, self.norm0.weight, EPS)).unflatten(-1, (3, self.heads, -1))
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        q, k = turn(q, angles), turn(k, angles)
        seen = functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        x = x + self.wo(seen.transpose(1, 2).flatten(-2))
        inner = self.mlp.fc0(rms_norm(x, self.norm1.weight, EPS))
        return x + self.mlp.fc1(functional.gelu(inner, approximate="tanh"))


def turn(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate neighbouring channels as pairs, in fp32."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angles.cos(), angles.sin()
    pairs = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1)
    return pairs.flatten(-2).to(x.dtype)


class Vision(nn.Module):
    """Tower and projector; parameter names are the checkpoint's after the first dot."""

    def __init__(self, vision: VisionSpec) -> None:
        super().__init__()
        hidden, merged = vision.hidden, vision.hidden * vision.merge**2
        self.eps = vision.projector_eps
        self.grids = Grids(vision)
        tower, embed, encoder = nn.Module(), nn.Module(), nn.Module()
        patch = (3, vision.patch, vision.patch)
        embed.proj = Weight(hidden, *patch, std=(3 * vision.patch**2) ** -0.5)
        embed.pos_emb = Weight(vision.grid_height, vision.grid_width, hidden, std=0.3)
        encoder.blocks = nn.ModuleList(Block(vision) for _ in range(vision.num_layers))
        encoder.final_layernorm = Weight(hidden, fill=1.0)
        tower.patch_embed, tower.encoder = embed, encoder
        self.vision_tower = tower
        self.mm_projector = nn.Module()
        layers = [Weight(merged, merged), nn.Identity(), Weight(vision.text_hidden, merged)]
        self.mm_projector.proj = nn.ModuleList(layers)
        self.mm_projector.post_norm = Weight(vision.text_hidden, fill=0.5)

    def forward(self, patches: Tensor, grid: Tensor, dtype: torch.dtype) -> Tensor:
        """patches uint8 [I, SLOTS, 588], grid [I, 2] -> [I, SLOTS / 4, text_hidden]."""
        embed, encoder = self.vision_tower.patch_embed, self.vision_tower.encoder
        size = self.grids.index(grid)
        x = ((patches.float() / 255 - 0.5) / 0.5).to(dtype)
        x = functional.linear(x, embed.proj.weight.flatten(1).to(dtype))
        x = x + (self.grids.spread[size] @ embed.pos_emb.weight.flatten(0, 1)).to(dtype)
        angles = self.grids.angles[size][:, None]
        used = grid.long().prod(1)
        allowed = torch.arange(SLOTS, device=x.device) < used[:, None]
        for block in encoder.blocks:
            x = block(x, angles, allowed[:, None, None])
        x = rms_norm(x, encoder.final_layernorm.weight, EPS)
        order = self.grids.order[size][..., None].expand_as(x)
        x = x.gather(1, order).unflatten(1, (-1, 4)).flatten(2)
        first, _, second = self.mm_projector.proj
        y = second(functional.gelu(first(x)))
        return rms_norm(y, self.mm_projector.post_norm.weight, self.eps)
