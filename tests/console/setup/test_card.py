"""Tests `baton doctor --gpu`: a machine without a card says so, figures are shown op by op and told later."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from baton.cluster.config import load_config
from baton.console.main import app
from baton.console.setup.doctor import card, machine
from baton.engine.backends.cuda import card_trials, gpu, products
from baton.engine.backends.cuda.card_trials import CardTrials
from baton.engine.backends.cuda.gpu import Gpu
from baton.engine.backends.cuda.op_trials import OpTrial
from baton.engine.backends.cuda.product_choice import ProductTimes, chosen
from baton.engine.backends.torch import capture, card_ops, graph_trial, usual_products
from baton.engine.backends.torch.card_ops import OpChoice
from baton.engine.backends.torch.kept_choices import TriedWay
from baton.kernels.abi.build import CACHE_ENV, BuildError

L4 = Gpu("NVIDIA L4", (8, 9), (13, 0), 24 << 30)
H100 = Gpu("NVIDIA H100", (9, 0), (13, 0), 80 << 30)
OPS = OpTrial("swiglu, 1 rows", 1e-7, 3.0, 4.0), OpTrial("product int8, 1 rows", 1e-2, 5.0, 4.0)
WRONG = OpTrial("rms_norm, 1 rows", None, 1.0, 2.0)


def test_a_machine_without_a_card_fails_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.probe, "__defaults__", ("no-such-driver.so",))
    result = CliRunner().invoke(app, ["doctor", "--gpu", "--json"])
    assert result.exit_code == 1
    (found,) = json.loads(result.stdout)["findings"]
    assert (found["subject"], found["state"]) == ("card", "fail")
    assert "no NVIDIA driver is here" in found["what"]
    assert "--device cpu" in found["remedy"]


def test_another_card_is_told_that_torchs_ops_serve() -> None:
    (found,) = card.try_card(lambda: L4)
    assert found.state == "warn"
    assert "torch's ops serve" in found.what


def test_another_card_is_tried_again_and_what_computes_which_op_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = (OpTrial("16 decodes", 1e-3, 30.0, 90.0),)
    config = load_config(flags={"worker": {"device": "cuda"}}, search=Path("/nowhere"))
    fake_trials(monkeypatch, tmp_path, lambda *_: ())
    for why, state in ((card_ops.WITHOUT, "warn"), ("", "ok")):
        way = card_ops.TORCH if why else card_ops.FLASHINFER
        chosen = OpChoice(card_ops.ATTENTION, way, why, () if why else ops)
        monkeypatch.setattr(card_ops, "try_library", lambda *_, chosen=chosen: (chosen,))
        told = card.try_card(lambda: L4)[1]
        assert (told.subject, told.state, bool(told.remedy)) == ("gpu op", state, bool(why))
        assert chosen.told in machine.gpu(config, lambda: L4).what
    assert told.what == "decode attention: flashinfer (flashinfer 30 us, torch 90 us)"


def fake_trials(monkeypatch: pytest.MonkeyPatch, cache: Path, try_usual: Callable[..., object]) -> None:
    """Lets a card be tried without one: what FlashInfer, torch's products and graphs come to is given."""
    steps = OpTrial("decode step of 16 rows", 0.0, 40.0, 90.0)
    monkeypatch.setenv(CACHE_ENV, str(cache))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(card_ops, "_free", lambda device: None)
    monkeypatch.setattr(
        card_ops, "try_library", lambda *_: (OpChoice(card_ops.DRAW, card_ops.TORCH, card_ops.FASTER),)
    )
    monkeypatch.setattr(usual_products, "try_usual", try_usual)
    graphs = TriedWay("decode steps of one layer", "graph", "op by op", "graph", "", (steps,))
    monkeypatch.setattr(capture, "CudaCapture", lambda: None)
    monkeypatch.setattr(graph_trial, "try_graphs", lambda *_: graphs)


@pytest.mark.parametrize("serves", ["another card", "a card without our kernels"])
def test_products_of_quantized_weights_are_tried_where_torchs_ops_serve_and_told_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serves: str
) -> None:
    asked, said = H100 if "without" in serves else L4, list[str]()
    real = usual_products.try_usual
    small = ((64, 128), (192, 256))
    fake_trials(monkeypatch, tmp_path, lambda gpu, device, tell: real(gpu, "cpu", tell, small))
    monkeypatch.setattr(card, "device", raises(BuildError("no nvcc")))
    monkeypatch.setattr(torch, "_scaled_mm", raises(RuntimeError("needs compute capability 8.9")))
    found = card.try_card(lambda: asked, said.append)
    told = {one.what.partition(":")[0]: one for one in found if one.subject == "gpu op"}
    assert said[1:7:2] == [f"torch's product by 64 x 128, {form}" for form in ("int8", "fp8", "int4")]
    for op in ("product by 192 x 256 (_int_mm)", "product by 64 x 128, groups of 32 (_weight_int4pack_mm)"):
        assert told[op].state == "ok"
        assert "us, " in told[op].what
    refused = told["product by 64 x 128 (_scaled_mm)"]
    assert (refused.state, refused.remedy) == ("warn", card.WIDE)
    assert refused.what.endswith("dequantized, because it failed: RuntimeError: needs compute capability 8.9")
    assert found[-1].what == card.PLAIN_OPS
    config = load_config(flags={"worker": {"device": "cuda"}}, search=Path("/nowhere"))
    later = machine.gpu(config, lambda: asked).what
    assert all(one.what in later for op, one in told.items() if op.startswith(("product", "decode")))


