"""One look at the whole cluster, as JSON: workers, pools, flows, queues, classes, requests, advice, decisions.

Knows nothing of HTTP or of pages. Workers and their loads come from the roster, minutes and requests from the
routers' own ``live`` states, advice and timeline from the controller's store. A look takes some milliseconds at
most and is shared by all who ask within ``FRESH_S``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from baton.cluster.advice import AdviceStore
from baton.cluster.departures import Departure, Departures
from baton.cluster.holds import Hold
from baton.cost.money import per_million
from baton.protos.nouns import WorkerInfo, WorkerLoad
from baton.router.observe.live import ClassWindow, LiveState, LiveStats, merged, percentiles
from baton.router.request.context_class import ContextClassLike
from baton.router.workers.roster import RosterEntry, RosterReader

FRESH_S = 0.4
HOUR_S = 3600.0
TIMELINE = 40
STATIONS = (
    "queue",
    "prefill_queue",
    "prefill",
    "transfer",
    "first_decode",
    "ttft",
    "itl",
    "tpot",
    "e2e",
    "longest_gap",
)
ROLES = ("prefill", "decode")


class Prices(msgspec.Struct, frozen=True):
    """Dollars per worker and hour; 0: not said."""

    prefill: float = 0.0
    decode: float = 0.0

    def of(self, role: str) -> float:
        """Of one role's worker."""
        return self.prefill if role == "prefill" else self.decode


class Overview:
    """``snapshot`` of one cluster. ``others`` asks the router's other processes for their LiveStates.

    ``fullness``: of a worker, by the controller's definition; None while its costs aren't known.
    """

    def __init__(
        self,
        roster: RosterReader,
        live: LiveStats,
        classes: Sequence[ContextClassLike],
        *,
        router: Mapping[str, Any],
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        waiting: Callable[[], dict[str, int]],
        reachable: Callable[[], frozenset[str]],
        advice: AdviceStore | None = None,
        prices: Prices = Prices(),
        others: Callable[[], Awaitable[Sequence[LiveState]]] | None = None,
        holds: Callable[[], Mapping[str, Hold]] = dict,
        actions: Sequence[str] = (),
        fullness: Callable[[WorkerInfo, WorkerLoad], float | None] = lambda info, load: None,
        departures: Departures | None = None,
    ) -> None:
        self._departures = departures
        self.live = live
        self._roster, self._classes, self._router = roster, classes, dict(router)
        self._clock, self._wall_clock, self._waiting, self._reachable = clock, wall_clock, waiting, reachable
        self._advice, self._prices, self._others, self._holds = advice, prices, others, holds
        self._actions, self._fullness = list(actions), fullness
        self._started = clock()
        self._at = float("-inf")
        self._last: dict[str, Any] = {}
        self._looking = asyncio.Lock()

    def state(self) -> LiveState:
        """This process's share."""
        return self.live.state(self._waiting())

    def outdated(self) -> None:
        """Something was changed: whoever looks next is to see it."""
        self._at = float("-inf")

    async def snapshot(self) -> dict[str, Any]:
        """As JSON would show it; at most ``FRESH_S`` old."""
        async with self._looking:
            if self._clock() - self._at > FRESH_S:
                self._at = self._clock()  # before the look: what is changed meanwhile needs another
                try:
                    self._last = await self._look()
                except BaseException:
                    self.outdated()
                    raise
            return self._last

    async def _look(self) -> dict[str, Any]:
        state = merged([self.state(), *(await self._others() if self._others else ())])
        entries, up, holds = self._roster.snapshot(), self._reachable(), self._holds()
        workers = [
            _worker(entry, name in up, holds.get(name)) | {"full": self._fullness(entry.info, entry.load)}
            for name, entry in sorted(entries.items())
        ]
        advice, pin, timeline = await self._control()
        return {
            "at": self._wall_clock(),
            "router": self._router | _served(entries.values()) | {"uptime_s": self._clock() - self._started},
            "window_s": state.seconds,
            "workers": workers,
            "pools": {role: _pool([w for w in workers if w["role"] == role]) for role in ROLES},
            "flows": [flow for entry in entries.values() for flow in _flows(entry)],
            "queues": [{"class": c.name, "waiting": state.waiting.get(c.name, 0)} for c in self._classes],
            "classes": [self._class(c, state) for c in self._classes],
            "totals": self._totals(state, workers),
            "recent": [msgspec.to_builtins(ended) for ended in state.recent],
            "advice": advice,
            "pin": pin,
            "decisions": timeline,
            "departed": [msgspec.to_builtins(d) for d in await self._departed()],
            "actions": self._actions,
        }

    async def _departed(self) -> Sequence[Departure]:
        return () if self._departures is None else await self._departures.recent()

    async def _control(self) -> tuple[Any, Any, Any]:
        if self._advice is None:
            return None, None, []
        advice, timeline, pin = await self._advice.look(TIMELINE)
        return msgspec.to_builtins(advice), msgspec.to_builtins(pin), msgspec.to_builtins(timeline)

    def _class(self, wanted: ContextClassLike, state: LiveState) -> dict[str, Any]:
        window, seconds = state.classes.get(wanted.name, ClassWindow()), state.seconds
        count = window.counts.get
        judged = count("met", 0) + count("missed", 0)
        return {
            "name": wanted.name,
            "max_tokens": wanted.max_tokens,
            "slo": {"ttft_s": wanted.slo_ttft_s, "tpot_s": wanted.slo_tpot_s},
            "requests_per_s": count("ended", 0) / seconds,
            "goodput_per_s": count("met", 0) / seconds if judged else None,
            "attainment": count("met", 0) / judged if judged else None,
            "unjudged": count("unjudged", 0),
            "refused": count("refused", 0),
            "failed": count("failed", 0),
            "waiting": state.waiting.get(wanted.name, 0),
            "input_tokens_per_s": count("in", 0) / seconds,
            "output_tokens_per_s": count("out", 0) / seconds,
            "hit_rate": _share(count("cached", 0), count("in", 0)),
            "hit_rate_best": _share(count("best", 0), count("in", 0)),
            "seconds": {name: percentiles(window.bins.get(name, {})) for name in STATIONS},
        }

    def _totals(self, state: LiveState, workers: list[dict[str, Any]]) -> dict[str, Any]:
        total = ClassWindow()
        for window in state.classes.values():
            total.add(window)
        count, seconds = total.counts.get, state.seconds
        judged = count("met", 0) + count("missed", 0)
        return {
            "requests_per_s": count("ended", 0) / seconds,
            "goodput_per_s": count("met", 0) / seconds if judged else None,
            "attainment": count("met", 0) / judged if judged else None,
            "refused_per_s": count("refused", 0) / seconds,
            "failed_per_s": count("failed", 0) / seconds,
            "input_tokens_per_s": count("in", 0) / seconds,
            "output_tokens_per_s": count("out", 0) / seconds,
            "hit_rate": _share(count("cached", 0), count("in", 0)),
            "hit_rate_best": _share(count("best", 0), count("in", 0)),
            "seconds": {name: percentiles(total.bins.get(name, {})) for name in STATIONS},
            "cost": self._cost(workers, count("in", 0) / seconds, count("out", 0) / seconds),
        }

    def _cost(
        self, workers: list[dict[str, Any]], input_per_s: float, output_per_s: float
    ) -> dict[str, Any] | None:
        """As ``cost.money`` defines it; None without prices."""
        dollars = {r: self._prices.of(r) * sum(w["role"] == r for w in workers) for r in ROLES}
        if not any(dollars.values()):
            return None
        each = per_million(dollars["prefill"], dollars["decode"], input_per_s * HOUR_S, output_per_s * HOUR_S)
        return {
            "dollars_per_hour": sum(dollars.values()),
            "per_million_input": each.input,
            "per_million_output": each.output,
            "per_million": each.all,
        }


