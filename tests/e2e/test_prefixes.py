"""Pinned prefixes through REST on real workers, and hints about caching, which change no token."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.e2e.fleet import Fleet
from tests.e2e.paced import Oracle, slow_profile

PAGES, LONG = 96, 320


def ask(fleet: Fleet, prompt: list[int], **fields: Any) -> tuple[list[int], int]:
    """Tokens, and how many of the prompt's were found."""
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = httpx.post(fleet.url + "/v1/completions", json=body | fields, timeout=60).json()
    return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def pin(fleet: Fleet, **body: Any) -> httpx.Response:
    return httpx.post(fleet.url + "/v1/cache/prefixes", json=body, timeout=60)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> str:
    return slow_profile(tmp_path_factory.mktemp("profile"), fixed=0.0005, prefill=0.00001, kv=64)


@pytest.fixture(scope="module")
def oracle(profile: str) -> Oracle:
    return Oracle(profile)


@pytest.fixture(scope="module")
def fleet(profile: str):
    worker = {"device": f"paced:{profile}", "pages": PAGES, "pinned_share": 0.5}
    router = {"local_prefill_max_tokens": 0, "max_pinned_tokens": 100_000}
    with Fleet(prefill=2, decode=1, worker=worker, router=router, redis={"beat_s": 0.05}) as fleet:
        yield fleet


def flood(fleet: Fleet, oracle: Oracle, seed: int) -> None:
    for one in range(10):
        ask(fleet, oracle.prompt(seed + one, LONG))


def test_a_pinned_prefix_is_found_on_each_of_its_workers_after_a_flood_until_it_is_deleted(fleet, oracle):
    prompt = oracle.prompt(1, LONG)
    made = pin(fleet, prompt=prompt, workers=2, ttl_s=600).json()
    assert [each["tokens"] for each in made["workers"]] == [LONG, LONG]
    assert (made["object"], made["tokens"], made["expires_at"] - made["created"]) == ("cache.prefix", LONG, 600)
    flood(fleet, oracle, 100)
    assert ask(fleet, [*prompt, 5]) == (oracle.answer([*prompt, 5], 4), LONG)
    listed = httpx.get(fleet.url + "/v1/cache/prefixes", timeout=60).json()["data"]
    assert [each["id"] for each in listed] == [made["id"]]
    gone = httpx.delete(f"{fleet.url}/v1/cache/prefixes/{made['id']}", timeout=60)
    assert (gone.status_code, gone.json()["deleted"]) == (200, True)
    assert httpx.delete(f"{fleet.url}/v1/cache/prefixes/{made['id']}", timeout=60).status_code == 404
    assert httpx.get(fleet.url + "/v1/cache/prefixes", timeout=60).json()["data"] == []
    fleet.wait_for_baseline()


def test_messages_are_pinned_as_a_conversation_that_goes_on(fleet):
    said = [{"role": "system", "content": "be brief " * 40}]
    made = pin(fleet, messages=said, workers=2)  # on both: the index may not know yet which one has it
    assert made.status_code == 200, made.text
    assert made.json()["workers"][0]["tokens"] > 200
    body = {"messages": [*said, {"role": "user", "content": "hi"}], "max_tokens": 2, "temperature": 0}
    answer = httpx.post(fleet.url + "/v1/chat/completions", json=body, timeout=60).json()
    found = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert found >= made.json()["workers"][0]["tokens"] - 16
    httpx.delete(f"{fleet.url}/v1/cache/prefixes/{made.json()['id']}", timeout=60)


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        ({}, 400, "prompt"),
        ({"prompt": [1] * 40, "messages": [{"role": "user", "content": "x"}]}, 400, "prompt"),
        ({"prompt": [1] * 40, "workers": 3}, 400, "workers"),
        ({"prompt": [1] * 40, "ttl_s": 0}, 400, "ttl_s"),
        ({"prompt": [1] * 9}, 400, "prompt"),
        ({"prompt": [2] * 1000}, 429, "worker.pinned_share"),
    ],
)
def test_what_can_not_be_pinned_is_refused_by_name(fleet, body, status, named):
    refused = pin(fleet, **body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (status, named), refused.text
    assert httpx.get(fleet.url + "/v1/cache/prefixes", timeout=60).json()["data"] == []


def test_hints_about_caching_change_no_token(fleet, oracle):
    prompt = oracle.prompt(9, 100)
    wanted = oracle.answer(prompt, 4)
    for hints in (
        {"prompt_cache_key": "another conversation's"},
        {"prompt_cache_retention": "24h"},
        {"prompt_cache_key": "x", "prompt_cache_retention": "nonsense", "cache_control": {"type": "ephemeral"}},
    ):
        assert ask(fleet, prompt, **hints)[0] == wanted
    plain = {"role": "user", "content": [{"type": "text", "text": "what is a river?"}]}
    marked = {
        "role": "user",
        "content": [
            {"type": "text", "text": "what is a river?", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
        ],
        "cache_control": {"type": "ephemeral"},
    }
    told = [
        httpx.post(
            fleet.url + "/v1/chat/completions",
            json={"messages": [message], "max_tokens": 4, "temperature": 0, "return_token_ids": True},
            timeout=60,
        ).json()
        for message in (plain, marked)
    ]
    assert told[0]["choices"][0]["token_ids"] == told[1]["choices"][0]["token_ids"]
    assert told[0]["usage"]["prompt_tokens"] == told[1]["usage"]["prompt_tokens"]
