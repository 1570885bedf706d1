"""The router as a process of its own: one line when it listens, one signal to end it."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.support.rooms import SECRET, World, until

ROOT = Path(__file__).parents[2]


def deployment(folder: Path, port: int = 0) -> Path:
    path = folder / "settings.toml"
    path.write_text(
        f'[model]\npath = "{ROOT}/checkpoints/nano"\n'
        f"[server]\nport = {port}\nadmin_port = 0\ndrain_s = 2.0\n"
        "[router]\nheartbeat_s = 0.1\n"
    )
    return path


async def start(settings: Path, rooms: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router.app", str(settings)),
        *("--rooms", rooms, "--secret", SECRET),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )


async def test_it_says_where_it_listens_serves_and_ends_on_a_signal(tmp_path):
    world = World()
    await world.open()
    process = await start(deployment(tmp_path), world.addresses())
    assert process.stdout is not None and process.stderr is not None
    told = json.loads(await asyncio.wait_for(process.stdout.readline(), 20))
    url = f"http://127.0.0.1:{told['port']}"
    async with httpx.AsyncClient(base_url=url) as http:
        status = []

        async def is_ready() -> None:
            while not status or status[-1] != 200:
                status.append((await http.get("/ready")).status_code)
                await asyncio.sleep(0.02)

        await asyncio.wait_for(is_ready(), 10)
        asked = {"model": "nano-k3", "messages": [{"role": "user", "content": "a secret word"}]}
        reply = await http.post("/v1/chat/completions", json=asked | {"max_tokens": 3})
        assert reply.status_code == 200
        admin = f"http://127.0.0.1:{told['admin_port']}/admin/inventory"
        assert len((await http.get(admin)).json()["replicas"]) == 3
    process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(process.wait(), 10) == 0
    lines = [json.loads(line) for line in (await process.stderr.read()).splitlines()]
    ended = [line for line in lines if line["event"] == "request ended"]
    assert [(line["outcome"], line["completion_tokens"]) for line in ended] == [("length", 3)]
    assert "secret" not in json.dumps(lines)
    await until(lambda: world.held() == {})
    await world.close()


async def test_a_port_that_is_taken_is_told_in_one_sentence(tmp_path):
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    process = await start(deployment(tmp_path, port), "127.0.0.1:1")
    _, err = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in err.decode()
    server.close()


@pytest.mark.parametrize("library", ["torch", "ray", "numpy"])
def test_it_starts_without_the_heavy_libraries(library):
    code = f"import sys, router.app; sys.exit({library!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