def test_products_that_leave_the_card_unusable_are_a_finding_behind_those_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_trials(monkeypatch, tmp_path, raises(RuntimeError("an illegal memory access")))
    *_, before, failed = card.try_card(lambda: L4)
    assert before.what == "filters of a draw: torch, because it is faster"
    assert (failed.state, failed.remedy) == ("fail", "start again, a worker then dequantizes")
    assert "an illegal memory access" in failed.what


def raises(error: Exception) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def test_a_trial_that_leaves_the_card_unusable_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_trials(monkeypatch, tmp_path, lambda *_: ())
    full = OpChoice(card_ops.ATTENTION, card_ops.TORCH, "there was too little memory", lasts=False)
    monkeypatch.setattr(card_ops, "try_library", lambda *_: (full,))
    assert card.try_card(lambda: L4)[1].remedy == card.FREE
    monkeypatch.setattr(card_ops, "_free", lambda device: 1 / 0)
    found = card.try_card(lambda: L4)[1]
    assert (found.state, found.remedy) == ("fail", "start again")
    assert "left the card unusable" in found.what


def test_each_step_and_op_is_a_finding_and_what_is_wrong_fails() -> None:
    record = CardTrials("H100", 1e9, {"bf16": "", "int4": "step 2 of the trial: off"}, (*OPS, WRONG))
    found = card.findings_of(record)
    assert [one.state for one in found] == ["ok", "fail", "ok", "warn", "fail"]
    assert found[2].what == "swiglu, 1 rows: ours 3.0 us, torch 4.0 us, 1.0e-07 off float32"
    assert all(one.remedy for one in found if one.state != "ok")


def test_the_plain_doctor_tells_what_was_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_ENV, str(tmp_path))
    config = load_config(flags={"worker": {"device": "cuda"}}, search=Path("/nowhere"))
    assert "tried on" not in machine.gpu(config, lambda: H100).what
    card_trials.save_record(CardTrials("H100", 1e9, {"bf16": ""}, (*OPS, WRONG)), H100)
    said = machine.gpu(config, lambda: H100).what
    assert "tried on 2001-09-09 01:46 UTC: wrong: rms_norm, 1 rows, 2 of 3 ops as fast as torch's" in said


def test_what_multiplies_each_matrix_is_a_finding_and_told_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = [ProductTimes(rows, 100.0, 100.0, 40.0 if rows > 64 else None) for rows in products.ROWS]
    monkeypatch.setenv(CACHE_ENV, str(tmp_path))
    monkeypatch.setenv(products.LIBRARY_ENV, "/nowhere/libcublasLt.so.13")
    monkeypatch.setattr(card, "device", lambda: None)
    monkeypatch.setattr(card_trials, "run_trials", lambda gpu, library, shim, tell: CardTrials("H100", 1e9, {}, ()))
    monkeypatch.setattr(card_trials, "with_megakernel", lambda found, library, shim, tell: found)
    monkeypatch.setattr(products, "open_library", lambda device, path: 130000)
    monkeypatch.setattr(products, "try_matrix", lambda device, where, matrix, timed: chosen(matrix, times))
    said: list[str] = []
    found = card.try_card(lambda: H100, said.append)
    assert said == ["products of bf16 matrices beside cuBLASLt"]
    assert len(found) == 1 + len(products.USUAL)
    assert "product 4096 x 4096: by rows, cuBLASLt at 96, 128, 256" in found[1].what
    config = load_config(flags={"worker": {"device": "cuda"}}, search=Path("/nowhere"))
    assert "product 28672 x 4096, gated: by rows" in machine.gpu(config, lambda: H100).what
    monkeypatch.setattr(products, "open_library", lambda device, path: 1 / 0)
    monkeypatch.setenv(products.LIBRARY_ENV, "0")
    without = card.try_card(lambda: H100)[-1]
    assert (without.state, "BATON_CUBLASLT" in without.remedy) == ("warn", True)


def test_figures_that_cannot_be_kept_are_shown_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BATON_CUDA_SIMT", "1")
    monkeypatch.setenv(CACHE_ENV, str(tmp_path / "file"))
    monkeypatch.setattr(card, "device", lambda: None)
    monkeypatch.setattr(
        card_trials, "run_trials", lambda gpu, library, shim, tell: CardTrials("shim", 1e9, {}, OPS)
    )
    kept, *ops = card.try_card()
    assert (kept.state, len(ops)) == ("warn", len(OPS))
    assert CACHE_ENV in kept.remedy


@pytest.mark.thorough
def test_on_the_shim_every_step_and_op_is_tried_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CUDA_SIMT", "1")
    monkeypatch.setattr(card_trials, "_path", lambda gpu: tmp_path / "card.json")
    result = CliRunner().invoke(app, ["doctor", "--gpu", "--json"])
    found = json.loads(result.stdout)["findings"]
    assert result.exit_code == 0
    assert [line for line in result.stderr.splitlines() if line.startswith("trying the megakernel")]
    assert [one["subject"] for one in found[:7]] == ["card", *["gpu step"] * 6]
    assert {one["state"] for one in found} <= {"ok", "warn"}
    assert card_trials.load_record(card.SHIM) is not None
