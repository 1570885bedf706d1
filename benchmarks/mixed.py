"""Disaggregation under a mixed load: `python -m benchmarks.mixed [--devices 0|1|2] [--small]`.

Two GPUs, prefill on one and decode on the other ("apart"), against the same two doing both jobs
("both", `benchmarks.mixed_rooms`), over four layers of the release at true width: seeded Poisson
arrivals, prompts log-uniform between 1k and 32k tokens, 200 tokens each, the same requests for
every side at every rate, all in one run. Time to the first token from the moment a request
arrives, mean time of a token after it, gaps between tokens, and goodput: requests a second that
meet both objectives. "Both" is tried with every prefill step of `--chunks`.

With one device the two rooms of "apart" share it by the driver's turns, against one process that
does both: that says something of interference and nothing of disaggregation. `--small` is the
bundled checkpoint with short prompts, and `--devices 0` the CPU, a core a process, where every
row's bits are its own and both sides must answer the same tokens. One JSON line a side and rate in
`results/mixed.jsonl`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.handoff_sides import other_process
from benchmarks.harness import RESULTS, commit, machine
from benchmarks.mixed_figures import Answered, Asked, Objective, equal, figures, finite, load, table
from benchmarks.mixed_rooms import Part, play
from common.config.checkpoint import load_spec
from common.config.settings import DecodeSettings, ModelSettings, PrefillSettings, Settings
from common.contract.messages import Sampling
from common.errors import ServingError
from router.house import House
from router.jobs import Task
from router.journey import Journey
from router.seats import Seat
from tests.support.golden import NANO
from tests.support.relay import Relay, house_of

VOCAB = 163840
READY_S = 600.0
WARM_TOKENS = 8


@dataclass(slots=True, eq=False)
class Line:
    """A prefill and a decode replica that belong together, and what was sent to them."""

    house: House
    waiting: int = 0  # prompt tokens without a first token yet
    running: int = 0

    async def ask(self, name: str, asked: Asked, tokens: int, arrived: float) -> Answered:
        """One request to its end; a ServingError is kept, a cancel leaves what came."""
        clock = asyncio.get_running_loop().time
        task = Task(
            request=name,
            token_ids=asked.token_ids,
            sampling=Sampling(temperature=0.0, max_tokens=tokens),
            deadline=clock() + READY_S,
        )
        prompt = len(asked.token_ids)
        answer = Answered(prompt=prompt, wanted=tokens, ids=[], times=[])
        self.waiting += prompt
        self.running += 1
        try:
            async with Journey(task, self.house) as journey:
                async for item in journey.events():
                    if not answer.times:
                        self.waiting -= prompt
                    answer.ids += [token.id for token in item.tokens]
                    answer.times += [clock() - arrived] * len(item.tokens)
        except ServingError as error:
            answer.error = error.code
        except asyncio.CancelledError:
            answer.error = "not in time"
        finally:
            self.running -= 1
            if not answer.times:
                self.waiting -= prompt
        return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A way to use the devices: lines among which a request goes to the one with least to do."""

    name: str
    lines: Sequence[Line]
    chunk: int  # most tokens of a prefill step

    async def serve(
        self, asked: Sequence[Asked], tokens: int, patience_s: float, run: str
    ) -> list[Answered]:
        """All requests as they arrive; those that take longer than `patience_s` in all are cut."""
        clock = asyncio.get_running_loop().time
        begin = clock()

        async def one(number: int, request: Asked) -> Answered:
            await asyncio.sleep(begin + request.at - clock())
            line = min(self.lines, key=lambda line: (line.waiting, line.running))
            return await line.ask(f"{run}-{number}", request, tokens, begin + request.at)

        tasks = [asyncio.create_task(one(n, request)) for n, request in enumerate(asked)]
        if tasks:
            await asyncio.wait(tasks, timeout=patience_s)
        for task in tasks:
            task.cancel()
        answers = [await task for task in tasks]
        for line in self.lines:  # nothing of this run may slow the next one down
            await Relay(line.house).nothing_left(within_s=30.0)
        return answers


