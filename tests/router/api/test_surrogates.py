"""Half a surrogate pair, which a model may write in a call and a client sends back: no answer is lost to it."""

from __future__ import annotations

import json

import pytest

from tests.router.conftest import EOS

TOOL = {"type": "object"}
ASKED = [{"role": "user", "content": "x"}]
SURFACES = {
    "/v1/chat/completions": {
        "messages": ASKED,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": TOOL}}],
    },
    "/v1/messages": {"messages": ASKED, "max_tokens": 200, "tools": [{"name": "f", "input_schema": TOOL}]},
    "/v1/responses": {"input": "x", "tools": [{"type": "function", "name": "f", "parameters": TOOL}]},
}
CALLS = (
    r'{"name": "f", "arguments": {"a": "\ud83d", "b": 1}}',
    r'{"name": "f", "arguments": "\ud83d"}',
    r'{"name": "f\ud83d", "arguments": {}}',
)


@pytest.mark.parametrize("path", SURFACES)
@pytest.mark.parametrize("call", CALLS)
async def test_a_call_that_holds_one_is_answered_whole_and_streamed(
    router, fake, tokenizer, path: str, call: str
) -> None:
    ids = [*tokenizer.encode(f"<tool_call>{call}</tool_call>", False), EOS]
    fake.say = lambda request, choice: ids
    body = {"model": "tiny", "temperature": 0} | SURFACES[path]
    whole = await router.http.post(path, json=body)
    assert whole.status_code == 200, whole.text
    streamed = await router.http.post(path, json=body | {"stream": True})
    assert streamed.status_code == 200
    assert "error" not in [line.removeprefix("event: ") for line in streamed.text.splitlines()]
    assert '"error":{' not in streamed.text


async def test_what_stands_beside_one_in_a_calls_arguments_is_kept(router, fake, tokenizer) -> None:
    ids = [*tokenizer.encode(f"<tool_call>{CALLS[0]}</tool_call>", False), EOS]
    fake.say = lambda request, choice: ids
    body = {"model": "tiny", "temperature": 0} | SURFACES["/v1/messages"]
    message = (await router.http.post("/v1/messages", json=body)).json()
    assert message["content"][0]["input"] == {"a": "\ufffd", "b": 1}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_an_earlier_call_that_holds_one_may_be_sent_back(router, path: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": r'{"a": "\ud83d"}'}}
    messages = [*ASKED, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "y"}, *ASKED]
    answer = await router.http.post(path, json={"model": "tiny", "messages": messages})
    assert answer.status_code == 200, answer.text


async def test_parameters_of_the_open_inference_protocol_hold_none(router) -> None:
    said = json.dumps({"bad_words": ["\ud83d"]})
    inputs = [
        {"name": name, "datatype": "BYTES", "shape": [1], "data": [data]}
        for name, data in (("text_input", "x"), ("sampling_parameters", said))
    ]
    refused = await router.http.post("/v2/models/tiny/infer", json={"inputs": inputs})
    assert refused.status_code == 400
    assert "sampling_parameters" in refused.json()["error"]
