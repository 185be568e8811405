"""The choice between graph and megakernel: by tokens first, then by the time of all steps together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from baton.engine.backends.cuda import card_trials, load
from baton.engine.backends.cuda.card_trials import CardTrials
from baton.engine.backends.cuda.gpu import Gpu
from baton.engine.backends.cuda.runner import AT_ONCE
from baton.engine.backends.cuda.step_choice import LONG, REPEATS, WayFigures, chosen, measured, small_steps
from baton.engine.backends.cuda.trial import one_layer, random_weights, spec_of
from baton.engine.backends.cuda.warming import RUNS
from baton.engine.backends.sequence_checks import require_computable
from baton.engine.plan import StepPlan
from baton.kernels.abi.build import CACHE_ENV
from baton.protos.errors import ConfigError

H100 = Gpu("NVIDIA H100", (9, 0), (13, 0), 80 << 30)


@pytest.mark.parametrize(
    ("graph", "mega", "tokens", "taken"),
    [
        ((3e-3, 1e-3), (1e-3, 2e-3), ((1,), (2,)), True),
        ((1e-3, 1e-3), (1e-3, 2e-3), ((1,), (2,)), False),
        ((1e-3, 1e-3), (1e-3, 1e-3), ((1,), (2,)), False),
        ((3e-3, 1e-3), (1e-3, 1e-3), ((1,), (3,)), False),
    ],
)
def test_the_megakernel_is_taken_where_it_is_right_and_takes_less_time(
    graph: tuple[float, ...], mega: tuple[float, ...], tokens: tuple[tuple[int, ...], ...], taken: bool
) -> None:
    found = chosen(WayFigures(graph, ((1,), (2,))), WayFigures(mega, tokens))
    assert found.mega == taken
    assert ("other tokens" in found.why) == (tokens[1] == (3,))


def test_a_graph_that_chooses_no_token_shows_nothing_of_the_megakernel() -> None:
    none = ((1,), (2, -1))
    found = chosen(WayFigures((3e-3, 1e-3), none), WayFigures((1e-3, 1e-3), none))
    assert found == (False, "the graph chose no token, so there is nothing to compare with")


def test_a_step_is_timed_behind_the_runs_that_capture_it_and_every_run_is_compared() -> None:
    times = iter([9.0] * RUNS + [float(number) for number in range(REPEATS)])
    tokens = iter(range(RUNS + REPEATS))

    def run(plan: StepPlan) -> tuple[float, Sequence[int]]:
        return next(times), [next(tokens)]

    prompts, decodes = small_steps(1, 8, 1, 1, 100, 16)
    assert not prompts
    assert measured(run, decodes) == WayFigures(((REPEATS - 1) / 2,), (tuple(range(RUNS + REPEATS)),))


@pytest.mark.parametrize(
    ("sequences", "pages", "context", "wanted"),
    [
        (64, 4000, 8192, [(count, tokens) for tokens in (1, LONG) for count in (8, 4, 2, 1)]),
        (2, 9, 4096, [(2, 1), (1, 1), (2, 48), (1, 48)]),
        (4, 3, 4096, [(3, 1), (2, 1), (1, 1)]),
    ],
)
def test_steps_of_few_rows_are_timed_with_few_and_many_keys(
    sequences: int, pages: int, context: int, wanted: list[tuple[int, int]]
) -> None:
    _, plans = small_steps(sequences, 8, pages, context, 100, 512)
    assert [(len(plan.items), plan.items[0].start + 1) for plan in plans] == wanted
    for plan in plans:
        for item in plan.items:
            require_computable(item, 100, pages)
        assert len({tuple(item.tokens) for item in plan.items}) == len(plan.items)


def test_each_key_that_a_timed_step_reads_was_written_for_its_sequence_alone() -> None:
    prompts, decodes = small_steps(8, 8, 300, 700, 32000, 100)
    written: dict[tuple[int, int], tuple[int, int]] = {}
    for plan in prompts:
        (item,) = plan.items
        require_computable(item, 32000, 300)
        assert len(item.tokens) <= 100
        for at in range(item.start, item.start + len(item.tokens)):
            place = item.pages[at // 16], at % 16
            assert place not in written
            written[place] = item.seq, item.tokens[at - item.start]
    for plan in decodes:
        for item in plan.items:
            read = [written[item.pages[at // 16], at % 16] for at in range(item.start)]
            assert {seq for seq, _ in read} <= {item.seq}
            assert item.sample is not None
            assert list(item.sample.history) == [token for _, token in read] + list(item.tokens)
            assert (item.pages[item.start // 16], item.start % 16) not in written


@pytest.mark.parametrize(
    ("at_once", "kind", "compared"),
    [
        ({"bf16": "", "int4": "step 2 of the trial: off"}, torch.bfloat16, True),
        ({"bf16": "", "int4": "step 2 of the trial: off"}, (4, 64), False),
        ({}, torch.bfloat16, False),
        ({"bf16": ""}, torch.float32, False),
    ],
)
def test_it_is_compared_only_where_the_doctor_found_it_right_on_this_card(
    at_once: dict[str, str],
    kind: torch.dtype | tuple[int, int],
    compared: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(CACHE_ENV, str(tmp_path))
    monkeypatch.setattr(load, "require", lambda: H100)
    program = one_layer(card_trials.usual_attention(4, 2, 16))
    weights = random_weights(program, kind, 1)
    assert not load.is_right_at_once(program, weights), "nothing is kept"
    card_trials.save_record(CardTrials("NVIDIA H100", 1e9, {}, (), at_once), H100)
    assert load.is_right_at_once(program, weights) == compared


def test_without_a_card_nothing_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Gpu:
        raise ConfigError("no NVIDIA driver is here", "device")

    monkeypatch.setattr(load, "require", refuse)
    program = one_layer(card_trials.usual_attention(4, 2, 16))
    assert not load.is_right_at_once(program, random_weights(program, torch.bfloat16, 1))


@pytest.mark.parametrize(
    ("alone", "ahead", "said"),
    [
        ("", "", ""),
        ("step 2 is off", "", "step 2 is off"),
        ("", "step 1, submitted ahead", "step 1, submitted ahead"),
    ],
)
def test_the_megakernel_is_tried_ahead_too_before_it_is_compared(
    alone: str, ahead: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways: list[int] = []

    def found(text: str) -> Callable[..., str]:
        return lambda spec, program, weights, library, how: ways.append(how) or text  # type: ignore[func-returns-value]

    monkeypatch.setattr(load, "tried", found(alone))
    monkeypatch.setattr(load, "tried_ahead", found(ahead))
    monkeypatch.setattr(load, "on_shim", lambda: False)
    program = one_layer(card_trials.usual_attention(4, 2, 16))
    weights = random_weights(program, torch.bfloat16, 1)
    assert load.megakernel_off(spec_of(program, "bfloat16"), program, weights, None) == said  # type: ignore[arg-type]
    assert ways == [AT_ONCE] * (1 if alone else 2)
