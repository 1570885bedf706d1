"""Dashboards and alerts: written from their description, and about metrics that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models import dashboard as grafana

from common.observe.metrics import METRICS
from deploy.monitoring.build import FOLDER, RULES, dashboard, rules, text
from deploy.monitoring.panels import PAGES

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "deploy/monitoring"
ALERTS = [
    rule
    for group in yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
SUFFIXES = ("_bucket", "_sum", "_count")


def metrics_in(query: str) -> set[str]:
    found = set()
    for name in re.findall(r"\bbaton_\w+", query):
        stem = next((name.removesuffix(s) for s in SUFFIXES if name.endswith(s)), name)
        is_histogram = stem in METRICS and METRICS[stem].kind == "histogram"
        found.add(stem if is_histogram else name)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.uid)
def test_files_are_what_the_description_writes(page):
    assert (FOLDER / f"{page.uid}.json").read_text() == text(page), "run deploy.monitoring.build"


def test_there_is_no_file_without_a_description():
    assert {path.stem for path in FOLDER.glob("*.json")} == {page.uid for page in PAGES}
    assert RULES.read_text() == rules()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.uid)
def test_panels_ask_for_declared_metrics_and_do_not_overlap(page):
    for panel in page.panels:
        for query in panel.queries.values():
            assert metrics_in(query) and metrics_in(query) <= set(METRICS)
    places = [panel["gridPos"] for panel in dashboard(page)["panels"]]
    assert len({(place["x"], place["y"]) for place in places}) == len(places)
    assert all(place["x"] + place["w"] <= 24 for place in places)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.uid)
def test_dashboards_have_what_grafana_asks_of_them(page):
    told = json.loads(text(page))
    assert told["schemaVersion"] >= 36 and told["uid"] and told["title"]
    assert told["templating"]["list"][0]["type"] == "datasource"
    ids = [panel["id"] for panel in told["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in told["panels"]:
        assert {"type", "title", "gridPos", "targets", "datasource", "fieldConfig"} <= set(panel)
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references)


def lost(ours: Any, theirs: Any, path: str = "") -> list[str]:
    """Places of a document that another one does not have, or has otherwise."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return [
            found
            for key, value in ours.items()
            for found in lost(value, theirs.get(key), f"{path}.{key}")
        ]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [found for at, pair in pairs for found in lost(*pair, f"{path}[{at}]")]
    return [] if ours == theirs else [path]


def as_grafana_reads(told: dict[str, Any]) -> dict[str, Any]:
    register_default_plugins()
    return json.loads(json.dumps(grafana.Dashboard.from_json(told), cls=JSONEncoder))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.uid)
def test_grafanas_own_types_take_every_key_of_a_dashboard(page):
    told = json.loads(text(page))
    assert lost(told, as_grafana_reads(told)) == []
    told["panels"][0]["gridPosition"] = {}
    told["panels"][0]["targets"][0]["expression"] = "1"
    assert lost(told, as_grafana_reads(told)) == [
        ".panels[0].targets[0].expression",
        ".panels[0].gridPosition",
    ]
    link = {"type", "title", "tags", "icon", "tooltip"}  # and these its schema demands
    link |= {"asDropdown", "targetBlank", "includeVars", "keepTime"}
    assert all(set(one) == link for one in told["links"])


def test_every_stage_and_almost_every_metric_is_on_a_page():
    shown = {
        m for page in PAGES for p in page.panels for q in p.queries.values() for m in metrics_in(q)
    }
    unseen = set(METRICS) - shown
    assert unseen == {"baton_completion_tokens_total", "baton_replica_epoch", "baton_running"}


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_alerts_are_about_declared_metrics_and_have_a_section_in_the_runbook(rule):
    assert metrics_in(rule["expr"]) <= set(METRICS)
    file, _, anchor = rule["annotations"]["runbook"].partition("#")
    assert anchor == rule["alert"].lower()
    assert f"## {rule['alert']}\n" in (ROOT / file).read_text()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_alerts_fire_and_keep_still_on_recorded_series():
    command = ["promtool", "test", "rules", "alerts_test.yml"]
    done = subprocess.run(command, cwd=MONITORING, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    tested = yaml.safe_load((MONITORING / "alerts_test.yml").read_text())["tests"]
    fired = {
        case["alertname"]
        for test in tested
        for case in test["alert_rule_test"]
        if case["exp_alerts"]
    }
    assert fired == {rule["alert"] for rule in ALERTS}


def test_kubernetes_gets_every_dashboard():
    listed = yaml.safe_load((ROOT / "k8s/monitoring/kustomization.yaml").read_text())
    files = listed["configMapGenerator"][0]["files"]
    here = ROOT / "k8s/monitoring"
    assert {(here / file).resolve() for file in files} == set(FOLDER.glob("*.json"))
