"""The ``baton`` command line.

Knows nothing of how a cluster comes up; it reads flags, shows progress, and turns errors into exit codes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Annotated

import typer
from typer.models import OptionInfo

from baton.console.checkpoints import register as checkpoints
from baton.console.cluster import adapters, ratio, scale
from baton.console.drill import drill_command
from baton.console.finite import require_finite
from baton.console.option_groups import with_groups
from baton.console.output import print_error
from baton.console.planning import register as planning
from baton.console.run import single
from baton.console.run.serve_flags import Setting, flagged, settings_of
from baton.console.setup import certs, diagnosis
from baton.protos.errors import BatonError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Baton serves large language models on separate prefill and decode workers.",
)

FAILED, INTERRUPTED = 1, 130  # exit statuses; 130 is a shell's for SIGINT


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(package_version())
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version of Baton", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Takes the options that stand before a command."""


def _flag(help_text: str, *names: str) -> OptionInfo:
    return typer.Option(*names, help=help_text, show_default=False)


@app.command()
@flagged
def serve(
    config: Annotated[str | None, _flag("A baton.toml; default: ./baton.toml if there is one")] = None,
    **flags: Setting,
) -> None:
    """Bring up a router, workers, Redis and Ray; Ctrl-C takes all of it down."""
    from baton.console.run.serve import run

    raise typer.Exit(_guarded(lambda: run(config, settings_of(flags))))


@app.command()
def workers(
    redis: Annotated[str | None, _flag("The cluster's Redis; default: of the one cluster on this machine")] = None,
    namespace: Annotated[str, typer.Option(help="The cluster's namespace; default: of the one cluster here")] = "",
) -> None:
    """Show the workers of a running cluster."""
    from baton.console.cluster.workers import show_workers

    raise typer.Exit(_guarded(lambda: show_workers(redis, namespace)))


@app.command()
def explain(
    request_id: Annotated[
        str, typer.Argument(help="The answer's id, or its x-request-id; default: the request that ended last")
    ] = "",
    url: Annotated[str | None, _flag("The router; default: of the one cluster on this machine")] = None,
    key: Annotated[str, typer.Option(help="API key", envvar="BATON_API_KEY")] = "",
    json: Annotated[bool, typer.Option("--json", help="The record itself")] = False,
) -> None:
    """Show why a request went where it went, and what was predicted against what was seen."""
    from baton.console.cluster.explain import show

    raise typer.Exit(_guarded(lambda: show(request_id, url, key, json)))


@app.command()
def top(
    url: Annotated[str | None, _flag("The router; default: of the one cluster on this machine")] = None,
    key: Annotated[str, typer.Option(help="API key made with --admin", envvar="BATON_API_KEY")] = "",
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and end")] = False,
    json: Annotated[bool, typer.Option("--json", help="The snapshot itself, once")] = False,
) -> None:
    """Watch the cluster in the terminal: pools, queues, classes, recent requests, advice."""
    from baton.console.cluster.top import run

    raise typer.Exit(_guarded(lambda: run(url, key, every, once, json)))


keys_app = typer.Typer(no_args_is_help=True, help="API keys: who may use the router, and how much of it.")
app.add_typer(keys_app, name="keys")
_KeysFile = Annotated[str | None, _flag("The file of keys; default: router.keys_file of the config, or keys.json")]


@dataclass(frozen=True)
class KeyLimits:
    """Holds a key's name, its rate limits, and its share of the queue."""

    name: Annotated[str, typer.Option(help="To tell keys apart")] = ""
    rpm: Annotated[int, typer.Option(help="Requests per minute; 0: no limit")] = 0
    tpm: Annotated[int, typer.Option(help="Tokens per minute, prompt and answer; 0: no limit")] = 0
    weight: Annotated[float, typer.Option(help="Its share when requests must wait")] = 1.0
    priority: Annotated[int, typer.Option(help="Lower is sooner")] = 0


@dataclass(frozen=True)
class KeyRights:
    """Says which models, adapters and requests a key gives access to."""

    model: Annotated[list[str] | None, typer.Option(help="A model or adapter it may use; default: all")] = None
    adapter: Annotated[list[str] | None, typer.Option(help="Of adapters, one it may use; default: all")] = None
    bound: Annotated[str, typer.Option(help="The adapter that answers where it names a model or nothing")] = ""
    admin: Annotated[bool, typer.Option("--admin", help="May look at every tenant's requests")] = False


@keys_app.command("add")
@with_groups
def keys_add(
    tenant: Annotated[str, typer.Argument(help="Whose key it is: its share of the queue and its cache are theirs")],
    limits: KeyLimits,
    rights: KeyRights,
    file: _KeysFile = None,
) -> None:
    """Make a key and show it, once."""
    from baton.console.setup.keys import add

    fields = {
        "name": limits.name, "requests_per_min": limits.rpm, "tokens_per_min": limits.tpm, "weight": limits.weight,
        "priority": limits.priority, "models": tuple(rights.model or ()), "admin": rights.admin,
        "adapters": tuple(rights.adapter or ()), "adapter": rights.bound,
    }  # fmt: skip
    raise typer.Exit(_guarded(lambda: add(file, tenant, fields)))


