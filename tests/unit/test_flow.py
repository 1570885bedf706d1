"""The journey of a request: order of rooms, cancelling, refusals, deaths; nothing stays behind.

Longer than 300 lines because all endings of one journey are held side by side.
"""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from common.config.settings import RouterSettings, Settings
from common.contract import messages as m
from common.errors import (
    Cancelled,
    CapacityError,
    DeadlineExceeded,
    HandoffRefused,
    InvalidRequest,
    NotReady,
    PoisonedState,
    RoomLost,
    ServingError,
    TransferError,
)
from router.house import House
from router.jobs import Task
from router.journey import Journey
from router.seats import Seats, seats_of
from tests.support.rooms import SECRET, World, answer, until

PROMPT = (5, 6, 7, 8)
FAST = RouterSettings(heartbeat_s=0.1, silent_s=0.5, queue_wait_s=2.0)
IMAGE = m.ImageRef(digest=b"x" * 16, width=28, height=28, tokens=1)


@contextlib.asynccontextmanager
async def running(world: World, settings: RouterSettings = FAST):
    await world.open()
    seats = Seats()
    seats.fill("line", seats_of(world.addresses()))
    house = House(Settings(router=settings), seats, secret=SECRET, name="r1")
    house.start()
    try:
        await until(lambda: len(house.board.connected()) == len(world.rooms))
        approve_all(house)
        yield house
    finally:
        await house.stop()
        await world.close()


def approve_all(house: House) -> None:
    for p in house.seen("prefill")[0]:
        for d in house.seen("decode")[0]:
            house.pairs.passed(p, d)


def task(deadline_s: float = 10.0, images: int = 0, request: str = "q", **sampling) -> Task:
    sampling = {"max_tokens": 5, "stop_ids": (1,)} | sampling
    return Task(
        request=request,
        token_ids=PROMPT,
        sampling=m.Sampling(**sampling),
        deadline=asyncio.get_running_loop().time() + deadline_s,
        images=((IMAGE, b"bytes"),) * images,
        image_offsets=(1,) * images,
    )


async def collect(journey: Journey):
    async with journey:
        return [event async for event in journey.events()]


def ids(events, choice: int = 0) -> list[int]:
    return [t.id for e in events if e.choice == choice for t in e.tokens]


def expected(count: int, choice: int = 0) -> list[int]:
    return [answer(PROMPT, choice, i) for i in range(count)]


async def nothing_left(world: World) -> None:
    await until(lambda: world.held() == {}, 1.0)


async def test_a_request_with_an_image_visits_the_rooms_in_order_and_leaves_nothing():
    world = World()
    order = []
    async with running(world) as house:
        for room in world.rooms.values():
            room.seen = order
        events = await collect(Journey(task(images=1), house))
        assert all(replica.is_idle for replica in house.board.connected())
        kinds = [type(x).__name__ for x in order]
    assert kinds == ["Reserve", "EncodeJob", "EncodeJob", "PrefillJob", "DecodeJob"]
    assert ids(events) == expected(5)
    assert [e.finish for e in events if e.finish] == ["length"]
    assert world.held() == {}


async def test_image_bytes_travel_once():
    world = World()
    async with running(world) as house:
        await collect(Journey(task(images=1, request="a"), house))
        await collect(Journey(task(images=1, request="b"), house))
        sent = [x.payloads for x in world["e1"].seen if isinstance(x, m.EncodeJob)]
    assert sent == [(b"",), (b"bytes",), (b"",)]


async def test_a_text_request_does_not_visit_the_encoder():
    world = World()
    async with running(world) as house:
        await collect(Journey(task(), house))
    assert world["e1"].names() == []


async def test_every_choice_gets_its_own_tokens_and_finish():
    world = World()
    async with running(world) as house:
        events = await collect(Journey(task(n=3), house))
    for choice in range(3):
        assert ids(events, choice) == expected(5, choice)
    assert sorted(e.choice for e in events if e.finish) == [0, 1, 2]