def _served(entries: Iterable[RosterEntry]) -> dict[str, str]:
    """Which models the workers serve; a router's own setting names the one whose text it reads, served or not."""
    names = sorted({entry.info.model_id for entry in entries})
    return {"model": ", ".join(names)} if names else {}


def _worker(entry: RosterEntry, up: bool, hold: Hold | None) -> dict[str, Any]:
    info, load = entry.info, entry.load
    unused = load.free_pages + load.cached_pages
    return {
        "id": info.worker_id,
        "role": info.role,
        "state": info.state,
        "up": up,
        "hold": msgspec.to_builtins(hold),
        "age_s": entry.age_s,
        "model": info.model_id,
        "device": info.device,
        "address": info.address,
        "running": load.running,
        "waiting": load.waiting,
        "waiting_tokens": load.waiting_tokens,
        "max_batch": info.max_batch,
        "batch_fill": load.running / max(1, info.max_batch),
        "pages": {
            "total": info.pages,
            "free": load.free_pages,
            "cached": load.cached_pages,
            "leased": load.leased_pages,
            "quarantined": max(0, info.pages - unused - load.leased_pages),
        },
        "kv_usage": 1.0 - unused / max(1, info.pages),
        "hit_rate": _share(load.prefix_hits, load.prefix_queries),
        "prefill_tokens_per_s": load.prefill_tokens_per_s,
        "decode_tokens_per_s": load.decode_tokens_per_s,
        "in_steps": load.busy,
        "mfu": load.mfu,
        "mbu": load.mbu,
        "preemptions": load.preemptions,
        "watts": load.watts,
    }


def _pool(workers: list[dict[str, Any]]) -> dict[str, Any]:
    ready = [w for w in workers if w["up"] and w["state"] == "ready"]
    pages = sum(w["pages"]["total"] for w in workers)
    used = sum(w["pages"]["total"] * w["kv_usage"] for w in workers)
    return {
        "workers": len(workers),
        "ready": len(ready),
        "running": sum(w["running"] for w in workers),
        "waiting": sum(w["waiting"] for w in workers),
        "kv_usage": used / pages if pages else 0.0,
        "full": _mean([w["full"] for w in workers if w["full"] is not None]),
        "prefill_tokens_per_s": sum(w["prefill_tokens_per_s"] for w in workers),
        "decode_tokens_per_s": sum(w["decode_tokens_per_s"] for w in workers),
    }


def _flows(entry: RosterEntry) -> list[dict[str, Any]]:
    """KV from this worker to each of those that it sent to."""
    links = {link.peer: link for link in entry.load.kv_links}
    pairs = {pair.peer: pair for pair in entry.load.kv_pairs}
    found = []
    for peer in sorted(links.keys() | pairs.keys()):
        link, pair = links.get(peer), pairs.get(peer)
        found.append(
            {
                "from": entry.info.worker_id,
                "to": peer,
                "transport": link.transport if link else "",
                "measured_bytes_per_s": link.bytes_per_s if link else 0.0,
                "fallback": link.fallback if link else "",
                "transfers": pair.transfers if pair else 0,
                "failures": pair.failures if pair else 0,
                "bytes": pair.bytes if pair else 0,
                "bytes_per_s": pair.bytes_per_s if pair else 0.0,
            }
        )
    return found


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
