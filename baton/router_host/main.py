"""The router's process: ``python -m baton.router_host.main --config FILE``.

Composes roster, dispatch, models and surfaces, and owns the signals. FILE is a BatonConfig as JSON, complete:
no other file and no environment is read. Knows nothing of who starts workers.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path

import uvloop
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from baton.cluster.advice import AdviceStore
from baton.cluster.batch_store import BatchStore
from baton.cluster.buckets import Buckets
from baton.cluster.config import BatonConfig
from baton.cluster.departures import Departures
from baton.cluster.holds import HeldRoster, Holds
from baton.cluster.membership import Roster, connect
from baton.cluster.prefix_index import PrefixIndex
from baton.cluster.records import RecordStore
from baton.cluster.served_model import is_paced, model_name, text_directory
from baton.cluster.telemetry import RouterMetrics, setup_tracing
from baton.controller.loop import controlling
from baton.process.file_limit import raise_file_limit
from baton.process.heap import settle_heap
from baton.process.loop_watch import watching
from baton.process.security import public_identity, router_dialer, show_ends
from baton.protos.errors import BatonError
from baton.router.access.gate import Gate
from baton.router.access.keys import KeyRing
from baton.router.api.batch.lane import BatchLane
from baton.router.compose import dispatching
from baton.router.dispatch.dispatcher import DispatchSettings
from baton.router.observe.live import LiveStats
from baton.router.server import RouterAddress, make_frontend, serve_router
from baton.router.text.catalog import ModelCatalog
from baton.router_host.metrics import SharedMetrics
from baton.router_host.overview import make_overview
from baton.router_host.pool import run_pool

log = logging.getLogger("baton.router")


def main() -> None:
    """Serve until SIGTERM or SIGINT. An error of ours is one line on stderr and exit code 1."""
    parser = argparse.ArgumentParser(prog="baton.router_host.main")
    parser.add_argument("--config", required=True, help="file with a BatonConfig as JSON")
    parser.add_argument("--index", type=int, default=-1, help="which of router.processes this is; the pool says it")
    arguments = parser.parse_args()
    path = Path(arguments.config)
    sys.exit(run(BatonConfig.model_validate_json(path.read_bytes()), path, arguments.index))


def run(config: BatonConfig, path: Path, index: int = -1) -> int:
    """The router of ``config`` (which ``path`` holds as JSON), until SIGTERM or SIGINT; the exit status."""
    raise_file_limit()
    logging.basicConfig(level=config.telemetry.log_level.upper(), format="%(asctime)s %(name)s %(message)s")
    try:
        uvloop.run(_until_signalled(config, path, index))
    except BatonError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1
    return 0


async def _until_signalled(config: BatonConfig, path: Path, index: int) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    if config.router.processes > 1 and index < 0:
        await run_pool(config, path, stop)
        return
    router_id = f"router-{os.urandom(8).hex()}"
    flush_spans = setup_tracing("baton-router", config.telemetry.otlp_endpoint, router_id)

    def started(address: RouterAddress) -> None:
        log.info("listening at %s", address.url)
        settle_heap()

    try:
        await serve(config, router_id, stop, started, path, index)
    finally:
        flush_spans()


async def serve(
    config: BatonConfig,
    router_id: str,
    stop: asyncio.Event,
    started: Callable[[RouterAddress], None],
    path: Path = Path(),
    index: int = -1,
) -> None:
    """One router, until ``stop`` is set; process ``index`` of a pool that has its files beside ``path``."""
    identity = public_identity(config)
    redis, registry = connect(config.redis.url), CollectorRegistry()
    metrics = RouterMetrics(registry, config.telemetry.vllm_names, config.telemetry.enabled)
    show_ends(config, identity, metrics.certificate)
    live = LiveStats(time.monotonic) if config.telemetry.enabled else None
    advice = AdviceStore(redis, config.cluster.namespace, config.controller.mode != "off")
    namespace = config.cluster.namespace
    seed = config.worker.seed
    rng = random.Random(f"{seed}/{index}") if seed else random.SystemRandom()
    shared = SharedMetrics(registry, path.parent, index, config.router.processes) if index >= 0 else None
    gate, batches = make_gate(config, redis), BatchStore(redis, namespace)
    try:
        async with (
            Roster(redis, namespace) as seen,
            HeldRoster(seen, Holds(redis, namespace), departures=Departures(redis, namespace)) as roster,
            dispatching(
                config.router,
                roster,
                PrefixIndex(redis, namespace),
                RecordStore(redis, namespace),
                router_id=router_id,
                metrics=metrics,
                rng=rng,
                dialer=router_dialer(config),
                settings=DispatchSettings(hedge_factor=config.router.hedge_prefill, stall_s=config.router.stall_s),
                live=live,
            ) as dispatcher,
            gate.settling(),
            shared.serving() if shared else nullcontext(),
        ):
            dispatcher.listeners.append(lambda request, summary: gate.spent(request.key, summary.completion_tokens))
            overview = None
            if live is not None:
                overview = make_overview(config, router_id, roster, live, dispatcher, advice, metrics, shared)
            name = model_name(config, config.worker.model)
            files = text_directory(config.worker.model, is_paced(config))
            catalog = ModelCatalog(dispatcher.models, {name: files}, time.time)
            frontend = make_frontend(
                config.router,
                dispatcher,
                catalog,
                metrics,
                entropy=rng.randbytes,
                gate=gate,
                decisions=dispatcher.decisions,
                batches=batches,
                exposition=shared.exposition if shared else None,
                roles=dispatcher.roles,
                advice=advice,
                overview=overview,
                holds=roster,
            )
            frontend.grammars.warm()
            async with (
                BatchLane(frontend, batches, router_id, dispatcher.queued).running(),
                controlling(config, redis, router_id, dispatcher, roster, advice, metrics),
            ):
                with ExitStack() as watches:

                    def begun(address: RouterAddress) -> None:
                        started(address)
                        count = metrics.loop_stalls.inc
                        watches.enter_context(watching(config.telemetry.loop_stall_s, lambda seconds: count()))

                    await serve_router(config.router, frontend, registry, stop, begun, identity)
    finally:
        await redis.aclose()


def make_gate(config: BatonConfig, redis: Redis) -> Gate:
    """Closed when there is a file of keys. Raises ConfigError."""
    if not config.router.keys_file:
        return Gate()
    keys = KeyRing(Path(config.router.keys_file), time.monotonic)
    return Gate(keys, time.monotonic, Buckets(redis, config.cluster.namespace))


if __name__ == "__main__":
    main()
