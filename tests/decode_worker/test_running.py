"""Pages that an answer gives up by running score: answers beside transformers' under the same mask, what it holds.

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
from baton.kv.layout.running import RunningScores
from baton.kv.layout.selection import AttentionSelection, PromptSelection
from baton.prefill_worker.engine.loop import PrefillLoop
from baton.protos import channel as ch
from baton.protos.nouns import EngineRequest, Sampling
from tests.conformance.checkpoints import make, reference
from tests.decode_worker.test_windows import Side, prompt_of, request
from tests.decode_worker.test_windows import hand_over as handed_over
from tests.engine.speculate.oracle import Eager, Oracle
from tests.thorough import first_now

H2O = AttentionSelection(96, 32, running=True)
ANSWER = Sampling(temperature=0.0, max_tokens=44, ignore_eos=True)
LENGTHS = (230, 70)  # beyond the budget, and within it until the answer has some tokens
MOST = 96 // 16 + 2  # pages that an answer holds


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("running") / "llama", "llama_yarn", vocab_size=777)


class Weighing(Side):
    """One worker's engine whose answers give up pages."""

    def __init__(self, model: Path, loop: type, pages: int = 64, kv_selection: str = str(H2O)) -> None:
        super().__init__(model, loop, pages, kv_selection=kv_selection)


def asked(length: int) -> EngineRequest:
    return request(prompt_of(length), ANSWER)


def local(side: Side, length: int, key: int = 1) -> list[int]:
    side.say(ch.Admit(key, asked(length), True, 30.0))
    side.finish()
    return side.tokens(key)


@pytest.fixture(scope="module")
def wanted(model: Path) -> dict[int, list[int]]:
    """Answers by prompt's length, each read alone by the worker that writes it."""
    return {length: local(Weighing(model, DecodeLoop), length) for length in LENGTHS}


