"""Every profile through the real Helm engine: lint, Kubernetes' own schemas, the CRDs' fields, the golden file."""

import copy
import json
import os
import re
import subprocess
import time
from pathlib import Path

import jsonschema
import pytest
import yaml

from baton.cluster.config import load_config
from baton.process.liveness import alive_file
from baton.worker.slots import WorkerSlot
from tests.deploy.helm.charts import (
    CHART,
    EXTRAS,
    PROFILES,
    SCRAPER,
    check,
    check_native,
    one,
    pod_specs,
    profile,
    render,
    render_in_cluster,
    render_text,
)

GOLDEN = CHART.parents[2] / "tests" / "data" / "helm_default.yaml"
VERSIONS = [f"1.{minor}.0" for minor in range(27, 38)]


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_lints_and_every_manifest_of_it_is_valid(name: str) -> None:
    import helm_python

    report = helm_python.lint(str(CHART), profile(name), strict=True)
    assert [m for m in report["messages"] if m["severity"] > 1] == report["errors"] == []
    for manifest in render(profile(name)):
        check(manifest, "1.34.0")


@pytest.mark.parametrize("name", EXTRAS)
def test_an_option_gives_valid_manifests(name: str) -> None:
    for manifest in render(EXTRAS[name]):
        check(manifest, "1.34.0")


@pytest.mark.soak
@pytest.mark.parametrize("version", VERSIONS)
def test_all_is_valid_in_every_kubernetes_version(version: str) -> None:
    values = [profile(name) for name in PROFILES] + [v for k, v in EXTRAS.items() if k != "image volume"]
    for manifest in (m for v in values for m in render(v)):
        check(manifest, version)


def test_the_checks_refuse_what_is_wrong() -> None:
    manifests = render(profile("values-heterogeneous.yaml"))
    ray, router = one(manifests, "RayCluster", "demo-baton"), one(manifests, "Deployment", "demo-baton-router")
    for break_it in (
        lambda m: m["spec"].update(workerGroupsSpecs=[]),
        lambda m: m["spec"]["workerGroupSpecs"][0].pop("groupName"),
        lambda m: m["spec"]["authOptions"].update(mode="password"),
        lambda m: m["spec"]["headGroupSpec"]["template"]["spec"].update(container=[]),
    ):
        broken = copy.deepcopy(ray)
        break_it(broken)
        with pytest.raises(jsonschema.ValidationError):
            check(broken, "1.34.0")
    router["spec"]["template"]["spec"]["containers"][0]["image_pull"] = "x"
    with pytest.raises(jsonschema.ValidationError):
        check_native(router, "1.34.0")


