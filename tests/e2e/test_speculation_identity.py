"""Answers of every kind through a whole cluster with drafts are what one colocated worker gives without any.

``make identity`` asks 10,000 requests (or BATON_IDENTITY of them, from seed BATON_IDENTITY_SEED on): of a colocated
worker, of one prefill and one decode worker, and of two decode workers of which one is killed again and again, so
that answers migrate; each with look-ups, and with a draft model beside them. Pages are few, so that answers are
preempted. The engine's loop alone: ``tests/decode_worker/test_identity.py``.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from typing import Any

import httpx
import pytest

from baton.cluster.served_model import DEMO
from baton.kernels.abi import native
from tests.e2e.fleet import DRAFT, Fleet

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(native.library() is None, reason="no native kernels here"),
]

# Clusters by name: workers that only read prompts, others, and pages of each of these, fewer than requests take.
CLUSTERS = {"colocated": (0, 1, 40), "1P1D": (1, 1, 40), "1P2D-kills": (1, 2, 28)}
SPECULATIONS = {"auto": "auto", "draft": f"auto+draft:{DRAFT}"}
CASES = [(cluster, speculation) for cluster in CLUSTERS for speculation in SPECULATIONS]
AT_ONCE = 24  # requests at a time
KILL_EVERY = 60  # answers between two kills
MAX_TOKENS = 40
LATE_S = 200.0
NEARLY = 1e-3  # of logprobs: a row that was read in a chunk is summed in another order than one decoded alone
AGAIN = {429, 503}  # typed refusals while a worker is away
WORDS = ("the", "river", "runs", "from", "hill", "to", "sea", "and", "a", "small", "boat", "goes", "down", "it")
PENALTIES = {"presence_penalty": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
GRAMMARS = (
    {"guided_regex": "[a-z ]{20,30}(yes|no)", "ignore_eos": False},
    {
        "guided_json": {
            "type": "object",
            "properties": {"why": {"type": "string", "maxLength": 20}},
            "required": ["why"],
        }
    },
)
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
    {"temperature": 1.0, "n": 2},
    {"temperature": 0.7, **PENALTIES},
    {"temperature": 0, "logprobs": 2, **PENALTIES},
    {"temperature": 0.9, "logprobs": 1},
    {"temperature": 0, "stop": ["the", "ing"]},
    {"temperature": 0, "min_tokens": 4, "logit_bias": {"5": 4.0, "9": -100}, "ignore_eos": False},
    {"temperature": 0, "stream": True},
    {"temperature": 0.8, "stream": True, "logprobs": 1},
    *({"temperature": 0, **grammar} for grammar in GRAMMARS),
    {"temperature": 0.8, "logprobs": 1, **GRAMMARS[0]},
]


def body_of(seed: int) -> dict[str, Any]:
    """Draws a request whose prompt repeats itself with some edits."""
    rng = random.Random(seed)
    phrase = rng.choices(WORDS, k=rng.randint(4, 10))
    text = [word if rng.random() < 0.95 else rng.choice(WORDS) for word in phrase * rng.randint(3, 8)]
    body = {
        "prompt": " ".join(text),
        "max_tokens": rng.randint(4, MAX_TOKENS),
        "ignore_eos": True,
        "return_token_ids": True,
        "seed": rng.getrandbits(30),
    }
    return body | rng.choice(KINDS)


class Whole:
    """Collects one answer: by choice its text, ids, end, and logprobs, and the drafts that stood."""

    def __init__(self) -> None:
        self.choices: dict[int, tuple[str, tuple[int, ...], str]] = {}
        self.logprobs: dict[int, list[float]] = {}
        self.accepted = 0

    def add(self, event: dict[str, Any]) -> None:
        """Adds a response, or an event of a stream."""
        assert "error" not in event, event
        details = (event.get("usage") or {}).get("completion_tokens_details") or {}
        self.accepted += details.get("accepted_prediction_tokens", 0)
        for choice in event["choices"]:
            text, ids, end = self.choices.get(choice["index"], ("", (), ""))
            more = text + choice["text"], (*ids, *choice["token_ids"]), choice["finish_reason"] or end
            self.choices[choice["index"]] = more
            if (told := choice.get("logprobs")) is not None:
                self.logprobs.setdefault(choice["index"], []).extend(told["token_logprobs"])


async def answered(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> Whole:
    """Asks until there is an answer: while a worker is away, some are refused."""
    if body.get("stream"):
        body = body | {"stream_options": {"include_usage": True}}
    async with asyncio.timeout(LATE_S):
        while True:
            response = await client.post(url + "/v1/completions", json=body)
            if response.status_code in AGAIN:
                await asyncio.sleep(0.05)
                continue
            assert response.status_code == 200, f"{response.text}: {body}"
            whole = Whole()
            if not body.get("stream"):
                whole.add(response.json())
                return whole
            events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
            if any(event["error"]["code"] in ("worker_lost", "no_worker") for event in events if "error" in event):
                continue
            for event in events:
                whole.add(event)
            return whole


async def all_answers(fleet: Fleet, bodies: dict[int, dict[str, Any]], kill_every: int = 0) -> dict[int, Whole]:
    """Asks for all, some at once; a decode worker's engine is killed after every ``kill_every`` answers."""
    found, left, kills = dict[int, Whole](), iter(bodies.items()), 0
    async with httpx.AsyncClient(timeout=LATE_S) as client:

        async def ask() -> None:
            nonlocal kills
            for seed, body in left:
                found[seed] = await answered(client, fleet.url, body)
                if kill_every and len(found) // kill_every > kills:
                    kills += 1
                    await asyncio.to_thread(kill, fleet, kills)

        async with asyncio.TaskGroup() as scope:
            for _ in range(AT_ONCE):
                scope.create_task(ask())
    return found


