"""``baton workers``: who is in a running cluster, and how busy.

Knows nothing of routers; it reads the membership in Redis as a router does.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path

import pydantic
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from baton.cluster.config import BatonConfig, ClusterConfig
from baton.cluster.membership import Entry, Roster, connect
from baton.deploy.redis_server import check_redis
from baton.protos import version
from baton.protos.errors import ConfigError
from baton.protos.nouns import WorkerInfo

RUN_DIR = "BATON_CLUSTER__RUN_DIR"
COLUMNS = (
    "worker",
    "role",
    "state",
    "model",
    "version",
    "address",
    "running",
    "waiting",
    "pages free",
    "cached",
    "beat",
)


def show_workers(redis_url: str | None, namespace: str) -> int:
    """Print the table. Without a URL it is the newest cluster that runs on this machine."""
    url, namespace = meeting_place(redis_url, namespace)
    if redis_url:
        check_redis(redis_url)
    console, entries = Console(highlight=False, width=140), asyncio.run(_look(url, namespace))
    console.print(table(entries))
    if (links := links_table(entries)) is not None:
        console.print(links)
    return 0


def meeting_place(redis_url: str | None, namespace: str) -> tuple[str, str]:
    """Redis and namespace: those that were named, else those of the newest cluster on this machine."""
    if redis_url:
        return redis_url, namespace or ClusterConfig().namespace
    config = newest_config(Path(tempfile.gettempdir()))
    return config.redis.url, namespace or config.cluster.namespace


def newest_config(folder: Path) -> BatonConfig:
    """The config of the run that started last, in a folder of ``folder`` or where the environment says (a pod's
    router). Raises ConfigError when none runs here.
    """
    found = [*folder.glob("baton-*/config.json")]
    if named := os.environ.get(RUN_DIR):
        found += Path(named).glob("config.json")
    for path in sorted(found, key=lambda p: p.stat().st_mtime, reverse=True):
        try:
            config = BatonConfig.model_validate_json(path.read_bytes())
            check_redis(config.redis.url)
        except (OSError, pydantic.ValidationError, ConfigError):
            continue  # of a run that is over
        return config
    raise ConfigError(
        "no cluster runs on this machine: start one with `baton serve`, or pass --redis URL", "redis.url"
    )


def table(entries: dict[str, Entry]) -> Table:
    """One row per worker, by id."""
    shown = Table(box=None)
    for column in COLUMNS:
        shown.add_column(column, no_wrap=True)
    for name, (info, load, age) in sorted(entries.items()):
        counts = (load.running, load.waiting, load.free_pages, load.cached_pages)
        shown.add_row(
            name,
            info.role,
            info.state,
            info.model_id,
            version_of(info),
            info.address,
            *map(str, counts),
            f"{age:.1f} s ago",
        )
    return shown


def version_of(info: WorkerInfo) -> str:
    """Its build, and the protocol where that is not ours; in red where the two of us would refuse each other."""
    build = escape(info.version or "?")
    if info.protocol == version.PROTOCOL:
        return build
    said = f"{build}, protocol {escape(info.protocol)}"
    return said if version.runs_with(info.protocol) else f"[red]{said}: refused[/]"


def links_table(entries: dict[str, Entry]) -> Table | None:
    """How KV gets from worker to worker, one row per measured pair; None before the first."""
    shown = Table("KV from", "to", "by", "GB/s", "fixed", "note", box=None)
    for name, (_, load, _age) in sorted(entries.items()):
        for link in sorted(load.kv_links, key=lambda link: link.peer):
            note = f"[yellow]fallback: {escape(link.fallback)}[/]" if link.fallback else ""
            speed, fixed = f"{link.bytes_per_s / 1e9:.2f}", f"{link.fixed_s * 1e3:.2f} ms"
            shown.add_row(name, link.peer, link.transport, speed, fixed, note)
    return shown if shown.row_count else None


async def _look(url: str, namespace: str) -> dict[str, Entry]:
    client = connect(url)
    try:
        return await Roster(client, namespace).refresh()
    finally:
        await client.aclose()
