"""The chart as the real Helm engine renders it, and what is asked of a manifest. No cluster, no network."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml
from jsonschema.exceptions import best_match
from jsonschema.validators import validator_for

ROOT = Path(__file__).parents[3]
QUICK_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's, ten times as fast, where PyYAML has it
CHART = ROOT / "deploy" / "helm" / "baton"
CRDS = ROOT / "tests" / "data" / "crds"
PROFILES = ("values.yaml", "values-dev.yaml", "values-h100.yaml", "values-heterogeneous.yaml")
SCRAPER = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
EXTRAS: dict[str, dict[str, Any]] = {
    "gateway": {"gateway": {"enabled": True, "parentRefs": [{"name": "gate"}], "hostnames": ["llm.example.com"]}},
    "ingress": {
        "ingress": {"enabled": True, "host": "llm.example.com", "className": "nginx", "tlsSecret": "llm-tls"}
    },
    "auto": {"ratio": "auto"},
    "autoscaling": {"workers": {"autoscaling": {"enabled": True}}, "networkPolicy": {"monitoring": SCRAPER}},
    "external redis": {
        "redis": {
            "enabled": False,
            "external": {"url": "rediss://redis.example.com:6380/0", "existingSecret": "r", "caSecret": "rc"},
        }
    },
    "own certificates": {
        "tls": {
            "mode": "secret",
            "existingSecrets": {"router": "a", "worker": "b", "redis": "c", "monitor": "d"},
            "publicSecret": "public",
        },
        "metrics": {"serviceMonitor": {"enabled": True}},
        "networkPolicy": {"monitoring": SCRAPER},
    },
    "image volume": {"model": {"source": "imageVolume", "path": "/m", "imageVolume": {"reference": "models/x:1"}}},
    "adapters": {
        "adapters": {
            "source": "pvc",
            "pvc": {"claimName": "adapters", "subPath": "v1"},
            "serve": {
                "sql": {"path": "team-a/sql", "pinned": True},
                "style": {"path": "style/2", "tenant": "acme", "hub": "acme/style"},
            },
            "prune": True,
            "reconcile": "*/10 * * * *",
            "fetch": {"image": "amazon/aws-cli:2.17", "command": ["aws", "s3", "sync", "s3://x", "/var/lib/baton"]},
        },
        "networkPolicy": {"clients": SCRAPER},
    },
    "ranks in further pods": {
        "ratio": {"prefill": 2, "decode": 1},
        "workers": {"pools": {"prefill": {"rankHosts": 2, "settings": {"pp": 3}}}},
    },
    "disk tier": {"workers": {"pools": {"decode": {"diskTier": {"enabled": True, "storageClass": "nvme"}}}}},
    "settings": {
        "config": {
            "router": {
                "policy": "cost",
                "context_classes": [{"name": "short", "max_tokens": 512}, {"name": "rest"}],
            },
            "worker": {"kv_memory_bytes": 8589934592, "itl_target_s": 0.05},
        }
    },
    "colocated": {"workers": {"pools": {"prefill": None}}, "config": {"cluster": {"colocated": True}}},
    "no egress rules": {"networkPolicy": {"egress": {"enabled": False}}},
    "egress of its own": {
        "model": {"source": "hub", "hub": {"id": "Qwen/Qwen3-0.6B"}},
        "telemetry": {"otlpEndpoint": "http://collector.monitoring:4318"},
        "networkPolicy": {
            "egress": {
                "dns": SCRAPER,
                "more": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}], "ports": [{"port": 3128}]}],
            }
        },
    },
    "monitoring": {
        "networkPolicy": {"monitoring": SCRAPER},
        "metrics": {
            "serviceMonitor": {"enabled": True},
            "prometheusRule": {"enabled": True},
            "dashboards": {"enabled": True},
        },
    },
}
Manifest = dict[str, Any]


@cache
def _chart():
    import helm_python

    return helm_python.Chart.load(CHART)


def profile(name: str) -> dict[str, Any]:
    """The values of a file of the chart."""
    return yaml.safe_load((CHART / name).read_text()) if name != "values.yaml" else {}


def render_text(values: dict[str, Any] | None = None) -> dict[str, str]:
    """Template -> what it gives."""
    return dict(_rendered(json.dumps(values or {}, sort_keys=True)))


@cache
def _rendered(values: str) -> dict[str, str]:
    return _chart().render(json.loads(values), name="demo", namespace="llm")


def render(values: dict[str, Any] | None = None) -> list[Manifest]:
    """Returns every manifest of the chart with ``values``."""
    found = []
    for name, text in sorted(render_text(values).items()):
        if not name.endswith(".txt"):
            found += [document for document in yaml.load_all(text, QUICK_LOADER) if document]
    return found


def render_in_cluster(values: dict[str, Any], live: dict[str, int]) -> list[Manifest]:
    """Returns the manifests of an upgrade: ``lookup`` asks an API server that has ``live`` (statefulsets/NAME:
    replicas) in namespace llm.
    """
    import helm_python

    with api_server(live) as address:
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "c", "users": [{"name": "u", "user": {}}],
            "clusters": [{"name": "c", "cluster": {"server": address}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        }  # fmt: skip
        with helm_python.Config(kubeconfig_content=yaml.safe_dump(config), namespace="llm") as helm:
            texts = helm.render(_chart(), values, name="demo", namespace="llm", is_upgrade=True)
    return [m for name, text in texts.items() if not name.endswith(".txt") for m in yaml.safe_load_all(text) if m]


@contextlib.contextmanager
def api_server(live: dict[str, int]) -> Iterator[str]:
    """Yields the address of a server for as much of Kubernetes' API as ``lookup`` asks."""
    kinds = {"apps/v1": {"StatefulSet": "statefulsets", "Deployment": "deployments"}, "v1": {"Secret": "secrets"}}
    answers: dict[str, Any] = {}
    for version, names in kinds.items():
        listed = [{"name": n, "kind": k, "namespaced": True, "verbs": ["get", "list"]} for k, n in names.items()]
        path = f"/apis/{version}" if "/" in version else f"/api/{version}"
        answers[path] = {
            "kind": "APIResourceList",
            "apiVersion": "v1",
            "groupVersion": version,
            "resources": listed,
        }
    for name, replicas in live.items():
        kind = next(k for k, plural in kinds["apps/v1"].items() if name.startswith(plural))
        metadata = {"name": name.partition("/")[2], "namespace": "llm"}
        found = {"apiVersion": "apps/v1", "kind": kind, "metadata": metadata, "spec": {"replicas": replicas}}
        answers[f"/apis/apps/v1/namespaces/llm/{name}"] = found
    gone = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = answers.get(self.path.partition("?")[0])
            text = json.dumps(body or gone).encode()
            self.send_response(200 if body else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: Any) -> None:
            """Drops what the server would log of each request."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def one(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    """The manifest of that kind and name."""
    return next(m for m in manifests if m["kind"] == kind and m["metadata"]["name"] == name)


def pod_specs(manifests: list[Manifest]) -> list[tuple[str, Manifest]]:
    """(where, pod spec) of everything that makes pods."""
    found = []
    for manifest in manifests:
        name = f"{manifest['kind']}/{manifest['metadata']['name']}"
        spec = manifest.get("spec", {})
        if manifest["kind"] == "RayCluster":
            groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
            found += [(f"{name}/{g.get('groupName', 'head')}", g["template"]["spec"]) for g in groups]
        elif "template" in spec:
            found.append((name, spec["template"]["spec"]))
    return found


def check(manifest: Manifest, version: str) -> None:
    """Raise when ``manifest`` is not what Kubernetes ``version``, or the CRD's excerpt, allows."""
    file = CRDS / f"{manifest['kind'].lower()}.json"
    if file.exists():
        check_custom(manifest, json.loads(file.read_text()))
        for template in ray_templates(manifest):
            check_native({"apiVersion": "v1", "kind": "PodTemplate", "metadata": {}, "template": template}, version)
    else:
        check_native(manifest, version)