def test_the_default_render_is_the_golden_file() -> None:
    """BATON_GOLDEN=1 writes it anew."""
    text = "\n".join(f"# {name}\n{body.strip()}" for name, body in sorted(render_text().items()) if body.strip())
    text = re.sub(r"^(  (?:password|api-key|admin-key|keys\.json): )\S+$", r"\1MADE-BY-THE-CHART", text, flags=re.M)
    text = re.sub(r"[ \t]+$", "", text, flags=re.M) + "\n"
    if os.environ.get("BATON_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def test_a_generated_api_key_opens_the_router(tmp_path) -> None:
    import base64
    import time

    from baton.router.access.keys import KeyRing

    data = one(render(), "Secret", "demo-baton-keys")["data"]
    (tmp_path / "keys.json").write_bytes(base64.b64decode(data["keys.json"]))
    key = base64.b64decode(data["api-key"]).decode()
    ring = KeyRing(tmp_path / "keys.json", time.monotonic)
    assert (ring.find(key).tenant, ring.find(key).admin) == ("default", False)
    assert ring.find(base64.b64decode(data["admin-key"]).decode()).admin


def test_another_list_of_adapters_is_another_job_and_restarts_no_pod() -> None:
    def adapters(**serve) -> dict:
        return {"source": "pvc", "pvc": {"claimName": "a"}, "serve": serve}

    one_more = [
        render({"adapters": adapters(sql={"path": "sql"}, **more)}) for more in ({}, {"law": {"path": "law"}})
    ]
    jobs = [[m["metadata"]["name"] for m in found if m["kind"] == "Job"] for found in one_more]
    assert len({name for names in jobs for name in names}) == 2
    kinds = ("Deployment", "StatefulSet")
    assert [m for m in one_more[0] if m["kind"] in kinds] == [m for m in one_more[1] if m["kind"] in kinds]


def test_whatever_changes_a_jobs_pod_changes_its_name_because_jobs_cant_be_changed() -> None:
    adapters = {"source": "pvc", "pvc": {"claimName": "a"}, "serve": {"sql": {"path": "sql"}}}
    changes: tuple[dict, ...] = ({}, {"image": {"router": {"tag": "9.9.9"}}}, {"service": {"httpPort": 8999}})
    names = {
        m["metadata"]["name"] for c in changes for m in render({"adapters": adapters, **c}) if m["kind"] == "Job"
    }
    assert len(names) == len(changes)


def test_an_emptied_list_of_adapters_is_pruned_too() -> None:
    adapters = {"source": "pvc", "pvc": {"claimName": "a"}, "prune": True}
    (job,) = [m for m in render({"adapters": adapters}) if m["kind"] == "Job"]
    assert "--prune" in job["spec"]["template"]["spec"]["containers"][0]["args"]
    manifests = render({"adapters": adapters})
    assert one(manifests, "ConfigMap", "demo-baton-adapters")["data"]["adapters.json"] == "{}"
    assert [m for m in render({"adapters": {**adapters, "prune": False}}) if m["kind"] == "Job"] == []


def test_the_adapters_of_the_chart_are_what_the_command_takes(tmp_path) -> None:
    from baton.console.cluster.adapters import read_wanted

    manifests = render(EXTRAS["adapters"])
    file = tmp_path / "adapters.json"
    file.write_text(one(manifests, "ConfigMap", "demo-baton-adapters")["data"]["adapters.json"])
    assert {name: want.path for name, want in read_wanted(file).items()} == {
        "sql": "team-a/sql",
        "style": "style/2",
    }
    toml = one(manifests, "ConfigMap", "demo-baton-config")["data"]["baton.toml"]
    (tmp_path / "baton.toml").write_text(toml)
    root = load_config(str(tmp_path / "baton.toml")).adapters.root
    worker = one(manifests, "StatefulSet", "demo-baton-decode")["spec"]["template"]["spec"]["containers"][0]
    assert {"name": "adapters", "mountPath": root, "readOnly": True, "subPath": "v1"} in worker["volumeMounts"]


@pytest.mark.parametrize(("ratio", "prefill", "decode"), [({"prefill": 3, "decode": 5}, 3, 5), ("auto", 1, 1)])
def test_a_ratio_decides_how_many_workers_there_are(ratio, prefill, decode) -> None:
    manifests = render({"ratio": ratio})
    for role, count in (("prefill", prefill), ("decode", decode)):
        assert one(manifests, "StatefulSet", f"demo-baton-{role}")["spec"].get("replicas") == count
    toml = one(manifests, "ConfigMap", "demo-baton-config")["data"]["baton.toml"]
    assert ('[controller]\nmode = "auto"' in toml) == (ratio == "auto")


def test_autoscaled_pools_leave_their_count_to_the_autoscaler() -> None:
    manifests = render(EXTRAS["autoscaling"])
    scalers = {m["metadata"]["name"]: m for m in manifests if m["kind"] == "HorizontalPodAutoscaler"}
    assert set(scalers) == {"demo-baton-prefill", "demo-baton-decode"}
    metric = scalers["demo-baton-decode"]["spec"]["metrics"][0]["pods"]["metric"]["name"]
    assert metric == "baton_kv_cache_usage_ratio"
    assert all("replicas" not in one(manifests, "StatefulSet", name)["spec"] for name in scalers)


def test_an_upgrade_keeps_as_many_pods_as_the_autoscaler_made() -> None:
    """Left out, Helm's merge would put 1 where the release before named a number."""
    values = {
        "workers": {"autoscaling": {"enabled": True}},
        "router": {"autoscaling": {"enabled": True}},
        "networkPolicy": {"monitoring": SCRAPER},
    }
    names = {"StatefulSet": "demo-baton-decode", "Deployment": "demo-baton-router"}
    first = render_in_cluster(values, {})
    assert all("replicas" not in one(first, kind, name)["spec"] for kind, name in names.items())
    live = {"statefulsets/demo-baton-decode": 6, "deployments/demo-baton-router": 4}
    again = render_in_cluster(values, live)
    assert [one(again, kind, name)["spec"].get("replicas") for kind, name in names.items()] == [6, 4]
    assert "replicas" not in one(again, "StatefulSet", "demo-baton-prefill")["spec"]
    fixed = render_in_cluster({"ratio": {"prefill": 2, "decode": 3}}, live)
    assert one(fixed, "StatefulSet", "demo-baton-decode")["spec"]["replicas"] == 3


def test_under_mtls_no_port_is_said_to_be_plain_and_probes_ask_what_the_health_service_says() -> None:
    for tls in (False, True):
        manifests = render(EXTRAS["own certificates"] if tls else {})
        ports = {p["name"]: p for p in one(manifests, "Service", "demo-baton-decode")["spec"]["ports"]}
        assert ports["grpc"].get("appProtocol") == (None if tls else "kubernetes.io/h2c")
        assert ports["metrics"]["appProtocol"] == ("https" if tls else "http")
        spec = one(manifests, "StatefulSet", "demo-baton-decode")["spec"]["template"]["spec"]
        for probe in ("livenessProbe", "readinessProbe"):
            asked = spec["containers"][0][probe]
            assert ("exec" if tls else "grpc") in asked
            assert "tcpSocket" not in asked


def test_a_worker_under_mtls_is_alive_while_its_host_lives_and_says_so(tmp_path: Path) -> None:
    """The probe's own command, on a slot's files."""
    spec = one(render(EXTRAS["own certificates"]), "StatefulSet", "demo-baton-decode")["spec"]["template"]["spec"]
    command = [
        c.replace("/run/baton/slots", str(tmp_path))
        for c in spec["containers"][0]["livenessProbe"]["exec"]["command"]
    ]

    def alive(age_s: float = -60.0) -> bool:
        """Of a file that is from a minute ahead unless told, because the probe may take its time."""
        if file.exists():
            os.utime(file, (0, time.time() - age_s))
        found = subprocess.run(
            command, env={"POD_NAME": "decode-0", "PATH": os.defpath}, capture_output=True, check=False
        )
        return found.returncode == 0

    slot, file = WorkerSlot(tmp_path, "decode-0"), alive_file(str(tmp_path), "decode-0")
    assert not alive()
    file.touch()
    assert not alive(), "nobody holds the slot"
    assert slot.acquire()
    assert alive()
    assert not alive(age_s=30)


def test_every_pod_can_be_put_on_nodes_that_are_tainted() -> None:
    toleration = {"key": "dedicated", "operator": "Exists"}
    own = {"tolerations": [toleration], "nodeSelector": {"pool": "llm"}, "priorityClassName": "high"}
    for mode in ("pods", "raycluster"):
        workers = {"mode": mode, "defaults": own, "ray": own}
        adapters = {"source": "pvc", "pvc": {"claimName": "a"}, "serve": {"sql": {"path": "sql"}}}
        found = render({"workers": workers, "router": own, "redis": own, "adapters": adapters})
        pods = [spec for manifest in found for spec in _pod_specs(manifest)]
        assert len(pods) == (5 if mode == "pods" else 6)
        for spec in pods:
            assert spec["tolerations"] == [toleration], spec
            assert (spec["nodeSelector"], spec["priorityClassName"]) == ({"pool": "llm"}, "high"), spec


def test_every_pod_can_be_marked_beside_the_charts_own_labels() -> None:
    own = {
        "podAnnotations": {"linkerd.io/inject": "disabled"},
        "podLabels": {"team": "llm", "app.kubernetes.io/x": "y"},
    }
    for mode in ("pods", "raycluster"):
        workers = {"mode": mode, "defaults": own, "ray": own}
        adapters = {"source": "pvc", "pvc": {"claimName": "a"}, "serve": {"sql": {"path": "sql"}}}
        given = {"workers": workers, "router": own, "redis": own, "adapters": adapters | {"reconcile": "0 * * * *"}}
        found = [
            pod for manifest in render(given | {"adapters": given["adapters"] | own}) for pod in _pods(manifest)
        ]
        bare = [pod for manifest in render(given) for pod in _pods(manifest)]
        assert len(found) == len(bare) == (6 if mode == "pods" else 7)
        for pod in found:
            marks = pod["metadata"]
            assert own["podAnnotations"].items() <= marks["annotations"].items(), pod
            assert own["podLabels"].items() <= marks["labels"].items(), pod
            assert marks["labels"]["app.kubernetes.io/name"] == "baton", pod


def _pods(part) -> list:
    """Every template of a pod within a manifest."""
    if isinstance(part, list):
        return [pod for one in part for pod in _pods(one)]
    if not isinstance(part, dict):
        return []
    if "containers" in part.get("spec", {}):
        return [part]
    return [pod for one in part.values() for pod in _pods(one)]


def _pod_specs(part) -> list:
    """Every spec of a pod within a manifest."""
    return [pod["spec"] for pod in _pods(part)]


@pytest.mark.parametrize(("most", "stay"), [(1, 4), (2, 3), (9, 0), ("25%", 3), ("100%", 0)])
def test_an_eviction_leaves_a_rayclusters_pools_as_many_pods_as_it_may(most: int | str, stay: int) -> None:
    values = {"workers": {"mode": "raycluster", "podDisruptionBudget": {"maxUnavailable": most}}}
    manifests = render(values | {"ratio": {"prefill": 1, "decode": 5}})
    budget = one(manifests, "PodDisruptionBudget", "demo-baton-decode")["spec"]
    ray = one(manifests, "RayCluster", "demo-baton")["spec"]
    labels = {g["groupName"]: g["template"]["metadata"]["labels"] for g in ray["workerGroupSpecs"]}
    chosen = budget["selector"]["matchLabels"].items()
    assert [name for name, own in labels.items() if chosen <= own.items()] == ["decode"]
    assert budget["minAvailable"] == stay
    values["workers"]["podDisruptionBudget"] = {"enabled": False}
    assert [m["metadata"]["name"] for m in render(values) if m["kind"] == "PodDisruptionBudget"] == [
        "demo-baton-router"
    ]


@pytest.mark.parametrize("mode", ["pods", "raycluster"])
def test_a_disk_tier_is_used_and_leaves_its_claim_room_for_the_filesystem(mode: str) -> None:
    def size(**pool: object) -> int:
        decode = {"diskTier": {"enabled": True, "size": "1.5Ti"}} | pool
        manifests = render({"workers": {"mode": mode, "pools": {"decode": decode}}})
        (spec,) = [spec for name, spec in pod_specs(manifests) if name.endswith("decode")]
        (said,) = [e["value"] for e in spec["containers"][0]["env"] if e["name"] == "BATON_WORKER__DISK_TIER_BYTES"]
        return int(said)

    assert size() == int(0.9 * 1.5 * (1 << 40))
    assert size(diskTier={"enabled": True, "size": "500G"}) == 450 * 10**9
    assert size(settings={"disk_tier_bytes": 1 << 30}) == 1 << 30


def test_a_raycluster_has_a_group_per_pool_that_offers_its_role() -> None:
    ray = one(render(profile("values-heterogeneous.yaml")), "RayCluster", "demo-baton")
    groups = {g["groupName"]: g for g in ray["spec"]["workerGroupSpecs"]}
    assert {name: g["replicas"] for name, g in groups.items()} == {"prefill": 3, "prefill-long": 1, "decode": 4}
    # KubeRay hands the value to a shell: JSON, quoted once more
    resources = {name: json.loads(json.loads(g["rayStartParams"]["resources"])) for name, g in groups.items()}
    assert resources == {
        "prefill": {"baton_prefill": 1},
        "prefill-long": {"baton_prefill": 1},
        "decode": {"baton_decode": 1},
    }


def test_a_raycluster_gives_workers_the_priority_of_any_other_process() -> None:
    spec = one(render(profile("values-heterogeneous.yaml")), "RayCluster", "demo-baton")["spec"]
    nodes = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    environments = [node["template"]["spec"]["containers"][0]["env"] for node in nodes]
    assert all({"name": "RAY_worker_niceness", "value": "0"} in environment for environment in environments)


def test_the_placer_reads_its_numbers_from_a_configmap_of_its_own_and_reaches_redis(tmp_path) -> None:
    """A running placer takes up another ratio without a restart of any pod."""
    from baton.cluster.config import load_config

    heterogeneous = profile("values-heterogeneous.yaml")
    for values in (
        heterogeneous,
        {**heterogeneous, **EXTRAS["external redis"]},
        {**heterogeneous, "tls": {"mode": "certManager", "issuerRef": {"name": "ca"}}},
    ):
        manifests = render(values)
        spec = one(manifests, "RayCluster", "demo-baton")["spec"]["headGroupSpec"]["template"]["spec"]
        placer = spec["containers"][1]
        (tmp_path / "baton.toml").write_text(one(manifests, "ConfigMap", "demo-baton-placer")["data"]["baton.toml"])
        config = load_config(str(tmp_path / "baton.toml"))
        assert (config.cluster.prefill, config.cluster.decode) == (4, 4)
        assert "configMap" in next(v for v in spec["volumes"] if v["name"] == "config")
        mounted = tuple(m["mountPath"] for m in placer["volumeMounts"])
        files = (config.redis.ca, config.redis.cert, config.redis.key)
        assert all(file.startswith(mounted) for file in files if file)
        assert any(e["name"] == "BATON_REDIS__PASSWORD" for e in placer["env"])
        for policy in (m for m in manifests if m["metadata"]["name"] == "demo-baton-redis"):
            if policy["kind"] == "NetworkPolicy":
                peers = [peer["podSelector"]["matchLabels"] for peer in policy["spec"]["ingress"][0]["from"]]
                assert "ray-head" in {peer["app.kubernetes.io/component"] for peer in peers}


@pytest.mark.parametrize("mode", ["pods", "raycluster"])
def test_another_ratio_changes_counts_and_nothing_that_restarts_a_pod(mode: str) -> None:
    before, after = (
        {(m["kind"], m["metadata"]["name"]): m for m in render({"workers": {"mode": mode}, "ratio": ratio})}
        for ratio in ({"prefill": 1, "decode": 1}, {"prefill": 2, "decode": 3})
    )
    changed = {key for key in before if before[key] != after[key] and key[0] != "Secret"}
    budgets = {("PodDisruptionBudget", f"demo-baton-{role}") for role in ("prefill", "decode")}
    assert changed == (
        {("RayCluster", "demo-baton"), ("ConfigMap", "demo-baton-placer"), *budgets}
        if mode == "raycluster"
        else {("StatefulSet", "demo-baton-prefill"), ("StatefulSet", "demo-baton-decode")}
    )
    for was, now in ((before[key], after[key]) for key in changed):
        assert _templates(was) == _templates(now)


def _templates(manifest) -> list:
    spec = manifest.get("spec", {})
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]] if "headGroupSpec" in spec else [spec]
    return [group.get("template") for group in groups]


