"""Prompts are read ahead for drafts while their KV arrives, each in its turn."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from baton.decode_worker.engine.ahead import PromptReader


class Reading:
    """A drafter for which so many tokens of each sequence are left to read."""

    def __init__(self, left: dict[int, int]) -> None:
        self.left = left

    def read_prompt(self, sequence: Any, idle: bool) -> int:
        count = min(4, self.left[sequence.seq])
        self.left[sequence.seq] -= count
        return count


def ahead_of(left: dict[int, int]) -> tuple[PromptReader, Reading]:
    drafter, clock = Reading(left), iter(range(1 << 20))
    found = PromptReader(drafter, lambda: next(clock) * 1e-6)  # type: ignore[arg-type]
    for seq in left:
        found.begin(SimpleNamespace(seq=seq, draft_room=8))  # type: ignore[arg-type]
    return found, drafter


def test_beside_steps_a_prompt_that_is_all_read_holds_up_no_other() -> None:
    ahead, drafter = ahead_of({1: 4, 2: 8})
    for _ in range(12):
        ahead.turn(step_s=1.0)
    assert drafter.left == {1: 0, 2: 0}


def test_without_steps_everything_is_read_and_then_there_is_nothing_to_do() -> None:
    ahead, drafter = ahead_of({1: 4, 2: 8})
    turns = 0
    while ahead.turn(step_s=0.0):
        turns += 1
        assert turns < 20
    assert drafter.left == {1: 0, 2: 0}
    assert not ahead.turn(step_s=0.0)
