"""Every family's own format of calls and thoughts over REST, with the unmodified clients, streamed and whole."""

from __future__ import annotations

import json

import pytest
from tokenizers import AddedToken, Tokenizer

from baton.protos.grammar import byte_tokenizer, compiled
from baton.router.request.request import ServedModel
from baton.router.text.tokenizer import HfTokenizer
from baton.router.text.tool_parsers import harmony
from tests.router.api.openai.test_tools import MESSAGES, streamed
from tests.router.conftest import EOS

PARAMETERS = {
    "type": "object",
    "properties": {"at": {"type": "string", "maxLength": 9}, "days": {"type": "integer"}},
    "required": ["at", "days"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
TOOLS = [WEATHER, {"type": "function", "function": {"name": "now"}}]
ASK = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "tools": TOOLS}
HEAD = (
    "{# <|channel|> #}{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "<|start|>assistant"
)
HARMONY = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
    '<|constrain|>json<|message|>{"at": "Ulm", "days": 3}<|call|><|start|>assistant<|channel|>commentary '
    "to=functions.now<|message|>{}<|call|><|start|>assistant<|channel|>final<|message|>Let me see."
)
# Templates, of which only the markup matters, and answers.
FORMATS = {
    "deepseek_v3": (
        "{# <｜tool▁calls▁begin｜> <think> #}{{ messages[0].content }}",
        "<think>Hm.</think>Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
        '{"at": "Ulm", "days": 3}<｜tool▁call▁end｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n'
        "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "glm45": (
        "{# <tool_call> <arg_key> <think> #}{{ messages[0].content }}",
        "<think>Hm.</think>Let me see.<tool_call>weather\n<arg_key>at</arg_key>\n<arg_value>Ulm</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call><tool_call>now</tool_call>",
    ),
    "harmony": (HEAD, HARMONY),
    "minimax_m2": (
        "{# <minimax:tool_call> <think> #}{{ messages[0].content }}",
        '<think>Hm.</think>Let me see.<minimax:tool_call>\n<invoke name="weather">\n<parameter name="at">Ulm'
        '</parameter>\n<parameter name="days">3</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n'
        "</minimax:tool_call>",
    ),
    "qwen3_coder": (
        "{# <tool_call> <function= <parameter= <think> #}{{ messages[0].content }}",
        "<think>Hm.</think>Let me see.<tool_call>\n<function=weather>\n<parameter=at>\nUlm\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call><tool_call>\n<function=now>\n</function>\n"
        "</tool_call>",
    ),
}
SPECIAL = [mark for mark in harmony.MARKS if mark.count("<|") == 1 and mark.endswith("|>")]


@pytest.fixture
def model_of(tmp_path, model_dir, fake):
    """Makes a model whose template is of a format and that says a text; Harmony's marks are special tokens."""

    def make(template: str, said: str):
        plain = (model_dir / "tokenizer.json").read_text().replace("<|end|>", "<|eos|>")  # which is Harmony's
        tokenizer = Tokenizer.from_str(plain)
        tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in SPECIAL])
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        ids = [*HfTokenizer(tmp_path / "tokenizer.json").encode(said, False), EOS]
        fake.say = lambda request, choice: ids
        fake.served = (ServedModel("tiny", 4096, tokenizer.get_vocab_size(), (EOS,)),)
        return {"tiny": tmp_path}

    return make