@pytest.mark.parametrize(
    ("sampling", "finish"),
    [({"max_tokens": 1}, "length"), ({"stop_ids": (expected(1)[0],)}, "stop")],
)
async def test_a_first_token_that_is_the_last_needs_no_decode(sampling, finish):
    world = World()
    async with running(world) as house:
        events = await collect(Journey(task(**sampling), house))
        assert [e.finish for e in events] == [finish]
        await nothing_left(world)
        assert world["d1"].names() == ["Reserve", "Release"]
        assert world["p1"].last(m.Release).outcome == "released"


@pytest.mark.parametrize(
    ("replica", "kind"),
    [("d1", m.Reserve), ("e1", m.EncodeJob), ("p1", m.PrefillJob), ("d1", m.DecodeJob)],
)
async def test_cancelled_at_any_room_it_frees_every_room(replica, kind):
    world = World()
    async with running(world) as house:
        world[replica].gate(kind)
        waiting = asyncio.create_task(collect(Journey(task(images=1), house)))
        await until(lambda: kind.__name__ in world[replica].names())
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await until(lambda: "Cancel" in world[replica].names())
        world[replica].gates[kind].set()  # the room comes to the job of a request that is gone
        await nothing_left(world)
        assert house.leases._held == {}


async def test_cancelled_while_tokens_flow_it_frees_decode_within_a_second():
    world = World()
    async with running(world) as house:
        world["d1"].pause_after = 3
        journey = Journey(task(max_tokens=100), house)
        async with journey:
            async for _ in journey.events():
                if len(journey.answer.log[0]) == 3:
                    break
        await nothing_left(world)
        assert world["d1"].names() == ["Reserve", "DecodeJob", "Cancel"]
        assert "Cancel" not in world["p1"].names()


@pytest.mark.parametrize(
    ("replica", "kind"), [("e1", m.EncodeJob), ("p1", m.PrefillJob), ("d1", m.DecodeJob)]
)
async def test_the_deadline_ends_it_in_any_room(replica, kind):
    world = World()
    async with running(world) as house:
        world[replica].gate(kind)
        with pytest.raises(DeadlineExceeded):
            await collect(Journey(task(deadline_s=0.2, images=1), house))
        await until(lambda: "Cancel" in world[replica].names())


async def test_a_refused_hand_off_is_prefilled_again_elsewhere_on_the_same_reservation():
    world = World(prefill=2, decode=1)
    async with running(world) as house:
        world["d1"].plant(m.DecodeJob, HandoffRefused("digest:state:1", "not what was signed"))
        events = await collect(Journey(task(), house))
        await nothing_left(world)
    assert ids(events) == expected(5)
    assert world["d1"].names().count("Reserve") == 1
    assert world["p1"].names().count("PrefillJob") == 1
    assert world["p2"].names().count("PrefillJob") == 1
    # the first token was out already: it is forced, not sent again
    assert world["d1"].last(m.DecodeJob).forced == ((expected(1)[0],),)


async def test_refused_once_too_often_it_ends_with_an_honest_error():
    world = World()
    async with running(world) as house:
        refusal = HandoffRefused("span:latent", "missing")
        world["d1"].plant(m.DecodeJob, refusal, HandoffRefused("span:latent", "missing"))
        with pytest.raises(HandoffRefused, match="span:latent") as error:
            await collect(Journey(task(), house))
        assert error.value.status == 503
        await nothing_left(world)


async def test_a_refused_embedding_is_encoded_again():
    world = World()
    async with running(world) as house:
        world["p1"].plant(m.PrefillJob, HandoffRefused("embed:0", "not what was signed"))
        events = await collect(Journey(task(images=1), house))
        await nothing_left(world)
    assert ids(events) == expected(5)
    assert world["p1"].names().count("PrefillJob") == 2


async def test_a_canary_takes_the_pair_out_of_service_and_the_request_elsewhere():
    world = World(prefill=2, decode=1)
    async with running(world) as house:
        world["d1"].plant(m.DecodeJob, HandoffRefused("canary", "logits differ by 0.3"))
        assert ids(await collect(Journey(task(request="a"), house))) == expected(5)
        used = [n for n in ("p1", "p2") if "PrefillJob" in world[n].names()]
        assert used == ["p1", "p2"]
        await collect(Journey(task(request="b"), house))
        assert world["p1"].names().count("PrefillJob") == 1


