"""Tests what the judge of text holds a reply over HTTP against."""

from __future__ import annotations

import json

import msgspec
import numpy as np

from baton.drill.checks import text
from baton.drill.language import oracle
from baton.drill.language.oracle import EOS
from baton.drill.scenario import Request
from baton.protos.nouns import Grammar, Sampling

ASKED = Request(0, 0.0, (1, 2), Sampling(max_tokens=8), over_http="whole", stops=("><30",))


def reply(words: str, finish: str, tokens: int) -> bytes:
    usage = {"prompt_tokens": 2, "completion_tokens": tokens}
    return json.dumps({
        "choices": [{"index": 0, "text": words, "logprobs": None, "finish_reason": finish}], "usage": usage,
    }).encode()  # fmt: skip


def test_a_stop_string_ends_the_text_and_the_count() -> None:
    assert text.text_of(ASKED, [400, 65, 300, 301, 302], "length") == ("<400>A<300", 4, "stop")
    assert text.text_of(ASKED, [400, 65], "length") == ("<400>A", 2, "length")


def test_the_id_that_ended_an_answer_is_no_text_and_half_a_character_is_replaced() -> None:
    assert text.text_of(ASKED, [65, EOS], "stop") == ("A", 2, "stop")
    assert text.text_of(ASKED, [65, 0xE4], "length") == ("A\ufffd", 2, "length")


def test_a_reply_as_the_oracle_says_is_right_and_each_other_one_is_wrong() -> None:
    want = [text.text_of(ASKED, [65, 66], "length")]
    assert not list(text.wrong(ASKED, text.read(ASKED, reply("AB", "length", 2)), want))
    for other in (reply("AC", "length", 2), reply("AB", "stop", 2), reply("AB", "length", 3)):
        assert list(text.wrong(ASKED, text.read(ASKED, other), want))


def test_a_grammar_that_is_complete_at_the_last_token_may_end_by_length_and_no_earlier_one_may() -> None:
    asked = msgspec.structs.replace(ASKED, sampling=Sampling(max_tokens=2, grammar=Grammar("regex", ".")))
    for tokens, allowed in (([65, 66], True), ([65], False)):
        want = [text.text_of(asked, tokens, "stop")]
        ended = reply("AB"[: len(tokens)], "length", len(tokens))
        assert (not list(text.wrong(asked, text.read(asked, ended), want))) == allowed


def test_a_stream_without_its_end_or_with_two_finish_reasons_is_wrong() -> None:
    streamed = msgspec.structs.replace(ASKED, over_http="stream")
    want = [text.text_of(ASKED, [65, 66], "length")]
    events = [b"data: " + reply(part, finish, 2) + b"\n\n" for part, finish in (("A", ""), ("B", "length"))]
    done = b"data: [DONE]\n\n"
    assert not list(text.wrong(streamed, text.read(streamed, b"".join(events) + done), want))
    assert list(text.wrong(streamed, text.read(streamed, b"".join(events)), want))
    assert list(text.wrong(streamed, text.read(streamed, b"".join([*events, events[1]]) + done), want))


SCORED = Request(0, 0.0, (1, 2), Sampling(max_tokens=8, prompt_logprobs=2), over_http="whole")


def scored_reply(*prompt: object) -> bytes:
    choice = {"index": 0, "text": "A", "logprobs": None, "finish_reason": "length"}
    told = {"prompt_logprobs": list(prompt)} if prompt else {}
    usage = {"prompt_tokens": 2, "completion_tokens": 1}
    return json.dumps({"choices": [choice | told], "usage": usage}).encode()


def test_a_prompts_log_probabilities_are_the_oracles_position_by_position() -> None:
    want = [text.text_of(SCORED, [65], "length")]
    flat = {"logprob": oracle.scored((1, 2), 2)[1][2]}
    good = [None, {"2": flat, "3": flat}]
    assert not list(text.wrong(SCORED, text.read(SCORED, scored_reply(*good)), want))
    for other in (
        [None, {"2": flat}],
        [*good, {"2": flat}],
        [{"1": flat}, good[1]],
        [None, {"2": flat, "3": {"logprob": 0.0}}],
        [],
    ):
        assert list(text.wrong(SCORED, text.read(SCORED, scored_reply(*other)), want)), other
    assert list(text.wrong(ASKED, text.read(ASKED, scored_reply(*good)), want))


def test_an_embedding_over_http_is_the_oracles_at_length_1() -> None:
    asked = Request(0, 0.0, (1, 2), Sampling(max_tokens=1, pooling="mean"), over_http="whole")
    vector = np.frombuffer(oracle.pooled((1, 2), "mean"), "<f4")
    unit = (vector / np.linalg.norm(vector)).tolist()

    def said(*vectors: object, tokens: int = 2) -> list[str]:
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        body = {"data": [{"embedding": one} for one in vectors], "usage": usage}
        return list(text.vector_wrong(asked, json.dumps(body).encode(), ""))

    assert not said(unit)
    for wrong in (said(vector.tolist()), said(unit, unit), said(unit[:-1]), said(unit, tokens=3)):
        assert wrong
