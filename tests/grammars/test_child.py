"""Positions of sequences in a grammar, whatever way their tokens come."""

from __future__ import annotations

import itertools

import pytest
from llguidance import LLTokenizer, TokenizerWrapper

from baton.grammars import child
from baton.grammars.messages import Advance, Compile, CompileResult, NextMask, Preview, PreviewMask
from baton.protos.grammar import byte_tokenizer

PAIRS = [b"ab", b"cd", b"ef"]
AB, CD, EF, END = 256, 257, 258, 259


class Pairs:
    """A tokenizer of bytes and ``PAIRS``."""

    tokens = (*(bytes([one]) for one in range(256)), *PAIRS, b"</s>")
    special_token_ids: tuple[int, ...] = ()
    eos_token_id, bos_token_id = END, None

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def following(kind: str, spec: str, tokenizer: LLTokenizer) -> child.SequenceMatchers:
    matchers = child.SequenceMatchers(tokenizer)
    (compiled,) = matchers.take(Compile(kind, spec))
    assert isinstance(compiled, CompileResult)
    assert not compiled.error
    return matchers


def after(matchers: child.SequenceMatchers, seq: int, *runs: tuple[int, ...]) -> NextMask:
    """Returns the answer after ``runs`` of tokens."""
    for ids in runs:
        (found,) = matchers.take(Advance(seq, ids))
    assert isinstance(found, NextMask)
    return found


@pytest.mark.parametrize("ids", [(ord("x"), AB, CD), (ord("x"), AB, CD, EF)])
def test_tokens_that_come_at_once_lead_where_they_lead_one_by_one(ids: tuple[int, ...]) -> None:
    tokenizer = LLTokenizer(TokenizerWrapper(Pairs()), n_vocab=END + 1, slices=[])
    spec = "start: body\nbody[max_tokens=3]: /x(abcdefgh)|y(ijklmnop)/"
    matchers = following("grammar", spec, tokenizer)
    apart, at_once = after(matchers, 1, (), *((one,) for one in ids)), after(matchers, 2, (), ids)
    assert not apart.error
    assert (at_once.error, at_once.stopped, at_once.mask) == (apart.error, apart.stopped, apart.mask)


def test_an_end_token_after_a_complete_answer_leaves_it_complete() -> None:
    tokenizer = LLTokenizer(TokenizerWrapper(Pairs()), n_vocab=END + 1, slices=[])
    found = after(following("regex", "abcd", tokenizer), 1, (AB, CD, END))
    assert (found.stopped, found.error) == (True, "")


def test_a_preview_that_takes_long_ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    matchers = following("regex", "[ab]{9}", byte_tokenizer(300))
    after(matchers, 1, ())
    clock = itertools.count()
    monkeypatch.setattr(child.time, "process_time", lambda: 0.0015 * next(clock))
    found = [one.mask for one in matchers.take(Preview(1, 7, tuple(b"ababab"))) if isinstance(one, PreviewMask)]
    assert [bool(mask) for mask in found] == [True, True, False]
