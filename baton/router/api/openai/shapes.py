"""Conversion of an answer's pieces to the JSON objects of OpenAI's completions and chat endpoints, streamed and
whole.

Knows nothing of HTTP or of where the pieces come from. https://platform.openai.com/docs/api-reference
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from baton.protos.json import Json
from baton.protos.nouns import TokenLogprob, TokenLogprobs
from baton.router.answer.generation import Generation
from baton.router.answer.stream import TextDelta, Usage
from baton.router.text.chat_reader import AnswerFormat, ChatReader
from baton.router.text.offsets import TextOffsets, prompt_offsets
from baton.router.text.tokenizer import Tokenizer, token_name

LOWEST_LOGPROB = -9999.0  # OpenAI's stand-in for what JSON can't say: -inf


class Shape(Protocol):
    """Words an answer as one endpoint does.

    ``always_closes``: its streams end with ``closing`` even if the client didn't ask for usage. ``recounts``: its
    ``whole`` and ``closing`` tokenize what was written, which takes long for a long answer.
    """

    always_closes: bool
    recounts: bool

    def opening(self) -> Iterator[Json]:
        """Yields the chunks that come before any text."""

    def chunks(self, piece: TextDelta) -> Iterator[Json]:
        """Yields the chunks for ``piece``; none if it has nothing that the client sees."""

    def whole(self, pieces: list[TextDelta], usage: Usage) -> Json:
        """Returns the unstreamed response; ``pieces[i]`` is all of choice i."""

    def closing(self, usage: Usage) -> Json:
        """Returns the last chunk, with the usage and without choices."""


class _Frame:
    """The envelope that every object of one answer shares."""

    def __init__(self, generation: Generation, kind: str, prefix: str, created: int, with_usage: bool) -> None:
        self.envelope: Json = {
            "id": f"{prefix}-{generation.request_id}",
            "object": kind,
            "created": created,
            "model": generation.entry.name,
        }
        self._null_usage: Json = {"usage": None} if with_usage else {}

    def chunk(self, choice: Json) -> Json:
        return {**self.envelope, "choices": [choice], **self._null_usage}

    def whole(self, kind: str, choices: list[Json], usage: Usage) -> Json:
        return {**self.envelope, "object": kind, "choices": choices, "usage": usage_json(usage)}

    def closing(self, usage: Usage) -> Json:
        return {**self.envelope, "choices": [], "usage": usage_json(usage)}


class CompletionShape:
    """Words an answer as ``/v1/completions`` does.

    ``created`` is Unix seconds. ``echoes[i]`` is put before the answers to prompt i.
    """

    always_closes = False
    recounts = False

    def __init__(
        self,
        generation: Generation,
        tokenizer: Tokenizer,
        created: int,
        include_usage: bool = False,
        return_ids: bool = False,
        echoes: list[str] | None = None,
        wants_prompt: bool = False,
    ) -> None:
        self._frame = _Frame(generation, "text_completion", "cmpl", created, include_usage)
        self._generation = generation
        self._tokenizer = tokenizer
        self._return_ids = return_ids
        self._echoes = echoes or [""] * len(generation.prompts)
        self._echoed = echoes is not None
        self._offsets = [TextOffsets(len(echo)) for echo in self._echoes for _ in range(generation.options.n)]
        self._begun: set[int] = set()
        self._wants_logprobs = "logprobs" in generation.options.sampling
        self._wants_prompt = wants_prompt

    def opening(self) -> Iterator[Json]:
        """Yields no chunk, because a completion's stream has nothing before its text."""
        return iter(())

    def chunks(self, piece: TextDelta) -> Iterator[Json]:
        """Yields at most one chunk; the last one has the finish_reason."""
        choice = self._choice(piece)
        if choice["text"] or choice["logprobs"] or piece.finish_reason or self._return_ids:
            yield self._frame.chunk(choice)

    def whole(self, pieces: list[TextDelta], usage: Usage) -> Json:
        """Returns the unstreamed response, with all choices by index."""
        return self._frame.whole("text_completion", [self._choice(piece) for piece in pieces], usage)

    def closing(self, usage: Usage) -> Json:
        """Returns the chunk that holds the usage alone."""
        return self._frame.closing(usage)

    def _choice(self, piece: TextDelta) -> Json:
        prompt = piece.index // self._generation.options.n
        first = piece.index not in self._begun
        self._begun.add(piece.index)
        text = self._echoes[prompt] + piece.text if first else piece.text
        choice: Json = {
            "index": piece.index,
            "text": text,
            "logprobs": self._logprobs(piece),
            "finish_reason": piece.finish_reason or None,
        }
        if piece.prompt_logprobs is not None and self._wants_prompt:
            choice["prompt_logprobs"] = prompt_json(piece.prompt_logprobs, self._tokenizer)
        if self._return_ids:
            choice["token_ids"] = piece.token_ids
            choice["prompt_token_ids"] = self._generation.prompts[prompt] if first else None
        return choice

    def _logprobs(self, piece: TextDelta) -> Json | None:
        of_prompt = self._echoed and self._wants_logprobs and piece.prompt_logprobs is not None
        if not piece.logprobs and not of_prompt:
            return None
        names = [self._name(entry.chosen) for entry in piece.logprobs]
        found: Json = {
            "tokens": names,
            "token_logprobs": [finite(entry.chosen.logprob) for entry in piece.logprobs],
            "top_logprobs": [self._alternatives(entry) for entry in piece.logprobs],
            "text_offset": self._text_offsets(piece) if names else [],
        }
        if self._echoed and piece.prompt_logprobs is not None and self._wants_logprobs:
            prompt = self._of_prompt(piece.index, piece.prompt_logprobs)
            return {name: prompt[name] + found[name] for name in found}
        return found if names else None

    def _of_prompt(self, index: int, scores: tuple[TokenLogprobs, ...]) -> Json:
        """Returns the prompt's log-probabilities, as ``_logprobs`` does the answer's; the first token has none."""
        prompt = index // self._generation.options.n
        ids = self._generation.prompts[prompt]
        top = self._generation.options.sampling.get("logprobs", 0)
        return {
            "tokens": [token_name(self._tokenizer.token_bytes(i)) for i in ids],
            "token_logprobs": [None, *(finite(entry.chosen.logprob) for entry in scores)],
            "top_logprobs": [None, *(self._alternatives(_first(entry, top)) for entry in scores)],
            "text_offset": prompt_offsets(self._tokenizer, ids, self._echoes[prompt]),
        }

    def _alternatives(self, entry: TokenLogprobs) -> dict[str, float]:
        """The likeliest, and the chosen one where it isn't among them; the likelier of two equal names stays."""
        found: dict[str, float] = {}
        for one in sorted({*entry.top, entry.chosen}, key=lambda one: one.rank):
            found.setdefault(self._name(one), finite(one.logprob))
        return found

    def _text_offsets(self, piece: TextDelta) -> list[int]:
        skip = self._generation.options.skip_special
        return self._offsets[piece.index].of([self._tokenizer.token_bytes(i, skip) for i in piece.token_ids])

    def _name(self, one: TokenLogprob) -> str:
        return token_name(self._tokenizer.token_bytes(one.token_id))


