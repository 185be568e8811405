"""Tests that what is large is weighed, read and written without holding up the loop."""

from __future__ import annotations

import asyncio
import json

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.process.loop_watch import LoopWatch
from baton.protos.errors import InvalidRequest
from baton.router.api import large
from baton.router.api.large import LONG_LIST, MAX_VALUES, count_json_values, parsed, sliced_json
from baton.router.api.openai.schemas import ChatBody, CompletionBody, DetokenizeBody

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)
IDS = ",".join(str(i % 500) for i in range(LONG_LIST))


def counted(value: object) -> int:
    """Strings (keys too), objects and arrays."""
    if isinstance(value, dict):
        return 1 + sum(1 + counted(inner) for inner in value.values())
    if isinstance(value, list):
        return 1 + sum(map(counted, value))
    return int(isinstance(value, str))


@given(JSON, st.booleans())
def test_a_text_is_weighed_as_it_would_be_parsed(value: object, ascii_only: bool) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_only).encode(errors="surrogatepass")
    assert count_json_values(raw).values == counted(value)


@given(JSON)
def test_sliced_json_is_the_json(value: object) -> None:
    assert json.loads(b"".join(sliced_json(value))) == value


def test_long_lists_are_written_in_slices() -> None:
    rows = [{"ids": list(range(5000)), "names": ["x"] * 3000}] * 3
    parts = list(sliced_json({"rows": rows, "none": None, "empty": []}))
    assert max(map(len, parts)) < 20_000
    assert orjson.loads(b"".join(parts)) == {"rows": rows, "none": None, "empty": []}


async def test_long_lists_of_ids_are_read_apart_wherever_a_prompt_may_have_them() -> None:
    ids = json.loads(f"[{IDS}]")
    one = await parsed(CompletionBody, f'{{"prompt": [{IDS}], "max_tokens": 3}}'.encode())
    assert (one.prompt, one.max_tokens) == ([ids], 3)
    two = await parsed(CompletionBody, f'{{"prompt": [[1, 2], [{IDS}], [{IDS}]]}}'.encode())
    assert two.prompt == [[1, 2], ids, ids]
    assert (await parsed(DetokenizeBody, f'{{"tokens": [{IDS}]}}'.encode())).tokens == ids


@pytest.mark.parametrize(
    ("kind", "raw", "told"),
    [
        (CompletionBody, f'{{"prompt": [{IDS},1.5]}}', "prompt: should hold only token ids"),
        (CompletionBody, f'{{"prompt": [{IDS},true]}}', "prompt: should hold only token ids"),
        (CompletionBody, f'{{"prompt": [{IDS},01]}}', "prompt: "),
        (CompletionBody, f'{{"prompt": "x", "stop_token_ids": [{IDS}]}}', "only prompt may be so long"),
        (CompletionBody, f'{{"prompt": [["x"], [{IDS}]]}}', "prompt: should hold only token ids"),
        (ChatBody, '{"messages": [' + '{"role":"user","content":"x"},' * MAX_VALUES + "{}]}", "send fewer, longer"),
        (ChatBody, '{"messages": [' + "1," * 300_000 + "1]}", "send fewer, longer"),
        (ChatBody, '{"messages": [{}' + ",{}" * 20_000 + "]}", "messages[0].role: Field required"),
    ],
)
async def test_what_is_wrong_with_a_large_body_is_told(kind: type, raw: str, told: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await parsed(kind, raw.encode())
    assert told in refused.value.message


MIB = 1 << 20
TURN = {"role": "user", "content": "x"}
CALL = {"function": {"name": "f", "arguments": "[" + "[]," * 5000 + "[]]"}}
BLOCK = {"type": "text", "text": "x" * 990, "cache_control": 1}
BODIES: dict[str, tuple[str, bytes]] = {
    "tokens by name": ("/tokenize", b'{"prompt":"' + b"a b " * (MIB // 4) + b'","return_token_strs":true}'),
    "tiny messages": (
        "/v1/chat/completions",
        b'{"messages":[' + b'{"role":"user","content":"x"},' * (2 * MIB // 30) + b"{}]}",
    ),
    "ids": ("/v1/completions", b'{"prompt":[' + b"123," * (MIB // 4) + b"1]}"),
    "lists": ("/v1/completions", b'{"prompt":[' + b"[1]," * (MIB // 4) + b"[1]]}"),
    "wrong stops": ("/v1/completions", b'{"prompt":"x","stop":[' + b"1," * (MIB // 2) + b"1]}"),
    "ids to text": ("/detokenize", b'{"tokens":[' + b"123," * (MIB // 4) + b"1]}"),
    "calls of one message": (
        "/v1/chat/completions",
        orjson.dumps({"messages": [TURN, {"role": "assistant", "tool_calls": [CALL] * 150}]}),
    ),
    "marked blocks of one message": (
        "/v1/messages",
        orjson.dumps({"max_tokens": 1, "messages": [{"role": "user", "content": [BLOCK] * 4000}]}),
    ),
    "items": ("/v1/responses", orjson.dumps({"input": [TURN] * 4500})),
    "a long name": ("/v1/completions", b'{"prompt":"x","model":"' + b"m" * MIB + b'"}'),
}


@pytest.mark.usefixtures("settled_heap")
@pytest.mark.parametrize("what", BODIES)
async def test_no_body_holds_the_loop(start_router, fake, model_dir, what: str) -> None:
    path, raw = BODIES[what]
    async with start_router(fake, {"tiny": model_dir}) as clients:
        await clients.http.post(path, content=b"{}")
        with LoopWatch(0.05) as watch:
            answer = await clients.http.post(path, content=raw, timeout=60)
            await asyncio.sleep(0.03)  # the watch looks once more
        assert answer.status_code in (200, 400, 404)
        ours = [stall for stall in watch.stalls if "httpx" not in stall.stack and "httpcore" not in stall.stack]
        assert not ours, ours


@pytest.mark.parametrize(("calls", "values"), [(1, 100_000), (150, 5000)])
async def test_calls_of_many_small_values_in_all_are_refused(
    start_router, fake, model_dir, calls: int, values: int
) -> None:
    """A collection of them would hold all threads, however few values each call has."""
    call = {"function": {"name": "f", "arguments": "[" + "[]," * values + "[]]"}}
    body = {"messages": [TURN, {"role": "assistant", "tool_calls": [call] * calls}]}
    async with start_router(fake, {"tiny": model_dir}) as clients:
        answer = await clients.http.post("/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 400
    assert f"messages has {calls * (values + 2)} strings, objects and arrays" in answer.json()["error"]["message"]


async def test_work_aside_does_not_wait_for_the_tokenizer_of_prompts() -> None:
    assert await large.offload_if(True, sum, [1, 2]) == 3
    assert await large.offload_if(False, sum, [1, 2]) == 3
