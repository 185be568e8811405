"""The ``baton`` command.

Knows nothing of how a cluster comes up; it reads flags, shows progress, and turns errors into exit codes.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer
from rich.console import Console

from baton.protos.errors import BatonError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Baton serves large language models on separate prefill and decode workers.",
)
FAILED, INTERRUPTED = 1, 130


def _flag(help_text: str, *names: str) -> Any:
    return typer.Option(*names, help=help_text, show_default=False)


@app.command()
def serve(
    model: Annotated[str | None, _flag("Directory or Hugging Face id; default: the demo model")] = None,
    model_name: Annotated[str | None, _flag("The name clients use")] = None,
    prefill: Annotated[int | None, _flag("Prefill workers (1)")] = None,
    decode: Annotated[int | None, _flag("Decode workers (1)")] = None,
    colocated: Annotated[bool | None, _flag("Workers that do both, no handoff", "--colocated")] = None,
    host: Annotated[str | None, _flag("Address to listen on (127.0.0.1)")] = None,
    port: Annotated[int | None, _flag("REST port (8000); 0 takes a free one")] = None,
    grpc_port: Annotated[int | None, _flag("gRPC port (8001); 0 takes a free one")] = None,
    insecure: Annotated[bool | None, _flag("Listen on a routable address without auth", "--insecure")] = None,
    policy: Annotated[str | None, _flag("round_robin, least_loaded or cost (cost)")] = None,
    dtype: Annotated[str | None, _flag("auto, float32 or bfloat16 (auto)")] = None,
    device: Annotated[str | None, _flag("cpu, cuda or paced:PROFILE (cpu)")] = None,
    seed: Annotated[int | None, _flag("Seeds what is random; 0 takes the system's entropy")] = None,
    max_model_len: Annotated[int | None, _flag("Cap on prompt and answer, in tokens")] = None,
    pages: Annotated[int | None, _flag("KV pages per worker (16 tokens each)")] = None,
    redis: Annotated[str | None, _flag("An existing Redis, redis://… or unix://…; default: a private one")] = None,
    ray_address: Annotated[str | None, _flag("An existing Ray cluster; default: a private one")] = None,
    otlp: Annotated[str | None, _flag("host:port that takes spans (OTLP over gRPC)")] = None,
    run_dir: Annotated[str | None, _flag("Where sockets and logs go; default: a new temporary directory")] = None,
    config: Annotated[str | None, _flag("A baton.toml; default: ./baton.toml if there is one")] = None,
) -> None:
    """Bring up a router, workers, Redis and Ray; Ctrl-C takes all of it down."""
    from baton.console.serve import run

    router = {"host": host, "port": port, "grpc_port": grpc_port, "insecure": insecure, "policy": policy}
    worker = {
        "model": model, "model_name": model_name, "dtype": dtype, "device": device, "seed": seed,
        "max_model_len": max_model_len, "pages": pages,
    }  # fmt: skip
    flags: dict[str, dict[str, Any]] = {
        "router": router,
        "worker": worker,
        "cluster": {"prefill": prefill, "decode": decode, "colocated": colocated, "run_dir": run_dir},
        "redis": {"url": redis},
        "ray": {"address": ray_address},
        "telemetry": {"otlp_endpoint": otlp},
    }
    raise typer.Exit(_guarded(lambda: run(config, flags)))


@app.command()
def workers(
    redis: Annotated[
        str | None, _flag("The cluster's Redis; default: of the newest cluster on this machine")
    ] = None,
    namespace: Annotated[str, typer.Option(help="The cluster's namespace")] = "baton",
) -> None:
    """Show the workers of a running cluster."""
    from baton.console.workers import show_workers

    raise typer.Exit(_guarded(lambda: show_workers(redis, namespace)))


@app.command("version")
def show_version() -> None:
    """Print the version."""
    typer.echo(package_version())


def package_version() -> str:
    """Of the installed package; "0+source" when it runs from a checkout that is not installed."""
    try:
        return version("baton-serve")
    except PackageNotFoundError:
        return "0+source"


def _guarded(command: Any) -> int:
    """Run it; an error of ours becomes one line on stderr and a failing exit code."""
    try:
        return int(command())
    except BatonError as error:
        Console(stderr=True, highlight=False).print(f"[bold red]error:[/] {_plain(error.message)}", soft_wrap=True)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def _plain(text: str) -> str:
    return text.replace("[", "\\[")
