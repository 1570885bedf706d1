"""Nothing that Ray or Serve writes holds a key, its hash, a secret or a request's words."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from pathlib import Path

import httpx
import pytest

from tests.e2e.test_scaling_live import TABLES
from tests.support import canaries
from tests.support.processes import eventually
from tests.support.serving import serving

pytestmark = pytest.mark.slow
DIGEST = hashlib.sha256(canaries.KEY.encode()).hexdigest()
ADMIN = hashlib.sha256(b"sk-admin").hexdigest()
TOKEN = "0f" * 24  # Ray's own, as an operator would set it
SECRET = re.compile(rb"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")  # the form of a hash and of a secret


def test_no_file_of_a_cluster_that_scales_holds_what_is_secret(tmp_path):
    access = {"keys": [f"me:{DIGEST}"], "admin": ADMIN, "concurrent": 50}
    with tempfile.TemporaryDirectory(prefix="b", dir="/tmp") as ray:  # a socket's path is short
        env = {"RAY_TMPDIR": ray, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
        with serving(tmp_path, TABLES | {"access": access}, env) as server:
            with httpx.Client(base_url=server.url, timeout=120) as http:
                replies = [
                    http.post(path, json=body, headers=canaries.HEADERS)
                    for path, body in canaries.requests("nano-k3")
                ]
                assert [reply.status_code for reply in replies[:4]] == [200] * 4
                assert http.get("/v1/models").status_code == 401
            name = replies[0].headers["x-request-id"]
            lines = eventually(lambda: about(Path(ray), name), within_s=20)
        files = [path for path in Path(ray).rglob("*") if path.is_file()]
        logs = [path for path in files if "logs" in path.parts]
        assert any(path.name.startswith("controller") for path in logs)
        assert any(b"Importing application" in path.read_bytes() for path in logs)
        forbidden = [word.encode() for word in (*canaries.FORBIDDEN, DIGEST, ADMIN, TOKEN)]
        found = [
            (path.name, word)
            for path in files
            for word in [*forbidden, *SECRET.findall(path.read_bytes())]
            if word in path.read_bytes()
        ]
    assert found == []
    assert {line["room"] for line in lines} == {"router", "encoder", "prefill", "decode"}


def about(ray: Path, request: str) -> list[dict[str, object]]:
    """Lines of all processes that name a request, once every room has written one."""
    told = [
        json.loads(line)
        for path in ray.rglob("worker-*.err")
        for line in path.read_text().splitlines()
        if line.startswith("{") and request in line
    ]
    return told if len({line["room"] for line in told}) == 4 else []
