"""Anthropic's Messages API with its own client: text, streams, tools, thoughts, forms, and what is refused."""

from __future__ import annotations

import json

import pytest

from baton.protos.errors import WorkerLost
from baton.router.access.gate import AccessGate
from baton.router.access.keys import KeyRing, add_key
from baton.router.answer import validate
from baton.router.api.anthropic.conversation import chat_messages
from tests.router.conftest import EOS, SAID

TURN = {"role": "user", "content": "Hello"}
ASK = {"model": "tiny", "messages": [TURN], "max_tokens": 180, "temperature": 0}
STREAMED = {"model": "tiny", "messages": [TURN], "max_tokens": 180, "extra_body": {"temperature": 0}}
FORM = {"type": "json_schema", "schema": {"type": "object"}}
TOOL = {"name": "weather", "input_schema": {"type": "object"}}
CALL = '<tool_call>{"name": "weather", "arguments": {"at": "Ulm"}}</tool_call>'


@pytest.fixture
def says(fake, tokenizer):
    def say(text: str) -> None:
        ids = [*tokenizer.encode(text, False), EOS]
        fake.say = lambda request, choice: ids

    return say


@pytest.fixture
def prompted(fake, tokenizer):
    def text() -> str:
        return tokenizer.decode(fake.requests[-1].token_ids, skip_special_tokens=False)

    return text


async def create(router, **fields):
    """Asks with fields that newer clients have no parameters for (temperature among them) in the body."""
    said = ASK | fields
    known = {name: said.pop(name) for name in ("model", "messages", "max_tokens")}
    return await router.anthropic.messages.create(**known, extra_body=said)


async def test_a_message_has_text_usage_and_a_reason(router, prompted) -> None:
    answer = await create(
        router, system=[{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Always."}]
    )
    assert [(block.type, block.text) for block in answer.content] == [("text", SAID)]
    assert (answer.role, answer.model, answer.stop_reason, answer.stop_sequence) == (
        "assistant", "tiny", "end_turn", None
    )  # fmt: skip
    assert answer.usage.input_tokens > 0
    assert answer.usage.output_tokens > 0
    assert prompted() == "<|begin|><|system|>Be brief.\nAlways.<|end|><|user|>Hello<|end|><|assistant|>"


async def test_a_stream_tells_each_block_from_begin_to_end_and_the_clients_helper_assembles_it(router) -> None:
    whole = await create(router)
    async with router.anthropic.messages.stream(**STREAMED) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_message()
    told = [kind for kind in kinds if kind not in ("text", "content_block_delta")]
    assert told == [
        "message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert final.content[0].text == SAID
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    assert final.usage.input_tokens == whole.usage.input_tokens


async def test_a_call_and_a_thought_are_blocks_of_their_own(start_router, fake, model_dir, says) -> None:
    says(f"<think>Hm.</think>Look:{CALL}")
    async with start_router(fake, {"tiny": model_dir}, reasoning_parser="think") as clients:
        whole = await create(clients, tools=[TOOL])
        async with clients.anthropic.messages.stream(**STREAMED, tools=[TOOL]) as stream:
            final = await stream.get_final_message()
        unshown = {"type": "enabled", "budget_tokens": 9, "display": "omitted"}
        hidden = await create(clients, tools=[TOOL], thinking=unshown)
    for answer in (whole, final):
        thought, text, call = answer.content
        assert (thought.type, thought.thinking) == ("thinking", "Hm.")
        assert (text.type, text.text) == ("text", "Look:")
        assert (call.type, call.name, call.input) == ("tool_use", "weather", {"at": "Ulm"})
        assert answer.stop_reason == "tool_use"
    assert [block.type for block in hidden.content] == ["text", "tool_use"]


async def test_a_call_that_is_cut_off_keeps_what_is_complete(router, says) -> None:
    says('{"name": "weather", "parameters": {"at": "Ulm", "day": "Sun')
    answer = await create(router, tools=[TOOL], tool_choice={"type": "any"})
    assert answer.content[0].input == {"at": "Ulm"}


async def test_numbers_of_calls_keep_all_their_digits(router, says, prompted) -> None:
    number = 10**30 + 7
    says(f'{{"at": {number}}}')
    answer = await create(router, tools=[TOOL], tool_choice={"type": "tool", "name": "weather"})
    assert answer.content[0].input == {"at": number}
    call = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"at": number}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "fine"}
    turns = [TURN, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    answer = await create(router, messages=turns)
    assert answer.role == "assistant"


async def test_a_demanded_call_is_a_grammar_and_so_is_a_form(router, fake, says) -> None:
    says('{"at": "Ulm"}')
    answer = await create(router, tools=[TOOL], tool_choice={"type": "tool", "name": "weather"})
    assert (answer.stop_reason, answer.content[0].input) == ("tool_use", {"at": "Ulm"})
    assert fake.requests[-1].sampling.grammar.kind == "json_schema"
    says('{"name": "fig"}')
    form = {"type": "json_schema", "schema": {"type": "object", "properties": {"name": {"type": "string"}}}}
    answer = await create(router, output_config={"format": form})
    assert json.loads(answer.content[0].text) == {"name": "fig"}
    assert json.loads(fake.requests[-1].sampling.grammar.spec) == form["schema"]


async def test_the_reason_names_the_stop_sequence_or_the_limit(router) -> None:
    word = SAID.split()[1]
    stopped = await create(router, stop_sequences=["never said", word])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)
    assert stopped.content[0].text == SAID[: SAID.index(word)]
    cut = await create(router, max_tokens=3)
    assert (cut.stop_reason, cut.stop_sequence, cut.usage.output_tokens) == ("max_tokens", None, 3)


async def test_earlier_turns_keep_their_order_and_thoughts_are_not_shown_again(router, prompted) -> None:
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "fine"}]}
    failed = {"type": "tool_result", "tool_use_id": "c2", "content": "no such day", "is_error": True}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "text", "text": "Look:"},
                {"type": "tool_use", "id": "c1", "name": "weather", "input": {}},
                {"type": "tool_use", "id": "c2", "name": "weather", "input": {"day": 9}},
            ],
        },
        {"role": "user", "content": [result, failed, {"type": "text", "text": "So?"}]},
    ]
    await create(router, messages=turns)
    assert prompted() == (
        "<|begin|><|user|>Weather?<|end|><|assistant|>Look:<|end|><|tool|>fine<|end|>"
        "<|tool|>Error: no such day<|end|><|user|>So?<|end|><|assistant|>"
    )


