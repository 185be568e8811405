"""Weights on a card that is too small for all dequantized; the card is the CPU here, its memory a number."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
import torch.nn.functional as F

from baton.engine.backends import loading
from baton.engine.backends.cuda.gpu import ROOM_BYTES, Gpu
from baton.engine.backends.torch import packed_products, product_trials
from baton.engine.backends.torch.card_products import FORMS
from baton.engine.backends.torch.card_room import IN_STEPS, LEAST_KV, OWN, WeightSize, plan_packed, weights_room
from baton.engine.backends.torch.card_weights import weights_on_card
from baton.engine.backends.torch.kept_choices import newest
from baton.engine.backends.torch.packed_products import HeldExperts, PackedProduct
from baton.engine.backends.torch.product_trials import KIND
from baton.engine.backends.torch.runner import TorchRunner
from baton.engine.checkpoints.safetensors import Checkpoint
from baton.engine.checkpoints.weights import LoadedWeights, is_quantized, load_weights, open_checkpoint
from baton.engine.config import EngineConfig
from baton.engine.models import program_for
from baton.engine.plan import ModelSpec
from baton.engine.program.config import ModelConfig
from baton.kernels.abi.build import CACHE_ENV
from baton.kernels.linear.packed import PackedWeight, pack_codes, pack_e4m3, pack_integers, quantize
from baton.kernels.linear.reference import linear
from baton.kv.layout.page import layout_for
from baton.protos.errors import ConfigError
from baton.protos.nouns import Sampling
from tests.conformance.checkpoints import make
from tests.conformance.drive import Driver
from tests.engine.backends.torch.test_card_products import timed

PLENTY = 1 << 40
SIZES = {"num_hidden_layers": 1, "vocab_size": 200, "hidden_size": 64, "intermediate_size": 96,
         "num_attention_heads": 2, "num_key_value_heads": 1}  # fmt: skip


def card(memory: int) -> Gpu:
    return Gpu("NVIDIA L4", (8, 9), (13, 0), memory)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_ENV, str(tmp_path))


def loaded(tmp_path: Path, kind: str, quantization: str, **sizes: int) -> tuple[EngineConfig, LoadedWeights]:
    directory = make(tmp_path / kind, kind, **SIZES | sizes)
    model = ModelConfig.read(directory)
    config = EngineConfig(str(directory), quantization=quantization, cache_dir=str(tmp_path))
    opened = open_checkpoint(directory, model)
    assert is_quantized(config, opened)
    assert not is_quantized(EngineConfig(str(directory)), opened)
    return config, load_weights(config, directory, model, program_for(model), torch.float32)


@pytest.mark.parametrize(
    ("room", "packed"),
    [(100, "abc"), (159, "abc"), (160, "bc"), (180, "bc"), (220, "c"), (279, "c"), (280, ""), (999, "")],
)
def test_as_many_weights_are_dequantized_ahead_as_there_is_room_for(room: int, packed: str) -> None:
    sizes = [WeightSize("a", 20, 80), WeightSize("b", 20, 80), WeightSize("c", 20, 80)]
    found = plan_packed(sizes, 40, room)
    assert (found.names, found.needed, found.count) == (frozenset(packed), 280, 3)
    assert found.bytes == 280 - 60 * len(packed)
    assert [way.way for way in found.ways(frozenset("b"))] == [
        *([OWN] if "b" in packed else []),
        *([IN_STEPS] if set(packed) - set("b") else []),
    ]


def test_a_weight_that_is_as_wide_packed_is_never_left_so() -> None:
    assert plan_packed([WeightSize("bf16", 80, 80), WeightSize("int4", 20, 80)], 0, 0).names == {"int4"}


def test_weights_leave_memory_for_kv_as_configured_or_a_part() -> None:
    assert weights_room(1000, 0.8, 300, 100) == 400
    assert weights_room(1000, 0.8, 0, 100) == 700 - int(800 * LEAST_KV)


PACKED: dict[str, Callable[[], PackedWeight]] = {
    "int8": lambda: quantize(torch.randn(200, 96), 8, 0),
    "int4": lambda: quantize(torch.randn(200, 96), 4, 32),
    "int8 in groups": lambda: quantize(torch.randn(64, 128), 8, 32),
    "fp8": lambda: pack_e4m3(torch.randn(130, 64).to(torch.float8_e4m3fn), torch.rand(130) + 0.5),
    "codes": lambda: pack_codes(
        torch.randint(0, 16, (70, 64), dtype=torch.uint8), torch.arange(-8, 8), 32, torch.rand(70, 2) + 0.1
    ),
    "minimums": lambda: pack_integers(
        torch.randint(-8, 8, (64, 128), dtype=torch.int8), 4, 32, torch.rand(64, 4) + 0.1, torch.rand(64, 4)
    ),
}


@pytest.mark.parametrize("name", PACKED)
def test_a_product_of_a_packed_weight_is_that_of_the_dequantized_one(name: str) -> None:
    weight = PACKED[name]()
    x = torch.randn(3, weight.k)
    held = PackedProduct(weight, torch.bfloat16, "cpu", part=64 * weight.k)
    assert len(held._parts) == math.ceil(weight.n / 64)
    assert torch.equal(linear(x.bfloat16(), held), F.linear(x.bfloat16(), weight.dequantized(torch.bfloat16)))
    assert held.nbytes == weight.nbytes < weight.n * weight.k * 2
    assert torch.equal(held.rounded(x), x.bfloat16().float())


@pytest.mark.parametrize(("kind", "quantization"), [("llama2", "int4"), ("mixtral", "int8")])
def test_a_card_that_holds_a_part_of_the_weights_dequantized_serves_the_same_answers(
    tmp_path: Path,
    kind: str,
    quantization: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(product_trials, "FORMS", ())
    config, (program, packed, fingerprint, _) = loaded(tmp_path, kind, quantization)
    wide = weights_on_card(program, packed, torch.float32, fingerprint, config, card(PLENTY))
    assert all(isinstance(weight, torch.Tensor) for weight in wide.values())
    assert "dequantized in each step" not in caplog.text
    most = sum(weight.nbytes for weight in wide.values())
    least = sum(weight.nbytes for weight in packed.values())
    spec, read = ModelSpec("", layout_for("float32", program.groups), 512, program.vocab_size, ()), []
    for room in (most, (most + least) // 2, 0):
        config = msgspec.structs.replace(config, card_kv_bytes=most - room + 1)
        made = weights_on_card(program, packed, torch.float32, fingerprint, config, card(most + ROOM_BYTES + 1))
        held = [weight for weight in made.values() if isinstance(weight, (PackedProduct, HeldExperts))]
        assert sum(weight.nbytes for weight in made.values()) <= max(room, least)
        assert (len(held) > 0) == (room < most)
        driver = Driver(TorchRunner(spec, program, made), pages=8)
        driver.answer([[5, 17, 90, 3, 44, 61, 7]], Sampling(temperature=0.0, max_tokens=1, prompt_logprobs=0))
        read.append(torch.tensor([one.chosen.logprob for one in driver.read[0][0]]))
    assert torch.allclose(read[0], read[1], atol=1e-4)
    assert torch.allclose(read[0], read[2], atol=1e-4)
    assert "weights: dequantized in each step, because all dequantized need" in caplog.text
    assert "a step moves" in newest(card(most + ROOM_BYTES + 1), KIND)[-1].told


def test_a_card_without_room_for_the_packed_weights_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product_trials, "FORMS", ())  # torch's own products hold a weight in other bytes
    config, (program, packed, fingerprint, _) = loaded(tmp_path, "llama2", "int4")
    least = sum(weight.nbytes for weight in packed.values())
    with pytest.raises(ConfigError, match="take a smaller model or a larger GPU"):
        weights_on_card(program, packed, torch.float32, fingerprint, config, card(ROOM_BYTES + least - 1))
    weights_on_card(program, packed, torch.float32, fingerprint, config, card(ROOM_BYTES + least))


@pytest.mark.parametrize(("quantization", "bytes_each"), [("none", 2.0), ("int4", 0.5)])
def test_a_start_asks_for_the_least_that_weights_may_take_before_it_loads_them(
    tmp_path: Path, quantization: str, bytes_each: float
) -> None:
    directory = make(tmp_path / "model", "llama2", **SIZES)
    model = ModelConfig.read(directory)
    planned = program_for(model)
    elements = sum(math.prod(shape) for weight in planned.weights for shape in weight.shapes)
    config = EngineConfig(str(directory), device="cuda", quantization=quantization)
    assert loading._least_bytes(config, open_checkpoint(directory, model), planned, "bfloat16") == int(
        elements * bytes_each
    )


def test_where_room_is_short_torchs_own_product_is_taken_though_it_is_slower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed(monkeypatch, 9.0, 2.0)
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 32}
    config, (program, packed, fingerprint, _) = loaded(tmp_path, "llama2", "int8", **sizes)
    wide = weights_on_card(program, packed, torch.float32, fingerprint, config, card(PLENTY))
    assert not any(isinstance(weight, FORMS) for weight in wide.values())
    config = msgspec.structs.replace(config, card_kv_bytes=PLENTY)
    small = weights_on_card(program, packed, torch.float32, fingerprint, config, card(PLENTY))
    names = {name for name, weight in packed.items() if isinstance(weight, PackedWeight)}
    assert {name for name, weight in small.items() if isinstance(weight, FORMS)} == names


def test_a_large_weight_is_dequantized_a_part_at_a_time() -> None:
    weight = quantize(torch.randn(6 * 64, 64), 8, 0)
    assert [part.n for part in packed_products._parts(weight, 2 * 64 * 64 + 5)] == [128, 128, 128]
    assert [part.n for part in packed_products._parts(weight, 1)] == [64] * 6


def test_a_start_on_a_card_reads_the_checkpoints_headers_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, opened, read, runner = (
        make(tmp_path / "llama2", "llama2", **SIZES),
        [],
        Checkpoint.__init__,
        object(),
    )

    def counted(self: Checkpoint, directory: Path) -> None:
        opened.append(directory)
        read(self, directory)

    monkeypatch.setattr(Checkpoint, "__init__", counted)
    stand_ins = {"require": card(PLENTY), "takes_kernels": True, "kernels_or_none": runner, "on_kernels": runner}
    others = ("share", "identities", "require_torch_cuda", "require_cuda_ops", "work_of")
    for name, value in {**stand_ins, **dict.fromkeys(others)}.items():
        monkeypatch.setattr(loading, name, lambda *_, value=value: value)
    config = EngineConfig(str(directory), device="cuda", dtype="bfloat16", cache_dir=str(tmp_path))
    assert loading.load(config) is runner
    assert len(opened) == 1
