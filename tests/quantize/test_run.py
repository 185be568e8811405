"""Tests whole checkpoints: every method's is loaded and near its twin, on every architecture; a broken run goes
on.
"""

from __future__ import annotations

import json
import re
import resource
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.engine.checkpoints.safetensors import Checkpoint
from baton.engine.checkpoints.weights import load_weights
from baton.engine.config import EngineConfig
from baton.engine.models import program_for
from baton.engine.program.config import ModelConfig
from baton.kernels.linear.packed import PackedWeight
from baton.protos.errors import ConfigError
from baton.quantize import run as running
from baton.quantize.grids import IntGrid, to_nearest
from baton.quantize.output import OutputFolder
from baton.quantize.quantized_weight import QuantizedWeight
from baton.quantize.run import quantize
from baton.quantize.schemes import COMPRESSED, Recipe, grid_of
from baton.quantize.source import Source
from baton.quantize.stats import ActivationStats
from tests.quantize.conftest import Made
from tests.thorough import later

Samples = list[list[int]]
READ = {  # and how far a weight may be off, as a share of its largest
    "rtn": (Recipe("rtn", group=32), 0.09),
    "rtn asymmetric": (Recipe("rtn", group=32, symmetric=False, format="compressed-tensors"), 0.09),
    "rtn 8 bits": (Recipe("rtn", bits=8, group=32), 0.006),
    "rtn as gptq": (Recipe("rtn", group=64, format="gptq"), 0.09),
    "rtn as awq": (Recipe("rtn", group=64, symmetric=False, format="awq"), 0.09),
    "gptq": (Recipe("gptq", group=32), 0.7),
    "gptq as compressed-tensors": (Recipe("gptq", group=32, format="compressed-tensors"), 0.7),
    "fp8": (Recipe("fp8"), 0.04),
    "nf4": (Recipe("nf4"), 0.2),
    "mxfp4": (Recipe("mxfp4"), 0.3),
}


@pytest.mark.parametrize(
    ("recipe", "experts", "written"),
    [
        (Recipe("rtn"), False, "compressed-tensors"),
        (Recipe("rtn", symmetric=False), False, "gptq"),  # packed zero points load in transformers if it is told to
        (Recipe("rtn", symmetric=False), True, "gptq"),
        (Recipe("gptq"), False, "gptq"),
        (Recipe("gptq"), True, "compressed-tensors"),
        (Recipe("gptq", regroup=True), True, "gptq"),
        (Recipe("awq", symmetric=False), True, "awq"),
        (Recipe("awq"), True, "compressed-tensors"),
        (Recipe("awq", bits=8), False, "gptq"),
        (Recipe("nf4"), True, "bitsandbytes"),
        (Recipe("gptq", format="gptq"), True, "gptq"),
        (Recipe("rtn", symmetric=False, kv_cache_dtype="fp8"), False, "compressed-tensors"),
    ],
)
def test_the_format_unless_told_is_one_that_transformers_loads_as_it_is(
    recipe: Recipe, experts: bool, written: str
) -> None:
    assert recipe.checked(experts).format == written


def loaded(folder: Path) -> dict[str, Tensor]:
    read = ModelConfig.read(folder)
    config = EngineConfig(str(folder), cache_dir=str(folder / "cache"))
    found = load_weights(config, folder, read, program_for(read), torch.float32).weights
    return {n: w.dequantized() if isinstance(w, PackedWeight) else w.float() for n, w in found.items()}


