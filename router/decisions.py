"""The last decisions of the scaling policy, as this router shows them, and whether all ends.

`read` asks Ray's key-value store, which only a process of a Ray cluster has; the rest is plain.
"""

from __future__ import annotations

import json
from typing import Any

from common.contract.scaling import CLOSING, KEY, NAMESPACE
from common.observe.metrics import Tally


class Decisions:
    """What the policy said last; empty when nothing scales."""

    def __init__(self) -> None:
        """Nothing was said yet."""
        self.stages: dict[str, dict[str, Any]] = {}
        self.changes: list[dict[str, Any]] = []
        self._moves: dict[str, int] = {}

    def take(self, raw: bytes | None, tally: Tally) -> None:
        """Read what the store holds, and count it."""
        if not raw:
            return
        told = json.loads(raw)
        self.stages, self.changes = told["stages"], told["changes"]
        for stage, one in self.stages.items():
            tally.set("baton_scaling_target", float(one["target"]), stage=stage)
            tally.set("baton_scaling_frozen", float(one["frozen"]), stage=stage)
        for stage, moves in told["moves"].items():
            fresh = moves - self._moves.get(stage, 0)
            # A policy that began anew counts from zero.
            tally.add("baton_scaling_changes_total", float(max(0, fresh)), stage=stage)
            self._moves[stage] = moves


def read() -> tuple[bytes | None, bool]:
    """What the policy said last, and whether the service ends; blocks for some milliseconds."""
    from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_initialized

    if not _internal_kv_initialized():  # type: ignore[no-untyped-call]
        return None, False
    closing = _internal_kv_get(CLOSING, namespace=NAMESPACE) is not None
    found: bytes | None = _internal_kv_get(KEY, namespace=NAMESPACE)
    return found, closing
