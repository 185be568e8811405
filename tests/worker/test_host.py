"""Real worker hosts as processes (paced engine, no Redis), driven by raw gRPC as a router would."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton.cluster.membership import PolledRoster, WorkerEntry, connect
from baton.cluster.prefix_index import PrefixIndex
from baton.engine.backends.paced.runner import paced_answer
from baton.kv.layout.prefix import block_hashes, root
from baton.launch.redis_server import RedisServer
from baton.protos import convert
from baton.protos.nouns import Sampling
from baton.protos.v1 import worker_pb2 as w
from baton.protos.v1 import worker_pb2_grpc as stubs
from tests.worker.host_rig import (
    CONTEXT,
    KV,
    MODEL,
    PAGES,
    PROFILE,
    VOCAB,
    Host,
    Router,
    error_of,
    greedy,
    prompt_of,
    routed,
    workers,
)

__all__ = ["workers"]


async def test_answers_are_the_oracles_on_either_way(workers: tuple[Host, Host]) -> None:
    async with routed(workers) as router:
        lengths = [1, 15, 16, 17, 100, 255, 256, 257, 700, 1500]
        cases = [(prompt_of(n, n % 3), greedy(4 + n % 17), i % 3 == 0) for i, n in enumerate(lengths * 2)]
        got = await asyncio.gather(*(router.answer(f"r{i}", p, s, way) for i, (p, s, way) in enumerate(cases)))
        assert got == [paced_answer(p, s, **MODEL) for p, s, _ in cases]
        assert await router.settles()


async def test_stop_ids_min_tokens_seeds_and_logprobs_cross_the_wire(workers: tuple[Host, Host]) -> None:
    async with routed(workers) as router:
        prompt = prompt_of(90, 9)
        stop = paced_answer(prompt, greedy(), **MODEL)[2]
        sampled = Sampling(temperature=1.0, seed=11, max_tokens=6, logprobs=2)
        sampled = msgspec.structs.replace(sampled, logit_bias={7: -1.5})
        for i, sampling in enumerate(
            [greedy(stop_token_ids=(stop,)), greedy(stop_token_ids=(stop,), min_tokens=5), sampled]
        ):
            assert await router.answer(f"s{i}", prompt, sampling) == paced_answer(prompt, sampling, **MODEL)
        assert await router.settles()


async def test_a_prefill_answers_with_the_first_token_and_its_stations(workers: tuple[Host, Host]) -> None:
    async with routed(workers) as router:
        prompt = prompt_of(333, 77)
        lease = await router.admit("r", prompt, greedy())
        response = await router.prefill("r", prompt, greedy(), lease)
        assert list(response.first.token_ids) == paced_answer(prompt, greedy(1), **MODEL)
        assert response.shipped_blocks == 21
        assert response.shipped_bytes == 21 * 16 * KV
        assert {s.name for s in response.stations} == {"queue", "prefill", "transfer"}
        await router.over["r"]
        assert await router.settles()


@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.1, 0.3])
async def test_a_cancel_in_any_phase_frees_everything(workers: tuple[Host, Host], after_s: float) -> None:
    async with routed(workers) as router:
        prompt, sampling = prompt_of(3000, int(after_s * 1000) + 5), greedy(5000)
        lease = await router.admit("r", prompt, sampling)
        call = router.prefill("r", prompt, sampling, lease)
        await asyncio.sleep(after_s)
        call.cancel()
        await router.cancel("r")
        assert await router.over["r"] == "cancelled"
        assert await router.settles()


async def test_a_lost_session_frees_everything(workers: tuple[Host, Host]) -> None:
    async with routed(workers) as watcher:
        async with routed(workers) as router:
            prompts = [prompt_of(2000, n + 30) for n in range(4)]
            leases = [await router.admit(f"r{i}", p, greedy(900), i % 2 == 0) for i, p in enumerate(prompts)]
            calls = [router.prefill(f"r{i}", prompts[i], greedy(900), leases[i]) for i in (1, 3)]
            await asyncio.sleep(0.05)
        assert await watcher.settles()
        del calls


async def broken_off(router: Router, prompt: list[int]) -> tuple[Any, w.Rearmed | None]:
    """Returns a lease whose prefill was broken off, rearmed; None where the prefill was over before."""
    lease, before = await router.admit("r", prompt, greedy()), await router.steps()
    first = router.prefill("r", prompt, greedy(), lease)
    await router.prefills(before + 4)
    first.cancel()
    await router.write(w.SessionUp(rearm=w.Rearm(request_id="r", lease=lease.lease, epoch=2)))
    said = asyncio.ensure_future(router.said["r"].get())
    await asyncio.wait({said, router.over["r"]}, return_when=asyncio.FIRST_COMPLETED)
    if said.done() and isinstance(said.result(), w.Rearmed):
        return lease, said.result()
    said.cancel()
    await router.over["r"]
    return lease, None


async def test_a_second_prefill_finishes_what_the_first_began(workers: tuple[Host, Host]) -> None:
    async with routed(workers) as router:
        for salt in range(50, 70):  # a busy machine may hear of the fourth step after the last one
            prompt = prompt_of(8000, salt)
            lease, rearmed = await broken_off(router, prompt)
            if rearmed is not None:
                break
        assert rearmed is not None
        assert len(rearmed.received_blocks) > 10
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await router.prefill("r", prompt, greedy(), lease)
        assert error_of(refused.value) == "StaleEpoch"
        response = await router.prefill("r", prompt, greedy(), lease, 2, rearmed.received_blocks)
        assert response.shipped_blocks == 500 - len(rearmed.received_blocks)
        await router.over["r"]
        assert router.tokens["r"] == paced_answer(prompt, greedy(), **MODEL)
        assert await router.settles()


async def test_bad_requests_are_refused_by_name_and_serving_goes_on(workers: tuple[Host, Host]) -> None:
    async with routed(workers) as router:
        for prompt, error in (
            ([], "InvalidRequest"),
            ([VOCAB], "InvalidRequest"),
            ([1] * CONTEXT, "ContextTooLong"),
        ):
            assert (await router.admit("bad", prompt, greedy())).error.type == error
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await router.prefill("bad", [VOCAB], greedy(), w.Admitted(lease=b"x" * 16))
        assert error_of(failed.value) in ("InvalidRequest", "LeaseUnknown")
        assert await router.answer("good", [1, 2], greedy()) == paced_answer([1, 2], greedy(), **MODEL)
        assert await router.settles()


async def test_a_slow_reader_gets_merged_frames_and_the_whole_answer(workers: tuple[Host, Host]) -> None:
    async with routed(workers) as quick:
        slow = Router(*(host.record().address for host in workers))
        await slow.hello()
        lease = asyncio.ensure_future(slow.admit("r", prompt_of(20, 3), greedy(1500), local=True))
        await asyncio.sleep(0.2)  # nothing is read meanwhile
        assert await quick.answer("q", prompt_of(20, 4), greedy(50), local=True)
        reading = asyncio.create_task(slow.read())
        assert isinstance(await lease, w.Admitted)
        assert await slow.over["r"] == "length"
        assert slow.tokens["r"] == paced_answer(prompt_of(20, 3), greedy(1500), **MODEL)
        reading.cancel()
        slow.call.cancel()
        for channel in slow.channels:
            await channel.close()


async def test_describe_health_reflection_and_metrics_answer(workers: tuple[Host, Host]) -> None:
    for host, role in zip(workers, ("prefill", "decode"), strict=True):
        record = host.record()
        async with grpc.aio.insecure_channel(record.address) as channel:
            info = convert.info_from_pb(await stubs.WorkerStub(channel).Describe(w.DescribeRequest()))
            assert info.kv_backing.endswith("pages")
            assert (info.role, info.pages, info.address, info.state) == (role, PAGES, record.address, "ready")
            assert (info.model_id, info.incarnation) == ("test", record.incarnation)
            health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert health.status == health_pb2.HealthCheckResponse.SERVING
            ask = reflection_pb2.ServerReflectionRequest(list_services="")
            call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([ask]))
            listed = [s.name async for r in call for s in r.list_services_response.service]
            assert "baton.v1.Worker" in listed
        text = await asyncio.to_thread(_get, f"http://{record.metrics_address}/metrics")
        assert f'baton_engine_steps_total{{model="test",role="{role}"' in text


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as response:
        return response.read().decode()


def test_neither_process_of_a_paced_worker_loads_torch(workers: tuple[Host, Host]) -> None:
    for host in workers:
        record = host.record()
        for pid in (record.pid, record.engine_pid):
            assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()


async def test_a_killed_engine_ends_its_host_at_once_and_its_requests_with_worker_lost(tmp_path: Path) -> None:
    slow = tmp_path / "slow.toml"
    slow.write_text(
        PROFILE.replace("prefill_token = 0.00005", "prefill_token = 0.002").replace("fixed = 0.001", "fixed = 0.01")
    )
    pair = Host(tmp_path, "prefill", device=f"paced:{slow}"), Host(tmp_path, "decode", device=f"paced:{slow}")
    async with routed(pair) as router:
        prompt = prompt_of(8000)
        lease = await router.admit("r", prompt, greedy())
        assert (await router.admit("local", prompt_of(50), greedy(8000), True)).pages
        call = router.prefill("r", prompt, greedy(), lease)
        await router.prefills(1)
        os.kill(pair[0].record().engine_pid, signal.SIGKILL)
        with pytest.raises(grpc.aio.AioRpcError) as lost:
            await call
        assert error_of(lost.value) == "WorkerLost"
        os.kill(pair[1].record().engine_pid, signal.SIGKILL)
        assert await asyncio.wait_for(router.over["local"], 20) == "WorkerLost"
        for host in pair:
            assert await asyncio.to_thread(host.process.wait, 60) == 70


async def test_an_engine_that_is_killed_while_its_worker_drains_is_told_of_at_once(tmp_path: Path) -> None:
    slow = tmp_path / "slow.toml"
    slow.write_text(PROFILE.replace("fixed = 0.001", "fixed = 0.01"))
    host = Host(tmp_path, "decode", device=f"paced:{slow}", drain_grace_s=600.0)
    async with routed((host, host)) as router:
        assert (await router.admit("r", prompt_of(30), greedy(8000), True)).pages
        host.process.terminate()
        await router.drains()
        os.kill(host.record().engine_pid, signal.SIGKILL)
        assert await asyncio.wait_for(router.over["r"], 60) == "WorkerLost"
        assert await asyncio.to_thread(host.process.wait, 60) == 70


def test_a_killed_host_takes_its_engine_along(tmp_path: Path) -> None:
    host = Host(tmp_path, "decode")
    engine = host.record().engine_pid
    host.process.kill()
    host.process.wait()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{engine}/stat").exists() and time.monotonic() < deadline:
        if Path(f"/proc/{engine}/stat").read_text().split()[2] == "Z":
            return
        time.sleep(0.01)
    assert not Path(f"/proc/{engine}").exists()


async def test_drain_finishes_what_runs_and_refuses_what_comes(tmp_path: Path) -> None:
    slow = tmp_path / "slow.toml"
    slow.write_text(PROFILE.replace("fixed = 0.001", "fixed = 0.01"))
    pair = Host(tmp_path, "prefill"), Host(tmp_path, "decode", device=f"paced:{slow}")
    async with routed(pair) as router:
        answer = asyncio.create_task(router.answer("r", prompt_of(30), greedy(200), True))
        endless = await router.admit("e", prompt_of(30, 1), greedy(8000), True)
        assert endless.pages
        worker = stubs.WorkerStub(router.channels[1])
        for nonsense in (-1.0, float("nan"), float("inf")):  # begins no drain
            with pytest.raises(grpc.aio.AioRpcError, match=r"grace_seconds .*give 0 to 600"):
                await worker.Drain(w.DrainRequest(grace_seconds=nonsense))
        drain = worker.Drain(w.DrainRequest(grace_seconds=500.0))
        await router.drains()
        assert (await router.admit("late", [1], greedy())).error.type == "Draining"
        assert await answer == paced_answer(prompt_of(30), greedy(200), **MODEL)
        impatient = await worker.Drain(w.DrainRequest(grace_seconds=0.0))
        assert (impatient.finished, impatient.cancelled) == (0, 1)
        drained = await drain
        assert (drained.finished, drained.cancelled) == (1, 0)
        assert await router.over["e"] == "Draining"  # which is no failure of the worker
        assert await router.settles()
    assert [host.end() for host in pair] == [0, 0]


def published(seen: Mapping[str, WorkerEntry]) -> bool:
    """Returns whether both workers' loads tell of the request that they answered."""
    loads = {name: entry.load for name, entry in seen.items()}
    return (
        loads.keys() == {"prefill-0", "decode-0"}
        and loads["decode-0"].cached_pages == 8
        and loads["decode-0"].step_curve is not None
        and loads["prefill-0"].transfer_curve is not None
    )


