"""Part: what one rank of a group has: its weights and pools first, its model once all have met.

The same steps on the leader and on every other rank, so that they agree; printing what a rank will
hold, and refusing what does not fit, comes before the first byte is read.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from common.config.geometry import ITEM_BYTES
from common.config.ranks import RankMemory, rank_memory
from common.config.settings import Settings
from common.errors import ConfigError
from common.ops.select import choose
from common.ops.table import Ops
from common.parallel.collectives import open_axes
from common.parallel.mesh import Mesh, narrowed
from common.parallel.team import join
from common.runtime.group import joining
from common.runtime.grouped import GroupModel
from common.runtime.loaded import Facts, Loaded, load_facts
from common.runtime.memory import Mirror, TextMemory
from common.runtime.orders import Join, Order, layout_of
from common.weights import load_text as load_weights
from common.weights.shares import shard_of
from common.weights.tree import TextWeights

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

logger = logging.getLogger(__name__)
PATIENCE_S = 15.0  # of a collective; weights are loaded and all ranks met before the first


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One rank's weights, before it has met the others."""

    facts: Facts
    mesh: Mesh
    rank: int
    slots: int
    pages: int
    ops: Ops
    weights: TextWeights

    def memory(self, mirror: Mirror | None = None, lane: int | None = None) -> TextMemory:
        """Allocate this rank's pools; with `lane`, only the books of another lane's."""
        spec = narrowed(self.facts.spec.text, self.mesh)
        return TextMemory(
            spec,
            slots=self.slots,
            pages=self.pages,
            dtype=self.facts.dtype,
            device=self.facts.device if lane is None else "meta",
            first_head=self.mesh.seat(self.rank).tensor * spec.kda.num_heads,
            mirror=mirror,
            lane=lane or 0,
        )

    def meet(self, store: Store, send: Callable[[Order], None] | None = None) -> GroupModel:
        """Join the group's collectives; all ranks do this together. `send` is the leader's."""
        backend = "nccl" if self.facts.device.type == "cuda" else "gloo"
        axes = open_axes(self.mesh, self.rank, store, backend=backend, patience_s=PATIENCE_S)
        text = self.facts.spec.text
        team = join(self.mesh, self.rank, axes, text, device=self.facts.device)
        return GroupModel(
            text,
            self.weights,
            team=team,
            data=axes["data"],
            ops=self.ops,
            exact=self.facts.device.type == "cpu",
            send=send,
        )

    def loaded(self, model: GroupModel) -> Loaded:
        """The facts with the model that has met its group."""
        facts = {field.name: getattr(self.facts, field.name) for field in FIELDS}
        facts.pop("directory")
        return Loaded(**facts, model=model)


FIELDS = dataclasses.fields(Facts)


def first_word(
    settings: Settings, mesh: Mesh, rank: int, *, secret: str, slots: int, pages: int
) -> Join:
    """How a rank will introduce itself; its memory is planned and judged before it is taken.

    Raises:
        ConfigError: the mesh does not divide the model, or the rank's memory does not suffice.
    """
    facts = load_facts(settings)
    mesh.check(facts.spec.text)
    wanted = planned_memory(facts, settings.model.dtype, mesh, slots=slots, pages=pages)
    logger.info("memory of rank %d:\n%s", rank, "\n".join(wanted.lines()))
    wanted.check()
    return joining(
        secret=secret,
        rank=rank,
        world=mesh.world,
        model_print=facts.model_print,
        layout_print=layout_of(facts.layout_print, slots=slots, pages=pages, mesh=mesh),
    )


def read_part(settings: Settings, mesh: Mesh, rank: int, *, slots: int, pages: int) -> Part:
    """Read one rank's weights."""
    facts = load_facts(settings)
    ops, _ = choose(
        settings.model.ops,
        facts.spec.text,
        quantization=facts.spec.quantization,
        dtype=facts.dtype,
        device=facts.device,
    )
    shard = shard_of(mesh, rank, facts.spec.text)
    weights = load_weights(
        facts.directory, facts.spec, dtype=facts.dtype, device=facts.device, shard=shard
    )
    return Part(
        facts=facts, mesh=mesh, rank=rank, slots=slots, pages=pages, ops=ops, weights=weights
    )


def planned_memory(facts: Facts, dtype: str, mesh: Mesh, *, slots: int, pages: int) -> RankMemory:
    """What the fullest rank will hold, against what its device has."""
    if dtype not in ITEM_BYTES:
        raise ConfigError(f"dtype {dtype!r} is unknown; use one of {', '.join(ITEM_BYTES)}")
    unpacked = dataclasses.replace(facts.spec, quantization=None)  # experts become values
    return rank_memory(
        unpacked,
        dtype,
        tensor=mesh.tensor,
        data=mesh.data,
        expert=mesh.expert,
        slots=slots,
        pages=pages,
        available=device_memory(facts.device),
    )


def device_memory(device: torch.device) -> int:
    """Bytes of a GPU, or of the host; ranks of one host share the latter."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
