"""Tests what the I/O side of a prefill worker tells its engine, and when it no longer may."""

from __future__ import annotations

import asyncio

import pytest

from baton.engine.backends.paced.runner import PacedRunner
from baton.kv.memory.host_pages import PageMemory
from baton.kv.transport.grpc import GrpcTransport
from baton.prefill_worker.io.handoff_frames import Sender
from baton.prefill_worker.io.service import DecodePeers, PrefillCall, PrefillService
from baton.protos import channel as ch
from baton.protos.errors import Draining
from baton.protos.nouns import EngineRequest, KvLayout, Sampling


async def test_a_prompt_that_waits_as_the_role_ends_never_reaches_the_next_roles_engine() -> None:
    spec = PacedRunner("test", 32, 997, 4096, lambda s: 0.0).spec
    sent: list[ch.ToEngine] = []
    asked, told = asyncio.Event(), asyncio.Event()

    async def layout_of(address: str) -> KvLayout:
        asked.set()
        await told.wait()
        return spec.layout

    memory = PageMemory.create(4, spec.layout.page_bytes)
    service = PrefillService(
        sent.append, memory, Sender("p", "m", spec.fingerprint, spec.layout), GrpcTransport(),
        asyncio.get_running_loop().time, DecodePeers(layout_of=layout_of),
    )  # fmt: skip
    call = PrefillCall(EngineRequest("r", (1, 2), 2, Sampling()), "m", "nowhere:1", b"lease", 1, held_blocks=1)
    reading = asyncio.create_task(service.prefill(call))
    await asked.wait()
    service.hang_up()
    told.set()
    with pytest.raises(Draining, match="leaves its role"):
        await reading
    with pytest.raises(Draining):
        await service.prefill(call)
    assert sent == []
    memory.close()
