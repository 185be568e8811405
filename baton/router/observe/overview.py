"""Snapshots of the whole cluster as JSON: workers, pools, flows, queues, classes, requests, advice, decisions.

Knows nothing of HTTP or of pages. Workers and their loads come from the roster, the last minute's figures from the
routers' own ``live`` states, advice and timeline from the controller's store. A snapshot takes some milliseconds at
most and is shared by all who ask within ``FRESH_S``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

import msgspec

from baton.cluster.adapters import AdapterEntry
from baton.cluster.advice import AdviceStore
from baton.cluster.departures import Departure, Departures
from baton.cluster.holds import SlotHold
from baton.cost.money import per_million
from baton.protos.json import Json
from baton.protos.measurements import AdapterCurve, SpeculationTotals, WorkerLoad
from baton.protos.nouns import WorkerInfo
from baton.router.observe.handovers import obstacles
from baton.router.observe.live import ClassWindow, LiveState, LiveStats, merged, percentiles
from baton.router.request.context_class import ContextClassLike
from baton.router.request.environment import Environment
from baton.router.workers.roster import RosterEntry, RosterReader

FRESH_S = 0.4  # seconds for which a look is shared by all who ask
HOUR_S = 3600.0  # seconds
TIMELINE = 40  # last changes of roles that a look shows
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
    """Holds the dollars per worker and hour; 0: unknown."""

    prefill: float = 0.0
    decode: float = 0.0

    def of(self, role: str) -> float:
        """Returns the dollars per hour of one worker of ``role``."""
        return self.prefill if role == "prefill" else self.decode


class WorkerSources(msgspec.Struct, frozen=True):
    """Holds the sources of a snapshot's figures of workers.

    ``reachable`` gives the incarnations of those whose link is up, by id. ``fullness`` is a worker's load by the
    controller's definition, None while its costs aren't known. ``adapters`` gives those that are served, by name.
    ``redis_away_s`` gives the seconds since Redis was found away, None while it answers.
    """

    roster: RosterReader
    reachable: Callable[[], Mapping[str, str]]
    holds: Callable[[], Mapping[str, SlotHold]] = dict
    departures: Departures | None = None
    fullness: Callable[[WorkerInfo, WorkerLoad], float | None] = lambda info, load: None
    adapters: Callable[[], Mapping[str, AdapterEntry]] = dict
    redis_away_s: Callable[[], float | None] = lambda: None


class TrafficSources(msgspec.Struct, frozen=True):
    """Holds the sources of a snapshot's figures of requests.

    ``waiting`` gives the queued requests by context class. ``others`` asks the router's other processes for their
    states; None: there is only this one.
    """

    live: LiveStats
    waiting: Callable[[], dict[str, int]]
    others: Callable[[], Awaitable[Sequence[LiveState]]] | None = None


class RouterFacts(msgspec.Struct, frozen=True):
    """Holds what doesn't change while a router runs.

    ``router`` is shown as it is; ``actions`` names the operator actions that it accepts.
    """

    router: Json
    classes: Sequence[ContextClassLike]
    prices: Prices = Prices()
    actions: tuple[str, ...] = ()


class Overview:
    """Takes snapshots of one cluster as JSON; ``advice`` is None without a controller."""

    def __init__(
        self,
        workers: WorkerSources,
        traffic: TrafficSources,
        facts: RouterFacts,
        environment: Environment,
        advice: AdviceStore | None = None,
    ) -> None:
        self._workers, self._traffic, self._facts = workers, traffic, facts
        self._environment, self._advice = environment, advice
        self._started = environment.clock()
        self._at = float("-inf")
        self._last: Json = {}
        self._looking = asyncio.Lock()

    def state(self) -> LiveState:
        """Returns this process's live figures."""
        return self._traffic.live.state(self._traffic.waiting())

    def outdated(self) -> None:
        """Makes the next ``snapshot`` read everything anew, because something was just changed."""
        self._at = float("-inf")

    async def snapshot(self) -> Json:
        """Returns the cluster as a JSON object, at most FRESH_S old."""
        async with self._looking:
            if self._environment.clock() - self._at > FRESH_S:
                self._at = self._environment.clock()  # before the look: what is changed meanwhile needs another
                try:
                    self._last = await self._look()
                except BaseException:
                    self.outdated()
                    raise
            return self._last

    async def _look(self) -> Json:
        others, sources = self._traffic.others, self._workers
        state = merged([self.state(), *(await others() if others else ())])
        entries, up, holds = sources.roster.snapshot(), sources.reachable(), sources.holds()
        workers = [
            _worker(entry, up.get(name) == entry.info.incarnation, holds.get(name))
            | {"full": sources.fullness(entry.info, entry.load)}
            for name, entry in sorted(entries.items())
        ]
        advice, pin, timeline = await self._control()
        return {
            "at": self._environment.wall_clock(),
            "router": dict(self._facts.router)
            | _served(entries.values())
            | {"uptime_s": self._environment.clock() - self._started},
            "redis": {"away_s": sources.redis_away_s()},
            "window_s": state.seconds,
            "workers": workers,
            "pools": {role: _pool([w for w in workers if w["role"] == role]) for role in ROLES},
            "adapters": [_adapter(a, entries.values()) for a in sources.adapters().values()],
            "flows": [flow for entry in entries.values() for flow in _flows(entry)],
            "obstacles": [msgspec.to_builtins(o) | {"remedy": o.remedy} for o in obstacles(entries.values())],
            "queues": [{"class": c.name, "waiting": state.waiting.get(c.name, 0)} for c in self._facts.classes],
            "classes": [self._class(c, state) for c in self._facts.classes],
            "totals": self._totals(state, workers),
            "recent": [msgspec.to_builtins(ended) for ended in state.recent],
            "advice": advice,
            "pin": pin,
            "decisions": timeline,
            "departed": [msgspec.to_builtins(d) for d in await self._departed()],
            "actions": list(self._facts.actions),
        }

    async def _departed(self) -> Sequence[Departure]:
        departures = self._workers.departures
        return () if departures is None else await departures.recent()

    async def _control(self) -> tuple[object, object, object]:
        if self._advice is None:
            return None, None, []
        advice, timeline, pin = await self._advice.look(TIMELINE)
        return msgspec.to_builtins(advice), msgspec.to_builtins(pin), msgspec.to_builtins(timeline)

    def _class(self, wanted: ContextClassLike, state: LiveState) -> Json:
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

    def _totals(self, state: LiveState, workers: list[Json]) -> Json:
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

    def _cost(self, workers: list[Json], input_per_s: float, output_per_s: float) -> Json | None:
        """Returns the cost as ``cost.money`` defines it; None without prices."""
        dollars = {r: self._facts.prices.of(r) * sum(w["role"] == r for w in workers) for r in ROLES}
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
    """Returns the models that the workers serve; a router's own setting names the one whose text it reads, served
    or not.
    """
    names = sorted({entry.info.model_id for entry in entries})
    return {"model": ", ".join(names)} if names else {}


