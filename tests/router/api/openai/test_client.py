"""The unmodified openai client against a router on a real socket."""

from __future__ import annotations

import openai
import pytest

from baton.protos.errors import WorkerLost
from tests.router.conftest import entry

SAID = "The quick brown fox jumps over the lazy dog. 日本語 and 🦊 too!"
HELLO = [{"role": "user", "content": "Hello"}]


async def test_a_chat_answer_has_text_usage_and_one_finish_reason(router, fake) -> None:
    answer = await router.openai.chat.completions.create(model="tiny", messages=HELLO, temperature=0)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.content == SAID
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens == len(fake.requests[0].token_ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer._request_id


async def test_a_streamed_chat_begins_with_the_role_and_ends_with_the_usage(router) -> None:
    stream = await router.openai.chat.completions.create(
        model="tiny", messages=HELLO, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == SAID
    assert [c.choices[0].finish_reason for c in chunks[:-1] if c.choices[0].finish_reason] == ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens > 0
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


async def test_no_piece_of_a_stream_holds_half_a_character(router, fake) -> None:
    fake.pace_s = 0.006  # quicker tokens come together
    stream = await router.openai.completions.create(
        model="tiny", prompt="x", temperature=0, max_tokens=100, stream=True
    )
    texts = [chunk.choices[0].text async for chunk in stream]
    assert "".join(texts) == SAID
    assert len(texts) > 5
    assert not any("�" in text for text in texts)


async def test_completions_default_to_sixteen_tokens_and_chat_to_the_context(router, fake) -> None:
    await router.openai.completions.create(model="tiny", prompt="x")
    await router.openai.chat.completions.create(model="tiny", messages=HELLO)
    completion, chat = fake.requests
    assert completion.sampling.max_tokens == 16
    assert chat.sampling.max_tokens == 256 - len(chat.token_ids)


async def test_choices_of_a_seeded_request_differ_and_the_next_call_repeats_them(router) -> None:
    async def texts(**more: object) -> list[str]:
        answer = await router.openai.completions.create(model="tiny", prompt="x", n=3, **more)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.text for choice in answer.choices]

    first, again, other = await texts(seed=7), await texts(seed=7), await texts(seed=8)
    assert len(set(first)) == 3
    assert first == again != other
    assert len(set(await texts(temperature=0))) == 1
    assert await texts() != await texts()


async def test_prompts_of_a_batch_keep_their_order(router, fake, tokenizer) -> None:
    fake.say = lambda request, choice: list(request.token_ids)[1:]
    answer = await router.openai.completions.create(
        model="tiny", prompt=["one", "two and more", "three"], n=2, max_tokens=2, temperature=0
    )
    assert [choice.index for choice in answer.choices] == list(range(6))
    first_two = [tokenizer.encode(word, False)[:2] for word in ("one", "two and more", "three")]
    assert [c.text[:2] for c in answer.choices[::2]] == [tokenizer.decode(ids)[:2] for ids in first_two]
    assert answer.usage.prompt_tokens == sum(len(r.token_ids) for r in fake.requests)


async def test_equal_prompts_of_a_batch_differ_unless_they_are_seeded(router) -> None:
    for seed, distinct in ((None, 2), (7, 1)):
        answer = await router.openai.completions.create(model="tiny", prompt=["x", "x"], seed=seed)
        assert len({choice.text for choice in answer.choices}) == distinct


async def test_a_streamed_batch_gives_each_index_one_finish_reason(router) -> None:
    stream = await router.openai.completions.create(
        model="tiny", prompt=[[5, 6], [7]], n=2, max_tokens=4, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    ends = [c.choices[0].index for c in chunks if c.choices and c.choices[0].finish_reason]
    assert sorted(ends) == [0, 1, 2, 3]
    assert chunks[-1].usage.completion_tokens == 16


async def test_chat_choices_each_begin_with_a_role(router) -> None:
    stream = await router.openai.chat.completions.create(
        model="tiny", messages=HELLO, n=2, max_tokens=3, stream=True
    )
    roles = [c.choices[0].index async for c in stream if c.choices[0].delta.role]
    assert roles == [0, 1]


@pytest.mark.parametrize("top", [0, 3])
async def test_chat_logprobs_have_as_many_alternatives_as_asked_for(router, top: int) -> None:
    answer = await router.openai.chat.completions.create(
        model="tiny", messages=HELLO, temperature=0, logprobs=True, top_logprobs=top
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    assert all(len(entry.top_logprobs) == top for entry in content)
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == SAID


async def test_streamed_logprobs_are_those_of_the_whole_answer(router) -> None:
    ask = {"model": "tiny", "messages": HELLO, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    whole = await router.openai.chat.completions.create(**ask)
    stream = await router.openai.chat.completions.create(**ask, stream=True)
    pieces = [c.choices[0].logprobs.content async for c in stream if c.choices[0].logprobs]
    assert [entry for piece in pieces for entry in piece] == whole.choices[0].logprobs.content


async def test_completion_logprobs_are_parallel_lists_over_the_text(router) -> None:
    answer = await router.openai.completions.create(
        model="tiny", prompt="x", temperature=0, logprobs=2, max_tokens=12
    )
    logprobs, text = answer.choices[0].logprobs, answer.choices[0].text
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 12
    assert [text[at:][: len(token)] for at, token in zip(logprobs.text_offset, logprobs.tokens, strict=True)] == (
        logprobs.tokens
    )
    assert all(len(top) == 2 for top in logprobs.top_logprobs)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_text_before_it_and_the_stream_at_the_worker(router, fake, stream) -> None:
    fake.pace_s = 0.002
    answer = await router.openai.completions.create(
        model="tiny", prompt="x", temperature=0, max_tokens=200, stop=["lazy", "never"], stream=stream
    )
    if stream:
        chunks = [chunk async for chunk in answer]
        text, reason = "".join(c.choices[0].text for c in chunks), chunks[-1].choices[0].finish_reason
    else:
        text, reason = answer.choices[0].text, answer.choices[0].finish_reason
    assert (text, reason) == ("The quick brown fox jumps over the ", "stop")
    assert fake.cancelled == ["stop_string"]


async def test_token_ids_come_back_when_asked_for(router, fake) -> None:
    extra = {"return_token_ids": True}
    answer = await router.openai.completions.create(
        model="tiny", prompt=[5, 6, 7], temperature=0, max_tokens=3, extra_body=extra
    )
    assert answer.choices[0].prompt_token_ids == [5, 6, 7]
    assert len(answer.choices[0].token_ids) == 3
    stream = await router.openai.chat.completions.create(
        model="tiny", messages=HELLO, temperature=0, max_tokens=3, stream=True, extra_body=extra
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].prompt_token_ids == list(fake.requests[-1].token_ids)
    streamed = [i for chunk in chunks for i in getattr(chunk.choices[0], "token_ids", None) or []]
    assert streamed == answer.choices[0].token_ids


async def test_echo_puts_the_prompt_before_the_text(router) -> None:
    answer = await router.openai.completions.create(model="tiny", prompt="Say: ", temperature=0, echo=True)
    assert answer.choices[0].text.startswith("Say: The quick")


async def test_cached_tokens_are_told(router) -> None:
    answer = await router.openai.completions.create(model="tiny", prompt=[5] * 40, n=2)
    assert answer.usage.prompt_tokens_details.cached_tokens == 16


async def test_a_conversation_goes_through_the_models_template(router, fake, tokenizer) -> None:
    await router.openai.chat.completions.create(
        model="tiny",
        max_tokens=1,
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": " Hi "}, {"type": "text", "text": "you"}]},
        ],
    )
    text = tokenizer.decode(fake.requests[0].token_ids, skip_special_tokens=False)
    assert text == "<|begin|><|system|>Be brief.<|end|><|user|>Hi you<|end|><|assistant|>"


async def test_the_clients_own_stream_helper_assembles_the_answer(router) -> None:
    async with router.openai.chat.completions.stream(
        model="tiny", messages=HELLO, temperature=0, logprobs=True, top_logprobs=1
    ) as stream:
        answer = await stream.get_final_completion()
    assert answer.choices[0].message.content == SAID
    assert answer.choices[0].finish_reason == "stop"


async def test_models_are_listed_with_their_context(router) -> None:
    models = await router.openai.models.list()
    assert [(model.id, model.max_model_len) for model in models.data] == [("tiny", 256)]
    assert (await router.openai.models.retrieve("tiny")).id == "tiny"


async def test_continuous_usage_is_on_every_chunk_and_grows(router) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = await router.openai.completions.create(
        model="tiny", prompt="x", max_tokens=5, stream=True, extra_body={"stream_options": options}
    )
    counts = [chunk.usage.completion_tokens async for chunk in stream]
    assert counts == sorted(counts)
    assert counts[-1] == 5


async def test_continuous_usage_counts_what_was_sent_and_nothing_before_the_first_token(router) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = await router.openai.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=3, n=2, stream=True, logprobs=True,
        extra_body={"stream_options": options},
    )  # fmt: skip
    sent = 0
    async for chunk in stream:
        sent += sum(len(choice.logprobs.content) for choice in chunk.choices if choice.logprobs)
        assert chunk.usage.completion_tokens == sent
        assert chunk.usage.prompt_tokens > 0
    assert sent == 6


async def test_echo_with_logprobs_covers_the_prompt_and_zero_tokens_cover_it_alone(router, fake, tokenizer) -> None:
    ids = tokenizer.encode("The fox", True)
    fake.scores = tuple(entry(i, 2) for i in ids[1:])
    for most, stream in ((3, False), (0, False), (0, True)):
        answer = await router.openai.completions.create(
            model="tiny", prompt="The fox", temperature=0, logprobs=1, echo=True, max_tokens=most, stream=stream
        )
        parts = [c.choices[0] async for c in answer] if stream else [answer.choices[0]]
        logprobs, text = parts[0].logprobs, parts[0].text
        assert text.startswith("The fox")
        assert len(logprobs.tokens) == len(ids) + most
        assert logprobs.token_logprobs[0] is None
        assert logprobs.top_logprobs[0] is None
        assert logprobs.token_logprobs[1] == -0.5
        spans = list(zip(logprobs.text_offset, logprobs.tokens, strict=True))[1:]  # the first is <|begin|>
        assert [text[at:][: len(token)] for at, token in spans] == [token for _, token in spans]
    assert fake.requests[-1].sampling.max_tokens == 1


async def test_errors_are_the_clients_own_exceptions(router) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await router.openai.completions.create(model="huge", prompt="x")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as bad:
        await router.openai.completions.create(model="tiny", prompt="x", temperature=3)
    assert bad.value.param == "temperature"


async def test_an_error_in_the_middle_of_a_stream_is_raised_by_the_client(router, fake) -> None:
    fake.fail_after = (3, WorkerLost("decode-0 is gone"))
    stream = await router.openai.completions.create(model="tiny", prompt="x", stream=True)
    texts: list[str] = []

    async def read() -> None:
        async for chunk in stream:
            texts.append(chunk.choices[0].text)  # noqa: PERF401 (kept when the stream breaks off)

    with pytest.raises(openai.APIError, match="decode-0 is gone"):
        await read()
    assert len("".join(texts)) == 3


async def test_an_error_before_the_first_token_keeps_its_status_in_a_stream(router, fake) -> None:
    fake.fail_after = (0, WorkerLost("decode-0 is gone"))
    with pytest.raises(openai.InternalServerError) as lost:
        await router.openai.completions.create(model="tiny", prompt="x", stream=True)
    assert lost.value.status_code == 503
