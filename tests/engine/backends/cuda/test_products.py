"""How bf16 matrices lie on a card and what multiplies them: the choice by times, its record, and steps by it."""

from __future__ import annotations

import logging
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.engine.backends.cuda import load as cuda_load
from baton.engine.backends.cuda import products
from baton.engine.backends.cuda import trial as trials
from baton.engine.backends.cuda.gpu import Gpu
from baton.engine.backends.cuda.product_choice import (
    FEW,
    LIBRARY,
    OWN,
    Matrix,
    ProductTimes,
    chosen,
    matrices_of,
    names_by_row,
)
from baton.engine.backends.cuda.runner import CudaRunner
from baton.engine.backends.native.runner import NativeRunner
from baton.engine.plan import SequenceStep, StepPlan
from baton.kernels.abi import native
from baton.kernels.abi.build import CACHE_ENV
from baton.kernels.cuda.library import CudaLibrary, DeviceError
from tests.kernels.cuda import test_by_row as kernels
from tests.kernels.cuda.steps import model, simt

H100 = Gpu("NVIDIA H100", (9, 0), (13, 0), 80 << 30)
SQUARE = Matrix(64, 64, False)


def times(
    few: tuple[float | None, float | None] = (10, 10),
    many: tuple[float | None, float | None, float | None] = (90, 80, 40),
) -> list[ProductTimes]:
    return [ProductTimes(rows, *(few if rows <= FEW else many)) for rows in products.ROWS]


@pytest.mark.parametrize(
    ("given", "by_row"),
    [
        (times(), True),
        (times(few=(10, 10.1)), True),
        (times(few=(10, 10.5)), False),
        (times(many=(90, 80, 95)), True),
        (times(many=(30, 80, 40)), False),
        (times(many=(90, 80, None)), True),
        (times(few=(10, None)), False),
        (times(few=(None, 10)), True),
    ],
    ids=["faster", "2%", "slow decodes", "ours by rows", "slow", "library wrong", "ours wrong", "panels wrong"],
)
def test_rows_are_taken_where_few_stay_as_fast_and_many_become_faster(
    given: list[ProductTimes], by_row: bool
) -> None:
    assert chosen(SQUARE, given).by_row == by_row


def test_the_library_is_taken_at_the_sizes_where_it_is_the_faster_one() -> None:
    mixed = [
        *times()[:5],
        ProductTimes(96, 90, 30, 40),
        ProductTimes(256, 90, 80, 40),
        ProductTimes(512, 90, 80, None),
    ]
    found = chosen(SQUARE, mixed)
    assert found.ways() == {96: OWN, 256: LIBRARY, 512: OWN}
    assert "product 64 x 64: by rows, cuBLASLt at 256 of rows" in found.told


def test_matrices_of_layers_alone_are_named_with_their_gates() -> None:
    program = trials.one_layer(model())
    weights = trials.random_weights(program, torch.bfloat16, 1)
    found = matrices_of(program, weights)
    assert Matrix(2 * trials.INNER, trials.HIDDEN, True) in found
    assert len(found) == 4
    taken = [chosen(matrix, times()) for matrix in found if matrix.gated]
    assert names_by_row(program, weights, taken) == {"gate_up"}
    assert matrices_of(program, trials.random_weights(program, (8, 0), 1)) == ()


def test_what_was_found_is_kept_for_a_card_and_a_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried: list[Matrix] = []

    def try_matrix(device: object, where: str, matrix: Matrix, timed: object) -> object:
        tried.append(matrix)
        return chosen(matrix, times())

    versions = [130000]
    monkeypatch.setenv(CACHE_ENV, str(tmp_path))
    monkeypatch.setenv(products.LIBRARY_ENV, "lib")
    monkeypatch.setattr(products, "open_library", lambda device, path: versions[-1])
    monkeypatch.setattr(products, "try_matrix", try_matrix)
    device, other = CudaLibrary.__new__(CudaLibrary), Matrix(128, 64, False)
    first = products.choices_on(H100, device, [SQUARE])
    assert products.choices_on(H100, device, [SQUARE]) == first == products.load_choices(H100)
    products.choices_on(H100, device, [SQUARE, other])
    assert tried == [SQUARE, other]
    versions.append(130100)
    products.choices_on(H100, device, [SQUARE])
    assert tried == [SQUARE, other, SQUARE]

    monkeypatch.setattr(products, "try_matrix", lambda *_: 1 / 0)  # as a fault, behind which nothing runs
    with pytest.raises(ZeroDivisionError):
        products.choices_on(H100, device, [SQUARE, other])
    with caplog.at_level(logging.WARNING):
        assert products.choices_on(H100, device, [SQUARE, other]) == first
    assert "a trial began and hasn't ended" in caplog.text
    monkeypatch.setattr(products, "try_matrix", try_matrix)
    products.forget_choices(H100)
    assert len(products.choices_on(H100, device, [SQUARE, other])) == 2