@pytest.mark.parametrize("name", FORMATS)
async def test_a_familys_answer_is_told_apart_streamed_and_whole(start_router, fake, model_of, name) -> None:
    async with start_router(fake, model_of(*FORMATS[name])) as clients:
        [choice] = (await clients.openai.chat.completions.create(**ASK)).choices
        content, thought, calls, reasons = await streamed(clients.openai, **ASK)
        hidden = await clients.openai.chat.completions.create(**ASK, extra_body={"include_reasoning": False})
    message = choice.message
    assert (message.content, message.reasoning_content, choice.finish_reason) == (
        "Let me see.",
        "Hm.",
        "tool_calls",
    )
    told = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]
    assert told == [("weather", {"at": "Ulm", "days": 3}), ("now", {})]
    assert (content, thought, reasons) == ("Let me see.", "Hm.", ["tool_calls"])
    assert [(call["name"], call["arguments"]) for call in calls] == [
        (call.function.name, call.function.arguments) for call in message.tool_calls
    ]
    assert not hasattr(hidden.choices[0].message, "reasoning_content")


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - {"harmony"}))
async def test_a_strict_tool_binds_calls_in_the_familys_own_format(start_router, fake, model_of, name) -> None:
    template, said = FORMATS[name]
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    ask = ASK | {"tools": [strict, TOOLS[1]]}
    async with start_router(fake, model_of(template, said)) as clients:
        answer = await clients.http.post("/v1/chat/completions", json=ask)
    assert answer.status_code == 200, answer.text
    assert "x-baton-ignored" not in answer.headers
    grammar = fake.requests[-1].sampling.grammar
    matcher = compiled(grammar, byte_tokenizer())
    assert matcher.consume_tokens(list(said.encode()))
    assert matcher.is_accepting()
    for good, bad in (("3", "three"), ("Ulm", "Ulm or Bonn"), ("weather", "whether")):
        matcher, wrong = compiled(grammar, byte_tokenizer()), said.replace(good, bad).encode()
        assert matcher.try_consume_tokens(list(wrong)) < len(wrong), bad


async def test_a_strict_tool_binds_harmonys_calls_by_their_special_tokens(start_router, fake, model_of) -> None:
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    said = HARMONY.partition("<|call|>")[0]
    sources = model_of(HEAD, said)
    tokenizer = HfTokenizer(sources["tiny"] / "tokenizer.json")
    async with start_router(fake, sources) as clients:
        answer = await clients.http.post("/v1/chat/completions", json=ASK | {"tools": [strict]})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"

    grammar, special = fake.requests[-1].sampling.grammar, {tokenizer.encode(m, False)[0]: m for m in SPECIAL}

    def taken(text: str) -> tuple[int, int]:
        told: list[int] = []
        for i in tokenizer.encode(text, False):
            told += [i] if i in special else list(tokenizer.token_bytes(i))
        return compiled(grammar, byte_tokenizer(max(special) + 1)).try_consume_tokens(told), len(told)

    for text in (said, "<|channel|>final<|message|>Sunny.", said.replace("weather <|con", "weather<|con")):
        took, count = taken(text)
        assert took == count, text
    for text in (said.replace("3", '"x"'), said.replace("weather", "now"), "Sunny."):
        took, count = taken(text)
        assert took < count, text


async def test_without_tools_a_harmony_answer_has_no_marks(start_router, fake, model_of) -> None:
    said = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Sunny."
    ask = {"model": "tiny", "messages": MESSAGES, "temperature": 0}
    async with start_router(fake, model_of(HEAD, said)) as clients:
        message = (await clients.openai.chat.completions.create(**ASK | {"tools": []})).choices[0].message
        content, thought, _, _ = await streamed(clients.openai, **ask)
        response = await clients.openai.responses.create(
            model="tiny", input="Weather?", include=["message.output_text.logprobs"], top_logprobs=1
        )
        claude = await clients.anthropic.messages.create(model="tiny", messages=MESSAGES, max_tokens=500)
    assert (message.content, message.reasoning_content) == ("Sunny.", "Hm.")
    assert (content, thought) == ("Sunny.", "Hm.")
    assert [item.type for item in response.output] == ["reasoning", "message"]
    part = response.output[1].content[0]
    assert "".join(bytes(entry.bytes).decode() for entry in part.logprobs) == part.text == "Sunny."
    assert [block.type for block in claude.content] == ["thinking", "text"]
    assert claude.content[1].text == "Sunny."