def test_the_thoughts_between_the_current_turns_calls_reach_the_template() -> None:
    def thought(said: object, call: str) -> dict:
        use = {"type": "tool_use", "id": call, "name": "weather", "input": {}}
        return {"role": "assistant", "content": [{"type": "thinking", "thinking": said, "signature": ""}, use]}

    def result(call: str, *more: dict) -> dict:
        told = {"type": "tool_result", "tool_use_id": call, "content": "fine"}
        return {"role": "user", "content": [told, *more]}

    asked = {"type": "text", "text": "And now?"}
    turns = [
        TURN,
        thought("a", "1"),
        result("1", asked),
        thought("b", "2"),
        result("2"),
        thought(7, "3"),
        result("3"),
    ]
    told = [message.get("reasoning_content") for message in chat_messages(None, turns)]
    assert told == [None, None, None, None, "b", None, None, None]


async def test_an_assistants_message_at_the_end_is_continued(router, prompted) -> None:
    await create(router, messages=[TURN, {"role": "assistant", "content": "The quick"}])
    assert prompted() == "<|begin|><|user|>Hello<|end|><|assistant|>The quick"


async def test_tokens_are_counted_as_the_prompt_has_them(router, fake) -> None:
    said = {"model": "tiny", "messages": [TURN], "system": "Be brief."}
    counted = await router.anthropic.messages.count_tokens(**said)
    await create(router, **said)
    assert counted.input_tokens == len(fake.requests[-1].token_ids)


async def test_tools_of_a_count_are_counted_and_bounded(router, fake, monkeypatch) -> None:
    import anthropic

    said = {"model": "tiny", "messages": [TURN], "tools": [TOOL]}
    counted = await router.anthropic.messages.count_tokens(**said)
    await create(router, **said)
    assert counted.input_tokens == len(fake.requests[-1].token_ids)
    monkeypatch.setattr(validate, "LEAST_TOKENIZED", 4096)
    monkeypatch.setattr(validate, "CHARS_OF_CONTEXT", 0)
    long = said | {"tools": [TOOL | {"description": "x" * 4096}]}
    with pytest.raises(anthropic.BadRequestError, match="at most 4096 are tokenized in one call"):
        await router.anthropic.messages.count_tokens(**long)
    tool = {"type": "function", "function": {"name": "t", "description": "x" * 4096}}
    asked = {"model": "tiny", "messages": [TURN], "tools": [tool]}
    refused = await router.http.post("/tokenize", json=asked)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")


