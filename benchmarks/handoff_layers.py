"""Hand-offs in layer groups while the last chunk is computed, against handing all off afterwards.

    python -m benchmarks.handoff_layers [--devices 1|2] [--tokens 1024 8192] [--small]

Real rooms: a prefill room in a process of its own, a decode room and a router's journey in this
one, NIXL between them, pools of K3's true sizes. Only the model is not: for each of the 93 layers
`Standing` multiplies matrices and then writes the layer's state or latents, anew in every pass, so
that every byte has to arrive. The last chunk is `prefill.step_tokens` long at most.

Counted from when the last kernel of the last chunk had run (both processes have one host's clock):
`arrived`, until the last byte was here; `exposed`, until decode had what it needs, messages,
sampling and signing among it. Of that, from when the job reached decode, `hand-off`: what was left
to READ, the digests' end, and the comparison with the seal. Both orders turn about in one run.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from benchmarks.handoff_sides import devices_of, keep, other_process, spec_of, told
from benchmarks.harness import summary
from common.cache.layout import wire_layout
from common.config.settings import Settings
from common.config.spec import ModelSpec
from common.contract.messages import Endpoint
from common.contract.regions import print_of
from common.model.batch import Memory, StepBatch
from common.runtime import text_room
from common.runtime.loaded import Loaded
from router.house import House
from router.seats import Seat
from services.decode import room as decode_room
from services.decode.room import DecodeRoom
from services.prefill.early import borders_of
from services.prefill.room import PrefillRoom
from tests.support.golden import NANO
from tests.support.processes import SECRET
from tests.support.relay import Relay, changed, house_of

GROUPS = 12
ROUNDS, WARM = 8, 2
WIDTH = 32768  # of the products that stand for a layer
FIGURES = ("last chunk", "arrived", "exposed", "hand-off")
Found = dict[int, dict[str, list[float]]]  # seconds by groups and figure


class Standing:
    """In a model's place: a layer is two products, and a fresh value in all that it leaves."""

    def __init__(self, spec: ModelSpec, device: torch.device, hidden: int, width: int) -> None:
        self.spec, self.device = spec.text, device
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.up = torch.randn(hidden, width, device=device, dtype=dtype)
        self.down = torch.randn(width, hidden, device=device, dtype=dtype)
        self.logits = torch.zeros(1, self.spec.vocab, device=device)
        self.passes = 0
        self.ended_at, self.took_s = 0.0, 0.0  # when the last pass had run, and for how long

    def load(self) -> list[list[int]]:
        return []

    def forward(self, batch: StepBatch, memory: Memory) -> Tensor:
        return self.capture(batch, memory)[0]

    def capture(
        self,
        batch: StepBatch,
        memory: Memory,
        *,
        layers: Sequence[int] = (),
        convention: str = "",
        after: Callable[[int], None] | None = None,
    ) -> tuple[Tensor, None]:
        if batch.kind == "chunks":
            (share,), began = batch.shares, time.monotonic()
            self.passes += 1
            pages = torch.tensor(share.pages[share.start // 64 :], device=self.device)
            rows = self.up.new_ones(len(share.token_ids), self.up.shape[0])
            is_last = share.want_logits  # earlier chunks only leave what they must
            for layer in range(self.spec.num_layers):
                if is_last:
                    torch.mm(torch.mm(rows, self.up), self.down)
                self._leave(layer, share.slot, pages, memory)
                if after is not None:
                    after(layer)
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
            self.ended_at = time.monotonic()
            self.took_s = self.ended_at - began
        wanted = sum(share.want_logits for share in batch.shares)
        return self.logits.expand(wanted, -1), None

    def _leave(self, layer: int, slot: int, pages: Tensor, memory: Memory) -> None:
        value = float(self.passes + layer)
        if layer in self.spec.kda_layers:
            at = self.spec.kda_layers.index(layer)
            memory.state[slot, at].fill_(value)
            memory.conv[slot, at].fill_(value)
        else:
            memory.latent[pages, self.spec.mla_layers.index(layer)] = value


def settings_of(device: str, tokens: int, step_tokens: int) -> Settings:
    pages = 3 * (tokens // 64 + 2)
    return changed(
        Settings(),
        model={"path": str(NANO), "device": device, "dtype": "bfloat16", "ops": "reference"},
        prefill={"slots": 2, "pages": pages, "step_tokens": step_tokens},
        decode={"slots": 2, "pages": pages, "graphs": False},
        transfer={"layer_groups": GROUPS},
    )


def stand(spec: ModelSpec, device: str, small: bool) -> Standing:
    """Put the stand-in where rooms look for their model."""
    where = torch.device(device)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    torch.set_num_threads(1)
    hidden, width = (256, 2048) if small else (spec.text.hidden, WIDTH)
    model = Standing(spec, where, hidden, width)
    loaded = Loaded(
        spec=spec,
        dtype=torch.bfloat16,
        device=where,
        model_print="standing",
        layout_print=print_of(wire_layout(spec.text, torch.bfloat16)),
        model=model,  # type: ignore[arg-type]
    )
    text_room.load_text = lambda settings: loaded
    decode_room.check_memory = lambda settings: None
    decode_room.graphed = lambda model, *more: model
    return model


def lend(pipe: Connection, spec: ModelSpec, device: str, settings: Settings, small: bool) -> None:
    """The producer: a prefill room that obeys a pipe."""
    model = stand(spec, device, small)

    async def serve() -> None:
        room = PrefillRoom(settings, secret=SECRET)
        pipe.send(await room.open("127.0.0.1"))
        layers = len(spec.text.kda_layers)
        while (asked := await asyncio.to_thread(pipe.recv)) is not None:
            if asked == "ended":
                pipe.send((model.ended_at, model.took_s))
            else:
                room.engine._borders = borders_of(layers, asked) if asked else ()
                pipe.send(None)
        await room.close()

    asyncio.run(serve())


class Watch:
    """When decode had what it needs, and what it said of it."""

    def __init__(self, room: DecodeRoom) -> None:
        self.arrived_at, self.verified_at, self.hand_off_s = 0.0, 0.0, 0.0
        take, fetch = room.intake.take, room.intake._fetch

        def timed(*arguments: Any) -> Any:
            times = take(*arguments)
            self.verified_at = time.monotonic()
            self.hand_off_s = times.pull_s + times.verify_s
            return times

        def fetched(*arguments: Any) -> None:
            fetch(*arguments)
            self.arrived_at = time.monotonic()

        room.intake.take = timed  # type: ignore[method-assign]
        room.intake._fetch = fetched  # type: ignore[method-assign]


async def compare(
    producer: Endpoint, pipe: Connection, settings: Settings, lengths: Sequence[int]
) -> None:
    """Hand-offs of prompts of some lengths, both orders turn about."""
    room = DecodeRoom(settings, secret=SECRET)
    here = await room.open("127.0.0.1")
    seats = [Seat(key=e.id, host=e.host, port=e.port) for e in (producer, here)]
    try:
        async with house_of(settings, seats) as house:
            for tokens in lengths:
                found: Found = {n: {figure: [] for figure in FIGURES} for n in (0, GROUPS)}
                await rounds(room, house, pipe, tokens, found)
                tell(found, tokens, settings.prefill.step_tokens)
    finally:
        await room.close()


def tell(found: Found, tokens: int, step: int) -> None:
    for groups, figures in found.items():
        for figure, seconds in figures.items():
            case = {"what": "layers", "groups": groups, "tokens": tokens, "step_tokens": step}
            keep("handoff", case | {"figure": figure}, summary(seconds))
            print(f"{tokens:6} tokens, {groups:2} groups: {figure:10} {told(summary(seconds))}")
    for figure in FIGURES[1:]:
        early, whole = (statistics.median(found[groups][figure]) for groups in (GROUPS, 0))
        print(f"{tokens:6} tokens: {figure} {early / whole:.2f} of the whole", flush=True)


async def rounds(
    room: DecodeRoom,
    house: House,
    pipe: Connection,
    tokens: int,
    found: Found,
) -> None:
    relay, watch = Relay(house, decodes=[room]), Watch(room)

    def asked(what: object) -> Any:
        pipe.send(what)
        return pipe.recv()

    for number in range(WARM + ROUNDS):
        for groups, figures in found.items():
            await asyncio.to_thread(asked, groups)
            reply = await relay.run(relay.task(range(5, 5 + tokens), max_tokens=2))
            assert reply.finish == ["length"], reply
            ended_at, took_s = await asyncio.to_thread(asked, "ended")
            if number >= WARM:
                figures["last chunk"].append(took_s)
                figures["arrived"].append(watch.arrived_at - ended_at)
                figures["exposed"].append(watch.verified_at - ended_at)
                figures["hand-off"].append(watch.hand_off_s)
        await relay.nothing_left()


def main() -> None:
    """One of the two."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, choices=(1, 2), default=1)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--step-tokens", type=int, default=1024)
    parser.add_argument("--small", action="store_true", help="a tiny model, for a trial on a CPU")
    args = parser.parse_args()
    spec = spec_of(args.small)
    producer, receiver = devices_of(args.devices, args.small)
    most, step = max(args.tokens), args.step_tokens
    theirs = settings_of(producer, most, step)
    with other_process(lend, spec, producer, theirs, args.small) as pipe:
        stand(spec, receiver, args.small)
        peer = pipe.recv()
        asyncio.run(compare(peer, pipe, settings_of(receiver, most, step), args.tokens))


if __name__ == "__main__":
    main()
