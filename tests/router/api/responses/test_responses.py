"""The Responses API with the unmodified client: text, streams, tools, thoughts, forms, and what is refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import msgspec
import openai
import pytest
from pydantic import BaseModel

from baton.protos.errors import WorkerLost
from baton.router.api import sse
from baton.router.api.openai.prepared_call import INLINE_CHARS
from baton.router.api.responses.schemas import ResponsesBody
from baton.router.text.tokenizer import HfTokenizer
from tests.router.conftest import EOS, SAID

ASK = {"model": "tiny", "input": "Hello", "temperature": 0}
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": True}


@pytest.fixture
def says(fake, tokenizer):
    def say(text: str) -> None:
        ids = [*tokenizer.encode(text, False), EOS]
        fake.say = lambda request, choice: ids

    return say


async def test_a_response_has_text_usage_and_a_status(router) -> None:
    answer = await router.openai.responses.create(**ASK, instructions="Be brief.")
    assert (answer.output_text, answer.status) == (SAID, "completed")
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.store is False


async def test_a_stream_tells_each_item_from_begin_to_end_in_order(router) -> None:
    kinds, text, numbers = [], "", []
    async for event in await router.openai.responses.create(**ASK, stream=True):
        kinds.append(event.type)
        numbers.append(event.sequence_number)
        text += event.delta if event.type == "response.output_text.delta" else ""
    assert text == SAID
    assert numbers == list(range(len(numbers)))
    assert [kind for kind in kinds if not kind.endswith("delta")] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]


async def test_the_clients_own_stream_helper_assembles_calls_and_thoughts(
    start_router, fake, model_dir, says
) -> None:
    says('<think>Hm.</think><tool_call>{"name": "weather", "arguments": {"at": "Ulm"}}</tool_call>')
    async with start_router(fake, {"tiny": model_dir}, reasoning_parser="think") as clients:
        whole = await clients.openai.responses.create(**ASK, tools=[TOOL])
        async with clients.openai.responses.stream(**ASK, tools=[TOOL]) as stream:
            final = await stream.get_final_response()
    for answer in (whole, final):
        thought, call = answer.output
        assert (thought.type, thought.content[0].text) == ("reasoning", "Hm.")
        assert (call.type, call.name, call.arguments) == ("function_call", "weather", '{"at": "Ulm"}')
        assert answer.usage.output_tokens_details.reasoning_tokens > 0


@pytest.mark.parametrize("stream", [False, True])
async def test_long_thoughts_are_counted_in_a_thread(
    start_router, fake, model_dir, says, tokenizer, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    thought = "Hm, and then again so it is. " * (INLINE_CHARS // 20)
    says(f"<think>{thought}</think>So.")
    fake.served = (msgspec.structs.replace(fake.served[0], max_model_len=1 << 17),)
    encoded, encode = list[tuple[int, threading.Thread]](), HfTokenizer.encode

    def noted(own: HfTokenizer, text: str, add_special_tokens: bool) -> list[int]:
        encoded.append((len(text), threading.current_thread()))
        return encode(own, text, add_special_tokens)

    monkeypatch.setattr(HfTokenizer, "encode", noted)
    async with start_router(fake, {"tiny": model_dir}, reasoning_parser="think") as clients:
        if stream:
            async with clients.openai.responses.stream(**ASK) as events:
                answer = await events.get_final_response()
        else:
            answer = await clients.openai.responses.create(**ASK)
    own = [thread for size, thread in encoded if size > INLINE_CHARS]
    assert len(own) == 1
    assert own[0] is not threading.main_thread()
    assert answer.usage.output_tokens_details.reasoning_tokens == len(encode(tokenizer, thought, False))


async def test_a_form_is_demanded_by_grammar_and_parsed_by_the_client(router, fake, says) -> None:
    class Fruit(BaseModel):
        name: str

    says('{"name": "fig"}')
    answer = await router.openai.responses.parse(**ASK, text_format=Fruit)
    assert answer.output_parsed == Fruit(name="fig")
    assert fake.requests[0].sampling.grammar.kind == "json_schema"


async def test_an_answer_that_is_cut_is_incomplete(router) -> None:
    answer = await router.openai.responses.create(**ASK, max_output_tokens=3)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")


async def test_earlier_turns_are_given_as_items(router, fake, tokenizer) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "summary": [], "id": "r"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Look:"}]},
        {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "fine"},
    ]
    await router.openai.responses.create(**ASK | {"input": items})
    text = tokenizer.decode(fake.requests[0].token_ids, skip_special_tokens=False)
    assert text == "<|begin|><|user|>Weather?<|end|><|assistant|>Look:<|end|><|tool|>fine<|end|><|assistant|>"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"temperature": 9}, "temperature"),
    ],
)
async def test_what_cannot_be_done_is_a_400_that_names_it(router, fields, param) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await router.openai.responses.create(**ASK | {"extra_body": fields})
    assert bad.value.param == param


def test_the_thoughts_between_the_current_turns_calls_reach_the_template() -> None:
    def thought(text: str) -> dict:
        return {
            "type": "reasoning",
            "id": "rs",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": text}],
        }

    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "fine"}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So."}]}
    user = {"role": "user", "content": "x"}
    items = [user, thought("old"), call, output, thought("past"), said, user]
    items += [thought("a"), thought("b"), call, call, output, output, thought("c"), said, thought("alone")]
    messages = ResponsesBody.model_validate({"input": items}).chat().messages
    told = [(m.role, len(m.tool_calls or ()), (m.model_extra or {}).get("reasoning_content")) for m in messages]
    earlier = [
        ("user", 0, None),
        ("assistant", 1, None),
        ("tool", 0, None),
        ("assistant", 0, None),
        ("user", 0, None),
    ]
    turn = [("assistant", 2, "ab"), ("tool", 0, None), ("tool", 0, None), ("assistant", 0, "c")]
    assert told == earlier + turn


async def test_an_error_in_the_middle_of_a_stream_is_an_event(router, fake) -> None:
    fake.fail_after = (3, WorkerLost("decode-0 is gone"))
    response = await router.http.post("/v1/responses", json=ASK | {"stream": True})
    events = response.text.strip().split("\n\n")
    assert events[0].startswith("event: response.created\n")
    assert events[-1].startswith("event: error\n")
    assert "decode-0 is gone" in events[-1]
    numbers = [json.loads(event.partition("data: ")[2])["sequence_number"] for event in events]
    assert numbers == list(range(len(events)))


@pytest.mark.parametrize("said", [SAID, "<think>the fox thinks</think>\n\nthe fox says", "the fox <thinks"])
async def test_logprobs_are_those_of_the_messages_own_tokens(start_router, fake, model_dir, says, said) -> None:
    says(said)
    ask = ASK | {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    async with start_router(fake, {"tiny": model_dir}, reasoning_parser="think") as clients:
        whole = await clients.openai.responses.create(**ask)
        events = [event async for event in await clients.openai.responses.create(**ask, stream=True)]
    final = events[-1].response
    for answer in (whole, final):
        part = answer.output[-1].content[0]
        assert b"".join(bytes(one.bytes) for one in part.logprobs).decode().lstrip("\n") == part.text
        assert {len(one.top_logprobs) for one in part.logprobs} == {2}
    deltas = [one for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
    done = next(event for event in events if event.type == "response.output_text.done")
    assert [one.token for one in deltas] == [one.token for one in part.logprobs]
    assert [one.token for one in done.logprobs] == [one.token for one in part.logprobs]


async def test_events_that_list_every_token_are_written_in_a_thread_and_each_once(
    router, fake, says, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(SAID)
    threads, sliced_json = list[threading.Thread](), sse.sliced_json

    def noted(content: object) -> Iterator[bytes]:
        threads.append(threading.current_thread())
        return sliced_json(content)

    monkeypatch.setattr(sse, "sliced_json", noted)
    ask = ASK | {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    events = [event async for event in await router.openai.responses.create(**ask, stream=True)]
    assert len(threads) == len([event for event in events if not event.type.endswith(".delta")])
    assert threading.main_thread() not in threads
    added = next(event for event in events if event.type == "response.content_part.added")
    assert added.part.logprobs == []
    threads.clear()
    assert [event async for event in await router.openai.responses.create(**ASK, stream=True)]
    assert threads == [], "without them all are short"


async def test_without_include_there_are_no_logprobs_and_their_number_is_refused(router) -> None:
    answer = await router.openai.responses.create(**ASK)
    assert answer.output[0].content[0].logprobs == []
    with pytest.raises(openai.BadRequestError) as bad:
        await router.openai.responses.create(**ASK, top_logprobs=3)
    assert bad.value.param == "top_logprobs"


async def test_fields_that_chat_has_mean_the_same_here(router, fake) -> None:
    said = {"stop": "brown", "top_k": 7, "logit_bias": {"5": 1}, "structured_outputs": {"regex": "[a-z]+"}}
    answer = await router.openai.responses.create(**ASK, extra_body=said)
    sampling = fake.requests[0].sampling
    assert answer.output_text == "The quick "
    assert (sampling.top_k, sampling.logit_bias, sampling.grammar.spec) == (7, {5: 1.0}, "[a-z]+")


async def test_two_forms_of_one_response_are_refused_by_their_names(router) -> None:
    form = {"text": {"format": {"type": "json_object"}}, "regex": "a+"}
    answer = await router.http.post("/v1/responses", json=ASK | form)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "regex")
    assert "text.format" in answer.json()["error"]["message"]
    bad = {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nothing"}}}}
    answer = await router.http.post("/v1/responses", json=ASK | bad)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "text.format")


async def test_a_response_has_every_field_that_the_client_declares(router) -> None:
    from openai.types.responses import Response

    whole = await router.openai.responses.with_raw_response.create(**ASK)
    told = Response.model_validate_json(whole.text, strict=True)
    assert told.usage.input_tokens_details.cache_write_tokens == 0
    async with router.openai.responses.stream(**ASK) as stream:
        final = await stream.get_final_response()
    assert final.usage == told.usage
