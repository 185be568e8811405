"""Real worker hosts as processes, and a router's side of their sessions over raw gRPC."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Any

import grpc
import pytest

from baton.protos import convert
from baton.protos.nouns import Sampling
from baton.protos.rpc import ERROR_METADATA
from baton.protos.v1 import worker_pb2 as w
from baton.protos.v1 import worker_pb2_grpc as stubs
from baton.worker.slots import SlotRecord, WorkerSlot
from baton.worker.spec import WorkerSpec, dump_spec
from tests import warm

KV, VOCAB, CONTEXT, PAGES = 32, 997, 8192, 1500
MODEL: dict[str, Any] = {"kv_bytes_per_token": KV, "vocab_size": VOCAB, "max_model_len": CONTEXT}
PROFILE = f"""
about = "a slow little engine for tests"
model_kv_bytes_per_token = {KV}
kv_bytes_per_token = {KV}
pages = {PAGES}
vocab_size = {VOCAB}
max_model_len = {CONTEXT}
prefill_chunk = 256

[step]
fixed = 0.001
prefill_token = 0.00005
prefill_pair = 0.0
decode_sequence = 0.0
decode_context_token = 0.0

[transfer]
fixed = 0.0
per_byte = 0.0
"""


class Host:
    """A worker host process, which ends with us."""

    command: tuple[str, ...] = ("-m", "baton.worker.host")

    def __init__(self, folder: Path, role: str, log: IO[bytes] | None = None, **spec: Any):
        profile = folder / "test.toml"
        profile.write_text(PROFILE)
        fields = {
            "slot": f"{role}-0", "slot_dir": str(folder), "device": f"paced:{profile}", "model_name": "test",
            "owner_pid": os.getpid(),
        }  # fmt: skip
        self.spec = WorkerSpec.of(role=role, **fields | spec)  # type: ignore[arg-type]
        self.slot = WorkerSlot(folder, self.spec.slot)
        command = [sys.executable, *self.command, "--spec", dump_spec(self.spec)]
        with (folder / f"{self.spec.slot}.log").open("ab") as own:
            self.process = warm.of(self.spec.engine.device).start(command, own) or subprocess.Popen(
                command, stderr=log
            )

    def record(self, state: str = "ready") -> SlotRecord:
        """Waits until the worker is in ``state``; returns its record."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            record = self.slot.current(self.process.pid)
            if record is not None and record.state == state:
                return record
            time.sleep(0.02)
        raise AssertionError(f"{self.spec.slot} is not {state}")

    def end(self) -> int:
        self.process.terminate()
        return self.process.wait(60)


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Host, Host]]:
    folder = tmp_path_factory.mktemp("slots")
    pair = Host(folder, "prefill", prefill_chunk_tokens=256), Host(folder, "decode", prefill_chunk_tokens=256)
    for host in pair:
        host.record()
    yield pair
    assert [host.end() for host in pair] == [0, 0]


