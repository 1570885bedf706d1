"""GraphedModel: decode steps as captured CUDA graphs, one for each bucket of batch sizes.

A step's tokens, slots, starts and page tables are written into tensors that stay where they are;
the graph of the smallest bucket that holds the batch is replayed over them. Rows that fill a bucket
up are padding (`common.ops.plan.Steps`): they own no slot and no page, so capturing and padding
touch nobody's memory. To an engine it is a model like any other; passes over chunks run as before.
On another device the same path runs without graphs, which is how it is tested.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from itertools import accumulate, repeat, takewhile

import torch
from torch import Tensor

from common.cache.mla_pool import pages_of
from common.config.geometry import step_bytes
from common.config.settings import DecodeSettings, Settings
from common.config.spec import TextSpec
from common.model.batch import Forward, Memory, Share, StepBatch
from common.model.run import check
from common.model.text import TextModel, reset
from common.ops.draw import OPEN, SURE
from common.ops.exchange import Layout
from common.ops.plan import Steps
from common.ops.select import uncapturable
from common.parallel import nixl_ep_open
from common.parallel.direct_axis import room_of
from common.parallel.team import Team
from common.runtime.grouped import GroupModel
from common.runtime.loaded import load_facts
from common.runtime.memory import TextMemory
from common.runtime.part import Plan, chosen, planned_memory
from common.runtime.recorder import Call, Cuda, Recorder
from common.sampling.history import ENTRY_BYTES, MOST_KEPT
from common.weights.tree import MoeWeights

logger = logging.getLogger("baton.graphs")
LIBRARY_BYTES = 1 << 29  # workspaces of matrix products and attention
LAYER_BYTES = 1 << 20  # of one graph's nodes, a layer


def buckets(most: int) -> tuple[int, ...]:
    """Batch sizes to capture: powers of two to 8, then at most an eighth to a half apart.

    The last is `most`; a larger batch never comes.
    """
    steps = accumulate(repeat(None), lambda size, _: size + _gap(size), initial=1)
    return (*takewhile(lambda size: size < most, steps), most)


def _gap(size: int) -> int:
    if size < 8:
        return size
    return max(8, 1 << (size.bit_length() - 3))


class GraphedModel:
    """A model whose steps are replayed."""

    def __init__(
        self,
        model: TextModel,
        memory: Memory,
        *,
        most: int,
        width: int,
        recorder: Recorder | None = None,
    ) -> None:
        """Record every bucket, the largest first.

        Args:
            model: of a team only if all its ranks record together, and what joins them can be
                recorded.
            memory: the pools that every step will be over.
            most: rows of the largest step.
            width: most pages of one share.
            recorder: `Cuda` by default.
        """
        self._model, self._memory, self._width = model, memory, width
        device, kind = model.weights.embed.device, torch.int64
        self._rows = torch.full((3, most), -1, dtype=kind, device=device)  # ids, slots, starts
        self._tables = torch.full((most, width), -1, dtype=kind, device=device)
        self._owned: list[tuple[int, ...]] = [()] * most  # what the tables say
        self._logits = torch.empty(most, model.spec.vocab, device=device)
        self._write((), most)
        self._plans = {size: self._plan(size) for size in buckets(most)}
        recorder = recorder or Cuda()
        self._replays = {
            size: recorder.record(self._work(size, plan))
            for size, plan in reversed(self._plans.items())
        }

    def _plan(self, size: int) -> Steps:
        _, slots, starts = self._rows[:, :size]
        plan = Steps(slots=slots, starts=starts, tables=self._tables[:size])
        self._schedule(plan, [-1] * size)
        return plan

    def _schedule(self, plan: Steps, starts: Sequence[int]) -> None:
        if self._model.ops.plan_steps is not None:
            self._model.ops.plan_steps(plan, starts, stays=True)

    def _work(self, size: int, plan: Steps) -> Call:
        ids = self._rows[0, :size]

        def work() -> None:
            self._model.step(ids, plan, self._memory, self._logits[:size])

        return work

    def forward(self, batch: StepBatch, memory: Memory) -> Tensor:
        """See `TextModel.forward`; logits of steps are valid until the next pass.

        Raises:
            ValueError: also for a step of more rows or pages than were recorded, of image rows, or
                over other memory.
        """
        if batch.kind != "steps":
            return self._model.forward(batch, memory)
        self._check(batch, memory)
        count = len(batch.shares)
        size = next(size for size in self._plans if size >= count)
        reset(batch, memory)
        self._write(batch.shares, size)
        starts = [share.start for share in batch.shares]
        self._schedule(self._plans[size], starts + [-1] * (size - count))
        wanted = [row for row, share in enumerate(batch.shares) if share.want_logits]
        rows: slice | Tensor = slice(count)
        if len(wanted) < count:  # before the pass: the host waits for the copy
            rows = torch.tensor(wanted, dtype=torch.int64, device=self._logits.device)
        with torch.inference_mode():
            self._replays[size]()
        return self._logits[rows]

    def idle(self) -> None:
        """Take part in a step of other lanes without a request of one's own."""
        size = min(self._plans)
        self._write((), size)
        self._schedule(self._plans[size], [-1] * size)
        with torch.inference_mode():
            self._replays[size]()

    def _check(self, batch: StepBatch, memory: Memory) -> None:
        check(batch)
        most, longest = len(self._owned), max(len(share.pages) for share in batch.shares)
        if len(batch.shares) > most or longest > self._width:
            raise ValueError(
                f"a step of {len(batch.shares)} rows of up to {longest} pages; graphs were made "
                f"for {most} rows of {self._width} pages"
            )
        if memory is not self._memory:
            raise ValueError("a step is over other memory than its graph")
        if any(share.embeds is not None for share in batch.shares):
            raise ValueError("a share of a step brings image rows; a step has token ids alone")

    def _write(self, shares: Sequence[Share], size: int) -> None:
        """Fill the first `size` rows: shares, then padding."""
        rest = size - len(shares)
        rows = [
            [share.token_ids[0] for share in shares] + [0] * rest,
            [share.slot for share in shares] + [-1] * rest,
            [share.start for share in shares] + [-1] * rest,
        ]
        self._rows[:, :size].copy_(torch.tensor(rows))
        owned = [share.pages for share in shares]
        changed = [
            row
            for row, pages in enumerate(owned)
            if pages is not self._owned[row] and pages != self._owned[row]
        ]
        if changed:
            widest = max(len(owned[row]) for row in changed)
            table = [[*owned[row], *[-1] * (widest - len(owned[row]))] for row in changed]
            index = torch.tensor(changed, device=self._tables.device)
            self._tables[index, :widest] = torch.tensor(table, device=self._tables.device)
            for row in changed:
                self._owned[row] = owned[row]


