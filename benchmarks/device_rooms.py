"""The three rooms on one or two devices: `python -m benchmarks.device_rooms [--devices 1|2]`.

Processes without Ray, NIXL on the device's memory, the bundled checkpoint in fp32 and bf16; with
two devices decode has the second. Asks the held-out questions, gives 50 requests up half-way,
plants every change of bytes of the loss tests, and looks whether anything is left. Prints one line
a check and keeps them as JSON lines.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import RESULTS, commit, machine
from common.config.checkpoint import load_spec
from common.config.loading import load_settings
from common.config.settings import Settings
from common.errors import HandoffRefused
from router.bodies import Origin
from router.desk import Desk
from router.jobs import Task
from router.prompt.tools import CallArguments, CallStart, Content, ReplyParser
from tests.support.golden import NANO, NANO_EVAL
from tests.support.harm import KINDS, tell
from tests.support.processes import write_settings
from tests.support.questions import arguments, referenced
from tests.support.relay import Relay, with_processes
from tests.support.scenes import as_sent

BEGIN = time.perf_counter()
AT_ONCE = 16
SURE = {"float32": 0.1, "bfloat16": 1.0}  # least lead in logits that the width must hold
CASES = [json.loads(line) for line in NANO_EVAL.read_text().splitlines()]


def keep(check: str, **facts: Any) -> None:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    line = {"check": check, **facts, "device": device, "commit": commit(), "machine": machine()}
    RESULTS.mkdir(parents=True, exist_ok=True)
    with (RESULTS / "device_rooms.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    say(f"{check} {json.dumps(facts)}")


def say(what: str) -> None:
    """Print when it was, in seconds since the start."""
    print(f"{time.perf_counter() - BEGIN:6.1f} s {what}", flush=True)


async def order(desk: Desk, case: dict[str, Any], number: int) -> tuple[Task, bool]:
    body = {
        "model": desk.settings.model.name,
        "messages": as_sent(case["messages"]),
        "temperature": 0,
        "max_tokens": 160,
        "reasoning_effort": case["effort"] if case["thinking"] else "none",
        **({"tools": case["tools"]} if "tools" in case else {}),
    }
    request = await desk.read_chat(json.dumps(body).encode())
    return (await desk.order_chat(request, Origin(name=f"case{number}"))).task, "tools" in case


def read(desk: Desk, case: dict[str, Any], ids: list[int], has_tools: bool) -> dict[str, Any]:
    """Content and tool calls of a reply."""
    parser = ReplyParser(desk.tokenizer, thinking=case["thinking"], delivers_tools=has_tools)
    content, calls = "", []
    for event in [*parser.feed(ids), *parser.finish()]:
        if isinstance(event, Content):
            content += event.text
        elif isinstance(event, CallStart):
            calls.append([event.name, ""])
        elif isinstance(event, CallArguments):
            calls[-1][1] += event.text
    named = [{"name": name, "arguments": json.loads(text or "{}")} for name, text in calls]
    return {"content": content, "tool_calls": named}


async def questions(relay: Relay, settings: Settings, dtype: str) -> None:
    desk = Desk(settings, load_spec(NANO))
    gate, wrong, took = asyncio.Semaphore(AT_ONCE), [], []

    async def one(number: int, case: dict[str, Any]) -> None:
        task, has_tools = await order(desk, case, number)
        async with gate:
            begin = time.perf_counter()
            reply = await relay.run(task)
            took.append(time.perf_counter() - begin)
        answer = read(desk, case, reply.ids(), has_tools)
        expected = {"content": case["expected"]["content"] or ""}
        expected["tool_calls"] = case["expected"]["tool_calls"]
        if answer != expected:
            wrong.append(case)

    await asyncio.gather(*[one(n, case) for n, case in enumerate(CASES)])
    missed = [case for case in wrong if case["correct"]]
    keep(
        "questions",
        dtype=dtype,
        devices=torch.cuda.device_count(),
        right=len(CASES) - len(wrong),
        of=len(CASES),
        on_record=sum(case["correct"] for case in CASES),
        missed={case["id"]: case["margin"] for case in missed},
        missed_though_sure=[c["id"] for c in missed if c["margin"] > SURE[dtype]],
        median_s=round(statistics.median(took), 3),
    )


async def cancels(relay: Relay, dtype: str) -> None:
    rng, given_up = random.Random(3), 0
    for _ in range(50):
        case = rng.choice(list(referenced().values()))
        task = relay.task(case["reference"]["prompt_ids"], **arguments(case))
        try:
            async with asyncio.timeout(rng.uniform(0, 0.15)):
                await relay.run(task)
        except TimeoutError:
            given_up += 1
    await relay.nothing_left()
    keep("cancels", dtype=dtype, given_up=given_up, of=50, left=0)


async def losses(relay: Relay, orders: Path, dtype: str) -> None:
    """Every harm at both sides: refused by name."""
    named, numbers = {}, itertools.count(1)
    for kind, part in KINDS.items():
        for side in ("producer", "receiver"):
            names = ["nano-20001-015", "nano-20001-000"]
            if kind != "embedding row":
                names[1] = "nano-20001-009"
            before, case = (referenced()[name] for name in names)
            tell(orders, next(numbers))
            await relay.run(relay.task(before["reference"]["prompt_ids"], **arguments(before)))
            tell(orders, next(numbers), kind, side, 2)
            try:
                await relay.run(relay.task(case["reference"]["prompt_ids"], **arguments(case)))
                found = "not refused"
            except HandoffRefused as refused:
                found = refused.part
            named[f"{kind} at {side}"] = found if found != part else "refused"
            say(f"{kind} at {side}: {named[f'{kind} at {side}']}")
            await relay.nothing_left()
    keep("losses", dtype=dtype, devices=torch.cuda.device_count(), **named)


async def check(device: str, decode_device: str, dtype: str, folder: Path) -> None:
    tables = {
        "model": {"path": str(NANO), "device": device, "dtype": dtype},
        "transfer": {"canary_bound": 2e-3 if dtype == "float32" else 1.0},
    }
    path = write_settings(folder / f"{dtype}.toml", tables)
    settings = load_settings(path, {})
    own = tables | {"model": tables["model"] | {"device": decode_device}}
    decode_path = write_settings(folder / f"{dtype}-decode.toml", own)
    async with with_processes(path, encoder=1, decode_path=decode_path) as relay:
        say(f"the rooms are up, {dtype}")
        await questions(relay, settings, dtype)
        await cancels(relay, dtype)
    orders = folder / f"{dtype}-harm.json"
    tell(orders, 0)
    harmed = with_processes(path, encoder=1, decode_path=decode_path, harm=orders)
    async with harmed as relay:
        say(f"the rooms that change bytes are up, {dtype}")
        await losses(relay, orders, dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, choices=(0, 1, 2), default=1, help="0: the CPU")
    parser.add_argument("--dtype", nargs="*", default=["float32", "bfloat16"])
    args = parser.parse_args()
    device, decode_device = ("cuda:0", f"cuda:{args.devices - 1}") if args.devices else ("cpu",) * 2
    with tempfile.TemporaryDirectory() as folder:
        for dtype in args.dtype:
            asyncio.run(check(device, decode_device, dtype, Path(folder)))


if __name__ == "__main__":
    main()
