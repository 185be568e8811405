"""Pages chosen by what a prompt's end attends to: answers beside transformers' under the same mask, what ships.

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
from baton.engine.plan import Runner, SequenceStep, StepPlan
from baton.engine.wide_pages import widened
from baton.kv.layout.selection import PromptSelection
from baton.prefill_worker.engine.loop import PrefillLoop
from baton.protos import channel as ch
from baton.protos.errors import ConfigError
from baton.protos.nouns import EngineRequest, Sampling
from tests.conformance.checkpoints import make, reference
from tests.decode_worker.test_windows import Side, prompt_of, request
from tests.decode_worker.test_windows import hand_over as handed_over
from tests.engine.speculate.oracle import Eager, Oracle

BUDGET, WINDOW = 128, 32
SELECTION = f"snapkv:{BUDGET},window:{WINDOW}"
ANSWER = Sampling(temperature=0.0, max_tokens=40, ignore_eos=True)
KEPT = {300: PromptSelection(6, 16, 300, 16), 165: PromptSelection(6, 8, 165, 16), 100: None}
LENGTHS = tuple(KEPT)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("observed") / "llama", "llama_yarn", vocab_size=777)


def loaded(model: Path, **settings: object) -> Runner:
    config = {"threads": 1, "dtype": "float32", "kv_selection": SELECTION} | settings
    return load_runner(EngineConfig(str(model), **config))  # type: ignore[arg-type]


class Choosing(Side):
    """One worker's engine that selects."""

    def __init__(self, model: Path, loop: type, pages: int = 64) -> None:
        super().__init__(model, loop, pages, kv_selection=SELECTION)


def asked(length: int, seed: int = 1) -> EngineRequest:
    return request(prompt_of(length, seed), ANSWER)


def local(side: Side, length: int, key: int = 1, forget: bool = True) -> list[int]:
    side.say(ch.Admit(key, asked(length), True, 30.0))
    side.finish(forget)
    return side.tokens(key)


@pytest.fixture(scope="module")
def wanted(model: Path) -> dict[int, list[int]]:
    """Answers by prompt's length, each read alone by the worker that writes it."""
    return {length: local(Choosing(model, DecodeLoop), length) for length in LENGTHS}


def paid(model: Path, length: int) -> torch.Tensor:
    """Returns the attention that the prompt's last tokens pay to each run of 16 tokens in transformers.

    The sum over layers and heads, (runs,).
    """
    theirs = reference(model)
    theirs.config._attn_implementation = "eager"
    with torch.no_grad():
        attentions = theirs(torch.tensor([prompt_of(length)]), output_attentions=True).attentions
    first = KEPT[length].watched
    found = torch.stack(list(attentions))[:, 0, :, first:, :first].sum((0, 1, 2))
    return found.view(-1, 16).sum(1)


def masked(length: int, tokens: int, chosen: list[int]) -> torch.Tensor:
    """The mask of the definition, (1, 1, tokens, tokens)."""
    query, key = torch.arange(tokens)[:, None], torch.arange(tokens)[None]
    kept = torch.isin(key // 16, torch.tensor(chosen)) | (key >= KEPT[length].watched)
    seen = (key <= query) & ((query < length) | kept)
    return torch.zeros(tokens, tokens).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]


@pytest.mark.parametrize("length", [300, 165])
def test_answers_are_those_of_transformers_under_the_mask_that_its_own_attention_chooses(model, wanted, length):
    chosen = KEPT[length].chosen(paid(model, length).tolist())
    tokens = [*prompt_of(length), *wanted[length]]
    with torch.no_grad():
        logits = reference(model)(
            torch.tensor([tokens]), attention_mask=masked(length, len(tokens), chosen)
        ).logits[0]
    assert logits[length - 1 : -1].argmax(-1).tolist() == wanted[length]
    with torch.no_grad():
        whole = reference(model)(torch.tensor([tokens])).logits[0]
    assert whole[length - 1 : -1].argmax(-1).tolist() != wanted[length], "what is left out would be missed"


def test_a_worker_that_reads_its_prompts_in_company_gives_the_same_answers_and_what_is_not_chosen(model, wanted):
    side = Choosing(model, DecodeLoop, pages=128)
    side.say(*(ch.Admit(key, asked(length), True, 30.0) for key, length in enumerate(LENGTHS, 1)))
    leased = list[int]()
    while side.loop.turn([]):
        side.forget()
        leased.append(side.pool.snapshot_counts().leased)
    assert [side.tokens(key) for key in (1, 2, 3)] == list(wanted.values())
    assert max(leased) > leased[-4] + 10
    side.pool.check()


