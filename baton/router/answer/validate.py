"""Validation of sampling fields: what a client asks for becomes the ``Sampling`` that engines obey, or an
InvalidRequest.

Knows nothing of REST or gRPC: both hand in the fields they were given, by name. Errors name the field and the
remedy. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from baton.protos.errors import ContextTooLong, InvalidRequest
from baton.protos.json import JsonValue
from baton.protos.nouns import MAX_LOGPROBS, POOLINGS, Sampling
from baton.router.text.catalog import ModelEntry
from baton.router.text.room import LEAST_TOKENIZED, LIMIT, PromptRoom

COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions
CHARS_OF_CONTEXT = 8  # characters per token of the context that one call may have tokenized
MAX_BIASES = 1024  # entries of logit_bias
MAX_STOP_TOKENS = 128  # entries of stop_token_ids
MAX_LOGPROB_TOKENS = 64  # tokens whose likelihoods a request may name
MAX_STOP_CHARS = 1024  # characters of a stop string
MAX_ALLOWED_TOKENS = 4096  # entries of allowed_token_ids
MAX_BAD_WORDS = 128  # entries of bad_words
MAX_BAD_WORD_CHARS = 256  # characters of a bad word
PENALTY = (-2.0, 2.0)  # the range of OpenAI's API
RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": PENALTY,
    "frequency_penalty": PENALTY,
    "repetition_penalty": (0.01, 100.0),
    "top_k": (-1, 2**31 - 1),
    "min_tokens": (0, 2**31 - 1),
    "seed": (-(2**63), 2**64 - 1),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "max_drafts": (0, 2**31 - 1),
}
ABOVE_ZERO = frozenset({"top_p"})


SamplingFields = Mapping[str, JsonValue]  # by the names of ``Sampling``, as they came from JSON or protobuf


class Limits(msgspec.Struct, frozen=True):
    """Limits what one request may ask for, and what the router holds: bytes, counts, seconds."""

    max_body_bytes: int = 8 << 20
    max_stored_bytes: int = 256 << 20  # of a tenant's files for batches
    max_n: int = 16  # choices per prompt
    max_stop: int = 16  # stop strings
    max_prompts: int = 2048  # choices of one call: prompts x n
    max_inflight_bytes: int = 1 << 30  # bodies of all calls being read or answered
    request_timeout_s: float = 600.0


def resolve_sampling(
    sampling: SamplingFields,
    entry: ModelEntry,
    prompt_tokens: int,
    default_max_tokens: int | None,
    seed: int,
    names: Mapping[str, str] | None = None,
) -> Sampling:
    """Returns the Sampling of one prompt: the client's ``sampling`` over the model's defaults over OpenAI's.

    ``seed`` is taken if the client gave none. ``default_max_tokens`` None: as many as the context holds. Call
    ``check_sampling`` and ``check_prompt`` first. Raises ContextTooLong if prompt and max_tokens exceed the
    context.
    """
    fields = dict(entry.defaults) | dict(sampling)
    param = (names or {}).get("max_tokens", "max_tokens")
    fields["max_tokens"] = _max_tokens(sampling.get("max_tokens"), entry, prompt_tokens, default_max_tokens, param)
    fields["seed"] = int(fields.get("seed", seed)) % 2**64
    fields["top_k"] = 0 if fields.get("top_k", 0) < 0 else min(fields.get("top_k", 0), entry.vocab_size)
    fields["stop_token_ids"] = tuple(fields.get("stop_token_ids", ()))
    fields["bad_words"] = tuple(fields.get("bad_words", ()))
    fields["allowed_token_ids"] = tuple(fields.get("allowed_token_ids", ()))
    fields["logprob_token_ids"] = tuple(fields.get("logprob_token_ids", ()))
    fields["min_tokens"] = min(fields.get("min_tokens", 0), fields["max_tokens"])
    return Sampling(**fields)


def check_sampling(sampling: SamplingFields, entry: ModelEntry, names: Mapping[str, str] | None = None) -> None:
    """Checks every sampling field; ``names`` maps field names to those shown in errors. Raises InvalidRequest."""
    shown = dict(names or {})
    for field, (low, high) in RANGES.items():
        if field in sampling:
            _check_range(shown.get(field, field), sampling[field], low, high, above=field in ABOVE_ZERO)
    if sampling.get("max_tokens", 1) < 1:
        name = shown.get("max_tokens", "max_tokens")
        raise InvalidRequest(f"{name} is {sampling['max_tokens']}: it must be at least 1", name)
    if sampling.get("min_tokens", 0) > sampling.get("max_tokens", math.inf):
        raise InvalidRequest(
            f"min_tokens {sampling['min_tokens']} is over max_tokens {sampling['max_tokens']}: lower it",
            "min_tokens",
        )
    _check_biases(sampling.get("logit_bias", {}), entry.vocab_size)
    check_count("stop_token_ids", len(sampling.get("stop_token_ids", ())), MAX_STOP_TOKENS)
    check_ids(sampling.get("stop_token_ids", ()), entry.vocab_size, "stop_token_ids")
    check_count("logprob_token_ids", len(sampling.get("logprob_token_ids", ())), MAX_LOGPROB_TOKENS)
    check_ids(sampling.get("logprob_token_ids", ()), entry.vocab_size, "logprob_token_ids")
    if sampling.get("pooling", "") not in ("", *POOLINGS):
        raise InvalidRequest(f"pooling is {sampling['pooling']!r}: give {' or '.join(POOLINGS)}", "pooling")
    _check_purpose(sampling.get("pooling", ""), entry)
    _check_allowed(sampling, entry, shown)
    for word in sampling.get("bad_words", ()):  # from gRPC, where they come as ids
        check_count("bad_words", len(sampling["bad_words"]), 2 * MAX_BAD_WORDS)
        check_count("bad_words", len(word), MAX_BAD_WORD_CHARS)
        check_ids(word or (-1,), entry.vocab_size, "bad_words")


def _check_purpose(pooling: str, entry: ModelEntry) -> None:
    """Raises InvalidRequest where the model makes something else than what is asked for."""
    if entry.encoder is None:
        if pooling in ("cls", "score"):
            raise InvalidRequest(f"pooling {pooling} is of encoders, and {entry.name!r} is none", "pooling")
    elif entry.encoder.scores and pooling != "score":
        text = f"{entry.name!r} is a cross-encoder, which scores pairs of texts: use /v1/rerank or /v1/score"
        raise InvalidRequest(text, "model")
    elif not pooling:
        raise InvalidRequest(f"{entry.name!r} is an encoder, which writes no text: use /v1/embeddings", "model")
    elif pooling == "score" and not entry.encoder.scores:
        raise InvalidRequest(f"{entry.name!r} is no reranker: it has no head that scores pairs", "model")


def check_prompt(ids: Sequence[int], entry: ModelEntry, param: str = "prompt") -> None:
    """Checks that a prompt is not empty, that every id is in the vocabulary and that one more token fits.

    Raises InvalidRequest or ContextTooLong, naming ``param``.
    """
    if not ids:
        raise InvalidRequest(f"{param} is empty: give at least one token", param)
    PromptRoom(entry.max_model_len, param).check(len(ids))
    check_ids(ids, entry.vocab_size, param)


def check_ids(ids: Iterable[int], vocab_size: int, param: str) -> None:
    """Checks that every token id is from 0 to ``vocab_size`` - 1.

    Raises InvalidRequest naming the first that isn't.
    """
    ids = tuple(ids)
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        bad = next(i for i in ids if not 0 <= i < vocab_size)
        raise InvalidRequest(f"{param} has token id {bad}: this model's ids are 0 to {vocab_size - 1}", param)


def check_n(n: int, limits: Limits) -> None:
    """Checks the number of choices per prompt. Raises InvalidRequest."""
    if not 1 <= n <= limits.max_n:
        raise InvalidRequest(f"n is {n}: it must be from 1 to {limits.max_n}", "n")


def check_stops(stops: Sequence[str], limits: Limits, param: str = "stop") -> None:
    """Checks stop strings: at most ``limits.max_stop``, of 1 to MAX_STOP_CHARS characters.

    Raises InvalidRequest naming ``param``.
    """
    check_count(param, len(stops), limits.max_stop)
    if not all(0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise InvalidRequest(f"{param}: each string must have 1 to {MAX_STOP_CHARS} characters", param)


def check_tokenized(size: int, max_model_len: int, param: str) -> None:
    """Checks the size in characters of a text that is only tokenized: LEAST_TOKENIZED at most, or CHARS_OF_CONTEXT
    per token of the context where that is more. Raises InvalidRequest naming ``param``.
    """
    most = max(LEAST_TOKENIZED, CHARS_OF_CONTEXT * max_model_len)
    if size > most:
        raise InvalidRequest(f"the text has {size} characters: at most {most} are tokenized in one call", param)


def check_words(words: Sequence[str]) -> None:
    """Checks bad words: at most MAX_BAD_WORDS, not blank, of MAX_BAD_WORD_CHARS characters at most.

    Raises InvalidRequest.
    """
    check_count("bad_words", len(words), MAX_BAD_WORDS)
    if not all(len(word.strip()) > 0 and len(word) <= MAX_BAD_WORD_CHARS for word in words):
        text = f"bad_words: each must have 1 to {MAX_BAD_WORD_CHARS} characters that aren't all spaces"
        raise InvalidRequest(text, "bad_words")


def _check_allowed(sampling: SamplingFields, entry: ModelEntry, names: Mapping[str, str]) -> None:
    allowed = sampling.get("allowed_token_ids")
    if allowed is None:
        return
    if not allowed:
        raise InvalidRequest("allowed_token_ids is empty: leave it out, or give at least one", "allowed_token_ids")
    check_count("allowed_token_ids", len(allowed), MAX_ALLOWED_TOKENS)
    check_ids(allowed, entry.vocab_size, "allowed_token_ids")
    if "grammar" in sampling:
        name = names.get("grammar", "grammar")
        raise InvalidRequest(f"allowed_token_ids can't go with {name}: give one of them", "allowed_token_ids")


def _max_tokens(asked: int | None, entry: ModelEntry, prompt_tokens: int, default: int | None, param: str) -> int:
    room = entry.max_model_len - prompt_tokens
    if asked is None:
        return room if default is None else min(default, room)
    if asked > room:
        raise ContextTooLong(
            f"the prompt has {prompt_tokens} tokens and {param} is {asked}. {LIMIT.format(entry.max_model_len)}: "
            f"ask for at most {room}",
            param,
        )
    return asked


def _check_range(name: str, value: float, low: float, high: float, above: bool) -> None:
    if not low <= value <= high or (above and value == low):  # no range holds NaN
        floor = f"over {low:g}" if above else f"from {low:g}"
        raise InvalidRequest(f"{name} is {value}: it must be {floor} to {high:g}", name)


def _check_biases(biases: Mapping[int, float], vocab_size: int) -> None:
    check_count("logit_bias", len(biases), MAX_BIASES)
    check_ids(biases, vocab_size, "logit_bias")
    for token_id, bias in biases.items():
        _check_range(f"logit_bias[{token_id}]", bias, -100.0, 100.0, above=False)


def check_count(name: str, count: int, most: int) -> None:
    """Raises InvalidRequest if ``count``, the length of list ``name``, is over ``most``."""
    if count > most:
        raise InvalidRequest(f"{name} has {count} entries: at most {most} are allowed", name)