def test_the_rendered_config_is_one_the_product_takes(tmp_path, monkeypatch) -> None:
    from baton.cluster.config import load_config

    monkeypatch.setenv("BATON_REDIS__PASSWORD", "p@ss/word")
    for name, values in {**{n: profile(n) for n in PROFILES}, **EXTRAS}.items():
        text = one(render(values), "ConfigMap", "demo-baton-config")["data"]["baton.toml"]
        (tmp_path / "baton.toml").write_text(text)
        config = load_config(str(tmp_path / "baton.toml"))
        assert config.worker.port == 8100, name
        assert "p%40ss%2Fword@" in config.redis.url
    assert [c.name for c in load_config(str(_written(tmp_path, EXTRAS["settings"]))).router.context_classes] == [
        "short",
        "rest",
    ]


def _written(folder, values):
    file = folder / "settings.toml"
    file.write_text(one(render(values), "ConfigMap", "demo-baton-config")["data"]["baton.toml"])
    return file


def test_dashboards_and_alerts_are_taken_from_the_charts_files() -> None:
    manifests = render(EXTRAS["monitoring"])
    boards = sorted((CHART / "files" / "dashboards").glob("*.json"))
    maps = [m for m in manifests if m["kind"] == "ConfigMap" and "grafana_dashboard" in m["metadata"]["labels"]]
    assert [json.loads(next(iter(m["data"].values()))) for m in maps] == [json.loads(b.read_text()) for b in boards]
    alerts = [f for f in (CHART / "files" / "alerts").glob("*") if f.suffix in (".yaml", ".yml", ".json")]
    groups = [g for f in sorted(alerts) for g in yaml.safe_load(f.read_text()).get("groups", [])]
    rules = [m for m in manifests if m["kind"] == "PrometheusRule"]
    assert [g["name"] for m in rules for g in m["spec"]["groups"]] == [g["name"] for g in groups]


def test_the_schema_is_what_its_script_writes() -> None:
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, str(CHART.parent / "schema.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