def _worker(entry: RosterEntry, up: bool, hold: SlotHold | None) -> Json:
    info, load = entry.info, entry.load
    unused = load.free_pages + load.cached_pages
    return {
        "id": info.worker_id,
        "incarnation": info.incarnation,
        "role": info.role,
        "state": info.state,
        "up": up,
        "hold": msgspec.to_builtins(hold),
        "age_s": entry.age_s,
        "model": info.model_id,
        "adapters": list(info.adapters),
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
        "speculation": _speculation(load.speculation),
        "adapter_cost": _adapter_cost(load.adapter_curve),
    }


def _adapter_cost(curve: AdapterCurve | None) -> Json | None:
    """Returns the seconds per rank that a row on an adapter, and a further adapter, add to a step; None until a
    worker has seen steps with adapters and without.
    """
    return None if curve is None else {"row_s": curve.row, "adapter_s": curve.adapter, "rank": curve.rank}


def _speculation(totals: SpeculationTotals | None) -> Json | None:
    """Returns what drafts brought since the worker began, None without any; ``gain`` is None until it is known."""
    if totals is None or not totals.sequence_steps:
        return None
    return {
        "tokens_per_step": 1.0 + sum(totals.accepted) / totals.sequence_steps,
        "acceptance": [_share(stood, judged) for stood, judged in zip(totals.accepted, totals.judged, strict=True)],
        "gain": totals.gain or None,
    }


def _adapter(adapter: AdapterEntry, workers: Iterable[RosterEntry]) -> Json:
    holders = [w.info.worker_id for w in workers if adapter.adapter_id and adapter.adapter_id in w.info.adapters]
    return {
        "name": adapter.name,
        "model": adapter.model_id,
        "adapter_id": adapter.adapter_id,
        "tenant": adapter.tenant,
        "pinned": adapter.pinned,
        "by": adapter.by,
        "workers": sorted(holders),
    }


def _pool(workers: list[Json]) -> Json:
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


def _flows(entry: RosterEntry) -> list[Json]:
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
