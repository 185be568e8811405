"""Handoffs between a worker whose layers with a window have pages of their own and one whose pages have all.

Real checkpoints, real loops on both sides, and the blocks that the prefill worker's I/O side would send. Whatever
no lease has is evicted and overwritten between any two steps, so that a page which a token should not read, or
which came without some of its layers, would show in the answer.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from baton.decode_worker.engine.loop import DecodeLoop
from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.engine.wide_pages import widened
from baton.kv.transport.loopback import LoopbackTransport
from baton.prefill_worker.engine.loop import PrefillLoop
from baton.prefill_worker.io.handoff_frames import Sender
from baton.prefill_worker.io.service import DecodePeers, PrefillCall, PrefillService
from baton.protos import channel as ch
from baton.protos.nouns import EngineRequest, KvLayout
from tests.conformance.checkpoints import make
from tests.conformance.drive import Driver
from tests.decode_worker.test_windows import ANSWER, Side, prompt_of, request
from tests.thorough import later

KINDS = ("gpt_oss", later("gemma3"), later("gemma3n"))  # gemma3: test_own_windows
WAYS = [("shared", "own"), ("own", "shared")]
LENGTHS = (5, 33, 300)


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("kinds") / str(request.param), str(request.param), vocab_size=1013)


@pytest.fixture(scope="module")
def wanted(model: Path) -> dict[int, list[int]]:
    """Answers to prompts by length, with every page kept."""
    driver = Driver(load_runner(EngineConfig(str(model), threads=1, dtype="float32")), pages=80)
    return {n: driver.answer([prompt_of(n)], ANSWER)[0] for n in LENGTHS}


def side(model: Path, loop: type, window_pages: str, pages: int = 160) -> Side:
    return Side(model, loop, pages, window_pages=window_pages)


def layout_of(one: Side) -> KvLayout:
    return one.loop.spec.layout


class Link:
    """Plays the prefill worker's I/O side of handoffs to ``decode``, with blocks that are moved at once."""

    def __init__(self, prefill: Side, decode: Side) -> None:
        self.prefill, self.decode = prefill, decode
        sender = Sender("prefill-0", "m", prefill.loop.spec.fingerprint, layout_of(prefill))
        peers = DecodePeers(layout_of=self._layout)
        self._io = PrefillService(prefill.say, prefill.memory, sender, LoopbackTransport({}), lambda: 0.0, peers)

    async def _layout(self, address: str) -> KvLayout:
        return layout_of(self.decode)

    async def compute(self, key: int, call: PrefillCall) -> None:
        """Has the prefill worker read the prompt."""
        self.prefill.say(await self._io._prompt(key, call))
        self.prefill.finish()

    async def move(self, key: int, call: PrefillCall, admitted: ch.Admitted, most: int = 10**6) -> list[int]:
        """Writes up to ``most`` blocks, the last ones first, to where the lease wants them; returns which."""
        wire = await self._io._wire(call)
        assert wire.paging is not None
        assert wire.paging.blocks == len(admitted.hashes)
        ready = [told for told in self.prefill.tape.of(ch.BlocksReady) if told.key == key]
        pieces = [piece for told in ready for block in told.blocks for piece in wire.take(block)]
        for piece in pieces[::-1][:most]:
            assert wire.hash(piece) == admitted.hashes[piece.index], "each page comes under its own hash"
            payload, _ = wire.payload(piece, self.prefill.memory)
            self.decode.memory.page(admitted.pages[piece.index])[:] = payload
        return [piece.index for piece in pieces[::-1][:most]]

    async def hand_over(self, key: int, asked: EngineRequest) -> list[int]:
        """Admits, reads and commits ``asked``; returns the blocks that were shipped."""
        self.decode.say(ch.Admit(key, asked, False, 30.0))
        admitted = self.decode.tape.of(ch.Admitted)[-1]
        call = call_of(asked, admitted)
        await self.compute(key, call)
        numbers = await self.move(key, call, admitted)
        assert sorted(numbers) == list(range(admitted.held_blocks, len(admitted.hashes)))
        self.commit(key, numbers)
        return numbers

    def commit(self, key: int, numbers: list[int], epoch: int = 1) -> None:
        done = self.prefill.tape.of(ch.PrefillDone)[-1]
        self.prefill.say(ch.SendClosed(done.key))
        came = ch.ReceiveOpened(key, epoch), ch.BlocksReceived(key, epoch, tuple(numbers))
        self.decode.say(*came, ch.Commit(key, epoch, done.first, 0))
        self.decode.say(ch.ReceiveClosed(key, epoch))


