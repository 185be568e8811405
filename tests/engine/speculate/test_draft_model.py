"""A draft model beside the target: what it drafts is what it would write, whatever was drafted before."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest
import torch

from baton.engine.backends.native.runner import NativeRunner
from baton.engine.backends.paced.runner import PacedRunner, paced_answer
from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.engine.speculate.draft_model import DraftModel, require_same_tokens
from baton.engine.speculate.drafter import Drafter
from baton.engine.speculate.heads.files import packing
from baton.kernels.abi import native
from baton.kernels.linear import packed
from baton.protos.errors import ConfigError
from baton.protos.nouns import Sampling
from baton.worker.drafts import make_drafter
from baton.worker.spec import EngineSpec
from tests.conformance.checkpoints import make
from tests.engine.speculate.texts import Written

MODELS = Path(__file__).parents[3] / "models"
SHAPE = {"kv_bytes_per_token": 32, "vocab_size": 997, "max_model_len": 512}
GREEDY = Sampling(temperature=0.0, max_tokens=64)


def drafting(pages: int = 64) -> DraftModel:
    return DraftModel(PacedRunner("draft", step_seconds=lambda shape: 0.0, **SHAPE), pages)  # type: ignore[arg-type]


def written(seq: int, tokens: list[int], sampling: Sampling = GREEDY) -> Written:
    text = Written(seq, tokens, prompt=len(tokens))
    text.request = msgspec.structs.replace(text.request, sampling=sampling)
    return text


def drafted(model: DraftModel, text: Written, budget: int = 4) -> list[int]:
    model.prepare([text], budget)
    draft = model.propose(text, budget)
    return list(draft.tokens) if draft else []


def own(tokens: list[int], count: int, sampling: Sampling = GREEDY) -> list[int]:
    """Returns what the draft model itself would write."""
    return paced_answer(tokens, msgspec.structs.replace(sampling, max_tokens=count), **SHAPE)


def test_it_drafts_what_it_would_write_after_any_text_accepted_or_not() -> None:
    model, text = drafting(), written(1, [5, 6, 7])
    for taken in (0, 4, 2, 1, 0):
        draft = drafted(model, text)
        assert draft == own(text.tokens, 4)
        text.tokens += [*draft[:taken], 900]


def test_a_draft_that_went_wrong_and_came_right_again_leaves_no_kv_behind() -> None:
    model, text = drafting(), written(1, [5, 6, 7])
    draft = drafted(model, text)
    text.tokens += [draft[0], 900, draft[2], 901]  # the third is what was drafted, but behind another second
    assert drafted(model, text) == own(text.tokens, 4)


def test_a_draw_is_the_one_of_its_position_and_seed() -> None:
    drawn = Sampling(temperature=0.8, seed=4, max_tokens=64, presence_penalty=1.0, logprobs=2)
    text = written(1, [5, 6, 7], drawn)
    plain = msgspec.structs.replace(drawn, presence_penalty=0.0, logprobs=None)
    assert drafted(drafting(), text) == own(text.tokens, 4, plain)


def test_a_long_text_is_read_over_some_calls() -> None:
    model, text = drafting(), written(1, [i % 90 for i in range(200)])
    found = [drafted(model, text, 1) for _ in range(5)]
    assert found[0] == []
    assert found[-1] == own(text.tokens, 1)


def test_many_are_drafted_in_one_go_and_those_without_a_page_go_without() -> None:
    model = drafting(pages=3)
    texts = [written(seq, [seq + i for i in range(14)]) for seq in range(5)]
    model.prepare(texts, 2)
    drafts = [model.propose(text, 2) for text in texts]
    assert sum(draft is not None for draft in drafts) >= 1
    for text, draft in zip(texts, drafts, strict=True):
        assert draft is None or list(draft.tokens) == own(text.tokens, 2)
    for text in texts:
        model.end(text)
    assert sorted(model._free) == [0, 1, 2]


def test_one_whose_context_is_full_is_left_alone() -> None:
    assert drafted(drafting(), written(1, [3] * 510)) == []


def test_other_tokens_are_refused_by_name() -> None:
    one = PacedRunner("a", step_seconds=lambda shape: 0.0, **SHAPE)  # type: ignore[arg-type]
    other = PacedRunner("b", step_seconds=lambda shape: 0.0, **(SHAPE | {"vocab_size": 998}))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="draft:x: the draft model has 998 tokens and the model 997"):
        require_same_tokens(other.spec, one.spec, "draft:x")


def test_a_draft_model_is_loaded_beside_its_target_or_refused_by_name(tmp_path: Path) -> None:
    target = PacedRunner("a", step_seconds=lambda shape: 0.0, **SHAPE)  # type: ignore[arg-type]
    paced = EngineSpec(device="paced:zero")
    with pytest.raises(ConfigError, match="paced engine"):
        make_drafter(f"draft:{MODELS / 'demo-draft'}", paced, target, 64)
    real = EngineSpec(model=str(MODELS / "demo"), threads=1)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="isn't that of"):
        make_drafter(f"draft:{tmp_path}", real, target, 64)
    for asked in ("self:\u00b2", "self:x"):
        with pytest.raises(ConfigError, match="isn't known; choose from none, auto"):
            make_drafter(asked, real, target, 64)
    assert make_drafter("none", real, target, 64) is None
    assert isinstance(make_drafter("suffix", paced, target, 64), Drafter)
    assert make_drafter("auto", paced, target, 64) is None, "the tokens of a paced engine repeat nothing"
    both = make_drafter("auto+suffix", paced, target, 64)
    assert both is not None
    assert [one.name for one in both._speculators] == ["suffix"]


@pytest.mark.skipif(native.library() is None, reason="no native kernels here")
def test_a_draft_model_is_cut_and_rounded_as_its_target_as_far_as_that_fits(tmp_path: Path) -> None:
    made = make(tmp_path / "model", "llama3")
    shutil.copy(MODELS / "demo" / "tokenizer.json", made / "tokenizer.json")
    target = load_runner(EngineConfig(str(made), threads=1))
    overrides = {"*.down_proj": "int4", "model.layers.77.*": "int8"}
    engine = EngineSpec(
        model=str(made),
        threads=1,
        max_model_len=40,
        quantization="int8",
        quantization_overrides=overrides,
        activations="bf16",
        cache_dir=str(tmp_path),
    )
    drafter = make_drafter(f"draft:{made}", engine, target, 64)
    assert drafter is not None
    [model] = drafter._speculators
    assert isinstance(model, DraftModel)
    runner = model._runner
    assert isinstance(runner, NativeRunner)
    assert runner.spec.max_model_len == 40
    kinds = {name: weight.kind for name, weight in runner._program._packed.items()}
    [most] = {kind for name, kind in kinds.items() if "down" not in name}
    assert {name for name, kind in kinds.items() if kind != most} == {"0.down", "1.down"}
    assert {kinds["0.down"], most} == {packed.W4 + packed.A16, packed.W8 + packed.A16}
    # Of the target's own weights; a plain draft model has none to choose for.
    plain = EngineSpec(model=str(made), threads=1, activations="fp8", cache_dir=str(tmp_path))
    assert make_drafter(f"draft:{made}", plain, target, 64) is not None


def test_heads_have_the_form_of_the_targets_weights() -> None:
    weight = torch.randn(64, 64)
    assert packing("bfloat16", "int4", "bf16")(weight).kind == packed.W4 + packed.A16
    assert packing("bfloat16", "int8", "bf16")(weight).kind == packed.W8 + packed.A16
    assert packing("bfloat16", "int8")(weight).kind == packed.W8
