"""Two network namespaces as two hosts with mutual TLS on: a prefill worker on one, router, decode worker and Redis
on the other. It serves, and on every port strangers and plaintext are refused.

    sudo python -m bench.two_hosts [--requests N] [--json FILE] [--delay-ms D] [--loss P]

needs `ip netns`; else it says so and exits 77. With a delay (one way) or a loss of packets the hosts are joined by
bench.rough_link, in user space, instead of a veth pair. Redis is a real server behind bench.tls_front.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import ssl
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec

from baton.cluster.membership import PolledRoster, connect
from baton.cost.profiles import load_profile
from baton.engine.backends.paced.runner import paced_answer
from baton.launch.redis_server import RedisServer
from baton.process.processes import end_sessions, kill_session
from baton.protos.nouns import Sampling, WorkerInfo
from baton.tls.authority import Authority
from bench.intruders import DOMAIN, Papers, Port, Visit, table, visit, visitors
from bench.namespaces import ADDRESS, FAR, NEAR, Impossible, listening, start_on, two_hosts
from bench.rough_link import Roughness

SKIPPED = 77
REST, GRPC, REDIS, SECRET = 8443, 8444, 6380, "of-two-hosts"
UP_S = 60.0
PROFILE = "zero"
ROOT = Path(__file__).resolve().parents[1]


class Hosts:
    """Owns what runs on both hosts; ``close`` ends all of it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.certs = folder, folder / "certs"
        self.ours, self.stranger = Authority(self.certs), Authority(folder / "stranger")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._redis = RedisServer(folder / "redis")
        self.config = folder / "baton.toml"

    def start(self) -> None:
        """Starts all processes; returns before they are ready."""
        addresses = list(ADDRESS.values())
        for made in (self.ours, self.stranger):
            made.make(hosts=addresses)
        names = [f"{role}.{DOMAIN}" for role in ("worker", "router", "client", "redis")]
        self.ours.issue("expired", [*names, *addresses], days=-1)
        self.ours.issue("nobody", ["somebody.example"])
        asyncio.run(self._guard_redis(self._redis.start().url))
        self._write_config()
        front = ["-m", "bench.tls_front", "--listen", f"{ADDRESS[NEAR]}:{REDIS}", "--certs", str(self.certs)]
        self._run(NEAR, "redis-tls", [*front, "--socket", str(self.folder / "redis" / "redis.sock")])
        self._run(NEAR, "router", ["-m", "baton", "router"])
        self._run(NEAR, "decode-0", ["-m", "baton", "worker", "--role", "decode", "--slot", "decode-0"])
        self._run(FAR, "prefill-0", ["-m", "baton", "worker", "--role", "prefill", "--slot", "prefill-0"])

    def close(self) -> None:
        """End every process, and its children."""
        leaders = [process.pid for process in self._processes]
        end_sessions(leaders, 5.0)
        for process in self._processes:
            kill_session(process.pid)
            process.wait()
        self._redis.stop()

    def log(self, name: str) -> str:
        """Returns the log of process ``name``."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def dead(self) -> str:
        """Processes that ended by themselves, with their last words."""
        names = ("redis-tls", "router", "decode-0", "prefill-0")
        gone = [n for n, p in zip(names, self._processes, strict=True) if p.poll() is not None]
        return "; ".join(f"{name}: {self.log(name)[-600:]}" for name in gone)

    async def _guard_redis(self, url: str) -> None:
        admin = connect(url)
        await admin.execute_command("ACL", "SETUSER", "baton", "on", f">{SECRET}", "~*", "&*", "+@all", "-@admin")
        await admin.execute_command("ACL", "SETUSER", "default", "off")
        await admin.aclose()

    def _write_config(self) -> None:
        own = {role: {kind: str(self.certs / f"{role}.{kind}") for kind in ("crt", "key")} for role in ("worker",)}
        sections: dict[str, dict[str, Any]] = {
            "router": {"port": REST, "grpc_port": GRPC, "local_prefill_max_tokens": 0},
            "worker": {"device": f"paced:{PROFILE}"},
            "redis": {
                "url": f"rediss://{ADDRESS[NEAR]}:{REDIS}/0", "username": "baton", "password": SECRET,
                "ca": str(self.certs / "ca.crt"), "cert": own["worker"]["crt"], "key": own["worker"]["key"],
            },
            "tls": {"dir": str(self.certs), "client_ca": str(self.certs / "ca.crt"),
                    "client_names": [f"client.{DOMAIN}"]},
        }  # fmt: skip
        lines = []
        for section, keys in sections.items():
            lines += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items())]
        self.config.write_text("\n".join(lines) + "\n")

    def _run(self, host: str, name: str, arguments: list[str]) -> None:
        settings = {
            "BATON_ROUTER__HOST": ADDRESS[host], "BATON_WORKER__HOST": ADDRESS[host],
            "BATON_CLUSTER__RUN_DIR": str(self.folder / name[:1]), "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        self._processes.append(start_on(host, self.folder, name, arguments, settings))


# ---- what is done on one of the hosts (a process of its own, in the namespace) ---------------------------------


class Task(msgspec.Struct):
    """Either visits to make, or requests to ask."""

    visits: list[tuple[Port, Papers, str]] = []
    certs: str = ""
    requests: int = 0
    model: str = ""


def on_host(host: str, task: Task) -> Any:
    """The result of ``task``, done from ``host``."""
    command = ["ip", "netns", "exec", host, sys.executable, "-m", "bench.two_hosts", "--task"]
    done = subprocess.run(command, input=msgspec.json.encode(task), capture_output=True, check=False, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(done.stderr.decode()[-2000:])
    return json.loads(done.stdout)


def do(task: Task) -> Any:
    """Performs the task on this host, at once."""
    if task.visits:
        return [visit(port, papers) for port, papers, _ in task.visits]
    return ask(Path(task.certs), task.requests)


def ask(certs: Path, count: int) -> dict[str, Any]:
    """``count`` completions over REST, each held against the paced engine's own answer; 0: only whether ready."""
    context = ssl.create_default_context(cafile=certs / "ca.crt")
    context.load_cert_chain(certs / "client.crt", certs / "client.key")
    url, right, took = f"https://{ADDRESS[NEAR]}:{REST}", 0, []
    with httpx.Client(verify=context, timeout=60, trust_env=False) as client:
        if not count:
            try:
                return {"ready": client.get(url + "/ready").status_code == 200}
            except httpx.HTTPError:
                return {"ready": False}
        for seed in range(count):
            prompt = [
                (seed * 7919 + i * 104729) % load_profile(PROFILE).vocab_size for i in range(100 + 97 * (seed % 20))
            ]
            body = {
                "prompt": prompt,
                "max_tokens": 16,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            begun = time.monotonic()
            reply = client.post(url + "/v1/completions", json=body)
            took.append(time.monotonic() - begun)
            right += reply.status_code == 200 and reply.json()["choices"][0]["token_ids"] == _expected(prompt)
    took.sort()
    return {"asked": count, "right": right, "p50_s": took[len(took) // 2], "max_s": took[-1]}


def _expected(prompt: list[int]) -> list[int]:
    profile = load_profile(PROFILE)
    return paced_answer(
        prompt, Sampling(temperature=0.0, max_tokens=16, ignore_eos=True), 0,
        kv_bytes_per_token=profile.kv_bytes_per_token, vocab_size=profile.vocab_size,
        max_model_len=profile.max_model_len,
    )  # fmt: skip


# ---- the proof ------------------------------------------------------------------------------------------------


def ports(hosts: Hosts) -> list[tuple[str, Port]]:
    """Every port that listens on a routable address, with the host that it is visited from: the other one."""
    seen, links = asyncio.run(_members(hosts))
    found = [
        (FAR, Port("router REST", "http", f"{ADDRESS[NEAR]}:{REST}", "client", "router")),
        (FAR, Port("router gRPC", "inference", f"{ADDRESS[NEAR]}:{GRPC}", "client", "router")),
        (FAR, Port("Redis", "redis", f"{ADDRESS[NEAR]}:{REDIS}", "worker", "redis")),
    ]
    for name, info in sorted(seen.items()):
        visitor = FAR if info.address.startswith(ADDRESS[NEAR]) else NEAR
        found.append((visitor, Port(f"{name} gRPC", "worker", info.address, "router", "worker")))
        found.append((visitor, Port(f"{name} metrics", "http", info.metrics_address, "monitor", "worker")))
        if "tcp" in info.data_addresses:
            found.append((visitor, Port(f"{name} KV", "kv", info.data_addresses["tcp"], "worker", "worker")))
    print("KV links:", "; ".join(links) or "none measured")
    return found


async def _members(hosts: Hosts) -> tuple[dict[str, WorkerInfo], list[str]]:
    """Returns the workers and their links as Redis has them, asked over its unix socket on this host."""
    client = connect(f"unix://baton:{SECRET}@{hosts.folder}/redis/redis.sock")
    entries = await PolledRoster(client, "baton").refresh()
    await client.aclose()
    links = [
        f"{name} -> {link.peer} by {link.transport}, {link.bytes_per_s / 1e6:.0f} MB/s, {link.fixed_s * 1e3:.2f} ms"
        for name, entry in entries.items()
        for link in entry.load.kv_links
    ]
    return {name: entry.info for name, entry in entries.items()}, links


def prove(requests: int, rough: Roughness | None = None) -> dict[str, Any]:
    """Starts the cluster, asks, visits, and returns what came of it. Raises Impossible and RuntimeError."""
    with tempfile.TemporaryDirectory(prefix="b2-") as name, two_hosts(rough) as link:
        hosts = Hosts(Path(name))
        try:
            hosts.start()
            deadline = time.monotonic() + UP_S
            while not on_host(FAR, Task(certs=str(hosts.certs)))["ready"] or not _both_reachable(hosts):
                if hosts.dead() or time.monotonic() > deadline:
                    raise RuntimeError(f"not ready: {hosts.dead() or hosts.log('router')[-1000:]}")
                time.sleep(0.3)
            served = on_host(FAR, Task(certs=str(hosts.certs), requests=requests))
            known = ports(hosts)
            visits = _tour(hosts, known)
            again = on_host(NEAR, Task(certs=str(hosts.certs), requests=requests))
            told = {port.address for _, port in known}
            untold = [at for host in (NEAR, FAR) for at in listening(host) if at not in told]
            packets = [{"carried": way.carried, "lost": way.dropped} for way in link]
            return {
                "from far": served, "from near": again, "visits": visits, "ports nobody told of": untold,
                "packets": packets,
            }  # fmt: skip
        finally:
            hosts.close()


def _both_reachable(hosts: Hosts) -> bool:
    return len(asyncio.run(_members(hosts))[0]) == 2


def _tour(hosts: Hosts, known: list[tuple[str, Port]]) -> list[Visit]:
    made: list[Visit] = []
    for host in (NEAR, FAR):
        tries = [
            (port, papers, who)
            for visited_from, port in known
            for who, papers in visitors(hosts.ours, hosts.stranger, port).items()
            if visited_from == host
        ]
        for (port, _, who), outcome in zip(tries, on_host(host, Task(tries)), strict=True):
            made.append(Visit(port, who, outcome))
    return made


def main() -> int:
    """Prints the table; returns 0 if all is as it must be."""
    parser = argparse.ArgumentParser(prog="bench.two_hosts", description=__doc__)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--json", help="write what was seen to this file")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="added to each packet, each way")
    parser.add_argument("--loss", type=float, default=0.0, help="share of packets that are lost, each way")
    parser.add_argument("--task", action="store_true", help=argparse.SUPPRESS)
    told = parser.parse_args()
    if told.task:
        print(json.dumps(do(msgspec.json.decode(sys.stdin.buffer.read(), type=Task))))
        return 0
    try:
        rough = Roughness(told.delay_ms / 1e3, told.loss) if told.delay_ms or told.loss else None
        found = prove(told.requests, rough)
    except Impossible as why:
        print(f"skipped: {why}")
        return SKIPPED
    visits = found["visits"]
    print(table(visits))
    for one in visits:
        if not one.served:
            print(f"  {one.port.name}, {one.visitor}: {one.outcome[:140]}")
    print({key: value for key, value in found.items() if key != "visits"})
    wrong = [one for one in visits if one.served != (one.visitor == "the right role")]
    good = not wrong and all(found[side]["right"] == told.requests for side in ("from far", "from near"))
    if told.json:
        rows = [{"port": v.port.name, "visitor": v.visitor, "outcome": v.outcome} for v in visits]
        Path(told.json).write_text(json.dumps({**found, "visits": rows}, indent=1))
    print("as it must be" if good else f"NOT as it must be: {wrong}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
