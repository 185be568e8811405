"""Checks of what the cluster needs besides the machine: ports, Redis, Ray, certificates, KV transports.

Knows nothing of the kernel. Redis and Ray are only asked; transports are tried within this machine.
"""

from __future__ import annotations

import asyncio
import importlib.util
import socket
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import redis

from baton.cluster.config import BatonConfig
from baton.cluster.membership import PolledRoster, WorkerEntry, connect
from baton.cluster.served_model import resolve_model
from baton.cluster.store.redis_url import masked
from baton.cluster.store.room import ANSWERS
from baton.console.cluster.workers import meeting_place
from baton.console.setup.findings import Finding, State
from baton.launch.redis_server import find_server
from baton.process.security import files_of, identity_of, public_identity
from baton.protos.errors import BatonError
from baton.router.observe.handovers import obstacles
from baton.tls.identity import SOON_S, Identity

SKEW_S = 1.0  # seconds that two clocks may differ
SLOW_REDIS_S = 0.005  # seconds of a round trip to Redis that are too many
# Bytes of a page and of a trial's handoff, which takes a fraction of a second.
PAGE_BYTES, MEASURED_BYTES = 2 << 20, 32 << 20
SLOWEST = {"shm": 1e9, "tcp": 0.5e9, "grpc": 0.1e9}  # bytes a second: below, something is wrong with the machine
DAY_S = 86_400.0  # seconds


def ports(config: BatonConfig) -> list[Finding]:
    """Checks that the ports that the configuration names are free on this machine."""
    named = {
        "router.port": (config.router.host, config.router.port),
        "router.grpc_port": (config.router.host, config.router.grpc_port),
        **{
            f"worker.{key}": (config.worker.host, getattr(config.worker, key))
            for key in ("port", "data_port", "metrics_port")
        },
    }
    return [_port(key, host, number) for key, (host, number) in named.items() if number]


def _port(key: str, host: str, number: int) -> Finding:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, number), family=family).close()
    except OSError as error:
        remedy = f"end what has it (ss -ltnp 'sport = :{number}'), or choose another {key}"
        return Finding(f"port {number}", "fail", f"{key} on {host}: {error.strerror or error}", remedy)
    return Finding(f"port {number}", "ok", f"{key} on {host} is free")


def redis_server(config: BatonConfig) -> list[Finding]:
    """Checks the configured Redis (answer time, memory policy, clock), or that there is a redis-server to start."""
    url = config.redis.url
    if not url:
        try:
            return [Finding("redis", "ok", f"private, by {find_server()}")]
        except BatonError as error:
            return [Finding("redis", "fail", error.message, "install redis-server, or set redis.url")]
    try:
        with redis.Redis.from_url(url, socket_timeout=3, socket_connect_timeout=3) as client:
            return _asked(client, url)
    except (redis.RedisError, OSError, ValueError) as error:
        remedy = "correct redis.url, redis.password and redis.ca; a network policy or firewall may be between"
        return [Finding("redis", "fail", f"{masked(url)}: {error}", remedy)]


def _asked(client: redis.Redis, url: str) -> list[Finding]:
    client.ping()
    begun, wall = time.monotonic(), time.time()
    seconds, micros = client.time()  # type: ignore[misc]
    took = time.monotonic() - begun
    info: dict[str, object] = client.info()  # type: ignore[assignment]
    said = f"{masked(url)}, version {info.get('redis_version')}, {took * 1e3:.2f} ms a round trip"
    found = [
        Finding("redis", "warn" if took > SLOW_REDIS_S else "ok", said, "put it nearer to routers and workers")
    ]
    found.append(_memory(info))
    skew = abs(wall + took / 2 - (seconds + micros / 1e6))
    if skew > SKEW_S:
        found.append(
            Finding("clocks", "warn", f"ours and Redis's differ by {skew:.1f} s", "synchronize both (chrony)")
        )
    else:
        found.append(Finding("clocks", "ok", f"ours and Redis's differ by {skew * 1e3:.0f} ms"))
    return found


def _memory(info: dict[str, object]) -> Finding:
    """Finds whether Redis may evict what must not be lost, and whether there is room for more."""
    policy, most = str(info.get("maxmemory_policy", "")), int(str(info.get("maxmemory", 0)))
    used = int(str(info.get("used_memory", 0)))
    if most and policy != "noeviction":
        said = f"maxmemory-policy {policy} may evict leases, rates, batch jobs and files at {most:,} bytes"
        remedy = "CONFIG SET maxmemory-policy noeviction: what Baton stores is bounded, and a full store says so"
        return Finding("redis memory", "fail", said, remedy)
    if most and used > ANSWERS * most:
        said = f"{used:,} of {most:,} bytes are used: files are refused and batch jobs wait"
        return Finding("redis memory", "warn", said, "delete files, or raise maxmemory")
    return Finding("redis memory", "ok", f"{used:,} of {most:,} bytes, {policy}" if most else "without a limit")


