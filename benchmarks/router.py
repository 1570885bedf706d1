"""Tokens a second through one router process, with the engines replaced by a source of frames.

Three processes: rooms that compute nothing (one decode replica pushes a frame with a token for
every running request as fast as the router takes them), one router, and clients that read streams
and count. Prints one line of JSON: tokens a second of wall clock, and a second of router's CPU.

    python -m benchmarks.router [STREAMS] [TOKENS]
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from common.contract import messages as m
from router.prompt.tokenizer import load_tokenizer
from tests.support.rooms import SECRET, FakeDecode, World

NANO = Path(__file__).parents[1] / "checkpoints" / "nano"
BACKLOG = 1 << 20  # bytes in flight to the router before the source waits


class FrameSource(FakeDecode):
    """Takes every job and pushes one frame a step with a token for each of them."""

    def __init__(self, name, world) -> None:
        super().__init__(name, world)
        self.slots = 1 << 20
        self.left: dict[str, int] = {}
        self.step = 0
        self.pump: asyncio.Task | None = None

    async def verb(self, message, wire):
        if isinstance(message, m.DecodeJob) and not message.probe:
            self.left[message.request] = message.sampling.max_tokens - 1
            if self.pump is None or self.pump.done():
                self.pump = asyncio.create_task(self.push_all(wire))
            return m.Accepted(wait_s=0.0, pull_s=0.0, verify_s=0.0)
        return await super().verb(message, wire)

    def forget(self, request) -> None:
        super().forget(request)
        self.left.pop(request, None)

    async def push_all(self, wire) -> None:
        while self.left:
            self.step += 1
            items = []
            for request in list(self.left):
                self.left[request] -= 1
                last = self.left[request] <= 0
                if last:
                    del self.left[request]
                token = m.TokenOut(id=70 + self.step % 20)
                items.append(
                    m.TokenItem(
                        request=request,
                        choice=0,
                        tokens=(token,),
                        finish="length" if last else "",
                    )
                )
            wire.push(m.TokenFrame(step=self.step, items=tuple(items)))
            waits = wire._writer.transport.get_write_buffer_size() > BACKLOG
            await asyncio.sleep(0.001 if waits else 0)


async def rooms() -> None:
    world = World(prefill=1)
    world.rooms["d1"] = FrameSource("d1", world)
    await world.open()
    print(json.dumps({"rooms": world.addresses()}), flush=True)
    await asyncio.Event().wait()


async def read_stream(port: int, tokens: int) -> int:
    """Bytes of one streamed answer, read as fast as they come."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps(
        {
            "model": "nano-k3",
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": tokens,
            "stream": True,
            "thinking": {"type": "disabled"},
        }
    ).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    size, tail = 0, b""
    while not tail.endswith(b"0\r\n\r\n"):
        piece = await reader.read(1 << 20)
        if not piece:
            break
        size, tail = size + len(piece), (tail + piece)[-200:]
    assert b"[DONE]" in tail, tail
    writer.close()
    return size


async def measure(router: subprocess.Popen, port: int, streams: int, tokens: int) -> dict:
    process = psutil.Process(router.pid)
    await asyncio.gather(*(read_stream(port, 16) for _ in range(4)))
    cpu, began = sum(process.cpu_times()[:2]), time.monotonic()
    sizes = await asyncio.gather(*(read_stream(port, tokens) for _ in range(streams)))
    wall, cpu = time.monotonic() - began, sum(process.cpu_times()[:2]) - cpu
    return {
        "bench": "router",
        "streams": streams,
        "tokens_each": tokens,
        "tokens_per_s": round(streams * tokens / wall),
        "tokens_per_cpu_s": round(streams * tokens / cpu),
        "bytes_per_token": round(sum(sizes) / streams / tokens),
        "resident_bytes": process.memory_info().rss,
    }


def start(*command: str) -> tuple[subprocess.Popen, dict]:
    process = subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())


def main() -> None:
    if sys.argv[1:] == ["rooms"]:
        asyncio.run(rooms())
        return
    streams, tokens = (int(x) for x in (sys.argv[1:] + ["64", "1000"][len(sys.argv) - 1 :]))
    load_tokenizer(NANO)
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "settings.toml"
        settings.write_text(
            f'[model]\npath = "{NANO}"\n[server]\nport = 0\nadmin_port = 0\n'
            "[router]\nqueue_limit = 100000\nprobe_s = 3600\n"
        )
        source, told = start("benchmarks.router", "rooms")
        router, ports = start(
            "router.app", str(settings), "--rooms", told["rooms"], "--secret", SECRET
        )
        try:
            time.sleep(3)
            print(json.dumps(asyncio.run(measure(router, ports["port"], streams, tokens))))
        finally:
            router.terminate()
            source.terminate()
            router.wait(20)
            source.wait(20)


if __name__ == "__main__":
    main()
