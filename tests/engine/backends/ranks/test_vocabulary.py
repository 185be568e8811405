"""Vocabularies that ranks can't share evenly: every token is read and chosen as by one rank, with its logprobs."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.engine.program.rank_program import Rank
from baton.kernels.abi import native
from baton.protos.nouns import Sampling
from tests.conformance.checkpoints import make
from tests.engine.backends.ranks.threads import SharedDriver, on_ranks

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")

TOP = 20
SPOKEN = Sampling(temperature=0.0, max_tokens=6, logprobs=TOP, prompt_logprobs=TOP)
DRAWN = Sampling(temperature=1.3, top_k=300, top_p=0.99, min_p=0.0, seed=5, max_tokens=6, logprobs=TOP)
CASES = [
    ("qwen2", 1117, 3),  # tied: embedding and head are one matrix
    ("mistral_full", 1003, 4),  # a head of its own
    ("qwen2", 131, 2),  # less than two panels of 64 rows a rank
    ("mistral_full", 67, 4),
    ("qwen2", 1117, 2),
]


@pytest.mark.parametrize(("kind", "vocab", "count"), CASES, ids=str)
def test_a_vocabulary_that_does_not_divide_is_embedded_scored_and_sampled_as_by_one_rank(
    tmp_path: Path, kind: str, vocab: int, count: int
) -> None:
    model, shares = make(tmp_path, kind, vocab_size=vocab), [Rank(at, count).part(vocab) for at in range(count)]
    assert vocab % count
    assert (shares[0][0], shares[-1][1]) == (0, vocab)
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(shares))
    alone = load_runner(EngineConfig(str(model), threads=1))
    many = on_ranks(alone.spec, EngineConfig(str(model), threads=1, rank_bound_s=60.0, tp=count))
    borders = [token for begin, end in shares for token in (begin, end - 1)]  # the first and last of each rank
    asked = [borders, borders[::-1], [vocab - 1] * 40]
    one, ranks = SharedDriver(alone, 64), SharedDriver(many, 64)
    try:
        for sampling in (SPOKEN, DRAWN):
            assert ranks.answer(asked, sampling) == one.answer(asked, sampling)
        assert ranks.logprobs == one.logprobs
        assert ranks.read == one.read
        named = {each.token_id for found in ranks.logprobs.values() for at in found for each in at.top}
        assert all(named & set(range(*share)) for share in shares), "every rank has some of the likeliest"
    finally:
        many.leave()
