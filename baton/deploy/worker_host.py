"""A worker's I/O process: start the engine, serve its role over gRPC, be a member, leave in order. No torch.

Knows nothing of Ray. It holds its slot's lock for as long as it lives, and ends with non-zero status as soon as
its engine is gone: a worker is two processes that live and die together.

    python -m baton.deploy.worker_host --spec FILE_OR_JSON
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import os
import secrets
import signal
import sys
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import msgspec
import uvloop

from baton.cluster.telemetry import setup_tracing
from baton.deploy.engine_process import EngineProcess
from baton.deploy.slots import Slot, SlotRecord
from baton.deploy.worker_membership import join
from baton.deploy.worker_report import WorkerReport
from baton.deploy.worker_server import Worker, serve_grpc, serve_metrics
from baton.deploy.worker_spec import WorkerSpec, load_spec
from baton.protos.channel import EngineReady
from baton.protos.errors import StartupError, WorkerLost, to_info
from baton.protos.nouns import WorkerInfo

T = TypeVar("T")
log = logging.getLogger("baton.worker")

EXIT_STARTUP, EXIT_TAKEN, EXIT_ENGINE_LOST = 1, 3, 70
STOP_GRACE_S = 0.3
LEAVE_S = 8  # beyond its drain: what still hangs then is ended by the kernel, so that the slot comes free


def main() -> int:
    """Parse, take the slot, run; the exit status says how it ended."""
    parser = argparse.ArgumentParser(prog="baton.deploy.worker_host")
    parser.add_argument("--spec", required=True, help="WorkerSpec: JSON, or a file that holds it")
    try:
        spec = load_spec(parser.parse_args().spec)
    except StartupError as error:
        print(error.message, file=sys.stderr)
        return EXIT_STARTUP
    logging.basicConfig(level=spec.log_level.upper(), format=f"%(asctime)s {spec.slot} %(levelname)s %(message)s")
    slot = Slot(spec.slot_dir, spec.slot)
    if not slot.acquire():
        log.error("slot %s is held by process %s", spec.slot, slot.holder())
        return EXIT_TAKEN
    return uvloop.run(Host(spec, slot).run())


class Host:
    """One life of a worker."""

    def __init__(self, spec: WorkerSpec, slot: Slot):
        self.spec = spec
        self.slot = slot
        self.record = SlotRecord(spec.slot, os.getpid(), incarnation=secrets.token_hex(8))
        self.stop: asyncio.Event = asyncio.Event()

    async def run(self) -> int:
        """From start to exit status."""
        watch_signals(self.stop)
        watch_owner(self.spec.owner_pid, self.stop)
        self._say(state="starting")
        try:
            engine = await self._unless_stopped(EngineProcess.start(self.spec))
            return 0 if engine is None else await self._with(engine)
        except StartupError as error:
            log.error("%s", error.message)
            self._say(state="failed", error=to_info(error))
            return EXIT_STARTUP

    async def _with(self, engine: EngineProcess) -> int:
        shutdown_tracing = setup_tracing("baton-" + self.spec.role, self.spec.otlp_endpoint, self.spec.slot)
        try:
            return await self._serve(engine)
        finally:
            engine.leave()
            await asyncio.to_thread(shutdown_tracing)

    async def _serve(self, engine: EngineProcess) -> int:
        report = WorkerReport(describe(self.spec, engine.ready, self.record.incarnation))
        async with AsyncExitStack() as stack:
            metrics_address = serve_metrics(self.spec, report, stack)
            worker = Worker(self.spec, engine, report, self._info(engine.ready, metrics_address))
            server = await serve_grpc(self.spec, worker, stack)
            member = await join(self.spec, worker, report, stack)
            info = worker.control.info
            self._say(
                state="ready", address=info.address, engine_pid=engine.process.pid, metrics_address=metrics_address
            )
            log.info("%s ready on %s: %s, %d pages", info.role, info.address, info.model_id, info.pages)
            await self._unless_stopped(worker.listen())
            signal.alarm(LEAVE_S if worker.engine_lost else LEAVE_S + math.ceil(self.spec.drain_grace_s))
            if worker.engine_lost:
                error = WorkerLost(f"the engine of {self.spec.slot} died ({engine.obituary()})")
                log.error("%s", error.message)
                worker.lost(error)
            else:
                await worker.leave(self.spec.drain_grace_s, member)
            await server.stop(STOP_GRACE_S)
        return EXIT_ENGINE_LOST if worker.engine_lost else 0

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of ``work``, or None when we are told to stop first."""
        task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(self.stop.wait())
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return None

    def _info(self, ready: EngineReady, metrics_address: str) -> WorkerInfo:
        info = describe(self.spec, ready, self.record.incarnation)
        return msgspec.structs.replace(info, metrics_address=metrics_address)

    def _say(self, **fields: object) -> None:
        self.record = msgspec.structs.replace(self.record, **fields)
        self.slot.write(self.record)


def describe(spec: WorkerSpec, ready: EngineReady, incarnation: str) -> WorkerInfo:
    """Who this worker is, but for its addresses."""
    return WorkerInfo(
        worker_id=spec.slot,
        incarnation=incarnation,
        role=spec.role,
        address="",
        model_id=spec.model_id,
        fingerprint=ready.fingerprint,
        layout=ready.layout,
        max_model_len=ready.max_model_len,
        vocab_size=ready.vocab_size,
        eos_token_ids=ready.eos_token_ids,
        pages=ready.pages,
        max_batch=ready.max_batch,
        device=spec.device,
    )


def watch_signals(stop: asyncio.Event) -> None:
    """SIGTERM and SIGINT ask for an orderly end."""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)


def watch_owner(pid: int, stop: asyncio.Event) -> None:
    """End when process ``pid`` ends; 0 watches nobody."""
    if not pid:
        return
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        stop.set()
        return
    loop = asyncio.get_running_loop()

    def gone() -> None:
        loop.remove_reader(fd)
        stop.set()

    loop.add_reader(fd, gone)


if __name__ == "__main__":
    sys.exit(main())