async def test_a_member_publishes_its_load_and_its_cached_blocks(tmp_path: Path) -> None:
    server = RedisServer(tmp_path / "redis").start()
    pair = [Host(tmp_path, role, redis_url=server.url, beat_s=0.05) for role in ("prefill", "decode")]
    redis = connect(server.url)
    try:
        async with routed((pair[0], pair[1])) as router, PolledRoster(redis, "baton", poll_s=0.05) as roster:
            await router.answer("r", prompt_of(100), greedy(30))
            async with asyncio.timeout(60):
                while not published(seen := roster.snapshot()):
                    await asyncio.sleep(0.01)
            assert {name: e.info.address for name, e in seen.items()} == {
                h.spec.slot: h.record().address for h in pair
            }
            chain = block_hashes(root(seen["decode-0"].info.fingerprint, "paced"), prompt_of(100))
            index = PrefixIndex(redis, "baton")
            async with asyncio.timeout(60):
                while await index.longest(["prefill-0", "decode-0"], chain) != {"prefill-0": 6, "decode-0": 6}:
                    await asyncio.sleep(0.01)
        assert [h.end() for h in pair] == [0, 0]
        async with PolledRoster(redis, "baton") as roster:
            assert all(e.info.state == "left" for e in roster.snapshot().values())
    finally:
        await redis.aclose()
        server.stop()


def test_a_slot_is_never_held_twice_and_an_owners_end_is_the_hosts(tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    host = Host(tmp_path, "decode", owner_pid=owner.pid)
    host.record()
    assert Host(tmp_path, "decode").process.wait(60) == 3
    owner.kill()
    owner.wait()
    assert host.process.wait(60) == 0


def test_a_worker_that_can_not_start_says_why(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        mistakes = [({"device": "paced:no-such-profile"}, "no-such-profile"), ({"port": port}, f"127.0.0.1:{port}")]
        hosts = [Host(tmp_path, "decode", slot=f"w{i}", **fields) for i, (fields, _) in enumerate(mistakes)]
        for host, (_, named) in zip(hosts, mistakes, strict=True):
            assert host.process.wait(60) == 1
            record = host.slot.current(host.process.pid)
            assert record is not None
            assert record.state == "failed"
            assert record.error is not None
            assert record.error.type == "ConfigError"
            assert named in record.error.message