@pytest.mark.parametrize("at", ["block", "message", "tool"])
async def test_a_breakpoint_of_the_cache_is_a_hint(router, fake, at: str) -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    fields = {
        "block": {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", **mark}]}]},
        "message": mark,
        "tool": {"tools": [TOOL | mark]},
    }[at]
    await create(router, **fields)
    assert fake.requests[-1].context.retained
    unmarked = {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": None}]}
    for fields in ({}, {"messages": [unmarked]}):
        await create(router, **fields)
        assert not fake.requests[-1].context.retained


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "content[0].tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [
            {"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]}, "messages[0]"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL, TOOL | {"name": "f", "input_examples": [{}]}]}, "tools[1].input_examples"),
        ({"tools": [TOOL | {"defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "any"}, "output_config": {"format": FORM}},
         "output_config.format"),
        ({"tools": [TOOL, TOOL | {"name": "f", "strict": True}], "output_config": {"format": FORM}},
         "tools[1].strict"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"output_config": {"effort": "low"}}, "output_config.effort"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"stop": "x", "output_format": {"type": "json_schema"}}, "output_format"),
        ({"temperature": 9}, "temperature"),
    ],
)  # fmt: skip
async def test_what_cannot_be_done_is_a_400_that_names_it(router, fields, named) -> None:
    import anthropic

    with pytest.raises(anthropic.BadRequestError) as bad:
        await create(router, **fields)
    assert bad.value.body["type"] == "error"
    assert bad.value.body["error"]["type"] == "invalid_request_error"
    assert named in bad.value.body["error"]["message"]


@pytest.mark.parametrize(
    "choice", [{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "weather"}, {"type": "none"}]
)
async def test_a_strict_tool_is_taken_where_calls_follow_its_schema_or_none_is_made(router, fake, choice) -> None:
    schema = {"type": "object", "properties": {"at": {"type": "integer"}}, "required": ["at"]}
    tool = TOOL | {"strict": True, "input_schema": schema}
    response = await router.http.post("/v1/messages", json=ASK | {"tools": [tool], "tool_choice": choice})
    assert response.status_code == 200, response.text
    grammar = fake.requests[-1].sampling.grammar
    assert (grammar is None) == (choice["type"] == "none")
    assert grammar is None or '"at"' in grammar.spec


async def test_errors_have_anthropics_types(start_router, fake, model_dir, tmp_path) -> None:
    import anthropic

    text = add_key(tmp_path / "keys.json", "acme", 0.0)
    gate = AccessGate(KeyRing(tmp_path / "keys.json", lambda: 0.0), lambda: 0.0)
    async with start_router(fake, {"tiny": model_dir}, gate=gate) as clients:
        with pytest.raises(anthropic.AuthenticationError) as bad:
            await create(clients)
        assert bad.value.body["error"]["type"] == "authentication_error"
        mine = clients.anthropic.with_options(api_key=text)
        assert (await mine.messages.create(**{k: ASK[k] for k in ("model", "messages", "max_tokens")})).content
        with pytest.raises(anthropic.NotFoundError) as bad:
            await mine.messages.create(model="other", messages=[TURN], max_tokens=1)
        assert bad.value.body["error"]["type"] == "not_found_error"
        wrong = await clients.http.get("/v1/messages", headers={"x-api-key": text})
        assert (wrong.status_code, wrong.json()["type"]) == (405, "error")


async def test_an_error_in_the_middle_of_a_stream_is_an_event(router, fake) -> None:
    fake.fail_after = (3, WorkerLost("decode-0 is gone"))
    response = await router.http.post("/v1/messages", json=ASK | {"stream": True})
    events = response.text.strip().split("\n\n")
    assert events[0].startswith("event: message_start\n")
    assert events[-1].startswith("event: error\n")
    told = json.loads(events[-1].partition("data: ")[2])
    assert (told["type"], told["error"]["type"]) == ("error", "overloaded_error")
    assert "decode-0 is gone" in told["error"]["message"]


async def test_a_conversation_that_the_server_should_hold_is_refused_and_the_clients_tool_runner_sends_all_of_it(
    router, fake, tokenizer, prompted
) -> None:
    import anthropic

    @anthropic.beta_async_tool
    async def weather(at: str) -> str:
        """Tells the weather of a place, as the model reads in the tool's description."""
        return f"fine in {at}"

    said = iter([CALL, "Thanks."])
    fake.say = lambda request, choice: [*tokenizer.encode(next(said), False), EOS]
    runner = router.anthropic.beta.messages.tool_runner(
        model="tiny", max_tokens=90, messages=[TURN], tools=[weather]
    )
    final = await runner.until_done()
    assert final.content[0].text == "Thanks."
    assert "<|user|>Hello<|end|>" in prompted()
    assert "<|tool|>fine in Ulm<|end|>" in prompted()
    held = {"thread": {"type": "continue", "previous_message_id": "msg_1"}}
    with pytest.raises(anthropic.BadRequestError, match="send the whole conversation") as bad:
        await create(router, **held)
    assert bad.value.error_code == "thread_unsupported_request"


async def test_the_client_finds_the_id_by_which_explain_knows_its_call(router) -> None:
    import anthropic

    answer = await router.anthropic.messages.create(
        model="tiny", messages=[TURN], max_tokens=3, extra_headers={"x-request-id": "mine-2"}
    )
    assert answer._request_id == "mine-2"
    with pytest.raises(anthropic.BadRequestError) as bad:
        await create(router, max_tokens=0)
    assert bad.value.request_id


async def test_models_are_listed_as_the_client_declares_them(router) -> None:
    from anthropic.types import ModelInfo

    page = await router.anthropic.models.list()
    [listed] = page.data
    found = await router.anthropic.models.retrieve("tiny")
    for model in (listed, found):
        told = ModelInfo.model_validate_json(model.to_json(), strict=True)
        assert (told.id, told.display_name, told.type) == ("tiny", "tiny", "model")
    assert (page.first_id, page.last_id, page.has_more) == ("tiny", "tiny", False)
