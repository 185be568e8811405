"""A final message that the answer goes on with: the prompt is transformers', thoughts stay apart."""

from __future__ import annotations

import pytest

from baton.protos.errors import InvalidRequest
from baton.router.text.chat_template import ChatTemplate
from tests.router.conftest import EOS, TEMPLATE

OPEN = {"continue_final_message": True}
HALF = [{"role": "user", "content": "Count to five."}, {"role": "assistant", "content": "One, two, "}]
TRIMS = TEMPLATE
KEEPS = TEMPLATE.replace(" | trim", "")
# Thoughts of earlier turns are left out, as Qwen3's template does it.
THINKS = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}"
    "{{ m.content.split('</think>')[-1].lstrip('\\n') }}{% else %}{{ m.content }}{% endif %}[end]\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def theirs(model_dir):
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(str(model_dir))


@pytest.mark.parametrize("source", [TRIMS, KEEPS, THINKS])
@pytest.mark.parametrize(
    "content", ["One, two, ", "One", "  One\n", "", "<think>Hm.</think>\nOne, ", "<|end|> and on", "{{ 1 }}"]
)
def test_an_open_prompt_is_as_transformers_renders_it(theirs, source: str, content: str) -> None:
    ours = ChatTemplate(source, {"bos_token": "<|begin|>", "eos_token": "<|end|>"})
    turns = [HALF[0], {"role": "assistant", "content": content}]
    try:
        expected = theirs.apply_chat_template(
            turns, chat_template=source, tokenize=False, continue_final_message=True
        )
    except ValueError:
        with pytest.raises(InvalidRequest, match="can't be continued"):
            ours.render_open(turns)
    else:
        assert ours.render_open(turns) == expected


async def test_the_answer_goes_on_with_the_last_message_and_tokenize_shows_the_same_prompt(
    router, fake, tokenizer
) -> None:
    ask = {"model": "tiny", "messages": HALF, **OPEN}
    answer = await router.http.post("/v1/chat/completions", json=ask | {"max_tokens": 2})
    shown = await router.http.post("/tokenize", json=ask)
    assert answer.status_code == 200
    prompt = list(fake.requests[0].token_ids)
    text = "<|begin|><|user|>Count to five.<|end|><|assistant|>One, two,"
    assert tokenizer.decode(prompt, skip_special_tokens=False) == text
    assert shown.json()["tokens"] == prompt


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_a_turn_goes_on_or_one_begins(router, path: str) -> None:
    ask = {"model": "tiny", "messages": HALF, **OPEN}
    both = await router.http.post(path, json=ask | {"add_generation_prompt": True})
    one = await router.http.post(path, json=ask | {"add_generation_prompt": False})
    nothing = await router.http.post(path, json=ask | {"messages": [{"role": "assistant", "tool_calls": []}]})
    assert (both.status_code, both.json()["error"]["param"]) == (400, "continue_final_message")
    assert (nothing.status_code, nothing.json()["error"]["param"]) == (400, "continue_final_message")
    assert one.status_code == 200


@pytest.mark.parametrize(
    ("said", "thought", "content"), [("<think>Hm", "m.", "Six"), ("<think>Hm</think>", None, "m.</think>Six")]
)
async def test_a_thought_that_was_left_open_goes_on_as_a_thought(
    start_router, fake, model_dir, tokenizer, said, thought, content
) -> None:
    ids = [*tokenizer.encode("m.</think>Six", False), EOS]
    fake.say = lambda request, choice: ids
    turns = [HALF[0], {"role": "assistant", "content": said}]
    async with start_router(fake, {"tiny": model_dir}, reasoning_parser="think") as clients:
        answer = await clients.http.post("/v1/chat/completions", json={"messages": turns, **OPEN})
    message = answer.json()["choices"][0]["message"]
    assert (message.get("reasoning_content"), message["content"]) == (thought, content)