def test_without_a_library_everything_is_our_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(device: object, path: str) -> int:
        raise DeviceError("linear_library: failed (status 302)")

    device = CudaLibrary.__new__(CudaLibrary)
    monkeypatch.setenv(products.LIBRARY_ENV, "0")
    assert products.choices_on(H100, device, [SQUARE]) == ()
    monkeypatch.setenv(products.LIBRARY_ENV, "/nowhere.so")
    monkeypatch.setattr(products, "open_library", refuse)
    with caplog.at_level(logging.INFO):
        assert products.choices_on(H100, device, [SQUARE]) == ()
    assert "cuBLASLt can't be loaded from /nowhere.so" in caplog.text
    monkeypatch.delenv(products.LIBRARY_ENV)
    assert "libcublasLt" in products.library_path()


@pytest.mark.thorough
def test_a_trial_runs_all_ways_and_a_wrong_one_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(1, 100))
    for flags, wrong in (((), False), (("-DBATON_MUTATION_CUDA_LINEAR_ROW_HALF",), True)):
        device = simt(flags)
        assert products.open_library(device, str(kernels.stand_in())) == 130000
        before = kernels.products()
        for matrix in (SQUARE, Matrix(64, 64, True)):
            found = products.try_matrix(device, "cpu", matrix, lambda call: next(seconds) * 1e-6, (8, 70))
            assert [one.by_row is None for one in found.times] == [wrong, wrong]
            assert found.times[0].library is None
            assert found.times[1].library is not None
            assert not found.by_row  # times grow, so panels are the fastest
        assert kernels.products() - before == 2


@pytest.mark.skipif(native.library() is None, reason="no native kernels here")
def test_a_captured_step_multiplies_by_the_library_as_often_as_it_is_replayed() -> None:
    device, program = simt(), trials.one_layer(model())
    spec, weights = trials.spec_of(program, "bfloat16"), trials.random_weights(program, torch.bfloat16, 3)
    assert products.open_library(device, str(kernels.stand_in())) == 130000
    choices = [chosen(matrix, times()) for matrix in matrices_of(program, weights)]
    by_row = names_by_row(program, weights, choices)
    assert by_row == {"qkv", "o", "gate_up", "down"}
    products.apply_choices(device, choices)
    own = NativeRunner(spec, program, weights)
    card = CudaRunner(spec, program, weights, device, by_row=by_row)
    counts, tokens = [kernels.products()], [(7 * at + 3) % trials.VOCAB for at in range(FEW + 6)]
    try:
        for runner in (own, card):
            runner.bind(memoryview(bytearray(trials.PAGES * spec.layout.page_bytes)), trials.PAGES)
        for start in (0, 0, 0, len(tokens)):  # by launches, captured, replayed; then few rows
            step = SequenceStep(0, tokens if not start else tokens[:3], start, list(range(6)), pool=True)
            wanted, found = (runner.run(StepPlan((step,))).pooled[0].total for runner in (own, card))
            assert np.linalg.norm(found - wanted) / np.linalg.norm(wanted) < trials.STATES
            counts.append(kernels.products())
        assert card.counts()["replayed"] >= 2
    finally:
        card.close()
        for matrix in matrices_of(program, weights):
            products._choose(device, matrix, {})
    assert [after - before for before, after in pairwise(counts)] == [4, 4, 4, 0]


def test_what_a_start_takes_is_told_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    program = trials.one_layer(model())
    weights = trials.random_weights(program, torch.bfloat16, 1)
    found = [chosen(matrix, times()) for matrix in matrices_of(program, weights) if not matrix.gated]
    told: list[Matrix] = []
    monkeypatch.setattr(cuda_load, "on_shim", lambda: False)
    monkeypatch.setattr(cuda_load, "require", lambda: H100)
    monkeypatch.setattr(cuda_load, "choices_on", lambda *_: tuple(found))
    monkeypatch.setattr(cuda_load, "apply_choices", lambda _, choices: told.extend(one.matrix for one in choices))
    device = CudaLibrary.__new__(CudaLibrary)
    assert cuda_load.rows_taken(program, weights, device) == {"qkv", "o", "down"}
    assert len(told) == 3

    def full(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(cuda_load, "choices_on", full)
    assert cuda_load.rows_taken(program, weights, device) == frozenset()
