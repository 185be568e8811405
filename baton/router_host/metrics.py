"""One /metrics and one live state for all processes of a router: the one asked asks the others.

Knows nothing of what a metric means, except which ones every process states for the whole router (NOT_ADDED). A
process is asked on its unix socket by one line: the Accept header of a scrape, or LIVE. Gauges are added up.
Counters and histograms stay those of each process: their sum would fall when one begins anew or is late, which
Prometheus takes for a new beginning of all.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from baton.router.observe.live import LiveState

WAIT_S = 1.0  # seconds that a router process of the pool has to tell its metrics
LINE_BYTES = 4096  # bytes of a question at most
LIVE = "live"
EOF = "# EOF"
PROCESS = "process"  # the label by which counters and histograms say whose they are
# Families that every process sees whole: the largest counts.
NOT_ADDED = {
    "baton_router_redis_away",
    "baton_router_handover_obstacles",
    "baton_workers",
    "baton_adapters_served",
    "baton_workers_price_dollars_per_hour",
    "baton_router_certificate_expiry_timestamp_seconds",
}


class SharedMetrics:
    """Shares the metrics and live state of process ``index`` of ``count`` with the others, by sockets in
    ``folder``.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        folder: Path,
        index: int,
        count: int,
        live: Callable[[], LiveState] | None = None,
    ) -> None:
        self._registry, self._folder, self._index, self._count = registry, folder, index, count
        self._live = live

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """While entered, answers the other processes."""
        path = self._path(self._index)
        path.unlink(missing_ok=True)
        server = await asyncio.start_unix_server(self._answer, path, limit=LINE_BYTES)
        try:
            yield
        finally:
            server.close()
            path.unlink(missing_ok=True)

    async def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """Returns the metrics of all processes and their media type; a process that doesn't answer is left out."""
        encode, media_type = choose_encoder(accept)
        accept = accept.replace("\n", " ")[: LINE_BYTES // 2]
        texts = {self._index: encode(self._registry)} | await self._ask_others(accept)
        return merged({index: text.decode() for index, text in texts.items() if text}).encode(), media_type

    async def others(self) -> Sequence[LiveState]:
        """Returns the live states of the other processes that answer."""
        found = await self._ask_others(LIVE)
        return [msgspec.json.decode(state, type=LiveState) for state in found.values() if state]

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            asked = (await reader.readline()).decode(errors="replace").strip()
            writer.write(self._said(asked))
            await writer.drain()
        except (OSError, ValueError):
            return  # whoever asked is gone
        finally:
            writer.close()

    def _said(self, asked: str) -> bytes:
        if asked == LIVE:
            return msgspec.json.encode(self._live()) if self._live is not None else b""
        encode, _ = choose_encoder(asked)
        return encode(self._registry)

    async def _ask_others(self, what: str) -> dict[int, bytes]:
        others = [index for index in range(self._count) if index != self._index]
        return dict(zip(others, await asyncio.gather(*(self._ask(i, what) for i in others)), strict=True))

    async def _ask(self, index: int, what: str) -> bytes:
        try:
            async with asyncio.timeout(WAIT_S):
                reader, writer = await asyncio.open_unix_connection(self._path(index))
                writer.write(what.encode() + b"\n")
                found = await reader.read(-1)
                writer.close()
        except (TimeoutError, OSError):
            return b""
        return found

    def _path(self, index: int) -> Path:
        return self._folder / f"router-{index}.sock"


def merged(texts: Mapping[int, str]) -> str:
    """Returns one exposition of the processes' ``texts``: counters and histograms with the number of their process
    as a label, other samples added up (maximum for NOT_ADDED).
    """
    headers: dict[str, list[str]] = {}
    samples: dict[str, dict[str, float]] = {}
    exemplars: dict[str, str] = {}
    ends = False
    for index, text in texts.items():
        family, own = "", False
        for line in text.splitlines():
            if line == EOF:
                ends = True
            elif line.startswith("# "):
                family = line.split(" ", 3)[2]
                own = own_of_each(line) if line.startswith("# TYPE ") else own
                known = headers.setdefault(family, [])
                if line not in known:
                    known.append(line)
            elif line:
                sample, _, exemplar = line.partition(" # ")
                key, _, value = sample.rpartition(" ")
                key = _labelled(key, index) if own else key
                held = samples.setdefault(family, {})
                held[key] = _joined(family, held.get(key), float(value))
                if exemplar:
                    exemplars[key] = f" # {exemplar}"
    shown = "".join(_family(headers[f], samples.get(f, {}), exemplars) for f in headers)
    return shown + f"{EOF}\n" if ends else shown


def own_of_each(header: str) -> bool:
    """Returns whether the family of a TYPE line is shown of each process by itself: counters, histograms, and when
    these began.
    """
    _, _, family, kind = header.split(" ", 3)
    return kind in ("counter", "histogram") or family.endswith("_created")


def _labelled(key: str, index: int) -> str:
    name, brace, labels = key.partition("{")
    said = f'{PROCESS}="{index}"'
    return f"{name}{{{said},{labels}" if brace else f"{name}{{{said}}}"


def _joined(family: str, before: float | None, value: float) -> float:
    if before is None:
        return value
    return max(before, value) if family in NOT_ADDED else before + value


def _family(header: list[str], samples: dict[str, float], exemplars: dict[str, str]) -> str:
    lines = (f"{key} {value!r}{exemplars.get(key, '')}" for key, value in samples.items())
    return "\n".join([*header, *lines]) + "\n"