def handovers(config: BatonConfig) -> list[Finding]:
    """Checks that the workers of the configured cluster, or of the one that runs on this machine, can hand KV over
    to one another.
    """
    named = config.redis.url, config.cluster.namespace
    try:
        url, namespace = named if named[0] else meeting_place(None, "")
        entries = asyncio.run(_workers(url, namespace))
    except (BatonError, redis.RedisError, OSError):
        return [Finding("handovers", "skip", "no cluster runs here, and redis.url names none that answers")]
    if not entries:
        return [Finding("handovers", "skip", f"no worker is in the namespace {namespace!r}")]
    found = [Finding("handovers", "warn", str(one), one.remedy) for one in obstacles(entries.values())]
    return found or [Finding("handovers", "ok", f"nothing keeps the {len(entries)} workers from it")]


async def _workers(url: str, namespace: str) -> dict[str, WorkerEntry]:
    client = connect(url)
    try:
        return await PolledRoster(client, namespace).refresh()
    finally:
        await client.aclose()


def ray(config: BatonConfig) -> Finding:
    """Checks that Ray is installed, and that its configured address answers."""
    try:
        installed = version("ray")
    except PackageNotFoundError:
        remedy = "pip install 'baton-serve[ray]'; `baton router` and `baton worker` run without it"
        return Finding("ray", "warn", "not installed: `baton serve` needs it", remedy)
    address = config.ray.address
    if not address:
        return Finding("ray", "ok", f"{installed}, a private one is started")
    host, _, number = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host, int(number)), 3).close()
    except (OSError, ValueError) as error:
        return Finding(
            "ray", "fail", f"{address}: {error}", "correct ray.address (HOST:6379), or start the head there"
        )
    return Finding("ray", "ok", f"{installed}, {address} answers")


def packages(config: BatonConfig) -> Finding:
    """Checks that torch is installed, which workers need unless they are paced."""
    if importlib.util.find_spec("torch") is not None:
        return Finding("torch", "ok", version("torch"))
    if config.worker.device.startswith("paced:"):
        return Finding("torch", "skip", "not installed, and a paced worker needs none")
    return Finding(
        "torch", "warn", "not installed: only a router can run here", "pip install 'baton-serve[worker]'"
    )


def model(config: BatonConfig) -> Finding:
    """Checks that the model's files are where the configuration says."""
    try:
        found = resolve_model(config)
    except BatonError as error:
        return Finding("model", "fail", error.message, "correct worker.model (--model)")
    if found and not Path(found).is_dir():
        return Finding("model", "ok", f"{found}, from the Hugging Face hub when a worker starts")
    return Finding("model", "ok", found or f"none is needed: {config.worker.device}")


def certificates(config: BatonConfig) -> list[Finding]:
    """Checks the router's and workers' certificates on this machine: readable, matching their keys, and not near
    their end.
    """
    if not config.tls.enabled:
        return [Finding("tls", "skip", "off: everything speaks plaintext")]
    looked = [_certificate(role, partial(identity_of, files_of(config.tls, role))) for role in ("router", "worker")]
    if config.tls.public_cert:
        looked.append(_certificate("public", partial(public_identity, config)))
    return looked


def _certificate(name: str, read: Callable[[], Identity | None]) -> Finding:
    try:
        identity = read()
    except BatonError as error:
        remedy = "`baton certs make DIR` for development; correct tls.dir, or tls.cert, tls.key and tls.ca"
        return Finding(f"tls {name}", "fail", error.message, remedy)
    assert identity is not None
    left, path = identity.ends - time.time(), identity.files.cert
    state: State = "fail" if left <= 0 else "warn" if left < SOON_S else "ok"
    said = f"{left / DAY_S:.0f} days left" if left > 0 else f"ended {-left / DAY_S:.0f} days ago"
    return Finding(f"tls {name}", state, f"{path}: {said}", "`baton certs renew`, or renew it where it comes from")


def transports() -> list[Finding]:
    """Measures each KV transport between two processes on this machine, with checksums on; returns a finding
    each.
    """
    return asyncio.run(_measured())


async def _measured() -> list[Finding]:
    from baton.bench.kv.transport_bench import TRANSPORTS, TransportBench

    bench, found = TransportBench(PAGE_BYTES, MEASURED_BYTES), []
    try:
        for name in TRANSPORTS:
            try:
                rate = MEASURED_BYTES / min([await bench.handoff(name, bench.pages) for _ in range(3)])
            except BatonError as error:
                remedy = "the log says more; workers go another way, which baton_kv_transport_fallbacks counts"
                found.append(Finding(f"kv by {name}", "warn", error.message, remedy))
                continue
            state = "ok" if rate > SLOWEST[name] else "warn"
            remedy = "busy or throttled cores? `baton bench kv` compares with what the machine can do"
            found.append(Finding(f"kv by {name}", state, f"{rate / 1e9:.2f} GB/s within this machine", remedy))  # type: ignore[arg-type]
    finally:
        await bench.close()
    return found
