"""The composition root: one Serve application of four deployments.

`builder` is the import path of `serve deploy`, `ray up` and KubeRay. The router gets a handle of
each room only to learn which replicas there are; jobs travel over the rooms' own sockets.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve import Application, Deployment
from ray.serve.config import RequestRouterConfig

from common.config.loading import as_tables, load_settings
from common.config.settings import Settings
from router.app import RouterReplica
from services.decode.app import Decode
from services.encoder.app import Encoder
from services.prefill.app import Prefill

SEATING = "router.discovery.PinRouter"
MANY = 100_000  # admission is the router's own; Serve must never refuse a control call


def builder(args: dict[str, str]) -> Application:
    """Build from the `args` of a Serve config file: `settings` names the deployment file."""
    return compose(load_settings(Path(args["settings"])))


def compose(settings: Settings) -> Application:
    """Bind the rooms into the router.

    Numbers of replicas and resources named in a Serve config file win over the settings'.
    """
    tables, secret = as_tables(settings), secrets.token_hex(32)
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
    deployment: Deployment = serve.deployment(
        num_replicas=replicas,
        ray_actor_options={"num_cpus": 0.5, "num_gpus": 1 if on_gpu else 0},
        request_router_config=RequestRouterConfig(
            request_router_class=SEATING  # type: ignore[arg-type]  # its validator takes a path
        ),
        **_common(settings),
    )(kind)
    return deployment


def _common(settings: Settings) -> dict[str, Any]:
    return {
        "max_ongoing_requests": MANY,
        "graceful_shutdown_timeout_s": settings.server.drain_s + 10,
        "health_check_period_s": 2.0,
        "health_check_timeout_s": 10.0,
    }
