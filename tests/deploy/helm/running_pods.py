"""Pods of a rendered chart as local processes.

A pod's address is a loopback address of its own, a mounted folder a folder of the test's; everything else is as it
was rendered, probes and the order to stop included.
"""

import base64
import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.kernels.abi import build, native
from baton.launch.ports import free_ports
from baton.launch.redis_server import find_server
from tests.deploy.helm.charts import ROOT, Manifest, one, render

UP_S = 90.0


class Pod:
    """One container of a rendered pod, at its own address."""

    def __init__(
        self, name: str, container: Manifest, address: str, place: "Place", volumes: list[Manifest]
    ) -> None:
        self.name, self.address, self.container = name, address, container
        self.place, self.root = place, place.folder / str(next(place.numbers))  # short: sockets lie in it
        self.root.mkdir()
        sources = {v["name"]: v for v in volumes}
        self.mounts = {m["mountPath"]: self._mounted(m, sources[m["name"]]) for m in container["volumeMounts"]}
        self.env = self._environment()
        command = [self.local(part) for part in (*container["command"], *container.get("args", []))]
        for variable, value in self.env.items():
            command = [part.replace(f"$({variable})", value) for part in command]
        with open(self.root / "log", "wb") as log:
            self.process = subprocess.Popen(
                command, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.root
            )

    def _mounted(self, mount: Manifest, volume: Manifest) -> Path:
        if "hostPath" in volume:
            return Path(volume["hostPath"]["path"])
        if "persistentVolumeClaim" in volume:
            return self.place.claim(volume["persistentVolumeClaim"]["claimName"])
        folder = self.root / str(len(list(self.root.iterdir())))
        folder.mkdir()
        if "configMap" in volume:
            files = one(self.place.manifests, "ConfigMap", volume["configMap"]["name"])["data"]
        elif "secret" in volume:
            files = self.place.secret(volume["secret"]["secretName"])
        else:
            files = {}
        for name, text in files.items():
            (folder / name).write_text(text)
        return folder

    def local(self, text: str) -> str:
        """Paths of mounts and names of services, as they are here."""
        for path in sorted(self.mounts, key=len, reverse=True):
            if path != "/tmp":  # also the beginning of our own folders; TMPDIR says where ours is
                text = text.replace(path, str(self.mounts[path]))
        return self.place.local(text)

    def _environment(self) -> dict[str, str]:
        found = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}  # the image has this checkout's code
        for variable in self.container["env"]:
            source = variable.get("valueFrom", {})
            if "fieldRef" in source:
                fields = {"metadata.name": self.name, "status.podIP": self.address}
                found[variable["name"]] = fields[source["fieldRef"]["fieldPath"]]
            elif "secretKeyRef" in source:
                ref = source["secretKeyRef"]
                found[variable["name"]] = self.place.secret(ref["name"])[ref["key"]]
            else:
                value = re.sub(r"\$\((\w+)\)", lambda at: found[at[1]], variable["value"])
                found[variable["name"]] = self.local(value)
        found["BATON_KERNELS_DIR"] = str(self.place.kernels)  # the image has it
        found["TMPDIR"] = found["HOME"] = str(self.mounts.get("/tmp", self.root))
        for file in self.root.glob("*/baton.toml"):
            file.write_text(self.local(file.read_text()))
        return found

    def passes(self, probe: str) -> bool:
        """Returns the kubelet's verdict by the probe as it was rendered."""
        assert self.process.poll() is None, self.log()
        asked = self.container[probe]
        if "exec" in asked:
            return self.succeeds(probe)
        if "grpc" in asked:
            with grpc.insecure_channel(f"{self.address}:{asked['grpc']['port']}") as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                try:
                    return stub.Check(health_pb2.HealthCheckRequest(), timeout=30).status == 1
                except grpc.RpcError:
                    return False
        if "tcpSocket" in asked:
            with (
                contextlib.suppress(OSError),
                socket.create_connection((self.address, self.port(asked["tcpSocket"]["port"])), 2),
            ):
                return True
            return False
        get = asked["httpGet"]
        url = f"{get['scheme'].lower()}://{self.address}:{self.port(get['port'])}{get['path']}"
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(url, timeout=30, verify=False).status_code == 200
        return False

    def succeeds(self, probe: str) -> bool:
        """The command of a probe, whether the container runs or not."""
        command = [self.local(part) for part in self.container[probe]["exec"]["command"]]
        return subprocess.run(command, env=self.env, capture_output=True, check=False).returncode == 0

    def port(self, name: str) -> int:
        """Returns the container's port by its name in the manifest."""
        number = next(p["containerPort"] for p in self.container["ports"] if p["name"] == name)
        return self.place.redis_port if number == 6379 else number

    def log(self) -> str:
        """The end of what it printed."""
        return f"{self.name}: " + (self.root / "log").read_text(errors="replace")[-6000:]

    def stop(self, patience_s: float = 20.0) -> int:
        """SIGTERM, as the kubelet does it; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"{self.log()}\nnot gone within {patience_s} s of SIGTERM") from None


class Place(contextlib.AbstractContextManager):
    """A release, and the pods of it that run here."""

    def __init__(self, values: Manifest, secrets: dict[str, dict[str, str]] | None = None) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="bh-")
        self.folder = Path(self._scratch.name)
        self.redis_port, self.http, self.grpc = free_ports(3)
        self.manifests = self._rendered(values)
        self._secrets = secrets or {}
        self._stack = contextlib.ExitStack()
        self.pods: dict[str, Pod] = {}
        self.names: dict[str, str] = {}  # what name servers would say
        self.numbers = itertools.count()
        self.kernels = self.folder / "k"
        self.kernels.mkdir()
        flags = (*build.FLAGS, *build.ISA_FLAGS[native.isa()])
        (self.kernels / build.prebuilt_name(native.isa(), flags)).symlink_to(build.built(native.isa()))
        tools = self.folder / "bin"  # redis-server by the name that its image has for it
        tools.mkdir()
        (tools / "redis-server").symlink_to(find_server())
        self._path = f"{tools}:{ROOT / '.venv' / 'bin'}:{Path(sys.executable).parent}"

    def local(self, text: str) -> str:
        for name, address in self.names.items():
            text = text.replace(name, address)
        text = re.sub(r"demo-baton-router:80\b", f"127.0.0.1:{self.http}", text)
        return text.replace("demo-baton-redis:6379", f"127.0.0.1:{self.redis_port}").replace(
            "--port 6379 --bind '* -::*'", f"--port {self.redis_port} --bind 127.0.0.1"
        )

    def secret(self, name: str) -> dict[str, str]:
        """Entries of a Secret: one that the chart makes, or that the operator would have made."""
        if name in self._secrets:
            return self._secrets[name]
        data = one(self.manifests, "Secret", name)["data"]
        return {key: base64.b64decode(value).decode() for key, value in data.items()}

    def upgrade(self, values: Manifest) -> None:
        """Installs the chart anew as `helm upgrade` does, which keeps Secrets."""
        kept = [m for m in self.manifests if m["kind"] == "Secret"]
        self.manifests = kept + [m for m in self._rendered(values) if m["kind"] != "Secret"]

    def _rendered(self, values: Manifest) -> list[Manifest]:
        ports = {"http": self.http, "grpc": self.grpc}
        return render({**values, "router": {**values.get("router", {}), "ports": ports}})

    def claim(self, name: str) -> Path:
        """The folder of a claim, the same for all pods that mount it."""
        folder = self.folder / f"claim-{name}"
        folder.mkdir(exist_ok=True)
        return folder

    def start(self, kind: str, name: str, address: str, container: int | None = None) -> Pod:
        """The first pod of a Deployment, StatefulSet or Job; of its init containers the one with that index."""
        spec = one(self.manifests, kind, name)["spec"]["template"]["spec"]
        before = os.environ["PATH"]
        os.environ["PATH"] = f"{self._path}:{before}"
        try:
            run = spec["containers"][0] if container is None else spec["initContainers"][container]
            pod = Pod(f"{name}-0", run, address, self, spec["volumes"])
        finally:
            os.environ["PATH"] = before
        self.pods[pod.name] = pod
        return pod

    def start_external_redis(self) -> None:
        """One that is none of the release's pods."""
        options = ["--port", str(self.redis_port), "--bind", "127.0.0.1", "--save", "", "--dir", str(self.folder)]
        self._redis = subprocess.Popen(
            [find_server(), *options], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        self._stack.callback(self._redis.wait)
        self._stack.callback(self._redis.kill)

    def __exit__(self, *exc: object) -> None:
        self._stack.close()
        for pod in self.pods.values():
            pod.process.kill()
            pod.process.wait()
        self._scratch.cleanup()


def _wait(pod: Pod, probe: str) -> None:
    deadline = time.monotonic() + UP_S
    while not pod.passes(probe):
        assert time.monotonic() < deadline, pod.log()
        time.sleep(0.1)


@contextlib.contextmanager
def up(
    values: Manifest, secrets: dict[str, dict[str, str]] | None = None
) -> Iterator[tuple[Place, list[Pod], Pod]]:
    """Every pod of a release, ready: the place, its workers and its router."""
    network = f"127.{os.getpid() % 200 + 20}.{os.getpid() // 200 % 250}"
    with Place(values, secrets) as place:
        if any(m["metadata"]["name"] == "demo-baton-redis" and m["kind"] == "StatefulSet" for m in place.manifests):
            _wait(place.start("StatefulSet", "demo-baton-redis", "127.0.0.1"), "startupProbe")
        else:
            place.start_external_redis()
        workers = [
            place.start("StatefulSet", f"demo-baton-{role}", f"{network}.{number}")
            for number, role in ((2, "prefill"), (3, "decode"))
        ]
        router = place.start("Deployment", "demo-baton-router", "127.0.0.1")
        for pod in workers:
            _wait(pod, "startupProbe")
            _wait(pod, "readinessProbe")
            assert pod.passes("livenessProbe")
        _wait(router, "readinessProbe")
        assert router.passes("livenessProbe")
        yield place, workers, router


def serve(values: Manifest, secrets: dict[str, dict[str, str]] | None = None) -> None:
    """Start every pod, ask, and stop them as an upgrade would."""
    with up(values, secrets) as (place, workers, router):
        _ask(place, router)
        for pod in workers:
            assert pod.stop() == 0, pod.log()
            assert not pod.succeeds("startupProbe"), "what it wrote outlives it, and says nothing"
        assert router.stop() == 0, router.log()


def _ask(place: Place, router: Pod) -> None:
    scheme = router.container["readinessProbe"]["httpGet"]["scheme"].lower()
    headers = {}
    if "keys.json" in json.dumps([str(p) for p in router.root.rglob("*")]):
        key = place.secret("demo-baton-keys")["api-key"]
        headers = {"Authorization": f"Bearer {key}"}
    with httpx.Client(base_url=f"{scheme}://127.0.0.1:{place.http}", verify=False, timeout=60) as client:
        model = client.get("/v1/models", headers=headers).json()["data"][0]["id"]
        body = {"model": model, "prompt": [7] * 200, "max_tokens": 8, "ignore_eos": True}
        if headers:
            assert client.post("/v1/completions", json=body).status_code == 401
        deadline = time.monotonic() + UP_S
        for token in itertools.count(8):  # until the prefill worker read one: the router may not know it yet
            answer = client.post("/v1/completions", json=body | {"prompt": [token] * 200}, headers=headers)
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] == 8
            counted = client.get("/metrics").text if scheme == "http" else ""
            if not counted or 'baton_routing_decisions_total{way="prefill"' in counted:
                return
            assert time.monotonic() < deadline, counted


PACED = {
    "workers": {"drainSeconds": 2, "defaults": {"device": "paced:zero"}},
    "model": {"path": ""},
    "router": {"drainSeconds": 2},
}
