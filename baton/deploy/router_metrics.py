"""One /metrics for all router processes: whichever is asked asks the others, and adds up.

Knows nothing of what a metric means, but that workers which each process can reach are the same workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

WAIT_S = 1.0
NOT_ADDED = {"baton_workers"}  # families that every process sees whole: the largest counts


class SharedMetrics:
    """The exposition of process ``index`` of ``count``, reachable for the others on a socket in ``folder``."""

    def __init__(self, registry: CollectorRegistry, folder: Path, index: int, count: int) -> None:
        self._registry, self._folder, self._index, self._count = registry, folder, index, count

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Answer the other processes while the block runs."""
        path = self._path(self._index)
        path.unlink(missing_ok=True)
        server = await asyncio.start_unix_server(self._answer, path)
        try:
            yield
        finally:
            server.close()
            path.unlink(missing_ok=True)

    async def exposition(self) -> bytes:
        """Of all processes; one that doesn't answer is left out."""
        others = [i for i in range(self._count) if i != self._index]
        texts = await asyncio.gather(*(self._ask(i) for i in others))
        return merged([generate_latest(self._registry).decode(), *filter(None, texts)]).encode()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(generate_latest(self._registry))
        await writer.drain()
        writer.close()

    async def _ask(self, index: int) -> str:
        try:
            async with asyncio.timeout(WAIT_S):
                reader, writer = await asyncio.open_unix_connection(self._path(index))
                text = await reader.read(-1)
                writer.close()
        except (TimeoutError, OSError):
            return ""
        return text.decode()

    def _path(self, index: int) -> Path:
        return self._folder / f"router-{index}.sock"


def merged(texts: Iterable[str]) -> str:
    """Expositions added up, sample by sample."""
    headers: dict[str, list[str]] = {}
    samples: dict[str, dict[str, float]] = {}
    for text in texts:
        family = ""
        for line in text.splitlines():
            if line.startswith("# "):
                family = line.split(" ", 3)[2]
                known = headers.setdefault(family, [])
                if line not in known:
                    known.append(line)
            elif line:
                key, _, value = line.rpartition(" ")
                held = samples.setdefault(family, {})
                held[key] = _joined(family, key, held.get(key), float(value))
    return "".join(_family(headers[f], samples.get(f, {})) for f in headers)


def _joined(family: str, key: str, before: float | None, value: float) -> float:
    if before is None:
        return value
    if family.endswith("_created"):
        return min(before, value)
    return max(before, value) if family in NOT_ADDED else before + value


def _family(header: list[str], samples: dict[str, float]) -> str:
    return "\n".join([*header, *(f"{key} {value!r}" for key, value in samples.items())]) + "\n"
