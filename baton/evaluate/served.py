"""A subject that is any server with OpenAI's completions API. Torch-free.

Knows nothing of what stands behind it. Prompts are sent as token ids. A prompt's likelihoods come as
``prompt_logprobs`` (vLLM's form, with ids) if the server supports that, else by ``echo`` with ``logprobs``, which
names tokens by text.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

from tokenizers import Tokenizer

from baton.evaluate.subject import TOP, Continuation, Ids, TokenKey, TokenScore, text_before
from baton.protos.errors import BatonError, ConfigError, Forbidden, InvalidRequest, Unauthenticated, Unavailable
from baton.protos.json import Json

TIMEOUT_S = 600.0  # of one call: a long prompt on a small machine takes minutes
AT_ONCE = 8  # calls in flight
# Statuses that pass: a rate or a queue that is full, a worker that is being replaced. An evaluation may take hours,
# and one such answer would lose all of it.
PASSING = (429, 503)
TRIES = 6  # of such a call
LEAST_PAUSE_S, MOST_PAUSE_S = 0.5, 60.0
CONTEXT = 2048  # of a server that doesn't say how long its model's is
WRITTEN = 1  # tokens of a context that a text leaves free, because servers write one even to texts that they score
MOST_STOPS = 4  # stop strings that a request may have
FEW = 5  # alternatives that even OpenAI's own servers give
_REFUSALS = {401: Unauthenticated, 403: Forbidden}


class ServerSubject:
    """Implements ``Subject`` by calls to the server at ``url``.

    ``model`` is the name in requests, "" for the first that the server lists; ``key`` is a bearer token. Without a
    ``tokenizer`` the server's ``/tokenize`` is used. Calls raise a BatonError if the server refuses or is
    unreachable.
    """

    def __init__(self, url: str, model: str = "", key: str = "", tokenizer: Tokenizer | None = None) -> None:
        self.name = url
        self._url, self._key, self._tokenizer = url.rstrip("/").removesuffix("/v1"), key, tokenizer
        listed = self._call("GET", "/v1/models").get("data") or [{}]
        found = next((one for one in listed if one.get("id") == model), listed[0])
        self._model = model or str(found.get("id", ""))
        self.context = int(found.get("max_model_len") or CONTEXT) - WRITTEN

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of ``text`` as a prompt, by the given tokenizer or the server's ``/tokenize``.

        Raises ConfigError if there is neither.
        """
        if self._tokenizer is not None:
            found: list[int] = self._tokenizer.encode(text, add_special_tokens=True).ids
            return found
        try:
            told = self._call("POST", "/tokenize", {"model": self._model, "prompt": text, "content": text})
            return [int(token) for token in told["tokens"]]
        except (InvalidRequest, KeyError, TypeError, ValueError):
            text = f"{self.name} has no /tokenize: pass --tokenizer, the folder of the model that it serves"
            raise ConfigError(text, "tokenizer") from None

    def token_text(self, token: int) -> str:
        """Returns the text of one token id."""
        if self._tokenizer is not None:
            found: str = self._tokenizer.decode([token], skip_special_tokens=False)
            return found
        return str(self._call("POST", "/detokenize", {"model": self._model, "tokens": [token]}).get("prompt"))

    def scores(self, prompts: Sequence[Ids], top: int = 0) -> Iterator[list[TokenScore]]:
        """Yields, for each prompt, the log-likelihoods of its tokens from the second on, with ``top`` alternatives
        each.
        """
        with ThreadPoolExecutor(AT_ONCE) as pool:
            yield from pool.map(lambda prompt: self._scores(prompt, top), prompts)

    def answers(
        self, prompts: Sequence[Ids], tokens: int, stop: Sequence[str] = (), to_the_end: bool = False
    ) -> list[Continuation]:
        """Returns a greedy continuation of each prompt, of at most ``tokens`` tokens.

        Its text ends before the first of the ``stop`` strings; ``to_the_end`` ignores end tokens. Only the first
        MOST_STOPS strings are sent, as OpenAI's servers take no more: after the others an answer may go on unseen.
        """
        asked: Json = {"max_tokens": tokens, "temperature": 0, "logprobs": 1, "return_token_ids": True}
        asked |= {"repetition_penalty": 1.0}  # a checkpoint's generation_config.json may name another
        asked |= {"stop": list(stop)[:MOST_STOPS]} if stop else {}
        asked |= {"ignore_eos": True} if to_the_end else {}
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return [_answer(choice, stop) for choice in pool.map(lambda p: self._complete(p, asked), prompts)]

    def _scores(self, prompt: Ids, top: int) -> list[TokenScore]:
        if self._says_ids:
            choice = self._complete(prompt, {"max_tokens": WRITTEN, "temperature": 0, "prompt_logprobs": top})
            return [
                _of_ids(entry, token)
                for entry, token in zip(choice["prompt_logprobs"][1:], prompt[1:], strict=True)
            ]
        asked = {"max_tokens": WRITTEN, "temperature": 0, "echo": True}
        asked |= {"logprobs": max(1, min(top, self._alternatives))}
        found = self._complete(prompt, asked).get("logprobs") or {}
        own, tops = found.get("token_logprobs") or [], found.get("top_logprobs") or []
        if len(own) < len(prompt):
            text = (
                f"{self.name} gave {len(own)} likelihoods for {len(prompt)} tokens: it must know echo with logprobs"
            )
            raise Unavailable(text)
        return [
            TokenScore(p, dict(t or {})) for p, t in zip(own[1 : len(prompt)], tops[1 : len(prompt)], strict=True)
        ]

    @cached_property
    def _says_ids(self) -> bool:
        """Returns whether the server gives a prompt's likelihoods by token id."""
        try:
            return bool(self._complete([1, 1], {"max_tokens": 1, "prompt_logprobs": TOP}).get("prompt_logprobs"))
        except InvalidRequest:
            return False

    @cached_property
    def _alternatives(self) -> int:
        """Returns how many alternatives per token the server gives: ``TOP`` or ``FEW``."""
        try:
            self._complete([1, 1], {"max_tokens": 1, "echo": True, "logprobs": TOP})
        except InvalidRequest:
            return FEW
        return TOP

    def _complete(self, prompt: Ids, asked: Json) -> Json:
        body = {"model": self._model, "prompt": list(prompt)} | asked
        try:
            choice: Json = self._call("POST", "/v1/completions", body)["choices"][0]
        except (KeyError, IndexError, TypeError):
            raise Unavailable(f"{self.name}: the answer to a completion has no choice") from None
        return choice

    def _call(self, method: str, path: str, body: Json | None = None) -> Json:
        for tries_left in range(TRIES - 1, -1, -1):
            try:
                return self._called(method, path, body)
            except _TryLater as later:
                if not tries_left:
                    raise later.error from None
                time.sleep(later.seconds)
        raise AssertionError

    def _called(self, method: str, path: str, body: Json | None) -> Json:
        headers = {"content-type": "application/json"} | (
            {"authorization": f"Bearer {self._key}"} if self._key else {}
        )
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self._url + path, data, headers, method=method)
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                found: Json = json.load(response)
                return found
        except urllib.error.HTTPError as error:
            refusal = _REFUSALS.get(error.code, InvalidRequest if error.code < 500 else Unavailable)
            refused = refusal(f"{self.name}{path} answered {error.code}: {_reason(error)}", "model")
            if error.code in PASSING:
                raise _TryLater(refused, _pause(error)) from None
            raise refused from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise Unavailable(f"nothing answers at {self._url}{path} ({error})") from None