@contextlib.contextmanager
def processes(settings: Sequence[Settings], parts: Sequence[Part]) -> Iterator[list[Connection]]:
    """A process for each part, its model loaded."""
    with contextlib.ExitStack() as stack:
        pipes = [
            stack.enter_context(other_process(play, own, part))
            for own, part in zip(settings, parts, strict=True)
        ]
        for pipe in pipes:
            assert pipe.recv() == "loaded"
        yield pipes


@contextlib.asynccontextmanager
async def sides(args: argparse.Namespace, pipes: Sequence[Connection]) -> AsyncIterator[list[Side]]:
    """Open every room and connect to them; "both" has a line for each process that plays it."""
    seats: dict[str, list[list[Seat]]] = {}
    for pipe in pipes:
        pipe.send("open")
    for pipe in pipes:
        opened, device, gib = await asyncio.to_thread(pipe.recv)
        print(f"{', '.join(opened)} on {device}: {gib:.1f} GiB", flush=True)
        args.names.append(device)
        for kind, places in opened.items():
            found = [Seat(key=key, host=host, port=port) for key, host, port in places]
            seats.setdefault(kind, []).append(found)
    settings = settings_of(args, "cpu")
    async with contextlib.AsyncExitStack() as stack:

        async def line(places: list[Seat]) -> Line:
            return Line(await stack.enter_async_context(house_of(settings, places)))

        apart = await line([*seats["prefill"][0], *seats["decode"][0]])
        both = [await line(places) for places in seats["both"]]
        yield [
            Side(name="apart", lines=[apart], chunk=args.step_tokens),
            *(Side(name="both", lines=both, chunk=chunk) for chunk in args.chunks),
        ]


