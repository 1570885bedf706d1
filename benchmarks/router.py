"""Tokens a second through one router process, with the engines replaced by a source of frames.

Three processes: rooms that compute nothing (one decode replica pushes a frame with a token for
every running request as fast as the router takes them), one router, and clients that read streams
and count, path by path. Keeps tokens a second of wall clock and of the router's processor.

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
from statistics import median

import psutil

from benchmarks.harness import record, summary
from common.contract import messages as m
from router.prompt.tokenizer import load_tokenizer
from tests.support.rooms import SECRET, FakeDecode, World

NANO = Path(__file__).parents[1] / "checkpoints" / "nano"
RUNS = 7
BACKLOG = 32 << 10  # bytes in flight to the router before the source waits


class FrameSource(FakeDecode):
    """Takes every job and pushes one frame a step with a token for each of them."""

    def __init__(self, name, world) -> None:
        super().__init__(name, world)
        self.slots = 1 << 20
        self.left: dict[str, int] = {}
        self.paused: set[str] = set()
        self.step = 0
        self.pump: asyncio.Task | None = None

    async def verb(self, message, wire):
        if isinstance(message, m.DecodeJob) and not message.probe:
            self.left[message.request] = message.sampling.max_tokens - 1
            if self.pump is None or self.pump.done():
                self.pump = asyncio.create_task(self.push_all(wire))
            return m.Accepted(wait_s=0.0, pull_s=0.0, verify_s=0.0)
        return await super().verb(message, wire)

    async def small(self, message):
        if isinstance(message, m.Pace):
            (self.paused.add if message.paused else self.paused.discard)(message.request)
        return await super().small(message)

    def forget(self, request) -> None:
        super().forget(request)
        self.left.pop(request, None)

    async def push_all(self, wire) -> None:
        while self.left:
            self.step += 1
            items = []
            for request in [r for r in self.left if r not in self.paused]:
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
            if items:
                wire.push(m.TokenFrame(step=self.step, items=tuple(items)))
            waits = wire._writer.transport.get_write_buffer_size() > BACKLOG
            await asyncio.sleep(0.001 if waits else 0)


async def rooms() -> None:
    world = World(prefill=1)
    world.rooms["d1"] = FrameSource("d1", world)
    await world.open()
    print(json.dumps({"rooms": world.addresses()}), flush=True)
    await asyncio.Event().wait()


ASKED = [{"role": "user", "content": "hi"}]
BODIES = {  # by path: what asks for one plain streamed answer, and the name of its token limit
    "/v1/chat/completions": ({"messages": ASKED, "reasoning_effort": "none"}, "max_tokens"),
    "/v1/completions": ({"prompt": "hi"}, "max_tokens"),
    "/v1/responses": ({"input": "hi", "reasoning": {"effort": "none"}}, "max_output_tokens"),
    "/v1/messages": ({"messages": ASKED}, "max_tokens"),
}
LAST = (b"[DONE]", b"response.incomplete", b"message_stop")


async def read_stream(port: int, path: str, tokens: int) -> int:
    """Bytes of one streamed answer, read as fast as they come."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    fields, limit = BODIES[path]
    body = json.dumps({"model": "nano-k3", "stream": True, limit: tokens} | fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    size, tail = 0, b""
    while not tail.endswith(b"0\r\n\r\n"):
        piece = await reader.read(1 << 20)
        if not piece:
            break
        size, tail = size + len(piece), (tail + piece)[-20_000:]
    assert any(word in tail for word in LAST), tail
    writer.close()
    return size


async def measure(router: subprocess.Popen, port: int, path: str, streams: int, tokens: int):
    """Seconds of wall clock and of the router's processor, and bytes, for `streams` at once."""
    process = psutil.Process(router.pid)
    cpu, began = sum(process.cpu_times()[:2]), time.monotonic()
    sizes = await asyncio.gather(*(read_stream(port, path, tokens) for _ in range(streams)))
    wall, cpu = time.monotonic() - began, sum(process.cpu_times()[:2]) - cpu
    return wall, cpu, sum(sizes)


def case(router: subprocess.Popen, port: int, path: str, streams: int, tokens: int) -> dict:
    """One path's figures, kept: the timing is that of one run of all streams."""
    asyncio.run(measure(router, port, path, 4, 16))
    walls, cpus, sizes = zip(
        *(asyncio.run(measure(router, port, path, streams, tokens)) for _ in range(RUNS)),
        strict=True,
    )
    timing, total = summary(list(walls)), streams * tokens
    return record(
        "router",
        {
            "path": path,
            "streams": streams,
            "tokens_each": tokens,
            "tokens_per_s": round(total / timing.p50),
            "tokens_per_cpu_s": round(total / median(cpus)),
            "bytes_per_token": round(sizes[0] / total),
            "resident_mib": psutil.Process(router.pid).memory_info().rss >> 20,
        },
        timing,
    )


def start(*command: str) -> tuple[subprocess.Popen, dict]:
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # a line of log a request
        text=True,
    )
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())


def main() -> None:
    if sys.argv[1:] == ["rooms"]:
        asyncio.run(rooms())
        return
    streams, tokens = (int(x) for x in (sys.argv[1:] + ["256", "250"][len(sys.argv) - 1 :]))
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
            for path in BODIES:
                print(json.dumps(case(router, ports["port"], path, streams, tokens)), flush=True)
        finally:
            router.terminate()
            source.terminate()
            router.wait(20)
            source.wait(20)


if __name__ == "__main__":
    main()