def graph_bytes(
    text: TextSpec, dtype: str, decode: DecodeSettings, context: int = 0, *, ranks: int = 1
) -> int:
    """What steps, graphs and the choice of tokens will take of a device, rounded up.

    `context` as in `width_of`; `ranks` share the experts.
    """
    most = decode.max_batch
    tables = 2 * 8 * most * width_of(text, decode.pages, context)
    nodes = len(buckets(most)) * text.num_layers * LAYER_BYTES
    choice = most * (8 * (SURE + OPEN) + ENTRY_BYTES * MOST_KEPT)
    return LIBRARY_BYTES + step_bytes(text, dtype, most, ranks=ranks) + tables + nodes + choice


def width_of(text: TextSpec, pages: int, context: int = 0) -> int:
    """Most pages of one share, where `context` tokens may be more than the model's own limit."""
    return min(pages, pages_of(max(text.max_position, context)))


def graphed(model: TextModel, memory: TextMemory, settings: Settings) -> Forward:
    """The model, with its steps captured where they can be; what cannot is told."""
    device, decode = model.weights.embed.device, settings.decode
    if device.type != "cuda" or not decode.graphs:
        return model
    if why := _unrecordable(model):
        logger.warning("steps run without CUDA graphs: %s", why)
        return model
    began, free = time.monotonic(), torch.cuda.mem_get_info(device)[0]
    width = width_of(model.spec, memory.pages.total, settings.model.context)
    with torch.cuda.device(device):
        made = GraphedModel(model, memory.tensors, most=decode.max_batch, width=width)
    logger.info(
        "captured steps of up to %d rows in %.1f s; with their graphs they hold %.2f GiB",
        decode.max_batch,
        time.monotonic() - began,
        (free - torch.cuda.mem_get_info(device)[0]) / (1 << 30),
    )
    return made


