"""Conversations over gRPC: tools, calls and thoughts are those that REST tells of the same answer."""

from __future__ import annotations

import json
import time
from typing import Any

import grpc
import pytest

from baton.protos.v1 import common_pb2, inference_pb2_grpc
from baton.protos.v1 import inference_pb2 as pb
from tests.router.api.openai.test_tools import ASK, POINT, says

__all__ = ["says"]  # a fixture
GREEDY = common_pb2.Sampling(temperature=0)
TURN = pb.ChatMessage(role="user", content="Weather?")
TOOLS = [
    pb.Tool(name="weather", description="Tells it", parameters=json.dumps(POINT)),
    pb.Tool(name="now"),
]
CALLS = (
    'Let me see.<tool_call>{"name": "weather", "arguments": {"at": "Ulm"}}</tool_call>'
    '<tool_call>{"name": "now"}</tool_call>'
)


@pytest.fixture
def stub(router) -> inference_pb2_grpc.InferenceStub:
    return inference_pb2_grpc.InferenceStub(router.channel)


def asked(*messages: pb.ChatMessage, sampling: common_pb2.Sampling = GREEDY, **chat: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(chat=pb.Conversation(messages=messages or [TURN], **chat), sampling=sampling)


async def refusal(stub, request: pb.GenerateRequest) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.Generate(request)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return refused.value.details()


async def test_calls_are_those_that_rest_tells_whole_and_streamed(stub, router, says) -> None:
    says(CALLS)
    theirs = (await router.openai.chat.completions.create(**ASK)).choices[0]
    [choice] = (await stub.Generate(asked(tools=TOOLS))).choices
    assert (choice.text, choice.finish_reason) == (theirs.message.content, theirs.finish_reason)
    told = [(call.name, call.arguments) for call in choice.tool_calls]
    assert told == [(call.function.name, call.function.arguments) for call in theirs.message.tool_calls]
    assert [call.index for call in choice.tool_calls] == [0, 1]

    pieces = [c async for chunk in stub.GenerateStream(asked(tools=TOOLS)) for c in chunk.choices]
    parts: dict[int, list[str]] = {}
    for call in (call for piece in pieces for call in piece.tool_calls):
        said = parts.setdefault(call.index, ["", "", ""])
        said[:] = said[0] + call.id, said[1] + call.name, said[2] + call.arguments
    assert [(name, arguments) for _, name, arguments in parts.values()] == told
    assert len({call_id for call_id, *_ in parts.values()} - {""}) == 2
    assert "".join(piece.text for piece in pieces) == "Let me see."
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["tool_calls"]


async def test_the_prompt_is_rests_also_of_what_was_called_before(stub, router, fake) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"at": "Ulm"}'}}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "Sun"},
    ]
    await router.openai.chat.completions.create(**ASK | {"messages": messages})
    ours = pb.ToolCall(id="c1", name="weather", arguments='{"at": "Ulm"}')
    turns = [
        TURN,
        pb.ChatMessage(role="assistant", tool_calls=[ours]),
        pb.ChatMessage(role="tool", tool_call_id="c1", content="Sun"),
    ]
    await stub.Generate(asked(*turns, tools=TOOLS))
    assert fake.requests[-1].token_ids == fake.requests[-2].token_ids


@pytest.mark.parametrize("chat", [{"tool_choice": "required"}, {"demanded_tool": "weather"}])
async def test_a_demanded_call_is_bound_by_a_grammar_and_read_as_one(stub, fake, says, chat) -> None:
    says('{"at": "Ulm"}' if "demanded_tool" in chat else '[{"name": "weather", "parameters": {"at": "Ulm"}}]')
    [choice] = (await stub.Generate(asked(tools=TOOLS, **chat))).choices
    assert [(call.name, json.loads(call.arguments)) for call in choice.tool_calls] == [("weather", {"at": "Ulm"})]
    assert fake.requests[-1].sampling.grammar.kind == "json_schema"


