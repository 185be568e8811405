"""``baton adapters list|add|remove|apply|fetch``: the LoRA adapters of a running cluster, through its router.

Knows nothing of how an adapter is loaded.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Annotated

import msgspec
import typer
from rich.markup import escape
from rich.table import Table

from baton.cluster.adapters import BY_CONFIG
from baton.console.cluster.asking import router
from baton.console.output import print_table
from baton.protos.errors import BatonError, CheckpointError, ConfigError, InvalidRequest, Unavailable
from baton.protos.json import Json
from baton.router.dispatch.adapters.control import require_path

Guard = Callable[[Callable[[], int]], int]
TIMEOUT_S = 120.0  # seconds for the router's answer, because every worker may have to load
AGAIN_S = 1.0  # seconds until a router that doesn't answer yet is asked again
FILES = ("adapter_config.json", "adapter_model.safetensors")
COLUMNS = ("adapter", "model", "root", "content", "tenant", "pinned", "workers", "by", "since")
_Url = Annotated[str | None, typer.Option(help="The router; default: of the one cluster on this machine")]
_Key = Annotated[str, typer.Option(help="API key made with --admin", envvar="BATON_API_KEY")]
_Name = Annotated[str, typer.Argument(help="The name that clients say as model")]


class WantedAdapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Describes one adapter in a file for ``apply``, with the fields of ``add``; ``hub`` is a Hugging Face id for
    ``fetch``.

    ``path`` is the adapter's folder, relative to adapters.root.
    """

    path: str
    hub: str = ""
    base_model_name: str = ""
    pinned: bool = False
    tenant: str = ""


def register(app: typer.Typer, guarded: Guard) -> None:
    """Adds the command group ``adapters`` to the `baton` command."""
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
        wanted = WantedAdapter(path, "", model, pinned, tenant)
        raise typer.Exit(guarded(lambda: _add(name, wanted, in_place, url, key)))

    @adapters.command("remove")
    def remove(name: _Name, url: _Url = None, key: _Key = "") -> None:
        """Serve an adapter no more; requests in flight end on it."""
        raise typer.Exit(guarded(lambda: _remove(name, url, key)))

    @adapters.command("apply")
    def apply(
        file: Annotated[Path, typer.Argument(help='JSON: {"NAME": {"path": "FOLDER"}, …}')],
        prune: Annotated[bool, typer.Option("--prune", help="Remove those that the file doesn't name")] = False,
        wait: Annotated[
            float, typer.Option(min=0, help="Seconds for a router and workers that are starting")
        ] = 0.0,
        url: _Url = None,
        key: _Key = "",
    ) -> None:
        """Make what is served what a file says: load what is missing, replace what lies elsewhere."""
        raise typer.Exit(guarded(lambda: _apply_file(file, prune, url, key, wait)))

    @adapters.command("fetch")
    def fetch(
        file: Annotated[Path, typer.Argument(help='JSON as of apply, with "hub": "ORG/NAME" where it is fetched')],
        into: Annotated[Path, typer.Argument(help="The folder that is adapters.root")],
    ) -> None:
        """Fetch adapters from the Hugging Face hub to where they are loaded from; what is there stays."""
        raise typer.Exit(guarded(lambda: _fetch(file, into)))


def _show(url: str | None, key: str, as_json: bool) -> int:
    found = router(url, key).call("GET", "/v1/adapters", timeout_s=TIMEOUT_S)
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        print_table(table(found["data"]))
    return 0


def table(entries: list[Json]) -> Table:
    """Returns a terminal table with a row per adapter, from the entries of GET /v1/adapters."""
    shown = Table(box=None)
    for column in COLUMNS:
        shown.add_column(column, no_wrap=True)
    for entry in entries:
        content = entry["adapter_id"].partition("@")[2] or "not read yet"
        since = datetime.fromtimestamp(entry["created"]).strftime("%F %T") if entry["created"] else ""
        holders, pinned = ", ".join(entry["workers"]) or "none", "yes" if entry["pinned"] else ""
        row = (entry["id"], entry["parent"], entry["root"], content, entry["tenant"], pinned, holders, entry["by"])
        shown.add_row(*map(escape, row), since)
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


