"""Sinks and a window as a fidelity: answers beside transformers' under the same mask, pages given back, what ships.

Real checkpoint, real loops on both sides, blocks copied by hand. Whatever no lease has is evicted and overwritten
between any two steps, so a token that read a page given back would be another.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

from baton.decode_worker.engine.loop import DecodeLoop
from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.engine.plan import Runner
from baton.kv.pages.lease import LEAST_SLIDE
from baton.prefill_worker.engine.loop import PrefillLoop
from baton.protos import channel as ch
from baton.protos.errors import ConfigError
from tests.conformance.checkpoints import make, reference
from tests.conformance.drive import Driver
from tests.decode_worker.test_windows import ANSWER, Side, hand_over, prompt_of, request

SINKS, WINDOW = 32, 48
SELECTION = f"sinks:{SINKS},window:{WINDOW}"
LENGTHS = (5, 90, 300)
MOST = SINKS // 16 + WINDOW // 16 + 2 + LEAST_SLIDE  # pages that an answer holds


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("selected") / "llama", "llama_yarn", vocab_size=777)


def loaded(model: Path, **settings: object) -> Runner:
    config = {"threads": 1, "dtype": "float32", "kv_selection": SELECTION} | settings
    return load_runner(EngineConfig(str(model), **config))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def wanted(model: Path) -> dict[int, list[int]]:
    """Answers to prompts by length, with every page kept."""
    driver = Driver(loaded(model), pages=80)
    return {n: driver.answer([prompt_of(n)], ANSWER)[0] for n in LENGTHS}


def masked(tokens: int) -> torch.Tensor:
    """The mask of the definition, (1, 1, tokens, tokens)."""
    query, key = torch.arange(tokens)[:, None], torch.arange(tokens)[None]
    seen = (key <= query) & ((key < SINKS) | (key // 16 >= query // 16 - WINDOW // 16))
    return torch.zeros(tokens, tokens).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]


def test_answers_are_those_of_transformers_under_the_same_mask(model, wanted):
    theirs = reference(model)
    for length, answer in wanted.items():
        tokens = [*prompt_of(length), *answer]
        with torch.no_grad():
            logits = theirs(torch.tensor([tokens]), attention_mask=masked(len(tokens))).logits[0]
        assert logits[length - 1 : -1].argmax(-1).tolist() == answer
    whole = Driver(loaded(model, kv_selection="all"), pages=80).answer([prompt_of(300)], ANSWER)[0]
    assert whole != wanted[300], "what is left out would be missed"


def test_a_prompt_read_in_pieces_of_any_size_and_in_company_gives_the_same_answer(model, wanted):
    for chunk in (7, 48):
        driver = Driver(loaded(model), pages=160, chunk=chunk)
        assert driver.answer([prompt_of(n) for n in LENGTHS], ANSWER) == list(wanted.values())


def test_torchs_own_ops_and_the_step_that_checks_itself_agree(model, wanted, monkeypatch):
    none = SimpleNamespace(library=lambda: None, set_threads=lambda count: None)
    monkeypatch.setattr("baton.engine.backends.loading.native", none)
    few = msgspec.structs.replace(ANSWER, max_tokens=12)
    assert Driver(loaded(model), pages=80).answer([prompt_of(300)], few)[0] == wanted[300][:12]
    monkeypatch.undo()
    for name, value in (("BATON_CHECK_STEP", "1"), ("BATON_STEP", "ops")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert Driver(loaded(model), pages=80).answer([prompt_of(300)], few)[0] == wanted[300][:12]


class Selected(Side):
    """One worker's engine that selects."""

    def __init__(self, model: Path, loop: type, pages: int = 64) -> None:
        super().__init__(model, loop, pages, kv_selection=SELECTION)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_handoff_ships_the_sinks_and_the_window_and_the_answer_is_the_same(model, wanted, length):
    prefill, decode = Selected(model, PrefillLoop), Selected(model, DecodeLoop)
    shipped = hand_over(prefill, decode, prompt_of(length))
    decode.finish()
    assert decode.tokens(1) == wanted[length]
    first = max(SINKS, length - WINDOW - 15) // 16
    assert shipped == [n for n in range(-(-length // 16)) if n < SINKS // 16 or n >= first]
    assert decode.most <= MOST
    for side in (prefill, decode):
        side.pool.check()
        assert side.loop.snapshot().at_baseline


def test_a_second_handoff_ships_what_the_receivers_cache_lacks(model, wanted):
    prefill, decode = Selected(model, PrefillLoop), Selected(model, DecodeLoop)
    hand_over(prefill, decode, prompt_of(300))
    decode.finish(forget=False)
    for side in (prefill, decode):
        side.tape.clear()
    assert hand_over(prefill, decode, prompt_of(300)) == [18]
    decode.finish()
    assert decode.tokens(1) == wanted[300]


def test_a_worker_that_reads_the_prompt_itself_gives_pages_back_as_it_reads(model, wanted):
    decode = Selected(model, DecodeLoop)
    decode.say(ch.Admit(1, request(prompt_of(300)), True, 30.0))
    decode.finish()
    assert decode.tokens(1) == wanted[300]
    assert decode.pool.snapshot_counts().leased == 0


def test_a_prefix_is_found_by_its_sinks_and_the_blocks_that_its_continuation_sees(model, wanted):
    side = Selected(model, DecodeLoop)
    side.say(ch.Admit(1, request(prompt_of(300)), True, 30.0))
    side.finish(forget=False)
    chain = list(side.pool.blocks.page_of)
    for kept, found in ((chain[:2] + chain[14:18], 288), (chain[1:2] + chain[14:18], 0)):
        pages = [side.pool.keep(block) for block in kept]
        side.forget()
        for page in pages:
            side.pool.unkeep(page)
        side.tape.clear()
        side.say(ch.Admit(2, request(prompt_of(300)), True, 30.0))
        side.finish(forget=False)
        outputs = [o for told in side.tape.of(ch.Tokens) for o in told.outputs if not o.run.output_index]
        assert [output.cached_tokens for output in outputs] == [found]
        assert side.tokens(2) == wanted[300]


def test_preempted_sequences_go_on_as_they_would_have(model):
    side = Selected(model, DecodeLoop, pages=26)
    side.say(*(ch.Admit(key, request(prompt_of(90)), True, 30.0) for key in (1, 2, 3)))
    for at in range(400):
        if not side.loop.turn([]):
            break
        if at % 50 == 30:
            scheduler = side.loop.scheduler
            scheduler._preempt(scheduler.running[-1])
        side.forget()
    assert side.loop.scheduler.preemptions > 0
    expected = Driver(loaded(model), pages=40).answer([prompt_of(90)], ANSWER)[0]
    assert [side.tokens(key) for key in (1, 2, 3)] == [expected] * 3


def test_what_can_not_be_selected_with_is_refused_by_name(tmp_path):
    path = make(tmp_path / "deepseek", "deepseek_v2")
    with pytest.raises(ConfigError, match=r"worker\.kv_selection .* isn't known with latent attention"):
        loaded(path)


@pytest.mark.parametrize("share", ["tp", "cp", "pp"])
def test_ranks_that_would_attend_to_everything_are_refused(model, share):
    with pytest.raises(ConfigError, match=rf"worker\.kv_selection .* isn't known with {share} 2"):
        loaded(model, **{share: 2})