@keys_app.command("list")
def keys_list(file: _KeysFile = None) -> None:
    """Show every key, but for the keys themselves."""
    from baton.console.setup.keys import show

    raise typer.Exit(_guarded(lambda: show(file)))


@keys_app.command("revoke")
def keys_revoke(key_id: Annotated[str, typer.Argument(help="Its id")], file: _KeysFile = None) -> None:
    """Close a key for good; routers notice within a second."""
    from baton.console.setup.keys import revoke

    raise typer.Exit(_guarded(lambda: revoke(file, key_id)))


bench_app = typer.Typer(no_args_is_help=True, help="Measure this machine.")
app.add_typer(bench_app, name="bench")


@bench_app.command("kv")
def bench_kv(
    json: Annotated[str | None, _flag("Write the rows to this file, as JSON")] = None,
    plot: Annotated[str | None, _flag("Write a picture of the ratios to this file (needs matplotlib)")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Times that each thing is measured")] = 7,
    mib: Annotated[int, typer.Option(min=16, help="MiB of KV in one handoff")] = 256,
    page_kib: Annotated[int, typer.Option(min=32, help="KiB of one page")] = 2048,
    tier_model: Annotated[
        str | None, _flag("Measure host and disk tier against computing with this model; random-0.5b makes one")
    ] = None,
) -> None:
    """Measure how fast KV gets from worker to worker, by every transport, beside what the machine can do at all."""
    from baton.bench.kv.report import show

    raise typer.Exit(_guarded(lambda: show(rounds, mib << 20, page_kib << 10, json, plot, tier_model)))


@bench_app.command("router")
def bench_router(
    figure: Annotated[
        list[str] | None, typer.Argument(help="Which: ttft throughput cpu cpu-long memory overload")
    ] = None,
    json: Annotated[str | None, _flag("Write the rows to this file, as JSON")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Times that each thing is measured")] = 3,
    requests: Annotated[int, typer.Option(min=1000, help="Requests after which memory is looked at")] = 20_000,
    seconds: Annotated[float, typer.Option(min=1, help="Of each load, for goodput")] = 10.0,
) -> None:
    """Measure the time that the router adds to a request, and its throughput, before workers whose forward pass is
    free.
    """
    from baton.bench.router.report import FIGURES, show

    chosen = tuple(figure or FIGURES)
    if unknown := set(chosen) - set(FIGURES):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: choose of {', '.join(FIGURES)}")
    raise typer.Exit(_guarded(lambda: show(chosen, rounds, requests, seconds, json)))


@bench_app.command("engine")
def bench_engine(
    size: Annotated[list[str] | None, _flag("150M or 0.5B, random weights; may be given again (150M)")] = None,
    scheme: Annotated[list[str] | None, _flag("bf16, int8 or int4; may be given again (all)")] = None,
    kv: Annotated[str, typer.Option(help="What K and V are stored in: float32, bf16, fp16, int8 or fp8")] = "bf16",
    batch: Annotated[list[int] | None, _flag("Sequences that decode together; may be given again (1 4 16)")] = None,
    json: Annotated[str | None, _flag("Write the rows to this file, as JSON")] = None,
    plot: Annotated[str | None, _flag("Write a picture of the ratios to this file (needs matplotlib)")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Times that each thing is measured")] = 7,
    part: Annotated[list[str] | None, _flag("linear, attention, step or start; may be given again (all)")] = None,
) -> None:
    """Measure the CPU engine's attention, decode and prompt rates, beside the memory bandwidth in the same
    round.
    """
    from baton.bench.engine.report import PARTS, SCHEMES, show

    chosen, batches, parts = tuple(scheme or SCHEMES), tuple(batch or (1, 4, 16)), tuple(part or PARTS)
    raise typer.Exit(
        _guarded(lambda: show(tuple(size or ("150M",)), chosen, kv, batches, rounds, json, plot, parts))
    )


planning.register(app)
checkpoints.register(app)
app.command("drill")(drill_command)


@app.command("version")
def show_version() -> None:
    """Print the version of Baton."""
    typer.echo(package_version())


def package_version() -> str:
    """Returns the version of the installed package; "0+source" in a checkout that is not installed."""
    try:
        return metadata.version("baton-serve")
    except metadata.PackageNotFoundError:
        return "0+source"


def _guarded(command: Callable[[], int | None]) -> int:
    """Runs it; an error of ours becomes one line on stderr and a failing exit code."""
    try:
        return command() or 0
    except BatonError as error:
        print_error(error.message)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


single.register(app, _guarded)
diagnosis.register(app, _guarded)
certs.register(app, _guarded)
scale.register(app, _guarded)
ratio.register(app, _guarded)
adapters.register(app, _guarded)
require_finite(app)
