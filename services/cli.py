"""The `baton` command: serve, check, slice, plan, chat, trace."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

import httpx

from common.config.loading import client_key, load_settings
from common.config.settings import Settings
from common.errors import ConfigError, NotFound, ServingError
from services.before import refuse_what_cannot_start
from services.chat import run_chat, shown

READY_S = 120.0  # patience for the first probe after a start
GOODBYE_S = 20.0  # after the drain time: error events, processes that end, Serve's own steps


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; returns the process's exit status."""
    parser = argparse.ArgumentParser(prog="baton", description="Serve Kimi K3 as a relay.")
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="start router and rooms on this machine")
    serve.add_argument("settings", type=Path, help="deployment file")
    check = commands.add_parser("check", help="compare a checkpoint with what the model needs")
    check.add_argument("directory", type=Path)
    for room in ("prefill", "decode"):
        check.add_argument(
            f"--{room}",
            metavar="TPxEP",
            default="1x1",
            help=f"ranks of a {room} replica, tensor x expert, e.g. 8x16",
        )
    cut = commands.add_parser("slice", help="write a random checkpoint with the release's widths")
    cut.add_argument("out", type=Path)
    cut.add_argument("--layers", default="0-3", help="first-last, counted from 0")
    cut.add_argument("--experts", type=int, help="routed experts a layer; default: all")
    _add_plan(commands.add_parser("plan", help="what so many GPUs can serve, or why not"))
    trace = commands.add_parser("trace", help="where the time of a request of late went")
    trace.add_argument("id", help="the X-Request-Id of its reply, or the id of its trace")
    trace.add_argument("--url", default="http://127.0.0.1:8001", help="the second listener")
    trace.add_argument("--key-file", type=Path, help="holds the second listener's key")
    chat = commands.add_parser("chat", help="talk to a running server")
    chat.add_argument("--url", default="http://127.0.0.1:8000")
    chat.add_argument("--model", default="", help="default: the first that /v1/models lists")
    chat.add_argument("--image", type=Path, help="a picture to show with the first message")
    chat.add_argument("--key-file", type=Path, help="holds the API key; default: BATON_API_KEY's")
    args = parser.parse_args(argv)
    try:
        if args.command == "serve":
            return run_server(load_settings(args.settings))
        if args.command == "check":
            return run_check(args.directory, args.prefill, args.decode)
        if args.command == "slice":
            return run_slice(args.out, args.layers, args.experts)
        if args.command == "plan":
            return run_plan(args)
        if args.command == "trace":
            return run_trace(args.id, args.url, args.key_file)
        return run_chat(args.url, args.model, args.image, _key(args.key_file) or client_key())
    except httpx.HTTPStatusError as error:
        words = f"{error.request.url} says {error.response.status_code}; give the right --url"
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        words = f"{args.url} does not answer: {error}; give --url as http://HOST:PORT"
    except (ServingError, OSError, UnicodeError) as error:
        words = str(error).removeprefix(f"[Errno {getattr(error, 'errno', '')}] ")
    print(f"baton: {words}", file=sys.stderr)
    return 1


