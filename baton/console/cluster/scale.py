"""``baton scale prefill=3 decode=2``: asks the process that places workers (`serve`, `place`) for other numbers,
and waits.

Knows nothing of how workers are placed or drained.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated

import typer
from redis.asyncio import Redis
from redis.exceptions import RedisError
from rich.console import Console

from baton.cluster.membership import PolledRoster, connect
from baton.cluster.roles import ROLES
from baton.cluster.scale import ScaleRequest, ask, has_placer, read, require_possible, slots_of, was_placed
from baton.console.cluster.workers import meeting_place
from baton.protos.errors import ConfigError, StartupError, Unavailable
from baton.protos.nouns import WorkerInfo
from baton.protos.version import product_version

LOOK_S = 0.2  # seconds between two looks at how many workers there are
ABSENT_S = 2.0  # seconds without a placer's sign until there is none; an emptied Redis has one again in half
SLOT = re.compile(r"(prefill|decode)-\d+")
Guarded = Callable[[Callable[[], int]], int]


def register(app: typer.Typer, guarded: Guarded) -> None:
    """Adds the command ``scale`` to the `baton` command."""

    @app.command()
    def scale(
        numbers: Annotated[list[str], typer.Argument(help="prefill=N and/or decode=N")],
        redis: Annotated[str, typer.Option(help="The cluster's Redis; default: of the one cluster here")] = "",
        namespace: Annotated[
            str, typer.Option(help="The cluster's namespace; default: of the one cluster here")
        ] = "",
        wait: Annotated[float, typer.Option(help="Seconds to wait until it is so; 0: don't")] = 120.0,
    ) -> None:
        """Run other numbers of workers; those that go are drained first, and no request fails."""
        raise typer.Exit(guarded(lambda: show(numbers, redis, namespace, wait)))


def show(numbers: Sequence[str], redis: str, namespace: str, wait_s: float) -> int:
    """Asks for the numbers, waits up to ``wait_s`` seconds until they are reached (0: doesn't wait), and prints
    them; returns 0.

    Raises ConfigError, StartupError if they are not reached or nobody places workers, Unavailable if Redis is away.
    """
    asked, (url, namespace) = parse(numbers), meeting_place(redis, namespace)
    begun = time.monotonic()
    console, wanted = Console(highlight=False), asyncio.run(_scale(url, namespace, asked, wait_s))
    took = f" after {time.monotonic() - begun:.1f} s" if wait_s else ", asked for"
    console.print(f"prefill={wanted.prefill} decode={wanted.decode}{took}")
    return 0


def parse(numbers: Sequence[str]) -> dict[str, int]:
    """Parses arguments role=N into numbers by role. Raises ConfigError."""
    found: dict[str, int] = {}
    for text in numbers:
        role, _, count = text.partition("=")
        if role not in ("prefill", "decode") or not count.isdecimal():
            raise ConfigError(f"{text!r}: give prefill=N, decode=N or both", "scale")
        found[role] = int(count)
    return found


async def _scale(url: str, namespace: str, asked: dict[str, int], wait_s: float) -> ScaleRequest:
    client = connect(url)
    try:
        roster = PolledRoster(client, namespace)
        now = await _slots(roster)
        present = await read(client, namespace) or _scale_of(now)
        wanted = ScaleRequest(asked.get("prefill", present.prefill), asked.get("decode", present.decode))
        _require_roles(now, wanted)
        if wait_s and not _is_so(now, wanted):
            await _require_placer(client, namespace, {info.version for info in now.values()})
        wanted = await ask(client, namespace, wanted, present)
        if wait_s:
            _require_played(await _until_placed(roster, wanted, wait_s), wanted)
        return wanted
    except (RedisError, OSError) as error:
        raise Unavailable(
            f"the cluster's Redis is away ({error}): it is not known whether anybody was asked"
        ) from None
    finally:
        await client.aclose()


async def _until_placed(roster: PolledRoster, wanted: ScaleRequest, wait_s: float) -> dict[str, WorkerInfo]:
    """The slots, once those that are wanted are ready and the others gone. Raises StartupError: not within
    ``wait_s``.
    """
    deadline = time.monotonic() + wait_s
    while True:
        now = await _slots(roster)
        if _is_so(now, wanted):
            return now
        if time.monotonic() > deadline:
            found = ", ".join(f"{slot} {info.state}" for slot, info in sorted(now.items())) or "no worker"
            raise StartupError(f"not so after {wait_s:g} s: {found}; see `baton workers`")
        await asyncio.sleep(LOOK_S)


def _is_so(now: dict[str, WorkerInfo], wanted: ScaleRequest) -> bool:
    """Returns whether exactly the wanted slots are here, and ready."""
    return {slot: info.state for slot, info in now.items()} == dict.fromkeys(slots_of(wanted), "ready")


async def _require_placer(client: Redis, namespace: str, versions: set[str]) -> None:
    """Raises StartupError if no process gives a sign within ABSENT_S that it places this namespace's workers, whose
    builds are of ``versions``.
    """
    deadline = time.monotonic() + ABSENT_S
    while not await has_placer(client, namespace):
        if time.monotonic() > deadline:
            raise await _nobody(client, namespace, versions)
        await asyncio.sleep(LOOK_S)


async def _nobody(client: Redis, namespace: str, versions: set[str]) -> StartupError:
    """Returns the error that nobody is seen to place workers; a build of before such signs gives none."""
    if not await was_placed(client, namespace):
        return StartupError(
            f"nobody places workers in the namespace {namespace!r}, so nothing was asked for: start `baton "
            "serve` or `baton place` there, or start and end workers as you did those that run (`baton "
            "worker`, `kubectl scale`, `helm upgrade`). `--wait 0` leaves the numbers for a later placer"
        )
    others = ", ".join(sorted(one or "unknown" for one in versions - {product_version()}))
    theirs = f" (workers here run baton {others}, this is {product_version()})" if others else ""
    return StartupError(
        f"who placed workers in the namespace {namespace!r} gives no sign, so nothing was asked for: that `baton "
        f"serve` or `baton place` has ended, or is of an older build, which gives none{theirs}. If it runs, "
        "`--wait 0` asks it, and `baton workers` shows what it does; else start it again"
    )


def _require_roles(now: dict[str, WorkerInfo], wanted: ScaleRequest) -> None:
    """Raises ConfigError for impossible numbers, and where the slots that go are a wanted role's last."""
    require_possible(wanted)
    slots = slots_of(wanted)
    after = dict.fromkeys(ROLES, 0) | Counter(now[s].role if s in now else slots[s] for s in slots)
    for role, count in (("prefill", wanted.prefill), ("decode", wanted.decode)):
        if count and not after[role] and any(info.role == role for info in now.values()):
            raise ConfigError(
                f"the slots that would stay play prefill={after['prefill']} decode={after['decode']}: no {role} "
                f"worker would be left. First turn one: baton role {role}-0 {role}",
                "scale",
            )


def _require_played(now: dict[str, WorkerInfo], wanted: ScaleRequest) -> None:
    """Raises StartupError where the slots are here, but play other roles than were asked for."""
    plays = Counter(info.role for info in now.values())
    short = {"prefill": wanted.prefill - plays["prefill"], "decode": wanted.decode - plays["decode"]}
    if not any(short.values()):
        return
    strayed = [slot for slot, info in sorted(now.items()) if not slot.startswith(info.role)]
    turned = ", ".join(f"{slot} plays {now[slot].role}" for slot in strayed)
    # One by one, because `baton ratio set` counts the workers of other pools too.
    back = " and ".join(
        f"`baton role {slot} {role}`"
        for role, count in short.items()
        for slot in [s for s in strayed if s.startswith(role)][: max(0, count)]
    )
    raise StartupError(
        f"every slot is placed, but the roles are prefill={plays['prefill']} decode={plays['decode']}, not "
        f"prefill={wanted.prefill} decode={wanted.decode}: {turned}. {back} turns that; `baton ratio show` says "
        "who turned them"
    )


def _scale_of(slots: Iterable[str]) -> ScaleRequest:
    seen = Counter(slot.rpartition("-")[0] for slot in slots)
    return ScaleRequest(seen["prefill"], seen["decode"])


async def _slots(roster: PolledRoster) -> dict[str, WorkerInfo]:
    """Returns the workers that are scaled; pools on other hardware have numbers of their own."""
    return {name: entry.info for name, entry in (await roster.refresh()).items() if SLOT.fullmatch(name)}
