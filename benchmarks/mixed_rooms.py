"""The two ways to use a device's engines that `benchmarks.mixed` compares, as one process a device.

Apart: a prefill or a decode room as the product has it. Both: the two rooms' engines in one process
over one model and one memory, in one thread that takes turns: a decode step of all that run, then
a prefill step of at most `chunk` tokens. What prefill has computed becomes decode's by exchanging
the numbers of slots and pages; nothing is copied and nothing goes over NIXL. The product has no
such room; this is the baseline. It does not put decode's rows into a prompt's pass, which some
engines do.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

import torch

from common.config.settings import Settings
from common.config.spec import ModelSpec
from common.contract.messages import DecodeJob, Endpoint
from common.model.text import TextModel
from common.ops.select import choose
from common.runtime import text_room
from common.runtime.loaded import Loaded, fitted, load_text, use_device
from common.runtime.loop import EngineLoop
from common.runtime.memory import TextMemory
from services.decode import room as decode_room
from services.decode.held import Held
from services.decode.intake import Intake, Times
from services.decode.room import DecodeRoom
from services.prefill.engine import PrefillEngine
from services.prefill.room import PrefillRoom
from tests.support.processes import SECRET


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one process plays: kinds of "prefill", "decode" and "both", over the same model."""

    device: str
    kinds: tuple[str, ...]
    context: int  # most tokens of a request
    is_slice: bool  # four layers of true width with random weights, else the settings' checkpoint


def play(pipe: Connection, settings: Settings, part: Part) -> None:
    """Open the rooms when told, say where they listen, obey `("chunk", tokens)` until told None."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("baton.graphs").setLevel(logging.INFO)  # how long captures took, and memory
    loaded = model_of(settings, part)
    pipe.send("loaded")
    pipe.recv()
    asyncio.run(_play(pipe, settings, part, loaded))


async def _play(pipe: Connection, settings: Settings, part: Part, loaded: Loaded) -> None:
    seats: dict[str, list[Endpoint]] = {}
    rooms: list[PrefillRoom | DecodeRoom] = []
    both: list[PrefillRoom] = []
    for kind in part.kinds:
        made = made_rooms(kind, settings, loaded)
        if kind == "both":
            both.append(made[0])
        rooms += made
        seats[kind] = [await room.open("127.0.0.1") for room in made]
    where = {kind: [(e.id, e.host, e.port) for e in some] for kind, some in seats.items()}
    device, gib = "cpu", 0.0
    if loaded.device.type == "cuda":
        device = torch.cuda.get_device_name(loaded.device)
        gib = torch.cuda.memory_reserved(loaded.device) / 2**30
    pipe.send((where, device, gib))
    while (told := await asyncio.to_thread(pipe.recv)) is not None:
        for room in both:
            set_chunk(room.engine, told[1])
        pipe.send(None)
    for room in rooms:
        await room.close()


def model_of(settings: Settings, part: Part) -> Loaded:
    """The model of one process; the slice's weights are the same in all of them."""
    if not part.is_slice:
        return load_text(settings)
    from benchmarks.slice import BF16, SPEC, weights

    device = torch.device(part.device)
    torch.set_num_threads(1)
    use_device(device)
    torch.manual_seed(0)
    text = dataclasses.replace(SPEC, max_position=part.context)
    ops, _ = choose(
        settings.model.ops, text, quantization="mxfp4", dtype=BF16, device=device, exact=False
    )
    model = TextModel(text, fitted(weights(), ops), ops=ops, exact=False)
    torch.cuda.empty_cache()
    spec = ModelSpec(
        text=text, vision=None, prefix="", quantization="mxfp4", bos=0, eos=1, pad=1,
        media_pad=None,
    )  # fmt: skip
    return Loaded(
        spec=spec, dtype=BF16, device=device, model_print="slice", layout_print="slice", model=model
    )


def made_rooms(kind: str, settings: Settings, loaded: Loaded) -> list[Any]:
    """A room, or the two of "both"."""
    if kind == "prefill":
        return [_over(loaded, None, lambda: PrefillRoom(settings, secret=SECRET))]
    if kind == "decode":
        return [_over(loaded, None, lambda: DecodeRoom(settings, secret=SECRET))]
    size = settings.prefill, settings.decode
    memory = TextMemory(
        loaded.spec.text,
        slots=sum(table.slots for table in size),
        pages=sum(table.pages for table in size),
        dtype=loaded.dtype,
        device=loaded.device,
    )
    prefill = _over(loaded, memory, lambda: PrefillRoom(settings, secret=SECRET))
    decode = _over(loaded, memory, lambda: DecodeRoom(settings, secret=SECRET))
    take_turns(prefill, decode)
    return [prefill, decode]


def _over(loaded: Loaded, memory: TextMemory | None, make: Callable[[], Any]) -> Any:
    """A room over a model that is loaded, and over memory that another room has too."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(text_room, "load_text", lambda _: loaded))
        stack.enter_context(patch.object(decode_room, "check_memory", lambda _: None))
        if memory is not None:
            stack.enter_context(patch.object(text_room, "TextMemory", lambda *_, **__: memory))
        return make()


def set_chunk(engine: PrefillEngine, tokens: int) -> None:
    """Most tokens of a prefill step."""
    engine._settings = dataclasses.replace(engine._settings, step_tokens=tokens)


def take_turns(prefill: PrefillRoom, decode: DecodeRoom) -> None:
    """Run both engines in one thread, and hand over within the memory they share."""
    first, second = prefill.engine, decode.engine

    def step() -> bool:
        stepped = second._step()
        return first._step() or stepped

    loop = Turns("both", step)
    loop.on_failure(first._fail_all)
    loop.on_failure(second._fail_all)
    first.loop = second.loop = loop
    second._threads = AtOnce()
    second._intake = Here(first, second._intake)


class Turns(EngineLoop):
    """The loop of two rooms, each of which starts it."""

    def start(self, first: Callable[[], None] | None = None) -> None:
        if not self._thread.is_alive():
            super().start(first)


class AtOnce(ThreadPoolExecutor):
    """Runs what is submitted where it is submitted: in the engines' thread."""

    def submit(self, fn, /, *args, **kwargs):  # type: ignore[override]
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done


class Here(Intake):
    """Takes in what the same process computed: its slot and pages change hands."""

    def __init__(self, prefill: PrefillEngine, other: Intake) -> None:
        self._prefill, self.readers, self.tamper = prefill, other.readers, None

    def take(
        self, held: Held, job: DecodeJob, posted: float, read_ended: Callable[[], None]
    ) -> Times:
        works = self._prefill.works()
        work = next(w for w in works if w.job.request == job.request and w.stage == "published")
        count, shared = len(work.pages), len(held.shared_pages)
        empty = held.prompt_pages
        filled, rest = work.pages, held.own_pages[0][count - shared :]
        held.slots, work.slot = (work.slot,), held.slots[0]
        held.shared_pages, held.own_pages = filled[:shared], (filled[shared:] + rest,)
        work.pages = empty
        read_ended()
        return Times(wait_s=0.0, pull_s=0.0, verify_s=0.0)
