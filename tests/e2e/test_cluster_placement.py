"""The application on a cluster of several nodes: each room where it belongs, and a node lost.

Several raylets of one machine stand for the nodes, with the custom resources of the cluster files.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from common.config.loading import load_settings
from tests.support.processes import ROOT, eventually, write_settings
from tests.support.serving import free_port

pytestmark = pytest.mark.slow
ROOMS = ("router", "encoder", "prefill", "decode")


def main(path: str) -> None:
    """In a process of its own: Ray leaves threads and warnings behind."""
    os.environ["RAY_SERVE_LOG_TO_STDERR"] = "0"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    from services.app import document

    settings = load_settings(Path(path), environ={})
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    nodes = {room: cluster.add_node(num_cpus=2, resources={room: 1}) for room in ROOMS}
    nodes["spare"] = cluster.add_node(num_cpus=2, resources={"decode": 1})
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        serve.start(proxy_location="Disabled")
        told = document(settings)
        told["applications"][0]["deployments"] = [
            {
                "name": room.capitalize(),
                "ray_actor_options": {"num_cpus": 0.5, "resources": {room: 1}},
            }
            for room in ROOMS
        ]
        _get_global_client().deploy_apps(ServeDeploySchema.model_validate(told), _blocking=True)
        ready(settings)
        where = places(ray)
        assert {room: where[room] for room in ROOMS[:3]} == {
            room: {nodes[room].node_id} for room in ROOMS[:3]
        }, where
        (lost,) = where["decode"]
        assert lost in (nodes["decode"].node_id, nodes["spare"].node_id)
        name = next(name for name, node in nodes.items() if node.node_id == lost)
        other = nodes["spare" if name == "decode" else "decode"].node_id
        cluster.remove_node(nodes[name], allow_graceful=False)
        eventually(lambda: places(ray).get("decode") == {other}, within_s=60)
        ready(settings)
        print("survived")
    finally:
        with contextlib.suppress(Exception):
            serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


def ready(settings) -> None:
    """Until a question is answered."""
    url = f"http://127.0.0.1:{settings.server.port}"
    body = {"model": "nano-k3", "prompt": "one two three", "max_tokens": 3}

    def answered() -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.post(f"{url}/v1/completions", json=body, timeout=20).status_code == 200
        return False

    eventually(answered, within_s=90, every_s=0.5)


def places(ray) -> dict[str, set[str]]:
    """Ids of the nodes that hold living replicas, by room."""
    found: dict[str, set[str]] = {}
    for actor in ray._private.state.actors().values():
        name = actor["Name"]
        if name.startswith("SERVE_REPLICA::baton#") and actor["State"] == "ALIVE":
            room = name.split("#")[1].lower()
            found.setdefault(room, set()).add(actor["Address"]["NodeID"])
    return found


def test_each_room_lands_on_its_node_and_the_house_survives_the_loss_of_one(tmp_path):
    tables = {
        "model": {"path": str(ROOT / "checkpoints/nano")},
        "server": {"port": free_port(), "admin_port": free_port(), "drain_s": 5.0},
        "scaling": {"enabled": True},
    }
    path = write_settings(tmp_path / "settings.toml", tables)
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.test_cluster_placement", str(path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0 and "survived" in done.stdout, done.stdout + done.stderr[-3000:]


if __name__ == "__main__":
    main(sys.argv[1])
