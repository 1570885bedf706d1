"""A headless Chromium, spoken to by its own protocol: open a page, evaluate, take a picture."""

# ruff: noqa: ASYNC220, ASYNC240 -- small files and one process of a test

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
START_S = 30.0


class Tab:
    """One page of the browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._numbers = socket, itertools.count(1)
        self.complaints: list[str] = []  # what the page wrote to its console as errors

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while True:
            told = json.loads((await self._socket.receive(timeout=START_S)).data)
            if told.get("method") == "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(told["params"]))
            if told.get("id") == number:
                assert "error" not in told, told
                return told["result"]

    async def open(self, url: str, *, width: int, height: int, dark: bool = False) -> None:
        await self.call("Runtime.enable")
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 700,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        await self.call("Page.navigate", url=url)

    async def value(self, script: str) -> Any:
        told = await self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    async def until(self, script: str, within_s: float = 15.0) -> Any:
        """The first true value of a script, which may fail before the page is there."""
        end = asyncio.get_running_loop().time() + within_s
        while not (
            found := await self.value(f"(() => {{ try {{ return {script} }} catch {{}} }})()")
        ):
            assert asyncio.get_running_loop().time() < end, f"never true: {script}"
            await asyncio.sleep(0.1)
        return found

    async def picture(self, path: Path) -> None:
        told = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(told["data"]))


@contextlib.asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[Tab]:
    """A browser with one empty tab; its profile lies in `folder`."""
    assert CHROMIUM is not None
    process = subprocess.Popen(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-background-networking", "--remote-debugging-port=0",
            f"--user-data-dir={folder / 'profile'}", "about:blank",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        port = await _port(folder / "profile" / "DevToolsActivePort")
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as reply:
                pages = [one for one in await reply.json() if one["type"] == "page"]
            async with session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0) as ws:
                yield Tab(ws)
    finally:
        process.terminate()
        process.wait(20)


async def _port(file: Path) -> int:
    end = asyncio.get_running_loop().time() + START_S
    while not (file.exists() and "\n" in file.read_text()):
        assert asyncio.get_running_loop().time() < end, "the browser did not start"
        await asyncio.sleep(0.1)
    return int(file.read_text().split("\n")[0])
