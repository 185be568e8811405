"""A cluster whose workers share a model among cards, kernels on the SIMT shim: real processes, a session per rank.

Every launch is a thousand times slower than a GPU's; the model is one that doesn't mind.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.kernels.cuda import build, library
from baton.protos.nouns import Sampling
from tests.conformance.checkpoints import make
from tests.conformance.drive import Driver
from tests.e2e.fleet import Fleet, wait_for
from tests.e2e.test_card_to_card import SHAPE, TOKENS, asked
from tests.e2e.test_ranks import PREFILL_FIRST, followers, gone
from tests.kernels.compilers import needs_compiler

GREEDY = Sampling(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)


@pytest.fixture
def shim(monkeypatch: pytest.MonkeyPatch) -> None:
    with needs_compiler():
        build.simt()
    monkeypatch.setenv(library.SIMT_ENV, "1")


@pytest.mark.thorough  # of the runner alone: tests/engine/backends/ranks/cards
def test_two_cards_prefill_for_one_that_decodes_and_are_replaced_when_a_rank_is_killed(
    shim: None, tmp_path: Path
) -> None:
    model = make(tmp_path / "model", "llama2", tokenizer=True, **SHAPE)
    alone = Driver(load_runner(EngineConfig(str(model), dtype="bfloat16", threads=1)), pages=32, chunk=64)
    worker = {"model": str(model), "device": "cuda", "pages": 48, "dtype": "bfloat16"}
    prompts = [[3 + i * step % 190 for i in range(count)] for step, count in ((7, 70), (11, 33), (13, 50))]
    with Fleet(1, 1, cluster={"prefill_tp": 2}, worker=worker, router=PREFILL_FIRST) as fleet:
        assert [len(followers(fleet, f"{role}-0")) for role in ("prefill", "decode")] == [1, 0]
        for prompt in prompts[:2]:
            assert asked(fleet, prompt) == alone.answer([prompt], GREEDY)[0]
        before = fleet.record("prefill-0").engine_pid
        os.kill(followers(fleet, "prefill-0")[0], signal.SIGKILL)
        wait_for(lambda: fleet.record("prefill-0").engine_pid not in (0, before), what="another engine")
        assert asked(fleet, prompts[2]) == alone.answer([prompts[2]], GREEDY)[0]
        fleet.wait_for_baseline()
        left = followers(fleet, "prefill-0")
    wait_for(lambda: all(gone(pid) for pid in left), what="the end of every rank, which no cluster outlives")
