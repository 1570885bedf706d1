"""Clients that send too much, too slowly or no HTTP at all, on bare sockets."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json

import pytest

from tests.unit.test_routes import SETTINGS, body, site

CHAT = "/v1/chat/completions"
READ_S = 0.4
BOUNDS = dataclasses.replace(
    SETTINGS,
    server=dataclasses.replace(
        SETTINGS.server, read_s=READ_S, header_limit_bytes=2000, body_limit_bytes=50_000
    ),
)


class Wire:
    """A client's end; what it got is read until the server hangs up."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, *pieces: bytes, every_s: float = 0.0) -> None:
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                self.writer.write(piece)
                await self.writer.drain()
                await asyncio.sleep(every_s)

    async def end(self, within_s: float = 5.0) -> bytes:
        got = bytearray()
        async with asyncio.timeout(within_s):
            with contextlib.suppress(ConnectionError):
                while piece := await self.reader.read(65536):
                    got += piece
        return bytes(got)

    async def refused(self) -> dict:
        """The one error that came before the connection ended."""
        head, _, text = (await self.end()).partition(b"\r\n\r\n")
        assert b"connection: close" in head.lower()
        return {"status": int(head.split()[1])} | json.loads(text)


@contextlib.asynccontextmanager
async def wires(settings=BOUNDS):
    async with site(settings) as here, contextlib.AsyncExitStack() as stack:

        async def dial() -> Wire:
            streams = await asyncio.open_connection("127.0.0.1", here.router.public.port)
            stack.callback(streams[1].close)
            return Wire(*streams)

        yield here, dial
        await here.nothing_left()


def head(*lines: str, path: str = CHAT, length: int | None = None) -> bytes:
    lines = (f"POST {path} HTTP/1.1", "Host: x", *lines)
    if length is not None:
        lines += (f"Content-Length: {length}",)
    return "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n"


async def test_a_head_is_read_no_further_than_its_limit():
    line = b"a: " + b"b" * 497 + b"\r\n"
    async with wires() as (_, dial):
        for begin, more, status in ((head()[:-2], line, 431), (b"POST /", b"a" * 500, 414)):
            wire = await dial()
            await wire.send(begin, *[more] * 40)
            told = await wire.refused()
            assert told["status"] == status
            assert "2000 bytes" in told["error"]["message"]


@pytest.mark.parametrize("length", [2001, 5000, 66_000, 200_000])
async def test_a_long_address_that_comes_at_once_is_refused_as_one(length):
    async with wires() as (_, dial):
        wire = await dial()
        await wire.send(head(path="/v1/" + "a" * (length - 4), length=2) + b"{}")
        told = await wire.refused()
        assert (told["status"], told["error"]["code"]) == (414, "uri_too_long")
        assert "2000 bytes" in told["error"]["message"]


async def test_a_long_head_that_comes_at_once_is_refused_as_well():
    async with wires() as (_, dial):
        wire = await dial()
        await wire.send(head("a: " + "b" * 3000, length=2) + b"{}")
        told = await wire.refused()
        assert (told["status"], told["error"]["code"]) == (431, "headers_too_large")


async def test_a_head_that_dribbles_is_given_up():
    async with wires() as (_, dial):
        slow = await dial()
        dribble = [bytes([byte]) for byte in head("x: y", length=2)]
        sending = asyncio.create_task(slow.send(*dribble, every_s=READ_S / 8))
        told = await slow.refused()
        sending.cancel()
        assert (told["status"], told["error"]["code"]) == (408, "request_timeout")


@pytest.mark.parametrize("how", ["length", "chunked"])
async def test_a_body_that_dribbles_is_given_up(how):
    async with wires() as (_, dial):
        wire = await dial()
        if how == "length":
            begin, piece = head(length=1000), b" "
        else:
            begin, piece = head("Transfer-Encoding: chunked"), b"1\r\n \r\n"
        sending = asyncio.create_task(wire.send(begin, *[piece] * 100, every_s=READ_S / 8))
        told = await wire.refused()
        sending.cancel()
        assert (told["status"], told["error"]["code"]) == (408, "request_timeout")


async def test_a_body_that_stops_is_given_up_in_the_form_of_its_path():
    async with wires() as (_, dial):
        wire = await dial()
        await wire.send(head(path="/v1/messages", length=1000), b'{"model": ')
        told = await wire.refused()
        assert told["status"] == 408
        assert (told["type"], told["error"]["type"]) == ("error", "timeout_error")


async def test_a_body_that_takes_longer_because_it_is_larger_is_read():
    """As fast as 64 KiB a second, for longer than a request's first patience."""
    text = json.dumps(body()).encode()
    text += b" " * (47_000 - len(text))
    async with wires() as (_, dial):
        wire = await dial()
        await wire.send(head("Connection: close", length=len(text)))
        pieces = [text[i : i + 5000] for i in range(0, len(text), 5000)]
        await wire.send(*pieces, every_s=READ_S / 8)
        assert (await wire.end()).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("how", ["announced", "chunked"])
async def test_a_body_over_the_limit_is_refused_while_its_sender_still_sends(how):
    piece = b"x" * 40_000
    async with wires() as (_, dial):
        wire = await dial()
        if how == "announced":
            await wire.send(head(length=200_000_000))
        else:
            await wire.send(head("Transfer-Encoding: chunked"))
            piece = b"%x\r\n%b\r\n" % (len(piece), piece)
        sending = asyncio.create_task(wire.send(*[piece] * 50))
        told = await wire.refused()
        sending.cancel()
        assert (told["status"], told["error"]["code"]) == (413, "request_too_large")


async def test_what_follows_a_chunked_body_is_no_header_and_has_an_end():
    async with wires() as (_, dial):
        wire = await dial()
        await wire.send(head("Transfer-Encoding: chunked"), b"2\r\n{}\r\n0\r\n")
        trailers = [b"x-request-id: %b\r\n" % (b"t" * 400)] * 400
        sending = asyncio.create_task(wire.send(*trailers, every_s=READ_S / 40))
        told = await wire.refused()
        sending.cancel()
        assert told["status"] == 408


@pytest.mark.parametrize(
    "said",
    [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"hello\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"],
)
async def test_what_is_no_http_is_told_in_our_form(said):
    async with wires() as (_, dial):
        wire = await dial()
        await wire.send(said)
        told = await wire.refused()
        assert (told["status"], told["error"]["code"]) == (400, "invalid_http")


async def test_noise_behind_a_request_does_not_spoil_its_answer():
    text = json.dumps(body()).encode()
    async with wires() as (here, dial):
        here.world.step_s = 0.002
        wire = await dial()
        await wire.send(head(length=len(text)) + text, b"\x00\xff" * 3000)
        got = await wire.end()
        assert got.startswith(b"HTTP/1.1 200") and got.count(b"HTTP/1.1") == 1
        assert json.loads(got.partition(b"\r\n\r\n")[2])["choices"]


async def test_a_connection_is_used_again_and_one_left_half_read_is_not():
    text = json.dumps(body()).encode()
    async with wires() as (_, dial):
        wire = await dial()
        await wire.send(head(length=len(text)) + text)
        await wire.send(head(length=len(text)) + text)
        await wire.send(head("Connection: close", length=len(text)) + text)
        assert (await wire.end()).count(b"HTTP/1.1 200") == 3
        wire = await dial()
        await wire.send(head(path="/nowhere", length=1000) + b"{")
        assert (await wire.end()).startswith(b"HTTP/1.1 404")