async def test_a_strict_tool_binds_the_models_own_calls_or_is_refused(stub, fake) -> None:
    strict = [pb.Tool(name="weather", parameters=json.dumps(POINT), strict=True)]
    await stub.Generate(asked(tools=strict))
    assert fake.requests[-1].sampling.grammar.kind == "grammar"
    grammar = common_pb2.Sampling(grammar=common_pb2.Grammar(kind="regex", spec="[a-z]+"))
    assert "strict" in await refusal(stub, asked(tools=strict, sampling=grammar))


async def test_thoughts_are_apart_from_the_text_of_a_conversation_alone(
    start_router, fake, model_dir, says
) -> None:
    says("<think>Hm.</think>It rains.")
    async with start_router(fake, {"tiny": model_dir}, reasoning_parser="think") as clients:
        stub = inference_pb2_grpc.InferenceStub(clients.channel)
        [choice] = (await stub.Generate(asked())).choices
        assert (choice.reasoning, choice.text, choice.finish_reason) == ("Hm.", "It rains.", "stop")
        pieces = [c async for chunk in stub.GenerateStream(asked()) for c in chunk.choices]
        assert "".join(piece.reasoning for piece in pieces) == "Hm."
        assert "".join(piece.text for piece in pieces) == "It rains."
        raw = (await stub.Generate(pb.GenerateRequest(text="x", sampling=GREEDY))).choices[0]
        assert raw.text == "<think>Hm.</think>It rains."


async def test_each_choice_is_read_by_itself_and_sampling_reaches_dispatch(stub, fake, says) -> None:
    says(CALLS)
    words = [common_pb2.TokenSequence(ids=[7, 8])]
    sampling = common_pb2.Sampling(temperature=0, max_tokens=140, logprobs=1, bad_words=words)
    request = asked(tools=TOOLS, sampling=sampling)
    request.n, request.return_token_ids = 2, True
    request.stop.append("never said")
    choices = (await stub.Generate(request)).choices
    assert [len(choice.tool_calls) for choice in choices] == [2, 2]
    assert all(len(choice.token_ids) == len(choice.logprobs) > 0 for choice in choices)
    taken = fake.requests[-1].sampling
    assert (taken.max_tokens, taken.bad_words, taken.logprobs) == (140, ((7, 8),), 1)


@pytest.mark.parametrize(
    ("chat", "said"),
    [
        ({"tools": [pb.Tool(name="a b")]}, "chat.tools[0].name"),
        ({"tools": [pb.Tool(name="f", parameters="[1]")]}, "chat.tools[0].parameters should be"),
        ({"tools": [pb.Tool(name="f", parameters="{" * 4000)]}, "chat.tools[0].parameters should be"),
        ({"tools": [pb.Tool(name="f")] * 2}, "'f' twice"),
        ({"tools": [pb.Tool(name=f"f{i}") for i in range(129)]}, "chat.tools has 129"),
        ({"tool_choice": "required"}, "only allowed with tools"),
        ({"tools": TOOLS, "tool_choice": "weather"}, "chat.tool_choice is 'weather'"),
        ({"tools": TOOLS, "demanded_tool": "rain"}, "chat.tool_choice names 'rain'"),
        ({"reasoning_effort": "huge"}, "chat.reasoning_effort"),
        ({"chat_template_kwargs": "no"}, "chat.chat_template_kwargs should be"),
        ({"messages": [pb.ChatMessage(role="user", tool_calls=[pb.ToolCall(name="f")])]}, "only a message of role"),
    ],
)
async def test_what_is_wrong_with_a_conversation_is_told_by_its_field(stub, chat, said) -> None:
    request = pb.GenerateRequest(chat=pb.Conversation(**{"messages": [TURN]} | chat), sampling=GREEDY)
    assert said in await refusal(stub, request)


async def test_a_timeout_in_the_metadata_bounds_a_call_as_rests_header_does(stub, fake) -> None:
    for request in (asked(), pb.GenerateRequest(text="x", sampling=GREEDY)):
        for timeout in (None, 30):
            await stub.Generate(request, metadata=(("x-request-timeout", "0.1"),), timeout=timeout)
            assert fake.requests[-1].context.deadline < time.monotonic() + 0.2
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Generate(request, metadata=(("x-request-timeout", "soon"),), timeout=timeout)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
