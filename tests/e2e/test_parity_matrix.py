"""Each field of the API gives the same JSON whatever way a request takes: colocated, disaggregated, local prefill.

Real processes, the demo model's small sister; one fleet per way, every case asked on each.
"""

import asyncio
import contextlib
import json
from collections.abc import Iterator

import httpx
import jsonschema
import openai
import pytest

from tests.e2e.fleet import DRAFT, Fleet
from tests.thorough import first_now

WAYS = {
    "colocated": {"colocated": True},
    "disaggregated": {"router": {"local_prefill_max_tokens": 0}},
    "local": {"router": {"local_prefill_max_tokens": 100_000, "policy": "least_loaded"}},
}
TAKEN = {"colocated": "way=local", "disaggregated": "way=prefill", "local": "way=local"}
TEXT = "Once upon a time there was a small village by the sea, and in it lived a fisherman who "
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
COMPLETION = {"prompt": TEXT, "max_tokens": 12, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 12, "temperature": 0}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}

TOOLS = [{"type": "function", "function": {"name": "person", "parameters": SCHEMA}}]
NAMED = {"type": "function", "function": {"name": "person"}}

COMPLETIONS = {
    "plain": {},
    "sampled": {"temperature": 0.9, "seed": 3, "n": 3},
    "top_k": {"temperature": 1.2, "seed": 4, "top_k": 9, "top_p": 0.8, "min_p": 0.01},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    "logit_bias": {"logit_bias": {"300": 100, "301": 99}},
    "stop": {"stop": ["e"], "max_tokens": 40},
    "include_stop": {"stop": ["e"], "include_stop_str_in_output": True, "max_tokens": 40},
    "stop_token_ids": {"logit_bias": {"300": 100}, "stop_token_ids": [300]},
    "min_tokens": {"logit_bias": {"300": 100}, "stop_token_ids": [300], "min_tokens": 5},
    "ignore_eos": {"logit_bias": {"1": 100}, "ignore_eos": True},
    "special_tokens": {"logit_bias": {"1": 100}, "ignore_eos": True, "skip_special_tokens": False},
    "logprobs": {"logprobs": 3},
    "logprobs_0": {"logprobs": 0},
    "token_ids": {"return_token_ids": True},
    "echo": {"echo": True},
    "batch": {"prompt": ["One day", TEXT, "The"], "n": 2, "seed": 1, "temperature": 1},
    "ids": {"prompt": [5, 6, 7, 8] * 9},
    "one_token": {"max_tokens": 1},
    "allowed": {"allowed_token_ids": [300, 301, 302], "temperature": 1, "seed": 5, "return_token_ids": True},
    "bad_words": {"bad_words": [" the", "the", " a"], "max_tokens": 40},
    "echo_logprobs": {"echo": True, "logprobs": 2},
    "echo_logprobs_n": {"echo": True, "logprobs": 1, "n": 2, "prompt": [TEXT, "The"]},
    "prompt_alone": {"echo": True, "logprobs": 2, "max_tokens": 0},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "regex": {"guided_regex": "[a-f]{4}-[0-9]{3}", "max_tokens": 60, "temperature": 1, "seed": 2, "n": 2},
    "choice": {"guided_choice": ["yes", "no", "perhaps"], "max_tokens": 30, "logprobs": 1},
    "grammar": {"guided_grammar": 'root ::= ("ab" | "c")+ "."', "temperature": 1, "seed": 6, "max_tokens": 60},
    "json_schema": {"response_format": FORMAT, "max_tokens": 200, "temperature": 1, "seed": 7},
    "grammar_stop": {"guided_regex": "[a-z]+", "stop": ["q"], "max_tokens": 50, "temperature": 1, "seed": 8},
}
CHATS = {
    "plain": {},
    "sampled": {"temperature": 0.9, "seed": 3, "n": 2},
    "logprobs": {"logprobs": True, "top_logprobs": 4},
    "token_ids": {"return_token_ids": True},
    "json_object": {"response_format": {"type": "json_object"}, "max_tokens": 60, "temperature": 1, "seed": 9},
    "json_schema": {"response_format": FORMAT, "max_tokens": 200, "temperature": 1, "seed": 7, "n": 2},
    "prompt_logprobs": {"prompt_logprobs": 0},
    "tool_required": {"tools": TOOLS, "tool_choice": "required", "max_tokens": 250, "temperature": 1, "seed": 3},
    "tool_named": {"tools": TOOLS, "tool_choice": NAMED, "max_tokens": 200, "temperature": 1, "seed": 4},
    "max_completion_tokens": {"max_completion_tokens": 3},
}
CASES = {f"completion-{name}": ("/v1/completions", COMPLETION | fields) for name, fields in COMPLETIONS.items()}
CASES |= {
    "embeddings-mean": ("/v1/embeddings", {"input": [TEXT * 9, "The"]}),
    "embeddings-last": ("/v1/embeddings", {"input": TEXT, "pooling": "last", "encoding_format": "base64"}),
}
CASES |= {f"chat-{name}": ("/v1/chat/completions", CHAT | fields) for name, fields in CHATS.items()}
KINDS = (
    *("completion-sampled", "completion-penalties", "completion-stop", "completion-batch", "completion-bad_words"),
    *("completion-echo_logprobs_n", "completion-prompt_alone", "completion-regex", "completion-json_schema"),
    *("embeddings-mean", "chat-logprobs", "chat-prompt_logprobs", "chat-tool_required"),
)
"""A case of each kind of answer and of each kind of state that a handoff takes along."""


