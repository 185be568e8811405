"""Plays what simulated clusters consist of: drafts that stand, chats with calls, pages that are converted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest

from baton.drill.checks import chat
from baton.drill.checks.text import AnswerText
from baton.drill.draw import draw
from baton.drill.run import play
from baton.drill.scenario import Request, Size
from baton.engine.speculate.draft import Draft, SequenceView
from baton.engine.speculate.drafter import Drafter
from baton.engine.states import SequenceStates
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
