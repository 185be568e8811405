"""Puts the router's core together and runs it: links, view, queue, dispatcher. Knows nothing of REST or text."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import Protocol

from prometheus_client import CollectorRegistry

from baton.cluster.telemetry import RouterMetrics
from baton.router.admission import Admission
from baton.router.dispatch import Dispatcher, DispatchSettings
from baton.router.hints import PrefixHints, PrefixIndex
from baton.router.links import Connect, Links, connect
from baton.router.policies import load_policy
from baton.router.tagging import ClassLike, ContextClasses
from baton.router.view import ClusterView, Roster, ViewSettings


class CoreConfig(Protocol):
    """What the core reads of the router's config; cluster.config.RouterConfig has it."""

    @property
    def policy(self) -> str:
        """A file's name in router/policies."""

    @property
    def context_classes(self) -> Iterable[ClassLike]:
        """In rising order."""

    @property
    def max_queue(self) -> int:
        """Requests that wait, per class."""

    @property
    def local_prefill_max_tokens(self) -> int:
        """Uncached tokens up to which a decode worker reads a prompt itself."""


@asynccontextmanager
async def dispatching(
    config: CoreConfig,
    roster: Roster,
    index: PrefixIndex | None = None,
    *,
    router_id: str = "",
    metrics: RouterMetrics | None = None,
    clock: Callable[[], float] = time.monotonic,
    rng: random.Random | None = None,
    connect: Connect = connect,
    settings: DispatchSettings = DispatchSettings(),
) -> AsyncIterator[Dispatcher]:
    """A running Dispatcher; on leaving, what runs is cancelled and every link is closed. Raises ConfigError."""
    rng = rng or random.Random()
    metrics = metrics or RouterMetrics(CollectorRegistry())
    policy, classes = load_policy(config.policy), ContextClasses(config.context_classes)
    links = Links(router_id or f"router-{rng.getrandbits(64):016x}", lambda: None, rng, connect)
    view = ClusterView(roster, links, clock, ViewSettings(local_max_tokens=config.local_prefill_max_tokens))
    admission = Admission(config.max_queue, clock)
    dispatcher = Dispatcher(view, links, admission, classes, policy, PrefixHints(index), metrics, clock, settings)
    for role in ("prefill", "decode"):
        metrics.workers.labels(role).set_function(partial(view.reachable, role))
    following = asyncio.create_task(view.run(), name="cluster view")
    try:
        yield dispatcher
    finally:
        await dispatcher.close()
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await links.close()