@pytest.fixture(scope="module")
def fleets() -> Iterator[dict[str, Fleet]]:
    with contextlib.ExitStack() as stack:
        yield {
            way: stack.enter_context(Fleet(1, 1, worker={"model": DRAFT}, **settings))
            for way, settings in WAYS.items()
        }


def answers(fleets: dict[str, Fleet], path: str, body: dict) -> dict[str, dict]:
    """Returns each cluster's answer, without the fields that name the call, and what usage tells of drafts."""
    found = {}
    for way, fleet in fleets.items():
        response = httpx.post(fleet.url + path, json=body, timeout=60)
        assert response.status_code == 200, (way, response.text)
        assert response.headers["x-baton-route"].startswith(TAKEN[way])
        found[way] = response.json()
        for name in ("id", "created"):
            found[way].pop(name, None)
        # How many tokens are drafted is decided by how long steps take, which differs.
        found[way].get("usage", {}).pop("completion_tokens_details", None)
        for choice in found[way].get("choices", ()):
            for call in choice.get("message", {}).get("tool_calls", ()):
                del call["id"]
    return found


def streamed(fleet: Fleet, path: str, body: dict) -> list[dict]:
    """Every chunk's choices of a streamed answer, and its usage."""
    response = httpx.post(fleet.url + path, json=body | {"stream": True}, timeout=60)
    assert response.status_code == 200, response.text
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("case", first_now(sorted(CASES, key=lambda case: case not in KINDS), len(KINDS)))
def test_every_way_gives_the_same_json(fleets: dict[str, Fleet], case: str) -> None:
    path, body = CASES[case]
    # A salt of its own: all ways then begin with the same cache state, none.
    found = answers(fleets, path, body | {"cache_salt": case})
    assert found["colocated"] == found["disaggregated"]
    assert found["colocated"] == found["local"]


@pytest.mark.parametrize("seed", first_now(range(2)))
def test_an_answer_of_a_schema_is_valid_and_ends_with_stop(fleets: dict[str, Fleet], seed: int) -> None:
    body = CHAT | {"response_format": FORMAT, "max_tokens": 900, "temperature": 1.3, "seed": seed}
    choice = answers(fleets, "/v1/chat/completions", body)["disaggregated"]["choices"][0]
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)


def test_a_prompts_logprobs_are_those_its_tokens_had_when_they_were_written(fleets: dict[str, Fleet]) -> None:
    body = {"prompt": [5, 6, 7, 8, 9], "max_tokens": 40, "temperature": 0, "logprobs": 1, "return_token_ids": True}
    written = answers(fleets, "/v1/completions", body)["disaggregated"]["choices"][0]
    again = {"prompt": [*body["prompt"], *written["token_ids"]], "max_tokens": 1, "prompt_logprobs": 0}
    for answer in answers(fleets, "/v1/completions", again | {"temperature": 0}).values():
        read = answer["choices"][0]["prompt_logprobs"]
        found = [entry[str(i)]["logprob"] for i, entry in zip(written["token_ids"], read[5:], strict=True)]
        assert found == pytest.approx(written["logprobs"]["token_logprobs"], abs=1e-4)


def test_a_stream_of_a_grammar_is_the_whole_answer_in_pieces(fleets: dict[str, Fleet]) -> None:
    path, body = CASES["completion-regex"]
    for fleet in fleets.values():
        whole = httpx.post(fleet.url + path, json=body, timeout=60).json()["choices"]
        texts, ends = {0: "", 1: ""}, []
        for chunk in streamed(fleet, path, body):
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
                ends += [choice["index"]] if choice["finish_reason"] == "stop" else []
        assert [texts[0], texts[1]] == [choice["text"] for choice in whole]
        assert sorted(ends) == [0, 1]


async def test_a_batch_is_answered_by_the_cluster_with_what_a_call_answers(fleets: dict[str, Fleet]) -> None:
    fleet = fleets["disaggregated"]
    body = CHAT | {"cache_salt": "batch"}
    lines = [{"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions", "body": body} for i in range(3)]
    content = "\n".join(map(json.dumps, lines)).encode()
    async with openai.AsyncOpenAI(base_url=fleet.url + "/v1", api_key="none", max_retries=0) as client:
        file = await client.files.create(file=("in.jsonl", content), purpose="batch")
        batch = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        async with asyncio.timeout(90):
            while (batch := await client.batches.retrieve(batch.id)).status != "completed":
                await asyncio.sleep(0.1)
        answered = (await client.files.content(batch.output_file_id)).text.splitlines()
    found = [json.loads(line)["response"]["body"]["choices"] for line in answered]
    called = httpx.post(fleet.url + "/v1/chat/completions", json=body, timeout=60).json()["choices"]
    assert found == [called] * 3


def test_afterwards_no_page_is_held(fleets: dict[str, Fleet]) -> None:
    for fleet in fleets.values():
        fleet.wait_for_baseline()
