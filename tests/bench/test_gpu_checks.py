"""Checks beside bench/gpu.py's figures: a wrong result has no figure, and a row names its tests."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from baton.kernels.cuda import build, on_gpu
from baton.kernels.linear.packed import pack_bf16
from baton.kernels.linear.reference import linear
from baton.kernels.step.structs import CHOICE
from bench.cuda import checks, rows, shapes
from bench.cuda.dry import TINY
from bench.cuda.extent import ON_CARD, using
from bench.cuda.isolated import Case, Outcome, run
from bench.cuda.paper import MANY, WIDE, parts_of
from bench.cuda.results import is_wrong
from bench.cuda.right import error_of, judged, off
from bench.cuda.rows import Row
from bench.cuda.wanted import choice_error
from tests.kernels.compilers import needs_compiler


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """Calls are done when they return."""
    with using(TINY):
        yield


def test_a_wrong_result_has_no_figure() -> None:
    fast = Row(part="p", name="x", value=9.0, unit="GB/s", ratio=0.9)
    assert judged(fast, 1e-5, 1e-4) == rows.msgspec.structs.replace(fast, error=1e-5)
    for error in (1e-3, float("inf"), float("nan")):
        wrong = judged(fast, error, 1e-4)
        assert (wrong.value, wrong.ratio) == (None, None)
        assert is_wrong(wrong)


def test_what_a_call_leaves_unwritten_is_wrong(on_cpu: None) -> None:
    out, wanted = torch.zeros(4, 8), torch.randn(4, 8)

    def half() -> None:
        out[:2] = wanted[:2]

    assert error_of(half, out, lambda: wanted) == float("inf")
    assert error_of(lambda: out.copy_(wanted), out, lambda: wanted) == 0
    assert off(wanted * 1.01, wanted) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("bug", ["token", "uniform"])
def test_a_token_that_should_not_be_chosen_is_found(on_cpu: None, bug: str) -> None:
    weight, x = pack_bf16(torch.randn(70, 32)), torch.randn(3, 32)
    logits, temperature = linear(x, weight), 0.0 if bug == "token" else 0.8
    choices = np.zeros(3, CHOICE)
    choices["token"], choices["uniform"] = (logits.argmax(-1) if bug == "token" else torch.zeros(3)).numpy(), 0.0
    made = torch.from_numpy(choices.view(np.uint8))
    assert choice_error(lambda: None, weight, x, made, temperature) == 0
    choices["token" if bug == "token" else "uniform"][2] += 1 if bug == "token" else 0.9
    assert choice_error(lambda: None, weight, x, made, temperature) > 0.01


def test_an_ops_row_says_how_its_tests_went() -> None:
    [tests] = [tests for ops, tests in checks.files().items() if ops == ("dense",)]

    def outcome(name: str, value: float | None, said: str = "") -> Outcome:
        made = (Row(part="test", name=name, value=value, unit="passed"),) if not said else ()
        return Outcome(Case("checks", f"{tests[0]}::{name}", list, 1), made, 0.1, said, "")

    def dense(*outcomes: Outcome) -> Row:
        return next(checks.rows_of(("dense",), outcomes))

    good, bad, skipped = outcome("a", 1.0), outcome("b", 0.0), outcome("c", None)
    assert (dense(good, skipped).value, dense(good).against) == (1.0, build.source_key("dense"))
    assert (dense(good, bad).value, dense(skipped).value, dense().value) == (0.0, None, None)
    assert dense(good, outcome("d", None, "not run: the time was up")).value is None
    assert dense(good, outcome("d", None, "ended by SIGSEGV")).value == 0.0


def test_an_ops_row_names_the_kernels_that_passing_tests_launched_and_no_failing_ones() -> None:
    case = Case("checks", "tests/kernels/cuda/test_row_ops.py::a", list, 1)
    launched = "linear wide<0, 0>", "swiglu swiglu<float>"
    one = Row(part="test", name="a", value=1.0, unit="passed", launched=launched)
    [(ops, cases)] = [(ops, cases) for ops, cases in checks.grouped([case]).items() if cases]
    found = {row.name: row.launched for row in checks.rows_of(ops, [Outcome(cases[0], (one,), 0.1, "", "")])}
    assert (found["swiglu"], found["rms_norm"]) == (("swiglu<float>",), ())


def test_ops_are_checked_in_an_order_in_which_a_hang_costs_the_others_nothing() -> None:
    names = [f"{file}::x" for tests in checks.files().values() for file in tests]
    cases = checks.cases([*names, checks.HANDOFF])
    found = checks.grouped(cases)
    order = [ops[0] for ops in found if ops]
    assert order[:3] == ["linear", "paged_attention", "step"]
    assert set(order[-2:]) == {"megakernel", "collective"}
    assert [case.name for case in found[()]] == [checks.HANDOFF]
    assert sum(map(len, found.values())) == len(cases)


def test_a_test_is_played_for_the_shims_number_of_multiprocessors_too_where_that_changes_launches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = "tests/kernels/cuda/test_"
    tests = [f"{folder}{name}.py::x" for name in ("linear", "lora", "megakernel", "verify", "swiglu")] + [
        checks.HANDOFF
    ]
    again = {True: ("linear", "megakernel", "verify"), False: ("linear",)}
    for card, names in again.items():
        monkeypatch.setattr(on_gpu, "asked", lambda card=card: card)
        played_ = [case.name for case in checks.cases(tests)]
        count = checks.AS_SHIM if card else checks.AS_CARD
        assert played_ == [*tests, *(f"{folder}{name}.py::x as of {count} processors" for name in names)]


@pytest.mark.thorough
def test_a_test_runs_for_the_number_it_is_played_for_and_tells_what_it_launched() -> None:
    """Runs in a process of its own, because a fork of one whose OpenMP has threads may wait for them."""
    test = "tests/kernels/cuda/test_prefill.py::test_bfloat16_rows_in_and_out[bf16]"
    with needs_compiler():
        build.simt(("linear", "swiglu"))
    play = (
        "import json, sys, time; from bench.cuda import checks, isolated; checks.TEST_S = 900.0; "
        "found = isolated.run(checks.cases(sys.argv[1:]), time.monotonic() + 900); "
        "print(json.dumps([[each.said, each.rows[0].value, each.rows[0].launched] for each in found]))"
    )
    done = subprocess.run([sys.executable, "-c", play, test], capture_output=True, text=True, check=True)
    own, card = json.loads(done.stdout)
    assert own[:2] == card[:2] == ["", 1.0]
    assert "linear prefill<0>" in set(own[2]) - set(card[2])
    assert "linear skinny<0, 0, 8>" in set(card[2]) - set(own[2])


@pytest.mark.parametrize(
    ("n", "m"), [(*shape[:1], m) for shape in ON_CARD.forms.products.values() for m in (65, 2048)]
)
def test_each_kernel_of_many_rows_has_a_number_of_multiprocessors(n: int, m: int) -> None:
    """The conditions are those of ``prefill_parts`` and ``run`` (linear/cuda.cu)."""
    tiles, wide = MANY.blocks(n, m), WIDE.blocks(n, m)
    for form in shapes.FORMS:
        int4 = form.startswith("int4")
        for way, count in shapes.ways(form, n, m).items():
            parts = parts_of(n, m, WIDE, 0.5, count) if int4 else parts_of(n, m, processors=count)
            taken = (
                ("prefill", tiles * 4 >= count * 3 and not int4),
                (f"{parts} parts", parts > 1),
                ("wide", wide * 2 >= count),
                ("skinny", True),
            )
            assert way == next(name for name, takes in taken if takes)
    assert shapes.ways("bf16", n, 64) == {}


def test_the_tests_of_a_gpu_are_listed_by_name() -> None:
    [listed] = run([checks.listing(thorough=False)], time.monotonic() + 60, 1)
    assert listed.said == ""
    names = [each.name for each in listed.rows]
    assert checks.HANDOFF in names
    bare = [
        file for tests in checks.files().values() for file in tests if not any(n.startswith(file) for n in names)
    ]
    assert bare == []  # test_row_ops has quick tests of races alone, which a card can't show
    assert not any("race" in name for name in names)