class _TryLater(Exception):
    """Says that a call may succeed after some ``seconds``; ``error`` is what it failed with."""

    def __init__(self, error: BatonError, seconds: float) -> None:
        super().__init__(error)
        self.error, self.seconds = error, seconds


def _pause(error: urllib.error.HTTPError) -> float:
    """Returns the seconds after which the server asks to come back, within bounds."""
    try:
        seconds = float(error.headers.get("retry-after") or LEAST_PAUSE_S)
    except ValueError:  # a date
        seconds = LEAST_PAUSE_S
    return min(max(seconds, LEAST_PAUSE_S), MOST_PAUSE_S)


def _answer(choice: Json, stop: Sequence[str]) -> Continuation:
    logprobs = choice.get("logprobs") or {}
    tokens: Sequence[TokenKey] = choice.get("token_ids") or logprobs.get("tokens") or []
    text = text_before(str(choice.get("text", "")), stop)
    return Continuation(text, tuple(tokens), tuple(logprobs.get("token_logprobs") or []))


def _of_ids(entry: dict[str, Json], token: int) -> TokenScore:
    top: dict[TokenKey, float] = {int(key): float(one["logprob"]) for key, one in entry.items()}
    return TokenScore(top[token], top)


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        found = json.load(error)
        return str(found.get("error", {}).get("message") or found.get("message") or error.reason)
    except (ValueError, AttributeError, OSError):
        return str(error.reason)
