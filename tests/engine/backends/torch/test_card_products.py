"""Quantized weights by torch's own products, which compute on the CPU here as they do on a card."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from baton.engine.backends.cuda import op_trials
from baton.engine.backends.torch.card_products import FORMS
from baton.engine.backends.torch.dequantized import for_torch
from baton.engine.backends.torch.product_trials import DEQUANTIZED, ProductChooser
from baton.engine.backends.torch.runner import TorchRunner
from baton.engine.checkpoints.weights import load_weights
from baton.engine.config import EngineConfig
from baton.engine.models import program_for
from baton.engine.plan import ModelSpec
from baton.engine.program.config import ModelConfig
from baton.kernels.linear.packed import E4M3_A8, PackedWeight, pack_e4m3, pack_integers, quantize
from baton.kernels.linear.reference import HeldWeight, linear
from baton.kv.layout.page import layout_for
from baton.protos.nouns import Sampling
from tests.conformance.checkpoints import make
from tests.conformance.drive import Driver


def e4m3(kind: int = 3, given: float | None = None) -> PackedWeight:
    rows = torch.randn(64, 128).to(torch.float8_e4m3fn)
    made = pack_e4m3(rows, torch.rand(64) + 0.5, kind)
    if given is not None:
        object.__setattr__(made, "table", torch.tensor(given))
    return made


WEIGHTS: dict[str, Callable[[], PackedWeight]] = {
    "int8": lambda: quantize(torch.randn(64, 128), 8, 0),
    "fp8": e4m3,
    "fp8, rows by a given scale": lambda: e4m3(E4M3_A8, 0.01),
    "int4": lambda: quantize(torch.randn(64, 128), 4, 32),
    "int4, rows in bf16": lambda: quantize(torch.randn(64, 128), 4, 64).with_bf16_rows(),
    "int4 with minimums": lambda: pack_integers(
        torch.randint(-8, 8, (64, 128), dtype=torch.int8), 4, 32, torch.rand(64, 4) + 0.1, torch.rand(64, 4)
    ),
}


@pytest.fixture(autouse=True)
def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    timed(monkeypatch, 2.0, 9.0)


def timed(monkeypatch: pytest.MonkeyPatch, own: float, peer: float) -> None:
    calls: list[int] = []

    def microseconds(call: Callable[[], object], device: str) -> float:
        calls.append(1)
        return (own, peer)[(len(calls) - 1) % 2]

    monkeypatch.setattr(op_trials, "_microseconds", microseconds)


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_torchs_own_product_is_that_of_the_weight_with_its_rows_rounded(name: str, rows: int) -> None:
    torch.manual_seed(rows)
    weight, x, bias = WEIGHTS[name](), torch.randn(rows, 128), torch.randn(64)
    held = ProductChooser(torch.bfloat16, "cpu").held(weight)
    assert held is not None
    wanted = F.linear(held.rounded(x), weight.dequantized(), bias)
    assert float((linear(x, held, bias) - wanted).norm() / wanted.norm()) < 0.01
    plain = F.linear(x, weight.dequantized(), bias)
    assert float((linear(x, held, bias) - plain).norm() / plain.norm()) < 0.05
    assert held.nbytes < weight.n * weight.k * 2


def test_a_row_that_is_not_a_number_stays_none_and_leaves_others_alone() -> None:
    for name in ("int8", "fp8", "int4"):
        x = torch.randn(3, 128)
        x[1, 5] = torch.nan
        held = ProductChooser(torch.bfloat16, "cpu").held(WEIGHTS[name]())
        assert held is not None
        assert linear(x, held).isnan().all(1).tolist() == [False, True, False]


@pytest.mark.parametrize(
    "made",
    [
        lambda: quantize(torch.randn(60, 128), 8, 0),
        lambda: quantize(torch.randn(64, 128), 8, 32),
        lambda: quantize(torch.randn(64, 96), 4, 32),
        lambda: quantize(torch.randn(64, 128), 4, 16),
        lambda: quantize(torch.randn(64, 128), 8, 0).with_bf16_rows(),
    ],
)
def test_forms_that_torch_has_no_product_for_are_dequantized(made: Callable[[], PackedWeight]) -> None:
    chooser = ProductChooser(torch.bfloat16, "cpu")
    assert chooser.held(made()) is None
    assert chooser.ways == {}


def test_what_is_slower_wrong_or_fails_is_dequantized_and_the_reason_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = WEIGHTS["int8"]()
    with monkeypatch.context() as slow:
        timed(slow, 9.0, 2.0)
        assert told(weight).endswith("dequantized (_int_mm 18 us, dequantized 4 us), because it is faster")
    with monkeypatch.context() as wrong:
        wrong.setattr(torch, "_int_mm", lambda a, b: torch.zeros((len(a), b.shape[1]), dtype=torch.int32))
        assert told(weight).endswith("because its results are wrong on this card")
    with monkeypatch.context() as absent:
        absent.setattr(torch, "_int_mm", lambda a, b: 1 / 0)
        assert told(weight).endswith("dequantized, because it failed: ZeroDivisionError: division by zero")
    assert told(weight) == "product by 64 x 128 (_int_mm): _int_mm (_int_mm 4 us, dequantized 18 us)"


def told(weight: PackedWeight) -> str:
    chooser = ProductChooser(torch.bfloat16, "cpu")
    chooser.held(weight)
    [way] = chooser.ways.values()
    return way.told


def test_a_record_spares_the_times_and_its_products_are_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, first = WEIGHTS["int8"](), ProductChooser(torch.bfloat16, "cpu")
    first.held(weight)
    monkeypatch.setattr(op_trials, "_microseconds", pytest.fail)
    again = ProductChooser(torch.bfloat16, "cpu", tuple(first.ways.values()))
    assert isinstance(again.held(weight), HeldWeight)
    assert again.ways == first.ways
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: 1 / 0)
    today = ProductChooser(torch.bfloat16, "cpu", tuple(first.ways.values()))
    assert today.held(weight) is None
    assert [way.way for way in today.ways.values()] == [DEQUANTIZED]


def test_want_of_memory_is_of_one_start_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(a: object, b: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "_int_mm", full)
    chooser = ProductChooser(torch.bfloat16, "cpu")
    assert chooser.held(WEIGHTS["int8"]()) is None
    assert (len(chooser.ways), chooser.lasting) == (1, ())


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_quantized_model_answers_by_torchs_own_products(tmp_path: Path, quantization: str) -> None:
    sizes = {"num_hidden_layers": 1, "vocab_size": 192, "hidden_size": 128, "intermediate_size": 128,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}  # fmt: skip
    directory = make(tmp_path / "model", "llama2", **sizes)
    model = ModelConfig.read(directory)
    config = EngineConfig(str(directory), device="cuda", quantization=quantization, cache_dir=str(tmp_path))
    program, packed, *_ = load_weights(config, directory, model, program_for(model), torch.float32)
    chooser = ProductChooser(torch.float32, "cpu")
    weights = for_torch(program, packed, torch.float32, "cpu", chooser)
    assert any(isinstance(weight, FORMS) for weight in weights.values())
    spec, read = ModelSpec("", layout_for("float32", program.groups), 512, program.vocab_size, ()), []
    for taken in (packed, weights):
        driver = Driver(TorchRunner(spec, program, taken), pages=8)
        driver.answer([[5, 17, 90, 3, 44, 61, 7]], Sampling(temperature=0.0, max_tokens=1, prompt_logprobs=0))
        read.append(torch.tensor([one.chosen.logprob for one in driver.read[0][0]]))
    assert float((read[0] - read[1]).abs().mean()) < 0.1