@pytest.mark.parametrize("length", LENGTHS)
def test_a_handoff_ships_what_is_kept_and_the_answer_is_the_same(model, wanted, length, monkeypatch):
    monkeypatch.setattr("tests.decode_worker.test_windows.request", lambda prompt: request(prompt, ANSWER))
    prefill, decode = Choosing(model, PrefillLoop), Choosing(model, DecodeLoop)
    shipped = handed_over(prefill, decode, prompt_of(length))
    decode.finish()
    assert decode.tokens(1) == wanted[length]
    blocks = range(-(-length // 16))
    kept = KEPT[length]
    assert shipped == (list(blocks) if kept is None else [n for n in blocks if n < kept.slots or n >= kept.first])
    if kept is not None:
        assert decode.most <= len(shipped) + 3
        assert not decode.pool.blocks.page_of, "nothing that depends on a choice may be found by others"
    for side in (prefill, decode):
        side.pool.check()
        assert side.loop.snapshot().at_baseline


def test_prefixes_are_found_up_to_the_tokens_that_choose(model, wanted):
    side = Choosing(model, DecodeLoop)
    assert local(side, 300, forget=False) == wanted[300]
    assert len(side.pool.blocks.page_of) == 18, "the prompt's own blocks alone"
    side.tape.clear()
    side.say(ch.Admit(2, asked(300), True, 30.0))
    side.finish()
    (cached,) = [o.cached_tokens for t in side.tape.of(ch.Tokens) for o in t.outputs if not o.run.output_index]
    assert (side.tokens(2), cached) == (wanted[300], 16 * 16)


def test_an_answer_that_goes_on_elsewhere_chooses_what_its_prompt_chose(model, wanted, monkeypatch):
    prompt, said = prompt_of(300), wanted[300][:23]
    again = msgspec.structs.replace(request(prompt, ANSWER), token_ids=(*prompt, *said))
    side = Choosing(model, DecodeLoop)
    side.say(ch.Admit(1, again, True, 30.0))
    side.finish()
    assert side.tokens(1) == wanted[300][23:]
    monkeypatch.setattr("tests.decode_worker.test_windows.request", lambda prompt: again)
    prefill, decode = Choosing(model, PrefillLoop), Choosing(model, DecodeLoop)
    handed_over(prefill, decode, again.token_ids)
    decode.finish()
    assert decode.tokens(1) == wanted[300][23:]


def test_a_preempted_sequence_reads_its_prompt_again_and_goes_on_as_it_would_have(model, wanted):
    side = Choosing(model, DecodeLoop, pages=60)
    side.say(*(ch.Admit(key, asked(300), True, 30.0) for key in (1, 2)))
    for at in range(300):
        if not side.loop.turn([]):
            break
        if at in (15, 35):
            scheduler = side.loop.scheduler
            scheduler._preempt(scheduler.running[-1])
        side.forget()
    assert side.loop.scheduler.preemptions > 1
    assert [side.tokens(key) for key in (1, 2)] == [wanted[300]] * 2


def test_a_second_reader_brings_all_that_is_chosen_anew(model):
    decode = Choosing(model, DecodeLoop)
    decode.say(ch.Admit(1, asked(300), False, 30.0))
    (admitted,) = decode.tape.of(ch.Admitted)
    assert (admitted.slots, admitted.unseen) == (6, (6, 16))
    came = ch.BlocksReceived(1, 1, (0, 1, 2, 16))
    decode.say(ch.ReceiveOpened(1, 1), came, ch.ReceiveClosed(1, 1), ch.Rearm(1, admitted.lease, 2))
    assert decode.tape.of(ch.Rearmed)[0].received_blocks == (16,)


def test_drafts_that_are_verified_behind_a_choice_change_no_token(model, wanted):
    side = Choosing(model, DecodeLoop)
    drafter = Eager(Oracle({"r": wanted[300]}, 0.6, 777, 0), seed=0)
    side.loop.drafter = side.loop.scheduler.drafter = drafter
    assert local(side, 300) == wanted[300]
    assert 0 < drafter.tally.accepted < drafter.tally.verified


def test_torchs_own_ops_and_steps_one_by_one_choose_and_answer_alike(model, wanted, monkeypatch):
    few = wanted[165][:8]
    for name, value in (("BATON_CHECK_STEP", "1"), ("BATON_STEP", "ops")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert local(Choosing(model, DecodeLoop), 165)[:8] == few
    none = SimpleNamespace(library=lambda: None, set_threads=lambda count: None)
    monkeypatch.setattr("baton.engine.backends.loading.native", none)
    assert local(Choosing(model, DecodeLoop), 165)[:8] == few


def test_pages_of_several_runs_are_scored_whole(model):
    found = dict[int, list[float]]()
    for size in (16, 48):
        runner = widened(loaded(model), size)
        memory = bytearray(-(-300 // size) * runner.spec.layout.page_bytes)
        runner.bind(memoryview(memory), -(-300 // size))
        step = SequenceStep(1, prompt_of(300), 0, list(range(-(-300 // size))), is_prefill=True, watch=240)
        found[size] = runner.run(StepPlan((step,))).observed[1].tolist()
    assert [sum(found[16][at : at + 3]) for at in range(0, 15, 3)] == pytest.approx(found[48])


@pytest.mark.parametrize(
    ("architecture", "said"),
    [("deepseek_v2", "latent attention"), ("mistral", "layers that see a window")],
)
def test_what_can_not_be_chosen_with_is_refused_by_name(tmp_path, architecture, said):
    path = make(tmp_path / architecture, architecture)
    with pytest.raises(ConfigError, match=rf"worker\.kv_selection .* isn't known with {said}"):
        loaded(path)
