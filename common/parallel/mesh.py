"""Mesh: the ranks of one replica on three axes, as plain data.

`tensor` cuts heads, vocabulary and feed-forward widths; `data` counts attention replicas (lanes),
each with requests of its own; `expert` is the number of shares that whole experts are divided into.
There are tensor x data ranks, rank = lane x tensor + position. The expert shares lie over the same
ranks: up to one share a lane, beyond that several to a lane. The tensor ranks that hold the same
experts cut their widths between them. Nothing here communicates, and there is no current mesh.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from common.config.spec import CHUNK, TextSpec
from common.errors import ConfigError

AXES = ("tensor", "data", "expert")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Where one rank sits."""

    rank: int
    tensor: int  # position among its lane's tensor ranks
    lane: int  # position on the data axis
    expert: int  # which share of the experts it holds
    width: int  # which cut of their widths
    part: int  # which rows of its lane it hands to the experts: row % parts == part


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The layout of one replica's ranks."""

    tensor: int = 1
    data: int = 1
    expert: int = 1
    spread: bool = False  # between mixers each tensor rank keeps its own rows

    def __post_init__(self) -> None:
        """Refuse a layout that leaves a rank without a place."""
        for axis in AXES:
            if getattr(self, axis) < 1:
                raise ConfigError(f"{axis} is {getattr(self, axis)}; every axis has a rank or more")
        fits = self.data % self.expert == 0
        if self.expert > self.data:
            fits = self.expert % self.data == 0 and self.tensor % self.parts == 0
        if not fits:
            raise ConfigError(
                f"experts cannot be shared {self.expert} ways over {self.tensor} x {self.data} "
                "ranks; take a divisor of data, or data times a divisor of tensor"
            )
        if self.spread and (CHUNK % self.tensor or not 1 < self.tensor == self.parts):
            raise ConfigError(
                f"rows cannot be spread over {self.tensor} tensor ranks with experts shared "
                f"{self.expert} ways; take 2 or more that divide {CHUNK}, and "
                f"expert = {self.tensor * self.data}, so that every rank holds whole experts"
            )

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tensor * self.data

    @property
    def parts(self) -> int:
        """Expert shares inside one lane; each takes its share of the lane's rows."""
        return max(1, self.expert // self.data)

    @property
    def widths(self) -> int:
        """Ranks between which the width of each expert is cut."""
        return self.tensor // self.parts

    def seat(self, rank: int) -> Seat:
        """The coordinates of a rank.

        Raises:
            ConfigError: there is no such rank.
        """
        if not 0 <= rank < self.world:
            raise ConfigError(f"rank {rank} is not one of the {self.world} of {self}")
        lane, tensor = divmod(rank, self.tensor)
        part, width = divmod(tensor, self.widths)
        expert = lane % self.expert if self.expert <= self.data else lane * self.parts + part
        return Seat(rank=rank, tensor=tensor, lane=lane, expert=expert, width=width, part=part)

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """The ranks that differ from `rank` along one axis alone, in order along it.

        On the expert axis: the ranks that together hold every expert once, in one cut of widths.
        """
        here = self.seat(rank)
        seats = [self.seat(other) for other in range(self.world)]
        if axis == "tensor":
            return tuple(s.rank for s in seats if s.lane == here.lane)
        if axis == "data":
            return tuple(s.rank for s in seats if s.tensor == here.tensor)
        if axis != "expert":
            raise ValueError(f"{axis!r} is no axis; use one of {', '.join(AXES)}")
        block = here.lane // self.expert  # lanes repeat the experts when there are fewer shares
        own = [s for s in seats if s.width == here.width and s.lane // self.expert == block]
        return tuple(s.rank for s in sorted(own, key=lambda s: s.expert))

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """All groups along an axis, by their first rank."""
        return tuple(sorted({self.group(axis, rank) for rank in range(self.world)}))

    def check(self, text: TextSpec) -> None:
        """Refuse a model that these ranks do not divide.

        Raises:
            ConfigError: heads are no multiple of the tensor ranks, or experts are too few.
        """
        for kind, heads in (("KDA", text.kda.num_heads), ("MLA", text.mla.num_heads)):
            if heads % self.tensor:
                raise ConfigError(
                    f"{heads} {kind} heads cannot be cut over {self.tensor} tensor ranks; "
                    "take a divisor"
                )
        if self.expert > text.moe.num_experts:
            raise ConfigError(
                f"{text.moe.num_experts} experts cannot be shared {self.expert} ways; "
                f"take at most {text.moe.num_experts}"
            )


ALONE = Mesh()


def narrowed(text: TextSpec, mesh: Mesh) -> TextSpec:
    """The model as one rank's pools and mixers see it: its own heads, everything else whole."""
    mesh.check(text)
    kda = replace(text.kda, num_heads=text.kda.num_heads // mesh.tensor)
    mla = replace(text.mla, num_heads=text.mla.num_heads // mesh.tensor)
    return replace(text, kda=kda, mla=mla)
