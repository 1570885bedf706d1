"""The queue in front of the rooms, and the outbox behind them."""

from __future__ import annotations

import asyncio

import pytest

from common.config.settings import RouterSettings
from common.contract.messages import TokenItem, TokenOut
from common.errors import CapacityError, RoomLost
from router.admission import Admission
from router.bell import Bell
from router.outbox import GO_AT, LIMIT, STOP_AT, Outbox
from tests.support.rooms import until


class Place:
    """Some room that requests take one by one."""

    def __init__(self, free: int) -> None:
        self.free, self.asked = free, []

    def attempt(self, name: str):
        async def go() -> str | None:
            self.asked.append(name)
            if not self.free:
                return None
            self.free -= 1
            return name

        return go


def queue(limit: int = 8, wait_s: float = 5.0, **more) -> tuple[Admission, Bell]:
    bell = Bell()
    return Admission(RouterSettings(queue_limit=limit, queue_wait_s=wait_s, **more), bell), bell


async def test_only_the_head_tries_and_all_come_in_the_order_they_came():
    admission, bell = queue()
    place = Place(0)
    order: list[str] = []

    async def one(name: str) -> None:
        order.append(await admission.enter(place.attempt(name)))

    tasks = [asyncio.create_task(one(name)) for name in "abc"]
    await until(lambda: len(admission) == 3)
    await asyncio.sleep(0.01)
    assert set(place.asked) == {"a"}
    place.free = 3
    bell.ring()
    await asyncio.gather(*tasks)
    assert order == ["a", "b", "c"]
    assert len(admission) == 0


async def test_while_nobody_waits_everyone_tries_at_once():
    admission, _ = queue()
    trying = 0
    most = 0

    async def slow() -> str | None:
        nonlocal trying, most
        trying += 1
        most = max(most, trying)
        await asyncio.sleep(0.01)
        trying -= 1
        return "got"

    got = await asyncio.gather(*(admission.enter(slow) for _ in range(5)))
    assert got == ["got"] * 5
    assert most == 5


async def test_a_full_queue_refuses_and_says_to_come_again():
    admission, bell = queue(limit=2)
    place = Place(0)
    tasks = [asyncio.create_task(admission.enter(place.attempt(n))) for n in "ab"]
    await until(lambda: len(admission) == 2)
    with pytest.raises(CapacityError, match="2 requests wait already") as error:
        await admission.enter(place.attempt("c"))
    assert (error.value.status, error.value.retryable) == (429, True)
    place.free = 2
    bell.ring()
    assert await asyncio.gather(*tasks) == ["a", "b"]


async def test_who_waited_too_long_is_told_and_leaves_the_queue():
    admission, _ = queue(wait_s=0.05)
    with pytest.raises(CapacityError, match=r"within 0\.05 s"):
        await admission.enter(Place(0).attempt("a"))
    assert len(admission) == 0


async def test_a_head_that_is_cancelled_makes_way():
    admission, _bell = queue()
    place = Place(0)
    head = asyncio.create_task(admission.enter(place.attempt("a")))
    await until(lambda: "a" in place.asked)
    second = asyncio.create_task(admission.enter(place.attempt("b")))
    await asyncio.sleep(0)
    head.cancel()
    place.free = 1
    assert await asyncio.wait_for(second, 1) == "b"


async def test_an_error_of_the_attempt_reaches_its_own_caller_only():
    admission, bell = queue()
    place = Place(0)

    async def broken() -> str | None:
        raise RoomLost("gone")

    with pytest.raises(RoomLost):
        await admission.enter(broken)
    place.free = 1
    bell.ring()
    assert await admission.enter(place.attempt("b")) == "b"


async def test_a_request_that_has_begun_to_answer_goes_first_and_past_the_limit():
    admission, bell = queue(limit=1)
    place = Place(0)
    order = []

    async def one(name: str, urgent: bool) -> None:
        order.append(await admission.enter(place.attempt(name), urgent=urgent))

    first = asyncio.create_task(one("new", False))
    await until(lambda: "new" in place.asked)
    second = asyncio.create_task(one("begun", True))
    await until(lambda: len(admission) == 2)
    place.free = 2
    bell.ring()
    await asyncio.gather(first, second)
    assert sorted(order) == ["begun", "new"]
    assert "begun" in place.asked


async def order_of(priorities: dict[str, int], *, apart_s: float = 0.0, **settings) -> str:
    """Names in the order in which their requests got a place, if they came in this order."""
    admission, bell = queue(**settings)
    place = Place(0)
    order: list[str] = []

    async def one(name: str, priority: int) -> None:
        order.append(await admission.enter(place.attempt(name), priority=priority))

    tasks = []
    for name, priority in priorities.items():
        tasks.append(asyncio.create_task(one(name, priority)))
        await until(lambda: len(admission) == len(tasks))
        await asyncio.sleep(apart_s)
    for _ in tasks:
        place.free = 1
        bell.ring()
        await until(lambda: place.free == 0)
    await asyncio.gather(*tasks)
    return "".join(order)


async def test_a_lower_priority_goes_first_and_equals_keep_their_order():
    assert await order_of({"a": 0, "b": 5, "c": -5, "d": 0, "e": -5}) == "ceadb"


async def test_nobody_is_overtaken_for_longer_than_the_steps_are_worth():
    settings = {"apart_s": 0.05, "priority_s": 0.002}  # ten steps either way: 0.04 s
    assert await order_of({"a": 10**9, "b": -(10**9), "c": 0}, **settings) == "abc"
    assert await order_of({"a": 3, "b": -3}, priority_s=0.0) == "ab"


async def test_part_of_a_request_that_has_begun_waits_without_a_limit():
    admission, bell = queue(limit=1, wait_s=0.05)
    place = Place(0)
    first = asyncio.create_task(admission.enter(place.attempt("a"), has_begun=True))
    await until(lambda: len(admission) == 1)
    second = asyncio.create_task(admission.enter(place.attempt("b"), has_begun=True))
    await asyncio.sleep(0.2)
    assert len(admission) == 2
    place.free = 2
    bell.ring()
    assert await asyncio.gather(first, second) == ["a", "b"]


def item(number: int) -> TokenItem:
    return TokenItem(request="q", choice=0, tokens=(TokenOut(id=number),))


async def test_the_outbox_gives_what_it_holds_before_it_tells_of_an_error():
    box = Outbox(lambda paused: None)
    box.put(item(1))
    box.close(RoomLost("gone"))
    got = await box.get()
    assert got is not None and got.tokens[0].id == 1
    with pytest.raises(RoomLost):
        await box.get()
    with pytest.raises(RoomLost):
        await box.get()


async def test_the_outbox_ends_once():
    box = Outbox(lambda paused: None)
    box.close()
    box.close(RoomLost("too late to matter"))
    assert await box.get() is None


async def test_a_reader_that_lags_makes_its_writer_pause_until_it_has_caught_up():
    asked: list[bool] = []
    box = Outbox(asked.append)
    for number in range(STOP_AT - 1):
        assert box.put(item(number))
    assert asked == []
    for number in range(LIMIT - STOP_AT + 1):  # frames that were on their way
        assert box.put(item(number))
    assert asked == [True] and box.is_paused
    for _ in range(LIMIT - GO_AT - 1):
        await box.get()
    assert asked == [True]
    await box.get()
    assert asked == [True, False] and not box.is_paused


async def test_a_writer_that_does_not_pause_is_told_when_the_limit_is_passed():
    box = Outbox(lambda paused: None)
    assert all(box.put(item(i)) for i in range(LIMIT))
    assert not box.put(item(0))
