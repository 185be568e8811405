"""What KubeRay would run of the rendered RayCluster, run here: each pod is a network namespace with an address and
mounts of its own, and the command and variables that KubeRay adds are added as its source has it (pod.go of 1.5).

Needs root and `ip netns`. What is not shown: KubeRay itself, images, a kubelet.
"""

import base64
import contextlib
import itertools
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from baton.deploy.processes import kill_session
from baton.deploy.redis_server import find_server
from baton.kernels.abi import build, native
from tests.deploy.helm.charts import Manifest, one, render

pytest.importorskip("helm_python")
pytest.importorskip("ray")
pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="namespaces need root and ip"),
]
NET, BRIDGE, REDIS = "10.231.79", "baton-br", 16379
HOST, HEAD = f"{NET}.254", f"{NET}.1"
UP_S = 120.0
TOKEN, PASSWORD = secrets.token_hex(32), secrets.token_hex(8)
UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


def values(decode: int) -> Manifest:
    """A release with a Redis of somebody else's, and ``decode`` decode workers."""
    redis = {"enabled": False, "external": {"url": f"redis://{HOST}:{REDIS}/0", "existingSecret": "r"}}
    return {
        "workers": {"mode": "raycluster", "drainSeconds": 2, "defaults": {"device": "paced:zero"}},
        "ratio": {"prefill": 1, "decode": decode},
        "model": {"path": ""},
        "router": {"drainSeconds": 2, "preStopSeconds": 1},
        "redis": redis,
    }


def run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"`{command}`: {done.stderr.strip()}"


def remove(number: int) -> None:
    """A pod's namespace and cable; also what a run that was killed left."""
    for command in (f"ip netns del baton-{number}", f"ip link del bt{number}"):
        subprocess.run(command.split(), capture_output=True, check=False)


