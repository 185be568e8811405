"""The router's process: ``python -m baton.router_host.main --config FILE``.

Owns the signals and the listeners; ``compose`` makes what they serve. FILE is a complete BatonConfig as JSON: no
other file and no environment is read. Knows nothing of who starts workers.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import uvloop
from prometheus_client import CollectorRegistry

from baton.cluster.config import BatonConfig
from baton.cluster.membership import connect
from baton.cluster.metering.telemetry import RouterMetrics, setup_tracing
from baton.process.file_limit import raise_file_limit
from baton.process.heap import settle_heap
from baton.process.loop_watch import watching
from baton.process.security import public_identity, show_ends
from baton.protos.errors import BatonError
from baton.router.server import RouterAddress, serve_router
from baton.router_host.compose import RouterIdentity, running_parts
from baton.router_host.pool import run_pool
from baton.tasks.lasting import counting_failures

log = logging.getLogger("baton.router")


def main() -> None:
    """Serves until SIGTERM or SIGINT; on a BatonError, prints one line to stderr and exits with 1."""
    parser = argparse.ArgumentParser(prog="baton.router_host.main")
    parser.add_argument("--config", required=True, help="file with a BatonConfig as JSON")
    parser.add_argument("--index", type=int, default=-1, help="which of router.processes this is; the pool says it")
    arguments = parser.parse_args()
    path = Path(arguments.config)
    sys.exit(run(BatonConfig.model_validate_json(path.read_bytes()), path, arguments.index))


def run(config: BatonConfig, path: Path, index: int = -1) -> int:
    """Runs the router of ``config``, also stored as JSON at ``path``, until SIGTERM or SIGINT; returns the exit
    status.

    ``index`` is its place in a pool; -1 starts a pool if there are to be several processes.
    """
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
    """Serves one router process until ``stop`` is set; calls ``started`` once it listens.

    ``path`` is the config file, beside which a pool's processes have their sockets; ``index`` is this one's place
    in the pool.
    """
    identity = public_identity(config)
    redis, registry = connect(config.redis.url), CollectorRegistry()
    metrics = RouterMetrics(registry, config.telemetry.vllm_names, config.telemetry.enabled)
    show_ends(config, identity, metrics.certificate)
    who = RouterIdentity(router_id, path.parent, index)
    try:
        async with running_parts(config, who, redis, registry, metrics) as surfaces:
            with ExitStack() as watches:
                failures = metrics.task_failures
                watches.enter_context(counting_failures(lambda task: failures.labels(task).inc()))

                def begun(address: RouterAddress) -> None:
                    started(address)
                    count = metrics.loop_stalls.inc
                    watches.enter_context(watching(config.telemetry.loop_stall_s, lambda seconds: count()))

                await serve_router(config.router, surfaces, stop, begun, identity)
    finally:
        await redis.aclose()


if __name__ == "__main__":
    main()
