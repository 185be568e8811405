"""``baton adapters list|add|remove|apply``: the adapters of a running cluster, through its router.

Knows nothing of how an adapter is loaded; the router answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from baton.console.cluster.asking import router
from baton.protos.errors import BatonError, ConfigError

Guard = Callable[[Callable[[], int]], int]
TIMEOUT_S = 120.0
BY_APPLY = "apply"
COLUMNS = ("adapter", "model", "root", "content", "tenant", "pinned", "workers", "by", "since")
_Url = Annotated[str | None, typer.Option(help="The router; default: of the one cluster on this machine")]
_Key = Annotated[str, typer.Option(help="API key made with --admin", envvar="BATON_API_KEY")]
_Name = Annotated[str, typer.Argument(help="The name that clients say as model")]


class WantedAdapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Describes one adapter of a file for ``apply``; fields as of ``add``."""

    path: str
    base_model_name: str = ""
    pinned: bool = False
    tenant: str = ""


def register(app: typer.Typer, guarded: Guard) -> None:
    """Adds them to the `baton` command."""
    adapters = typer.Typer(no_args_is_help=True, help="LoRA adapters of a running cluster.")
    app.add_typer(adapters, name="adapters")

    @adapters.command("list")
    def show(
        url: _Url = None,
        key: _Key = "",
        as_json: Annotated[bool, typer.Option("--json", help="What the router said")] = False,
    ) -> None:
        """Show the adapters that are served, and which workers hold them."""
        raise typer.Exit(guarded(lambda: _show(url, key, as_json)))

    @adapters.command("add")
    def add(
        name: _Name,
        path: Annotated[str, typer.Argument(help="Its folder, beneath adapters.root")],
        in_place: Annotated[bool, typer.Option("--in-place", help="Replace another one of that name")] = False,
        pinned: Annotated[bool, typer.Option("--pinned", help="Workers never evict it")] = False,
        tenant: Annotated[str, typer.Option(help="Whose keys alone may use it; default: everybody's")] = "",
        model: Annotated[str, typer.Option(help="The model it is for, where several are served")] = "",
        url: _Url = None,
        key: _Key = "",
    ) -> None:
        """Load an adapter on every worker and serve it; nothing restarts."""
        wanted = WantedAdapter(path, model, pinned, tenant)
        raise typer.Exit(guarded(lambda: _add(name, wanted, in_place, url, key)))

    @adapters.command("remove")
    def remove(name: _Name, url: _Url = None, key: _Key = "") -> None:
        """Serve an adapter no more; requests in flight end on it."""
        raise typer.Exit(guarded(lambda: _remove(name, url, key)))

    @adapters.command("apply")
    def apply(
        file: Annotated[Path, typer.Argument(help='JSON: {"NAME": {"path": "FOLDER"}, …}')],
        prune: Annotated[bool, typer.Option("--prune", help="Remove those that the file doesn't name")] = False,
        url: _Url = None,
        key: _Key = "",
    ) -> None:
        """Make what is served what a file says: load what is missing, replace what lies elsewhere."""
        raise typer.Exit(guarded(lambda: _apply(file, prune, url, key)))


def _show(url: str | None, key: str, as_json: bool) -> int:
    found = router(url, key).call("GET", "/v1/adapters", timeout_s=TIMEOUT_S)
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        Console(highlight=False, width=140).print(table(found["data"]))
    return 0


def table(entries: list[dict[str, Any]]) -> Table:
    """Returns a table of one row per adapter."""
    shown = Table(box=None)
    for column in COLUMNS:
        shown.add_column(column, no_wrap=True)
    for entry in entries:
        content = entry["adapter_id"].partition("@")[2] or "not read yet"
        since = datetime.fromtimestamp(entry["created"]).strftime("%F %T") if entry["created"] else ""
        holders, pinned = ", ".join(entry["workers"]) or "none", "yes" if entry["pinned"] else ""
        row = (entry["id"], entry["parent"], entry["root"], content, entry["tenant"], pinned, holders, entry["by"])
        shown.add_row(*row, since)
    return shown


def _add(name: str, wanted: WantedAdapter, in_place: bool, url: str | None, key: str) -> int:
    body = {
        "lora_name": name,
        "lora_path": wanted.path,
        "load_inplace": in_place,
        "pinned": wanted.pinned,
        "tenant": wanted.tenant,
        "base_model_name": wanted.base_model_name or None,
    }
    found = router(url, key).call("POST", "/v1/load_lora_adapter", body, TIMEOUT_S)
    print(f"{found['adapter_id']} is served, on {', '.join(found['workers']) or 'no worker yet'}")
    return 0


def _remove(name: str, url: str | None, key: str) -> int:
    router(url, key).call("POST", "/v1/unload_lora_adapter", {"lora_name": name}, TIMEOUT_S)
    print(f"{name} is served no more; requests in flight end on it")
    return 0


def _apply(file: Path, prune: bool, url: str | None, key: str) -> int:
    """Carries a file's difference out, each adapter by itself; fails at the end where any did."""
    wanted = read_wanted(file)
    served = {e["id"]: e for e in router(url, key).call("GET", "/v1/adapters", timeout_s=TIMEOUT_S)["data"]}
    adding, leaving = difference(wanted, served)
    failed: list[str] = []
    for name in adding:
        _each(failed, name, lambda name=name: _add(name, wanted[name], name in served, url, key))  # type: ignore[misc]
    for name in leaving if prune else ():
        _each(failed, name, lambda name=name: _remove(name, url, key))  # type: ignore[misc]
    if not adding and not (prune and leaving):
        print("nothing to change")
    if failed:
        raise ConfigError("; ".join(failed), "adapters")
    return 0


def _each(failed: list[str], name: str, act: Callable[[], int]) -> None:
    try:
        act()
    except BatonError as error:
        failed.append(f"{name}: {error.message}")


def read_wanted(file: Path) -> dict[str, WantedAdapter]:
    """Returns the adapters that a file names. Raises ConfigError."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, WantedAdapter])
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{file}: {error}", "file") from None


def difference(
    wanted: Mapping[str, WantedAdapter], served: Mapping[str, Mapping[str, Any]]
) -> tuple[list[str], list[str]]:
    """Returns the names to load (new, or served from elsewhere or otherwise), and those that are not wanted."""

    def is_served(name: str, want: WantedAdapter) -> bool:
        entry = served.get(name)
        return entry is not None and (entry["root"], entry["pinned"], entry["tenant"]) == (
            want.path, want.pinned, want.tenant,
        )  # fmt: skip

    adding = [name for name, want in wanted.items() if not is_served(name, want)]
    leaving = [name for name, entry in served.items() if name not in wanted and entry["by"] != "config"]
    return adding, leaving
