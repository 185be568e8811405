"""Tests many requests at once: every answer equals its answer alone, and afterwards no page is held anywhere."""

import asyncio
import random

import grpc
import httpx
import pytest

from baton.protos.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from tests.e2e.fleet import DRAFT, Fleet, complete
from tests.e2e.paced import Oracle


@pytest.mark.thorough  # paced ones below; of the real engine: test_determinism.py
async def test_16_streams_of_mixed_length_on_the_real_engine_answer_as_they_do_alone():
    rng = random.Random(64)
    shared = [rng.randrange(300, 1500) for _ in range(200)]
    prompts = [
        (shared if i % 2 else []) + [rng.randrange(300, 1500) for _ in range(rng.choice([1, 7, 40, 130, 300]))]
        for i in range(16)
    ]
    with Fleet(prefill=1, decode=1, worker={"model": DRAFT}) as fleet:
        async with httpx.AsyncClient(timeout=120) as client:
            fields = {"temperature": 0, "max_tokens": 12}
            together = await asyncio.gather(*(complete(client, fleet.url, p, **fields) for p in prompts))
            alone = [await complete(client, fleet.url, p, **fields) for p in prompts]
        assert together == alone
        assert {len(a) for a in alone} == {12}
        fleet.wait_for_baseline()


async def _generate(stub, oracle: Oracle, prompt: list[int], max_tokens: int) -> bool:
    sampling = common_pb2.Sampling(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    tokens = inference_pb2.TokenIds(ids=prompt)
    request = inference_pb2.GenerateRequest(tokens=tokens, sampling=sampling, return_token_ids=True)
    ids: list[int] = []
    async for chunk in stub.GenerateStream(request, timeout=250):
        ids += [i for choice in chunk.choices for i in choice.token_ids]
    return ids == oracle.answer(prompt, max_tokens)


@pytest.mark.parametrize("streams", [100, pytest.param(1000, marks=pytest.mark.thorough)])
async def test_many_streams_on_4_prefill_and_4_decode_paced_workers_answer_as_the_oracle_does(streams):
    oracle, rng = Oracle("zero"), random.Random(streams)
    asked = [
        (oracle.prompt(seed, rng.choice([3, 40, 200, 700]), shared=seed % 5), rng.choice([4, 16, 40]))
        for seed in range(streams)
    ]
    with Fleet(prefill=4, decode=4, worker={"device": "paced:zero", "max_batch": 256}) as fleet:
        async with grpc.aio.insecure_channel(fleet.grpc) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            right = await asyncio.gather(*(_generate(stub, oracle, p, m) for p, m in asked))
        assert right.count(True) == streams
        snapshots = fleet.wait_for_baseline()
        assert all(s.steps for slot, s in snapshots.items() if slot.startswith("decode")), snapshots
