"""``baton ratio show|set`` and ``baton role``: the prefill:decode ratio of a running cluster, through its router.

Knows nothing of how a ratio is chosen or a worker changes.
"""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Callable
from datetime import datetime
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from baton.console.cluster.asking import router
from baton.console.output import results, whole
from baton.protos.json import Json

Guard = Callable[[Callable[[], int]], int]
# Seconds for the router's answer: a change of role waits for its drain, and while a worker loads a draft model.
TIMEOUT_S = 1000.0
SHOWN = 12  # entries of the timeline that are shown
_Url = Annotated[str | None, typer.Option(help="The router; default: of the one cluster on this machine")]
_Key = Annotated[str, typer.Option(help="API key made with --admin", envvar="BATON_API_KEY")]
_Force = Annotated[bool, typer.Option("--force", help="Also where it leaves a model without a role's last worker")]
_Json = Annotated[bool, typer.Option("--json", help="What the router said")]


def register(app: typer.Typer, guarded: Guard) -> None:
    """Adds the commands ``ratio`` and ``role`` to the `baton` command."""
    ratio = typer.Typer(no_args_is_help=True, help="The ratio of prefill to decode workers, while they run.")
    app.add_typer(ratio, name="ratio")

    @ratio.command("show")
    def show(url: _Url = None, key: _Key = "", as_json: _Json = False) -> None:
        """Where the cluster is, what the controller says, and what changed lately."""
        raise typer.Exit(guarded(lambda: _tell(call("GET", "/v1/ratio", url, key), as_json)))

    @ratio.command("set")
    def set_ratio(
        to: Annotated[str, typer.Argument(help="PREFILL:DECODE as in 3:1 (pinned), or auto")],
        url: _Url = None,
        key: _Key = "",
        as_json: _Json = False,
        force: _Force = False,
    ) -> None:
        """Form a ratio and pin it, or give the dial to the controller."""
        asked = _forced({"ratio": to}, force)
        raise typer.Exit(guarded(lambda: _tell(call("POST", "/v1/ratio", url, key, asked), as_json)))

    @app.command()
    def role(
        slot: Annotated[str, typer.Argument(help="The worker, as `baton workers` names it")],
        to: Annotated[str, typer.Argument(help="prefill or decode")],
        url: _Url = None,
        key: _Key = "",
        force: _Force = False,
    ) -> None:
        """Change one worker's role while it runs; no request fails by it."""
        raise typer.Exit(guarded(lambda: _change(slot, to, url, key, force)))


def call(method: str, path: str, url: str | None, key: str, body: Json | None = None) -> Json:
    """Calls the router as ``RouterEndpoint.call``, and waits up to TIMEOUT_S, as long as a change of role may
    take.
    """
    return router(url, key).call(method, path, body, TIMEOUT_S)


def _forced(body: Json, force: bool) -> Json:
    """``body``, which a router of the version before takes too where nothing is forced."""
    return body | {"force": True} if force else body


def _change(slot: str, to: str, url: str | None, key: str, force: bool) -> int:
    path = f"/v1/workers/{urllib.parse.quote(slot, safe='')}/role"
    change = call("POST", path, url, key, _forced({"role": to}, force))
    print("{worker}: {before} -> {after} in {seconds:.2f} s; the ratio is pinned".format(**change))
    return 0


def _tell(found: Json, as_json: bool) -> int:
    if as_json:
        print(json.dumps(found, indent=1))
        return 0
    console = results()
    for part in page(found):
        console.print(whole(part) if isinstance(part, Table) else part)
    return 0


def page(found: Json) -> list[Table | str]:
    """Returns the parts that ``ratio show`` prints, from the answer of GET /v1/ratio."""
    parts: list[Table | str] = [f"[bold]{found['prefill']}:{found['decode']}[/] (prefill:decode)"]
    parts += [
        f"[yellow]{one['worker']} becomes a {one['after']} worker, for {one['seconds']:.0f} s now[/]: "
        + escape(one["waits_for"])
        for one in found.get("changing", ())
    ]
    if found["pin"]:
        parts.append(
            f"pinned by {escape(found['pin']['by'] or 'an operator')}; `baton ratio set auto` takes it back"
        )
    advice = found["advice"]
    if advice is None:
        parts.append("the controller says nothing: it is off, or has only begun")
    else:
        parts += _advice(advice)
    if found["timeline"]:
        parts.append(_timeline(found["timeline"][:SHOWN]))
    return parts


def _advice(advice: Json) -> list[Table | str]:
    best = advice["recommended"]
    verdict = f"best now {best[0]}:{best[1]}" if best else "no recommendation"
    parts: list[Table | str] = [f"controller ({advice['mode']}): {verdict}; {escape(advice['reason'])}"]
    if advice["withheld"]:
        parts.append(f"[yellow]advice withheld: {escape(advice['withheld'])}[/]")
    error = advice["twin_error"]
    off = {name: error[name] for name in ("ttft", "tpot", "throughput") if error[name] is not None}
    if off:
        said = ", ".join(f"{name} {value:+.0%}" for name, value in off.items())
        parts.append(f"twin error over {error['samples']} answers: {said} (bound {error['bound']:.0%})")
    if advice["goodput_by_ratio"]:
        parts.append(_dial(advice))
    return parts


def _dial(advice: Json) -> Table:
    table = Table("ratio", "goodput/s", "SLOs met", "TTFT p99", "TPOT p99", "", box=None)
    low, high = advice["plateau"]
    for point in advice["goodput_by_ratio"]:
        notes = ["you are here"] if point["prefill"] == advice["prefill"] else []
        notes += ["plateau"] if low <= point["prefill"] <= high else []
        table.add_row(
            f"{point['prefill']}:{point['decode']}",
            f"{point['goodput']:.2f}",
            f"{point['attainment']:.1%}",
            f"{point['ttft_p99_s']:.2f} s",
            f"{point['tpot_p99_s'] * 1e3:.0f} ms",
            ", ".join(notes),
        )
    return table


def _timeline(changes: list[Json]) -> Table:
    table = Table("at", "what", "from", "to", "seconds", "by", "why", box=None)
    for change in changes:
        at = datetime.fromtimestamp(change["at"]).strftime("%H:%M:%S")
        before, after = (f"{change[k][0]}:{change[k][1]}" for k in ("before", "after"))
        seconds = f"{change['seconds']:.2f}" if change["seconds"] else ""
        table.add_row(at, change["kind"], before, after, seconds, escape(change["by"]), escape(change["reason"]))
    return table
