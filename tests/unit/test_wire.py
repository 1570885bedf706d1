"""The wire: calls, refusals, pushes, and what is seen when the peer is gone or a stranger."""

import asyncio

import pytest

from common.contract.messages import (
    Cancel,
    Done,
    Endpoint,
    Load,
    Ping,
    Release,
    TokenFrame,
    pack,
    unpack,
)
from common.contract.refusals import from_refused, to_refused
from common.errors import ConfigError, HandoffRefused, InvalidRequest, RoomLost
from common.wire import Listening, Wire, dial

ENDPOINT = Endpoint(
    room="decode",
    id="d1",
    epoch=7,
    host="127.0.0.1",
    port=0,
    agent="a",
    agent_metadata=b"",
    pools=(),
    model_print="m",
    layout_print="l",
)


async def answer(message, wire):
    if isinstance(message, Ping):
        return Load(epoch=7)
    if isinstance(message, Release):
        raise HandoffRefused("digest:state:3", "the content is not what was signed")
    if isinstance(message, Cancel):
        await asyncio.sleep(30)
    wire.push(TokenFrame(step=1, items=()))
    return Done()


@pytest.fixture
async def room():
    listening = Listening(secret="s", handler=answer, endpoint=lambda: ENDPOINT)
    port = await listening.open("127.0.0.1")
    yield listening, port
    await listening.close()


async def test_calls_are_answered_and_refusals_keep_their_part(room):
    wire, endpoint = await dial("127.0.0.1", room[1], secret="s", caller="router:1")
    assert endpoint.epoch == 7
    assert await wire.call(Ping(), timeout_s=1) == Load(epoch=7)
    with pytest.raises(HandoffRefused) as refused:
        await wire.call(Release(nonce=b"n", outcome="released"), timeout_s=1)
    assert refused.value.part == "digest:state:3"
    assert str(refused.value) == "digest:state:3: the content is not what was signed"
    wire.close()


async def test_pushes_reach_the_listener(room):
    got = []
    wire, _ = await dial("127.0.0.1", room[1], secret="s", caller="router:1", listener=got.append)
    await wire.call(TokenFrame(step=0, items=()), timeout_s=1)
    assert got == [TokenFrame(step=1, items=())]
    wire.close()


async def test_a_silent_or_broken_peer_is_a_lost_room(room):
    listening, port = room
    wire, _ = await dial("127.0.0.1", port, secret="s", caller="router:1")
    with pytest.raises(RoomLost, match=r"no reply to Cancel within 0\.05 s"):
        await wire.call(Cancel(request="r"), timeout_s=0.05)
    call = asyncio.create_task(wire.call(Cancel(request="r"), timeout_s=20))
    await asyncio.sleep(0.05)
    await listening.close()
    with pytest.raises(RoomLost, match="broke"):
        await call
    with pytest.raises(RoomLost, match="closed"):
        await wire.call(Ping(), timeout_s=1)
    with pytest.raises(RoomLost, match="cannot reach"):
        await dial("127.0.0.1", port, secret="s", caller="router:1")


async def test_a_stranger_is_refused(room):
    with pytest.raises(ConfigError, match="secret"):
        await dial("127.0.0.1", room[1], secret="guess", caller="router:1")
    reader, writer = await asyncio.open_connection("127.0.0.1", room[1])
    stranger = Wire(reader, writer)
    stranger.start()
    with pytest.raises(ConfigError, match="must be Hello"):
        await stranger.call(Ping(), timeout_s=1)
    stranger.close()


async def test_noise_on_the_socket_closes_only_that_connection(room):
    _, writer = await asyncio.open_connection("127.0.0.1", room[1])
    writer.write(b"\xff" * 64)
    await writer.drain()
    wire, _ = await dial("127.0.0.1", room[1], secret="s", caller="router:1")
    assert await wire.call(Ping(), timeout_s=1) == Load(epoch=7)
    wire.close()
    writer.close()


def test_messages_are_strict():
    assert unpack(pack(Ping())) == Ping()
    import msgspec

    for bad in ({"type": "Ping", "more": 1}, {"type": "Cancel"}, {"type": "Nothing"}):
        with pytest.raises(msgspec.ValidationError):
            unpack(msgspec.msgpack.encode(bad))


def test_errors_survive_the_trip():
    error = InvalidRequest("too many", param="n")
    back = from_refused(to_refused(error))
    assert (type(back), str(back), back.param) == (InvalidRequest, "too many", "n")