def settings_of(args: argparse.Namespace, device: str) -> Settings:
    """Pools for `args.at_once` requests; steps of prefill as the product's own settings say."""
    pages = args.at_once * (-(-(args.lengths[1] + args.tokens) // 64) + 1)
    model = ModelSettings(path=str(NANO), device=device, ops=args.ops)
    if not args.small:
        model = dataclasses.replace(model, dtype="bfloat16")
        pages //= 2  # of log-uniform lengths few are the longest
    return Settings(
        model=model,
        prefill=PrefillSettings(
            slots=args.at_once, pages=pages, step_tokens=args.step_tokens, landing_rows=64
        ),
        decode=DecodeSettings(slots=args.at_once, pages=pages, max_batch=args.at_once),
    )


async def measure(args: argparse.Namespace, pipes: Sequence[Connection]) -> list[dict[str, Any]]:
    """Every side at every rate, sides turn about."""
    objective = Objective(first_s=args.first, each_s=args.each)
    vocab = load_spec(NANO).bos if args.small else VOCAB
    lines: list[dict[str, Any]] = []
    async with sides(args, pipes) as ways:
        for way in ways:
            await tell_chunk(pipes, way)
            low, high = args.lengths
            lengths = [low, 2 * low + 17, (low + high) // 2, high]
            warm = [Asked(at=0.0, token_ids=tuple(range(2, 102)) * (n // 100)) for n in lengths]
            came = await way.serve(warm * len(way.lines), WARM_TOKENS, READY_S, f"warm{way.chunk}")
            assert all(answer.is_whole for answer in came), [answer.error for answer in came]
            print("warm", way.name, way.chunk, flush=True)
        for number, rate in enumerate(args.rates):
            asked = load(rate, args.seconds, tuple(args.lengths), vocab, args.seed + number)
            first: list[Answered] | None = None
            for way in ways:
                await tell_chunk(pipes, way)
                run = f"{way.name}{way.chunk}-{rate:g}"
                came = await way.serve(asked, args.tokens, args.seconds + args.patience, run)
                first = first or came
                found = figures(came, args.seconds, objective) | equal(first, came)
                lines.append(kept(args, way, rate, found, came))
    return lines


async def tell_chunk(pipes: Sequence[Connection], way: Side) -> None:
    """Set the prefill step of "both"."""
    if way.name == "both":
        for pipe in pipes:
            pipe.send(("chunk", way.chunk))
            await asyncio.to_thread(pipe.recv)


def kept(
    args: argparse.Namespace,
    way: Side,
    rate: float,
    found: dict[str, Any],
    came: Sequence[Answered],
) -> dict[str, Any]:
    """Write a line with every request's times, print its figures."""
    case = {
        "side": way.name, "chunk": way.chunk, "devices": args.devices, "rate": rate,
        "seconds": args.seconds, "lengths": args.lengths, "tokens": args.tokens, "seed": args.seed,
        "model": "nano" if args.small else "slice", "first_s": args.first, "each_s": args.each,
    }  # fmt: skip
    each = [
        [answer.prompt, len(answer.times), *map(finite, (answer.first_s, answer.each_s))]
        for answer in came
    ]
    line = {"at": datetime.now(UTC).isoformat(timespec="seconds"), "case": case, "figures": found}
    line |= {"answers": each, "errors": sorted({a.error for a in came if a.error})}
    line |= {"devices": args.names, "commit": commit(), "machine": machine()}
    out = Path(args.out) if args.out else RESULTS / "mixed.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(f"{way.name:5} {way.chunk:5} {rate:6g}/s", json.dumps(found), flush=True)
    return line


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Options; those not given depend on the size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, choices=(0, 1, 2), default=1, help="0: the CPU")
    parser.add_argument("--small", action="store_true", help="the bundled checkpoint")
    parser.add_argument("--rates", type=float, nargs="+", help="arrivals a second")
    parser.add_argument("--seconds", type=float, help="during which requests arrive, at each rate")
    parser.add_argument("--patience", type=float, default=20.0, help="seconds after that")
    parser.add_argument("--lengths", type=int, nargs=2, help="least and most tokens of a prompt")
    parser.add_argument("--tokens", type=int, help="of an answer")
    parser.add_argument("--step-tokens", type=int, help="of a prefill step where rooms are apart")
    parser.add_argument("--chunks", type=int, nargs="+", help='of a prefill step of "both"')
    parser.add_argument("--at-once", type=int, help="requests that a replica holds")
    parser.add_argument("--first", type=float, default=2.0, help="objective, seconds")
    parser.add_argument("--each", type=float, default=0.04, help="objective, seconds a token")
    parser.add_argument("--ops", default="auto", help="bodies of the ops, as model.ops")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", default="", help="default: benchmarks/results/mixed.jsonl")
    args = parser.parse_args(argv)
    args.names = []
    if not args.devices and not args.small:
        parser.error("the slice of true width needs a GPU; add --small")
    usual: dict[str, tuple[Any, Any]] = {  # small, and true width
        "rates": ([1.0, 2.0], [float(n * args.devices) for n in (1, 2, 3)]),
        "seconds": (8.0, 12.0),
        "lengths": ([100, 800], [1024, 32768]),
        "tokens": (20, 200),
        "step_tokens": (1024, 8192),
        "chunks": ([64, 1024], [1024, 8192]),
        "at_once": (32, 48),
    }
    for name, (small, wide) in usual.items():
        if getattr(args, name) is None:
            setattr(args, name, small if args.small else wide)
    return args


def main() -> None:
    args = parsed()
    kinds = [("prefill", "both"), ("decode",) if args.devices == 1 else ("decode", "both")]
    devices = [f"cuda:{n % args.devices}" if args.devices else "cpu" for n in range(2)]
    parts = [
        Part(
            device=device,
            kinds=kind,
            context=args.lengths[1] + args.tokens,
            is_slice=not args.small,
        )
        for device, kind in zip(devices, kinds, strict=True)
    ]
    with processes([settings_of(args, device) for device in devices], parts) as pipes:
        lines = asyncio.run(measure(args, pipes))
    print(table(lines))
    if not args.devices:
        missed = [line for line in lines if line["figures"]["same"] < line["figures"]["compared"]]
        assert not missed, "the sides answered different tokens"


if __name__ == "__main__":
    main()
