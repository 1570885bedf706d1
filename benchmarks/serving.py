"""What the path costs: `python -m benchmarks.serving` asks through HTTP and in one process.

Both sides do the same work on the same questions, turn about: check and render the request, run
the vision tower, the prompt and the steps. Through HTTP there are the router, three rooms, NIXL,
digests and a stream besides; in one process there is none of it. Prints and keeps medians over the
runs, and each room's resident memory.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import torch

from benchmarks.harness import ROOT, record, summary
from common.cache.mla_pool import pages_of
from common.config.checkpoint import load_spec
from common.config.image_grid import load_image_rules
from common.config.settings import Settings
from common.model.batch import Share, StepBatch
from common.model.text import TextModel
from common.runtime.memory import TextMemory
from common.sampling.sampler import Row, sample
from common.weights import load_text, load_vision
from router.bodies import Origin
from router.desk import Desk
from services.encoder.images import prepare
from services.encoder.moonvit import MoonVit
from tests.support.scenes import data_uri, png

RUNS = 5
QUESTIONS = 20  # a run asks so many of each kind
TOKENS = 24
RECIPE: dict[str, Any] = {
    "width": 196,
    "height": 112,
    "background": "white",
    "shapes": [{"shape": "circle", "color": "red", "x": 60, "y": 50, "r": 24}],
}


def body(kind: str, number: int) -> dict[str, Any]:
    """A question; every picture is another one, so that no cache answers."""
    text = {"type": "text", "text": f"Describe this image. ({number})"}
    content: Any = [text]
    if kind == "picture":
        shape = RECIPE["shapes"][0] | {"x": 40 + number % 60, "y": 40 + number // 60 % 30}
        picture = data_uri(png(RECIPE | {"shapes": [shape]}))
        content = [{"type": "image_url", "image_url": {"url": picture}}, text]
    return {
        "model": "nano-k3",
        "messages": [{"role": "user", "content": content}],
        "reasoning_effort": "none",
        "temperature": 0,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "logprobs": True,  # so that every chunk says how many tokens it carries
        "stream": True,
    }


class OneProcess:
    """Tower, text model and sampler, called one after the other."""

    def __init__(self, settings: Settings) -> None:
        directory = ROOT / settings.model.path
        spec = load_spec(directory)
        assert spec.vision is not None
        self.desk = Desk(settings, spec)
        self.tower = MoonVit(spec.vision, load_vision(directory, spec, dtype=torch.float32))
        text = load_text(directory, spec, dtype=torch.float32)
        self.model = TextModel(spec.text, text)
        self.rules = load_image_rules(directory)
        self.memory = TextMemory(spec.text, slots=1, pages=16, dtype=torch.float32, device="cpu")

    def ask(self, question: dict[str, Any]) -> tuple[float, float]:
        """Seconds to the first token, and for each after it."""
        begin = time.perf_counter()
        task = asyncio.run(self._order(json.dumps(question).encode()))
        images = []
        for reference, payload in task.images:
            patches = prepare(payload, reference, self.rules)
            grid = (patches.grid.rows, patches.grid.columns)
            images.append((torch.from_numpy(patches.pixels), grid))
        rows = self.tower.forward(images) if images else []
        at = [o + i for o, r in zip(task.image_offsets, rows, strict=True) for i in range(len(r))]
        share = Share(
            slot=0,
            pages=tuple(range(16)),
            start=0,
            token_ids=task.token_ids,
            embeds=torch.cat(rows) if rows else None,
            embed_at=tuple(at),
        )
        token = self._choose("chunks", share, task.sampling, 0)
        first = time.perf_counter()
        for number in range(1, TOKENS):
            share = Share(
                slot=0,
                pages=tuple(range(pages_of(len(task.token_ids) + number))),
                start=len(task.token_ids) + number - 1,
                token_ids=(token,),
            )
            token = self._choose("steps", share, task.sampling, number)
        return first - begin, (time.perf_counter() - first) / (TOKENS - 1)

    async def _order(self, raw: bytes):
        request = await self.desk.read_chat(raw)
        return (await self.desk.order_chat(request, Origin(name="bench"))).task

    def _choose(self, kind: str, share: Share, sampling, position: int) -> int:
        logits = self.model.forward(StepBatch(kind=kind, shares=(share,)), self.memory.tensors)
        return sample(logits, [Row(sampling=sampling, position=position)])[0].id


def through_http(client: httpx.Client, question: dict[str, Any]) -> tuple[float, float]:
    """The same two figures, as a client sees them: chunks that carry tokens."""
    begin, seen = time.perf_counter(), []
    with client.stream("POST", "/v1/chat/completions", json=question) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            seen.append((time.perf_counter(), line))
    times = [at for at, line in seen for _ in range(tokens_of(line))]
    assert len(times) == TOKENS, f"{len(times)} tokens came, {TOKENS} were asked for"
    return times[0] - begin, (times[-1] - times[0]) / (TOKENS - 1)


def tokens_of(line: str) -> int:
    """Tokens that one line of the stream carries."""
    if not line.startswith("data: {"):
        return 0
    choices = json.loads(line.removeprefix("data: "))["choices"]
    return sum(len((choice.get("logprobs") or {}).get("content") or []) for choice in choices)


@contextlib.contextmanager
def served() -> Iterator[tuple[str, str]]:
    """`baton serve` with the shipped settings on free ports."""
    ports = []
    for _ in range(2):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            ports.append(str(probe.getsockname()[1]))
    process = subprocess.Popen(
        [sys.executable, "-m", "services.cli", "serve", "deploy/settings/local.toml"],
        cwd=ROOT,
        env=os.environ | {"PORT": ports[0], "ADMIN_PORT": ports[1]},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        print(process.stdout.readline().strip())
        yield f"http://127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}"
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def resident(admin: str) -> dict[str, float]:
    """Resident MiB by room, from the operator's page."""
    found = {}
    for line in httpx.get(f"{admin}/metrics").text.splitlines():
        if line.startswith("baton_resident_bytes{"):
            room = line.partition('room="')[2].partition('"')[0] or "router"
            found[room] = float(line.rpartition(" ")[2]) / 2**20
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=int, default=QUESTIONS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    alone = OneProcess(Settings())
    with served() as (url, admin), httpx.Client(base_url=url, timeout=60) as client:
        for kind in ("text", "picture"):
            for side in (lambda q: through_http(client, q), alone.ask):  # warm
                for number in range(3):
                    side(body(kind, 9000 + number))
            measure(kind, client, alone, args.questions)
        print({room: f"{mib:.0f} MiB" for room, mib in resident(admin).items()})


def measure(kind: str, client: httpx.Client, alone: OneProcess, questions: int) -> None:
    medians: dict[str, list[float]] = {}
    for run in range(RUNS):
        seen: dict[str, list[float]] = {}
        for number in range(questions):
            question = body(kind, run * questions + number)
            for side, (first, each) in (
                ("http", through_http(client, question)),
                ("one process", alone.ask(question)),
            ):
                seen.setdefault(f"{side}, first token", []).append(first)
                seen.setdefault(f"{side}, each token", []).append(each)
        for name, seconds in seen.items():
            medians.setdefault(name, []).append(statistics.median(seconds))
        for what in ("first token", "each token"):
            added = medians[f"http, {what}"][run] - medians[f"one process, {what}"][run]
            medians.setdefault(f"added, {what}", []).append(added)
    for name, runs in medians.items():
        line = record(
            "serving", {"question": kind, "what": name, "questions": questions}, summary(runs)
        )
        low, mid, high = (line["seconds"][key] * 1e3 for key in ("p05", "p50", "p95"))
        print(f"{kind:8} {name:26} {mid:8.2f} ms  ({low:.2f} to {high:.2f} over {RUNS} runs)")


if __name__ == "__main__":
    main()