def kill(fleet: Fleet, number: int) -> None:
    """Kills the engine of one decode worker after the other, and waits for its return."""
    slot = f"decode-{number % 2}"
    before = fleet.record(slot).incarnation
    fleet.kill(slot, "engine")
    fleet.wait_for_return(slot, before)


def with_predictions(bodies: dict[int, dict[str, Any]], plain: dict[int, Whole]) -> dict[int, dict[str, Any]]:
    """Adds to each third request what it will be answered, as the client's prediction."""
    return {
        seed: body
        | ({"prediction": {"type": "content", "content": plain[seed].choices[0][0]}} if seed % 3 == 0 else {})
        for seed, body in bodies.items()
    }


def compare(bodies: dict[int, dict[str, Any]], plain: dict[int, Whole], drafted: dict[int, Whole]) -> None:
    for seed, wanted in plain.items():
        told = f"seed {seed}: {bodies[seed]}"
        assert drafted[seed].choices == wanted.choices, told
        for choice, logprobs in wanted.logprobs.items():
            assert drafted[seed].logprobs[choice] == pytest.approx(logprobs, abs=NEARLY), told


@pytest.mark.parametrize(("cluster", "speculation"), CASES)
async def test_answers_with_drafts_through_a_cluster_are_those_of_one_worker_without(
    cluster: str, speculation: str
) -> None:
    count = int(os.environ.get("BATON_IDENTITY", "10000")) // len(CASES)
    first = int(os.environ.get("BATON_IDENTITY_SEED", "100")) + count * CASES.index((cluster, speculation))
    bodies = {seed: body_of(seed) for seed in range(first, first + count)}
    with Fleet(0, 1, colocated=True, worker={"model": str(DEMO), "speculation": "none"}) as fleet:
        plain = await all_answers(fleet, bodies)
    prefill, decode, pages = CLUSTERS[cluster]
    worker = {"model": str(DEMO), "speculation": SPECULATIONS[speculation], "pages": pages}
    router = {"local_prefill_max_tokens": 0} if prefill else {}
    with Fleet(prefill, decode, colocated=not prefill, worker=worker, router=router) as fleet:
        slots = [f"decode-{at}" for at in range(decode)]
        asked = with_predictions(bodies, plain)
        drafted = await all_answers(fleet, asked, KILL_EVERY if decode > 1 else 0)
        preempted = sum(fleet.metric(slot, "baton_preemptions_total") for slot in slots)
        fleet.wait_for_baseline()
    compare(bodies, plain, drafted)
    stood = sum(one.accepted for one in drafted.values())
    kinds = Counter(end for one in plain.values() for _, _, end in one.choices.values())
    kills = count // KILL_EVERY if decode > 1 else 0
    print(
        f"{cluster}, {speculation}, from seed {first}: {count} requests, {stood} drafts stood, {preempted:g}"
        f" preemptions, {kills} kills, ends {dict(kinds)}"
    )
    assert stood > 0
