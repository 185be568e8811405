"""Computes what the paced engine must answer, from the request alone: without pages, batches or the engine's code.

Row i of a sequence is XXH3-128(row i-1, token i, i), repeated to the row's size; the row before the first is the
adapter's id; the next token is XXH3-64 of all rows, keyed by seed and choice if it is sampled. Where layers see a
window (``Sight``), their rows follow, and only those in the window count. A grammar of ``SimulatedGrammar`` says
which ids are allowed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from baton.drill.language.grammar import follow
from baton.protos.nouns import Sampling

ROW_BYTES = 16  # bytes of KV per token, one digest
STATE_BYTES = 400  # bytes of a recurrent state, which take pages of their own
VOCABULARY = 997  # tokens of the made-up vocabulary
EOS = 11  # the token that ends an answer; any would do
RUN = 16  # tokens that a selection keeps or drops together
MOST_TOKENS = 2048  # prompt and answer together


class Sight(NamedTuple):
    """Says what the model's layers see.

    ``window``: two see so many tokens, beside one that sees all; 0: there is that one alone. With ``every``, that
    one sees the window, and there is no other. With ``state`` there is a recurrent state as well: state i is
    XXH3-128(state i-1 repeated to its size, row i), and is read last.

    ``selected`` says what is seen of a long context, as workers' setting does: "sinks:N,window:N" the first tokens,
    and those before a token's own run of 16; "snapkv:N,window:N" all of the prompt by its own tokens, and by the
    answer's the prompt's end and the runs that a hash of their last row and the prompt's last row puts first.

    With ``divided`` there is a second layer, which sees all as well, and is read behind the first.
    """

    window: int = 0
    every: bool = False
    state: bool = False
    selected: str = ""
    divided: bool = False


def answer(
    prompt: Sequence[int], sampling: Sampling, choice: int, adapter: str = "", sight: Sight = Sight()
) -> tuple[list[int], str]:
    """Returns every output token of choice number ``choice`` on ``adapter`` (an id), and its finish reason, "stop"
    or "length".
    """
    rows = _Rows(adapter, sight, len(prompt))
    outputs: list[int] = []
    grammar = follow(sampling.grammar)
    stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else {EOS})
    fresh = list(prompt)
    while len(outputs) < sampling.max_tokens and len(prompt) + len(outputs) < MOST_TOKENS:
        rows.add(fresh)
        keyed = rows.digest()
        if sampling.temperature > 0:
            keyed.update(sampling.seed.to_bytes(8, "little") + choice.to_bytes(8, "little"))
        banned = stops if len(outputs) < sampling.min_tokens else set()
        number = keyed.intdigest()
        if grammar is None:
            token = number % VOCABULARY
            while token in banned:
                token = (token + 1) % VOCABULARY
        else:
            allowed = [int(i) for i in np.flatnonzero(grammar.mask(VOCABULARY)) if int(i) not in banned]
            token = allowed[number % len(allowed)]
            grammar.take(token)
        outputs.append(token)
        fresh = [token]
        if (grammar is not None and grammar.done) or (token in stops and len(outputs) > sampling.min_tokens):
            return outputs, "stop"
    return outputs, "length"


def digest_of(prompt: Sequence[int], sight: Sight = Sight()) -> int:
    """Returns the number from which the paced engine chooses the token behind ``prompt``, without a temperature."""
    rows = _Rows("", sight, len(prompt))
    rows.add(prompt)
    return rows.digest().intdigest()


class _Rows:
    """The rows of a sequence on ``adapter`` (an id), as far as they are known, and what a sight sees of them."""

    def __init__(self, adapter: str, sight: Sight, prompt: int) -> None:
        self._sight, self._row, self._at, self._prompt = sight, adapter.encode(), 0, prompt
        self._beside = bytearray()  # the second layer's rows
        self._kept: list[bytes] = []  # all of them, where a selection may read any
        self._all, self._last, self._state = xxhash.xxh3_64(), list[bytes](), b""

    def add(self, tokens: Sequence[int]) -> None:
        """Adds the rows of ``tokens``."""
        sight = self._sight
        for token in tokens:
            key = token.to_bytes(8, "little") + self._at.to_bytes(8, "little")
            self._row = row = xxhash.xxh3_128_digest(self._row + key)
            self._all.update(row)
            self._at += 1
            if sight.selected:
                self._kept.append(row)
            if sight.divided:
                self._beside += xxhash.xxh3_128_digest(row + b"\1")
            if sight.state:
                self._state = xxhash.xxh3_128_digest(self._state * (STATE_BYTES // ROW_BYTES) + row)
            if sight.window:
                self._last = [*self._last, row][-sight.window :]

    def digest(self) -> xxhash.xxh3_64:
        """Returns the hash of all that the model sees now."""
        if self._sight.selected:
            return xxhash.xxh3_64(b"".join(self._kept[i] for i in seen(self._kept, self._prompt, self._sight)))
        keyed = self._all.copy() if not self._sight.every else xxhash.xxh3_64(b"".join(self._last))
        for layer in b"\1\2" if self._sight.window and not self._sight.every else b"":
            keyed.update(b"".join(xxhash.xxh3_128_digest(one + bytes([layer])) for one in self._last))
        keyed.update(bytes(self._beside) + self._state)
        return keyed


def seen(rows: Sequence[bytes], prompt: int, sight: Sight) -> list[int]:
    """Returns the positions of the ``rows`` that the last of them sees by the selection of ``sight``, after a
    prompt of ``prompt`` tokens.
    """
    (how, kept), (_, window) = (part.split(":") for part in sight.selected.split(","))
    count, most = len(rows), int(kept)
    if how == "sinks":
        first = max(0, (count - 1) // RUN - int(window) // RUN) * RUN
        return [i for i in range(count) if i < most or i >= first]
    first, slots = max(0, prompt - int(window)) // RUN, (most - int(window)) // RUN
    if count <= prompt or slots >= first:
        return list(range(count))
    best = sorted(range(first), key=lambda run: (-attended(rows[RUN * run + RUN - 1], rows[prompt - 1]), run))
    chosen = sorted(best[:slots])
    return [RUN * run + i for run in chosen for i in range(RUN)] + list(range(RUN * first, count))


def attended(row: bytes, by: bytes) -> int:
    """Returns how much the prompt's end, whose row is ``by``, attends to the run whose last row is ``row``."""
    return xxhash.xxh3_64_intdigest(row + by) % 2**20


def scored(prompt: Sequence[int], top: int) -> list[Mapping[int, float] | None]:
    """Returns the log-probabilities by token id at each position of ``prompt``, of its token and of the ``top``
    likeliest; None for the first.

    All tokens are equally likely to the paced engine; it names those that follow the prompt's token first.
    """
    flat = -math.log(VOCABULARY)
    return [None, *({(token + i) % VOCABULARY: flat for i in range(max(1, top))} for token in prompt[1:])]


def pooled(prompt: Sequence[int], how: str, adapter: str = "") -> bytes:
    """Returns the embedding of ``prompt``, as little-endian float32 bytes: the mean (``how`` "mean") or the last of
    its rows.
    """
    row, rows = adapter.encode(), []
    for at, token in enumerate(prompt):
        row = xxhash.xxh3_128_digest(row + token.to_bytes(8, "little") + at.to_bytes(8, "little"))
        rows.append(np.frombuffer(row, np.uint8))
    states = (np.stack(rows) / 255 - 0.5).astype(np.float32).astype(np.float64)
    return (states.mean(axis=0) if how == "mean" else states[-1]).astype("<f4").tobytes()
