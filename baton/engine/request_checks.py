"""Checks whether a worker can ever compute a request. Torch-free.

Knows nothing of load: a request that passes may still have to wait. Sampling ranges are the router's.
"""

from __future__ import annotations

from baton.engine.plan import ModelSpec
from baton.kv.layout.room import CHUNK_TOKENS, prompt_pages
from baton.protos.errors import ContextTooLong, InvalidRequest
from baton.protos.nouns import BLOCK_TOKENS, EngineRequest


def blocks_for(tokens: int, block_tokens: int = BLOCK_TOKENS) -> int:
    """Returns the number of pages of ``block_tokens`` tokens that hold ``tokens`` tokens."""
    return -(-tokens // block_tokens)


def holdable(tokens: int, block_tokens: int = BLOCK_TOKENS) -> int:
    """Returns how many leading blocks of ``tokens`` tokens may be taken from a cache: at least one token is always
    left to compute.
    """
    return max(tokens - 1, 0) // block_tokens


def holdable_of(request: EngineRequest, tokens: int, block_tokens: int = BLOCK_TOKENS) -> int:
    """Returns how many leading blocks of ``request``'s first ``tokens`` tokens may be taken from a cache.

    Returns 0 if every prompt token must be computed, for prompt logprobs or mean pooling. Their results come with
    the first output, so a longer sequence (``tokens`` beyond the prompt) no longer needs them.
    """
    wanted = request.sampling.prompt_logprobs is not None or request.sampling.pooling == "mean"
    return 0 if wanted and tokens <= request.prompt_tokens else holdable(tokens, block_tokens)


def check_request(request: EngineRequest, spec: ModelSpec, pages: int, chunk_tokens: int = CHUNK_TOKENS) -> None:
    """Checks that a worker with a model of ``spec`` and ``pages`` KV pages, which reads ``chunk_tokens`` tokens
    in a step, can ever compute ``request``. Raises InvalidRequest or ContextTooLong, naming the field.

    The request's adapter is checked elsewhere (adapters/table.py).
    """
    count = len(request.token_ids)
    if count == 0 or not 0 < request.prompt_tokens <= count:
        raise InvalidRequest("token_ids needs a token, and prompt_tokens must be within it", "prompt_tokens")
    if not (min(request.token_ids) >= 0 and max(request.token_ids) < spec.vocab_size):
        raise InvalidRequest(f"token ids must be in 0..{spec.vocab_size - 1}", "token_ids")
    if count >= spec.max_model_len:
        raise ContextTooLong(f"{count} tokens leave no room in a context of {spec.max_model_len}", "token_ids")
    needed = prompt_pages(spec.layout, blocks_for(count, spec.layout.block_tokens), chunk_tokens)
    if needed > pages:
        raise ContextTooLong(f"{count} tokens need {needed} pages; the pool has {pages}", "token_ids")
