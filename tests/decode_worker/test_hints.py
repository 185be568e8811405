"""A request's hint reaches the pages that it leaves in the cache, on both roles, and changes no token."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from baton.decode_worker.engine.loop import DecodeLoop
from baton.kv.layout import prefix
from baton.prefill_worker.engine.loop import PrefillLoop
from baton.protos import channel as ch
from baton.protos.nouns import Sampling
from tests.conformance.checkpoints import make
from tests.decode_worker.test_windows import Side, prompt_of, request

FEW = Sampling(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("hinted") / "llama", "llama2", vocab_size=777)


def hinted(side: Side) -> set[bool]:
    return {side.pool.supply.cached._kind[page].hinted for page in side.pool.supply.cached}


def test_of_a_prompt_the_blocks_before_a_breakpoint_are_hinted_and_no_others(model: Path) -> None:
    asked = msgspec.structs.replace(request(prompt_of(100), FEW), retained=True, retained_tokens=50)
    for side, say in (
        (Side(model, DecodeLoop), ch.Admit(1, asked, True, 30.0)),
        (Side(model, PrefillLoop), ch.Prefill(1, asked, 0, ())),
    ):
        side.say(say)
        side.finish(forget=False)
        if isinstance(say, ch.Prefill):
            side.say(ch.SendClosed(1))
        order, blocks = side.pool.supply.cached, side.pool.blocks
        kinds = [order._kind[blocks.page_of[block]].hinted for block in chain_of(side, asked.token_ids)]
        assert kinds == [True] * 3 + [False] * 3, "of 50 tokens three blocks are whole"


def chain_of(side: Side, tokens: tuple[int, ...]) -> list[bytes]:
    spec = side.loop.spec
    return prefix.chain(prefix.root(spec.fingerprint, spec.layout.fidelity), tokens, 16)[: len(tokens) // 16]


@pytest.mark.parametrize("retained", [True, False])
def test_pages_are_hinted_where_the_request_says_so_and_answers_are_the_same(model: Path, retained: bool) -> None:
    asked = msgspec.structs.replace(request(prompt_of(100), FEW), retained=retained)
    decode, prefill = Side(model, DecodeLoop), Side(model, PrefillLoop)
    decode.say(ch.Admit(1, asked, True, 30.0))
    decode.finish(forget=False)
    prefill.say(ch.Prefill(1, asked, 0, ()))
    prefill.finish(forget=False)
    prefill.say(ch.SendClosed(1))
    assert hinted(decode) == hinted(prefill) == {retained}
    plain = Side(model, DecodeLoop)
    plain.say(ch.Admit(1, request(prompt_of(100), FEW), True, 30.0))
    plain.finish()
    assert decode.tokens(1) == plain.tokens(1)
