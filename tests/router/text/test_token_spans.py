"""Tokens are attributed to the part of a text that they wrote, however tokenizer and readers cut it."""

from __future__ import annotations

import pytest

from baton.protos.nouns import TokenLogprob, TokenLogprobs
from baton.router.text.token_spans import TokenSpans

WORDS = [b"<think>", b"the", b" fox", b"</think>", b"\n", b"the", b" ", b"\xe6\x97", b"\xa5", b"!", b""]


def entry(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(TokenLogprob(token_id, -1.0, 1), ())


def ids(entries: list[TokenLogprobs]) -> list[int]:
    return [one.chosen.token_id for one in entries]


@pytest.mark.parametrize("pieces", [[range(11)], [range(4), range(4, 11)], [[i] for i in range(11)]])
def test_each_part_has_the_tokens_that_wrote_it(pieces) -> None:
    spans, held = TokenSpans(lambda i: WORDS[i], ["<think>", "</think>"]), b""
    for piece in pieces:
        held += b"".join(WORDS[i] for i in piece)
        text = held.decode(errors="ignore")
        held = held[len(text.encode()) :]
        spans.add(text, map(entry, piece))
    found = [ids(spans.take(part)) for part in ("the fox", "the", " 日", "!")]
    assert found == [[1, 2], [5], [6, 7, 8], [9]]


def test_a_first_space_that_the_text_leaves_out_shifts_nothing() -> None:
    words = [b" a", b"</think>", b"b", b"c"]
    spans = TokenSpans(lambda i: words[i], ["</think>"])
    spans.add("a</think>bc", map(entry, range(4)))
    assert [ids(spans.take(part)) for part in ("a", "b", "c")] == [[0], [2], [3]]


def test_all_tokens_of_an_undivided_text_are_its_own_but_those_that_write_nothing() -> None:
    words = [b"x", b"\xff", b"y", b""]
    spans = TokenSpans(lambda i: words[i], undivided=True)
    spans.add("x\ufffdy", map(entry, range(4)))
    assert ids(spans.take("x\ufffdy")) == [0, 1, 2]


def test_a_part_that_a_reader_made_up_has_no_tokens() -> None:
    spans = TokenSpans(lambda i: b"x")
    spans.add("x", [entry(0)])
    assert spans.take("made up") == []
    assert ids(spans.take("x")) == [0]