class ChatShape:
    """Words an answer as ``/v1/chat/completions`` does: streams have a role chunk first, and a separate chunk for
    each finish_reason.

    ``created`` is Unix seconds; ``form`` says how tool calls and reasoning are parsed.
    """

    always_closes = False
    recounts = False

    def __init__(
        self,
        generation: Generation,
        tokenizer: Tokenizer,
        created: int,
        include_usage: bool = False,
        return_ids: bool = False,
        form: AnswerFormat = AnswerFormat(),
    ) -> None:
        self._form = form
        self._readers: dict[int, ChatReader] = {}
        self._frame = _Frame(generation, "chat.completion.chunk", "chatcmpl", created, include_usage)
        self._generation = generation
        self._tokenizer = tokenizer
        self._return_ids = return_ids

    def opening(self) -> Iterator[Json]:
        """Yields one chunk per choice that gives its role."""
        for index in range(self._generation.options.n):
            delta = {"role": "assistant", "content": ""}
            chunk = self._frame.chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})
            yield self._with_prompt_ids(chunk) if index == 0 else chunk

    def chunks(self, piece: TextDelta) -> Iterator[Json]:
        """Yields the chunks of content, reasoning and tool calls in ``piece``, then that of its finish_reason."""
        reader = self._readers.setdefault(piece.index, self._form.reader())
        deltas = reader.push(piece.text) + (reader.flush() if piece.finish_reason else [])
        rest = self._rest(piece, None)
        if not deltas and (piece.logprobs or (self._return_ids and piece.token_ids)):
            deltas = [{"content": ""}]
        for delta in deltas:
            yield self._frame.chunk({"index": piece.index, "delta": delta} | rest)
            rest = {"logprobs": None, "finish_reason": None}
        if piece.finish_reason:
            reason = reader.finish_reason(piece.finish_reason, piece.stop_string)
            yield self._frame.chunk({"index": piece.index, "delta": {}, "logprobs": None, "finish_reason": reason})

    def whole(self, pieces: list[TextDelta], usage: Usage) -> Json:
        """Returns the unstreamed response, with all choices by index."""
        scores = pieces[0].prompt_logprobs
        scored = {} if scores is None else {"prompt_logprobs": prompt_json(scores, self._tokenizer)}
        choices = [self._choice(piece) for piece in pieces]
        return self._with_prompt_ids(self._frame.whole("chat.completion", choices, usage)) | scored

    def closing(self, usage: Usage) -> Json:
        """Returns the chunk that holds the usage alone."""
        return self._frame.closing(usage)

    def _choice(self, piece: TextDelta) -> Json:
        reader = self._form.reader()
        message = reader.message(piece.text)
        reason = reader.finish_reason(piece.finish_reason, piece.stop_string)
        return {"index": piece.index, "message": message} | self._rest(piece, reason)

    def _rest(self, piece: TextDelta, finish_reason: str | None) -> Json:
        shows = self._generation.options.skip_special
        entries = [logprob_json(entry, self._tokenizer, shows) for entry in piece.logprobs]
        rest: Json = {
            "logprobs": {"content": entries, "refusal": None} if entries else None,
            "finish_reason": finish_reason,
        }
        return rest | ({"token_ids": piece.token_ids} if self._return_ids else {})

    def _with_prompt_ids(self, json: Json) -> Json:
        return json | {"prompt_token_ids": self._generation.prompts[0]} if self._return_ids else json


