"""Which part of a tensor a rank reads: pure arithmetic over checkpoint names.

Heads, feed-forward widths and the vocabulary are cut over tensor ranks, experts over expert ranks;
norms, routers, latent projections and everything before a norm are read by every rank.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from common.errors import ConfigError

_CUT = re.compile(
    r"(\.self_attn\.(([qkvogb]|q_b|kv_b|f_b|g_b)_proj\.weight|[qkv]_conv1d\.weight|dt_bias)"
    r"|\.(mlp|shared_experts)\.(gate|up|down)_proj\.weight"
    r"|embed_tokens\.weight|lm_head\.weight)(_scale_inv)?$"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """One replica of a room: tensor ranks times expert ranks; both 1 is a single process."""

    tensor: int = 1
    expert: int = 1

    def check(self, heads: tuple[int, ...], experts: int) -> None:
        """Refuse a division that leaves a rank with part of a head or a fraction of the experts."""
        if self.tensor < 1 or any(count % self.tensor for count in heads):
            raise ConfigError(f"{self.tensor} tensor ranks do not divide the heads {list(heads)}")
        if not 1 <= self.expert <= experts:
            raise ConfigError(
                f"{self.expert} expert ranks for {experts} experts; take 1 to {experts}"
            )


def experts_of(rank: int, ranks: Ranks, experts: int) -> range:
    """The experts that a rank holds, as even as can be."""
    return range(rank * experts // ranks.expert, (rank + 1) * experts // ranks.expert)


def is_cut(name: str) -> bool:
    """Whether tensor ranks read a part of this tensor each."""
    return _CUT.search(name) is not None