@pytest.mark.parametrize("length", first_now(LENGTHS))
def test_answers_are_those_of_transformers_under_the_mask_that_its_own_attention_makes(model, wanted, length):
    """The mask grows by a row for each token, whose own attention decides what the next ones see."""
    theirs, kept = reference(model), H2O.prompt_selection_of(length, 16)
    tokens, scores = [*prompt_of(length), *wanted[length]], RunningScores(H2O, 16, length, kept)
    seen = torch.ones(len(tokens), len(tokens)).tril().bool()
    blocks, mine = list(range(-(-length // 16))), []
    for at in range(length - 1, len(tokens) - 1):
        seen[at] &= torch.isin(torch.arange(len(tokens)) // 16, torch.tensor(blocks))
        part = torch.zeros(at + 1, at + 1).masked_fill(~seen[: at + 1, : at + 1], torch.finfo(torch.float32).min)
        with torch.no_grad():
            found = theirs(
                torch.tensor([tokens[: at + 1]]), attention_mask=part[None, None], output_attentions=True
            )
        mine.append(int(found.logits[0, -1].argmax()))
        paid = torch.nn.functional.pad(torch.stack(list(found.attentions))[:, 0].sum((0, 1)), (0, -(at + 1) % 16))
        if at < length - 1:
            continue
        chosen = None
        if at == length - 1 and kept is not None:
            chosen = kept.chosen(paid[kept.watched :].sum(0).view(-1, 16).sum(1)[: kept.first].tolist())
            blocks = [*chosen, *range(kept.first, len(blocks))]
        elif at >= length:
            scores.add(paid[-1].view(-1, 16).sum(1)[torch.tensor(blocks)].numpy()[None])
            chosen = scores.kept_at(at + 1)
            if chosen is not None:
                before = [block for block in blocks if block < scores.first]
                blocks = [*(before[i] for i in chosen), *(block for block in blocks if block >= scores.first)]
        if (at + 1) % 16 == 0:
            blocks.append((at + 1) // 16)
    assert mine == wanted[length]
    assert len(blocks) <= MOST
    with torch.no_grad():
        whole = theirs(torch.tensor([tokens])).logits[0]
    assert whole[length - 1 : -1].argmax(-1).tolist() != wanted[length], "what is given up would be missed"


def test_an_answer_holds_no_more_pages_than_its_budget_and_nothing_of_it_is_found(model, wanted):
    side = Weighing(model, DecodeLoop)
    assert local(side, 70) == wanted[70]
    assert 70 + 44 > side.most * 16 > 96
    assert side.most <= MOST
    assert len(side.pool.blocks.page_of) <= 70 // 16
    side.pool.check()


def test_answers_in_company_are_those_alone(model, wanted):
    side = Weighing(model, DecodeLoop, pages=96)
    side.say(*(ch.Admit(key, asked(length), True, 30.0) for key, length in enumerate(LENGTHS, 1)))
    side.finish()
    assert [side.tokens(key) for key in (1, 2)] == list(wanted.values())


@pytest.mark.parametrize("length", LENGTHS)
def test_a_handoff_brings_the_same_answer_also_while_its_stream_is_still_open(model, wanted, length, monkeypatch):
    monkeypatch.setattr("tests.decode_worker.test_windows.request", lambda prompt: request(prompt, ANSWER))
    closing = []
    prefill, decode = Weighing(model, PrefillLoop), Weighing(model, DecodeLoop)
    say = decode.say
    decode.say = lambda *messages: (  # type: ignore[method-assign]
        closing.extend(messages) if isinstance(messages[0], ch.ReceiveClosed) else say(*messages)
    )
    shipped = handed_over(prefill, decode, prompt_of(length))
    while len(decode.tokens(1)) < 30:
        decode.loop.turn([])
        decode.pool.check()
        decode.forget()
    leased = decode.pool.snapshot_counts().leased
    say(*closing)
    given_up = {230: 2, 70: 0}[length]
    assert decode.pool.snapshot_counts().leased == leased - given_up, "they come back with the stream's end"
    decode.finish()
    assert decode.tokens(1) == wanted[length]
    assert len(shipped) == min(-(-length // 16), 96 // 16 + 1)
    for side in (prefill, decode):
        side.pool.check()
        assert side.loop.snapshot().at_baseline


def test_a_preempted_answer_reads_all_again_and_gives_up_the_same_pages(model, wanted):
    side = Weighing(model, DecodeLoop, pages=60)
    side.say(*(ch.Admit(key, asked(length), True, 30.0) for key, length in enumerate(LENGTHS, 1)))
    for at in range(300):
        if not side.loop.turn([]):
            break
        if at in (15, 32):
            side.loop.scheduler._preempt(side.loop.scheduler.running[-1])
        side.forget()
    assert side.loop.scheduler.preemptions > 1
    assert [side.tokens(key) for key in (1, 2)] == list(wanted.values())


def test_an_answer_that_goes_on_elsewhere_begins_with_all_that_was_said(model, wanted, monkeypatch):
    prompt, said = prompt_of(230), wanted[230][:23]
    again = msgspec.structs.replace(request(prompt, ANSWER), token_ids=(*prompt, *said))
    monkeypatch.setattr("tests.decode_worker.test_windows.request", lambda prompt: again)
    prefill, decode = Weighing(model, PrefillLoop), Weighing(model, DecodeLoop)
    shipped = handed_over(prefill, decode, again.token_ids)
    kept = PromptSelection(4, 13, 253, 16)
    assert H2O.prompt_selection_of(253, 16) == kept
    assert shipped == [block for block in range(16) if block < kept.slots or block >= kept.first]
    decode.finish()
    assert len(decode.tokens(1)) == 44 - 23
    whole = msgspec.structs.replace(request((*prompt, *said), ANSWER))
    side = Weighing(model, DecodeLoop)
    side.say(ch.Admit(1, whole, True, 30.0))
    side.finish()
    assert decode.tokens(1) == side.tokens(1)[:21]


def test_nothing_is_drafted_for_an_answer_that_gives_up_pages(model, wanted):
    side = Weighing(model, DecodeLoop)
    drafter = Eager(Oracle({"r": wanted[230]}, 0.6, 777, 0), seed=0)
    side.loop.drafter = side.loop.scheduler.drafter = drafter
    assert local(side, 230) == wanted[230]
    assert drafter.tally.verified == 0


@pytest.mark.thorough
def test_torchs_own_ops_and_steps_one_by_one_answer_alike(model, wanted, monkeypatch):
    for name, value in (("BATON_CHECK_STEP", "1"), ("BATON_STEP", "ops")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert local(Weighing(model, DecodeLoop), 70) == wanted[70]
    none = SimpleNamespace(library=lambda: None, set_threads=lambda count: None)
    monkeypatch.setattr("baton.engine.backends.loading.native", none)
    assert local(Weighing(model, DecodeLoop), 70) == wanted[70]


def test_a_preempted_answer_takes_none_of_its_own_blocks_that_the_next_turn_has_cached(model, wanted):
    length, long = 70, msgspec.structs.replace(ANSWER, max_tokens=80)
    prompt, alone = prompt_of(length), Weighing(model, DecodeLoop)
    alone.say(ch.Admit(1, request(prompt, long), True, 30.0))
    alone.finish()
    said = alone.tokens(1)
    side = Weighing(model, DecodeLoop)
    side.say(ch.Admit(1, request(prompt, long), True, 30.0))
    while len(side.tokens(1)) < 60:
        side.loop.turn([])
    turn = (*prompt, *said[:58], *prompt_of(9, 5))
    side.say(ch.Admit(2, request(turn, Sampling(temperature=0.0, max_tokens=1)), True, 30.0))
    while not side.tokens(2):
        side.loop.turn([])
    scheduler = side.loop.scheduler
    scheduler._preempt(next(job for job in scheduler.running if job.sequence.seq == 1))
    scheduler._resume()
    assert scheduler.running[0].pages.held <= length // side.pool.block_tokens
    side.finish(forget=False)
    assert side.tokens(1) == said