def _apply(wanted: Mapping[str, WantedAdapter], prune: bool, url: str | None, key: str) -> int:
    """Carries a file's difference out, each adapter by itself; fails at the end where any did.

    Raises Unavailable where trying again may help, else InvalidRequest.
    """
    served = {e["id"]: e for e in router(url, key).call("GET", "/v1/adapters", timeout_s=TIMEOUT_S)["data"]}
    adding, leaving = difference(wanted, served)
    acts = {name: partial(_add, name, wanted[name], name in served, url, key) for name in adding}
    acts |= {name: partial(_remove, name, url, key) for name in leaving if prune}
    failed = {name: error for name, act in acts.items() if (error := _failure(act)) is not None}
    if not acts:
        print("nothing to change")
    if failed:
        kind = Unavailable if any(isinstance(e, Unavailable) for e in failed.values()) else InvalidRequest
        raise kind("; ".join(f"{name}: {error.message}" for name, error in failed.items()), "adapters")
    return 0


def _failure(act: Callable[[], int]) -> BatonError | None:
    try:
        act()
    except BatonError as error:
        return error
    return None


def _apply_file(file: Path, prune: bool, url: str | None, key: str, wait_s: float) -> int:
    wanted = read_wanted(file)
    return _patiently(partial(_apply, wanted, prune, url, key), wait_s)


def _patiently(act: Callable[[], int], wait_s: float) -> int:
    """Does it again and again for ``wait_s`` seconds while nobody answers, or nobody is there to do it."""
    until = time.monotonic() + wait_s
    while True:
        try:
            return act()
        except (ConfigError, Unavailable):
            if time.monotonic() >= until:
                raise
        time.sleep(AGAIN_S)


def _fetch(file: Path, into: Path) -> int:
    """Fetches each adapter that has a hub id and isn't there.

    Raises CheckpointError, ConfigError, AdapterRefused.
    """
    for name, want in read_wanted(file).items():
        folder = into / want.path
        if not want.hub or all((folder / part).is_file() for part in FILES):
            continue
        require_path(want.path)
        fetch_from_hub(want.hub, folder)
        print(f"{name}: fetched {want.hub} to {folder}")
    return 0


def fetch_from_hub(hub_id: str, folder: Path) -> None:
    """Downloads an adapter's two files from the Hugging Face hub; ``folder`` appears once both are complete.

    Raises CheckpointError.
    """
    from huggingface_hub import snapshot_download

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetching-") as partly:
        try:
            snapshot_download(hub_id, allow_patterns=list(FILES), local_dir=partly)
        except Exception as error:  # the hub's errors share no base class
            raise CheckpointError(f"the adapter {hub_id} can't be fetched: {error}", "hub") from None
        missing = [part for part in FILES if not Path(partly, part).is_file()]
        if missing:
            raise CheckpointError(f"{hub_id} has no {' and no '.join(missing)}: it is no LoRA adapter", "hub")
        folder.mkdir(exist_ok=True)
        for part in FILES:
            Path(partly, part).replace(folder / part)


def read_wanted(file: Path) -> dict[str, WantedAdapter]:
    """Returns the adapters in JSON file ``file``, by name. Raises ConfigError."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, WantedAdapter])
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{file}: {error}", "file") from None


def difference(wanted: Mapping[str, WantedAdapter], served: Mapping[str, Json]) -> tuple[list[str], list[str]]:
    """Returns (names to load or replace, served names that are not wanted and not from the configuration)."""
    adding = [name for name, want in wanted.items() if name not in served or not _is_like(served[name], want)]
    leaving = [name for name, entry in served.items() if name not in wanted and entry["by"] != BY_CONFIG]
    return adding, leaving


def _is_like(entry: Json, want: WantedAdapter) -> bool:
    """Returns whether the served adapter is the wanted one. Workers pin those of their configuration themselves."""
    if entry["tenant"] != want.tenant:
        return False
    if entry["by"] == BY_CONFIG:
        wanted = PurePosixPath(want.path).parts
        return PurePosixPath(entry["root"]).parts[-len(wanted) :] == wanted
    return (entry["root"], entry["pinned"]) == (want.path, want.pinned)
