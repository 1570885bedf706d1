"""Replicas of several ranks: the answers of one rank, and one failure domain."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

import psutil
import pytest

from common.config.loading import parse_settings
from common.contract.messages import Ping
from common.errors import ConfigError, RoomLost
from common.runtime.group import Leader, enter, joining
from router.journey import Journey
from services.decode.room import DecodeRoom
from services.prefill.room import PrefillRoom
from tests.support.asks import PROMPTS, answers, assert_alike
from tests.support.processes import SECRET, eventually, rooms, write_settings
from tests.support.relay import changed, in_process

SMALL = {"slots": 8, "pages": 64}
SETTINGS = parse_settings({"decode": SMALL, "prefill": SMALL}, source="test")


def of_ranks(prefill: dict | None = None, **axes: int):
    """Decode of these axes, and prefill of those."""
    return changed(SETTINGS, decode=axes, prefill=prefill or {})


def ranks_of(room) -> list:
    return room._local.processes


ALONE: list = []  # what one rank on either side answers


async def answers_of_one() -> list:
    if not ALONE:
        async with in_process(SETTINGS) as line:
            ALONE.extend(await answers(line))
    return ALONE


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


AXES = [  # of prefill, of decode
    ({}, {"tensor": 2, "expert": 2}),
    ({}, {"data": 2, "expert": 2}),
    ({"tensor": 2, "expert": 2, "spread": True}, {"tensor": 2}),
    slow({"tensor": 2}, {}),
    slow({}, {"tensor": 4}),
    slow({}, {"tensor": 2, "data": 2, "expert": 4, "spread": True}),
    slow({}, {"tensor": 2, "data": 2, "expert": 4}),
    slow({"tensor": 4}, {"tensor": 2}),
    slow({"tensor": 2}, {"tensor": 4}),
    slow({"data": 2, "expert": 2}, {}),
    slow({"tensor": 2, "data": 2, "expert": 4}, {"data": 2, "expert": 2}),
]


@pytest.mark.parametrize(("prefill", "decode"), AXES, ids=str)
async def test_a_group_of_ranks_gives_the_answers_of_one(prefill, decode) -> None:
    alone = await answers_of_one()
    async with in_process(of_ranks(prefill, **decode)) as line:
        (room,) = line.decodes
        elsewhere = lanes_asked(room) if room.leading else set()
        group = await answers(line)
        await line.nothing_left()
        ranks = [rank for room in (*line.prefills, *line.decodes) for rank in ranks_of(room)]
        sizes = [axes.get("tensor", 1) * axes.get("data", 1) for axes in (prefill, decode)]
        assert len(ranks) == sum(sizes) - 2
        assert all(rank.poll() is None for rank in ranks)
    assert all(rank.poll() is not None for rank in ranks)
    assert elsewhere == set(range(1, decode.get("data", 1)))  # tokens are chosen in every lane
    for one, many in zip(alone, group, strict=True):
        assert_alike(one, many, 1e-4)


def lanes_asked(room) -> set[int]:
    """The lanes that will choose tokens themselves."""
    asked, choose = set(), room.leading.choose
    room.leading.choose = lambda lane, rows: (asked.add(lane), choose(lane, rows))[1]
    return asked


@pytest.mark.parametrize(
    ("prefill", "decode"), [({}, {"data": 2, "expert": 2}), slow({"data": 2, "expert": 2}, {})]
)
async def test_a_group_hands_off_whole_tickets_whatever_the_layer_groups(prefill, decode):
    expected = await answers_of_one()
    settings = changed(of_ranks(prefill, **decode), transfer={"layer_groups": 3})
    async with in_process(settings) as line:
        pulled = []
        line.decodes[0].intake.pull = lambda *more: pulled.append(more)
        assert await answers(line) == expected
        assert pulled == []
        await line.nothing_left()


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
async def test_a_lost_rank_ends_its_group_and_the_answer_goes_on_elsewhere(number) -> None:
    ask = {"max_tokens": 60, "temperature": 1.0, "seed": 3}
    async with in_process(of_ranks(tensor=2), decode=2) as line:
        whole = await line.run(line.task(PROMPTS[0], **ask))
        ids: list[int] = []
        async with Journey(line.task(PROMPTS[0], **ask), line.house) as journey:
            async for item in journey.events():
                ids += [token.id for token in item.tokens]
                if len(ids) == 10:
                    (room,) = [room for room in line.decodes if room.engine.helds()]
                    (rank,) = ranks_of(room)
                    since = time.monotonic()
                    os.kill(rank.pid, number)
        assert time.monotonic() - since < 14  # silence, then the same prompt elsewhere
        assert room.room.ended.is_set() and ids == whole.ids()
        os.kill(rank.pid, signal.SIGKILL)


async def test_a_lost_rank_of_prefill_ends_its_group_and_the_prompt_goes_elsewhere() -> None:
    async with in_process(of_ranks({"tensor": 2}), prefill=2) as line:
        whole = await line.run(line.task(PROMPTS[2]))
        lost = []

        def kill(chosen, memory) -> None:
            if not lost:
                (room,) = [room for room in line.prefills if room.engine.works()]
                lost.append(room)
                os.kill(ranks_of(room)[0].pid, signal.SIGKILL)

        for room in line.prefills:
            room.engine.plant = kill
        since = time.monotonic()
        again = await line.run(line.task(PROMPTS[2]))
        assert time.monotonic() - since < 14
        assert again.ids() == whole.ids()
        assert lost[0].room.ended.is_set() and (await lost[0].load(Ping(), "test")).suspended


async def test_an_idle_group_notices_a_lost_rank_and_takes_the_others_along() -> None:
    async with in_process(of_ranks(tensor=4)) as line:
        room = line.decodes[0]
        lost, *others = ranks_of(room)
        since = time.monotonic()
        os.kill(lost.pid, signal.SIGKILL)
        async with asyncio.timeout(10):
            while room.engine.loop.failure is None or any(o.poll() is None for o in others):
                await asyncio.sleep(0.02)
        assert time.monotonic() - since < 5
        assert (await room.load(Ping(), "test")).suspended


async def test_a_pass_that_never_ends_does_not_hide_that_a_rank_is_lost() -> None:
    async with in_process(of_ranks(tensor=2)) as line:
        room, stuck = line.decodes[0], threading.Event()

        def kill(batch, memory) -> None:
            os.kill(ranks_of(room)[0].pid, signal.SIGKILL)
            stuck.wait(20)  # as a kernel that waits for a rank's rows would

        room.engine.plant = kill
        asked = asyncio.create_task(line.run(line.task(PROMPTS[0], deadline_s=15.0)))
        try:
            async with asyncio.timeout(8):
                while not (await room.load(Ping(), "test")).suspended:
                    await asyncio.sleep(0.05)
            assert room.room.ended.is_set() and room.engine.loop.failure is None
        finally:
            stuck.set()
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)


def test_a_leader_that_is_killed_takes_its_ranks_along(tmp_path) -> None:
    path = write_settings(
        tmp_path / "s.toml", {"server": {"port": 0, "admin_port": 0}, "decode": {"tensor": 2}}
    )
    with rooms(path, prefill=0, decode=1) as (leader,):
        (rank,) = psutil.Process(leader.popen.pid).children()
        leader.popen.kill()
        eventually(lambda: not rank.is_running() or rank.status() == "zombie", within_s=5)


def test_a_rank_that_cannot_start_is_told_and_not_waited_for(monkeypatch) -> None:
    monkeypatch.setattr("common.runtime.ranks.sys.executable", "/bin/false")
    with pytest.raises(RoomLost, match=r"ranks \[1\] ended before they joined"):
        DecodeRoom(of_ranks(tensor=2), secret=SECRET)


def test_a_rank_of_other_settings_is_turned_away() -> None:
    own = joining(secret="s", rank=0, world=2, model_print="m", layout_print="l")
    leader = Leader(2, own)
    said: list[str] = []

    def come() -> None:
        other = joining(secret="s", rank=1, world=2, model_print="m", layout_print="other")
        with pytest.raises(ConfigError) as turned:
            enter("127.0.0.1", leader.port, other, within_s=10)
        said.append(str(turned.value))

    rank = threading.Thread(target=come)
    rank.start()
    with pytest.raises(ConfigError, match="rank 1 has layout print other and the leader l"):
        leader.gather(within_s=10)
    rank.join()
    assert said and "start all ranks from the same" in said[0]


def test_a_mesh_that_does_not_fit_is_refused_before_anything_is_read() -> None:
    for axes, sentence in (
        ({"tensor": 3}, "4 KDA heads cannot be cut over 3"),
        ({"tensor": 2, "expert": 3}, "cannot be shared 3 ways"),
        ({"tensor": 2, "slots": 1 << 24}, "its device has"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            DecodeRoom(of_ranks(**axes), secret=SECRET)
        with pytest.raises(ConfigError, match=sentence):
            PrefillRoom(of_ranks(axes), secret=SECRET)
