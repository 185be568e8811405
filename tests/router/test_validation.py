"""Tests bad input: each a 400 that names the field; and what good input becomes."""

from __future__ import annotations

import pytest

from baton.protos.errors import ContextTooLong, InvalidRequest
from baton.router.answer.validate import check_prompt, check_sampling, resolve_sampling
from baton.router.api.openai.schemas import CompletionBody, parse_body
from baton.router.text.catalog import ModelEntry

ENTRY = ModelEntry("tiny", max_model_len=100, vocab_size=300, defaults={"temperature": 0.6, "top_k": 20})
BAD_COMMON = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "16"}, "max_tokens"),
    ({"max_tokens": 10_000}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"seed": 2**64}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", 1]}, "stop[1]"),
    ({"stop_token_ids": [99_999]}, "stop_token_ids"),
    ({"logit_bias": {"5": 101}}, "logit_bias[5]"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"model": 5}, "model"),
    ({"stream": "yes"}, "stream"),
]
BAD_COMPLETION = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": ["x", ""]}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [[1], [99_999]]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [5] * 256}, "prompt"),
    ({"prompt": ["x"] * 2049}, "prompt"),
    ({"prompt": [1, "x"]}, "prompt"),
    ({"prompt": {"text": "x"}}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"best_of": 2, "n": 3}, "best_of"),
    ({"best_of": 17}, "best_of"),
    ({"suffix": "end"}, "suffix"),
]
BAD_CHAT = [
    ({"messages": []}, "messages"),
    ({"messages": "Hello"}, "messages"),
    ({"messages": [{"role": "user", "content": "x"}, {"role": "boss", "content": "x"}]}, "messages[1].role"),
    ({"messages": [{"role": "assistant"}, {"role": "user", "contents": "x"}]}, "messages[1]"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x" * 2000}]}, "messages"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": 5}, "logprobs"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
]
COMPLETION = {"model": "tiny", "prompt": "x"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}


async def test_every_bad_field_is_a_400_that_names_it_and_the_server_goes_on(router, fake) -> None:
    cases = [("/v1/completions", COMPLETION | bad, param) for bad, param in BAD_COMMON + BAD_COMPLETION]
    cases += [("/v1/chat/completions", CHAT | bad, param) for bad, param in BAD_COMMON + BAD_CHAT]
    for path, body, param in cases:
        response = await router.http.post(path, json=body)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param), (body, error)
        assert error["type"] == "invalid_request_error"
        assert error["message"]
    assert fake.requests == []
    assert (await router.http.post("/v1/completions", json=COMPLETION)).status_code == 200


async def test_a_prompt_over_the_context_has_openais_code(router) -> None:
    response = await router.http.post("/v1/completions", json=COMPLETION | {"prompt": [5] * 300})
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_the_clients_fields_go_over_the_models_over_openais() -> None:
    sampling = resolve_sampling({"top_k": 5}, ENTRY, 10, 16, seed=7)
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 5, 1.0)
    assert (sampling.max_tokens, sampling.seed) == (16, 7)
    assert sampling.logprobs is None


def test_all_candidates_and_negative_seeds_have_one_meaning() -> None:
    assert resolve_sampling({"top_k": -1}, ENTRY, 10, 16, 0).top_k == 0
    assert resolve_sampling({"top_k": 10_000}, ENTRY, 10, 16, 0).top_k == 300
    assert resolve_sampling({"seed": -1}, ENTRY, 10, 16, 0).seed == 2**64 - 1


def test_a_default_length_shrinks_to_the_context_and_an_asked_one_does_not() -> None:
    assert resolve_sampling({}, ENTRY, 95, 16, 0).max_tokens == 5
    assert resolve_sampling({}, ENTRY, 95, None, 0).max_tokens == 5
    assert resolve_sampling({"max_tokens": 5}, ENTRY, 95, None, 0).max_tokens == 5
    with pytest.raises(ContextTooLong, match="at most 5"):
        resolve_sampling({"max_tokens": 6}, ENTRY, 95, None, 0)


def test_a_prompt_leaves_room_for_one_token() -> None:
    check_prompt([1] * 99, ENTRY)
    with pytest.raises(ContextTooLong, match="shorten it by at least 1"):
        check_prompt([1] * 100, ENTRY)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("field", ["temperature", "top_p", "presence_penalty"])
def test_what_is_no_number_is_refused(field: str, value: float) -> None:
    with pytest.raises(InvalidRequest):
        check_sampling({field: value}, ENTRY)
    with pytest.raises(InvalidRequest):
        parse_body(CompletionBody, f'{{"prompt": "x", "{field}": NaN}}'.encode())
