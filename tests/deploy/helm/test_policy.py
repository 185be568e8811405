"""Tests what an operator's admission policies ask: every pod restricted, no secret in a ConfigMap, KV ports
closed.
"""

import re

import pytest

from baton.planner.simulator.cluster import SimSettings
from tests.deploy.helm.charts import EXTRAS, PROFILES, SCRAPER, one, pod_specs, profile, render

ALL = {**{name: profile(name) for name in PROFILES}, **EXTRAS}
VOLUMES = {
    "configMap",
    "emptyDir",
    "secret",
    "persistentVolumeClaim",
    "ephemeral",
    "projected",
    "downwardAPI",
    "image",
}


@pytest.mark.parametrize("name", ALL)
def test_every_pod_is_restricted(name: str) -> None:
    """Pod Security "restricted", and more: nothing writable but volumes, no token, no service links."""
    specs = pod_specs(render(ALL[name]))
    assert specs
    for where, spec in specs:
        pod = spec["securityContext"]
        assert pod["runAsNonRoot"], where
        assert pod["runAsUser"] > 0, where
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}, where
        assert not any(spec.get(key) for key in ("hostNetwork", "hostPID", "hostIPC")), where
        assert spec["automountServiceAccountToken"] is False, where
        assert all(set(volume) - {"name"} <= VOLUMES for volume in spec.get("volumes", [])), where
        for container in spec["containers"] + spec.get("initContainers", []):
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False, where
            assert own["readOnlyRootFilesystem"], where
            assert own["capabilities"] == {"drop": ["ALL"]}, where
            assert "privileged" not in own, where
            assert not any("hostPort" in port for port in container.get("ports", [])), where
            assert container["resources"]["limits"]["memory"], where
            assert container["resources"]["requests"], where


@pytest.mark.parametrize("name", ALL)
def test_no_secret_is_in_a_configmap_or_on_a_command_line(name: str) -> None:
    manifests = render(ALL[name])
    secrets = [m for m in manifests if m["kind"] == "Secret"]
    for manifest in manifests:
        if manifest["kind"] == "ConfigMap":
            text = str(manifest["data"])
            assert not re.search(
                r"(password|token|secret)\s*=\s*\S|://[^/@\s]*:[^/@\s]+@|bt-[0-9a-f]{12}-", text, re.I
            )
    for _, spec in pod_specs(manifests):
        for container in spec["containers"]:
            for variable in container.get("env", []):
                if re.search(r"(PASSWORD|TOKEN|SECRET|AUTH)$", variable["name"]):
                    assert "secretKeyRef" in variable["valueFrom"], variable
    assert all(m["type"] == "Opaque" for m in secrets)


def test_kv_ports_are_for_routers_and_workers_alone() -> None:
    for values in ({}, profile("values-h100.yaml"), profile("values-heterogeneous.yaml")):
        manifests = render(values)
        policies = [m for m in manifests if m["kind"] == "NetworkPolicy"]
        worker = _labels_of_workers(manifests)
        reaching = [p for p in policies if _selects(p["spec"]["podSelector"], worker)]
        assert any(not p["spec"].get("ingress") for p in reaching)  # denied unless allowed
        for port in (8100, 8101):
            peers = [
                peer
                for p in reaching
                for rule in p["spec"].get("ingress", [])
                if _opens(rule, port)
                for peer in rule["from"]
            ]
            components = {peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for peer in peers}
            assert components == {"router", "worker"}
            assert all(set(peer) == {"podSelector"} for peer in peers)  # of this namespace


def test_workers_metrics_are_for_whom_monitoring_names_alone() -> None:
    for peers in ([], SCRAPER):
        manifests = render({"networkPolicy": {"monitoring": peers}})
        worker = _labels_of_workers(manifests)
        policies = [m["spec"] for m in manifests if m["kind"] == "NetworkPolicy"]
        rules = [
            rule for spec in policies if _selects(spec["podSelector"], worker) for rule in spec.get("ingress", [])
        ]
        assert [rule["from"] for rule in rules if _opens(rule, 8102)] == ([peers] if peers else [])


CALLS = {  # component -> what it calls, beside name servers
    "router": {"worker": {8100}, "redis": {"redis"}},
    "worker": {"worker": {8100, 8101}, "redis": {"redis"}},
    "redis": {},
}


@pytest.mark.parametrize("component", CALLS)
def test_pods_call_what_they_need_and_nobody_else(component: str) -> None:
    rules = [rule for rule in _egress(render(), component) if not _is_dns(rule)]
    found = {
        peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"]: {p["port"] for p in rule["ports"]}
        for rule in rules
        for peer in rule["to"]
    }
    assert found == CALLS[component]


def test_what_lies_outside_is_called_by_its_port_and_where_it_is_named() -> None:
    manifests = render(ALL["egress of its own"])
    ports = {p["port"]: rule.get("to") for rule in _egress(manifests, "router") for p in rule["ports"]}
    assert ports[53] == SCRAPER
    assert (ports[4318], ports[443]) == (None, None)
    assert ports[3128] == [{"ipBlock": {"cidr": "10.0.0.0/8"}}]
    external = _egress(render(ALL["external redis"]), "worker")
    assert {p["port"] for rule in external for p in rule["ports"]} == {8100, 8101, 53, 6380}
    assert all("egress" not in m["spec"] for m in render(ALL["no egress rules"]) if m["kind"] == "NetworkPolicy")
    ray = [
        m["spec"] for m in render(profile("values-heterogeneous.yaml")) if m["metadata"]["name"] == "demo-baton-ray"
    ]
    called = {p["port"] for rule in ray[0]["egress"] for p in rule["ports"]}
    assert {6379, 6380, 10002, 53, "redis", 443} == called


