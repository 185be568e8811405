"""Checks that bits stay the same: alone or in company, one chunk or many, one worker or a handoff.

Likelihoods are compared exactly, not nearly: the native step promises it (kernels/README.md).
"""

import asyncio

import httpx
import pytest

from baton.kernels.abi import native
from tests.conformance.checkpoints import make, prompts
from tests.e2e.fleet import Fleet

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")

TOKENS = 24
KINDS = [
    pytest.param({"dtype": "bfloat16"}, marks=pytest.mark.thorough),
    {"dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "int8"},
    pytest.param({"dtype": "float32"}, marks=pytest.mark.soak),
    pytest.param({"quantization": "int4", "kv_cache_dtype": "fp8"}, marks=pytest.mark.soak),
]


async def _ask(client: httpx.AsyncClient, url: str, prompt: list[int], seed: int):
    body = {
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0.7 if seed % 2 else 0,
        "seed": seed,
        "ignore_eos": True,
        "logprobs": 2,
        "return_token_ids": True,
    }
    response = await client.post(url + "/v1/completions", json=body)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


async def _answers(model: str, asked: list[list[int]], together: bool, colocated: bool, **worker):
    router = {"local_prefill_max_tokens": 0}
    with Fleet(1, 1, colocated=colocated, worker={"model": model, **worker}, router=router) as fleet:
        async with httpx.AsyncClient(timeout=100) as client:
            calls = [_ask(client, fleet.url, prompt, seed) for seed, prompt in enumerate(asked)]
            found = await asyncio.gather(*calls) if together else [await call for call in calls]
        fleet.wait_for_baseline()
        return found


@pytest.mark.thorough  # tests/decode_worker/test_identity.py
@pytest.mark.parametrize("kind", KINDS, ids=str)
async def test_company_chunks_and_handoffs_change_no_bit(tmp_path, kind):
    model = str(make(tmp_path / "model", "qwen3", tokenizer=True))
    asked = [prompt[:400] for prompt in prompts(1024, count=5, seed=8)]
    alone = await _answers(model, asked, False, True, prefill_chunk_tokens=512, **kind)
    handed = await _answers(model, asked, True, False, prefill_chunk_tokens=48, **kind)
    assert handed == alone
