"""What `deploy/try.sh` needs beside the commands of an operator: files, load, waiting, looking.

    python -m deploy.trial files FOLDER --port P --admin-port P [--slots N] [--prefill N]
    python -m deploy.trial load URL REPORT      until SIGTERM; the report counts answers by ending
    python -m deploy.trial settled --prefill N [--gone PIDS]
    python -m deploy.trial pids ROOM            process ids of a room's replicas
    python -m deploy.trial look ADMIN_URL [PROMETHEUS_URL]

`settled` and `pids` ask Serve's own REST endpoint at RAY_DASHBOARD_ADDRESS, with RAY_AUTH_TOKEN.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import yaml

from deploy.monitoring.panels import PAGES

ROOT = Path(__file__).parents[1]
ROOMS = ("Router", "Encoder", "Prefill", "Decode")
PATIENCE_S = 300.0
PANELS_S = 60.0  # for a panel to have data
CLIENTS = 3
PAUSE_S = 0.3  # of one client between two questions: the machine has other things to do

SETTINGS = """\
[model]
path = "{root}/checkpoints/nano"

[server]
port = {port}
admin_port = {admin_port}
drain_s = 20.0

[encoder]
replicas = 2

[prefill]
replicas = 2

[decode]
replicas = 2
slots = {slots}
"""


def write_files(given: argparse.Namespace) -> int:
    """The settings, and `deploy/serve.yaml` for one machine without a GPU and with them."""
    folder = given.folder
    values = {"root": ROOT, "port": given.port, "admin_port": given.admin_port}
    (folder / "settings.toml").write_text(SETTINGS.format(slots=given.slots, **values))
    told = yaml.safe_load((ROOT / "deploy/serve.yaml").read_text())
    application = told["applications"][0]
    application["args"] = {"settings": str(folder / "settings.toml"), "release": given.release}
    del application["autoscaling_policy"]  # this operator counts replicas by hand
    for deployment in application["deployments"]:
        options = deployment["ray_actor_options"]
        options["num_cpus"] = 0.1
        options.pop("num_gpus", None)
        deployment["graceful_shutdown_timeout_s"] = 30
        if deployment["name"] == "Prefill":
            deployment["num_replicas"] = given.prefill
    (folder / "serve.yaml").write_text(yaml.safe_dump(told, sort_keys=False))
    return 0


class Crowd:
    """Clients that ask the same few questions, greedily, so that each has one right answer."""

    def __init__(self, url: str) -> None:
        """`url` is where the router listens."""
        self._url, self.over = url, threading.Event()
        self.endings: Counter[str] = Counter()
        self._answers: dict[int, str] = {}
        self._lock = threading.Lock()
        picture = base64.b64encode((ROOT / "docs/pictures/question.png").read_bytes()).decode()
        shown = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}
        text = {"type": "text", "text": "Describe this image."}
        self._questions: list[Any] = ["Count to twenty.", [text, shown], "What is a relay race?"]

    def run(self) -> None:
        """Ask until `over` is set."""
        threads = [threading.Thread(target=self._client, args=(n,)) for n in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _client(self, number: int) -> None:
        while not self.over.is_set():
            which = number % len(self._questions)
            try:
                answer = self._ask(self._questions[which])
            except (httpx.HTTPError, LookupError, ValueError) as error:
                ending = f"lost: {error!r}"[:300]
            else:
                right = self._answers.setdefault(which, answer)
                ending = "answered" if answer == right else f"differs: {answer!r}"
            with self._lock:
                self.endings[ending] += 1
            self.over.wait(PAUSE_S)

    def _ask(self, content: Any) -> str:
        """One answer as a stream; a connection each, as from many clients."""
        body = {
            "model": "nano-k3", "messages": [{"role": "user", "content": content}], "stream": True,
            "temperature": 0, "max_tokens": 40, "ignore_eos": True,
        }  # fmt: skip
        answer, finish, is_done = "", None, False
        with (
            httpx.Client(base_url=self._url, timeout=120) as client,
            client.stream("POST", "/v1/chat/completions", json=body) as reply,
        ):
            if reply.status_code != 200:
                raise ValueError(f"{reply.status_code} {reply.read().decode()}")
            for line in reply.iter_lines():
                is_done = is_done or line == "data: [DONE]"
                if not line.startswith("data: {"):
                    continue
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    delta = choice["delta"]
                    answer += delta.get("reasoning_content") or delta.get("content") or ""
                    finish = choice["finish_reason"] or finish
        if not is_done or finish != "length":
            raise ValueError(f"ended with {finish} after {answer!r}")
        return answer


def load(given: argparse.Namespace) -> int:
    """Ask until told to stop, then write what came of it."""
    crowd = Crowd(given.url)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: crowd.over.set())
    asking = threading.Thread(target=crowd.run)
    asking.start()
    while asking.is_alive():
        asking.join(0.2)
    given.report.write_text(json.dumps(crowd.endings))
    return 0


def replicas() -> dict[str, list[dict[str, Any]]]:
    """What Serve knows: its replicas by deployment; empty before there is an application."""
    headers = {"Authorization": f"Bearer {os.environ.get('RAY_AUTH_TOKEN', '')}"}
    url = f"{os.environ['RAY_DASHBOARD_ADDRESS']}/api/serve/applications/"
    told = httpx.get(url, headers=headers, timeout=20).raise_for_status().json()
    application = told["applications"].get("baton", {"deployments": {}})
    if application.get("status") == "DEPLOY_FAILED":
        raise SystemExit(f"the application did not start: {application['message']}")
    return {name: one["replicas"] for name, one in application["deployments"].items()}


def settled(given: argparse.Namespace) -> int:
    """Wait until exactly the replicas that should run do, and those of `gone` do not."""
    wanted = dict.fromkeys(ROOMS, 2) | {"Prefill": given.prefill}
    gone = {int(pid) for pid in given.gone.split()}
    until = time.monotonic() + PATIENCE_S
    found: dict[str, list[dict[str, Any]]] = {}
    while time.monotonic() < until:
        with contextlib.suppress(httpx.HTTPError):
            found = replicas()
            running = {
                name: sum(r["state"] == "RUNNING" and r["pid"] not in gone for r in rows)
                for name, rows in found.items()
            }
            if running == wanted == {name: len(rows) for name, rows in found.items()}:
                print(" ".join(f"{name.lower()} {count}" for name, count in running.items()))
                return 0
        time.sleep(0.5)
    states = {name: [(r["pid"], r["state"]) for r in rows] for name, rows in found.items()}
    raise SystemExit(f"{wanted} were wanted without {gone}; after {PATIENCE_S:g} s: {states}")


def pids(given: argparse.Namespace) -> int:
    """Print the process ids of one room's replicas, or of all."""
    for name, rows in replicas().items():
        if given.room in (name, "all"):
            print(*[row["pid"] for row in rows if row["state"] == "RUNNING"])
    return 0


