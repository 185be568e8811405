"""The Grafana dashboard as JSON.

Knows nothing of files, nor of what is worth showing.
"""

from __future__ import annotations

from baton.cluster.metering.metrics import ROUTER as R
from baton.cluster.metering.metrics import WORKER as W
from baton.cluster.metering.metrics import Metric
from baton.dashboards import queries as q
from baton.dashboards.machine_panels import MACHINES
from baton.dashboards.panels import CLIENTS, Panel, PanelQuery

WIDTH, HEIGHT = 24, 8  # columns of Grafana's grid, and rows of a panel
SOURCE = {"type": "prometheus", "uid": "${source}"}
UID, TITLE = "baton", "Baton"


def dashboard() -> dict[str, object]:
    """Returns the dashboard's JSON object; on import, Grafana asks only for a Prometheus data source."""
    return {
        "uid": UID,
        "title": TITLE,
        "tags": ["baton", "llm"],
        "timezone": "browser",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "editable": True,
        "graphTooltip": 1,
        "templating": {"list": [_source(), _variable("model", R["requests"]), _variable("worker", W["steps"])]},
        "panels": _laid_out(),
    }


def _laid_out() -> list[dict[str, object]]:
    panels: list[dict[str, object]] = []
    y = 0
    for title, row in (*CLIENTS, *MACHINES):
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "panels": [],
                       "gridPos": {"h": 1, "w": WIDTH, "x": 0, "y": y}})  # fmt: skip
        x, y = 0, y + 1
        for panel in row:
            if x + panel.width > WIDTH:
                x, y = 0, y + HEIGHT
            at = {"h": HEIGHT, "w": panel.width, "x": x, "y": y}
            panels.append(_panel(panel, len(panels) + 1, at))
            x += panel.width
        y += HEIGHT
    return panels


def _panel(panel: Panel, number: int, at: dict[str, int]) -> dict[str, object]:
    defaults: dict[str, object] = {"unit": panel.unit, "min": 0}
    if panel.most is not None:
        defaults["max"] = panel.most
    if panel.kind == "timeseries":
        stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
        fill = 30 if panel.stacked else 5
        defaults["custom"] = {"drawStyle": "line", "lineWidth": 1, "fillOpacity": fill, "stacking": stacking,
                              "showPoints": "never"}  # fmt: skip
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": SOURCE,
        "gridPos": at,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _options(panel.kind),
        "targets": [_target(line, i, panel.kind) for i, line in enumerate(panel.lines)],
    }


def _options(kind: str) -> dict[str, object]:
    if kind == "timeseries":
        legend = {"displayMode": "list", "placement": "bottom", "showLegend": True}
        return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
    if kind == "stat":
        return {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value"}
    return {"showHeader": True}


def _target(line: PanelQuery, number: int, kind: str) -> dict[str, object]:
    now = kind != "timeseries"
    return {
        "refId": chr(ord("A") + number),
        "datasource": SOURCE,
        "expr": line.query if not now else line.query.replace(q.WINDOW, "5m"),
        "legendFormat": line.legend,
        "exemplar": line.exemplar,
        "instant": now,
        "range": not now,
        **({"format": "table"} if kind == "table" else {}),
    }


def _source() -> dict[str, object]:
    return {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus", "current": {}}


def _variable(label: str, metric: Metric) -> dict[str, object]:
    query = f"label_values({metric.series}, {label})"
    return {
        "name": label,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": label},
        "definition": query,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
        "sort": 1,
    }
