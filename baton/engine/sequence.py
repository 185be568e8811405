"""A sequence: a request's tokens, how many of them have KV, and when it ends. Torch-free.

Knows nothing of pages' owners, of batches or of time.
"""

from __future__ import annotations

from baton.engine.plan import SampleSpec
from baton.protos.nouns import EngineRequest, TokenLogprobs, TokenRun


class Sequence:
    """Tokens of one choice. ``computed`` of them have their KV in pages; the rest is still to be run."""

    def __init__(self, seq: int, request: EngineRequest, eos_token_ids: tuple[int, ...], max_model_len: int):
        self.seq = seq
        self.request = request
        self.tokens: list[int] = list(request.token_ids)
        self.computed = 0
        self.finish_reason = ""
        self.stop_token_id: int | None = None
        self._eos = frozenset(() if request.sampling.ignore_eos else eos_token_ids)
        self._stops = self._eos | frozenset(request.sampling.stop_token_ids)
        self._room = max_model_len

    @property
    def outputs(self) -> int:
        """Tokens generated so far, replayed ones included; the next output has this index."""
        return len(self.tokens) - self.request.prompt_tokens

    @property
    def pending(self) -> int:
        """Tokens without KV. 1 while decoding, more while a prompt is read."""
        return len(self.tokens) - self.computed

    def sample_spec(self) -> SampleSpec:
        """How the token after the last known one is to be chosen."""
        sampling = self.request.sampling
        banned = tuple(self._stops) if self.outputs < sampling.min_tokens else ()
        return SampleSpec(
            sampling, self.request.choice, len(self.tokens), self.tokens, self.request.prompt_tokens, banned
        )

    def append(self, token_id: int, logprobs: TokenLogprobs | None = None) -> TokenRun:
        """Take the next output; sets ``finish_reason`` when it is the last one."""
        index = self.outputs
        self.tokens.append(token_id)
        sampling = self.request.sampling
        if token_id in self._stops and index >= sampling.min_tokens:
            self.finish_reason, self.stop_token_id = "stop", token_id
        elif self.outputs >= sampling.max_tokens or len(self.tokens) >= self._room:
            self.finish_reason = "length"
        return TokenRun(
            output_index=index,
            token_ids=(token_id,),
            logprobs=() if logprobs is None else (logprobs,),
            finish_reason=self.finish_reason,
            stop_token_id=self.stop_token_id,
        )