async def test_a_canary_without_another_pair_is_an_error_at_once():
    world = World()
    async with running(world) as house:
        world["d1"].plant(m.DecodeJob, HandoffRefused("canary", "logits differ by 0.3"))
        with pytest.raises(HandoffRefused, match="canary"):
            await collect(Journey(task(), house))
        await nothing_left(world)


@pytest.mark.parametrize(("victim", "kind"), [("e", m.EncodeJob), ("p", m.PrefillJob)])
async def test_a_room_that_dies_before_the_first_token_is_replaced(victim, kind):
    world = World(encoder=2, prefill=2, decode=1)
    async with running(world) as house:
        pair = [world[f"{victim}1"], world[f"{victim}2"]]
        for room in pair:
            room.gate(kind)
        waiting = asyncio.create_task(collect(Journey(task(images=1), house)))
        await until(lambda: any(kind.__name__ in room.names() for room in pair))
        dying = next(room for room in pair if kind.__name__ in room.names())
        for room in pair:
            room.gates.clear()
        await dying.die()
        assert ids(await waiting) == expected(5)


async def test_when_decode_dies_the_answer_continues_elsewhere_without_a_token_twice():
    world = World(prefill=1, decode=2)
    async with running(world) as house:
        for name in ("d1", "d2"):
            world[name].pause_after = 3
        journey = Journey(task(max_tokens=8, n=2), house)
        waiting = asyncio.create_task(collect(journey))
        await until(lambda: [len(log) for log in journey.answer.log] == [3, 3])
        dying = next(world[n] for n in ("d1", "d2") if world[n].tasks)
        for name in ("d1", "d2"):
            world[name].pause_after = None
        await dying.die()
        events = await waiting
        for choice in range(2):
            assert ids(events, choice) == expected(8, choice)
        living = world["d2"] if dying is world["d1"] else world["d1"]
        assert living.last(m.DecodeJob).forced == tuple(
            tuple(expected(3, choice)) for choice in range(2)
        )
        await nothing_left(world)


async def test_a_request_under_which_two_replicas_died_is_an_error():
    world = World(prefill=1, decode=3)
    async with running(world) as house:
        for name in ("d1", "d2", "d3"):
            world[name].pause_after = 2
        waiting = asyncio.create_task(collect(Journey(task(max_tokens=8), house)))
        for _ in range(2):
            await until(lambda: any(world[n].tasks for n in ("d1", "d2", "d3")))
            dying = next(world[n] for n in ("d1", "d2", "d3") if world[n].tasks)
            dying.tasks, tasks = {}, dying.tasks
            for one in tasks.values():
                one.cancel()
            await dying.die()
        with pytest.raises(RoomLost, match="two decode replicas"):
            await waiting


async def test_a_replica_that_gives_a_request_up_hands_it_over():
    world = World(prefill=1, decode=2)
    async with running(world) as house:
        for name in ("d1", "d2"):
            world[name].pause_after = 2
        journey = Journey(task(), house)
        waiting = asyncio.create_task(collect(journey))
        await until(lambda: len(journey.answer.log[0]) == 2)
        draining = next(world[n] for n in ("d1", "d2") if world[n].tasks)
        for name in ("d1", "d2"):
            world[name].pause_after = None
        given_up = m.TokenItem(request="q", choice=0, finish="cancelled")
        (wire,) = draining.listening.wires
        wire.push(m.TokenFrame(step=9, items=(given_up,)))
        assert ids(await waiting) == expected(5)
        await nothing_left(world)


@pytest.mark.parametrize(
    ("replica", "kind", "error"),
    [
        ("d1", m.Reserve, InvalidRequest("it can never fit")),
        ("p1", m.PrefillJob, PoisonedState("a logit is not finite")),
        ("p1", m.PrefillJob, CapacityError("the queue is full")),
    ],
)
async def test_an_error_of_a_room_reaches_the_caller_and_frees_the_others(replica, kind, error):
    world = World()
    async with running(world) as house:
        world[replica].plant(kind, error)
        with pytest.raises(type(error), match=str(error)):
            await collect(Journey(task(images=1), house))
        await nothing_left(world)


