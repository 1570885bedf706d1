"""Images of a request: fetched within limits, read as far as their headers, named by content.

Only headers are read here; pixels are decoded by the encoder. An address is resolved once, checked,
and connected to as checked, at every redirect again, so that neither a redirect nor a second answer
of the name server leads into a private network. What is refused is refused in the same words
whether or not anything listens there.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import httpx

from common.config.image_grid import ImageRules, image_grid
from common.config.settings import ImageSettings
from common.contract.image_header import read_header
from common.contract.messages import ImageRef
from common.errors import ImageRejected
from router.schema.messages import ImageSource

DIGEST_BYTES = 16  # BLAKE2b-128
MAX_URL = 8192  # characters of an address that is not a data URI
REDIRECTS = (301, 302, 303, 307, 308)
AT_ONCE = 8  # images of one request fetched at the same time


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedImage:
    """An image's name in the prompt and its bytes. Sizes in `ref` are after orientation."""

    ref: ImageRef
    payload: bytes


async def fetch_images(
    sources: Sequence[ImageSource], settings: ImageSettings, rules: ImageRules
) -> list[FetchedImage]:
    """Every image of a request, in order; the same source is fetched once.

    Raises:
        ImageRejected: an image is refused, unreachable, too large or no image; `param` names it.
    """
    if len(sources) > settings.max_count:
        raise ImageRejected(
            f"the request holds {len(sources)} images; at most {settings.max_count} are accepted",
            param="messages",
        )
    turns = asyncio.Semaphore(AT_ONCE)

    async def fetch(source: ImageSource) -> FetchedImage:
        async with turns:
            try:
                return await _fetch(source.url, settings, rules)
            except ImageRejected as error:
                raise ImageRejected(str(error), param=source.param) from None

    first = {source.url: source for source in reversed(sources)}
    tasks = {url: asyncio.create_task(fetch(source)) for url, source in first.items()}
    try:
        await asyncio.gather(*tasks.values())
    finally:
        for task in tasks.values():
            task.cancel()
    return [tasks[source.url].result() for source in sources]


async def _fetch(url: str, settings: ImageSettings, rules: ImageRules) -> FetchedImage:
    if url[:5].lower() == "data:":
        # base64 and the headers of large images take milliseconds: not on the event loop
        return await asyncio.to_thread(
            lambda: inspect(read_data_uri(url, settings), settings, rules)
        )
    try:
        async with asyncio.timeout(settings.timeout_s):
            payload = await _download(url, settings)
    except TimeoutError:
        raise ImageRejected(
            f"the image could not be fetched within {settings.timeout_s:g} s; "
            "send it as a data URI instead"
        ) from None
    except httpx.HTTPError:
        _unreachable()
    return await asyncio.to_thread(inspect, payload, settings, rules)


def read_data_uri(uri: str, settings: ImageSettings) -> bytes:
    """Bytes of a base64 data URI. The media type may be missing; the content decides.

    Raises:
        ImageRejected: not base64, empty, or over the limit.
    """
    head, comma, data = uri.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise ImageRejected("a data URI must have the form data:image/png;base64,DATA")
    if len(data) * 3 // 4 > settings.max_bytes + 2:
        _too_large(settings)
    try:
        payload = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise ImageRejected("the image's data is not base64") from None
    if not payload:
        raise ImageRejected("the image's data is empty")
    return payload


def inspect(payload: bytes, settings: ImageSettings, rules: ImageRules) -> FetchedImage:
    """Name an image by content and size, from its header alone.

    Raises:
        ImageRejected: too many bytes or pixels, or not an image.
    """
    if len(payload) > settings.max_bytes:
        _too_large(settings)
    header = read_header(payload)
    pixels = header.width * header.height
    if pixels > settings.max_pixels:
        raise ImageRejected(
            f"the {header.format} image has {header.width}x{header.height} = {pixels} pixels; "
            f"at most {settings.max_pixels} are accepted. Send it smaller"
        )
    if pixels == 0:
        raise ImageRejected(f"the {header.format} image has no pixels")
    grid = image_grid(header.width, header.height, rules)
    ref = ImageRef(
        digest=hashlib.blake2b(payload, digest_size=DIGEST_BYTES).digest(),
        width=header.width,
        height=header.height,
        tokens=grid.tokens,
    )
    return FetchedImage(ref=ref, payload=payload)


