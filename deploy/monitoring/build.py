"""Write dashboards and Kubernetes' copy of the alerts: `python -m deploy.monitoring.build`.

A test compares the files with what this would write.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from deploy.monitoring.panels import PAGES, Page, Panel

HERE = Path(__file__).parent
FOLDER = HERE / "grafana" / "dashboards"
RULES = HERE.parents[1] / "k8s" / "monitoring" / "prometheus-rule.yaml"
WIDTH, HEIGHT, COLUMNS = 8, 8, 3  # of a panel, in Grafana's grid of 24
LINK = {
    "type": "dashboards",
    "tags": ["baton"],
    "title": "Baton",
    "icon": "external link",
    "tooltip": "",
    "asDropdown": True,
    "targetBlank": False,
    "includeVars": True,
    "keepTime": True,
}
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def panel(index: int, one: Panel) -> dict[str, Any]:
    """One panel as Grafana has it."""
    return {
        "id": index + 1,
        "type": "timeseries",
        "title": one.title,
        "description": one.why,
        "datasource": SOURCE,
        "gridPos": {
            "x": WIDTH * (index % COLUMNS),
            "y": HEIGHT * (index // COLUMNS),
            "w": WIDTH,
            "h": HEIGHT,
        },
        "fieldConfig": {
            "defaults": {"unit": one.unit, "min": 0, "custom": {"fillOpacity": 10}},
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(65 + at), "expr": expr, "legendFormat": legend, "datasource": SOURCE}
            for at, (legend, expr) in enumerate(one.queries.items())
        ],
    }


def dashboard(page: Page) -> dict[str, Any]:
    """One dashboard as Grafana has it."""
    return {
        "uid": page.uid,
        "title": page.title,
        "tags": ["baton"],
        "schemaVersion": 39,
        "version": 1,
        "editable": False,
        "timezone": "browser",
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "links": [LINK],
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "type": "datasource",
                    "query": "prometheus",
                    "label": "Source",
                    "hide": 0,
                }
            ]
        },
        "panels": [panel(index, one) for index, one in enumerate(page.panels)],
    }


def text(page: Page) -> str:
    """The file's content."""
    return json.dumps(dashboard(page), indent=1) + "\n"


def rules() -> str:
    """The alerts as the Prometheus operator takes them."""
    document = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "baton", "labels": {"app.kubernetes.io/part-of": "baton"}},
        "spec": yaml.safe_load((HERE / "alerts.yml").read_text()),
    }
    return "# Written by deploy/monitoring/build.py from alerts.yml.\n" + yaml.safe_dump(
        document, sort_keys=False
    )


def main() -> None:
    """Write them all."""
    RULES.write_text(rules())
    for page in PAGES:
        (FOLDER / f"{page.uid}.json").write_text(text(page))


if __name__ == "__main__":
    main()
