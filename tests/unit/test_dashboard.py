"""The operator's page: its key, its events, and itself in a real browser."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import hashlib
import json

import pytest

from common.config import settings as cs
from common.errors import ConfigError
from router.dashboard import PAGE, snapshot
from tests.support.browser import CHROMIUM, browser
from tests.unit.test_routes import SETTINGS, site

KEY_HASH = hashlib.sha256(b"open sesame").hexdigest()
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")


async def test_a_snapshot_tells_of_stages_and_the_last_requests_and_not_what_they_said():
    async with site() as here:
        await here.http.post(
            "/v1/completions",
            json={"model": "nano-k3", "prompt": "a secret word", "max_tokens": 2},
            headers={"X-Request-Id": "mine-1"},
        )
        told = snapshot(here.router.house, here.router.readiness)
        assert {s: len(one["replicas"]) for s, one in told["stages"].items()} == {
            "encoder": 1,
            "prefill": 1,
            "decode": 1,
        }
        (past,) = told["requests"]
        assert past["client"] == "mine-1"
        assert [p["name"] for p in past["parts"] if not p["within"]] == [
            "wait",
            "prefill",
            "hand_off",
            "decode",
        ]
        assert sum(p["long_s"] for p in past["parts"] if not p["within"]) <= past["total_s"] + 1e-6
        assert told["counted"]["requests"] == 1
        assert "secret" not in json.dumps(told)


async def test_a_request_is_found_by_each_of_its_ids():
    trace = "0af7651916cd43dd8448eb211c80319c"
    async with site() as here:
        missing = (await here.admin.get("/admin/requests/nobody")).json()["error"]
        assert "any so far, at r1" in missing
        reply = await here.http.post(
            "/v1/completions",
            json={"model": "nano-k3", "prompt": ["one", "two"], "max_tokens": 2},
            headers={"traceparent": f"00-{trace}-b7ad6b7169203331-01"},
        )
        header = reply.headers["x-request-id"]
        for name in (header, trace):
            found = (await here.admin.get(f"/admin/requests/{name}")).json()["requests"]
            assert {one["request"] for one in found} == {f"{header}-0", f"{header}-1"}
            assert {one["trace"] for one in found} == {trace}
        (one,) = (await here.admin.get(f"/admin/requests/{header}-0")).json()["requests"]
        assert one["header"] == header
        missing = await here.admin.get("/admin/requests/nobody")
        assert missing.status_code == 404 and "the last 2 that ended" in missing.json()["error"]


async def test_with_a_key_the_second_listener_asks_for_it():
    access = dataclasses.replace(SETTINGS.access, admin=KEY_HASH)
    async with site(dataclasses.replace(SETTINGS, access=access), ready=False) as here:
        for path in ("/metrics", "/admin/inventory", "/dashboard", "/dashboard/events"):
            reply = await here.admin.get(path)
            assert reply.status_code == 401 and "Basic" in reply.headers["www-authenticate"]
        basic = base64.b64encode(b"me:open sesame").decode()
        for header in ("Bearer open sesame", f"Basic {basic}"):
            reply = await here.admin.get("/metrics", headers={"Authorization": header})
            assert reply.status_code == 200
        for header in ("Bearer close sesame", "Basic open sesame", "Basic", ""):
            reply = await here.admin.get("/metrics", headers={"Authorization": header})
            assert reply.status_code == 401


def test_without_a_key_the_second_listener_stays_on_loopback():
    with pytest.raises(ConfigError, match=r"access\.admin is empty"):
        cs.Settings(server=cs.ServerSettings(admin_host="0.0.0.0"))


def test_the_page_loads_nothing_from_elsewhere():
    text = PAGE.read_text()
    assert "http://" not in text and "https://" not in text and "@import" not in text
    assert "innerHTML" not in text.replace('$("spark-" + id).innerHTML', "")


@needs_browser
async def test_the_page_lives(tmp_path):
    async with site() as here, browser(tmp_path) as tab:
        url = f"http://127.0.0.1:{here.router.admin.port}/dashboard"
        await tab.open(url, width=1280, height=900)
        await tab.until("document.getElementById('ready').textContent == 'ready'")
        assert await tab.value("!document.getElementById('no-requests').hidden")
        for stage in ("encoder", "prefill", "decode"):
            heading = await tab.value(f"document.querySelector('#{stage} h2').textContent")
            assert heading == f"{stage.capitalize()}: 1 replica"

        await here.chat()  # and the page follows by itself
        await tab.until("document.querySelectorAll('tr.request').length == 1")
        await tab.until("document.getElementById('goodput').textContent == '100 %'")
        await tab.value("document.querySelector('tr.request').click()")
        parts = await tab.value("document.querySelector('.parts').textContent")
        assert "hand off" in parts and "verify" in parts
        widths = "[...document.querySelectorAll('.fall i')].map(e => parseFloat(e.style.width))"
        assert 0 < sum(await tab.value(widths)) <= 100.5

        await tab.open(url, width=390, height=800, dark=True)  # a phone at night
        await tab.until("document.getElementById('ready').textContent == 'ready'")
        assert await tab.value("document.documentElement.scrollWidth") <= 390
        assert (
            await tab.value("getComputedStyle(document.body).backgroundColor") == "rgb(17, 22, 28)"
        )

        await here.router.stop()
        await tab.until("document.body.classList.contains('gone')")
        assert tab.complaints == []


@needs_browser
async def test_a_house_without_rooms_is_shown_as_such(tmp_path):
    async with site(ready=False, encoder=0, prefill=0, decode=0) as here, browser(tmp_path) as tab:
        here.router.house.decisions.stages = {"encoder": {"target": 0, "frozen": False}}
        await tab.open(
            f"http://127.0.0.1:{here.router.admin.port}/dashboard", width=1280, height=900
        )
        await tab.until("document.getElementById('ready').textContent == 'not ready'")
        assert "None answers." in await tab.value("document.getElementById('decode').textContent")
        assert "Asleep" in await tab.value("document.getElementById('encoder').textContent")


@needs_browser
async def test_a_request_that_failed_and_a_decision_are_shown_with_their_reasons(tmp_path):
    async with site(prefill=1, decode=1, encoder=0) as here, browser(tmp_path) as tab:
        house = here.router.house
        house.decisions.changes = [
            {"at": 0.0, "stage": "decode", "before": 1, "after": 2, "reason": "slots are scarce"}
        ]
        here.world["d1"].pause_after = 2
        asking = asyncio.create_task(here.chat())
        while not any(name.startswith("req-") for name in here.world["d1"].tasks):  # no probe
            await asyncio.sleep(0.01)
        await here.world["d1"].die()
        assert (await asking).is_error
        url = f"http://127.0.0.1:{here.router.admin.port}/dashboard"
        await tab.open(url, width=1280, height=900)
        await tab.until("document.querySelectorAll('tr.request td.bad').length == 1")
        assert "slots are scarce" in await tab.value(
            "document.getElementById('changes').textContent"
        )
        await tab.value("document.querySelector('tr.request').click()")
        told = await tab.value("document.querySelector('.parts').parentElement.textContent")
        assert "room_lost" in told and "replay at" in told and "d1" in told
        assert tab.complaints == []
