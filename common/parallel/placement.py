"""Placement: which experts each share holds; popular ones may be held by several.

Plain data and the tables made from it. An expert's copies hold the same weights, so which copy
serves a row never shows in a result. How a placement is chosen is the decode room's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Placement:
    """`shares[s]` are the logical experts that share s holds, in the order of its memory."""

    shares: tuple[tuple[int, ...], ...]

    def check(self, num_experts: int) -> None:
        """Refuse a placement that forgets an expert, holds one twice in a share, or invents one.

        Raises:
            ConfigError: naming the share or the expert.
        """
        held: set[int] = set()
        for number, share in enumerate(self.shares):
            if len(set(share)) != len(share):
                raise ConfigError(f"share {number} holds an expert twice: {list(share)}")
            held |= set(share)
        if held != set(range(num_experts)):
            wrong = sorted(held ^ set(range(num_experts)))
            raise ConfigError(f"experts {wrong[:8]} are held nowhere or do not exist")


def even(num_experts: int, shares: int) -> Placement:
    """Neighbouring experts together, every expert once, shares as even as can be."""
    bounds = [i * num_experts // shares for i in range(shares + 1)]
    return Placement(tuple(tuple(range(a, b)) for a, b in pairwise(bounds)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """A placement as index tensors: copy c of expert e is entry [e, c % copies[e]]."""

    copies: Tensor  # int64 [E], at least 1
    share: Tensor  # int64 [E, most copies]
    local: Tensor  # int64 [E, most copies], position in the share's memory

    def take(self, other: Routes) -> None:
        """Become `other`, in place: a captured pass reads these very tensors."""
        for name in ("copies", "share", "local"):
            getattr(self, name).copy_(getattr(other, name))

    def find(self, ids: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
        """Where chosen experts are computed.

        Args:
            ids: int64 [...], logical experts.
            spread: int64, broadcast over `ids`; picks the copy, evenly when it is spread evenly.

        Returns:
            Shares and positions in them, both of the shape of `ids`.
        """
        copy = spread.expand(ids.shape) % self.copies[ids]
        return self.share[ids, copy], self.local[ids, copy]


def routes(
    placement: Placement, num_experts: int, device: torch.device | str, *, most: int = 1
) -> Routes:
    """The tables of a placement, checked; with room for `most` copies of an expert, or more."""
    placement.check(num_experts)
    places: list[list[tuple[int, int]]] = [[] for _ in range(num_experts)]
    for number, share in enumerate(placement.shares):
        for position, expert in enumerate(share):
            places[expert].append((number, position))
    most = max(most, *map(len, places))
    padded = [(own * most)[:most] for own in places]
    table = torch.tensor(padded, dtype=torch.int64, device=device)
    return Routes(
        copies=torch.tensor([len(own) for own in places], device=device),
        share=table[..., 0].contiguous(),
        local=table[..., 1].contiguous(),
    )
