"""Which part of a tensor a rank reads: pure arithmetic over checkpoint names.

Heads, feed-forward widths (those of experts too) and the vocabulary are cut over tensor ranks,
experts over expert ranks; norms, routers, latent projections and everything before a norm are read
by every rank.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from common.config.spec import TextSpec
from common.errors import ConfigError
from common.parallel.mesh import Mesh
from common.parallel.placement import Placement, even

WIDTH_UNIT = 32  # a cut width is a multiple of it: one MXFP4 group, the widest vector loop

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


@dataclass(frozen=True, slots=True)
class Cut:
    """The part `start` to `stop` of one dimension of a stored tensor, of `total` values."""

    dim: int
    start: int
    stop: int
    total: int

    def divided(self, each: int) -> Cut:
        """The same part where one stored value stands for `each`; borders must fall on them."""
        assert self.start % each == self.stop % each == self.total % each == 0
        return Cut(self.dim, self.start // each, self.stop // each, self.total // each)


@dataclass(frozen=True, slots=True)
class Piece:
    """One rank's piece of an extent: `size` values in memory, of which `real` are read."""

    size: int
    start: int
    real: int
    total: int

    def cut(self, dim: int) -> Cut | None:
        """What is read along a dimension; None where that is all of it."""
        if self.real == self.total:
            return None
        return Cut(dim, self.start, self.start + self.real, self.total)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What one rank of a replica holds of the text model."""

    tensor: int = 0
    tensors: int = 1  # heads, vocabulary and plain feed-forward widths are cut so many ways
    width: int = 0
    widths: int = 1  # the widths of its experts are cut so many ways
    experts: tuple[int, ...] | None = None  # its experts in the order of its memory; None: all
    places: int = 0  # experts that it has memory for, at least those it holds
    spread: bool = False  # rows are spread over tensor ranks, so each has the shared expert whole

    @property
    def is_whole(self) -> bool:
        """Whether this is the whole model, as a single process holds it."""
        return self == Shard()

    def heads(self, count: int, each: int = 1) -> Piece:
        """Its heads' values, `each` a head."""
        own = count // self.tensors * each
        return Piece(own, self.tensor * own, own, count * each)

    def vocabulary(self, total: int) -> Piece:
        """Its rows of embedding and head; short ones are padded with zeros."""
        return _piece(total, self.tensor, self.tensors, 1)

    def wide(self, total: int) -> Piece:
        """Its part of a plain feed-forward width, padded with zeros to whole units."""
        return _piece(total, self.tensor, self.tensors, WIDTH_UNIT)

    def shared(self, total: int) -> Piece:
        """Its part of the shared expert's width."""
        return _piece(total, 0, 1, WIDTH_UNIT) if self.spread else self.wide(total)

    def expert_width(self, total: int) -> Piece:
        """Its part of an expert's width, padded with zeros to whole units."""
        return _piece(total, self.width, self.widths, WIDTH_UNIT)

    def owned(self, count: int) -> tuple[int, ...]:
        """Its experts of `count`."""
        return tuple(range(count)) if self.experts is None else self.experts


WHOLE = Shard()


def shard_of(
    mesh: Mesh, rank: int, text: TextSpec, placement: Placement | None = None, *, spare: int = 0
) -> Shard:
    """What a rank of a mesh holds; experts spread evenly unless a placement says otherwise.

    `spare` are places of a share beyond the fullest even one's.

    Raises:
        ConfigError: the mesh does not divide the model, or there is no such rank.
    """
    mesh.check(text)
    seat = mesh.seat(rank)
    shares = (placement or even(text.moe.num_experts, mesh.expert)).shares
    return Shard(
        tensor=seat.tensor,
        tensors=mesh.tensor,
        width=seat.width,
        widths=mesh.widths,
        experts=shares[seat.expert] if mesh.expert > 1 else None,
        places=-(-text.moe.num_experts // mesh.expert) + spare if spare else 0,
        spread=mesh.spread,
    )


def _piece(total: int, index: int, ways: int, unit: int) -> Piece:
    if ways == 1:
        return Piece(total, 0, total, total)
    size = -(-total // (ways * unit)) * unit
    start = min(index * size, total)
    return Piece(size, start, min(size, total - start), total)
