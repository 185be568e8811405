"""Trials of single ops and of a card: what is wrong is said, figures are kept by card and kernels."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.engine.backends.cuda import card_trials
from baton.engine.backends.cuda.card_trials import CardTrials
from baton.engine.backends.cuda.device_ops import ON_THE_SHIM, Pair
from baton.engine.backends.cuda.gpu import Gpu
from baton.engine.backends.cuda.op_trials import OpTrial, _tried, try_ops
from baton.engine.backends.cuda.sequence_trials import _logits_of
from baton.kernels.abi.build import CACHE_ENV
from baton.kernels.step.structs import CHOICE
from tests.kernels.cuda.steps import simt

H100 = Gpu("NVIDIA H100", (9, 0), (13, 0), 80 << 30)
RECORD = CardTrials("NVIDIA H100", 1e9, {"bf16": "", "int8": ""}, (OpTrial("swiglu, 1 rows", 1e-7, 3.0, 4.0),))


def test_an_op_that_writes_nothing_or_something_else_is_not_right() -> None:
    wanted, out = torch.ones(4), torch.empty(4)
    found = [
        _tried(Pair("op", own, lambda: None, out, wanted), "cpu").right
        for own in (lambda: None, lambda: out.fill_(1.1), lambda: out.fill_(1.001))
    ]
    assert found == [False, False, True]


def test_figures_are_kept_for_a_card_its_driver_and_these_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_ENV, str(tmp_path))
    assert card_trials.load_record(H100) is None
    path = card_trials.save_record(RECORD, H100)
    assert card_trials.load_record(H100) == RECORD
    assert card_trials.load_record(Gpu("NVIDIA H100", (9, 0), (13, 1), 80 << 30)) is None
    path.write_text("{")
    assert card_trials.load_record(H100) is None
    card_trials.save_record(RECORD, H100)
    monkeypatch.setattr(card_trials, "prebuilt_name", lambda: "of other sources")
    assert card_trials.load_record(H100) is None


@pytest.mark.thorough
def test_every_op_is_right_on_the_shim() -> None:
    found = try_ops(simt(), "cpu", ON_THE_SHIM)
    assert len(found) == 10 * len(ON_THE_SHIM.rows)
    assert all(one.right for one in found), [one for one in found if not one.right]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("bug", "op"),
    [
        ("CUDA_EMBEDDING_ROW", "embedding, 9 rows"),
        ("CUDA_CAUSAL", "attention, a prompt's 9 rows"),
    ],
)
def test_a_planted_bug_of_an_op_is_found(bug: str, op: str) -> None:
    library = simt((f"-DBATON_MUTATION_{bug}",))
    wrong = [one.op for one in try_ops(library, "cpu", ON_THE_SHIM) if not one.right]
    assert op in wrong


def test_a_head_that_chooses_nothing_or_another_token_is_not_right() -> None:
    logits = torch.tensor([[1.0, 5.0, 2.0], [7.0, 1.0, 2.0]])
    for tokens, right in (((1, 0), True), ((1, 2), False), ((-1, 0), False), ((3, 0), False)):
        choices = np.zeros(2, CHOICE)
        choices["token"] = tokens
        out = torch.from_numpy(choices.view(np.uint8))
        pair = Pair("head", lambda: None, lambda: None, out, logits.amax(-1), partial(_logits_of, out, logits))
        assert _tried(pair, "cpu").right == right
