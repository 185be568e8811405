"""Ranks hand over to other numbers of ranks in every architecture: the answer is one rank's.

Real checkpoints, real loops on both sides, blocks copied by hand; whole clusters are in tests/e2e/test_ranks.py.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from baton.decode_worker.engine.loop import DecodeLoop
from baton.engine.abilities import ranks_of
from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.engine.models import program_for
from baton.engine.plan import Runner
from baton.engine.program.config import ModelConfig
from baton.engine.program.shares import Widths
from baton.kernels.abi import native
from baton.kv.layout.state import state_pages
from baton.prefill_worker.engine.loop import PrefillLoop
from baton.protos.nouns import Sampling
from tests.conformance.checkpoints import make
from tests.decode_worker.test_windows import Side, hand_over, prompt_of, request
from tests.engine.backends.ranks.test_identity import FAMILIES, takes
from tests.engine.backends.ranks.threads import SharedDriver, on_ranks
from tests.thorough import first_now

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")

ANSWER = Sampling(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPT, PAGES, STATES = 150, 32, 24
WAYS = [  # widths of the worker that reads the prompt, and of the one that answers
    (Widths(tp=2), Widths()),
    (Widths(), Widths(tp=2)),
    (Widths(pp=2), Widths(tp=2)),
    (Widths(cp=2), Widths(tp=2)),
    (Widths(ep=2), Widths(tp=2)),
    (Widths(tp=2, pp=2), Widths(pp=2)),
]
FIRST = ("qwen3_moe",)  # the others with ``make thorough``
CASES = [*FIRST, *(kind for kind in FAMILIES if kind not in FIRST)]


def of_widths(alone: Runner, config: EngineConfig, widths: Widths) -> Runner:
    fields = msgspec.structs.asdict(widths)
    return on_ranks(alone.spec, msgspec.structs.replace(config, **fields)) if widths.count > 1 else alone


@pytest.mark.parametrize("kind", first_now(CASES, len(FIRST)))
def test_every_architecture_is_handed_over_between_unequal_widths(tmp_path: Path, kind: str) -> None:
    model = make(tmp_path, kind)
    config = EngineConfig(str(model), threads=1, rank_bound_s=60.0)
    alone, program = load_runner(config), program_for(ModelConfig.read(model))
    prompt = tuple(token % alone.spec.vocab_size for token in prompt_of(PROMPT))
    wanted = SharedDriver(alone, PAGES).answer([prompt], ANSWER)[0]
    pages = PAGES + STATES * state_pages(alone.spec.layout)
    took = 0
    for way in WAYS:
        if not all(widths.count == 1 or takes(widths, program) for widths in way):
            continue
        leads = [of_widths(alone, config, widths) for widths in way]
        try:
            prefill, decode = Side(model, PrefillLoop, pages, leads[0]), Side(model, DecodeLoop, pages, leads[1])
            hand_over(prefill, decode, prompt, request(prompt, ANSWER))
            decode.finish()
            assert decode.tokens(1) == wanted, way
            assert all(side.loop.snapshot().at_baseline for side in (prefill, decode)), way
        finally:
            for lead in leads:
                if (ranks := ranks_of(lead)) is not None:
                    ranks.leave()
        took += 1
    assert took >= 3, "by columns and by layers every architecture of these is shared"
