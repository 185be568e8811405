"""``baton top``: the cluster in a terminal, live; the same snapshot that the dashboard shows.

Knows nothing of how figures are computed: it asks a router for /v1/cluster and draws the answer.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from baton.console.cluster.asking import router
from baton.protos.errors import BatonError
from baton.protos.json import Json

BAR = 12  # characters of a bar
WIDE = 120  # columns from which on all of a table's columns fit
RECENT = 8  # recent requests that are shown
OBSTACLES = 3  # lines of workers that can't hand over
ADAPTERS = 8  # rows of adapters
CHANGES = 5  # decisions of the controller that are shown
STATIONS = (("queue", "bright_black"), ("prefill_queue", "white"), ("prefill", "blue"), ("transfer", "yellow"))
NONE = "–"
UNITS = (("", 1.0), ("k", 1e3), ("M", 1e6), ("G", 1e9))  # of numbers, of which three digits are shown


def run(url: str | None, key: str, every_s: float, once: bool, as_json: bool) -> int:
    """Shows the cluster every ``every_s`` seconds until Ctrl-C; with ``once`` or ``as_json`` prints it once and
    returns 0.

    Raises ConfigError, Unauthenticated, Forbidden.
    """
    look = partial(router(url, key).call, "GET", "/v1/cluster")
    if as_json:
        sys.stdout.write(json.dumps(look(), indent=1) + "\n")
        return 0
    console = Console(highlight=False)
    if once:
        console.print(page(look(), console.width))
        return 0
    with Live(page(look(), console.width), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(every_s)
            live.update(_latest(look, console.width), refresh=True)


def page(found: Json, width: int) -> RenderableType:
    """Returns a page for a terminal of ``width`` columns, from a /v1/cluster snapshot."""
    pools = [_pool(found, role) for role in ("prefill", "decode") if found["pools"][role]["workers"]]
    parts: list[RenderableType] = [_head(found), Columns(pools, expand=True), _classes(found, width >= WIDE)]
    if found.get("adapters"):  # a router of an earlier build has none
        parts.append(_adapters(found["adapters"]))
    if found["advice"] or found["pin"]:
        parts.append(_advice(found))
    if found["recent"]:
        parts.append(_recent(found["recent"][:RECENT], width >= WIDE))
    if found["decisions"]:
        parts.append(_changes(found))
    return Group(*parts)


# ---- parts -------------------------------------------------------------------------------------------


def _head(found: Json) -> Text:
    t, pools, router = found["totals"], found["pools"], found["router"]
    waiting = sum(queue["waiting"] for queue in found["queues"])
    text = Text.assemble(
        ("Baton ", "bold"), f"{', '.join(n.rpartition('/')[2] for n in router['model'].split(', '))}  ",
        (f"{pools['prefill']['ready']}P{pools['decode']['ready']}D", "bold"), f"  up {_span(router['uptime_s'])}\n",
        ("goodput ", "dim"), f"{_number(t['goodput_per_s'])}/s ({_percent(t['attainment'])} met)  ",
        ("requests ", "dim"), f"{_number(t['requests_per_s'])}/s  ", ("waiting ", "dim"), f"{waiting}  ",
        ("refused ", "dim"), f"{_number(t['refused_per_s'])}/s  ",
        ("tokens ", "dim"), f"{_number(t['input_tokens_per_s'])}/s in, {_number(t['output_tokens_per_s'])}/s out  ",
        ("hits ", "dim"), f"{_percent(t['hit_rate'])} of {_percent(t['hit_rate_best'])} possible",
    )  # fmt: skip
    if t["cost"]:
        text.append(f"  ${_number(t['cost']['per_million'])} per 1M tokens")
    away_s = found.get("redis", {}).get("away_s")  # a router of an earlier build says nothing of it
    if away_s is not None:
        text.append(f"\nRedis is away for {_span(away_s)}: workers are shown as last seen", "bold red")
    for one in found.get("obstacles", ())[:OBSTACLES]:
        text.append(f"\n{_obstacle(one)}", "yellow")
    return text


def _obstacle(one: Json) -> str:
    sender, receiver = one["sender"] or "no prefill worker", one["receiver"] or "any decode worker"
    return f"{sender} can't hand over to {receiver}: {one['why']}"


def _pool(found: Json, role: str) -> Panel:
    table = Table(box=None, pad_edge=False, expand=True)
    for name in ("worker", "KV", "full", "run", "wait", "tok/s"):
        table.add_column(name, no_wrap=True, justify="left" if name in ("worker", "KV", "full") else "right")
    for worker in (w for w in found["workers"] if w["role"] == role):
        away = _away(worker)
        rate = worker["prefill_tokens_per_s"] + worker["decode_tokens_per_s"]
        table.add_row(
            Text(worker["id"] + (f" ({away})" if away else ""), style="yellow" if away else ""),
            _gauge(worker["kv_usage"]),
            _gauge(worker["full"]),
            str(worker["running"]),
            str(worker["waiting"]),
            _number(rate),
        )
    return Panel(table, title=role, title_align="left", border_style="blue" if role == "prefill" else "green")


def _classes(found: Json, wide: bool) -> Table:
    table = Table(box=None, expand=True, pad_edge=False)
    table.add_column("class", no_wrap=True)
    columns = [c for c in CLASS_COLUMNS if wide or c[0] not in ONLY_WIDE]
    for name, _ in columns:
        table.add_column(name, no_wrap=True, justify="right")
    for one in found["classes"]:
        table.add_row(one["name"], *(value(one) for _, value in columns))
    return table


def _adapters(adapters: list[Json]) -> Table:
    """The adapters that most workers hold, with their content; of many how many more there are."""
    table = Table(box=None, pad_edge=False)
    for name in ("adapter", "content", "tenant", "workers", ""):
        table.add_column(name, no_wrap=True, justify="right" if name == "workers" else "left")
    ranked = sorted(adapters, key=lambda one: (-len(one["workers"]), one["name"]))
    for one in ranked[:ADAPTERS]:
        content = one["adapter_id"].partition("@")[2] or "not read yet"
        row = (one["name"], content, one["tenant"], str(len(one["workers"])), "pinned" if one["pinned"] else "")
        table.add_row(*map(escape, row))
    if len(ranked) > ADAPTERS:
        table.add_row(f"and {len(ranked) - ADAPTERS} more")
    return table


def _advice(found: Json) -> Text:
    advice, pin = found["advice"], found["pin"]
    text = Text("\nratio ", style="dim")
    if pin:
        text.append(f"pinned to {pin['prefill']}:{pin['decode']}  ", style="bold not dim")
    if advice:
        best = advice["recommended"]  # a change to it is advised only where the reason says so
        said = f"best now {best[0]}:{best[1]}; " if best else ""
        text.append(f"{advice['mode']}: {said}{advice['withheld'] or advice['reason']}", style="not dim")
    return text


def _recent(requests: list[Json], wide: bool) -> Table:
    """Ids are whole, so that they can be given to ``baton explain``; where there is no room for bars, these go."""
    longest = max((r["ttft_s"] or 0.0 for r in requests), default=0.0) or 1.0
    table = Table(box=None, pad_edge=False)
    for name in ("request", "class", *(["to the first token"] if wide else []), "TTFT", "tokens", "end"):
        table.add_column(name, no_wrap=True, justify="right" if name in ("TTFT", "tokens") else "left")
    for one in requests:
        bar = [_stations(one["stations"], longest)] if wide else []
        style = "red" if one["verdict"] == "missed" else ""
        table.add_row(
            one["request_id"], one["context_class"], *bar, Text(_seconds(one["ttft_s"]), style=style),
            str(one["output_tokens"]), one["outcome"],
        )  # fmt: skip
    return table


def _stations(seconds: dict[str, float], longest: float) -> Text:
    bar = Text()
    for station, colour in STATIONS:
        bar.append("█" * round(40 * seconds.get(station, 0.0) / longest), style=colour)
    return bar


def _changes(found: Json) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    for change in found["decisions"][:CHANGES]:
        before, after = (":".join(map(str, change[k])) for k in ("before", "after"))
        move = after if before == after else f"{before} → {after}"
        table.add_row(f"{_span(found['at'] - change['at'])} ago", change["kind"], move, change["reason"])
    return table


# ---- figures -----------------------------------------------------------------------------------------


def _gauge(share: float | None) -> Text:
    if share is None:
        return Text(NONE, style="dim")
    filled = round(BAR * min(1.0, max(0.0, share)))
    style = "red" if share > 0.97 else "yellow" if share > 0.9 else "cyan"
    return Text.assemble(("█" * filled, style), ("░" * (BAR - filled), "dim"), f" {share:4.0%}")


def _away(worker: Json) -> str:
    if not worker["up"]:
        return "unreachable"
    if worker["hold"]:
        return {"drain": "drained", "eject": "ejected"}[worker["hold"]["how"]]
    return "" if worker["state"] == "ready" else worker["state"]


def _time(one: Json, name: str, which: str) -> str:
    found = one["seconds"].get(name)
    return _seconds(found[which]) if found else NONE


def _met(share: float | None) -> Text:
    style = "" if share is None or share >= 0.99 else "yellow" if share >= 0.9 else "red"
    return Text(_percent(share), style=style)


def _seconds(value: float | None) -> str:
    if value is None:
        return NONE
    if value < 0.9995:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.3g} s" if value < 999.5 else f"{value:.0f} s"


def _percent(share: float | None) -> str:
    return NONE if share is None else f"{share:.0%}"


def _number(value: float | None) -> str:
    if value is None:
        return NONE
    unit, size = next(((u, s) for u, s in UNITS if value < 999.5 * s), UNITS[-1])
    return f"{value / size:.3g}{unit}"


def _span(seconds: float) -> str:
    if seconds < 90:
        return f"{max(0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _timed(name: str, which: str) -> Callable[[Json], str]:
    return lambda one: _time(one, name, which)


CLASS_COLUMNS: tuple[tuple[str, Callable[[Json], str | Text]], ...] = (
    ("req/s", lambda one: _number(one["requests_per_s"])),
    ("good/s", lambda one: _number(one["goodput_per_s"])),
    ("met", lambda one: _met(one["attainment"])),
    ("TTFT p50", _timed("ttft", "p50")),
    ("TTFT p95", _timed("ttft", "p95")),
    ("p99", _timed("ttft", "p99")),
    ("TPOT p50", _timed("tpot", "p50")),
    ("p99 ", _timed("tpot", "p99")),
    ("queue", _timed("queue", "p50")),
    ("prefill", _timed("prefill", "p50")),
    ("transfer", _timed("transfer", "p50")),
    ("wait", lambda one: str(one["waiting"])),
    ("refused", lambda one: str(one["refused"])),
)
ONLY_WIDE = ("TTFT p95", "queue", "prefill", "transfer")


def _latest(look: Callable[[], Json], width: int) -> RenderableType:
    """The page, or why there is none now: a router that restarts is waited for."""
    try:
        return page(look(), width)
    except BatonError as error:
        return Text(error.message, style="red")