def call_of(asked: EngineRequest, admitted: ch.Admitted, received: tuple[int, ...] = ()) -> PrefillCall:
    return PrefillCall(asked, "m", "decode-0", b"l" * 16, 1, admitted.held_blocks, received)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("reads", "writes"), WAYS)
async def test_a_handoff_to_a_worker_of_the_other_kind_changes_no_token(
    model: Path, wanted: dict[int, list[int]], reads: str, writes: str, length: int
) -> None:
    link = Link(side(model, PrefillLoop, reads), side(model, DecodeLoop, writes))
    shipped = await link.hand_over(1, request(prompt_of(length)))
    link.decode.finish()
    assert link.decode.tokens(1) == wanted[length]
    if writes == "own":
        blocks, windows = -(-length // 16), layout_of(link.decode).windows
        shown = [blocks - max(0, length - window + 1) // 16 for window in windows[1:]]
        assert len(shipped) == blocks + sum(shown), "what is behind a window stays where it is"
    for one in (link.prefill, link.decode):
        one.pool.check()
        assert one.loop.snapshot().at_baseline


@pytest.mark.parametrize(("reads", "writes"), WAYS)
async def test_a_conversation_goes_on_from_what_both_kinds_have_cached(
    model: Path, wanted: dict[int, list[int]], reads: str, writes: str
) -> None:
    link = Link(side(model, PrefillLoop, reads, 400), side(model, DecodeLoop, writes, 400))
    alone = Driver(load_runner(EngineConfig(str(model), threads=1, dtype="float32")), pages=80)
    await link.hand_over(1, request(prompt_of(300)))
    link.decode.finish(forget=False)
    longer = (*prompt_of(300), *wanted[300][:40], *prompt_of(60, seed=2))
    shipped = await link.hand_over(2, request(longer))
    link.decode.finish(forget=False)
    assert link.decode.tokens(2) == alone.answer([longer], ANSWER)[0]
    assert min(shipped) >= 300 // 16, "the receiver has the blocks before"
    assert link.prefill.tape.of(ch.PrefillDone)[1].cached_tokens == 300 // 16 * 16


async def test_windows_that_were_given_back_are_computed_again_for_whole_blocks(
    model: Path, wanted: dict[int, list[int]]
) -> None:
    """The prefill worker read the prompt for one of its kind before, and has the last window's pages alone."""
    prefill = side(model, PrefillLoop, "own", 200)
    for key in (1, 2):
        prefill.say(ch.Prefill(key, request(prompt_of(300)), 0, ()))
        prefill.finish(forget=False)
        prefill.say(ch.SendClosed(key))
    assert prefill.tape.of(ch.PrefillDone)[1].cached_tokens
    tables = len(layout_of(prefill).windows)
    named = list(prefill.pool.blocks.page_of)
    kept = [prefill.pool.keep(block) for block in named[: len(named) * 2 // 3]]
    prefill.forget()
    for page in kept:
        prefill.pool.unkeep(page)
    link = Link(prefill, side(model, DecodeLoop, "shared"))
    await link.hand_over(3, request(prompt_of(300)))
    link.decode.finish()
    assert link.decode.tokens(3) == wanted[300]
    assert tables * 19 <= prefill.most <= prefill.pool.pages


@pytest.mark.parametrize(("reads", "writes"), WAYS)
async def test_a_second_prefill_brings_what_the_first_did_not(
    model: Path, wanted: dict[int, list[int]], reads: str, writes: str
) -> None:
    decode = side(model, DecodeLoop, writes)
    asked = request(prompt_of(33))
    decode.say(ch.Admit(1, asked, False, 30.0))
    admitted = decode.tape.of(ch.Admitted)[-1]
    first = Link(side(model, PrefillLoop, reads), decode)
    await first.compute(1, call_of(asked, admitted))
    numbers = await first.move(1, call_of(asked, admitted), admitted, most=2)
    decode.say(ch.ReceiveOpened(1, 1), ch.BlocksReceived(1, 1, tuple(numbers)))
    decode.say(ch.Rearm(1, admitted.lease, 2))
    had = decode.tape.of(ch.Rearmed)[-1].received_blocks
    assert len(had) == 2
    decode.say(ch.ReceiveClosed(1, 1))
    second = Link(side(model, PrefillLoop, reads), decode)
    call = call_of(asked, admitted, had)
    await second.compute(2, call)
    rest = await second.move(2, call, admitted)
    assert sorted((*rest, *had)) == list(range(len(admitted.hashes)))
    second.commit(1, rest, epoch=2)
    decode.finish()
    assert decode.tokens(1) == wanted[33]


@pytest.mark.parametrize(("reads", "writes"), WAYS)
async def test_pages_of_48_tokens_are_converted_alike(
    model: Path, wanted: dict[int, list[int]], reads: str, writes: str
) -> None:
    def wide(loop: type, window_pages: str) -> Side:
        config = EngineConfig(str(model), threads=1, dtype="float32", window_pages=window_pages)  # type: ignore[arg-type]
        return Side(model, loop, 100, widened(load_runner(config), 48))

    link = Link(wide(PrefillLoop, reads), wide(DecodeLoop, writes))
    await link.hand_over(1, request(prompt_of(300)))
    link.decode.finish()
    assert link.decode.tokens(1) == wanted[300]


async def test_a_prompt_whose_whole_blocks_can_never_fit_is_refused_at_once(model: Path) -> None:
    prefill = side(model, PrefillLoop, "own", 50)
    link = Link(prefill, side(model, DecodeLoop, "shared"))
    with pytest.raises(AssertionError):
        await link.hand_over(1, request(prompt_of(300)))
    (failed,) = prefill.tape.of(ch.PrefillFailed)
    assert failed.error.type == "PoolExhausted"
    assert "wants whole blocks" in failed.error.message
    prefill.say(ch.SendClosed(1))
    assert prefill.loop.snapshot().at_baseline


async def test_whole_prompts_and_others_share_a_pool(model: Path, wanted: dict[int, list[int]]) -> None:
    prefill, prompts = side(model, PrefillLoop, "own", 100), {1: 300, 2: 300, 3: 120, 4: 33}
    for key, length in prompts.items():
        asked = request(prompt_of(length, seed=key))
        prefill.say(ch.Prefill(key, asked, 0, (), whole=key % 2 == 0))
    for _ in range(100):
        prefill.loop.turn([])
        prefill.pool.check()
        prefill.forget()
        for done in prefill.tape.of(ch.PrefillDone):
            prefill.say(ch.SendClosed(done.key))
    assert sorted(done.key for done in prefill.tape.of(ch.PrefillDone)) == list(prompts)
    assert not prefill.tape.of(ch.PrefillFailed)
    assert prefill.loop.snapshot().at_baseline
    alone = Driver(load_runner(EngineConfig(str(model), threads=1, dtype="float32")), pages=80)
    for done in prefill.tape.of(ch.PrefillDone):
        prompt = prompt_of(prompts[done.key], seed=done.key)
        first = msgspec.structs.replace(ANSWER, max_tokens=1)
        assert [done.first.token_ids[0]] == alone.answer([prompt], first)[0]