def logits(folder: Path, weights: dict[str, Tensor], ids: list[int]) -> Tensor:
    """Returns the logits of the engine's torch runner for ``weights`` in float32."""
    from baton.engine.backends.torch.batch import BatchBuilder
    from baton.engine.backends.torch.interpreter import Interpreter, KvPages
    from baton.engine.checkpoints.weights import own_head
    from baton.engine.plan import SequenceStep, StepPlan
    from baton.kernels.registry import kernels

    program = program_for(ModelConfig.read(folder))
    program = own_head(program) if "head" in weights else program
    pages = -(-len(ids) // 16)
    flat = torch.zeros(pages * program.layers * 2 * 16 * program.kv_heads * program.head_dim)
    rows = flat.view(-1, program.kv_heads * program.head_dim)
    kv = KvPages(flat.view(pages, -1), rows, flat.view(-1, 16, program.kv_heads, program.head_dim))
    step = SequenceStep(0, ids[:-1], 0, range(pages), is_prefill=True, targets=ids[1:])
    batch = BatchBuilder(program, torch.float32, "cpu").build(StepPlan((step,)))
    return Interpreter(program, weights, kernels()).logits(batch, kv)[: len(ids) - 1]


@pytest.mark.parametrize("name", list(READ))
def test_this_engine_reads_what_was_written(name: str, source: Source, samples: Samples, tmp_path: Path) -> None:
    recipe, most = READ[name]
    recipe = recipe.checked()
    quantize(source, recipe, samples if recipe.method == "gptq" else (), tmp_path / "out")
    found, plain = loaded(tmp_path / "out"), source.wide(source.weights)
    for weight in ("0.qkv", "0.o", "1.gate_up", "1.down"):
        off = (found[weight] - plain[weight]).abs().max() / plain[weight].abs().max()
        assert 0 < float(off) < most, weight
    for same in ("embed", "norm", "0.input_norm", "0.qkv_bias"):
        assert torch.equal(found[same], plain[same])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == recipe.format
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert not (tmp_path / "out" / ".work").exists()


class Moved:
    """Rounds so finely that it is hardly seen, and moves factors that are drawn from e^-reach to e^reach."""

    needs_text, group = True, 32

    def __init__(self, reach: float) -> None:
        self._reach = reach

    def rounded(self, weight: Tensor, stats: ActivationStats | None) -> QuantizedWeight:
        return to_nearest(weight, IntGrid(8, 32, symmetric=False, wide=True))

    def scales(self, weight: Tensor, stats: ActivationStats, tie: Callable[[Tensor], Tensor]) -> Tensor:
        drawn = torch.rand(weight.shape[1], generator=torch.Generator().manual_seed(3))
        return tie(torch.exp(self._reach * (2 * drawn - 1)))


@pytest.mark.parametrize("kind", ["qwen2", "llama_linear", "qwen3"])
def test_factors_that_are_moved_leave_the_answers_alone(
    kind: str, made: Made, samples: Samples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source(str(made(kind)))
    plain, errors = source.wide(source.weights), []
    exact = logits(made(kind), plain, samples[0])
    for reach in (0.0, 0.7):
        monkeypatch.setattr(running, "scheme_of", lambda recipe, reach=reach: Moved(reach))
        out = tmp_path / str(reach)
        quantize(
            source, Recipe("rtn", bits=8, group=32, symmetric=False, format=COMPRESSED).checked(), samples, out
        )
        found = loaded(out)
        errors.append(float((logits(out, found, samples[0]) - exact).abs().mean()))
    for moved in ("0.input_norm", "1.mlp_norm", "0.qkv", "1.o", "1.down"):
        assert float((found[moved] / plain[moved]).abs().log().abs().nanmedian()) > 0.1, moved
    assert errors[1] < 3 * errors[0] < 0.3 * float(exact.abs().mean())


@pytest.mark.parametrize("method", ["awq", "smoothquant"])
def test_methods_that_move_factors_write_checkpoints_that_are_read(
    method: str, source: Source, samples: Samples, tmp_path: Path
) -> None:
    quantize(source, Recipe(method, group=32, symmetric=method != "awq").checked(), samples, tmp_path / "out")
    found, plain = loaded(tmp_path / "out"), source.wide(source.weights)
    assert not torch.equal(found["0.input_norm"], plain["0.input_norm"])
    folded = found["0.qkv"] * found["0.input_norm"] - plain["0.qkv"] * plain["0.input_norm"]
    assert float(folded.abs().max()) < 0.3 * float(plain["0.qkv"].abs().max())


@pytest.mark.parametrize("kind", ["mixtral", pytest.param("qwen3_moe", marks=pytest.mark.thorough)])
def test_experts_are_rounded_each_on_the_rows_that_come_to_it(
    kind: str, made: Made, samples: Samples, tmp_path: Path
) -> None:
    folder = made(kind)
    source = Source(str(folder))
    errors = {}
    for name, recipe in (("gptq", Recipe("gptq", group=32)), ("rtn", Recipe("rtn", group=32, format="gptq"))):
        quantize(source, recipe.checked(), samples if name == "gptq" else (), tmp_path / name)
        found = loaded(tmp_path / name)
        exact = logits(folder, source.wide(source.weights), samples[0])
        errors[name] = float((logits(tmp_path / name, found, samples[0]) - exact).square().mean())
        config = json.loads((tmp_path / name / "config.json").read_text())
        skipped = [pattern.removeprefix("-:") for pattern in config["quantization_config"]["dynamic"]]
        modules = {name.rpartition(".")[0] for name in Checkpoint(tmp_path / name).names()}
        routers = {module for module in modules if module.endswith(("moe.gate", "mlp.gate"))}
        assert {module for module in modules if any(re.match(one, module) for one in skipped)} == routers != set()
    assert errors["gptq"] < errors["rtn"]


@pytest.fixture(scope="module")
def whole(source: Source, samples: Samples, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint by GPTQ that nothing interrupted."""
    folder = tmp_path_factory.mktemp("quantized") / "whole"
    quantize(source, Recipe("gptq", group=32).checked(), samples, folder)
    return folder


def require_the_same_files(folder: Path, whole: Path) -> None:
    paths = list(whole.glob("*.safetensors"))
    assert paths
    for path in paths:
        assert (folder / path.name).read_bytes() == path.read_bytes()


def test_a_run_that_was_stopped_goes_on_to_the_same_files(
    source: Source, samples: Samples, whole: Path, tmp_path: Path
) -> None:
    recipe = Recipe("gptq", group=32).checked()

    def stop(done: int, of: int) -> None:
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(source, recipe, samples, tmp_path / "broken", stop)
    assert not (tmp_path / "broken" / "config.json").exists()
    seen: list[int] = []
    quantize(source, recipe, samples, tmp_path / "broken", lambda done, of: seen.append(done))
    assert seen == [1, 2]
    require_the_same_files(tmp_path / "broken", whole)


@pytest.mark.parametrize("step", ["write", later("keep"), "copied"])
def test_a_run_that_was_stopped_within_a_layer_goes_on_to_the_same_files(
    step: str, source: Source, samples: Samples, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe("gptq", group=32).checked()
    keep = OutputFolder.keep

    def stop(output: OutputFolder, *of: Any) -> None:
        if step == "copied":  # once the next layer's input is there, before this layer's is deleted
            with monkeypatch.context() as within:
                within.setattr("baton.quantize.output.shutil.rmtree", lambda *_, **__: None)
                keep(output, *of)
        raise KeyboardInterrupt

    def told(done: int, of: int) -> None:
        monkeypatch.setattr(OutputFolder, "write" if step == "write" else "keep", stop)

    with monkeypatch.context(), pytest.raises(KeyboardInterrupt):
        quantize(source, recipe, samples, tmp_path / "broken", told)
    monkeypatch.undo()
    quantize(source, recipe, samples, tmp_path / "broken")
    require_the_same_files(tmp_path / "broken", whole)


@pytest.mark.parametrize(("method", "layers"), [("rtn", 0), later("gptq", 1)])
def test_a_full_disk_is_a_sentence_and_the_run_goes_on_once_there_is_room(
    method: str, layers: int, source: Source, samples: Samples, tmp_path: Path
) -> None:
    recipe = Recipe(method, group=32).checked()
    text, room = samples if method == "gptq" else (), ExitStack()

    def told(done: int, of: int) -> None:
        if done == layers:
            room.enter_context(files_up_to(10_000))

    quantize(source, recipe, text, tmp_path / "whole")
    with room, pytest.raises(ConfigError, match=r"can't write to .*broken: .*make room there; the same command"):
        quantize(source, recipe, text, tmp_path / "broken", told)
    quantize(source, recipe, text, tmp_path / "broken")
    for path in (tmp_path / "whole").glob("*.safetensors"):
        assert (tmp_path / "broken" / path.name).read_bytes() == path.read_bytes()


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """Has each write behind a file's first ``size`` bytes fail."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_folder_that_cannot_be_is_refused_with_the_flag(source: Source, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match=r"can't write to .*: .*file is no folder: name another --out"):
        quantize(source, Recipe("rtn", group=32).checked(), (), tmp_path / "file" / "out")


def test_a_folder_that_was_begun_with_something_else_is_refused(
    source: Source, samples: Samples, tmp_path: Path
) -> None:
    def stop(done: int, of: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(source, Recipe("rtn", group=32).checked(), (), tmp_path / "out", stop)
    with pytest.raises(ConfigError, match="begun with another group"):
        quantize(source, Recipe("rtn", group=64).checked(), (), tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="isn't empty"):
        quantize(source, Recipe("rtn", group=32).checked(), (), tmp_path / "full")


def test_a_second_run_to_a_folder_that_is_being_written_is_refused(source: Source, tmp_path: Path) -> None:
    recipe = Recipe("rtn", group=32).checked()

    def told(done: int, of: int) -> None:
        with pytest.raises(ConfigError, match=r"another run is writing to .*out: wait for it"):
            quantize(source, recipe, (), tmp_path / "out")

    quantize(source, recipe, (), tmp_path / "out", told)


def test_a_checkpoint_that_is_quantized_already_is_refused(source: Source, tmp_path: Path) -> None:
    quantize(source, Recipe("rtn", group=32).checked(), (), tmp_path / "out")
    with pytest.raises(ConfigError, match="quantized already"):
        Source(str(tmp_path / "out"))
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ConfigError, match="a GGUF file can't be quantized further"):
        Source(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (Recipe("hqq"), "--method 'hqq' is unknown; use rtn, gptq"),
        (Recipe("gptq", bits=3), "--bits 3"),
        (Recipe("nf4", symmetric=False), "--asymmetric: nf4 has no zero points"),
        (Recipe("gptq", group=100), "--group 100"),
        (Recipe("rtn", group=-128), "--group -128"),
        (Recipe("nf4", format="gptq"), "nf4 is written as bitsandbytes"),
        (Recipe("awq", bits=8, format="awq"), "the awq format holds 4"),
        (Recipe("rtn", regroup=True), "--regroup is for the gptq method"),
    ],
)
def test_a_recipe_that_cannot_be_is_refused_by_its_flag(recipe: Recipe, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        recipe.checked()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("smoothquant", 4, None), "smoothquant has 8"),
        (("fp8", None, 128), "fp8 has whole rows"),
        (("nf4", 4, 64), ""),
    ],
)
def test_bits_and_groups_that_a_method_does_not_round_to_are_refused(
    asked: tuple[str, int | None, int | None], said: str
) -> None:
    if not said:
        grid_of(*asked)
        return
    with pytest.raises(ConfigError, match=said):
        grid_of(*asked)


def test_groups_that_do_not_divide_are_refused_by_the_tensor(source: Source) -> None:
    with pytest.raises(ConfigError, match=r"tensor model.layers.0.self_attn.q_proj.weight has 128 inputs.* 96"):
        running.require_fitting(source, Recipe("rtn", group=96).checked())
