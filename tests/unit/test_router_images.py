from __future__ import annotations

import asyncio
import io
import socket
import struct
import zlib

import pytest
from PIL import Image

from common.config.image_grid import ImageRules
from common.config.settings import ImageSettings
from common.errors import ImageRejected
from router import images
from router.images import fetch_images, is_public
from router.schema.messages import ImageSource
from tests.support.scenes import data_uri

RULES = ImageRules()


def encoded(size=(28, 28), kind="PNG", **options) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, "red").save(buffer, kind, **options)
    return buffer.getvalue()


PNG = encoded()


async def fetch(*urls, **settings):
    sources = [ImageSource(url=url, param=f"messages[{i}]") for i, url in enumerate(urls)]
    return await fetch_images(sources, ImageSettings(**settings), RULES)


async def refusal(*urls, **settings) -> str:
    with pytest.raises(ImageRejected) as caught:
        await fetch(*urls, **settings)
    return str(caught.value)


class Server:
    """Answers every path of `answers` with (status, headers, body), and counts connections."""

    def __init__(self, answers):
        self.answers = answers
        self.connections = 0
        self.asked: list[str] = []

    async def __aenter__(self):
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]
        self.host = f"127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_):
        self.server.close()
        await self.server.wait_closed()

    async def serve(self, reader, writer):
        self.connections += 1
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.asked.append(head)
        status, headers, body = self.answers[head.split()[1]]
        lines = [f"HTTP/1.1 {status} x", "Connection: close", f"Content-Length: {len(body)}"]
        lines += [f"{key}: {value}" for key, value in headers.items()]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        await writer.drain()
        writer.close()


async def test_a_data_uri_is_named_by_content_and_size():
    (image,) = await fetch(data_uri(encoded((60, 30))))
    assert (image.ref.width, image.ref.height, image.ref.tokens) == (60, 30, 6)
    assert len(image.ref.digest) == 16 and image.payload == encoded((60, 30))


async def test_the_size_is_the_one_after_orientation():
    exif = Image.Exif()
    exif[274] = 6
    (image,) = await fetch(data_uri(encoded((56, 28), exif=exif)))
    assert (image.ref.width, image.ref.height) == (28, 56)


async def test_the_same_image_twice_is_two_images():
    uri = data_uri(PNG)
    first, second, other = await fetch(uri, uri, data_uri(encoded((1, 1))))
    assert first.ref == second.ref != other.ref


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("data:image/png;base64,@@@@", "not base64"),
        ("data:image/png;base64,", "empty"),
        ("data:image/png,abc", "base64"),
        ("data:image/png;base64", "base64"),
        (data_uri(b"not an image"), "PNG, JPEG, WebP, GIF and BMP"),
        (data_uri(PNG[:20]), "PNG"),
        ("file:///etc/hostname", "https"),
        ("ftp://example.org/x.png", "https"),
        ("", "https"),
        ("http://", "https"),
        ("http://user:secret@example.org/x.png", "user name"),
        ("http://[::1", "not a URL"),
        ("http://xn--/", "not a URL"),
        ("http://example.org/" + "a" * 9000, "8192"),
    ],
)
async def test_what_cannot_be_an_image_is_refused_with_the_remedy(uri, said):
    assert said in await refusal(uri)


async def test_the_field_at_fault_is_named():
    with pytest.raises(ImageRejected) as caught:
        await fetch(data_uri(PNG), data_uri(b"x"))
    assert caught.value.param == "messages[1]"


async def test_a_missing_media_type_is_accepted():
    (image,) = await fetch(data_uri(PNG, ""))
    assert image.ref.tokens == 1


async def test_limits_on_bytes_and_number_are_told():
    assert "100 bytes" in await refusal(data_uri(PNG + bytes(100)), max_bytes=100)
    assert "at most 1" in await refusal(data_uri(PNG), data_uri(PNG), max_count=1)


