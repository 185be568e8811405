"""Grafana's dashboard and Prometheus' rules: current, complete, and right by Prometheus' own tool."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from baton.cluster.metering import metrics
from baton.dashboards.__main__ import HOME, files
from baton.dashboards.grafana import WIDTH, dashboard
from baton.dashboards.rules import rules

PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="no promtool on the PATH (Debian: prometheus)")
ON_NO_PANEL: set[str] = set()
NAME = re.compile(r"\bbaton_[a-z0-9_]+")


def panels():
    return [p for p in dashboard()["panels"] if p["type"] != "row"]


def queries() -> list[str]:
    shown = [t["expr"] for p in panels() for t in p["targets"]]
    return shown + [rule["expr"] for group in rules()["groups"] for rule in group["rules"]]


def known() -> set[str]:
    found = {m.series for m in metrics.ALL}
    return found | {
        f"{m.series}_{part}" for m in metrics.ALL if m.kind == "histogram" for part in ("bucket", "sum", "count")
    }


def test_the_committed_files_are_current():
    for name, text in files().items():
        assert (HOME / name).read_text() == text, f"{name}: run make dashboards"
    command = [sys.executable, "-m", "baton.dashboards", "--check"]
    assert subprocess.run(command, cwd=HOME, check=False).returncode == 0


def test_a_stale_file_is_told_and_written_anew(tmp_path):
    command = [sys.executable, "-m", "baton.dashboards", "--home", str(tmp_path)]
    stale = subprocess.run([*command, "--check"], cwd=HOME, capture_output=True, text=True, check=False)
    assert stale.returncode == 1
    assert "make dashboards" in stale.stderr
    assert subprocess.run(command, cwd=HOME, check=False).returncode == 0
    assert subprocess.run([*command, "--check"], cwd=HOME, check=False).returncode == 0
    assert json.loads((tmp_path / "deploy/helm/baton/files/dashboards/baton.json").read_text())["uid"] == "baton"


def test_nothing_is_asked_for_that_is_not_defined():
    asked = {name for query in queries() for name in NAME.findall(query)}
    assert asked - known() == set()


def test_every_metric_is_on_a_panel():
    asked = {name for p in panels() for t in p["targets"] for name in NAME.findall(t["expr"])}
    missing = {m.full_name for m in metrics.ALL if not any(name.startswith(m.full_name) for name in asked)}
    assert missing == ON_NO_PANEL


def test_labels_in_legends_and_groupings_exist():
    labels = {label for m in metrics.ALL for label in m.labels} | {"le", "namespace", "job"}  # Prometheus' own
    for query in queries():
        for grouped in re.findall(r"by \(([^)]*)\)", query):
            assert {name.strip() for name in grouped.split(",")} <= labels
    for panel in panels():
        for target in panel["targets"]:
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= labels


def test_panels_fit_their_rows_and_do_not_overlap():
    taken = set()
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= WIDTH
        assert not cells & taken
        taken |= cells
    assert len({p["id"] for p in dashboard()["panels"]}) == len(dashboard()["panels"])


@needs_promtool
def test_prometheus_takes_the_rules(tmp_path):
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump(rules()))
    checked = subprocess.run([PROMTOOL, "check", "rules", path], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


@needs_promtool
def test_prometheus_takes_every_query_of_the_dashboard(tmp_path):
    rows = [{"record": f"q{i}", "expr": q.replace("$__rate_interval", "5m")} for i, q in enumerate(queries())]
    path = tmp_path / "queries.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": rows}]}))
    checked = subprocess.run([PROMTOOL, "check", "rules", path], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


CLASS = 'model="m", context_class="short"'
WORKER = 'role="decode", worker="decode-0", model="m"'


@needs_promtool
@pytest.mark.parametrize(
    ("series", "alert", "labels"),
    [
        (
            {
                f'baton_slo_requests_total{{{CLASS}, slo="all", verdict="met"}}': "0+8x40",
                f'baton_slo_requests_total{{{CLASS}, slo="all", verdict="missed"}}': "0+2x40",
            },
            "BatonSloMissed",
            {"model": "m", "context_class": "short", "severity": "critical"},
        ),
        (
            {f"baton_engine_steps_total{{{WORKER}}}": "7x40", f"baton_sequences_running{{{WORKER}}}": "3x40"},
            "BatonEngineStuck",
            {"role": "decode", "worker": "decode-0", "model": "m", "severity": "critical"},
        ),
        (
            {f"baton_worker_certificate_expiry_timestamp_seconds{{{WORKER}}}": "604000x40"},
            "BatonCertificateEnds",
            {"role": "decode", "worker": "decode-0", "model": "m", "severity": "warning"},
        ),
        (
            {'baton_router_certificate_expiry_timestamp_seconds{kind="api"}': "80000x40"},
            "BatonCertificateEndsNow",
            {"kind": "api", "severity": "critical"},
        ),
        (
            {'baton_adapter_loads_total{outcome="adapter_changed"}': "0+1x40"},
            "BatonAdapterLoadsFail",
            {"outcome": "adapter_changed", "severity": "warning"},
        ),
        (
            {
                'baton_adapter_loads_total{outcome="ok"}': "0+20x40",
                'baton_adapter_requests_total{model="m", adapter="a", outcome="stop"}': "0+60x40",
            },
            "BatonAdaptersThrash",
            {"severity": "warning"},
        ),
        (
            {
                'baton_workers{role="decode", namespace="prod", job="router"}': "0x40",
                'baton_workers{role="decode", namespace="staging", job="router"}': "2x40",
            },
            "BatonNoDecodeWorker",
            {"namespace": "prod", "job": "router", "severity": "critical"},
        ),
        (
            {'baton_router_redis_away{instance="router:8000"}': "1x40"},
            "BatonRedisAway",
            {"instance": "router:8000", "severity": "warning"},
        ),
        (
            {'baton_controller_decisions_total{kind="failed"}': "_x36 1x4"},
            "BatonWorkersDoNotCome",
            {"kind": "failed", "severity": "warning"},
        ),
        (
            {
                f'baton_handoff_refusals_total{{{WORKER}, error="corrupt_frame"}}': "_x36 1x4",
            },
            "BatonCorruptKv",
            {
                "role": "decode",
                "worker": "decode-0",
                "model": "m",
                "error": "corrupt_frame",
                "severity": "critical",
            },
        ),
    ],
)
def test_an_alert_fires_when_its_time_has_come(tmp_path, series, alert, labels):
    fires(tmp_path, series, alert, [labels])


PROD, STAGING = 'namespace="prod", job="j"', 'namespace="staging", job="j"'


@needs_promtool
@pytest.mark.parametrize(
    ("series", "alert", "told"),
    [
        (  # a worker rests here, and another of its name works there
            {
                f"baton_engine_steps_total{{{WORKER}, {PROD}}}": "7x40",
                f"baton_sequences_running{{{WORKER}, {PROD}}}": "0x40",
                f"baton_engine_steps_total{{{WORKER}, {STAGING}}}": "0+9x40",
                f"baton_sequences_running{{{WORKER}, {STAGING}}}": "3x40",
            },
            "BatonEngineStuck",
            [],
        ),
        (
            {
                f"baton_controller_decision_age_seconds{{{PROD}}}": "500x40",
                f"baton_controller_decision_age_seconds{{{STAGING}}}": "2x40",
            },
            "BatonControllerSilent",
            [{"namespace": "prod", "job": "j", "severity": "warning"}],
        ),
        (
            {
                f'baton_workers{{role="decode", {PROD}}}': "3x30 1x10",
                f'baton_workers{{role="decode", {STAGING}}}': "8x40",
            },
            "BatonWorkerLost",
            [{"namespace": "prod", "job": "j", "role": "decode", "severity": "warning"}],
        ),
        (
            {
                f'baton_slo_requests_total{{{CLASS}, slo="all", verdict="met", {PROD}}}': "0+8x40",
                f'baton_slo_requests_total{{{CLASS}, slo="all", verdict="missed", {PROD}}}': "0+2x40",
                f'baton_slo_requests_total{{{CLASS}, slo="all", verdict="met", {STAGING}}}': "0+900x40",
                f'baton_slo_requests_total{{{CLASS}, slo="all", verdict="missed", {STAGING}}}': "0x40",
            },
            "BatonSloMissed",
            [
                {
                    "namespace": "prod",
                    "job": "j",
                    "model": "m",
                    "context_class": "short",
                    "severity": "critical",
                }
            ],
        ),
    ],
)
def test_a_cluster_is_judged_by_itself_where_several_are_on_one_prometheus(tmp_path, series, alert, told):
    fires(tmp_path, series, alert, told)


def fires(folder: Path, series: dict[str, str], alert: str, told: list[dict[str, str]]) -> None:
    """Asserts that ``alert`` fires with each of the labels ``told``, and no others, once its time has come."""
    made = rules()
    for group in made["groups"]:
        for rule in group["rules"]:
            rule.pop("annotations", None)  # words for people; which series raise it is tested
    (folder / "rules.yaml").write_text(yaml.safe_dump(made))
    unit = {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": "30s",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                "alert_rule_test": [
                    {"eval_time": "0s", "alertname": alert, "exp_alerts": []},
                    {"eval_time": "38m", "alertname": alert, "exp_alerts": [{"exp_labels": each} for each in told]},
                ],
            }
        ],
    }
    (folder / "unit.yaml").write_text(yaml.safe_dump(unit))
    command = [PROMTOOL, "test", "rules", "unit.yaml"]
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


@needs_promtool
def test_dollars_are_those_of_a_cluster_by_its_own_tokens(tmp_path):
    query = next(
        rule["expr"]
        for group in rules()["groups"]
        for rule in group["rules"]
        if rule.get("record") == "baton:dollars_per_million_tokens:5m"
    )
    series = {}
    for cluster, dollars, tokens in ((PROD, 36, 60), (STAGING, 3.6, 6000)):
        series[f'baton_workers_price_dollars_per_hour{{role="decode", {cluster}}}'] = f"{dollars}x40"
        series[f"baton_prompt_tokens_total{{{CLASS}, {cluster}}}"] = f"0+{tokens}x40"
        series[f"baton_output_tokens_total{{{CLASS}, {cluster}}}"] = "0x40"
    unit = {
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                "promql_expr_test": [
                    {
                        "expr": query,
                        "eval_time": "30m",
                        "exp_samples": [
                            {"labels": f"{{{PROD}}}", "value": 10000},
                            {"labels": f"{{{STAGING}}}", "value": 10},
                        ],
                    }
                ],
            }
        ]
    }
    (tmp_path / "unit.yaml").write_text(yaml.safe_dump(unit))
    command = [PROMTOOL, "test", "rules", "unit.yaml"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_reference_names_every_metric():
    text = (Path(HOME) / "docs/metrics.md").read_text()
    assert all(f"`{m.series}`" in text for m in metrics.ALL)
