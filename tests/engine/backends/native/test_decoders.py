"""Decoders with ops of their own in the native step: one call, each op its reference's, the head's biases in it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from baton.kernels.abi import native
from baton.protos.nouns import Sampling
from tests.conformance.checkpoints import prompts
from tests.conformance.drive import Driver
from tests.engine.small_models import load, model, require_the_same_bits
from tests.thorough import first_now

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")

# Between them they have every op of which torch computed a detour.
KINDS = ("phimoe", "jamba", "llama4", "hunyuan_dense", "nemotron_h", "starcoder2", "cohere2", "glm", "gemma3n")
GREEDY = Sampling(temperature=0.0, max_tokens=5, logprobs=1)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("decoders")


def asked(vocab: int) -> list[list[int]]:
    return [prompt[:45] for prompt in prompts(vocab, 7)[4:]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_one_native_call(home: Path, kind: str) -> None:
    engine = load(model(home, kind), home)
    assert not engine._program.foreign
    assert engine._stretches == ((0, len(engine._program.ops)),)


@pytest.mark.parametrize("fields", first_now([{}, {"quantization": "int4", "kv_cache_dtype": "int8"}], 1), ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_op_is_its_references_and_bits_dont_depend_on_company(
    home: Path, kind: str, fields: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = asked(331)
    require_the_same_bits(lambda: load(model(home, kind), home, **fields), mine, GREEDY, (32, 23), monkeypatch)


@pytest.mark.parametrize("kind", ["phimoe", "starcoder2"])
def test_tokens_are_drawn_from_biased_logits_in_the_step_as_from_those_that_are_returned(
    home: Path, kind: str
) -> None:
    quiet = Sampling(temperature=1.3, seed=5, max_tokens=20)
    for each in (quiet, msgspec.structs.replace(quiet, top_p=0.9), msgspec.structs.replace(quiet, temperature=0.0)):
        engine, mine = load(model(home, kind), home), asked(331)
        told = Driver(engine, pages=60).answer(mine, msgspec.structs.replace(each, logprobs=1))
        assert Driver(engine, pages=60).answer(mine, each) == told
