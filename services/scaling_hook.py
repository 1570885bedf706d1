"""Serve's side of scaling: contexts in, `services.scaling.decide`, targets out.

The one place that touches Serve's application-level policies, which are alpha: the Ray version is
pinned, and a test fails when the interface changes. Serve pickles this module by value and calls
the policy in its controller about ten times a second, so it neither waits nor writes, except that a
decision that changed is put where routers find it (`router/decisions.py`).
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.config.loading import load_settings, parse_settings
from common.contract.scaling import KEPT, KEY, NAMESPACE
from services.scaling import STAGES, Decision, Memory, Report, Seen, decide

_FIGURES = [field.name for field in dataclasses.fields(Report)]


class JointPolicy:
    """All stages under one budget; built once by Serve from the config file's `policy_kwargs`."""

    def __init__(self, settings: str = "", tables: Mapping[str, Any] | None = None) -> None:
        """`settings` names the deployment file; `tables` are its tables instead."""
        loaded = (
            parse_settings(tables, source="the policy's tables")
            if tables is not None
            else load_settings(Path(settings))
        )
        self._config, self._drain_s = loaded.scaling, loaded.server.drain_s
        self._running: dict[str, set[str]] = {}
        self._leaving: dict[str, dict[str, float]] = {}
        self._told: dict[str, Any] = {}
        self._changes: list[dict[str, Any]] = []
        self._moves = dict.fromkeys(STAGES, 0)

    def __call__(self, contexts: Mapping[Any, Any]) -> tuple[dict[Any, int], dict[Any, Any]]:
        """Targets by deployment, and what to remember, which comes back as `policy_state`."""
        ids = {key.name.lower(): key for key in contexts if key.name.lower() in STAGES}
        by_stage = {stage: contexts[key] for stage, key in ids.items()}
        now = time.time()
        left = {stage: self._left(stage, context, now) for stage, context in by_stage.items()}
        seen = {stage: seen_of(one, len(left[stage])) for stage, one in by_stage.items()}
        memory = {
            stage: Memory(**(context.policy_state or {}).get("memory", {}))
            for stage, context in by_stage.items()
        }
        decisions, kept = decide(seen, memory, self._config, now)
        self._tell(seen, decisions)
        targets = {ids[stage]: decision.target for stage, decision in decisions.items()}
        states = {ids[s]: {"memory": dataclasses.asdict(kept[s])} for s in kept}
        return targets, states

    def _left(self, stage: str, context: Any, now: float) -> dict[str, float]:
        """Replicas that stopped serving, and when: Serve does not say when they are gone."""
        running = {replica.unique_id for replica in context.running_replicas}
        left = self._leaving.setdefault(stage, {})
        left |= dict.fromkeys(self._running.get(stage, set()) - running, now)
        self._running[stage] = running
        for replica in [r for r, at in left.items() if now - at > self._drain_s or r in running]:
            del left[replica]
        return left

    def _tell(self, seen: Mapping[str, Seen], decisions: Mapping[str, Decision]) -> None:
        now = {s: {"target": d.target, "frozen": d.is_frozen} for s, d in decisions.items()}
        for stage, decision in decisions.items():
            if decision.target != seen[stage].target:
                self._moves[stage] += 1
                self._changes.append(
                    {
                        "at": time.time(),
                        "stage": stage,
                        "before": seen[stage].target,
                        "after": decision.target,
                        "reason": decision.reason,
                    }
                )
        if now != self._told:
            self._told = now
            del self._changes[:-KEPT]
            _publish({"stages": now, "moves": self._moves, "changes": self._changes})


def seen_of(context: Any, leaving: int) -> Seen:
    """One deployment's context as the policy sees it."""
    figures = context.aggregated_metrics or {}
    replicas = {replica for values in figures.values() for replica in values}
    reports = tuple(
        Report(**{name: float(figures.get(name, {}).get(replica, 0.0)) for name in _FIGURES})
        for replica in replicas
    )
    return Seen(
        running=context.current_num_replicas,
        target=context.target_num_replicas,
        reports=reports,
        leaving=leaving,
        is_called=context.total_num_requests > 0,
    )


def _publish(told: dict[str, Any]) -> None:
    from ray.experimental.internal_kv import _internal_kv_initialized, _internal_kv_put

    if _internal_kv_initialized():  # type: ignore[no-untyped-call]
        _internal_kv_put(KEY, json.dumps(told).encode(), overwrite=True, namespace=NAMESPACE)
