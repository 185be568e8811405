"""Speculation on one prefill and one decode worker: the same answers, and what is told of them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from baton.kernels.abi import native
from tests.decode_worker.test_preemption import DEMO
from tests.e2e.fleet import Fleet, wait_for

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")

KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 5, "n": 2},
    {"temperature": 0.7, "seed": 3, "repetition_penalty": 1.2, "frequency_penalty": 0.4},
    {"temperature": 0, "logprobs": 2, "min_tokens": 30, "logit_bias": {"5": 4.0}},
    {"temperature": 0, "stop": ["the"]},
    {"temperature": 0.8, "seed": 9, "stream": True, "stream_options": {"include_usage": True}},
]
PROMPT = "The river runs from the hills to the sea, and the river runs from the hills to"


async def asked(client: httpx.AsyncClient, url: str, **fields: Any) -> tuple[list[Any], dict[str, Any]]:
    """The choices, pieces of a stream joined, and the usage."""
    body = {"prompt": PROMPT, "max_tokens": 48, "return_token_ids": True, "ignore_eos": True} | fields
    response = await client.post(url + "/v1/completions", json=body)
    assert response.status_code == 200, response.text
    if not fields.get("stream"):
        found = response.json()
        return found["choices"], found["usage"]
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    text = "".join(choice["text"] for event in events for choice in event["choices"])
    ids = [token for event in events for choice in event["choices"] for token in choice["token_ids"]]
    return [text, ids], events[-1]["usage"]


async def batched(url: str, kinds: list[dict[str, Any]]) -> list[list[Any]]:
    """The choices of a batch job with a line for each kind."""
    body = {"prompt": PROMPT, "max_tokens": 48, "return_token_ids": True, "ignore_eos": True}
    lines = [
        {"custom_id": str(at), "method": "POST", "url": "/v1/completions", "body": body | kind}
        for at, kind in enumerate(kinds)
    ]
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        content = "\n".join(map(json.dumps, lines)).encode()
        file = await client.files.create(file=("in.jsonl", content), purpose="batch")
        job = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        async with asyncio.timeout(200.0):
            while (job := await client.batches.retrieve(job.id)).status != "completed":
                await asyncio.sleep(0.1)
        assert job.output_file_id is not None
        answered = map(json.loads, (await client.files.content(job.output_file_id)).text.splitlines())
    found = {line["custom_id"]: line["response"]["body"]["choices"] for line in answered}
    return [found[str(at)] for at in range(len(kinds))]


async def drafted_answer(client: httpx.AsyncClient, url: str, **fields: Any) -> tuple[list[Any], dict[str, Any]]:
    """Asks again until a draft was accepted: whether to draft is decided by times, which a busy machine blurs."""
    async with asyncio.timeout(200.0):
        while True:
            answer = await asked(client, url, **fields)
            if answer[1].get("completion_tokens_details", {}).get("accepted_prediction_tokens"):
                return answer


async def test_answers_are_the_same_with_drafts_and_usage_tells_of_them() -> None:
    with Fleet(
        1,
        1,
        worker={"model": str(DEMO), "speculation": f"auto+draft:{DEMO}"},
        router={"local_prefill_max_tokens": 0},
    ) as f:
        async with httpx.AsyncClient(timeout=100) as client:
            off = {"speculative.n_max": 0}
            plain = await asyncio.gather(*(asked(client, f.url, **kind, **off) for kind in KINDS))
            expected = {"type": "content", "content": plain[0][0][0]["text"]}
            first = await drafted_answer(client, f.url, **KINDS[0], prediction=expected)
            drafted = await asyncio.gather(*(asked(client, f.url, **kind) for kind in KINDS))
        in_a_batch = await batched(f.url, [kind for kind in KINDS if not kind.get("stream")])
        f.wait_for_baseline()
    assert first[0] == plain[0][0]
    details = first[1]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 0
    assert details["accepted_prediction_tokens"] < first[1]["completion_tokens"]
    assert [choices for choices, _ in drafted] == [choices for choices, _ in plain]
    assert in_a_batch == [
        choices for kind, (choices, _) in zip(KINDS, plain, strict=True) if not kind.get("stream")
    ]
    assert not any("completion_tokens_details" in usage for _, usage in plain)


def killed_one(fleet: Fleet) -> None:
    """Kills the decode worker that writes most."""
    slot = max(("decode-0", "decode-1"), key=lambda slot: fleet.snapshot(slot).running)
    before = fleet.record(slot).incarnation
    fleet.kill(slot, "engine")
    fleet.wait_for_return(slot, before)


def changed_role(fleet: Fleet) -> None:
    """Lets a decode worker read prompts from now on, and then write again."""
    for role in ("prefill", "decode"):
        reply = httpx.post(f"{fleet.url}/v1/workers/decode-1/role", json={"role": role}, timeout=100)
        assert reply.status_code == 200, reply.text


@pytest.mark.thorough  # of one engine: tests/decode_worker/test_identity.py
async def test_answers_go_on_with_drafts_after_a_kill_and_changes_of_roles() -> None:
    """Runs on few pages, so that sequences are preempted; answers are what they are without drafts, in peace."""
    worker = {
        "model": str(DEMO),
        "speculation": "auto+self+lookahead",
        "speculation_control_share": 0.1,
        "pages": 40,
    }
    kinds = [kind | {"max_tokens": 150, "stop": None} for kind in KINDS if "stream" not in kind]
    with Fleet(1, 2, worker=worker, router={"local_prefill_max_tokens": 0}) as f:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=200, limits=limits) as client:
            off = {"speculative.n_max": 0}
            plain = [(await asked(client, f.url, **kind, **off))[0] for kind in kinds]
            over = asyncio.Event()

            async def keep_asking(kind: dict[str, Any], wanted: list[Any]) -> int:
                accepted = 0
                while not over.is_set():
                    choices, usage = await asked(client, f.url, **kind)
                    assert choices == wanted, kind
                    accepted += usage.get("completion_tokens_details", {}).get("accepted_prediction_tokens", 0)
                return accepted

            async with asyncio.TaskGroup() as scope:
                asking = [scope.create_task(keep_asking(*pair)) for pair in zip(kinds, plain, strict=True)]
                for act in (killed_one, changed_role):
                    await asyncio.to_thread(wait_for, lambda: written(f) > 0, 60.0, "answers being written")
                    await asyncio.to_thread(act, f)
                over.set()
            assert [await one for one in asking]
        f.wait_for_baseline()
        told = sum(f.metric(slot, "baton_sequence_steps_total") for slot in ("decode-0", "decode-1"))
        arms = sum(f.metric(slot, "baton_speculation_tokens_total") for slot in ("decode-0", "decode-1"))
    assert told > 0
    assert arms >= told


def written(fleet: Fleet) -> int:
    return sum(fleet.snapshot(slot).running for slot in ("decode-0", "decode-1"))
