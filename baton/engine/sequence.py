"""Follows a sequence: a request's tokens, how many of them have KV, and when it ends. Torch-free.

Knows nothing of pages' owners, of batches or of time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from baton.engine.masks import Allowed, Mask, completing, only, without
from baton.engine.plan import PooledStates, SampleSpec
from baton.protos.nouns import EngineRequest, TokenLogprobs, TokenRun


class GrammarCursor(Protocol):
    """Follows an answer through its grammar; ``engine.grammar.state.GrammarState`` is the real one."""

    @property
    def ready(self) -> bool:
        """Returns whether a mask is available without waiting."""

    @property
    def done(self) -> bool:
        """Returns whether the answer is complete, so that no token may follow."""

    @property
    def follows_drafts(self) -> bool:
        """Returns whether ``preview`` can tell what may follow drafts."""

    @property
    def forced(self) -> Sequence[int]:
        """Returns token ids that spell what has to follow; empty if several texts may, or nothing is known yet."""

    @property
    def followed(self) -> int:
        """Returns how many of the previewed drafts may be accepted, because the masks after them were known."""

    def preview(self, ids: Sequence[int]) -> None:
        """Begins to find out what may follow each of the drafts ``ids``."""

    def mask_after(self, count: int, vocab_size: int) -> Mask:
        """Returns a boolean array (vocab_size,) of the tokens that may follow the first ``count`` previewed drafts;
        of all tokens if that isn't known.
        """

    def tell_ahead(self, token_ids: Sequence[int]) -> None:
        """Announces the tokens that the next calls of ``take`` will bring, so that work on them may begin."""

    def take(self, token_id: int) -> None:
        """Advances by ``token_id``, the next token of the answer."""

    def mask(self, vocab_size: int) -> Mask:
        """Returns a boolean array (vocab_size,) of the tokens that may come next."""


class SequenceState:
    """Holds the tokens of one choice of a request. The first ``computed`` tokens have their KV in pages; the rest
    is still to be run.
    """

    def __init__(
        self,
        seq: int,
        request: EngineRequest,
        eos_token_ids: tuple[int, ...],
        max_model_len: int,
        grammar: GrammarCursor | None = None,
    ):
        self.seq = seq
        self.request = request
        self.tokens: list[int] = list(request.token_ids)
        self.computed = 0
        self.finish_reason = ""
        self.stop_token_id: int | None = None
        self._eos = frozenset(eos_token_ids)
        stops = frozenset(request.sampling.stop_token_ids)
        self._stops = stops if request.sampling.ignore_eos else stops | self._eos
        self._grammar = grammar
        self.scores: list[TokenLogprobs] = []
        self._pooled: tuple[int, PooledStates] | None = None
        self._room = max_model_len
        asked = request.sampling
        self._unbound = grammar is None and not (asked.min_tokens or asked.bad_words or asked.allowed_token_ids)

    @property
    def outputs(self) -> int:
        """Returns the number of tokens generated so far, replayed ones included; the next output has this index."""
        return len(self.tokens) - self.request.prompt_tokens

    @property
    def pending(self) -> int:
        """Returns the number of tokens without KV: 1 while decoding, more while a prompt is computed."""
        return len(self.tokens) - self.computed

    @property
    def ready(self) -> bool:
        """Returns whether a token can be chosen now: its grammar, if it has one, is compiled."""
        return self._grammar is None or self._grammar.ready

    @property
    def draft_room(self) -> int:
        """Returns the most drafts that may follow the last token; 0 if the answer's grammar can't follow drafts.

        One token after the last draft, chosen by the model itself, must still fit.
        """
        asked = self.request.sampling
        if self._grammar is not None and not self._grammar.follows_drafts:
            return 0
        room = min(asked.max_tokens - self.outputs, self._room - len(self.tokens)) - 1
        return max(0, room if asked.max_drafts is None else min(room, asked.max_drafts))

    @property
    def forced(self) -> Sequence[int]:
        """Returns tokens that spell what the answer's grammar lets follow; empty if several texts may follow."""
        return () if self._grammar is None else self._grammar.forced

    def sample_spec(self, drafts: Sequence[int] = ()) -> SampleSpec:
        """Returns how to choose the token after the last known one, or after ``drafts`` that follow it."""
        sampling, prompt_tokens = self.request.sampling, self.request.prompt_tokens
        position, history = len(self.tokens) + len(drafts), self._history(drafts)
        if self._unbound:
            return SampleSpec(sampling, self.request.choice, position, history, prompt_tokens)
        banned = tuple(self._stops) if self.outputs + len(drafts) < sampling.min_tokens else ()
        if sampling.bad_words:
            banned += completing(sampling.bad_words, [*self.tokens[prompt_tokens:], *drafts])
        allowed = self._allowed(len(drafts))
        if allowed is not None:
            allowed, banned = without(allowed, banned), ()
        return SampleSpec(sampling, self.request.choice, position, history, prompt_tokens, banned, allowed)

    @property
    def ends_next(self) -> bool:
        """Returns whether the next token is the answer's last whatever it is, if no grammar bounds it."""
        return self.outputs + 1 >= self.request.sampling.max_tokens or len(self.tokens) + 1 >= self._room

    def spec_after_next(self) -> SampleSpec | None:
        """Returns how to choose the token after the next one, while that isn't known yet; None if it depends on it,
        or if the host chooses by logits, as it does beside logprobs.
        """
        sampling = self.request.sampling
        if self._grammar is not None or sampling.penalised or sampling.bad_words or sampling.logprobs is not None:
            return None
        banned = tuple(self._stops) if self.outputs + 1 < sampling.min_tokens else ()
        allowed = only(sampling.allowed_token_ids) if sampling.allowed_token_ids else None
        if allowed is not None:
            allowed, banned = without(allowed, banned), ()
        at = len(self.tokens) + 1, (), self.request.prompt_tokens
        return SampleSpec(sampling, self.request.choice, *at, banned, allowed)

    def verify_specs(self, paths: Sequence[Sequence[int]]) -> tuple[SampleSpec, ...]:
        """Returns, for each of ``paths`` (drafts from the next place on), how to choose the token after it.

        With a grammar, they are the beginnings of one chain, in order.
        """
        if self._grammar is not None and paths:
            self._grammar.preview(paths[-1])
        return tuple([self.sample_spec(path) for path in paths])

    def _history(self, drafts: Sequence[int]) -> Sequence[int]:
        if not drafts:
            return self.tokens
        return [*self.tokens, *drafts] if self.request.sampling.penalised else ()

    def standing(self, rows: Sequence[int]) -> Sequence[int]:
        """Returns the leading ones of ``rows`` that may stand: those whose masks the grammar gave in time."""
        return rows if self._grammar is None else rows[: 1 + self._grammar.followed]

    @property
    def scores_prompt(self) -> bool:
        """Returns whether the prompt tokens computed next get logprobs, for which a step has MOST_SCORED rows."""
        return self.request.sampling.prompt_logprobs is not None and not self.outputs

    def targets(self, take: int) -> tuple[int, ...]:
        """Returns the prompt tokens that get logprobs if the next ``take`` tokens are computed; empty if not
        requested, or after the first output.
        """
        if not self.scores_prompt:
            return ()
        return tuple(self.tokens[self.computed + 1 : self.computed + take + 1])

    def score(self, start: int, found: tuple[TokenLogprobs, ...]) -> None:
        """Records the logprobs ``found[i]`` of the prompt tokens at ``start + i + 1``; those known from before a
        recompute are dropped.
        """
        if found:
            assert start <= len(self.scores), f"{len(self.scores)} to {start} of a scored prompt were skipped"
            self.scores += found[len(self.scores) - start :]

    @property
    def pools(self) -> bool:
        """Returns whether computing the next tokens adds to the prompt's pooled state, which is reported with the
        first output.
        """
        return bool(self.request.sampling.pooling) and not self.outputs

    def pool(self, start: int, end: int, found: PooledStates | None) -> None:
        """Adds ``found``, the pooled states of tokens ``start`` … ``end`` - 1, to those before ``start``; None is
        ignored.

        Mean pooling adds up all tokens, so that a recompute must begin at token 0.
        """
        if found is None:
            return
        before = self._pooled[1] if self._pooled and self._pooled[0] == start else None
        if self.request.sampling.pooling == "mean":
            assert start == 0 or before, f"the sum of a prompt's states can't go on at token {start}"
        total = found.total if before is None else before.total + found.total
        self._pooled = end, PooledStates(total, found.last)

    def pooled(self) -> bytes:
        """Returns the prompt's pooled vector as float32 little-endian bytes once the prompt is computed; empty if
        not requested.
        """
        if self._pooled is None:
            return b""
        _, pooled = self._pooled
        mean = self.request.sampling.pooling == "mean"
        return (pooled.total / self.request.prompt_tokens if mean else pooled.last).astype("<f4").tobytes()

    def _allowed(self, drafts: int) -> Allowed | None:
        if self._grammar is not None:
            if drafts:
                return partial(self._grammar.mask_after, drafts)
            # One that is complete before a token is chosen belongs to an answer whose worker died before its end.
            ends = self._eos and self._grammar.ready and self._grammar.done
            return only(tuple(self._eos)) if ends else self._grammar.mask
        ids = self.request.sampling.allowed_token_ids
        return only(ids) if ids else None

    @property
    def has_grammar(self) -> bool:
        """Returns whether a grammar bounds the answer, which may be told tokens ahead; its drafts are chains."""
        return self._grammar is not None

    def tell_ahead(self, token_ids: Sequence[int]) -> None:
        """Announces to the grammar, if there is one, the tokens that the next calls of ``take`` will bring."""
        if self._grammar is not None:
            self._grammar.tell_ahead(token_ids)

    def leave(self) -> None:
        """Leaves the answer's grammar, which nobody follows any more; call it when the answer has ended."""
        self._grammar = None

    def late_end(self) -> TokenRun | None:
        """Ends an answer whose grammar was slow to report whether it is complete, and returns the empty run that
        says so.

        Returns None while the answer goes on. Call it when ``ready`` has become true after an ``append``, and
        before the first one where tokens came along from a worker that may have ended before it heard of the end.
        """
        if self._grammar is None or not self.outputs or not self.ready or self.finish_reason:
            return None
        self._end_by(self._grammar, self.tokens[-1])
        if not self.finish_reason:
            return None
        return TokenRun(self.outputs, (), (), self.finish_reason, self.stop_token_id)

    def append(self, token_id: int, logprobs: TokenLogprobs | None = None) -> TokenRun:
        """Adds the next output token as ``take`` does; returns the run to report, with the finish reason if it is
        the last.
        """
        index = self.take(token_id)
        return TokenRun(
            output_index=index,
            token_ids=(token_id,),
            logprobs=() if logprobs is None else (logprobs,),
            finish_reason=self.finish_reason,
            stop_token_id=self.stop_token_id,
        )

    def take(self, token_id: int) -> int:
        """Adds the next output token and returns its index; sets ``finish_reason`` ("stop" or "length") if it is
        the last.
        """
        request = self.request
        index, sampling = len(self.tokens) - request.prompt_tokens, request.sampling
        self.tokens.append(token_id)
        if self._grammar is not None:
            self._grammar.take(token_id)
        if token_id in self._stops and index >= sampling.min_tokens:
            self.finish_reason, self.stop_token_id = "stop", token_id
        elif self._grammar is not None:
            self._end_by(self._grammar, token_id)
        elif index + 1 >= sampling.max_tokens or len(self.tokens) >= self._room:
            self.finish_reason = "length"
        return index

    def _end_by(self, grammar: GrammarCursor, last: int) -> None:
        """Sets ``finish_reason`` if ``grammar`` is complete with token ``last``, or no token more has room. While
        the grammar has yet to say which, it stays open: the same answer would end with one or the other by chance.
        """
        if grammar.done:
            self.finish_reason, self.stop_token_id = "stop", last if last in self._eos else None
        elif grammar.ready and self._full:
            self.finish_reason = "length"

    @property
    def _full(self) -> bool:
        return self.outputs >= self.request.sampling.max_tokens or len(self.tokens) >= self._room
