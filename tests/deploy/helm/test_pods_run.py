"""Runs what the chart's pods run: the rendered commands, environment and config, as local processes.

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
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import httpx
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from safetensors.numpy import save_file

from baton.engine.adapters.tensors import FILE as ADAPTER_FILE
from baton.kernels.abi import build, native
from baton.launch.ports import free_ports
from baton.launch.redis_server import find_server
from tests.deploy.helm.charts import ROOT, Manifest, one, profile, render

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
        """By its name in the manifest."""
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
        body = {"model": model, "prompt": [7] * 200, "max_tokens": 8}
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


@pytest.mark.thorough  # run by make helm-check
def test_the_rendered_pods_answer_a_request_with_the_generated_key_and_password() -> None:
    serve(PACED)


@pytest.mark.thorough  # make helm-check runs it too
def test_the_adapters_job_serves_what_the_values_name_and_an_upgrade_takes_out_what_they_name_no_more(
    tmp_path: Path,
) -> None:
    for name in ("sql", "style"):
        _write_adapter(tmp_path / name)
    adapters: Manifest = {"source": "hostPath", "hostPath": str(tmp_path), "prune": True}
    both, one_left = ({"serve": {name: {"path": name} for name in names}} for names in (("sql", "style"), ("sql",)))
    with up({**PACED, "adapters": {**adapters, **both}}) as (place, _, _):
        assert _applied(place) == {"sql", "style"}
        assert _applied(place) == {"sql", "style"}, "again, as a schedule does"
        place.upgrade({**PACED, "adapters": {**adapters, **one_left}})
        assert _applied(place) == {"sql"}


@pytest.mark.thorough  # make helm-check runs it too
def test_the_adapters_job_first_fills_the_claim_from_which_workers_load(tmp_path: Path) -> None:
    for name in ("sql", "style"):
        _write_adapter(tmp_path / name)
    root = "/var/lib/baton/adapters"
    adapters: Manifest = {
        "source": "pvc",
        "pvc": {"claimName": "a"},
        "fetch": {
            "image": "any/image:1",
            "command": ["cp", "-r", str(tmp_path / "sql"), str(tmp_path / "style"), root],
        },
        "serve": {"sql": {"path": "sql", "pinned": True}, "style": {"path": "style", "hub": "acme/style"}},
    }
    with up({**PACED, "adapters": adapters}) as (place, _, _):
        assert not list(place.claim("a").iterdir())
        assert _applied(place, inits=["fetch", "hub"]) == {"sql", "style"}
        assert {path.name for path in place.claim("a").iterdir()} == {"sql", "style"}


def _write_adapter(folder: Path) -> None:
    """A paced engine takes modules of any name."""
    folder.mkdir()
    module = "base_model.model.model.layers.0.self_attn.q_proj.lora"
    save_file({f"{module}_{half}.weight": np.ones((4, 4), np.float32) for half in "AB"}, folder / ADAPTER_FILE)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 4}')


def _applied(place: Place, inits: Sequence[str] = ()) -> set[str]:
    """Returns the adapters that the chart's own key sees after the Job, whose init containers are ``inits``; each
    adapter has answered.
    """
    job = next(m for m in place.manifests if m["kind"] == "Job")
    before = [container["name"] for container in job["spec"]["template"]["spec"].get("initContainers", ())]
    assert before == list(inits)
    for container in (*range(len(inits)), None):
        pod = place.start("Job", job["metadata"]["name"], "127.0.0.1", container)
        assert pod.process.wait(UP_S) == 0, pod.log()
    headers = {"Authorization": f"Bearer {place.secret('demo-baton-keys')['api-key']}"}
    with httpx.Client(base_url=f"http://127.0.0.1:{place.http}", headers=headers, timeout=60) as client:
        served = {model["id"] for model in client.get("/v1/models").json()["data"] if model.get("parent")}
        for name in served:
            answer = client.post("/v1/completions", json={"model": name, "prompt": [7] * 40, "max_tokens": 4})
            assert answer.status_code == 200, answer.text
    return served


@pytest.mark.thorough  # make helm-check runs it too
def test_with_mutual_tls_the_rendered_pods_answer_as_well(tmp_path: Path) -> None:
    made = subprocess.run(
        [sys.executable, "-m", "baton", "certs", "make", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    ca = (tmp_path / "ca.crt").read_text()
    secrets = {
        f"{role}-certificate": {
            "tls.crt": (tmp_path / f"{role}.crt").read_text(),
            "tls.key": (tmp_path / f"{role}.key").read_text(),
            "ca.crt": ca,
        }
        for role in ("router", "worker")
    }
    tls = {"mode": "secret", "existingSecrets": {"router": "router-certificate", "worker": "worker-certificate"}}
    redis = {"enabled": False, "external": {"url": "redis://demo-baton-redis:6379/0"}}
    serve({**PACED, "tls": tls, "redis": redis}, secrets)


@pytest.mark.soak
def test_the_dev_profile_answers_with_the_demo_model() -> None:
    values = profile("values-dev.yaml")
    serve({**values, "model": {"path": str(ROOT / "models" / "demo")}})


@pytest.mark.soak
def test_a_worker_whose_further_pod_comes_later_answers_and_ends_in_order() -> None:
    network = f"127.{os.getpid() % 200 + 20}.{os.getpid() // 200 % 250}"
    values = {
        "workers": {
            "drainSeconds": 5,
            "pools": {"prefill": {"rankHosts": 1, "settings": {"pp": 2}}},
            "defaults": {"settings": {"kv_memory_bytes": 67108864}},
        },
        "model": {"path": str(ROOT / "models" / "demo")},
        "router": {"drainSeconds": 2},
    }
    with Place(values) as place:
        place.names["demo-baton-prefill-0-ranks-0.demo-baton-prefill-ranks"] = f"{network}.4"
        _wait(place.start("StatefulSet", "demo-baton-redis", "127.0.0.1"), "startupProbe")
        decode = place.start("StatefulSet", "demo-baton-decode", f"{network}.3")
        lead = place.start("StatefulSet", "demo-baton-prefill", f"{network}.2")
        router = place.start("Deployment", "demo-baton-router", "127.0.0.1")
        _wait(decode, "readinessProbe")
        assert not lead.passes("startupProbe"), "it waits for its ranks"
        ranks = place.start("StatefulSet", "demo-baton-prefill-0-ranks", f"{network}.4")
        _wait(ranks, "readinessProbe")
        for pod in (lead, router):
            _wait(pod, "readinessProbe")
        assert ranks.passes("livenessProbe")
        _ask(place, router)
        ranks.process.send_signal(signal.SIGTERM)  # as an upgrade tells all pods at once
        assert lead.stop() == 0, lead.log()
        assert ranks.process.wait(60) == 0, ranks.log()
        assert "ended by itself" not in lead.log(), "its ranks waited until it had drained"
