"""`baton trace`: a request of late as lines of text."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib

import pytest

from common.errors import RoomLost
from router.recent import KEPT, Part, Past, Recent, Stumble
from services.cli import main
from services.waterfall import WIDTH, lines
from tests.unit.test_routes import SETTINGS, site

PAST = Past(
    request="req-1",
    header="req-1",
    client="mine",
    trace="00-" + "a" * 32 + "-" + "b" * 16 + "-01",
    outcome="stop",
    began=0.0,
    total_s=2.0,
    first_token_s=1.0,
    prompt_tokens=7,
    completion_tokens=3,
    parts=(
        Part(name="wait", at_s=0.0, long_s=0.001, replica="d1"),
        Part(name="prefill", at_s=0.0, long_s=0.5, replica="p1", error="room_lost"),
        Part(name="prefill", at_s=0.5, long_s=0.5, replica="p2"),
        Part(name="compute", at_s=0.6, long_s=0.4, replica="p2", within="prefill"),
        Part(name="decode", at_s=1.0, long_s=1.0, replica="d1"),
    ),
    stumbles=(Stumble(name="replay", at_s=0.5, room="prefill", replica="p1", why="room_lost"),),
)


def test_the_waterfall_is_in_order_and_to_scale():
    told = list(lines(PAST.plain()))
    assert told[0] == "req-1: stop after 2000.0 ms, began 1970-01-01 00:00:00 UTC"
    assert told[1:4] == [
        "  its client calls it mine",
        "  trace " + "a" * 32,
        "  7 tokens asked, 3 answered, the first after 1000.0 ms",
    ]
    rows = [line.split() for line in told[5:10]]
    assert [row[0] for row in rows] == ["wait", "prefill", "prefill", "compute", "decode"]
    assert [row[1] for row in rows] == ["0.0", "0.0", "500.0", "600.0", "1000.0"]
    assert [len(row[3]) for row in rows] == [1, WIDTH // 4, WIDTH // 4, WIDTH // 5, WIDTH // 2]
    assert [row[4:] for row in rows] == [["d1"], ["p1", "room_lost"], ["p2"], ["p2"], ["d1"]]
    assert told[9].index("#") - told[5].index("#") == WIDTH // 2
    assert told[10] == "  at 500.0 ms continued elsewhere: room_lost at p1"
    assert len(told) == 11


def test_a_request_without_a_token_or_a_moment_is_told_too():
    none = dataclasses.replace(
        PAST, client="", trace="", total_s=0.0, first_token_s=None, parts=(), stumbles=()
    )
    assert list(lines(none.plain()))[1] == "  7 tokens asked, 3 answered, no token came"


def test_the_router_forgets_the_oldest():
    recent = Recent(kept=2)
    for number in range(3):
        recent.add(dataclasses.replace(PAST, request=f"r{number}", header=f"r{number}"))
    assert recent.find("r0") == [] and [past.request for past in recent.find("r2")] == ["r2"]
    assert [past.request for past in recent.find("mine")] == ["r2", "r1"]
    assert recent.find("") == [] and recent.span_s(60.0) == (2, 60.0)
    assert KEPT >= 1000  # minutes, at some requests a second


async def asked(*words: str) -> int:
    return await asyncio.to_thread(main, ["trace", *words])


async def test_the_command_prints_a_requests_way_by_the_id_on_its_reply(capsys):
    async with site(prefill=2, decode=1, encoder=0) as here:
        url = f"http://127.0.0.1:{here.router.admin.port}"
        reply = await here.chat()
        assert await asked(reply.headers["x-request-id"], "--url", url) == 0
        told = capsys.readouterr().out
        for part in ("wait", "prefill", "compute", "hand_off", "pull", "verify", "decode"):
            assert part in told, part
        assert "p1" in told or "p2" in told
        assert await asked("req-nobody/..?x", "--url", url) == 1
        error = capsys.readouterr().err
        assert error.startswith("baton: no request of this id is among the last 1 that ended")
        assert "another router may have it" in error


def asks(room) -> bool:
    """Whether it decodes for a client, and not for a probe."""
    return any(name.startswith("req-") for name in room.tasks)


async def test_a_replay_is_in_the_waterfall(capsys):
    async with site(prefill=1, decode=2, encoder=0) as here:
        url = f"http://127.0.0.1:{here.router.admin.port}"
        here.world["d1"].pause_after = here.world["d2"].pause_after = 4
        running = asyncio.create_task(here.chat())
        busy = None
        while busy is None:
            await asyncio.sleep(0.01)
            busy = next((name for name in ("d1", "d2") if asks(here.world[name])), None)
        await asyncio.sleep(0.05)
        here.world["d1" if busy == "d2" else "d2"].pause_after = None
        await here.world[busy].die()
        reply = await running
        assert reply.status_code == 200
        assert await asked(reply.headers["x-request-id"], "--url", url) == 0
        told = capsys.readouterr().out
        assert f"continued elsewhere: {RoomLost.code} at {busy}" in told
        assert told.count("  decode ") == 2


async def test_the_command_says_when_a_key_is_needed_and_takes_it_from_a_file(tmp_path, capsys):
    access = dataclasses.replace(SETTINGS.access, admin=hashlib.sha256(b"sesame").hexdigest())
    async with site(dataclasses.replace(SETTINGS, access=access)) as here:
        url = f"http://127.0.0.1:{here.router.admin.port}"
        name = (await here.chat()).headers["x-request-id"]
        assert await asked(name, "--url", url) == 1
        assert "--key-file" in capsys.readouterr().err
        (tmp_path / "key").write_text("sesame\n")
        assert await asked(name, "--url", url, "--key-file", str(tmp_path / "key")) == 0
        assert "decode" in capsys.readouterr().out


@pytest.mark.parametrize("url", ["http://127.0.0.1:9"])
def test_the_command_says_when_nobody_listens(url, capsys):
    assert main(["trace", "x", "--url", url]) == 1
    assert capsys.readouterr().err.startswith("baton: ")
