"""The composition root: one Serve application of four deployments.

`builder` is the import path of `serve deploy`, `ray up` and KubeRay. The router gets a handle of
each room only to learn which replicas there are; jobs travel over the rooms' own sockets.
"""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve import Application, Deployment
from ray.serve.config import RequestRouterConfig

from common.config.loading import as_tables, load_settings, parse_settings
from common.config.scaling import ScalingSettings
from common.config.settings import Settings
from common.runtime.part import Plan
from router.app import RouterReplica
from services import kept
from services.decode.app import Decode
from services.encoder.app import Encoder
from services.prefill.app import Prefill

POLICY = "services.scaling_hook:JointPolicy"
SEATING = "router.discovery.PinRouter"
NODE_RANKS = 8  # devices of one node
POLL_S = 0.2
MANY = 100_000  # admission is the router's own; Serve must never refuse a control call


def builder(args: dict[str, Any]) -> Application:
    """Build from the `args` of a Serve config file.

    `settings` names the deployment file; `tables` are its tables instead, without keys.
    """
    if "tables" in args:
        return compose(parse_settings(kept.whole(args), source="the application's tables"))
    return compose(load_settings(Path(args["settings"])))


def document(settings: Settings) -> dict[str, Any]:
    """The Serve config file of these settings, whose policy scales the stages together.

    Only a document can name a policy for the whole application; `serve.run` has no such argument.
    """
    tables = as_tables(settings)
    return {
        "proxy_location": "Disabled",
        "applications": [
            {
                "name": "baton",
                "route_prefix": None,
                "import_path": "services.app:builder",
                "args": kept.arguments(tables),
                "autoscaling_policy": {
                    "policy_function": POLICY,
                    "policy_kwargs": {"tables": {k: tables[k] for k in ("scaling", "server")}},
                },
            }
        ],
    }


def deploy(settings: Settings) -> None:
    """Run the application on the Ray this process is connected to."""
    if not settings.scaling.enabled:
        serve.run(compose(settings), name="baton", route_prefix=None)
        return
    # Without a dashboard nobody takes a document; this is what its endpoint calls.
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    client = _get_global_client()
    assert client is not None, "Serve was started just now"
    kept.keep(as_tables(settings))
    client.deploy_apps(ServeDeploySchema.model_validate(document(settings)), _blocking=False)
    client._wait_for_application_running("baton")  # the call itself would wait for 60 s


def shut_down(within_s: float, hurry: threading.Event) -> None:
    """End the application and Serve: every replica drains first, for as long as it may.

    Serve's own call gives up after 30 s whatever the drain time is, and streams then break without
    a word; and a call that waits for the controller's death is told in red to have failed. Returns
    at once when `hurry` is set.
    """
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
    from ray.serve.context import _get_global_client

    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:  # it did not come so far
        return
    client.shutdown_cached_handles()  # type: ignore[no-untyped-call]
    ray.get(client._controller.graceful_shutdown.remote(wait=False))
    until = time.monotonic() + within_s
    with contextlib.suppress(ValueError):  # its name goes with the controller, which goes last
        while time.monotonic() < until and not hurry.wait(POLL_S):
            ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    client._shutdown = True


def compose(settings: Settings) -> Application:
    """Bind the rooms into the router.

    Numbers of replicas and resources named in a Serve config file win over the settings'.
    """
    tables, secret = as_tables(settings), kept.room_secret()
    rooms: dict[str, Any] = {}
    for name, kind, replicas in (
        ("encoder", Encoder, settings.encoder.replicas),
        ("prefill", Prefill, settings.prefill.replicas),
        ("decode", Decode, settings.decode.replicas),
    ):
        if replicas:
            rooms[name] = _room(kind, replicas, settings).bind(tables, secret)
    front = serve.deployment(
        name="Router",
        num_replicas=settings.router.replicas,
        ray_actor_options={"num_cpus": 0.5},
        **_common(settings),
    )(RouterReplica)
    application: Application = front.bind(tables, secret, rooms)
    return application


def _room(kind: type, replicas: int, settings: Settings) -> Deployment:
    on_gpu = settings.model.device.startswith("cuda")
    resources = {"num_cpus": 0.5, "num_gpus": 1 if on_gpu else 0}
    ranks = 1 if kind is Encoder else Plan.of(settings, kind.__name__.lower()).mesh.world
    deployment: Deployment = serve.deployment(
        **_replicas(kind.__name__.lower(), replicas, settings.scaling),
        **_placement(ranks, resources),
        ray_actor_options=resources,
        request_router_config=RequestRouterConfig(
            request_router_class=SEATING  # type: ignore[arg-type]  # its validator takes a path
        ),
        **_common(settings),
    )(kind)
    return deployment


def _placement(ranks: int, resources: dict[str, float]) -> dict[str, Any]:
    """A bundle for each rank of a replica, the leader's first; on one node where one holds them."""
    if ranks == 1:
        return {}
    bundle = {"CPU": resources["num_cpus"]}
    if resources["num_gpus"]:
        bundle["GPU"] = resources["num_gpus"]
    return {
        "placement_group_bundles": [dict(bundle) for _ in range(ranks)],
        "placement_group_strategy": "STRICT_PACK" if ranks <= NODE_RANKS else "PACK",
    }


def _replicas(stage: str, replicas: int, scaling: ScalingSettings) -> dict[str, Any]:
    """How many; with a policy, its own patience is the only one, so Serve's delays are off."""
    if not scaling.enabled:
        return {"num_replicas": replicas}
    least, most = getattr(scaling, f"{stage}_min"), getattr(scaling, f"{stage}_max")
    return {
        "autoscaling_config": {
            "min_replicas": least,
            "max_replicas": most,
            "initial_replicas": min(max(replicas, least), most),
            "upscale_delay_s": 0.0,
            "downscale_delay_s": 0.0,
            "look_back_period_s": 2.0,  # the rooms' figures are means already
        }
    }


def _common(settings: Settings) -> dict[str, Any]:
    return {
        "max_ongoing_requests": MANY,
        "graceful_shutdown_timeout_s": settings.server.drain_s + 10,
        "health_check_period_s": 2.0,
        "health_check_timeout_s": 10.0,
    }