class Router:
    """A session with the decode worker and a stub of the prefill worker."""

    def __init__(self, prefill: str, decode: str):
        self.decode_address = decode
        self.channels = [grpc.aio.insecure_channel(a) for a in (prefill, decode)]
        self.prefill_stub = stubs.PrefillWorkerStub(self.channels[0])
        self.writing = asyncio.Lock()
        self.call: Any = stubs.DecodeWorkerStub(self.channels[1]).Session()
        self.said: dict[str, asyncio.Queue[Any]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.over: dict[str, asyncio.Future[str]] = {}

    async def hello(self) -> w.WorkerInfo:
        await self.write(w.SessionUp(hello=w.Hello(router_id="test", protocol="1.0")))
        return (await self.call.read()).welcome.worker

    async def write(self, message: w.SessionUp) -> None:
        async with self.writing:
            await self.call.write(message)

    async def read(self) -> None:
        while (message := await self.call.read()) is not grpc.aio.EOF:
            kind = message.WhichOneof("message")
            for output in message.tokens.outputs if kind == "tokens" else ():
                assert output.run.output_index == len(self.tokens[output.request_id])
                self.tokens[output.request_id] += output.run.token_ids
                if output.run.finish_reason:
                    self.over[output.request_id].set_result(output.run.finish_reason)
            if kind == "ended":
                self.over[message.ended.request_id].set_result(message.ended.error.type or "cancelled")
            elif kind != "tokens":
                body = getattr(message, kind)
                self.said[body.request_id].put_nowait(body)

    async def admit(self, name: str, prompt: list[int], sampling: Sampling, local: bool = False) -> Any:
        self.said[name], self.tokens[name] = asyncio.Queue(), []
        self.over[name] = asyncio.get_running_loop().create_future()
        admit = w.Admit(request_id=name, token_ids=prompt, prompt_tokens=len(prompt), local=local)
        admit.sampling.CopyFrom(convert.sampling_to_pb(sampling))
        await self.write(w.SessionUp(admit=admit))
        return await self.said[name].get()

    def prefill(
        self, name: str, prompt: list[int], sampling: Sampling, lease: Any, epoch: int = 1, got: Any = ()
    ) -> Any:
        return self.prefill_stub.Prefill(
            w.PrefillRequest(
                request_id=name,
                lease=lease.lease,
                epoch=epoch,
                decode_address=self.decode_address,
                token_ids=prompt,
                prompt_tokens=len(prompt),
                held_blocks=lease.held_blocks,
                received_blocks=got,
                sampling=convert.sampling_to_pb(sampling),
            )
        )

    async def cancel(self, name: str) -> None:
        await self.write(w.SessionUp(cancel=w.Cancel(request_id=name, reason="client_gone")))

    async def answer(self, name: str, prompt: list[int], sampling: Sampling, local: bool = False) -> list[int]:
        lease = await self.admit(name, prompt, sampling, local)
        assert isinstance(lease, w.Admitted), lease
        if not local:
            await self.prefill(name, prompt, sampling, lease)
        await self.over[name]
        return self.tokens[name]

    async def snapshots(self) -> list[Any]:
        asked = (stubs.WorkerStub(c).Snapshot(w.SnapshotRequest()) for c in self.channels)
        return [convert.snapshot_from_pb(s) for s in await asyncio.gather(*asked)]

    async def drains(self) -> None:
        """Until the decode worker says that it drains."""
        stub = stubs.WorkerStub(self.channels[1])
        while (await stub.Describe(w.DescribeRequest())).state != "draining":
            await asyncio.sleep(0.001)

    async def steps(self) -> int:
        """Returns how many steps the prefill worker's engine has made."""
        return int((await self.snapshots())[0].steps)

    async def prefills(self, steps: int) -> None:
        """Waits until the prefill worker's engine has made that many steps in all."""
        while await self.steps() < steps:
            await asyncio.sleep(0.001)

    async def settles(self, within_s: float = 30.0) -> bool:
        """Both pools are back at baseline, soon."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            if all(s.at_baseline and s.running == 0 and s.waiting == 0 for s in await self.snapshots()):
                return all(s.leases_swept == 0 for s in await self.snapshots())
            await asyncio.sleep(0.01)
        return False


@asynccontextmanager
async def routed(workers: tuple[Host, Host]) -> AsyncIterator[Router]:
    router = Router(*(host.record().address for host in workers))
    await router.hello()
    reading = asyncio.create_task(router.read())
    try:
        yield router
    finally:
        reading.cancel()
        router.call.cancel()
        for channel in router.channels:
            await channel.close()


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(7 * i + 131 * salt + 3) % VOCAB for i in range(length)]


def greedy(max_tokens: int = 8, **more: Any) -> Sampling:
    return Sampling(temperature=0.0, max_tokens=max_tokens, **more)


def error_of(failure: grpc.aio.AioRpcError) -> str:
    metadata = dict(failure.trailing_metadata() or ())
    return w.WireError.FromString(metadata[ERROR_METADATA]).type
