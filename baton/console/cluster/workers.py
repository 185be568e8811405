"""``baton workers``: the workers of a running cluster, and their load.

Knows nothing of routers; it reads the membership in Redis as a router does.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pydantic
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from baton.cluster.config import BatonConfig, ClusterConfig
from baton.cluster.departures import Departure, Departures
from baton.cluster.membership import PolledRoster, WorkerEntry, connect
from baton.console.cluster.ranks import by_host, widths_in_words
from baton.console.output import print_table
from baton.launch.redis_server import check_redis
from baton.protos import version
from baton.protos.adapter_id import name_of
from baton.protos.errors import ConfigError, NoWorker
from baton.protos.nouns import WorkerInfo
from baton.router.observe.handovers import obstacles

RUN_DIR = "BATON_CLUSTER__RUN_DIR"
ADAPTERS_SHOWN = 3  # names of a worker's adapters in its row
COLUMNS = (
    "worker",
    "role",
    "state",
    "model",
    "adapters",
    "ranks",
    "version",
    "address",
    "running",
    "waiting",
    "pages free",
    "cached",
    "beat",
)


def show_workers(redis_url: str | None, namespace: str) -> int:
    """Prints the tables of workers, links and recent departures; returns 0. Without a URL, of the one cluster on
    this machine.

    Raises NoWorker if the namespace has no worker, ConfigError if no Redis answers.
    """
    url, namespace = meeting_place(redis_url, namespace)
    entries, departed = asyncio.run(_look(url, namespace))
    if departed:
        print_table(departed_table(departed, time.time()))
    if not entries:
        raise NoWorker(f"no worker is in the namespace {namespace!r} of this Redis; is --namespace right?")
    print_table(table(entries))
    for further in (hosts_table(entries), links_table(entries), obstacles_table(entries)):
        if further is not None:
            print_table(further)
    return 0


def meeting_place(redis_url: str | None, namespace: str) -> tuple[str, str]:
    """Returns (Redis URL, namespace): those that were given, else those of the cluster that ``local_config`` finds.

    Raises ConfigError if no Redis answers.
    """
    if redis_url:
        check_redis(redis_url)
        return redis_url, namespace or ClusterConfig().namespace
    config = local_config(Path(tempfile.gettempdir()))
    return config.redis.url, namespace or config.cluster.namespace


def local_config(folder: Path) -> BatonConfig:
    """Returns the configuration of the cluster that runs on this machine, and names the cluster on stderr.

    It is in the run directory that the environment names (in a router's pod), else in a directory baton-* in
    ``folder``. Raises ConfigError if none or several run.
    """
    named = os.environ.get(RUN_DIR)
    found = _running([Path(named, "config.json")] if named else sorted(folder.glob("baton-*/config.json")))
    if not found:
        where = f"in {named}, as {RUN_DIR} says" if named else f"in {folder}/baton-*"
        raise ConfigError(
            f"no cluster runs {where}: start one with `baton serve`, or name one elsewhere: --url URL or --redis "
            f"URL, as `--help` says, and {RUN_DIR}=DIR one that was started with --run-dir DIR",
            "redis.url",
        )
    listed = "; ".join(f"{RUN_DIR}={run_dir} ({_described(config)})" for run_dir, config in found.items())
    if len(found) > 1:
        raise ConfigError(f"{len(found)} clusters run on this machine, say which in the environment: {listed}", "")
    Console(stderr=True, highlight=False).print(f"[dim]cluster: {escape(listed)}[/]", soft_wrap=True)
    return next(iter(found.values()))


def _running(files: Sequence[Path]) -> dict[str, BatonConfig]:
    """Run directory -> config of those whose Redis answers; of several of one cluster, the latest.

    A router that was killed leaves its directory, and one that couldn't start may.
    """
    found = dict[tuple[str, str], tuple[float, str, BatonConfig]]()
    for path in files:
        try:
            since, config = path.stat().st_mtime, BatonConfig.model_validate_json(path.read_bytes())
            check_redis(config.redis.url)
        except (OSError, pydantic.ValidationError, ConfigError):
            continue  # of a run that is over
        cluster = config.redis.url, config.cluster.namespace
        if cluster not in found or found[cluster][0] < since:
            found[cluster] = since, str(path.parent), config
    return {run_dir: config for _, run_dir, config in found.values()}


def _described(config: BatonConfig) -> str:
    model = config.worker.model_name or Path(config.worker.model).name or config.worker.device
    return f"{model}, router on port {config.router.port}"


def table(entries: dict[str, WorkerEntry]) -> Table:
    """Returns a terminal table with a row per worker, sorted by id; with a column of adapters, or of ranks, if any
    worker has some.
    """
    shown = Table(box=None)
    adapted = any(entry.info.adapters for entry in entries.values())
    ranked = any(entry.info.widths for entry in entries.values())
    absent = [name for name, there in (("adapters", adapted), ("ranks", ranked)) if not there]
    for column in (c for c in COLUMNS if c not in absent):
        shown.add_column(column, no_wrap=True)
    for name, (info, load, age) in sorted(entries.items()):
        counts = (load.running, load.waiting, load.free_pages, load.cached_pages)
        shown.add_row(
            name,
            info.role,
            info.state,
            info.model_id,
            *((adapters_of(info),) if adapted else ()),
            *((widths_in_words(info.widths) or "1",) if ranked else ()),
            version_of(info),
            info.address,
            *map(str, counts),
            f"{age:.1f} s ago",
        )
    return shown


def adapters_of(info: WorkerInfo) -> str:
    """Returns the names of the worker's adapters, at most ADAPTERS_SHOWN, and how many more there are."""
    names = [escape(name_of(adapter)) for adapter in info.adapters]
    more = len(names) - ADAPTERS_SHOWN
    return ", ".join(names[:ADAPTERS_SHOWN]) + (f" and {more} more" if more > 0 else "")


def version_of(info: WorkerInfo) -> str:
    """Returns the worker's build, and its protocol if it differs from ours; in red if the two can't work
    together.
    """
    build = escape(info.version or "?")
    if info.protocol == version.PROTOCOL:
        return build
    said = f"{build}, protocol {escape(info.protocol)}"
    return said if version.runs_with(info.protocol) else f"[red]{said}: refused[/]"


def hosts_table(entries: dict[str, WorkerEntry]) -> Table | None:
    """Returns a terminal table of the hosts of those workers whose ranks run on several; None if there are none."""
    shown = Table("ranks of", "numbers", "host", box=None)
    for name, (info, _, _age) in sorted(entries.items()):
        if any(info.rank_hosts):
            own = info.address.rpartition(":")[0]
            for host, ranks in by_host([host or own for host in info.rank_hosts]):
                shown.add_row(name, ranks, host)
    return shown if shown.row_count else None


def links_table(entries: dict[str, WorkerEntry]) -> Table | None:
    """Returns a terminal table of measured KV links between workers; None if there are none."""
    shown = Table("KV from", "to", "by", "GB/s", "fixed", "note", box=None)
    for name, (_, load, _age) in sorted(entries.items()):
        for link in sorted(load.kv_links, key=lambda link: link.peer):
            note = f"[yellow]fallback: {escape(link.fallback)}[/]" if link.fallback else ""
            speed, fixed = f"{link.bytes_per_s / 1e9:.2f}", f"{link.fixed_s * 1e3:.2f} ms"
            shown.add_row(name, link.peer, link.transport, speed, fixed, note)
    return shown if shown.row_count else None


def obstacles_table(entries: dict[str, WorkerEntry]) -> Table | None:
    """Returns a terminal table of workers that can't hand KV over to one another; None if all can."""
    shown = Table("can't hand over", "to", "because", "what to do", box=None)
    for one in obstacles(entries.values()):
        names = one.sender or "no prefill worker", one.receiver or "any decode worker"
        shown.add_row(*names, f"[yellow]{escape(one.why)}[/]", one.remedy)
    return shown if shown.row_count else None


def departed_table(departed: Sequence[Departure], now: float) -> Table:
    """Returns a terminal table of the workers that left in the last hour and why, newest first; ``now`` is Unix
    seconds.
    """
    shown = Table("left", "role", "cause", "what happened", "when", box=None)
    for gone in departed:
        cause = gone.cause if gone.cause == "drained" else f"[red]{escape(gone.cause)}[/]"
        shown.add_row(gone.worker_id, gone.role, cause, escape(gone.detail), f"{now - gone.at:.0f} s ago")
    return shown


async def _look(url: str, namespace: str) -> tuple[dict[str, WorkerEntry], tuple[Departure, ...]]:
    client = connect(url)
    try:
        return await PolledRoster(client, namespace).refresh(), await Departures(client, namespace).recent()
    finally:
        await client.aclose()
