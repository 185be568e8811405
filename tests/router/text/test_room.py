"""Prompts that are longer than the context: how little of them is tokenized, and that none is refused that fits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.protos.errors import ContextTooLong
from baton.protos.v1 import inference_pb2 as pb
from baton.protos.v1 import inference_pb2_grpc as pb_grpc
from baton.router.text.chat_template import PLAIN, ChatTemplate
from baton.router.text.model import TextModel
from baton.router.text.room import LEAST_LONG, LOST_AT_CUT, PromptRoom
from baton.router.text.tokenizer import ByteTokenizer, HfTokenizer, Tokenizer
from tests.router.conftest import CONTEXT, Clients

DEMO = Path(__file__).parents[3] / "models" / "demo" / "tokenizer.json"
LONG = "The quick brown fox jumps over the lazy dog. " * 16_000  # 720,000 characters
CHAT = {"messages": [{"role": "user", "content": LONG}]}


@pytest.fixture
async def roomy(start_router, fake, model_dir: Path) -> AsyncIterator[Clients]:
    async with start_router(fake, {"tiny": model_dir}) as clients:
        yield clients


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": LONG}, "prompt"),
        ("/v1/completions", {"prompt": [LONG, "x"]}, "prompt"),
        ("/v1/embeddings", {"input": ["x", LONG]}, "input"),
        ("/v1/chat/completions", CHAT, "messages"),
        ("/v1/responses", {"input": LONG}, "input"),
    ],
)
async def test_a_prompt_that_cannot_fit_is_refused_by_its_beginning(roomy, fake, read, path, body, param) -> None:
    answer = await roomy.http.post(path, json={"model": "tiny", **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    assert f"This model's maximum context length is {CONTEXT} tokens" in error["message"]
    assert sum(read) < 2 * LEAST_LONG
    assert fake.requests == []


async def test_grpc_refuses_so_as_well_and_tokenizes_as_much_as_rest_does(roomy, read) -> None:
    stub = pb_grpc.InferenceStub(roomy.channel)
    chat = pb.Conversation(messages=[pb.ChatMessage(role="user", content=LONG)])
    for asked in (pb.GenerateRequest(text=LONG), pb.GenerateRequest(chat=chat)):
        with pytest.raises(grpc.aio.AioRpcError, match="maximum context length is") as refused:
            await stub.Generate(asked)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.aio.AioRpcError, match="1048576 are tokenized in one call") as refused:
        await stub.Tokenize(pb.TokenizeRequest(text="x" * 1_048_577))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert sum(read) < 4 * LEAST_LONG


async def test_no_more_is_read_than_is_kept(roomy, fake, read, tokenizer) -> None:
    cut = {"truncate_prompt_tokens": 50, "truncation_side": "right", "max_tokens": 1}
    for path, body in (
        ("/v1/completions", {"prompt": LONG}),
        ("/v1/chat/completions", CHAT),
        ("/v1/embeddings", {"input": LONG}),
    ):
        taken = cut if path != "/v1/embeddings" else {k: v for k, v in cut.items() if k != "max_tokens"}
        answer = await roomy.http.post(path, json={"model": "tiny", **body, **taken})
        assert answer.status_code == 200, answer.text
        assert sum(read) < 4 * LEAST_LONG
        read.clear()
    assert list(fake.requests[0].token_ids) == tokenizer.encode(LONG[:2000], True)[:50]


async def test_of_the_end_no_more_is_read_than_is_kept(roomy, fake, read, tokenizer) -> None:
    cut = {"truncate_prompt_tokens": 50, "max_tokens": 1}
    for path, body in (("/v1/completions", {"prompt": LONG}), ("/v1/chat/completions", CHAT)):
        answer = await roomy.http.post(path, json={"model": "tiny", **body, **cut})
        assert answer.status_code == 200, answer.text
        assert sum(read) < 6 * LEAST_LONG
        read.clear()
    chat = pb.Conversation(messages=[pb.ChatMessage(role="user", content=LONG)])
    stub = pb_grpc.InferenceStub(roomy.channel)
    await stub.Generate(pb.GenerateRequest(chat=chat, truncate_prompt_tokens=50))
    assert sum(read) < 6 * LEAST_LONG
    assert fake.requests[2].token_ids == fake.requests[1].token_ids
    prompt = list(fake.requests[0].token_ids)
    assert prompt[-49:] == tokenizer.encode(LONG, False)[-49:]


async def test_a_text_whose_end_shows_too_late_is_refused_before_all_of_it_is_read(roomy, fake, read) -> None:
    cut = {"truncate_prompt_tokens": 50, "max_tokens": 1}
    for text in ("0123456789" * 400_000, " " * 4_000_000):
        answer = await roomy.http.post("/v1/completions", json={"model": "tiny", "prompt": text, **cut})
        if answer.status_code != 200:
            assert answer.json()["error"]["param"] == "truncate_prompt_tokens"
        assert sum(read) < 3 << 20
        read.clear()


@given(data=st.data())
def test_a_long_texts_end_and_beginning_have_its_own_tokens(tokenizers, data) -> None:
    words = st.sampled_from(["The ", "lazy dog", "   ", "\n\n", "1234567", "日本語", "🦊", "====", "é", "a"])
    text = "".join(data.draw(st.lists(words, min_size=1, max_size=30))) * data.draw(st.integers(1, 500))
    tokens = data.draw(st.integers(1, 40))
    for each in tokenizers:
        model, whole = TextModel(each, None), each.encode(text, False)
        ending = asyncio.run(model.ending(text, tokens))
        beginning = asyncio.run(model.beginning(text, tokens))
        assert each.encode(ending, False)[-tokens:] == whole[-tokens:]
        assert each.encode(beginning, False)[:tokens] == whole[:tokens]


async def test_of_a_prediction_as_much_is_read_as_the_context_holds(roomy, fake, read) -> None:
    said = {"prediction": {"type": "content", "content": LONG}, "messages": [{"role": "user", "content": "x"}]}
    answer = await roomy.http.post("/v1/chat/completions", json={"model": "tiny", **said})
    assert answer.status_code == 200
    assert len(fake.requests[0].prediction) == CONTEXT
    assert sum(read) < 2 * LEAST_LONG


async def test_a_text_of_few_tokens_fits_however_long_it_is() -> None:
    class Words(ByteTokenizer):
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return [len(word) for word in text.split()]

    model = TextModel(Words(1 << 30), ChatTemplate(PLAIN))
    text = " ".join("x" * 40_000 for _ in range(99))
    assert len(await model.encode(text, room=PromptRoom(100))) == 99
    with pytest.raises(ContextTooLong, match="has 100 tokens"):
        PromptRoom(100).check(len(await model.encode(f"{text} x", room=PromptRoom(100))))


@pytest.fixture(scope="module")
def tokenizers(tokenizer: HfTokenizer) -> list[Tokenizer]:
    return [tokenizer, HfTokenizer(DEMO), ByteTokenizer(256)]


@given(data=st.data())
def test_a_cut_adds_fewer_tokens_than_are_taken_off_for_it(tokenizers, data) -> None:
    words = st.sampled_from(
        ["The ", "lazy dog", "   ", "\n\n", "12345", "日本語", "🦊", "====", "<|end|>", "é", "a"]
    )
    text = "".join(data.draw(st.lists(words, min_size=1, max_size=30))) * data.draw(st.integers(1, 20))
    size = data.draw(st.integers(1, len(text)))
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    for each in tokenizers:
        counted = sum(len(each.encode(part, False)) for part in parts)
        assert counted - LOST_AT_CUT * len(parts) <= len(each.encode(text, False))
