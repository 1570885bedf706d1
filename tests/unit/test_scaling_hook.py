"""Serve's contexts in, targets out; and the interface of Serve that this stands on."""

from __future__ import annotations

import inspect
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest

from common.config.loading import as_tables
from common.config.scaling import ScalingSettings
from common.config.settings import ServerSettings, Settings
from services.scaling_hook import JointPolicy


@dataclass(frozen=True)
class Id:
    name: str
    unique_id: str = ""


@dataclass
class Context:
    current_num_replicas: int
    target_num_replicas: int
    running_replicas: list[Id]
    aggregated_metrics: dict[str, dict[Any, float]] = field(default_factory=dict)
    total_num_requests: float = 0.0
    policy_state: dict[str, Any] = field(default_factory=dict)


def context(names: str, *, target: int = 0, state: dict | None = None, **figures: float) -> Context:
    replicas = [Id("Prefill", name) for name in names]
    return Context(
        current_num_replicas=len(names),
        target_num_replicas=target or len(names),
        running_replicas=replicas,
        aggregated_metrics={k: dict.fromkeys(replicas, v) for k, v in figures.items()},
        policy_state=state or {},
    )


def policy(**scaling: Any) -> JointPolicy:
    settings = Settings(
        scaling=ScalingSettings(enabled=True, up_s=0.0, down_s=0.0, **scaling),
        server=ServerSettings(drain_s=30.0),
    )
    return JointPolicy(tables={k: as_tables(settings)[k] for k in ("scaling", "server")})


def test_figures_become_targets_and_memory_comes_back_as_state():
    key = Id("Prefill")
    targets, states = policy()({key: context("a", busy=1.0, offered=1.9, backlog_s=0.0)})
    assert targets == {key: 3}
    assert set(states[key]["memory"]) == {
        "above_since",
        "below_since",
        "below_want",
        "short_since",
        "blocked_until",
    }


def test_a_replica_that_stopped_serving_keeps_its_device_until_it_drained():
    key, other = Id("Prefill"), Id("Decode")
    joint = policy(budget=4, encoder_min=0)
    full = {key: context("abc", busy=0.1), other: context("x", held=0.1)}
    joint(full)
    wanting = {key: context("a", busy=0.1), other: context("x", held=0.97)}
    assert joint(wanting)[0][other] == 1  # b and c still drain: four devices are in use


def test_the_router_and_unknown_deployments_are_left_alone():
    assert policy()({Id("Router"): context("a")}) == ({}, {})


def test_no_figures_freeze_a_stage():
    key = Id("Decode")
    assert policy()({key: context("ab")})[0] == {key: 2}


@pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`")
def test_serve_still_offers_what_the_hook_stands_on():
    from ray.serve.config import AutoscalingContext
    from ray.serve.schema import ServeApplicationSchema

    from services.app import document

    wanted = set(asdict(context("a")))
    offered = set(inspect.signature(AutoscalingContext.__init__).parameters)
    assert wanted <= offered
    application = document(Settings())["applications"][0]
    parsed = ServeApplicationSchema.model_validate(application)
    assert parsed.autoscaling_policy == application["autoscaling_policy"]
