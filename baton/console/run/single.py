"""``baton router``, ``worker``, ``ranks``, ``place``, ``drain``: one part of a cluster, as baton.toml says.

Knows nothing of the parts; ``launch.single`` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

Guard = Callable[[Callable[[], int]], int]
ROLES = ("prefill", "decode")
_Config = Annotated[str | None, typer.Option(help="A baton.toml; default: ./baton.toml if there is one")]


def register(app: typer.Typer, guarded: Guard) -> None:
    """Adds the commands ``router``, ``worker``, ``ranks``, ``place`` and ``drain`` to the `baton` command."""

    @app.command()
    def router(
        config: _Config = None,
        host: Annotated[str | None, typer.Option(help="Address to listen on (127.0.0.1)")] = None,
        port: Annotated[int | None, typer.Option(help="REST port (8000)")] = None,
        grpc_port: Annotated[int | None, typer.Option(help="gRPC port (8001)")] = None,
        redis: Annotated[str | None, typer.Option(help="The cluster's Redis, redis://…")] = None,
    ) -> None:
        """Run a router alone, as a pod does; SIGTERM drains it."""
        from baton.cluster.config import load_config
        from baton.launch.single import run_router

        flags: dict[str, dict[str, object]] = {
            "router": {"host": host, "port": port, "grpc_port": grpc_port},
            "redis": {"url": redis},
        }
        raise typer.Exit(guarded(lambda: run_router(load_config(config, flags))))

    @app.command()
    def worker(
        role: Annotated[str, typer.Option(help="prefill or decode")],
        config: _Config = None,
        slot: Annotated[str, typer.Option(help="Its name in the cluster; default: this host's name")] = "",
        host: Annotated[str | None, typer.Option(help="Address to listen on and to advertise")] = None,
        port: Annotated[int | None, typer.Option(help="gRPC port; 0 takes a free one")] = None,
        redis: Annotated[str | None, typer.Option(help="The cluster's Redis, redis://…")] = None,
    ) -> None:
        """Run one worker alone, as a pod does; SIGTERM drains it."""
        from baton.cluster.config import load_config
        from baton.console.setup.findings import require_none_failed
        from baton.console.setup.places import places_of_worker
        from baton.launch.plans import config_of
        from baton.launch.single import run_worker

        def run() -> int:
            found = load_config(config, flags)
            require_none_failed(places_of_worker(config_of(found, slot, role).worker))  # before weights are loaded
            run_worker(found, role, slot)

        if role not in ROLES:
            raise typer.BadParameter(f"--role {role}: choose of {', '.join(ROLES)}")
        flags: dict[str, dict[str, object]] = {"worker": {"host": host, "port": port}, "redis": {"url": redis}}
        raise typer.Exit(guarded(run))

    @app.command()
    def ranks(
        listen: Annotated[str, typer.Option(help="host:port on which workers' leads connect")] = "127.0.0.1:7100",
        config: _Config = None,
    ) -> None:
        """Run ranks of workers whose leads are on other hosts, which name this one in worker.rank_hosts."""
        from baton.cluster.config import load_config
        from baton.launch.single import run_ranks

        raise typer.Exit(guarded(lambda: run_ranks(load_config(config), listen)))

    @app.command()
    def place(config: _Config = None) -> None:
        """Fill a running Ray cluster with workers and keep it so; they stay when this ends."""
        from baton.cluster.config import load_config
        from baton.launch.ray.placer import run_placer

        raise typer.Exit(guarded(lambda: run_placer(load_config(config), config or "")))

    @app.command()
    def drain(config: _Config = None) -> None:
        """End the workers of this host in order: what a pod runs before it stops."""
        from baton.cluster.config import load_config
        from baton.launch.single import drain_workers

        raise typer.Exit(guarded(lambda: drain_workers(load_config(config))))
