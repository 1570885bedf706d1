"""What so many GPUs can serve: replicas, layouts, memory and expected rates, or why not.

Pure arithmetic. The parts were measured on one H200 and between two (docs/capacity.md says which);
what was not measured is an assumption that stands here by name. Rates are estimates for planning
and promise nothing; memory is exact up to padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from common.config.geometry import fit, page_bytes, slot_bytes, text_values
from common.config.ranks import GIB, RankMemory, rank_memory
from common.config.spec import CHUNK, ModelSpec
from common.config.step import Rates, Rows, exchanged, projected
from common.errors import ConfigError

NODE = 8  # GPUs with fast links between them; tensor ranks stay inside
RESERVE = 8 * GIB  # of every rank: activations, graphs, exchange buffers, the libraries
PREFILL_SHARE = 0.45  # of the matmul peak: 0.63 measured on one GPU, less an assumed 0.7 for ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One kind of device."""

    memory: int
    copy: float  # bytes/s read plus written
    flops: float  # bf16
    network: float  # bytes/s of one GPU's way out of its node
    is_measured: bool = False


GPUS = {
    "h200": Gpu(memory=139 * GIB, copy=4.274e12, flops=680e12, network=50e9, is_measured=True),
    "b200": Gpu(memory=178 * GIB, copy=7.0e12, flops=1500e12, network=50e9),
    "b300": Gpu(memory=268 * GIB, copy=7.0e12, flops=1500e12, network=100e9),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One replica of a text room."""

    tensor: int
    data: int
    expert: int
    memory: RankMemory
    requests: int  # of the typical size, all lanes together

    @property
    def world(self) -> int:
        """Ranks."""
        return self.tensor * self.data


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is asked for."""

    gpus: int
    gpu: str
    context: int  # most tokens of one request
    users: int  # requests in decode at once
    typical: int  # tokens a request holds on average
    answer: int  # tokens of an answer on average


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A deployment that fits."""

    wish: Wish
    prefill: Layout
    prefill_replicas: int
    decode: Layout
    decode_replicas: int
    step_s: float
    prefill_rate: float  # prompt tokens/s, all replicas
    exchange_bytes: int  # one rank sends in one layer of one step, at most

    def lines(self) -> Iterator[str]:
        """The plan as text."""
        wish = self.wish
        users = self.decode.requests * self.decode_replicas
        rate = min(wish.users, users) / self.step_s
        note = "" if GPUS[wish.gpu].is_measured else "; this GPU was never measured here"
        yield f"{wish.gpus} x {wish.gpu}, {wish.users} users, {wish.typical:,} tokens each{note}"
        yield "encoder    shares a GPU of prefill (its weights are in the reserve)"
        for name, count, layout in (
            ("prefill", self.prefill_replicas, self.prefill),
            ("decode", self.decode_replicas, self.decode),
        ):
            yield (
                f"{name:10} {count} x {layout.world} GPUs: tensor {layout.tensor}, data "
                f"{layout.data}, expert {layout.expert}; {layout.requests} requests each"
            )
            yield from (f"  {line}" for line in layout.memory.lines())
        if self.prefill.world > 1:
            yield "note       this version runs a prefill replica as one rank (docs/ranks.md)"
        yield f"step       {self.step_s * 1e3:.1f} ms, {1 / self.step_s:.0f} tokens/s a user"
        yield f"decode     {rate:,.0f} tokens/s, {rate / wish.answer:.1f} answers/s"
        prompt = max(1, wish.typical - wish.answer)
        rate = self.prefill_rate
        yield f"prefill    {rate:,.0f} tokens/s, {rate / prompt:.1f} prompts/s"
        yield f"exchange   {self.exchange_bytes / 1e6:.1f} MB a rank, layer and step at most"


def plan(spec: ModelSpec, wish: Wish, *, dtype: str = "bfloat16") -> Plan:
    """Divide the GPUs between prefill and decode.

    Prefill gets the smallest replicas that fit, decode the rest; of the ways to do that the one
    whose slower stage finishes most requests a second is taken.

    Raises:
        ConfigError: the model or the users do not fit; it says what does.
    """
    for what in ("gpus", "context", "users", "typical", "answer"):
        if getattr(wish, what) < 1:
            raise ConfigError(f"{what} is {getattr(wish, what)}; it must be at least 1")
    if wish.gpu not in GPUS:
        raise ConfigError(f"GPU {wish.gpu!r} is unknown; use one of {', '.join(GPUS)}")
    if wish.context > spec.text.max_position:
        raise ConfigError(
            f"a context of {wish.context} is beyond the model's {spec.text.max_position}"
        )
    smallest = _smallest(spec, wish, dtype)
    best: tuple[tuple[float, float], Plan] | None = None
    most = 0
    for count in range(1, wish.gpus // smallest.world + 1):
        left = wish.gpus - count * smallest.world
        for replicas, decode in _decodes(spec, wish, dtype, left):
            most = max(most, decode.requests * replicas)
            if decode.requests * replicas < wish.users:
                continue
            found = _rated(spec, wish, dtype, smallest, count, decode, replicas)
            score = _score(found)
            if best is None or score > best[0]:
                best = (score, found)
    if best is None:
        raise ConfigError(_why(wish, smallest, most))
    return best[1]


def _why(wish: Wish, smallest: Layout, most: int) -> str:
    if not most:
        return (
            f"{wish.gpus} x {wish.gpu} are too few: a prefill replica alone takes "
            f"{smallest.world}, and what is left cannot hold the model a second time"
        )
    return (
        f"{wish.users} users of {wish.typical:,} tokens do not fit {wish.gpus} x {wish.gpu}: at "
        f"most {most} do; give more GPUs, fewer users or fewer tokens a user"
    )


def _smallest(spec: ModelSpec, wish: Wish, dtype: str) -> Layout:
    """The fewest ranks that hold the model and one request of the full context."""
    for world in range(1, wish.gpus + 1):
        found = [
            layout
            for tensor in _tensors(spec, world)
            if (layout := _layout(spec, wish, dtype, tensor, world // tensor)) is not None
        ]
        if found:
            return max(found, key=lambda layout: layout.requests)
    need = rank_memory(spec, dtype).total
    have = wish.gpus * GPUS[wish.gpu].memory
    raise ConfigError(
        f"the model and one request of {wish.context:,} tokens do not fit {wish.gpus} x {wish.gpu}:"
        f" weights take {need / GIB:,.0f} GiB of {have / GIB:,.0f}, each rank keeps "
        f"{RESERVE / GIB:.0f} free, and some weights are repeated; give more GPUs"
    )


def _decodes(spec: ModelSpec, wish: Wish, dtype: str, gpus: int) -> Iterator[tuple[int, Layout]]:
    for replicas in range(1, gpus + 1):
        world = gpus // replicas
        for tensor in _tensors(spec, world):
            layout = _layout(spec, wish, dtype, tensor, world // tensor)
            if layout is not None:
                yield replicas, layout


def _tensors(spec: ModelSpec, world: int) -> list[int]:
    heads = (spec.text.kda.num_heads, spec.text.mla.num_heads)
    ways = [t for t in (1, 2, 4, 8) if t <= NODE and world % t == 0]
    return [t for t in ways if all(count % t == 0 for count in heads)]


def _layout(spec: ModelSpec, wish: Wish, dtype: str, tensor: int, data: int) -> Layout | None:
    """A replica whose experts are shared by all ranks; None where it does not fit."""
    text = spec.text
    expert = tensor * data
    if expert > text.moe.num_experts:
        return None
    memory = rank_memory(
        spec,
        dtype,
        tensor=tensor,
        data=data,
        expert=expert,
        reserve=RESERVE,
        available=GPUS[wish.gpu].memory,
    )
    free = memory.available - memory.total
    page, slot = page_bytes(text, dtype), slot_bytes(text, dtype, tensor=tensor)
    if free < slot + -(-wish.context // CHUNK) * page:
        return None
    pools = fit(text, dtype, memory=free, tokens=wish.typical, tensor=tensor)
    memory = replace(memory, slots=pools.slots * slot, pages=pools.pages * page)
    return Layout(
        tensor=tensor, data=data, expert=expert, memory=memory, requests=pools.slots * data
    )


def _rated(
    spec: ModelSpec,
    wish: Wish,
    dtype: str,
    prefill: Layout,
    prefills: int,
    decode: Layout,
    decodes: int,
) -> Plan:
    gpu = GPUS[wish.gpu]
    rows = Rows(
        lane=max(1, -(-wish.users // (decodes * decode.data))),
        context=wish.typical,
        tensor=decode.tensor,
        data=decode.data,
        expert=decode.expert,
    )
    rates = Rates(copy=gpu.copy, flops=gpu.flops, network=gpu.network)
    rate = prefill.world * prefills * gpu.flops * PREFILL_SHARE / (2 * active_values(spec))
    return Plan(
        wish=wish,
        prefill=prefill,
        prefill_replicas=prefills,
        decode=decode,
        decode_replicas=decodes,
        step_s=sum(projected(spec, dtype, rows, rates).values()),
        prefill_rate=rate,
        exchange_bytes=exchanged(spec, rows),
    )


def _score(found: Plan) -> tuple[float, float]:
    """Requests/s of the slower stage, then of decode."""
    wish = found.wish
    decode = wish.users / found.step_s / wish.answer
    return min(decode, found.prefill_rate / max(1, wish.typical - wish.answer)), decode


def active_values(spec: ModelSpec) -> int:
    """Values that take part in one token's products: all but the embedding and unchosen experts."""
    text, moe = spec.text, spec.text.moe
    narrow, wide = text_values(text)
    one = 3 * (moe.latent or text.hidden) * moe.width
    return narrow + wide - text.vocab * text.hidden + len(text.moe_layers) * moe.top_k * one
