"""Compilation of a ``Grammar`` by llguidance (https://github.com/guidance-ai/llguidance).

Knows nothing of requests, sequences or logits. Only a grammar process calls this with a client's text
(``baton/grammars``): the limits here bound some of the library's work, the kernel's limits there bound the rest.
"""

from __future__ import annotations

import re

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from
from llguidance.gbnf_to_lark import gbnf_to_lark

from baton.protos.errors import InvalidRequest
from baton.protos.nouns import GRAMMAR_KINDS, JSON_OPTIONS, Grammar

BYTES = 256  # tokens of a byte tokenizer
_GBNF = re.compile(r"(?m)^[ \t]*+root[ \t]*+::=")  # nothing that repeats can cross a line: linear
_QUOTED = re.compile(r"(?m)^(?: *[0-9]++ \| .*+| *+\^)$")  # a quoted line under its number, or a mark below it
_SHOWN = 200  # characters of a message's beginning, and of its end
_LIMITS = LLParserLimits(max_lexer_states=20_000, max_grammar_size=200_000, verbose_errors=False)


def compiled(grammar: Grammar, tokenizer: LLTokenizer) -> LLMatcher:
    """Returns a matcher at the grammar's beginning, its first token mask computed (where most costs show).

    Raises InvalidRequest, with the library's message, for a grammar that is malformed, unsatisfiable or too
    complex.
    """
    matcher = LLMatcher(tokenizer, _definition(grammar), log_level=0, limits=_LIMITS)
    require_sound(matcher)
    matcher.compute_bitmask()
    require_sound(matcher)
    return matcher


def require_sound(matcher: LLMatcher) -> None:
    """Raises InvalidRequest if the matcher is in its error state."""
    if matcher.is_error():
        raise InvalidRequest(f"the grammar can't be followed: {_reason(matcher.get_error())}", "grammar")


def byte_tokenizer(vocab_size: int = BYTES) -> LLTokenizer:
    """Returns a tokenizer for a model without one: an id below 256 is that byte, others never match.

    Its end token is ``vocab_size``, an id that no model emits. Raises InvalidRequest below 256 ids.
    """
    if vocab_size < BYTES:
        text = f"this model has no tokenizer and only {vocab_size} tokens: it can't follow a grammar"
        raise InvalidRequest(text, "grammar")
    return LLTokenizer(TokenizerWrapper(_Bytes(vocab_size)), n_vocab=vocab_size + 1, slices=[])


def _reason(error: str) -> str:
    """Returns the library's message without the grammar's lines that it quotes, and without the middle of a long
    one: a pattern of the client's may be in it.
    """
    text = " ".join(_QUOTED.sub("\n", error.split("\n<state>")[0]).split())
    return text if len(text) <= 2 * _SHOWN else f"{text[:_SHOWN]} … {text[-_SHOWN:]}"


def _definition(grammar: Grammar) -> str:
    """Returns the grammar in the library's own form. Raises InvalidRequest for an unknown kind."""
    if grammar.kind not in GRAMMAR_KINDS:
        raise InvalidRequest(f"grammar kind {grammar.kind!r}: use {', '.join(GRAMMAR_KINDS)}", "grammar")
    try:
        if grammar.kind == "json_schema":
            return LLMatcher.grammar_from_json_schema(grammar.spec, defaults=JSON_OPTIONS)  # type: ignore[arg-type]
        if grammar.kind == "grammar":
            return LLMatcher.grammar_from_lark(_lark(grammar.spec))
        return grammar_from(grammar.kind, grammar.spec)  # type: ignore[arg-type]
    except Exception as error:  # the converters raise whatever their parsers do
        raise InvalidRequest(f"the grammar can't be read: {_reason(str(error))}", "grammar") from None


def _lark(text: str) -> str:
    """GBNF begins with a rule named root, Lark with one named start."""
    return gbnf_to_lark(text) if _GBNF.search(text) else text


class _Bytes:
    """Implements what llguidance asks of a tokenizer."""

    bos_token_id = None

    def __init__(self, vocab_size: int) -> None:
        self.eos_token_id = vocab_size
        self.special_token_ids = list(range(BYTES, vocab_size + 1))
        self.tokens = [bytes([i]) for i in range(BYTES)] + [b"<%d>" % i for i in self.special_token_ids]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())
