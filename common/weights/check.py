"""Judge a checkpoint by its configuration and headers alone, and say what each rank would read.

`baton check DIR` prints this. It reads no weight, so it takes seconds at the release's 1.5 TB.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from common.config.checkpoint import load_spec
from common.config.spec import ModelSpec
from common.weights.build import build_text, build_vision
from common.weights.index import stored
from common.weights.match import VISION, Match, Matcher
from common.weights.shares import Ranks, experts_of, is_cut
from common.weights.shelf import Shelf, star


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one rank of a room reads from the checkpoint."""

    room: str
    rank: int
    tensors: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A checkpoint that can be served."""

    spec: ModelSpec
    readings: tuple[Reading, ...]

    def lines(self) -> Iterator[str]:
        """The report as text, a line a rank."""
        text = self.spec.text
        kinds = f"{len(text.kda_layers)} KDA, {len(text.mla_layers)} MLA"
        yield f"{text.num_layers} layers ({kinds}), hidden {text.hidden}, vocabulary {text.vocab}"
        for r in self.readings:
            yield f"{r.room:8} rank {r.rank:<4} {r.tensors:8,} tensors {r.bytes / 2**30:10.3f} GiB"


def check(directory: Path, *, prefill: Ranks | None = None, decode: Ranks | None = None) -> Report:
    """Check a checkpoint directory for a deployment; None is a single process.

    Raises:
        CheckpointError: the configuration, a name, a shape or a dtype is wrong; it is named.
        ConfigError: the ranks do not divide the model.
    """
    spec = load_spec(directory)
    rooms = {"prefill": prefill or Ranks(), "decode": decode or Ranks()}
    for ranks in rooms.values():
        ranks.check((spec.text.kda.num_heads, spec.text.mla.num_heads), spec.text.moe.num_experts)
    tallies = [_Tally(room, ranks, spec.text.moe.num_experts) for room, ranks in rooms.items()]
    towers = [_Tally("encoder", Ranks(), 1)] if spec.vision is not None else []
    shelf = Shelf(torch.bfloat16, torch.device("meta"))
    build_text(spec, shelf)
    text, vision = Matcher(shelf.places, spec, vision=False), None
    if spec.vision is not None:
        tower = Shelf(torch.bfloat16, torch.device("meta"))
        build_vision(spec.vision, tower)
        vision = Matcher(tower.places, spec, vision=True)
    for tensor in stored(directory):
        seen = vision is not None and tensor.name.startswith(VISION)
        match = (vision if seen and vision else text).feed(tensor)
        for tally in towers if seen else tallies:
            tally.add(match)
    text.finish()
    if vision is not None:
        vision.finish()
    return Report(spec=spec, readings=tuple(r for t in (*towers, *tallies) for r in t.readings()))


class _Tally:
    """Tensors and bytes of every rank of one room, counted as matches come by."""

    def __init__(self, room: str, ranks: Ranks, experts: int) -> None:
        self._room, self._ranks = room, ranks
        self._expert_rank = [0] * experts
        for rank in range(ranks.expert):
            for expert in experts_of(rank, ranks, experts):
                self._expert_rank[expert] = rank
        self._own = [[0, 0] for _ in range(ranks.expert)]  # tensors and bytes of routed experts
        self._all = [0, 0, 0]  # tensors, bytes read whole, bytes cut over tensor ranks

    def add(self, match: Match | None) -> None:
        if match is None:
            return
        parts = [match.main] if match.scale is None else [match.main, match.scale]
        size = sum(part.size for part in parts)
        if match.place.experts:
            own = self._own[self._expert_rank[match.expert]]
            own[0] += len(parts)
            own[1] += size
            return
        self._all[0] += len(parts)
        self._all[2 if is_cut(star(match.main.name)[0]) else 1] += size

    def readings(self) -> Iterator[Reading]:
        tensors, whole, cut = self._all
        for rank in range(self._ranks.tensor * self._ranks.expert):
            own = self._own[rank % self._ranks.expert]
            yield Reading(
                room=self._room,
                rank=rank,
                tensors=tensors + own[0],
                bytes=whole + (cut + own[1]) // self._ranks.tensor,
            )