def bomb(width: int, height: int) -> bytes:
    """A one-bit PNG of one colour."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    rows = zlib.compress(bytes((width + 7) // 8 + 1) * height, 9)
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    )


async def test_a_pixel_bomb_is_refused_from_its_header(monkeypatch):
    def explode(*_):
        raise AssertionError("pixels were decoded")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", explode)
    payload = bomb(30000, 30000)
    assert len(payload) < 200_000
    assert "30000x30000" in await refusal(data_uri(payload))


async def test_an_allowed_host_is_fetched_by_its_name():
    async with Server({"/a.png": (200, {}, PNG)}) as server:
        (image,) = await fetch(f"http://{server.host}/a.png", allowed_hosts=(server.host,))
        assert image.payload == PNG
        url = f"http://localhost:{server.port}/a.png"
        await fetch(url, url, allowed_hosts=("localhost",))
        assert f"Host: localhost:{server.port}" in server.asked[1]
        assert server.connections == 2


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "2130706433", "0x7f.1", "0"]
)
async def test_loopback_is_never_contacted_under_any_name(host):
    async with Server({"/x.png": (200, {}, PNG)}) as canary:
        opened = await refusal(f"http://{host}:{canary.port}/x.png", allowed_hosts=("other",))
        assert canary.connections == 0
    assert opened == await refusal(f"http://{host}:{canary.port}/x.png")
    assert "127.0.0.1" not in opened


async def test_a_redirect_is_checked_like_an_address():
    async with Server({"/x.png": (200, {}, PNG)}) as canary:
        there = {"Location": f"http://127.0.0.1:{canary.port}/x.png"}
        async with Server({"/r.png": (302, there, b"")}) as server:
            url = f"http://{server.host}/r.png"
            await refusal(url, allowed_hosts=(server.host,))
            assert canary.connections == 0
            both = (server.host, canary.host)
            (image,) = await fetch(url, allowed_hosts=both)
            assert image.payload == PNG


async def test_redirects_end():
    async with Server({"/r.png": (302, {"Location": "/r.png"}, b"")}) as server:
        said = await refusal(f"http://{server.host}/r.png", allowed_hosts=(server.host,))
        assert "redirects more than 3 times" in said and server.connections == 4


async def test_a_redirect_to_another_scheme_is_refused():
    async with Server({"/r.png": (302, {"Location": "file:///etc/hostname"}, b"")}) as server:
        assert "https" in await refusal(f"http://{server.host}/r.png", allowed_hosts=(server.host,))


async def test_the_checked_address_is_the_one_connected_to(monkeypatch):
    """A name that resolves to a public address first and to loopback later gains nothing."""
    asked = []
    loop = asyncio.get_running_loop()
    real = loop.getaddrinfo

    async def getaddrinfo(host, port, **options):
        asked.append(host)
        if host == "rebind.example":
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]
        return await real(host, port, **options)

    monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
    async with Server({"/x.png": (200, {}, PNG)}) as server:
        monkeypatch.setattr(images, "is_public", lambda address: True)
        await fetch(f"http://rebind.example:{server.port}/x.png")
        assert asked.count("rebind.example") == 1
        assert f"Host: rebind.example:{server.port}" in server.asked[0]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((404, {}, b""), "status 404"),
        ((200, {}, bytes(3000)), "2000 bytes"),
        ((200, {"Content-Encoding": "gzip"}, b"x"), "compressed"),
        ((200, {}, b"<html>"), "PNG"),
        ((302, {}, b""), "redirects"),
    ],
)
async def test_an_answer_that_is_no_image_is_refused(answer, said):
    async with Server({"/x.png": answer}) as server:
        url = f"http://{server.host}/x.png"
        assert said in await refusal(url, allowed_hosts=(server.host,), max_bytes=2000)


async def test_a_server_that_does_not_answer_is_given_up():
    async def hang(reader, writer):
        await reader.read()
        writer.close()

    server = await asyncio.start_server(hang, "127.0.0.1", 0)
    host = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    said = await refusal(f"http://{host}/x.png", allowed_hosts=(host,), timeout_s=0.05)
    assert "within 0.05 s" in said
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1", True),
        ("127.0.0.1", False),
        ("10.0.0.1", False),
        ("192.168.1.1", False),
        ("172.16.0.1", False),
        ("169.254.169.254", False),
        ("100.100.100.200", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("::", False),
        ("fe80::1%eth0", False),
        ("fd00:ec2::254", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:8.8.8.8", True),
        ("::127.0.0.1", False),
        ("64:ff9b::7f00:1", False),
        ("2002:7f00:1::", False),
        ("ff02::1", False),
    ],
)
def test_only_public_addresses_are_public(address, public):
    assert is_public(address) is public