def look(given: argparse.Namespace) -> int:
    """The operator's pages answer, the metrics are there, and every panel has something to show."""
    with httpx.Client(base_url=given.admin_url, timeout=20) as client:
        page = client.get("/dashboard").raise_for_status().text
        if "<html" not in page:
            raise SystemExit(f"/dashboard is no page: {page[:200]!r}")
        with client.stream("GET", "/dashboard/events") as events:
            line = next(line for line in events.iter_lines() if line.startswith("data: "))
        stages = {
            stage: len(one["replicas"])
            for stage, one in json.loads(line.removeprefix("data: "))["stages"].items()
        }
        metrics = client.get("/metrics").raise_for_status().text
    print(f"/dashboard shows {stages}; /metrics has {metrics.count(chr(10))} lines")
    if given.prometheus_url:
        _look_at_panels(given.prometheus_url)
    return 0


def _look_at_panels(url: str) -> None:
    asked = [
        (f"{page.title}, {panel.title}", query)
        for page in PAGES
        for panel in page.panels
        for query in panel.queries.values()
    ]
    until = time.monotonic() + PANELS_S
    with httpx.Client(base_url=url, timeout=20) as client:
        while silent := [f"{name}: {query}" for name, query in asked if not _has(client, query)]:
            if time.monotonic() > until:
                raise SystemExit("\n".join(["these panels show nothing:", *silent]))
            time.sleep(1)
        rules = client.get("/api/v1/rules").json()["data"]["groups"][0]["rules"]
    if broken := [rule["name"] for rule in rules if rule["health"] == "err"]:
        raise SystemExit(f"these alerts cannot be evaluated: {broken}")
    firing = [rule["name"] for rule in rules if rule["state"] == "firing"]
    count, told = len(asked), ", ".join(firing) or "none"
    print(f"{count} queries of panels have data; {len(rules)} alerts, firing: {told}")


def _has(client: httpx.Client, query: str) -> bool:
    told = client.get("/api/v1/query", params={"query": query}).json()
    if told["status"] != "success":
        raise SystemExit(f"{query}: {told}")
    return bool(told["data"]["result"])


def main() -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    verbs = parser.add_subparsers(required=True)
    files = verbs.add_parser("files")
    files.set_defaults(run=write_files)
    files.add_argument("folder", type=Path)
    files.add_argument("--port", type=int, required=True)
    files.add_argument("--admin-port", type=int, required=True)
    files.add_argument("--slots", type=int, default=8)
    files.add_argument("--release", default="1")
    files.add_argument("--prefill", type=int, default=2)
    asking = verbs.add_parser("load")
    asking.set_defaults(run=load)
    asking.add_argument("url")
    asking.add_argument("report", type=Path)
    waiting = verbs.add_parser("settled")
    waiting.set_defaults(run=settled)
    waiting.add_argument("--prefill", type=int, default=2)
    waiting.add_argument("--gone", default="")
    numbers = verbs.add_parser("pids")
    numbers.set_defaults(run=pids)
    numbers.add_argument("room", choices=(*ROOMS, "all"))
    looking = verbs.add_parser("look")
    looking.set_defaults(run=look)
    looking.add_argument("admin_url")
    looking.add_argument("prometheus_url", nargs="?", default="")
    given = parser.parse_args()
    return int(given.run(given))


if __name__ == "__main__":
    sys.exit(main())
