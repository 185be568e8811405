"""Plays what simulated clusters consist of: drafts that stand, chats with calls, pages that are converted."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
import pytest

from baton.drill.checks import chat
from baton.drill.checks.text import AnswerText
from baton.drill.draw import draw
from baton.drill.language.oracle import Sight, attended, seen
from baton.drill.loop import SeededLoop
from baton.drill.machines.network import Network
from baton.drill.machines.process import Process, owning_factory
from baton.drill.models.float_pages import FloatRunner, float_layout
from baton.drill.models.runner import Timing
from baton.drill.run import play
from baton.drill.scenario import PageKind, Request, Size
from baton.engine.plan import SequenceStep, StepPlan
from baton.engine.speculate.draft import Draft, SequenceView
from baton.engine.speculate.drafter import Drafter
from baton.engine.states import SequenceStates
from baton.kv.layout import bridge
from baton.kv.layout.bridge import with_codec
from baton.kv.layout.selection import PromptSelection
from baton.kv.layout.table_bridge import TableBridge

ALL = Size(http=1.0, chats=0.8, drafted=1.0, paged=1.0, faults=0)
STATES, STATEFUL = Size(paged=1.0, faults=0, requests=6, workers=2), 54  # a size, and a seed with recurrent states
SEED = 0  # one whose workers have pages of both kinds


def test_drafts_stand_chats_call_tools_and_pages_are_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[str] = Counter()
    judge, part, joined, wrong = Drafter.judge, TableBridge.part, TableBridge.joined, chat.wrong_chat

    def judged(self: Drafter, text: SequenceView, draft: Draft, accepted: int, *rest: Sequence[int]) -> None:
        seen["accepted"] += accepted
        seen["rejected"] += len(draft.tokens) - accepted
        judge(self, text, draft, accepted, *rest)

    def parted(self: TableBridge, page: memoryview, number: int, table: int) -> memoryview:
        seen["divided"] += 1
        return part(self, page, number, table)

    def rejoined(self: TableBridge, pages: Sequence[memoryview]) -> memoryview:
        seen["joined"] += 1
        return joined(self, pages)

    def read(request: Request, reply: chat.ChatReply, want: Sequence[AnswerText]) -> Iterator[str]:
        for said in reply.said.values():
            seen.update(thoughts=bool(said.thought), calls=len(said.calls), contents=bool(said.content))
        return wrong(request, reply, want)

    monkeypatch.setattr(Drafter, "judge", judged)
    monkeypatch.setattr(TableBridge, "part", parted)
    monkeypatch.setattr(TableBridge, "joined", rejoined)
    monkeypatch.setattr(chat, "wrong_chat", read)
    verdict = play(draw(SEED, ALL))
    assert verdict.held, verdict.violations
    wanted = ("accepted", "rejected", "divided", "joined", "thoughts", "calls", "contents")
    assert all(seen[what] for what in wanted), seen


@pytest.mark.thorough  # `make new-seeds` draws such workers
def test_kv_of_floats_is_handed_over_in_several_dtypes_and_codecs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, encode, convert = set[str](), bridge.encode, bridge.from_float32

    def encoded(codec: str, *rest: object) -> bytes:
        seen.add(codec)
        return encode(codec, *rest)  # type: ignore[arg-type]

    def converted(values: np.ndarray, dtype: str) -> np.ndarray:
        seen.add(dtype)
        return convert(values, dtype)

    monkeypatch.setattr(bridge, "encode", encoded)
    monkeypatch.setattr(bridge, "from_float32", converted)
    kinds = (
        ("float32", "none"),
        ("bfloat16", "int8"),
        ("float16", "fp8"),
        ("float32", "int4"),
        ("float16", "none"),
    )
    drawn = msgspec.structs.replace(
        draw(5, Size(paged=0.0, faults=0, scaled=0.0, requests=12, flooded=0.0)),
        decode=4, local_max=0, policy="round_robin",
        page_kinds=tuple(PageKind(dtype=dtype, codec=codec or "none") for dtype, codec in kinds),
    )  # fmt: skip
    verdict = play(drawn)
    assert verdict.held, verdict.violations
    assert seen == {"int8", "fp8", "int4", "bfloat16", "float16", "float32"}


@pytest.mark.parametrize(("taken", "told"), [("none", 1), ("int8", 0)])
def test_kv_that_was_coded_is_seen_by_who_takes_in_nothing_coded(taken: str, told: int) -> None:
    said = list[str]()
    runner = FloatRunner(
        "m",
        PageKind(dtype="bfloat16", codec=taken),
        said.append,
        Timing(lambda _: 0.0, lambda _: None, lambda: 0.0),
        None,
    )
    layout = runner.spec.layout
    memory = memoryview(bytearray(layout.page_bytes))
    runner.bind(memory, 1)
    runner.run(StepPlan((SequenceStep(0, (7, 8, 9), 0, (0,)),)))
    coded = with_codec(float_layout(PageKind(dtype="bfloat16")), "int8")
    bridge.land(bridge.Bridge(float_layout(PageKind(dtype="bfloat16")), coded).convert(memory), memory, coded)
    runner.run(StepPlan((SequenceStep(0, (10,), 3, (0,)),)))
    assert len(set(said)) == told


@pytest.mark.thorough  # `make new-seeds` draws such models
def test_prompts_ends_select_what_answers_see(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, original = list[int](), PromptSelection.chosen

    def chosen(self: PromptSelection, scores: Sequence[float]) -> list[int]:
        kept.append(len(scores) - self.slots)
        return original(self, scores)

    monkeypatch.setattr(PromptSelection, "chosen", chosen)
    drawn = draw(5, Size(paged=0.0, floats=0.0, faults=0, requests=12, flooded=0.0))
    verdict = play(msgspec.structs.replace(drawn, sight=Sight(selected="snapkv:48,window:32")))
    assert verdict.held, verdict.violations
    assert any(dropped > 0 for dropped in kept)


def test_what_a_selection_sees_is_told_by_hand() -> None:
    rows = [bytes([at]) for at in range(80)]
    assert seen(rows, 70, Sight(selected="sinks:16,window:32")) == [*range(16), *range(32, 80)]
    assert seen(rows[:50], 40, Sight(selected="sinks:0,window:16")) == [*range(32, 50)]
    by_score = sorted(range(2), key=lambda run: -attended(rows[16 * run + 15], rows[63]))
    best = by_score[0]
    assert seen(rows[:70], 64, Sight(selected="snapkv:48,window:32")) == [
        *range(16 * best, 16 * best + 16),
        *range(32, 70),
    ]
    assert seen(rows[:64], 64, Sight(selected="snapkv:48,window:32")) == [*range(64)]


@pytest.mark.thorough  # `make new-seeds` draws such models
def test_recurrent_states_are_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    landed, original = list[int](), SequenceStates.landed

    def lands(self: SequenceStates, tokens: int, prompt: int, size: int, hash_of: Callable[[int], bytes]) -> None:
        landed.append(tokens)
        original(self, tokens, prompt, size, hash_of)

    monkeypatch.setattr(SequenceStates, "landed", lands)
    verdict = play(draw(STATEFUL, STATES))
    assert verdict.held, verdict.violations
    assert verdict.answered
    assert landed


def test_a_process_that_stands_still_goes_on_where_it_stood_and_gets_what_came_meanwhile() -> None:
    loop, seen = SeededLoop(random.Random(0)), list[tuple[str, float]]()

    async def run() -> None:
        network, heard = Network(random.Random(0)), asyncio.Event()
        network.listen("server:1", "server", object())
        connection = network.connect("client", "server:1")
        assert connection is not None
        server, client = Process("server"), Process("client")

        async def serves() -> None:
            await heard.wait()
            seen.append(("heard", loop.time()))

        async def sends() -> None:
            connection.up.send(heard.set, 100)
            await asyncio.sleep(1.0)
            seen.append(("slept", loop.time()))

        serving, sending = server.spawn(serves()), client.spawn(sends())
        await asyncio.sleep(0.0)
        await asyncio.sleep(0.0)
        client.stand()  # what it has sent arrives all the same
        await asyncio.wait({serving})
        await asyncio.sleep(5.0)
        client.go_on()
        await asyncio.wait({sending})
        client.stand()
        ended = client.spawn(asyncio.sleep(60.0))
        client.kill()
        await asyncio.wait({ended})

    loop.set_task_factory(owning_factory)
    loop.run_until_complete(run())
    loop.close()
    (_, heard), (_, slept) = seen
    assert heard < 0.1
    assert 5.0 <= slept < 5.1
    assert loop.time() < 10.0
