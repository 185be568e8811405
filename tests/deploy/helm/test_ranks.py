"""Pools whose workers have ranks in further pods: who finds whom, and who may."""

import json
import tomllib

from baton.engine.backends.ranks.hosts.layout import MOST_HOSTS
from tests.deploy.helm.charts import EXTRAS, Manifest, one, render

VALUES = EXTRAS["ranks in further pods"]


def environment(spec: Manifest) -> dict[str, str]:
    return {each["name"]: each.get("value", "") for each in spec["containers"][0]["env"]}


def pod_spec(manifests: list[Manifest], name: str) -> Manifest:
    found: Manifest = one(manifests, "StatefulSet", name)["spec"]["template"]["spec"]
    return found


def test_each_worker_names_the_pods_of_a_set_of_its_own() -> None:
    manifests = render(VALUES)
    leads, service = "demo-baton-prefill", one(manifests, "Service", "demo-baton-prefill-ranks")
    hosts = environment(pod_spec(manifests, leads))["BATON_WORKER__RANK_HOSTS"]
    for worker in range(2):
        ranks = one(manifests, "StatefulSet", f"{leads}-{worker}-ranks")
        name, spec = ranks["metadata"]["name"], ranks["spec"]
        pods = [f"{name}-{at}.{spec['serviceName']}:8103" for at in range(spec["replicas"])]
        assert json.loads(hosts.replace("$(POD_NAME)", f"{leads}-{worker}")) == pods
        labels = spec["template"]["metadata"]["labels"]
        assert spec["serviceName"] == service["metadata"]["name"]
        assert service["spec"]["selector"].items() <= labels.items()
        assert spec["selector"]["matchLabels"].items() <= labels.items()
        other = one(manifests, "StatefulSet", f"{leads}-{1 - worker}-ranks")["spec"]["selector"]["matchLabels"]
        assert not other.items() <= labels.items(), "a set has its own pods alone"
    assert service["spec"]["publishNotReadyAddresses"]
    assert not [m for m in manifests if m["metadata"]["name"].startswith("demo-baton-decode-0-ranks")]
    assert MOST_HOSTS == 16, "the schema has 15 beside a worker's own"


def test_a_worker_and_its_further_pods_have_one_key_and_no_other_pod_has_it() -> None:
    manifests = render(VALUES)
    having = set()
    for manifest in manifests:
        spec = manifest.get("spec", {}).get("template", {}).get("spec", {})
        if "rank-key" in {volume["name"] for volume in spec.get("volumes", [])}:
            (mount,) = [m for m in spec["containers"][0]["volumeMounts"] if m["name"] == "rank-key"]
            assert environment(spec)["BATON_WORKER__RANK_KEY_FILE"] == mount["mountPath"] + "/key"
            having.add(manifest["metadata"]["name"])
    assert having == {"demo-baton-prefill", "demo-baton-prefill-0-ranks", "demo-baton-prefill-1-ranks"}
    assert "BATON_REDIS__PASSWORD" not in environment(pod_spec(manifests, "demo-baton-prefill-0-ranks"))
    assert one(manifests, "Secret", "demo-baton-rank-key")["data"]["key"]
    own = {"workers": VALUES["workers"] | {"rankKey": {"existingSecret": "mine"}}}
    assert [m for m in render(own) if m["metadata"]["name"] == "demo-baton-rank-key"] == []


def test_a_worker_and_its_further_pods_encrypt_by_one_certificate() -> None:
    secrets = {role: f"our-{role}" for role in ("router", "worker", "redis", "monitor")}
    manifests = render(VALUES | {"tls": {"mode": "secret", "existingSecrets": secrets}})
    for name in ("demo-baton-prefill", "demo-baton-prefill-0-ranks"):
        spec = pod_spec(manifests, name)
        held = {volume["name"]: volume.get("secret", {}).get("secretName") for volume in spec["volumes"]}
        assert held["tls"] == "our-worker"
        mounts = {mount["name"]: mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]}
        (config,) = [m["data"]["baton.toml"] for m in manifests if "baton.toml" in m.get("data", {})]
        settings = tomllib.loads(config)["tls"]
        assert {settings[key].rpartition("/")[0] for key in ("cert", "key", "ca")} == {mounts["tls"]}


def test_pods_of_workers_reach_ranks_and_ranks_the_ports_of_kv_and_nobody_else_does() -> None:
    manifests = render(VALUES)
    labels = one(manifests, "StatefulSet", "demo-baton-prefill-0-ranks")["spec"]["template"]["metadata"]["labels"]
    lead = one(manifests, "StatefulSet", "demo-baton-prefill")["spec"]["template"]["metadata"]["labels"]
    decode = one(manifests, "StatefulSet", "demo-baton-decode")["spec"]["template"]["metadata"]["labels"]
    router = one(manifests, "Deployment", "demo-baton-router")["spec"]["template"]["metadata"]["labels"]
    others = [lead, labels, decode, router]
    assert [ports_to(manifests, each, labels) for each in others] == [ANY, ANY, ANY, NONE]
    assert [ports_to(manifests, labels, each) for each in others] == [ANY, ANY, KV, NONE]
    assert [ports_to(manifests, each, lead) for each in others] == [ANY, ANY, KV, {8100}]
    budgets = {
        m["metadata"]["name"]: m["spec"]["selector"] for m in manifests if m["kind"] == "PodDisruptionBudget"
    }
    assert selects(budgets["demo-baton-prefill-ranks"], labels)
    assert not selects(budgets["demo-baton-prefill"], labels)


ANY, NONE, KV = {0}, set[int](), {8100, 8101}  # ports


def ports_to(manifests: list[Manifest], caller: Manifest, called: Manifest) -> set[int]:
    """Returns the ports at which a pod with labels ``caller`` may call one with ``called``: both sides' rules."""
    into = allowed(manifests, called, "ingress", "from", caller)
    out = allowed(manifests, caller, "egress", "to", called)
    if ANY in (into, out):
        return out if into == ANY else into
    return into & out


def allowed(manifests: list[Manifest], labels: Manifest, way: str, peers: str, other: Manifest) -> set[int]:
    """Returns the ports that the policies of a pod with ``labels`` open ``way`` to a pod with labels ``other``."""
    found = set[int]()
    for policy in (m["spec"] for m in manifests if m["kind"] == "NetworkPolicy"):
        if selects(policy["podSelector"], labels):
            for rule in policy.get(way, []):
                said = [each.get("podSelector", {"matchLabels": {"": ""}}) for each in rule.get(peers, [])]
                if any(selects(each, other) for each in said):
                    found |= {each["port"] for each in rule["ports"]} if "ports" in rule else ANY
    return ANY if found >= ANY else found


def selects(selector: Manifest, labels: dict[str, str]) -> bool:
    """Returns whether a label selector of Kubernetes takes a pod with these labels."""
    for expression in selector.get("matchExpressions", []):
        assert expression["operator"] == "In"
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return bool(selector.get("matchLabels", {}).items() <= labels.items())
