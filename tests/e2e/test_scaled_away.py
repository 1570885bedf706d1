"""Replicas that the policy scales away under Ray Serve while they write answers.

Their streams end as ever, nobody sees an error, and nothing is replayed or left behind.
"""

from __future__ import annotations

import time

import httpx
import pytest

from tests.e2e.test_leaving_live import NANO, Readers
from tests.e2e.test_scaling_live import counted, nothing_held
from tests.support.pictures import data_uri, encoded, slope
from tests.support.processes import eventually
from tests.support.serving import serving

pytestmark = pytest.mark.slow
ONES = {"encoder": 1, "prefill": 1, "decode": 1}
URI = data_uri(encoded(slope()))
SCALED = {
    "model": NANO,
    "server": {"drain_s": 60.0},
    "encoder": {"replicas": 2},
    "prefill": {"replicas": 2},
    "decode": {"replicas": 2, "slots": 8},
    "scaling": {
        "enabled": True,
        "budget": 6,
        "encoder_min": 1,
        "encoder_max": 2,
        "prefill_max": 2,
        "decode_max": 2,
        # Whatever they do, the policy finds that one of each is enough.
        "low": 0.97,
        "aim": 0.98,
        "high": 0.99,
        "up_s": 600.0,
        "down_s": 10.0,
        "window_s": 4.0,
    },
}


def replicas(admin_url: str) -> dict[str, int]:
    return counted(admin_url, "baton_replicas")


def leaving_with_streams(admin_url: str) -> bool:
    """Whether a decode replica that takes nothing new still writes an answer."""
    if replicas(admin_url)["decode"] != 1:
        return False
    told = httpx.get(f"{admin_url}/admin/inventory", timeout=10).json()["replicas"]
    return sum(row["room"] == "decode" and row["slots"] > 0 for row in told) == 2


def test_replicas_scaled_away_under_load_end_their_streams_and_nobody_sees_an_error(tmp_path):
    looks = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": URI}}]}
    bodies = [("/v1/completions", {"prompt": "one two three", "max_tokens": 600})] * 3
    bodies += [("/v1/chat/completions", {"messages": [looks], "max_tokens": 200})]
    with serving(tmp_path, SCALED) as server:
        readers = Readers(server.url, bodies)
        readers.come()
        seen = False
        try:
            assert replicas(server.admin_url) == dict.fromkeys(ONES, 2)
            until = time.monotonic() + 240
            while replicas(server.admin_url) != ONES or not seen:
                left = replicas(server.admin_url)
                targets = counted(server.admin_url, "baton_scaling_target")
                assert time.monotonic() < until, f"{left} under load, targets {targets}, {seen}"
                seen = seen or leaving_with_streams(server.admin_url)
                time.sleep(0.1)
            time.sleep(3)
        finally:
            readers.leave()
        failed = [told for _, told in readers.told if isinstance(told, Exception)]
        assert not failed
        for number in range(len(bodies)):
            answers = [told for at, told in readers.told if at == number]
            assert {told.last for told in answers} == {"[DONE]"}
            assert len({told.text for told in answers}) == 1
        eventually(lambda: nothing_held(server.admin_url), within_s=10)
        metrics = httpx.get(f"{server.admin_url}/metrics", timeout=10).text
        assert "\nbaton_replays_total{" not in metrics