def _egress(manifests, component: str) -> list:
    labels = {
        "app.kubernetes.io/name": "baton",
        "app.kubernetes.io/instance": "demo",
        "app.kubernetes.io/component": component,
    }
    policies = [m["spec"] for m in manifests if m["kind"] == "NetworkPolicy"]
    reaching = [spec for spec in policies if _selects(spec["podSelector"], labels)]
    assert any("Egress" in spec["policyTypes"] for spec in reaching), "denied unless allowed"
    return [rule for spec in reaching for rule in spec.get("egress", [])]


def _is_dns(rule) -> bool:
    return {p["port"] for p in rule["ports"]} == {53}


def _labels_of_workers(manifests) -> dict[str, str]:
    for manifest in manifests:
        if manifest["kind"] == "RayCluster":
            labels = manifest["spec"]["workerGroupSpecs"][0]["template"]["metadata"]["labels"]
            return labels | {"ray.io/cluster": manifest["metadata"]["name"]}  # KubeRay adds it
    return one(manifests, "StatefulSet", "demo-baton-decode")["spec"]["template"]["metadata"]["labels"]


def _selects(selector, labels: dict[str, str]) -> bool:
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())


def _opens(rule, port: int) -> bool:
    if "ports" not in rule:
        return True
    return any(
        p["port"] == port or (isinstance(p["port"], int) and p["port"] <= port <= p.get("endPort", 0))
        for p in rule["ports"]
    )


@pytest.mark.parametrize("name", [n for n in ALL if n != "values-heterogeneous.yaml"])
def test_selectors_find_their_pods_and_names_their_objects(name: str) -> None:
    manifests = render(ALL[name])
    pods = [m["spec"]["template"]["metadata"]["labels"] for m in manifests if "template" in m.get("spec", {})]
    for manifest in manifests:
        if manifest["kind"] in ("Service", "PodDisruptionBudget", "ServiceMonitor", "PodMonitor"):
            selector = manifest["spec"]["selector"]
            wanted = selector.get("matchLabels", selector)
            assert manifest["kind"] == "ServiceMonitor" or any(wanted.items() <= labels.items() for labels in pods)
    names = {(m["kind"], m["metadata"]["name"]) for m in manifests}
    assert len(names) == len(manifests)
    for _, spec in pod_specs(manifests):
        for volume in spec["volumes"]:
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in names
        mounts = {m["name"] for c in spec["containers"] for m in c["volumeMounts"]}
        assert mounts <= {v["name"] for v in spec["volumes"]} | {"kv"}


def test_a_pod_has_longer_to_leave_than_its_drain_takes() -> None:
    for name in PROFILES:
        for where, spec in pod_specs(render(profile(name))):
            if "redis" in where or where.endswith("head"):
                continue
            config = one(render(profile(name)), "ConfigMap", "demo-baton-config")["data"]["baton.toml"]
            drain = float(
                re.search(
                    r"drain_grace_s = (\d+)" if "router" not in where else r"shutdown_grace_s = (\d+)", config
                )[1]
            )
            stop = spec["containers"][0].get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
            sleep = float(stop[1]) if stop[:1] == ["sleep"] else 8.0
            assert spec["terminationGracePeriodSeconds"] > drain + sleep, where


def test_who_asks_for_metrics_reaches_the_router_also_where_its_clients_are_named() -> None:
    values = {"networkPolicy": {"clients": [{"podSelector": {}}], "monitoring": SCRAPER}}
    policy = one(render(values), "NetworkPolicy", "demo-baton-router")
    reach = [rule for rule in policy["spec"]["ingress"] if rule["from"] == SCRAPER]
    assert [[port["port"] for port in rule["ports"]] for rule in reach] == [["http"]]


def test_the_alert_on_a_missing_router_is_of_the_releases_own_namespace() -> None:
    manifests = render({"metrics": {"prometheusRule": {"enabled": True}}})
    [rules] = [m for m in manifests if m["kind"] == "PrometheusRule"]
    [gone] = [r for g in rules["spec"]["groups"] for r in g["rules"] if r.get("alert") == "BatonRouterGone"]
    assert re.fullmatch(r'absent\(baton_workers\{namespace="[^"]+"\}\)', gone["expr"])


def test_each_role_is_scaled_by_what_it_runs_out_of_first() -> None:
    values = {"workers": {"autoscaling": {"enabled": True}}, "networkPolicy": {"monitoring": SCRAPER}}
    found = {
        manifest["metadata"]["name"].rpartition("-")[2]: {
            each["pods"]["metric"]["name"]: each["pods"]["target"]["averageValue"]
            for each in manifest["spec"]["metrics"]
        }
        for manifest in render(values)
        if manifest["kind"] == "HorizontalPodAutoscaler"
    }
    assert found["decode"].keys() == {"baton_kv_cache_usage_ratio", "baton_batch_fill_ratio"}
    most = SimSettings(prefill=1, decode=1).window_tokens  # uncached tokens that routers give one prefill worker
    assert 1.5 * int(found["prefill"]["baton_sequences_waiting_tokens"]) < most
