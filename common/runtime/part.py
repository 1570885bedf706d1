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
from common.ops.select import choose, takes_packed
from common.ops.table import Ops
from common.parallel.collectives import open_axes
from common.parallel.mesh import Mesh, narrowed
from common.parallel.team import join
from common.runtime.group import joining
from common.runtime.grouped import GroupModel
from common.runtime.loaded import Facts, Loaded, is_exact, load_facts, read_weights
from common.runtime.memory import Mirror, TextMemory
from common.runtime.orders import Join, Order, layout_of
from common.weights.shares import shard_of
from common.weights.tree import TextWeights

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

logger = logging.getLogger("baton.loading")
PATIENCE_S = 15.0  # of a collective; weights are loaded and all ranks met before the first


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What every rank of a replica is started with."""

    settings: Settings
    room: str  # "prefill" or "decode": the table with the axes and the sizes of the pools
    mesh: Mesh
    slots: int  # of a lane
    pages: int
    spare: int = 0  # places for copies of experts
    moves: bool = False  # whether experts change ranks
    exchange: str = "all_to_all"
    rows: int = 0  # most of a lane in one pass, where the exchange must know

    @classmethod
    def of(cls, settings: Settings, room: str) -> Plan:
        """The plan that a room's table names.

        Raises:
            ConfigError: its axes make no mesh.
        """
        table = settings.prefill if room == "prefill" else settings.decode
        mesh = Mesh(tensor=table.tensor, data=table.data, expert=table.expert, spread=table.spread)
        moving = room == "decode"
        return cls(
            settings=settings,
            room=room,
            mesh=mesh,
            slots=table.slots,
            pages=table.pages,
            spare=settings.decode.spare_experts if moving else 0,
            moves=moving and settings.decode.rebalance_s > 0,
            exchange=settings.decode.exchange if moving else "all_to_all",
            rows=settings.decode.max_batch if moving else 0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One rank's weights, before it has met the others."""

    facts: Facts
    plan: Plan
    rank: int
    ops: Ops
    weights: TextWeights

    def memory(self, mirror: Mirror | None = None, lane: int | None = None) -> TextMemory:
        """Allocate this rank's pools; with `lane`, only the books of another lane's."""
        mesh = self.plan.mesh
        spec = narrowed(self.facts.spec.text, mesh)
        return TextMemory(
            spec,
            slots=self.plan.slots,
            pages=self.plan.pages,
            dtype=self.facts.dtype,
            device=self.facts.device if lane is None else "meta",
            first_head=mesh.seat(self.rank).tensor * spec.kda.num_heads,
            mirror=mirror,
            lane=lane or 0,
        )

    def meet(self, store: Store, send: Callable[[Order], None] | None = None) -> GroupModel:
        """Join the group's collectives; all ranks do this together. `send` is the leader's."""
        backend = self._backend(store)
        mesh = self.plan.mesh
        axes = open_axes(mesh, self.rank, store, backend=backend, patience_s=PATIENCE_S)
        text = self.facts.spec.text
        team = join(
            mesh,
            self.rank,
            axes,
            text,
            spare=self.plan.spare,
            exchange=self.plan.exchange,
            rows=self.plan.rows,
            dtype=self.facts.dtype,
            device=self.facts.device,
        )
        return GroupModel(
            text,
            self.weights,
            team=team,
            data=axes["data"],
            ops=self.ops,
            exact=is_exact(self.plan.settings, self.facts.device),
            send=send,
        )

    def _backend(self, store: Store) -> str:
        """NCCL between devices; ranks that share one, which NCCL refuses, go over host memory."""
        if self.facts.device.type != "cuda":
            return "gloo"
        uuid = str(torch.cuda.get_device_properties(self.facts.device).uuid)
        world = self.plan.mesh.world
        store.set(f"device/{self.rank}", uuid)
        devices = {bytes(store.get(f"device/{rank}")) for rank in range(world)}
        if len(devices) == world:
            return "nccl"
        logger.warning(
            "%d ranks share %d devices: collectives go over host memory, which is slow; give every "
            "rank a device of its own",
            world,
            len(devices),
        )
        return "gloo"

    def loaded(self, model: GroupModel) -> Loaded:
        """The facts with the model that has met its group."""
        facts = {field.name: getattr(self.facts, field.name) for field in FIELDS}
        facts.pop("directory")
        return Loaded(**facts, model=model)


FIELDS = dataclasses.fields(Facts)


def first_word(plan: Plan, rank: int, *, secret: str, reserve: int = 0) -> Join:
    """How a rank will introduce itself; its memory is planned and judged before it is taken.

    `reserve` are bytes for what is no weight and no pool.

    Raises:
        ConfigError: the mesh does not divide the model, or the rank's memory does not suffice.
    """
    facts, mesh = load_facts(plan.settings), plan.mesh
    mesh.check(facts.spec.text)
    wanted = planned_memory(facts, plan, chosen(facts, plan), reserve=reserve)
    logger.info("memory of rank %d:\n%s", rank, "\n".join(wanted.lines()))
    wanted.check()
    return joining(
        secret=secret,
        rank=rank,
        world=mesh.world,
        model_print=facts.model_print,
        layout_print=layout_of(
            f"{plan.room} {plan.spare} {plan.moves} {facts.layout_print}",
            slots=plan.slots,
            pages=plan.pages,
            mesh=mesh,
        ),
    )


def read_part(plan: Plan, rank: int) -> Part:
    """Read one rank's weights."""
    facts = load_facts(plan.settings)
    ops = chosen(facts, plan)
    shard = shard_of(plan.mesh, rank, facts.spec.text, spare=plan.spare)
    weights = read_weights(facts, ops, shard=shard, moves=plan.moves)
    return Part(facts=facts, plan=plan, rank=rank, ops=ops, weights=weights)


def chosen(facts: Facts, plan: Plan) -> Ops:
    """The bodies of a rank's ops."""
    return choose(
        plan.settings.model.ops,
        narrowed(facts.spec.text, plan.mesh),
        quantization=facts.spec.quantization,
        dtype=facts.dtype,
        device=facts.device,
        exact=plan.settings.model.exact,
    )[0]


def planned_memory(facts: Facts, plan: Plan, ops: Ops, *, reserve: int = 0) -> RankMemory:
    """What the fullest rank will hold, against what its device has.

    The body of `ops` for experts says whether they stay as the checkpoint packs them, become FP8,
    or values. `reserve` is kept for steps and graphs.
    """
    dtype, mesh = plan.settings.model.dtype, plan.mesh
    if dtype not in ITEM_BYTES:
        raise ConfigError(f"dtype {dtype!r} is unknown; use one of {', '.join(ITEM_BYTES)}")
    return rank_memory(
        dataclasses.replace(facts.spec, quantization=_held(ops, facts.spec.quantization)),
        dtype,
        tensor=mesh.tensor,
        data=mesh.data,
        expert=mesh.expert,
        spread=mesh.spread,
        spare=plan.spare,
        landing=plan.moves,
        slots=plan.slots,
        pages=plan.pages,
        reserve=reserve,
        available=device_memory(facts.device),
    )


def _held(ops: Ops, quantization: str | None) -> str | None:
    """How experts lie in memory: None where they are values of the model's dtype."""
    if not takes_packed(ops):
        return None
    held: str | None = getattr(ops.experts, "held", quantization)
    return held


def device_memory(device: torch.device) -> int:
    """Bytes of a GPU, or of the host; ranks of one host share the latter."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
