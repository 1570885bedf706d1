"""The list of metrics is complete and true: what is counted is declared, and is counted."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from common.observe.metrics import METRICS

ROOT = Path(__file__).parents[2]
VERBS = {"add": "counter", "set": "gauge", "observe": "histogram"}
WRITTEN_BY_HAND = "router/admin.py"  # heartbeats become samples there, by name


def calls() -> dict[str, set[str]]:
    """Kinds of use by name: every call `tally.add("baton_...")` and the like in the product."""
    found: dict[str, set[str]] = {}
    for folder in ("common", "router", "services"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    first = node.args[0] if node.args else None
                    name = first.value if isinstance(first, ast.Constant) else None
                    is_metric = isinstance(name, str) and name.startswith("baton_")
                    if is_metric and node.func.attr in VERBS:
                        found.setdefault(name, set()).add(VERBS[node.func.attr])
    return found


def keys_of_heartbeats() -> set[str]:
    tree = ast.parse((ROOT / WRITTEN_BY_HAND).read_text())
    keys = {
        key.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict)
        for key in node.keys
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    }
    return {key for key in keys if key.startswith("baton_")}


def test_every_declared_metric_is_counted_somewhere():
    assert set(METRICS) - set(calls()) - keys_of_heartbeats() == set()


def test_every_counted_metric_is_declared_with_its_kind():
    used = calls()
    assert set(used) | keys_of_heartbeats() <= set(METRICS)
    assert {name: kinds for name, kinds in used.items() if kinds != {METRICS[name].kind}} == {}


@pytest.mark.parametrize("metric", METRICS.values(), ids=lambda metric: metric.name)
def test_names_and_labels_follow_prometheus_and_stay_few(metric):
    assert metric.why.endswith("?")
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert (metric.unit == "seconds") == metric.name.endswith("_seconds")
    assert len(metric.labels) <= 1 and not set(metric.labels) & {"room", "replica", "request"}