def check_native(manifest: Manifest, version: str) -> None:
    """Validates by the schemas of Kubernetes itself; unknown fields are refused."""
    _check_text(json.dumps(manifest, sort_keys=True), version)


@cache
def _check_text(manifest: str, version: str) -> None:
    """Most manifests are the same whatever option is set; an invalid one raises each time."""
    _validate_native()(json.loads(manifest), version, strict=True)


@cache
def _validate_native() -> Callable[..., str]:
    """Returns the library's validation, which reads each file of schemas once here, not once a manifest."""
    import kubernetes_validate
    from kubernetes_validate import utils

    utils.schema_contents = cache(utils.schema_contents)
    return kubernetes_validate.validate


def check_custom(manifest: Manifest, crd: dict[str, Any]) -> None:
    """Validates by a CRD's own schema; unknown fields are refused, as the API server drops them."""
    assert manifest["apiVersion"] == crd["apiVersion"]
    error = best_match(_custom_validator(json.dumps(crd["schema"])).iter_errors(manifest))
    if error is not None:
        raise error


@cache
def _custom_validator(schema: str) -> Any:
    """Returns the validator of a CRD's schema, which is checked once."""
    whole = closed(json.loads(schema))
    kind = validator_for(whole)
    kind.check_schema(whole)
    return kind(whole)


def ray_templates(manifest: Manifest) -> list[Manifest]:
    """Pod templates inside a RayCluster: its CRD's excerpt leaves them out."""
    if manifest["kind"] != "RayCluster":
        return []
    return [g["template"] for g in (manifest["spec"]["headGroupSpec"], *manifest["spec"]["workerGroupSpecs"])]


def closed(schema: Any) -> Any:
    """The schema with every object that names its properties closed to others."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: closed(value) for key, value in schema.items()}
    if isinstance(schema.get("pattern"), str):
        found["pattern"] = schema["pattern"].replace("^(?i)", "(?i)^")  # Go's place for flags
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        found["additionalProperties"] = False
    return found
