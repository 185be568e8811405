"""Runs here what KubeRay would run of the rendered RayCluster: each pod is a network namespace with an address and
mounts of its own, and the command and variables that KubeRay adds are added as its source has it (pod.go of 1.5).

Needs root and `ip netns`. What is not shown: KubeRay itself, images, a kubelet.
"""

import contextlib
import itertools
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from baton.launch.redis_server import find_server
from tests.deploy.helm.charts import Manifest, one
from tests.deploy.helm.pods import BRIDGE, HOST, IP, NET, PASSWORD, REDIS, TOKEN, Pod, Release, run

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(os.geteuid() != 0 or not IP, reason="namespaces need root and ip"),
]
HEAD = f"{NET}.1"
UP_S = 120.0
UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


def ray_start(group: Manifest, head: bool) -> list[str]:
    """Returns the command of KubeRay's generateRayStartCommand, with what setMissingRayStartParams adds."""
    limit = group["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"]
    params = {
        **({} if head else {"address": f"{HEAD}:6379"}),
        "metrics-export-port": "8080",
        "dashboard-agent-listen-port": "52365",
        "memory": str(int(limit[:-2]) * UNITS[limit[-2:]]),
        **group["rayStartParams"],
    }
    flags = " ".join(f"--{key}={value}" for key, value in sorted(params.items()))
    return ["/bin/bash", "-c", "--", f"ulimit -n 65536; ray start {'--head ' if head else ''}--block {flags}"]


def kuberay_adds(head: bool) -> dict[str, str]:
    ip = "127.0.0.1" if head else HEAD
    return {
        "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "RAY_ADDRESS": f"{ip}:6379", "RAY_PORT": "6379",
        "FQ_RAY_IP": HEAD, "RAY_IP": HEAD, "RAY_CLUSTER_NAME": "demo-baton", "REDIS_PASSWORD": "",
    }  # fmt: skip


@pytest.fixture
def release() -> Iterator[Release]:
    made: list[Path] = []
    with tempfile.TemporaryDirectory(prefix="bk-") as name, tempfile.TemporaryDirectory(dir="/dev/shm") as shm:
        for path in ("/etc/baton", "/etc/baton/config", "/etc/baton/keys", "/run/baton", "/var/cache/baton"):
            if not Path(path).exists():  # where the pods mount
                Path(path).mkdir()
                made.append(Path(path))
        subprocess.run([IP, "link", "del", BRIDGE], capture_output=True, check=False)
        bridge = subprocess.run(f"{IP} link add {BRIDGE} type bridge".split(), capture_output=True, check=False)
        if bridge.returncode:
            pytest.skip(f"no bridges here: {bridge.stderr.decode().strip()}")
        run(f"{IP} addr add {HOST}/24 dev {BRIDGE}")
        run(f"{IP} link set {BRIDGE} up")
        options = f"--port {REDIS} --bind {HOST} --requirepass {PASSWORD} --dir {name} --save".split()
        redis = subprocess.Popen([find_server(), *options, ""], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        found = Release(Path(name), Path(shm))
        try:
            yield found
        finally:
            for pod in found.pods.values():
                pod.close()
            redis.kill()
            redis.wait()
            subprocess.run([IP, "link", "del", BRIDGE], check=False)
            for path in reversed(made):
                path.rmdir()


def wait(release: Release, what: str, good) -> float:
    begun = time.monotonic()
    while not good():
        ended = [name for pod in release.pods.values() for name, p in pod.started.items() if p.poll() is not None]
        assert not ended, f"{what}: {ended} ended\n{release.logs()}"
        assert time.monotonic() - begun < UP_S, f"{what}\n{release.logs()}"
        time.sleep(0.2)
    return time.monotonic() - begun


def listens(address: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, port), 1):
        return True
    return False


def test_the_rendered_raycluster_serves_follows_another_ratio_and_drains(release: Release) -> None:
    spec = one(release.manifests, "RayCluster", "demo-baton")["spec"]
    head_group = spec["headGroupSpec"]
    head = release.add("head", head_group["template"]["spec"])
    ray_head, placer = head.spec["containers"]
    head.start(ray_head, ray_start(head_group, head=True), kuberay_adds(head=True))
    assert ray_head["readinessProbe"]["tcpSocket"]["port"] == 6379
    wait(release, "Ray's head", lambda: listens(HEAD, 6379))
    workers = [
        (release.add(f"{group['groupName']}-{i}", group["template"]["spec"]), group)
        for group in spec["workerGroupSpecs"]
        for i in range(group["replicas"])
    ]
    assert len(workers) == 3
    for pod, group in workers:
        pod.start(pod.spec["containers"][0], ray_start(group, head=False), kuberay_adds(head=False))
    head.start(placer, [*placer["command"], *placer["args"]])
    router_spec = one(release.manifests, "Deployment", "demo-baton-router")["spec"]["template"]["spec"]
    router = release.add("router", router_spec)
    serving = router.spec["containers"][0]
    router.start(serving, [*serving["command"], *serving["args"]])

    def ready(pod: Pod) -> bool:
        container = pod.spec["containers"][0]
        return pod.succeeds(container, container["readinessProbe"]["exec"]["command"])

    for pod, _ in workers:
        wait(release, f"{pod.name} to be ready", lambda pod=pod: ready(pod))
        probe = pod.spec["containers"][0]["livenessProbe"]["tcpSocket"]
        assert listens(pod.address, probe["port"]), release.logs()
    key = release.secret("demo-baton-keys")["api-key"]
    with httpx.Client(base_url=f"http://{router.address}:8000", timeout=60) as client:
        client.headers["Authorization"] = f"Bearer {key}"
        wait(release, "the router", lambda: client.get("/ready").status_code == 200)
        model = client.get("/v1/models").json()["data"][0]["id"]
        numbers = itertools.count()

        def ask() -> str:
            body = {"model": model, "prompt": [next(numbers) % 250 + 1] * 200, "max_tokens": 8}
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            return answer.headers["x-baton-route"]

        routes = {ask() for _ in range(40)}
        assert any("prefill" in route for route in routes), routes
        release.upgrade(decode=1)
        ended = wait(release, "a decode worker to leave", lambda: ask() and sum(ready(p) for p, _ in workers) == 2)
        release.upgrade(decode=2)
        back = wait(release, "its return", lambda: ask() and sum(ready(p) for p, _ in workers) == 3)
        leaving, group = workers[-1]
        container = leaving.spec["containers"][0]
        assert leaving.succeeds(container, container["lifecycle"]["preStop"]["exec"]["command"]), release.logs()
        for _ in range(10):
            ask()
    print(f"\n{len(routes)} ways taken; decode 2 -> 1 in {ended:.1f} s, -> 2 in {back:.1f} s, and a pod drained")