def run_server(settings: Settings) -> int:
    """Start a local Ray with the application, say when it is ready, and stop both on a signal.

    What runs may end within the drain time; a second signal ends everything at once.
    """
    refuse_what_cannot_start(settings)
    stopping, hurry = threading.Event(), threading.Event()
    _stop_on_signals(stopping, hurry)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
    # Read when Serve starts: figures for scaling arrive every second, not every ten.
    os.environ.setdefault("RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S", "1")
    import ray
    from ray import serve

    from services.app import deploy, shut_down
    from services.kept import tell_routers_to_close

    started = time.monotonic()
    ray.init(
        address="local",
        num_cpus=max(8, os.cpu_count() or 1),  # rooms ask for shares, not for cores of their own
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    _stop_on_signals(stopping, hurry)  # Ray put its own handlers in place
    try:
        serve.start(proxy_location="Disabled")
        deploy(settings)
        url = f"http://{settings.server.host}:{settings.server.port}"
        if _wait_ready(url, stopping):
            seconds = time.monotonic() - started
            print(f"Baton serves {settings.model.name} at {url} (ready after {seconds:.0f} s)")
            sys.stdout.flush()
            stopping.wait()
            tell_routers_to_close()
    finally:
        shut_down(settings.server.drain_s + GOODBYE_S, hurry)
        ray.shutdown()
    return 0


def run_check(directory: Path, prefill: str, decode: str) -> int:
    """Read a checkpoint's configuration and headers; refuse what is missing or left over."""
    from common.weights.check import check
    from common.weights.shares import Ranks

    ranks = [Ranks(tensor=t, expert=e) for t, e in (_pair(prefill, "x"), _pair(decode, "x"))]
    for line in check(directory, prefill=ranks[0], decode=ranks[1]).lines():
        print(line)
    return 0


def run_slice(out: Path, layers: str, experts: int | None) -> int:
    """Write some layers at true width, with random values."""
    from common.weights.slice import write_slice

    first, last = _pair(layers, "-")
    for name in write_slice(out, first=first, last=last, experts=experts):
        print(out / name)
    return 0


def _add_plan(plan: argparse.ArgumentParser) -> None:
    plan.add_argument("--gpus", type=int, required=True)
    plan.add_argument("--gpu", default="h200", help="h200, b200 or b300")
    plan.add_argument("--context", default="128k", help="most tokens of one request")
    plan.add_argument("--users", type=int, required=True, help="requests in decode at once")
    plan.add_argument("--typical", default="", help="tokens a user holds; default: 8k or context")
    plan.add_argument("--answer", type=int, default=512, help="tokens of an answer")
    plan.add_argument("--checkpoint", type=Path, help="default: Kimi K3's shapes")


def run_plan(args: argparse.Namespace) -> int:
    """Divide GPUs between the stages and print what that gives."""
    from common.config.checkpoint import load_spec, parse_spec
    from common.config.plan import Wish, plan
    from common.config.release import RELEASE

    context = _tokens(args.context)
    wish = Wish(
        gpus=args.gpus,
        gpu=args.gpu,
        context=context,
        users=args.users,
        typical=_tokens(args.typical) if args.typical else min(context, 8192),
        answer=args.answer,
    )
    spec = load_spec(args.checkpoint) if args.checkpoint else parse_spec(RELEASE)
    for line in plan(spec, wish).lines():
        print(line)
    return 0


def run_trace(name: str, url: str, key_file: Path | None) -> int:
    """Print the waterfall of a request that a router still remembers."""
    from urllib.parse import quote

    from services.waterfall import lines

    place = f"{url.rstrip('/')}/admin/requests/{quote(name, safe='')}"
    told = httpx.get(place, headers=shown(_key(key_file)), timeout=10)
    if told.status_code == 401:
        raise ConfigError(f"{url} wants the key of the second listener; give it by --key-file")
    if told.status_code == 404 and "json" in told.headers["content-type"]:
        if not isinstance(words := told.json()["error"], str):
            raise NotFound(f"{url} is not the second listener; give that by --url")
        raise NotFound(words)
    for past in told.raise_for_status().json()["requests"]:
        print("\n".join(lines(past)))
    return 0


def _tokens(text: str) -> int:
    number, unit = (text[:-1], 1024) if text.lower().endswith("k") else (text, 1)
    if not number.isdecimal() or not int(number):
        raise ConfigError(f"{text!r} is no number of tokens; write 8192 or 8k")
    return int(number) * unit


def _pair(text: str, between: str) -> tuple[int, int]:
    left, _, right = text.partition(between)
    if not (left.isdecimal() and right.isdecimal()):
        raise ConfigError(f"{text!r} is not two numbers with {between!r} between them")
    return int(left), int(right)


def _key(file: Path | None) -> str:
    return file.read_text().strip() if file else ""


def _stop_on_signals(stopping: threading.Event, hurry: threading.Event) -> None:
    def told(*_: object) -> None:
        (hurry if stopping.is_set() else stopping).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, told)


def _wait_ready(url: str, stopping: threading.Event) -> bool:
    """Wait for `/ready`; False when told to stop meanwhile."""
    until = time.monotonic() + READY_S
    while time.monotonic() < until and not stopping.is_set():
        try:
            if httpx.get(f"{url}/ready", timeout=5).status_code == 200:
                return True
        except httpx.HTTPError:
            pass
        stopping.wait(0.1)
    if stopping.is_set():
        return False
    raise ServingError(f"{url} was not ready within {READY_S:g} s; see Ray's logs of the replicas")


if __name__ == "__main__":
    sys.exit(main())