class Pod:
    """A namespace, and the folders that its containers mount."""

    def __init__(self, release: "Release", name: str, number: int, spec: Manifest) -> None:
        self.release, self.name, self.address, self.spec = release, name, f"{NET}.{number}", spec
        self.ns, self.number = f"baton-{number}", number
        remove(number)
        run(f"ip netns add {self.ns}")
        run(f"ip link add bt{number} type veth peer name eth0 netns {self.ns}")
        run(f"ip link set bt{number} master {BRIDGE} up")
        run(f"ip -n {self.ns} addr add {self.address}/24 dev eth0")
        run(f"ip -n {self.ns} link set eth0 up")
        run(f"ip -n {self.ns} link set lo up")
        run(f"ip -n {self.ns} route add default via {HOST}")  # by which Ray finds its own address
        self.folders = {volume["name"]: self._folder(volume) for volume in spec["volumes"]}
        self.started: dict[str, subprocess.Popen[bytes]] = {}

    def _folder(self, volume: Manifest) -> Path:
        memory = volume.get("emptyDir", {}).get("medium") == "Memory"
        folder = (self.release.shm if memory else self.release.folder) / f"{self.ns}-{volume['name']}"
        folder.mkdir(mode=0o1777 if volume["name"] == "tmp" else 0o755)
        if volume["name"] == "cache":
            self._put_kernels(folder)
        if "configMap" in volume:
            self.release.write_config(volume["configMap"]["name"], folder)
        elif "secret" in volume:
            for key, text in self.release.secret(volume["secret"]["secretName"]).items():
                (folder / key).write_text(text)
        return folder

    def _put_kernels(self, cache: Path) -> None:
        """What the image has in another folder."""
        (cache / "prebuilt").mkdir()
        flags = (*build.FLAGS, *build.ISA_FLAGS[native.isa()])
        name = build.prebuilt_name(native.isa(), flags)
        shutil.copy(build.built(native.isa()), cache / "prebuilt" / name)

    def inside(self, container: Manifest, command: list[str], env: dict[str, str]) -> dict:
        """Arguments of Popen for a command in the container. /tmp comes last: the folders lie in the real one."""
        mounts = sorted(container["volumeMounts"], key=lambda m: m["mountPath"] == "/tmp")
        lines = [f"mount --bind {self.folders[m['name']]} {m['mountPath']}" for m in mounts]
        script = " && ".join([*lines, "cd /", 'exec "$@"'])
        return {"args": ["ip", "netns", "exec", self.ns, "sh", "-c", script, "pod", *command], "env": env}

    def environment(self, container: Manifest, added: dict[str, str]) -> dict[str, str]:
        found = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **added}
        found["BATON_KERNELS_DIR"] = "/var/cache/baton/prebuilt"
        for variable in container["env"]:
            source = variable.get("valueFrom", {})
            if "fieldRef" in source:
                fields = {"metadata.name": self.name, "status.podIP": self.address}
                found[variable["name"]] = fields[source["fieldRef"]["fieldPath"]]
            elif "secretKeyRef" in source:
                entries, ref = self.release.secret(source["secretKeyRef"]["name"]), source["secretKeyRef"]
                if ref["key"] in entries or not ref.get("optional"):
                    found[variable["name"]] = entries[ref["key"]]
            else:
                found[variable["name"]] = re.sub(r"\$\((\w+)\)", lambda m: found[m[1]], variable["value"])
        return found

    def start(self, container: Manifest, command: list[str], added: dict[str, str] | None = None) -> None:
        """The container, as the kubelet does."""
        told = self.inside(container, command, self.environment(container, added or {}))
        with open(self.release.folder / f"{self.name}-{container['name']}.log", "wb") as log:
            self.started[container["name"]] = subprocess.Popen(
                **told, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def succeeds(self, container: Manifest, command: list[str]) -> bool:
        """Of a probe or a hook."""
        told = self.inside(container, command, self.environment(container, {}))
        return subprocess.run(**told, capture_output=True, check=False).returncode == 0

    def close(self) -> None:
        for process in self.started.values():
            kill_session(process.pid)
            process.wait()
        pids = subprocess.run(["ip", "netns", "pids", self.ns], capture_output=True, text=True, check=False)
        for pid in pids.stdout.split():  # workers are in sessions of their own; a pod's end ends them
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        remove(self.number)


class Release:
    """Everything that the chart made, and its pods."""

    def __init__(self, folder: Path, shm: Path) -> None:
        self.folder, self.shm, self.manifests = folder, shm, render(values(decode=2))
        self._given = {"r": {"password": PASSWORD}, "demo-baton": {"auth_token": TOKEN}}
        self.pods: dict[str, Pod] = {}

    def secret(self, name: str) -> dict[str, str]:
        if name in self._given:
            return self._given[name]
        data = one(self.manifests, "Secret", name)["data"]
        return {key: base64.b64decode(value).decode() for key, value in data.items()}

    def write_config(self, name: str, folder: Path) -> None:
        for key, text in one(self.manifests, "ConfigMap", name)["data"].items():
            (folder / key).write_text(text)

    def upgrade(self, decode: int) -> None:
        """As `helm upgrade` with another ratio: Secrets stay, and the kubelet brings the placer its numbers."""
        secrets_of = [m for m in self.manifests if m["kind"] == "Secret"]
        self.manifests = secrets_of + [m for m in render(values(decode)) if m["kind"] != "Secret"]
        self.write_config("demo-baton-placer", self.pods["head"].folders["config"])

    def add(self, name: str, spec: Manifest) -> Pod:
        self.pods[name] = Pod(self, name, len(self.pods) + 1, spec)
        return self.pods[name]

    def logs(self) -> str:
        files = sorted([*self.folder.glob("*.log"), *self.folder.glob("*-run/logs/*.log")])
        return "\n".join(f"== {f.name}\n{f.read_text(errors='replace')[-1500:]}" for f in files)


def ray_start(group: Manifest, head: bool) -> list[str]:
    """KubeRay's: generateRayStartCommand, with what setMissingRayStartParams adds."""
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
        subprocess.run(["ip", "link", "del", BRIDGE], capture_output=True, check=False)
        bridge = subprocess.run(f"ip link add {BRIDGE} type bridge".split(), capture_output=True, check=False)
        if bridge.returncode:
            pytest.skip(f"no bridges here: {bridge.stderr.decode().strip()}")
        run(f"ip addr add {HOST}/24 dev {BRIDGE}")
        run(f"ip link set {BRIDGE} up")
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
            subprocess.run(["ip", "link", "del", BRIDGE], check=False)
            for path in reversed(made):
                path.rmdir()


def wait(release: Release, what: str, good) -> float:
    begun = time.monotonic()
    while not good():
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
