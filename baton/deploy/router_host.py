"""The router's process: ``python -m baton.deploy.router_host --config FILE``.

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
from pathlib import Path

import uvloop
from prometheus_client import CollectorRegistry

from baton.cluster.config import BatonConfig
from baton.cluster.membership import Roster, connect
from baton.cluster.prefix_index import PrefixIndex
from baton.cluster.telemetry import RouterMetrics, setup_tracing
from baton.deploy.plans import model_name, text_directory
from baton.protos.errors import BatonError
from baton.router.catalog import ModelCatalog
from baton.router.compose import dispatching
from baton.router.server import RouterAddress, make_frontend, serve_router

log = logging.getLogger("baton.router")


def main() -> None:
    """Serve until SIGTERM or SIGINT. An error of ours is one line on stderr and exit code 1."""
    parser = argparse.ArgumentParser(prog="baton.deploy.router_host")
    parser.add_argument("--config", required=True, help="file with a BatonConfig as JSON")
    config = BatonConfig.model_validate_json(Path(parser.parse_args().config).read_bytes())
    logging.basicConfig(level=config.telemetry.log_level.upper(), format="%(asctime)s %(name)s %(message)s")
    try:
        uvloop.run(_until_signalled(config))
    except BatonError as error:
        print(f"error: {error.message}", file=sys.stderr)
        sys.exit(1)


async def _until_signalled(config: BatonConfig) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    router_id = f"router-{os.urandom(8).hex()}"
    flush_spans = setup_tracing("baton-router", config.telemetry.otlp_endpoint, router_id)
    try:
        await serve(config, router_id, stop, lambda address: log.info("listening at %s", address.url))
    finally:
        flush_spans()


async def serve(
    config: BatonConfig, router_id: str, stop: asyncio.Event, started: Callable[[RouterAddress], None]
) -> None:
    """One router, until ``stop`` is set."""
    redis, registry = connect(config.redis.url), CollectorRegistry()
    metrics = RouterMetrics(registry)
    namespace = config.cluster.namespace
    rng = random.Random(config.worker.seed) if config.worker.seed else random.SystemRandom()
    try:
        async with (
            Roster(redis, namespace) as roster,
            dispatching(
                config.router,
                roster,
                PrefixIndex(redis, namespace),
                router_id=router_id,
                metrics=metrics,
                rng=rng,
            ) as dispatcher,
        ):
            name, files = model_name(config, config.worker.model), text_directory(config.worker.model)
            catalog = ModelCatalog(dispatcher.models, {name: files}, time.time)
            frontend = make_frontend(config.router, dispatcher, catalog, metrics, entropy=rng.randbytes)
            await serve_router(config.router, frontend, registry, stop, started)
    finally:
        await redis.aclose()


if __name__ == "__main__":
    main()
