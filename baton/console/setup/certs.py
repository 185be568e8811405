"""``baton certs make|renew|show``: a development CA and the certificates of a cluster's roles, in one folder.

Knows nothing of running processes; they read a renewed certificate within a second, without a restart.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from baton.cluster.config import LOOPBACK, BatonConfig
from baton.console.output import print_table
from baton.protos.errors import ConfigError

DEFAULT = "certs"
Guarded = Callable[[Callable[[], int]], int]

_Folder = Annotated[str, typer.Argument(help="The folder; ./certs when left out")]
_Role = Annotated[
    list[str] | None,
    typer.Option(help="router, worker, client, monitor, redis or ray; may be given again; default: all"),
]
_Host = Annotated[
    list[str] | None,
    typer.Option(
        help="DNS name or address at which the router (Redis, Ray) is reached, besides localhost; repeatable"
    ),
]
_Days = Annotated[float, typer.Option(help="How long a certificate is good, in days")]
_Domain = Annotated[str, typer.Option(help="Ends the names of roles; tls.domain of the config")]


def register(app: typer.Typer, guarded: Guarded) -> None:
    """Adds the command group ``certs`` to the `baton` command."""
    group = typer.Typer(no_args_is_help=True, help="A development CA and its certificates (mutual TLS).")
    app.add_typer(group, name="certs")

    def adds(name: str, anew: bool, about: str) -> None:
        @group.command(name, help=about)
        def issue(
            folder: _Folder = DEFAULT,
            role: _Role = None,
            host: _Host = None,
            days: _Days = 90.0,
            domain: _Domain = "baton.internal",
        ) -> None:
            raise typer.Exit(guarded(lambda: write(Path(folder), role, host or (), days, domain, anew)))

    adds("make", False, "Make the CA and every certificate that is missing or near its end.")
    adds(
        "renew",
        True,
        "Replace certificates now; they keep their names, and running processes take them up by themselves.",
    )

    @group.command("show")
    def show_all(folder: _Folder = DEFAULT) -> None:
        """Show the certificates of a folder, their names and when they end; fails when one is over."""
        raise typer.Exit(guarded(lambda: show(Path(folder))))


def write(
    folder: Path, roles: Sequence[str] | None, hosts: Sequence[str], days: float, domain: str, anew: bool
) -> int:
    """Makes the certificates of ``roles`` (default: all) that are missing or near their end, with ``anew`` all of
    them; prints what was written, returns 0.

    ``days`` is their validity. Raises ConfigError.
    """
    from baton.tls.authority import ROLES, Authority

    if unknown := set(roles or ()) - set(ROLES):
        raise ConfigError(f"{', '.join(sorted(unknown))}: choose roles of {', '.join(ROLES)}", "role")
    if days <= 0:
        raise ConfigError("--days must be above 0", "days")
    if anew and not (folder / "ca.key").is_file():
        raise ConfigError(f"there is no CA of `baton certs` in {folder}: begin with `baton certs make`", "folder")
    written = Authority(folder, domain).make(roles or ROLES, hosts, days, anew)
    console = Console(highlight=False)
    done = f"wrote {', '.join(written)}" if written else "nothing to do, all are good"
    console.print(f"{folder}: {done}", soft_wrap=True)
    console.print(f"Serve with: baton serve --tls {folder}", soft_wrap=True)
    return 0


def show(folder: Path) -> int:
    """Prints a row per certificate in ``folder``; returns 1 if one has expired or is of another CA, else 0.

    Raises ConfigError without a CA.
    """
    from baton.tls.authority import Authority

    if not (folder / "ca.crt").is_file():
        raise ConfigError(f"there is no ca.crt in {folder}: begin with `baton certs make`", "folder")
    table, fine = Table("certificate", "ends", "days left", "state", "names", box=None), True
    for one in Authority(folder).show():
        left = (one.ends - time.time()) / 86_400
        state = "good" if left > 0 and one.signed_here else "over" if left <= 0 else "of another CA"
        fine &= state == "good"
        day = datetime.datetime.fromtimestamp(one.ends, datetime.UTC).strftime("%Y-%m-%d %H:%M")
        table.add_row(one.role, day, f"{left:.1f}", state, ", ".join(one.names))
    print_table(table)
    return 0 if fine else 1


def ensure(config: BatonConfig, say: Callable[[str, str], object]) -> None:
    """Makes the certificates missing in ``config.tls.dir``, for `baton serve --tls DIR`, unless the CA's key is
    kept elsewhere.

    ``say(part, text)`` is called if any were made.
    """
    folder = Path(config.tls.dir).expanduser().absolute()
    if not config.tls.dir or ((folder / "ca.crt").exists() and not (folder / "ca.key").exists()):
        return
    from baton.tls.authority import Authority

    hosts = sorted({config.router.host, config.worker.host} - {*LOOPBACK, "0.0.0.0", "::"})
    if written := Authority(folder, config.tls.domain).make(hosts=hosts):
        say("tls", f"made certificates in {folder}: {', '.join(written)}")