@pytest.mark.parametrize(("template", "reasoning", "said"), [(HEAD, "none", ""), ("Weather?", "auto", "Hm.")])
async def test_the_settings_say_whether_harmonys_thoughts_are_told_apart(
    start_router, fake, model_of, template, reasoning, said
) -> None:
    settings = {"tool_parser": "harmony", "reasoning_parser": reasoning}
    async with start_router(fake, model_of(template, HARMONY), **settings) as clients:
        message = (await clients.openai.chat.completions.create(**ASK)).choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["weather", "now"]
    assert (message.model_extra or {}).get("reasoning_content", "") == said
    assert message.content == ("Let me see." if said else "Hm.Let me see.")


async def test_special_tokens_that_are_no_marks_stay_out_of_a_harmony_answer(start_router, fake, model_of) -> None:
    said = "<|channel|>final<|message|>Sun<|system|>ny."
    ask = {"model": "tiny", "messages": MESSAGES, "temperature": 0}
    async with start_router(fake, model_of(HEAD, said)) as clients:
        hidden = await clients.openai.chat.completions.create(**ask, logprobs=True)
        shown = await clients.openai.chat.completions.create(**ask, extra_body={"skip_special_tokens": False})
    assert hidden.choices[0].message.content == "Sunny."
    assert shown.choices[0].message.content == "Sun<|system|>ny."
    joined = b"".join(bytes(entry.bytes) for entry in hidden.choices[0].logprobs.content)
    assert joined.decode() == "<|channel|>final<|message|>Sunny."


async def test_calls_between_thoughts_keep_their_order_on_every_surface(start_router, fake, model_of) -> None:
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
    tools = [{"name": "weather", "input_schema": PARAMETERS}, {"name": "now", "input_schema": {"type": "object"}}]
    async with start_router(fake, model_of(HEAD, HARMONY)) as clients:
        response = await clients.openai.responses.create(model="tiny", input="Weather?", tools=flat)
        claude = await clients.anthropic.messages.create(
            model="tiny", messages=MESSAGES, max_tokens=500, tools=tools
        )
    assert [item.type for item in response.output] == ["reasoning", "function_call", "function_call", "message"]
    assert [block.type for block in claude.content] == ["thinking", "tool_use", "tool_use", "text"]
    assert claude.content[1].input == {"at": "Ulm", "days": 3}


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        (PARAMETERS | {"anyOf": [{}]}, "'anyOf'"),
        (PARAMETERS | {"properties": {"at": {"type": "string", "format": "date"}}, "required": ["at"]}, "'format'"),
        (PARAMETERS | {"properties": {"at": {"anyOf": [{"type": "string"}, {"type": "object"}]}}}, "an object"),
    ],
)
async def test_a_strict_schema_that_bare_text_cannot_follow_is_refused_by_name(
    start_router, fake, model_of, schema, why
) -> None:
    function = {"name": "weather", "strict": True, "parameters": schema}
    async with start_router(fake, model_of(*FORMATS["qwen3_coder"])) as clients:
        ask = ASK | {"tools": [TOOLS[1], {"type": "function", "function": function}]}
        refused = await clients.http.post("/v1/chat/completions", json=ask)
        flat = await clients.http.post(
            "/v1/responses", json={"model": "tiny", "input": "x", "tools": [{"type": "function", **function}]}
        )
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "tools[1].function.parameters")
    assert why in error["message"]
    assert flat.json()["error"]["param"] == "tools[0].parameters"


async def test_a_template_that_joins_arguments_to_text_gets_them_as_the_client_wrote_them(
    start_router, fake, model_of
) -> None:
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ '```json\n' + c.function.arguments + '\n```' }}"
        "{{ c.function.arguments.at }}{{ c.function.arguments | tojson }}{{ m.thinking }}{% endfor %}{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"at":"Ulm"}'}}
    said = {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call]}
    messages = [*MESSAGES, said]
    sources = model_of(template, "x")
    async with start_router(fake, sources) as clients:
        await clients.openai.chat.completions.create(**ASK | {"messages": messages, "max_tokens": 1})
    text = HfTokenizer(sources["tiny"] / "tokenizer.json").decode(fake.requests[-1].token_ids)
    assert text == '```json\n{"at":"Ulm"}\n```Ulm{"at": "Ulm"}Hm.'
