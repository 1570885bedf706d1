"""Offers pulled while prefill computes the last chunk: the same answers, and nothing held after.

Real rooms in this process. A pass is held behind a layer, so that what was pulled by then is known
and not a matter of luck. Rooms that die: test_early_deaths.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import ClassVar

import msgspec
import pytest
import torch

from common.config.settings import Settings
from common.contract.messages import DecodeJob, Offered, PullJob
from common.errors import CapacityError, HandoffRefused, ServingError
from tests.integration.test_loss import TEXT, ask, right
from tests.support.harm import PAGE, PREVIOUS, STATE, Harm
from tests.support.passing import END, Pulled, Stop, until
from tests.support.prompts import image, question
from tests.support.relay import Relay, changed, in_process

GROUPS = 3  # of nano's six layers with a state: 0 1 | 2 4 | 5 6
EARLY = changed(Settings(), transfer={"layer_groups": GROUPS}, prefill={"step_tokens": 64})
WHOLE = changed(Settings(), prefill={"step_tokens": 64})
PORTIONS = [0, 2, 4, 6]  # layers that are here after each

ASKED = [
    {"token_ids": question(1)},
    {"token_ids": question(2, 20)},  # one short chunk
    {"token_ids": question(3, 64)},
    {"token_ids": question(4), "n": 3, "temperature": 1.0, "seed": 7},
    {"token_ids": question(5), "canary": True},
    {"token_ids": question(6, 129), "canary": True, "n": 2},
    {"token_ids": question(7), "images": [image()], "offsets": [40]},
    {"token_ids": question(8), "max_tokens": 1},
]


async def answers(relay: Relay) -> list[list[list[int]]]:
    """Of all that is asked, at once."""
    tasks = [relay.task(**{"max_tokens": 12} | asked) for asked in ASKED]
    replies = await asyncio.gather(*map(relay.run, tasks))
    return [[reply.ids(c) for c in range(len(reply.tokens))] for reply in replies]


async def test_answers_are_the_same_token_for_token():
    async with in_process(WHOLE, encoder=1) as relay:
        wanted = await answers(relay)
    async with in_process(EARLY, encoder=1) as relay:
        pulled = Pulled(relay)
        assert await answers(relay) == wanted
        for name in TEXT:
            assert await ask(relay, name) == right(name)
        assert pulled.layers() == PORTIONS[-1]
        assert refusals(relay) == 0
        await relay.nothing_left()


def refusals(relay: Relay) -> float:
    rooms = [*relay.prefills, *relay.decodes]
    told = [room.tally.snapshot() for room in rooms]
    return sum(
        v for some in told for k, v in some.items() if k.startswith("baton_handoffs_refused")
    )


@pytest.mark.parametrize(("layer", "portion"), [(0, 0), (1, 1), (3, 1), (4, 2), (7, 3), (END, 3)])
async def test_what_is_final_is_pulled_and_nothing_else(monkeypatch, layer, portion):
    async with in_process(EARLY) as relay:
        prompt, pulled = question(1), Pulled(relay)
        wanted = (await relay.run(relay.task(prompt))).ids()
        pulled.pieces.clear()
        stop = Stop(monkeypatch, layer)
        running = asyncio.create_task(relay.run(relay.task(prompt)))
        await until(stop.reached.is_set)
        await until(lambda: pulled.layers() == PORTIONS[portion] and pulled.pieces != [])
        if layer != END:
            await asyncio.sleep(0.1)
            assert pulled.layers() == PORTIONS[portion]
            assert max(high for p in pulled.pieces for kind, _, high in p if kind == "latent") == 2
        held = relay.decodes[0].engine.helds()[0]
        ours, theirs = relay.decodes[0].memory.states, relay.prefills[0].memory.states
        slot = relay.prefills[0].engine.works()[0].slot
        layers = slice(0, PORTIONS[portion])
        assert torch.equal(ours.state[held.slots[0], layers], theirs.state[slot, layers])
        assert held.stage == "reserved" and not held.choices
        stop.go_on()
        assert (await running).ids() == wanted
        await relay.nothing_left()


async def test_a_wrong_byte_in_what_was_pulled_early_is_refused_by_name_and_prefilled_again():
    async with in_process(EARLY) as relay:
        pulled, left = Pulled(relay), [1]
        states = relay.decodes[0].memory.states

        def hurt(held, piece) -> None:
            if left[0] and any(kind == "state" and low <= 2 < high for kind, low, high in piece):
                left[0] -= 1
                states.state[held.slots[0], 2, 0, 0, 0] += 1

        pulled.hurt = hurt
        assert await ask(relay, TEXT[0]) == right(TEXT[0])
        assert refusals(relay) == 1
        left[0] = 2
        with pytest.raises(HandoffRefused) as refused:
            await ask(relay, TEXT[0])
        assert refused.value.part == "digest:state:2"
        await relay.nothing_left()


class PulledHarm(Harm):
    """The hooks of loss, struck when the piece they change has landed."""

    COVERED: ClassVar = {STATE: ("state", 2), PAGE: ("latent", 0), PREVIOUS: ("state", 0)}

    def plant(self, relay: Relay) -> None:
        pulled, memory = Pulled(relay), relay.decodes[0].memory

        def hurt(held, piece) -> None:
            kind, unit = self.COVERED[self.kind]
            if any(name == kind and low <= unit < high for name, low, high in piece):
                self.hurt("receiver", memory, held.slots[0], held.prompt_pages[0])

        pulled.hurt = hurt


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.slow] if at else [])
        for at, kind in enumerate(PulledHarm.COVERED)
    ],
)
async def test_loss_is_noticed_where_offers_are_pulled(kind):
    parts = {STATE: "digest:state:2", PAGE: "digest:latent:3", PREVIOUS: "digest:state:0"}
    async with in_process(EARLY) as relay:
        harm = PulledHarm(kind, "receiver")
        harm.plant(relay)
        await ask(relay, "nano-20001-015")
        harm.left = 2
        with pytest.raises(HandoffRefused) as refused:
            await ask(relay, TEXT[0])
        assert refused.value.part == parts[kind]
        await relay.nothing_left()
        harm.left = 1
        assert await ask(relay, TEXT[1]) == right(TEXT[1])
        assert refusals(relay) == 3
        await relay.nothing_left()


@pytest.mark.parametrize(
    "layer", [4, *(pytest.param(at, marks=pytest.mark.slow) for at in (0, 7, END))]
)
async def test_a_client_that_leaves_while_its_offer_is_pulled_frees_every_room(monkeypatch, layer):
    async with in_process(EARLY) as relay:
        pulled, stop = Pulled(relay), Stop(monkeypatch, layer)
        running = asyncio.create_task(relay.run(relay.task(question(1))))
        await until(stop.reached.is_set)
        await until(lambda: pulled.pieces != [])
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        decode = relay.decodes[0]
        await until(lambda: not decode.memory.slots.held and not decode.memory.pages.held)
        assert decode.receiver.quarantined == 0  # nothing was in flight
        await until(lambda: relay.prefills[0].owner.held() == 0)
        stop.go_on()
        await relay.nothing_left()
        prefill = relay.prefills[0]
        await until(lambda: not prefill.memory.slots.held and not prefill.memory.pages.held)
        assert len((await relay.run(relay.task(question(1)))).ids()) == 6


async def test_a_pass_that_never_ends_ends_with_its_request(monkeypatch):
    async with in_process(EARLY) as relay:
        stop = Stop(monkeypatch, 4)
        with pytest.raises(Exception, match="time ran out"):
            await relay.run(relay.task(question(1), deadline_s=1.0))
        decode = relay.decodes[0]
        await until(lambda: not decode.memory.slots.held and not decode.memory.pages.held)
        stop.go_on()
        await relay.nothing_left()


async def test_an_offer_that_nobody_hears_of_is_handed_off_whole(monkeypatch):
    async with in_process(EARLY) as relay:
        prefill, pulled = relay.prefills[0], Pulled(relay)
        wanted = (await relay.run(relay.task(question(1)))).ids()
        pulled.pieces.clear()
        push = prefill.room.push
        prefill.room.push = lambda caller, message: (
            None if isinstance(message, Offered) else push(caller, message)
        )
        assert (await relay.run(relay.task(question(1)))).ids() == wanted
        assert pulled.pieces == []
        await relay.nothing_left()


async def test_a_pull_that_is_repeated_or_late_changes_nothing(monkeypatch):
    async with in_process(EARLY) as relay:
        decode, jobs = relay.decodes[0], list[PullJob]()
        pull = decode.engine.pull
        decode.engine.pull = lambda job: jobs.append(job) or pull(job)
        stop = Stop(monkeypatch, 4)
        running = asyncio.create_task(relay.run(relay.task(question(1))))
        await until(lambda: stop.reached.is_set() and len(jobs) == 1)
        with pytest.raises(CapacityError, match="pulled already"):
            await asyncio.wrap_future(pull(jobs[0]))
        with pytest.raises(HandoffRefused, match="reservation"):
            lost = msgspec.structs.replace(jobs[0], reservation=b"another")
            await asyncio.wrap_future(pull(lost))
        stop.go_on()
        assert len((await running).ids()) == 6
        with pytest.raises(HandoffRefused, match="reservation"):
            await asyncio.wrap_future(pull(jobs[0]))
        await relay.nothing_left()


@pytest.mark.parametrize("where", ["while it is pulled", "when it is compared"])
async def test_a_fault_in_a_pull_ends_one_request_and_no_room(monkeypatch, where):
    async with in_process(EARLY) as relay:
        wanted, pulled, left = (await relay.run(relay.task(question(1)))).ids(), Pulled(relay), [1]

        def fault(*_) -> None:
            if left[0]:
                left[0] -= 1
                raise ArithmeticError("a launch failed")

        if where == "while it is pulled":
            pulled.hurt = fault
        else:
            sound = decode_of(relay)._receiver.verify
            monkeypatch.setattr(
                decode_of(relay)._receiver, "verify", lambda *more: fault() or sound(*more)
            )
        with pytest.raises(ServingError, match="fault of its own"):
            await relay.run(relay.task(question(1)))
        await relay.nothing_left()
        assert (await relay.run(relay.task(question(1)))).ids() == wanted


def decode_of(relay: Relay):
    return relay.decodes[0].intake


async def test_another_ticket_for_a_reservation_that_is_pulled_into_ends_the_pull(monkeypatch):
    async with in_process(EARLY) as relay:
        decode, jobs, pulled = relay.decodes[0], list[DecodeJob](), Pulled(relay)
        submit = decode.engine.submit
        decode.engine.submit = lambda job: jobs.append(job) or submit(job)
        await relay.run(relay.task(question(1)))
        pulled.pieces.clear()
        stop = Stop(monkeypatch, 4)
        running = asyncio.create_task(relay.run(relay.task(question(1))))
        await until(lambda: stop.reached.is_set() and pulled.layers() == 4)
        held = decode.engine.helds()[0]
        stale = msgspec.structs.replace(jobs[0], reservation=held.id)
        with pytest.raises(HandoffRefused, match="reservation"):
            await asyncio.wrap_future(submit(stale))
        await until(lambda: relay.prefills[0].owner.held() == 0)  # it was told of the pull's end
        stop.go_on()
        assert (await running).ids() == (await relay.run(relay.task(question(1)))).ids()
        await relay.nothing_left()


async def test_a_reservation_that_expires_takes_its_pull_along(monkeypatch):
    async with in_process(EARLY) as relay:
        decode, pulled, stop = relay.decodes[0], Pulled(relay), Stop(monkeypatch, 4)
        running = asyncio.create_task(relay.run(relay.task(question(1))))
        await until(lambda: stop.reached.is_set() and pulled.layers() == 4)
        decode.engine.helds()[0].expires = 0.0
        await until(lambda: not decode.engine.helds())
        await until(lambda: relay.prefills[0].owner.held() == 0)  # its owner was told
        stop.go_on()
        assert len((await running).ids()) == 6  # in another pass, on a new reservation
        await relay.nothing_left()


async def test_an_offer_of_another_layout_ends_its_ticket_and_names_the_part(monkeypatch):
    async with in_process(EARLY) as relay:
        decode, pull = relay.decodes[0], relay.decodes[0].engine.pull

        def wrong(job: PullJob):
            offer = msgspec.structs.replace(job.offer, borders=(2, 5))
            return pull(msgspec.structs.replace(job, offer=offer))

        decode.engine.pull = wrong
        with pytest.raises(HandoffRefused) as refused:
            await relay.run(relay.task(question(1)))
        assert refused.value.part == "span:state"
        await relay.nothing_left()
