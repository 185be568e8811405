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
MOST_TOKENS = 2048  # prompt and answer together


class Sight(NamedTuple):
    """Says what the model's layers see.

    ``window``: two see so many tokens, beside one that sees all; 0: there is that one alone. With ``every``, that
    one sees the window, and there is no other. With ``state`` there is a recurrent state as well: state i is
    XXH3-128(state i-1 repeated to its size, row i), and is read last.
    """

    window: int = 0
    every: bool = False
    state: bool = False


def answer(
    prompt: Sequence[int], sampling: Sampling, choice: int, adapter: str = "", sight: Sight = Sight()
) -> tuple[list[int], str]:
    """Returns every output token of choice number ``choice`` on ``adapter`` (an id), and its finish reason, "stop"
    or "length".
    """
    row, digest, at = adapter.encode(), xxhash.xxh3_64(), 0
    last: list[bytes] = []  # rows in the window
    state = b""
    outputs: list[int] = []
    grammar = follow(sampling.grammar)
    stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else {EOS})
    fresh = list(prompt)
    while len(outputs) < sampling.max_tokens and len(prompt) + len(outputs) < MOST_TOKENS:
        for token in fresh:
            row = xxhash.xxh3_128_digest(row + token.to_bytes(8, "little") + at.to_bytes(8, "little"))
            digest.update(row)
            at += 1
            if sight.state:
                state = xxhash.xxh3_128_digest(state * (STATE_BYTES // ROW_BYTES) + row)
            last = [*last, row][-sight.window :] if sight.window else last
        keyed = digest.copy() if not sight.every else xxhash.xxh3_64(b"".join(last))
        for layer in b"\1\2" if sight.window and not sight.every else b"":
            keyed.update(b"".join(xxhash.xxh3_128_digest(one + bytes([layer])) for one in last))
        keyed.update(state)
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