def _too_large(settings: ImageSettings) -> NoReturn:
    raise ImageRejected(
        f"the image has more than {settings.max_bytes} bytes, the limit here. Send it smaller"
    )


async def _download(address: str, settings: ImageSettings) -> bytes:
    for _ in range(settings.max_redirects + 1):
        url = _checked_url(address, settings)
        target = await _resolve(url, settings)
        # The request goes to the checked address; the name travels beside it, for TLS and the host.
        async with (
            httpx.AsyncClient(trust_env=False, timeout=settings.timeout_s) as client,
            client.stream(
                "GET",
                url.copy_with(host=target),
                headers={
                    "Host": url.netloc.decode("ascii"),
                    "Accept": "image/*",
                    "Accept-Encoding": "identity",
                },
                extensions={"sni_hostname": url.raw_host.decode("ascii")},
            ) as response,
        ):
            if response.status_code not in REDIRECTS:
                return await _body(response, settings)
            address = str(url.join(response.headers.get("Location", "")))
    raise ImageRejected(
        f"the image's address redirects more than {settings.max_redirects} times; "
        "give its final address"
    )


def _checked_url(address: str, settings: ImageSettings) -> httpx.URL:
    schemes = ("https", "http") if settings.allow_http else ("https",)
    if len(address) > MAX_URL:
        raise ImageRejected(f"the image's address has more than {MAX_URL} characters")
    try:
        url = httpx.URL(address)
        url.netloc.decode("ascii")
        host = url.host  # decodes the name, and fails where that is broken
    except (httpx.InvalidURL, ValueError, TypeError):
        raise ImageRejected("the image's address is not a URL") from None
    if url.scheme not in schemes or not host:
        raise ImageRejected(
            f"an image's address must be a data URI or start with {' or '.join(schemes)}://"
        )
    if url.userinfo:
        raise ImageRejected("an image's address must not hold a user name or password")
    return url


async def _resolve(url: httpx.URL, settings: ImageSettings) -> str:
    """One address of the URL's host, after every one of them was found to be public."""
    port = url.port or (443 if url.scheme == "https" else 80)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            url.host, port, type=socket.SOCK_STREAM
        )
    except (OSError, UnicodeError):
        _unreachable()
    addresses = [str(entry[4][0]) for entry in found]
    allowed = url.host in settings.allowed_hosts or f"{url.host}:{port}" in settings.allowed_hosts
    if not addresses or not (allowed or all(is_public(address) for address in addresses)):
        _unreachable()
    return addresses[0]


def _unreachable() -> NoReturn:
    """One sentence for everything that must not be told apart."""
    raise ImageRejected(
        "the image's address cannot be reached from here: only public addresses and hosts that "
        "the settings allow are fetched. Send the image as a data URI instead"
    )


def is_public(address: str) -> bool:
    """Whether an IP address is neither private, loopback, link-local, shared, nor a way to one."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo or (None, None))[1]
        if ip in ipaddress.ip_network("64:ff9b::/96") or int(ip) >> 32 == 0:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)  # translated, or IPv4-compatible
        if inner is not None and not is_public(str(inner)):
            return False
    return ip.is_global and not ip.is_multicast


async def _body(response: httpx.Response, settings: ImageSettings) -> bytes:
    if response.status_code != 200:
        raise ImageRejected(f"the image's server answered with status {response.status_code}")
    if response.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise ImageRejected("the image's server sent compressed data although asked not to")
    payload = bytearray()
    async for piece in response.aiter_raw():
        payload += piece
        if len(payload) > settings.max_bytes:
            _too_large(settings)
    return bytes(payload)