def _unrecordable(model: TextModel) -> str | None:
    """Why a model's steps cannot be captured; None when they can."""
    team, top = model.team, model.spec.moe.top_k
    if team is not None and (why := _meeting(team)):
        return why
    if team is not None and team.exchange is not None:
        top = 1  # a row comes once for each expert
    layers = (layer.ffn for layer in model.weights.layers if isinstance(layer.ffn, MoeWeights))
    first = next(layers, None)
    return uncapturable(model.ops, None if first is None else first.experts, top)


def _meeting(team: Team) -> str:
    """Why what joins the ranks cannot be captured; empty when it can."""
    if team.mesh.spread:
        return "rows that are spread over tensor ranks are not recorded; set decode.spread = false"
    if not (team.tensor.recordable and (team.exchange is None or team.exchange.recordable)):
        return (
            "ranks meet in calls that a graph does not hold; where all are on one host, set "
            'decode.exchange = "direct"'
        )
    return ""


def record(plan: Plan, model: GroupModel, memory: TextMemory) -> None:
    """Capture a rank's steps, where they can be; all ranks of a decode group do this together."""
    if plan.room == "decode":
        made = graphed(model, memory, plan.settings)
        model.replays = made if isinstance(made, GraphedModel) else None


def group_reserve(plan: Plan) -> int:
    """What a rank of a decode group takes of its device beside weights and pools."""
    settings, mesh = plan.settings, plan.mesh
    if plan.exchange == "all_to_all" or settings.model.device == "cpu":
        return 0
    facts = load_facts(settings)
    text = facts.spec.text
    size = _exchange_bytes(plan, text, facts.dtype) if mesh.expert > 1 else 0
    if plan.exchange == "direct" and mesh.tensor > 1:
        size += 2 * mesh.tensor * room_of(text, plan.rows, facts.dtype)
    if settings.decode.graphs:
        size += graph_bytes(
            text, settings.model.dtype, settings.decode, settings.model.context, ranks=mesh.expert
        )
    return size


def _exchange_bytes(plan: Plan, text: TextSpec, dtype: torch.dtype) -> int:
    ranks, top, width = plan.mesh.expert, text.moe.top_k, text.moe.latent or text.hidden
    if plan.exchange == "nixl_ep":
        experts = -(-text.moe.num_experts // ranks) + plan.spare
        return nixl_ep_open.reserve(
            ranks=ranks, rows=plan.rows, top=top, width=width, experts=experts
        )
    return Layout(ranks=ranks, places=plan.rows * top, width=width, dtype=dtype).size


def check_memory(settings: Settings) -> None:
    """Plan the memory of a decode replica of one GPU, graphs counted, and judge it.

    Raises:
        ConfigError: the device has less.
    """
    plan = Plan.of(settings, "decode")
    if plan.mesh.world > 1 or settings.model.device == "cpu":
        return  # each rank of a group plans its own; a host's memory is shared by all rooms
    facts, kept = load_facts(settings), 0
    if settings.decode.graphs:
        model = settings.model
        kept = graph_bytes(facts.spec.text, model.dtype, settings.decode, model.context)
    wanted = planned_memory(facts, plan, chosen(facts, plan), reserve=kept)
    logger.info("memory of the replica:\n%s", "\n".join(wanted.lines()))
    wanted.check()
