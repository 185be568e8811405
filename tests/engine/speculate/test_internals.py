"""The inside of a runner's model: states between layers as the published model has them, and fewer layers."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.engine.backends.native.runner import NativeRunner
from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.engine.plan import SampleSpec, SequenceStep, StepPlan
from baton.engine.program.shallow import spread_layers
from baton.engine.wide_pages import widened
from baton.kernels.abi import native
from baton.protos.errors import ConfigError
from baton.protos.nouns import Sampling
from baton.worker.drafts import make_drafter
from baton.worker.spec import EngineSpec
from tests.conformance.checkpoints import make
from tests.conformance.drive import Driver
from tests.engine.speculate.heads import published

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")
KINDS = ("llama3", "olmo2", "gemma3", "qwen3_moe", "starcoder2", "phimoe", "llama4")
GREEDY = Sampling(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp(request.param), request.param)


def load(model: Path) -> NativeRunner:
    found = load_runner(EngineConfig(str(model), threads=1))
    assert isinstance(found, NativeRunner)
    return found


def bound(runner: NativeRunner, pages: int = 64) -> NativeRunner:
    runner.bind(memoryview(bytearray(pages * runner.spec.layout.page_bytes)), pages)
    return runner


def plan(tokens: list[list[int]], verify: int = 0) -> StepPlan:
    def spec(at: int) -> SampleSpec:
        return SampleSpec(GREEDY, 0, at, (), 1)

    return StepPlan(
        tuple(
            SequenceStep(
                seq, own, 0, range(8 * seq, 8 * seq + 8), spec(len(own)), verify=tuple(map(spec, range(verify)))
            )
            for seq, own in enumerate(tokens)
        )
    )


def test_states_are_the_published_models(model: Path) -> None:
    runner, rng = bound(load(model)), random.Random(1)
    inside = runner.internals
    texts = [[rng.randrange(3, 330) for _ in range(count)] for count in (9, 20)]
    every = tuple(range(inside.layers + 1))
    inside.tap(every, every_row=True)
    found = runner.run(plan(texts)).states
    theirs = AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32)
    for seq, text in enumerate(texts):
        with torch.inference_mode():
            wanted = theirs(torch.tensor([text]), output_hidden_states=True).hidden_states
        mine = torch.from_numpy(found[seq]).view(len(text), len(every), -1)
        for layer in every:
            assert torch.allclose(mine[:, layer], wanted[layer][0], rtol=1e-3, atol=2e-3), layer
    inside.tap((inside.layers,), every_row=False)
    last = runner.run(plan(texts, verify=2)).states
    assert [len(rows) for rows in last.values()] == [3, 3]
    mine = torch.from_numpy(found[0]).view(len(texts[0]), len(every), -1)[-3:, -1]
    assert torch.equal(torch.from_numpy(last[0]), mine)


def test_reading_states_changes_no_bit_of_an_answer(model: Path) -> None:
    asked, runner = [[5, 6, 7, 8], [9, 10, 11] * 9], load(model)
    plain = Driver(runner, pages=64).answer(asked, GREEDY)
    runner.internals.tap((0, 2, runner.internals.layers), every_row=True)
    assert Driver(runner, pages=64).answer(asked, GREEDY) == plain


def test_some_of_the_layers_write_what_a_model_of_those_layers_would(model: Path, tmp_path: Path) -> None:
    runner = load(model)
    layers = runner.internals.layers
    if layers < 3:
        with pytest.raises(ConfigError, match=f"the model has {layers} layers"):
            runner.internals.shallow(layers)
        return
    kept = spread_layers(layers, layers - 1)
    drafting = runner.internals.shallow(layers - 1)
    assert drafting.spec.layout.page_bytes < runner.spec.layout.page_bytes
    theirs = AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32)
    theirs.model.layers = torch.nn.ModuleList(theirs.model.layers[at] for at in kept)
    for at, layer in enumerate(theirs.model.layers):
        layer.self_attn.layer_idx = at
    theirs.model.config.num_hidden_layers = len(kept)
    if (kinds := getattr(theirs.config, "layer_types", None)) is not None:
        theirs.config.layer_types = [kinds[at] for at in kept]
    asked = [5, 6, 7, 8, 30, 31]
    mine = Driver(drafting, pages=64).answer([asked], GREEDY)[0]
    with torch.inference_mode():
        tokens = list(asked)
        for _ in mine:
            tokens.append(int(theirs(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    assert mine == tokens[len(asked) :]


def test_depths_out_of_range_and_runners_without_an_inside_are_refused_by_name(model: Path) -> None:
    runner = load(model)
    layers, engine = runner.internals.layers, EngineSpec(model=str(model), threads=1)
    for asked in ("self:1", f"self:{layers}", "self:99"):
        with pytest.raises(ConfigError, match=rf"speculation {asked}: the model has {layers} layers"):
            make_drafter(asked, engine, runner, 64)
    wide = widened(runner, 32)
    assert make_drafter("lookahead", engine, wide, 64) is not None
    del wide.internals, runner.internals
    for asked in ("self", "medusa:/x", "eagle3:/x"):
        with pytest.raises(ConfigError, match=rf"speculation {asked}: it needs the inside of the model"):
            make_drafter(asked, engine, wide, 64)


def test_heads_are_read_by_their_names_and_only_one_kind_looks_at_states(model: Path, tmp_path: Path) -> None:
    runner, engine = load(model), EngineSpec(model=str(model), threads=1)
    hidden, vocab = runner.internals.hidden, runner.spec.vocab_size
    published.medusa(tmp_path / "m", hidden, vocab)
    layers = [0, 1, runner.internals.layers]
    published.eagle3(tmp_path / "e", hidden, vocab, eagle_aux_hidden_state_layer_ids=layers)
    names = (f"medusa:{tmp_path / 'm'}", f"eagle3:{tmp_path / 'e'}")
    for name in names:
        assert make_drafter(f"{name}+prompt_lookup", engine, runner, 64) is not None
    with pytest.raises(ConfigError, match="one of medusa, eagle3 can look at the model's states"):
        make_drafter("+".join(names), engine, runner, 64)
    published.medusa(tmp_path / "other", hidden + 8, vocab)
    with pytest.raises(ConfigError, match=f"for {hidden + 8} numbers"):
        make_drafter(f"medusa:{tmp_path / 'other'}", engine, runner, 64)


def test_layers_that_stay_are_spread_from_the_first_to_the_last() -> None:
    assert spread_layers(8, 4) == (0, 2, 5, 7)
    for layers, count in itertools.product(range(3, 20), range(2, 19)):
        if count < layers:
            kept = spread_layers(layers, count)
            assert len(set(kept)) == count
            assert (kept[0], kept[-1]) == (0, layers - 1)


def test_a_model_of_several_residual_streams_has_no_states_and_no_layers_to_leave_out(tmp_path: Path) -> None:
    runner = load(make(tmp_path / "model", "gemma3n"))
    runner.internals.tap((), every_row=False)  # what a worker without such drafts asks for
    with pytest.raises(ConfigError, match="several residual streams; use prompt_lookup") as refused:
        runner.internals.tap((0,), every_row=False)
    assert refused.value.param == "speculation"
    with pytest.raises(ConfigError, match="this model's layers can't be left out"):
        runner.internals.shallow(2)
