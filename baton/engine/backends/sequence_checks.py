"""Checks that a sequence's share of a step can be computed at all. Torch-free; knows nothing of models' insides."""

from __future__ import annotations

from baton.engine.plan import SequenceStep
from baton.protos.errors import BatonError, InvalidRequest
from baton.protos.nouns import BLOCK_TOKENS


def require_computable(item: SequenceStep, vocab_size: int, pages: int) -> None:
    """Checks ``item`` for a model of ``vocab_size`` tokens on ``pages`` pages. Raises InvalidRequest for a token id
    outside the vocabulary, BatonError for a page table that is too short or has pages out of range.

    Only the entries for pages to be written are checked; a wrong one among the others fails when it is read.
    """
    if item.state_to and not 0 <= min(item.state_to) <= max(item.state_to) < pages:
        raise BatonError(
            f"sequence {item.seq} keeps its state in a page outside 0 … {pages - 1}; were pages bound?"
        )
    if min(item.tokens) < 0 or max(item.tokens) >= vocab_size:
        raise InvalidRequest(f"a token id is outside the vocabulary, 0 … {vocab_size - 1}", "prompt")
    end = -(-(item.start + item.trunk) // BLOCK_TOKENS)
    if len(item.pages) < end or (item.tables and min(map(len, item.tables)) < end):
        raise BatonError(f"sequence {item.seq} has {len(item.pages)} pages, too few for its tokens")
    written = item.pages[item.start // BLOCK_TOKENS : end]
    if item.draft_branches:
        written = [*written, *(page for draft_branch in item.draft_branches for page in draft_branch.pages)]
    if min(written) < 0 or max(written) >= pages:
        raise BatonError(f"sequence {item.seq} names a page outside 0 … {pages - 1}; were pages bound?")