def logprob_json(entry: TokenLogprobs, tokenizer: Tokenizer, skip_special: bool) -> Json:
    """Returns a token's logprob and its alternatives as OpenAI's chat and responses endpoints write them.

    With ``skip_special``, special tokens have empty ``bytes``, so that all tokens' bytes join to the text.
    """

    def one(token: TokenLogprob) -> Json:
        shown = tokenizer.token_bytes(token.token_id, skip_special)
        name = token_name(tokenizer.token_bytes(token.token_id))
        return {"token": name, "logprob": finite(token.logprob), "bytes": list(shown)}

    return one(entry.chosen) | {"top_logprobs": [one(token) for token in entry.top]}


def prompt_json(scores: tuple[TokenLogprobs, ...], tokenizer: Tokenizer) -> list[Json | None]:
    """Returns vLLM's ``prompt_logprobs``: per position a map of token id to logprob, rank and text; None for the
    first token.
    """

    def entry(one: TokenLogprob) -> Json:
        name = token_name(tokenizer.token_bytes(one.token_id))
        return {"logprob": finite(one.logprob), "rank": one.rank, "decoded_token": name}

    return [None, *({str(o.token_id): entry(o) for o in (*s.top, s.chosen)} for s in scores)]


def _first(entry: TokenLogprobs, top: int) -> TokenLogprobs:
    return TokenLogprobs(entry.chosen, entry.top[:top])


def usage_json(usage: Usage) -> Json:
    """Returns OpenAI's usage object; counts of accepted and rejected drafts are included if there were any."""
    told: Json = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    if usage.accepted_drafts or usage.rejected_drafts:
        told["completion_tokens_details"] = {
            "accepted_prediction_tokens": usage.accepted_drafts,
            "rejected_prediction_tokens": usage.rejected_drafts,
        }
    return told


def collected(pieces: list[list[TextDelta]]) -> list[TextDelta]:
    """Joins each choice's pieces; ``pieces[i]`` are those of choice i, of which one or more are required."""
    return [
        TextDelta(
            index=index,
            text="".join(piece.text for piece in parts),
            token_ids=tuple(i for piece in parts for i in piece.token_ids),
            logprobs=tuple(p for piece in parts for p in piece.logprobs),
            finish_reason=parts[-1].finish_reason,
            prompt_logprobs=parts[0].prompt_logprobs,
            stop_string=parts[-1].stop_string,
        )
        for index, parts in enumerate(pieces)
    ]


def finite(logprob: float) -> float:
    """Returns ``logprob``, at least LOWEST_LOGPROB, because JSON can't hold -inf."""
    return max(logprob, LOWEST_LOGPROB)
