"""Pods of a rendered chart on this machine: each is a network namespace with an address and mounts of its own.

Knows nothing of who runs what in them. Needs root and `ip netns`.
"""

import base64
import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from baton.kernels.abi import build, native
from baton.process.processes import kill_session
from tests.deploy.helm.charts import ROOT, Manifest, one, render

NET, BRIDGE, REDIS = "10.231.79", "baton-br", 16379
HOST = f"{NET}.254"
IP = shutil.which("ip") or shutil.which("ip", path="/usr/sbin:/sbin") or ""  # a bare PATH doesn't name these
PROGRAMS = tuple({ROOT, Path(sys.prefix), Path(sys.base_prefix)})  # where they are found by the environment
TOKEN, PASSWORD = secrets.token_hex(32), secrets.token_hex(8)


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
    for command in (f"{IP} netns del baton-{number}", f"{IP} link del bt{number}"):
        subprocess.run(command.split(), capture_output=True, check=False)


class Pod:
    """A namespace, and the folders that its containers mount."""

    def __init__(self, release: "Release", name: str, number: int, spec: Manifest) -> None:
        self.release, self.name, self.address, self.spec = release, name, f"{NET}.{number}", spec
        self.ns, self.number = f"baton-{number}", number
        remove(number)
        run(f"{IP} netns add {self.ns}")
        run(f"{IP} link add bt{number} type veth peer name eth0 netns {self.ns}")
        run(f"{IP} link set bt{number} master {BRIDGE} up")
        run(f"{IP} -n {self.ns} addr add {self.address}/24 dev eth0")
        run(f"{IP} -n {self.ns} link set eth0 up")
        run(f"{IP} -n {self.ns} link set lo up")
        run(f"{IP} -n {self.ns} route add default via {HOST}")  # by which Ray finds its own address
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
        """Puts the compiled kernels, which the image has in another folder, into the cache."""
        (cache / "prebuilt").mkdir()
        flags = (*build.FLAGS, *build.ISA_FLAGS[native.isa()])
        name = build.prebuilt_name(native.isa(), flags)
        shutil.copy(build.built(native.isa()), cache / "prebuilt" / name)

    def inside(self, container: Manifest, command: list[str], env: dict[str, str]) -> dict:
        """Arguments of Popen for a command in the container. /tmp comes last: the folders lie in the real one."""
        mounts = sorted(container["volumeMounts"], key=lambda m: m["mountPath"] == "/tmp")
        lines = [line for m in mounts for line in self._mount(self.folders[m["name"]], m["mountPath"])]
        script = " && ".join([*lines, "cd /", 'exec "$@"'])
        return {"args": [IP, "netns", "exec", self.ns, "sh", "-c", script, "pod", *command], "env": env}

    def _mount(self, folder: Path, path: str) -> list[str]:
        """Returns the commands that mount ``folder`` at ``path``; programs that the image would have below
        ``path`` stay there.
        """
        below = [p for p in PROGRAMS if p.is_relative_to(path)]
        kept = [p for p in below if not any(p != other and p.is_relative_to(other) for other in below)]
        for place in kept:
            (folder / place.relative_to(path)).mkdir(parents=True, exist_ok=True)
        held = [f"mount --bind {place} {folder / place.relative_to(path)}" for place in kept]
        return [*held, f"mount --rbind {folder} {path}"]

    def environment(self, container: Manifest, added: dict[str, str]) -> dict[str, str]:
        found = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), **added}
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
        """Returns whether a command of a probe or a hook ends with status 0."""
        told = self.inside(container, command, self.environment(container, {}))
        return subprocess.run(**told, capture_output=True, check=False).returncode == 0

    def close(self) -> None:
        for process in self.started.values():
            kill_session(process.pid)
            process.wait()
        pids = subprocess.run([IP, "netns", "pids", self.ns], capture_output=True, text=True, check=False)
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
        """Upgrades to another ratio as `helm upgrade` does: Secrets stay, and the kubelet brings the placer its
        numbers.
        """
        secrets_of = [m for m in self.manifests if m["kind"] == "Secret"]
        self.manifests = secrets_of + [m for m in render(values(decode)) if m["kind"] != "Secret"]
        self.write_config("demo-baton-placer", self.pods["head"].folders["config"])

    def add(self, name: str, spec: Manifest) -> Pod:
        self.pods[name] = Pod(self, name, len(self.pods) + 1, spec)
        return self.pods[name]

    def logs(self) -> str:
        files = sorted([*self.folder.glob("*.log"), *self.folder.glob("*-run/logs/*.log")])
        return "\n".join(f"== {f.name}\n{f.read_text(errors='replace')[-1500:]}" for f in files)
