"""Which sequences' recurrent states travel to other hosts: those alone that the hosts don't have."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from baton.engine.backends.ranks import runner
from baton.engine.backends.ranks.memory import show_states
from baton.engine.backends.ranks.shown_states import ShownStates
from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.engine.plan import SequenceStep
from baton.kernels.abi import native
from baton.protos.nouns import Sampling
from tests.conformance.checkpoints import make
from tests.engine.backends.ranks.far_threads import on_hosts
from tests.engine.backends.ranks.threads import SharedDriver
from tests.thorough import later


def item(seq: int, start: int, tokens: int = 1, source: int | None = None, target: int = 0) -> SequenceStep:
    before = None if source is None else (source,)
    return SequenceStep(seq, [7] * tokens, start, (), state_from=before, state_to=(target or 100 + seq,))


def test_a_sequence_that_keeps_its_place_in_the_batch_sends_its_state_never() -> None:
    shown = ShownStates(swaps=True)
    for start in range(3):
        batch = [item(seq, start, source=100 + seq) for seq in (1, 2)]
        assert shown.missing(batch) == []
        assert shown.swapped is bool(start % 2)
        shown.ran(batch)


@pytest.mark.parametrize(
    ("now", "missing"),
    [
        ([item(1, 5, source=101), item(2, 5, source=102)], []),
        ([item(2, 5, source=102), item(1, 5, source=101)], [0, 1]),  # each has the other's place
        ([item(1, 5, source=101), item(3, 9, source=103), item(2, 5, source=102)], [1, 2]),
        ([item(1, 5, source=101), item(3, 0)], []),  # it begins
        ([item(1, 4, source=101), item(2, 5, source=102)], [0]),  # it went back
        ([item(1, 5, source=9), item(2, 5, source=102)], [0]),  # from a state kept elsewhere
        ([item(9, 5, source=101)], [0]),  # another one has its pages
    ],
)
def test_a_state_is_sent_where_the_last_step_left_another_one(
    now: Sequence[SequenceStep], missing: list[int]
) -> None:
    shown = ShownStates(swaps=False)
    shown.ran([item(1, 0, tokens=5), item(2, 4)])
    assert shown.missing(now) == missing
    assert not shown.swapped


def test_after_a_step_that_failed_nothing_counts_as_there() -> None:
    shown = ShownStates(swaps=True)
    shown.ran([item(2, 4)])
    assert shown.missing([item(1, 7, source=9), item(2, 5, source=102)]) == [0, 1]  # and this step fails
    assert shown.missing([item(2, 5, source=102)]) == [0]


@pytest.mark.skipif(native.library() is None, reason="no native kernels here")
@pytest.mark.parametrize("share", ["pp", later("tp")])
def test_states_travel_only_where_a_sequence_changes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: str
) -> None:
    """That answers are one rank's then is what test_hosts.py holds."""
    sent, steps = list[int](), list[int]()

    def counted(ranks: object, items: Sequence[int], swapped: bool) -> None:
        sent.append(len(items))
        show_states(ranks, items, swapped)  # type: ignore[arg-type]

    def ran(self: ShownStates, items: Sequence[SequenceStep]) -> None:
        steps.append(sum(bool(each.start) for each in items))
        record(self, items)

    record = ShownStates.ran
    monkeypatch.setattr(runner, "show_states", counted)
    monkeypatch.setattr(ShownStates, "ran", ran)
    model, widths = str(make(tmp_path, "bamba")), {share: 2}
    config = EngineConfig(model, threads=1, rank_bound_s=60.0, rank_hosts=("elsewhere:1",), **widths)
    made = on_hosts(load_runner(EngineConfig(model, threads=1)).spec, config)
    try:
        answers = Sampling(temperature=0.0, max_tokens=6)
        SharedDriver(made, 16, chunk=48).answer([[1, 2, 3], [4] * 40, [5] * 60], answers)
    finally:
        made.leave()
    assert 0 < sum(sent) < sum(steps) / 2
