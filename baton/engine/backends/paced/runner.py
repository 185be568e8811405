"""Imitates a model, with real pages and plans: a step sleeps by a cost curve, a token is a hash of KV bytes.

Knows nothing of torch, of schedulers or of how the curve was measured. Row i of a sequence is H(row i-1, token i,
i), written through the block table; the next token is a hash of *all* rows read back through it, so a page that is
wrong, late or foreign gives a wrong token. ``paced_answer`` computes the same answer without pages, for comparison.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from baton.engine.backends.paced.adapters import PacedAdapters
from baton.engine.backends.sequence_checks import require_computable
from baton.engine.masks import without
from baton.engine.plan import ModelSpec, PooledStates, SampledToken, SampleSpec, SequenceStep, StepPlan, StepResult
from baton.engine.sequence import GrammarCursor
from baton.protos.errors import ConfigError
from baton.protos.measurements import EngineWork, StepSample
from baton.protos.nouns import BLOCK_TOKENS, KvLayout, LayerGroup, Sampling, TokenLogprob, TokenLogprobs

DIGEST_BYTES = 16  # bytes of an XXH3-128, of which rows are made
PART_BYTES = 512 << 10  # bytes gathered at a time, so that they stay in the cache until they are hashed


class PacedRunner:
    """Implements ``Runner`` by hashes instead of a model.

    ``step_seconds`` returns a step's duration from its shape; ``sleep`` passes the time. ``kv_bytes_per_token``, a
    multiple of 16, is the size of the rows that are really in the pages and travel in a handoff. Raises
    ConfigError.
    """

    def __init__(
        self,
        name: str,
        kv_bytes_per_token: int,
        vocab_size: int,
        max_model_len: int,
        step_seconds: Callable[[StepSample], float],
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.perf_counter,
        eos_token_ids: tuple[int, ...] = (),
        work: EngineWork | None = None,
        adapters: PacedAdapters | None = None,
    ) -> None:
        self.work, self.adapters = work, adapters
        if kv_bytes_per_token <= 0 or kv_bytes_per_token % DIGEST_BYTES:
            raise ConfigError(
                f"kv_bytes_per_token is {kv_bytes_per_token}; make it a positive multiple of {DIGEST_BYTES}",
                "kv_bytes_per_token",
            )
        self.spec = paced_spec(name, kv_bytes_per_token, vocab_size, max_model_len, eos_token_ids)
        self._row_bytes = kv_bytes_per_token
        self._step_seconds, self._sleep, self._clock = step_seconds, sleep, clock
        self._rows: NDArray[np.uint8] = np.empty((0, BLOCK_TOKENS, kv_bytes_per_token), np.uint8)
        part = max(1, PART_BYTES // self.spec.layout.page_bytes)
        self._part: NDArray[np.uint8] = np.empty((part, BLOCK_TOKENS, kv_bytes_per_token), np.uint8)

    def bind(self, buffer: memoryview, pages: int) -> None:
        """Uses ``buffer`` as the KV pages, (pages, 16, kv_bytes_per_token) bytes."""
        rows = np.frombuffer(buffer, np.uint8, count=pages * self.spec.layout.page_bytes)
        self._rows = rows.reshape(pages, BLOCK_TOKENS, self._row_bytes)

    def run(self, plan: StepPlan) -> StepResult:
        """Writes the step's rows, chooses tokens from all rows read back, and takes as long as ``step_seconds``
        says.
        """
        began = self._clock()
        for item in plan.items:
            require_computable(item, self.spec.vocab_size, len(self._rows))
            if self.adapters is not None:
                self.adapters.require(item.adapter)
        sampled = tuple(found for item in plan.items for found in self._advance(item))
        ranks = None if self.adapters is None else self.adapters.rank_of
        left = self._step_seconds(plan.shape(rank_of=ranks)) - (self._clock() - began)
        if left > 0:
            self._sleep(left)
        scored = {item.seq: self._scores(item) for item in plan.items if item.targets}
        pooled = {item.seq: PooledStates.of(self._states(item)) for item in plan.items if item.pool}
        return StepResult(sampled, self._clock() - began, scored, pooled)

    def _advance(self, item: SequenceStep) -> Iterator[SampledToken]:
        self._write(item)
        known = item.start + len(item.tokens) - len(item.verify)
        for length, spec in enumerate(item.asks, known):
            digest = xxhash.xxh3_64()
            _update(digest, self._read(item.pages, length))
            yield choose(item.seq, digest, spec, self.spec.vocab_size)

    def _states(self, item: SequenceStep) -> NDArray[np.float32]:
        """Returns, in place of hidden states, the digest in each token's row, as 16 numbers around 0."""
        at = np.arange(item.start, item.start + len(item.tokens))
        pages = np.asarray(item.pages, np.int64)[at // BLOCK_TOKENS]
        digests = self._rows[pages, at % BLOCK_TOKENS, :DIGEST_BYTES]
        return (digests / 255 - 0.5).astype(np.float32)

    def _scores(self, item: SequenceStep) -> tuple[TokenLogprobs, ...]:
        found = (_likelihood(token, item.score_top, self.spec.vocab_size) for token in item.targets)
        return tuple(one for one in found if one is not None)

    def _write(self, item: SequenceStep) -> None:
        last = item.start - 1
        before = item.adapter.encode()
        if item.start:
            before = self._rows[item.pages[last // BLOCK_TOKENS], last % BLOCK_TOKENS].tobytes()
        fresh = b"".join(rows_after(before, item.tokens, item.start, self._row_bytes))
        if len(item.tokens) == 1:  # as in most steps: without arrays of places it takes a third of the time
            page, row = item.pages[item.start // BLOCK_TOKENS], item.start % BLOCK_TOKENS
            self._rows[page, row] = np.frombuffer(fresh, np.uint8)
            return
        at = np.arange(item.start, item.start + len(item.tokens))
        first, end = item.start // BLOCK_TOKENS, -(-(item.start + len(item.tokens)) // BLOCK_TOKENS)
        pages = np.asarray(item.pages[first:end], np.int64)
        self._rows[pages[at // BLOCK_TOKENS - first], at % BLOCK_TOKENS] = np.frombuffer(fresh, np.uint8).reshape(
            len(item.tokens), self._row_bytes
        )

    def _read(self, pages: Sequence[int], tokens: int) -> Iterable[memoryview]:
        """Yields all rows, in order, in parts that are valid until the next; adjacent pages aren't copied."""
        full, tail = divmod(tokens, BLOCK_TOKENS)
        table = list(pages[:full])  # not an array: most are of a few pages
        if full and (min(table) < 0 or max(table) >= len(self._rows)):
            raise IndexError(f"a page is outside 0 … {len(self._rows) - 1}")
        for at in range(0, full, len(self._part)):
            part = table[at : at + len(self._part)]
            if part == list(range(part[0], part[0] + len(part))):
                yield self._rows[part[0] : part[0] + len(part)].data
            else:
                yield np.take(self._rows, part, axis=0, out=self._part[: len(part)], mode="clip").data
        if tail:
            yield self._rows[pages[full], :tail].data


def paced_spec(
    name: str, kv_bytes_per_token: int, vocab_size: int, max_model_len: int, eos_token_ids: tuple[int, ...] = ()
) -> ModelSpec:
    """Returns the spec of a paced model; its fingerprint covers everything that changes an answer."""
    group = LayerGroup("full", ("state",), 1, 1, kv_bytes_per_token)
    layout = KvLayout("uint8", (group,), BLOCK_TOKENS * kv_bytes_per_token, fidelity="paced")
    fingerprint = hashlib.sha256(f"paced {name} {kv_bytes_per_token} {vocab_size}".encode()).hexdigest()
    return ModelSpec(fingerprint, layout, max_model_len, vocab_size, eos_token_ids)


def rows_after(before: bytes, tokens: Sequence[int], start: int, row_bytes: int) -> Iterable[bytes]:
    """Yields the rows of ``tokens`` at positions ``start`` and up, ``row_bytes`` each; ``before`` is row ``start -
    1``, or the adapter's id if there is none.
    """
    row = before
    for position, token in enumerate(tokens, start):
        key = token.to_bytes(8, "little") + position.to_bytes(8, "little")
        row = xxhash.xxh3_128_digest(row + key) * (row_bytes // DIGEST_BYTES)
        yield row


def choose(seq: int, digest: xxhash.xxh3_64, spec: SampleSpec, vocab_size: int) -> SampledToken:
    """Returns the next token, from the ``digest`` of all rows; with a temperature above 0, also from seed and
    choice. Likelihoods are even, but for those of tokens that a client names.
    """
    if spec.sampling.temperature > 0:
        digest.update((spec.sampling.seed & (2**64 - 1)).to_bytes(8, "little") + spec.choice.to_bytes(8, "little"))
    number = digest.intdigest()
    token, own = _picked(number, spec, vocab_size), spec.sampling
    if own.logprobs is not None and own.logprob_token_ids:
        chosen = TokenLogprob(token, -math.log(vocab_size), 1)
        return SampledToken(seq, token, TokenLogprobs(chosen, _named(number, own.logprob_token_ids)))
    return SampledToken(seq, token, _likelihood(token, own.logprobs, vocab_size))


def _named(number: int, token_ids: Sequence[int]) -> tuple[TokenLogprob, ...]:
    """Returns likelihoods of tokens that a client names, which tell by their values of which rows they are."""
    key = number.to_bytes(8, "little")
    return tuple(
        TokenLogprob(one, xxhash.xxh3_64_intdigest(key + one.to_bytes(8, "little")) % 1000 / -100, 1)
        for one in token_ids
    )


def _picked(number: int, spec: SampleSpec, vocab_size: int) -> int:
    if spec.allowed is not None:
        ids = np.flatnonzero(spec.allowed(vocab_size))
        return int(ids[number % len(ids)])
    token = number % vocab_size
    while token in spec.banned:
        token = (token + 1) % vocab_size
    return token


def paced_answer(
    prompt: Sequence[int],
    sampling: Sampling,
    choice: int = 0,
    *,
    kv_bytes_per_token: int,
    vocab_size: int,
    max_model_len: int,
    eos_token_ids: tuple[int, ...] = (),
    grammar: GrammarCursor | None = None,
    adapter: str = "",
) -> list[int]:
    """Returns every output token of a request, by the paced engine's rule but without pages, plans or batches."""
    tokens, outputs = list(prompt), list[int]()
    rows = [adapter.encode()]
    digest = xxhash.xxh3_64()
    stops = frozenset(() if sampling.ignore_eos else eos_token_ids) | frozenset(sampling.stop_token_ids)
    fresh: Sequence[int] = tokens
    while len(outputs) < sampling.max_tokens and len(tokens) < max_model_len:
        rows = list(rows_after(rows[-1], fresh, len(tokens) - len(fresh), kv_bytes_per_token))
        digest.update(b"".join(rows))
        banned = tuple(stops) if len(outputs) < sampling.min_tokens else ()
        spec = SampleSpec(sampling, choice, len(tokens), tokens, len(prompt), banned)
        if grammar is not None:
            spec = msgspec.structs.replace(spec, banned=(), allowed=without(grammar.mask, banned))
        token = choose(0, digest.copy(), spec, vocab_size).token_id
        outputs.append(token)
        tokens.append(token)
        fresh = (token,)
        if grammar is not None:
            grammar.take(token)
            if grammar.done:
                break
        if token in stops and len(outputs) > sampling.min_tokens:
            break
    return outputs


def _update(digest: xxhash.xxh3_64, parts: Iterable[memoryview]) -> None:
    for part in parts:
        digest.update(part)


def _likelihood(token: int, top: int | None, vocab_size: int) -> TokenLogprobs | None:
    if top is None:
        return None
    flat = -math.log(vocab_size)
    alternatives = tuple(TokenLogprob((token + i) % vocab_size, flat, i + 1) for i in range(min(top, vocab_size)))
    return TokenLogprobs(TokenLogprob(token, flat, 1), alternatives)
