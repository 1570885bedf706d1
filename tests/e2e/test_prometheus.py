"""A real Prometheus scrapes the application under load, and every panel's query has an answer."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess

import httpx
import pytest

from deploy.monitoring.panels import PAGES
from tests.e2e.test_scaling_live import Crowd
from tests.support.processes import ROOT, eventually
from tests.support.serving import free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed"),
]


@contextlib.contextmanager
def prometheus(folder, target):
    config = {
        "global": {"scrape_interval": "1s"},
        "scrape_configs": [{"job_name": "baton", "static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))
    port = free_port()
    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=error",
        ],
        cwd=ROOT,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        eventually(lambda: answers(url), within_s=20)
        yield url
    finally:
        process.terminate()
        process.wait(20)


def answers(url):
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/-/ready").status_code == 200
    return False


def ask(url, query):
    told = httpx.get(f"{url}/api/v1/query", params={"query": query}).json()
    assert told["status"] == "success", (query, told)
    return told["data"]["result"]


def silent_panels(url):
    """Queries without data: page, panel, query."""
    return [
        (page.title, panel.title, query)
        for page in PAGES
        for panel in page.panels
        for query in panel.queries.values()
        if not ask(url, query)
    ]


def test_every_panel_of_every_page_shows_something_under_load(server, tmp_path):
    target = server.admin_url.removeprefix("http://")
    with prometheus(tmp_path, target) as url:
        crowd = Crowd(server.url)
        crowd.come(4)
        try:
            with contextlib.suppress(AssertionError):  # they are named below
                eventually(lambda: not silent_panels(url), within_s=90, every_s=2)
            silent = silent_panels(url)
            up = ask(url, 'up{job="baton"}')
        finally:
            crowd.leave()
    assert silent == []
    assert [sample["value"][1] for sample in up] == ["1"]
    assert set(crowd.outcomes) == {"length"}