@pytest.mark.parametrize(
    "refusal",
    [
        HandoffRefused("reservation", "it is not held any more"),
        TransferError("the READ broke"),
        DeadlineExceeded("the READ took longer than 10 s"),
    ],
    ids=["expired", "broken", "slow"],
)
async def test_a_reservation_that_is_spent_is_made_again(refusal):
    world = World()
    async with running(world) as house:
        world["d1"].plant(m.DecodeJob, refusal)
        assert ids(await collect(Journey(task(), house))) == expected(5)
        assert world["d1"].names().count("Reserve") == 2
        await nothing_left(world)


async def test_a_client_that_does_not_read_is_given_up_and_counted(monkeypatch):
    monkeypatch.setattr("router.outbox.STOP_AT", 4)
    monkeypatch.setattr("router.answer.PATIENCE_S", 0.1)
    world = World()
    async with running(world) as house:
        world.step_s = 0.02
        async with Journey(task(max_tokens=100), house) as journey:
            await until(lambda: "Cancel" in world["d1"].names())
            assert house.tally.snapshot()["baton_slow_readers_total"] == 1
            assert len(journey.answer.log[0]) < 100
            assert world["d1"].last(m.Pace).paused
            with pytest.raises(Cancelled, match="does not read"):
                [event async for event in journey.events()]
        await nothing_left(world)


async def test_an_error_in_a_frame_ends_the_request_with_its_sentence():
    world = World()
    async with running(world) as house:
        world["d1"].pause_after = 2
        waiting = asyncio.create_task(collect(Journey(task(), house)))
        await until(lambda: bool(world["d1"].tasks))
        (wire,) = world["d1"].listening.wires
        broken = m.TokenItem(request="q", choice=0, finish="error", error="logits are not finite")
        wire.push(m.TokenFrame(step=9, items=(broken,)))
        with pytest.raises(ServingError, match="logits are not finite"):
            await waiting
        await nothing_left(world)


async def test_without_room_in_decode_it_waits_and_goes_on_when_a_slot_is_free():
    world = World()
    async with running(world) as house:
        world["d1"].held[b"someone"] = "else"
        world["d1"].slots = 1
        waiting = asyncio.create_task(collect(Journey(task(), house)))
        await until(lambda: world["d1"].names().count("Reserve") >= 2)
        assert "PrefillJob" not in world["p1"].names()
        world["d1"].held.clear()
        assert ids(await waiting) == expected(5)


async def test_without_an_encoder_a_question_about_a_picture_is_told_so():
    world = World(prefill=1, decode=1)
    async with running(world, RouterSettings(heartbeat_s=0.1, queue_wait_s=0.3)) as house:
        with pytest.raises(NotReady, match="no encoder replica"):
            await collect(Journey(task(images=1), house))
        await nothing_left(world)


async def test_a_pair_that_was_not_probed_serves_nobody():
    world = World()
    settings = RouterSettings(heartbeat_s=0.1, queue_wait_s=0.3)
    async with running(world, settings) as house:
        (p,), (d,) = house.seen("prefill")[0], house.seen("decode")[0]
        house.pairs.failed(p, d)
        with pytest.raises(CapacityError):
            await collect(Journey(task(), house))
    assert world["d1"].names() == []


async def test_leases_are_renewed_until_decode_accepted():
    world = World()
    settings = Settings(router=FAST)
    async with running(world, settings.router) as house:
        house.leases._renew_s = 0.05
        gate = world["p1"].gate(m.PrefillJob)
        world["d1"].pause_after = 2
        await asyncio.sleep(0.0)
        waiting = asyncio.create_task(collect(Journey(task(images=1), house)))
        await until(lambda: "PrefillJob" in world["p1"].names())
        assert {len(nonces) for nonces in house.leases._held.values()} == {1}
        assert {replica.id for replica in house.leases._held} == {"e1", "d1"}
        gate.set()
        await until(lambda: bool(world["d1"].tasks))
        await until(lambda: house.leases._held == {})
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await nothing_left(world)
