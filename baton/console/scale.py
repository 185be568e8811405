"""``baton scale prefill=3 decode=2``: ask who places workers (`serve`, `place`) for other numbers, and wait.

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
from rich.console import Console

from baton.cluster.membership import Roster, connect
from baton.cluster.scale import Scale, ask, read, slots_of
from baton.console.workers import meeting_place
from baton.protos.errors import ConfigError, StartupError

LOOK_S = 0.2
SLOT = re.compile(r"(prefill|decode)-\d+")
Guarded = Callable[[Callable[[], int]], int]


def register(app: typer.Typer, guarded: Guarded) -> None:
    """Add ``baton scale``."""

    @app.command()
    def scale(
        numbers: Annotated[list[str], typer.Argument(help="prefill=N and/or decode=N")],
        redis: Annotated[str, typer.Option(help="The cluster's Redis; default: of the newest one here")] = "",
        namespace: Annotated[str, typer.Option(help="The cluster's namespace; default: of the newest one")] = "",
        wait: Annotated[float, typer.Option(help="Seconds to wait until it is so; 0: don't")] = 120.0,
    ) -> None:
        """Run other numbers of workers; those that go are drained first, and no request fails."""
        raise typer.Exit(guarded(lambda: show(numbers, redis, namespace, wait)))


def show(numbers: Sequence[str], redis: str, namespace: str, wait_s: float) -> int:
    """Ask, wait, tell how long it took."""
    url, namespace = meeting_place(redis, namespace)
    begun = time.monotonic()
    console, wanted = Console(highlight=False), asyncio.run(_scale(url, namespace, parse(numbers), wait_s))
    took = f" after {time.monotonic() - begun:.1f} s" if wait_s else ", asked for"
    console.print(f"prefill={wanted.prefill} decode={wanted.decode}{took}")
    return 0


def parse(numbers: Sequence[str]) -> dict[str, int]:
    """Role -> count. Raises ConfigError."""
    found: dict[str, int] = {}
    for text in numbers:
        role, _, count = text.partition("=")
        if role not in ("prefill", "decode") or not count.isdigit():
            raise ConfigError(f"{text!r}: give prefill=N, decode=N or both", "scale")
        found[role] = int(count)
    return found


async def _scale(url: str, namespace: str, asked: dict[str, int], wait_s: float) -> Scale:
    client = connect(url)
    try:
        roster = Roster(client, namespace)
        present = await read(client, namespace) or _scale_of(await _states(roster))
        prefill, decode = asked.get("prefill", present.prefill), asked.get("decode", present.decode)
        wanted = await ask(client, namespace, Scale(prefill, decode), present)
        deadline = time.monotonic() + wait_s
        while wait_s and (now := await _states(roster)) != dict.fromkeys(slots_of(wanted), "ready"):
            if time.monotonic() > deadline:
                found = ", ".join(f"{slot} {state}" for slot, state in sorted(now.items()))
                raise StartupError(f"not so after {wait_s:g} s: {found}; see `baton workers`")
            await asyncio.sleep(LOOK_S)
        return wanted
    finally:
        await client.aclose()


def _scale_of(slots: Iterable[str]) -> Scale:
    seen = Counter(slot.rpartition("-")[0] for slot in slots)
    return Scale(seen["prefill"], seen["decode"])


async def _states(roster: Roster) -> dict[str, str]:
    """Of the slots that are scaled: pools on other hardware have numbers of their own."""
    return {name: entry.info.state for name, entry in (await roster.refresh()).items() if SLOT.fullmatch(name)}
