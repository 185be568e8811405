"""A GGUF model in several parts, as gguf's own writer splits it, is the model of the one file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from baton.cluster.config import BatonConfig
from baton.cluster.served_model import resolve_model, text_directory
from baton.engine.checkpoints.hub import locate
from baton.engine.program.config import ModelConfig
from baton.engine.quant.gguf import GgufCheckpoint
from baton.gguf_files.folder import folder_of
from baton.gguf_files.hub import fetched
from baton.gguf_files.parts import names_of
from baton.planner.costs.model_shape import from_config
from baton.protos.errors import CheckpointError
from tests.fake_hub import hub as fake_hub
from tests.gguf_files.files import DEMO, demo

CONFIG = json.loads((DEMO / "config.json").read_text())
HIDDEN, WORDS = CONFIG["hidden_size"], CONFIG["vocab_size"]
WEIGHTS = {
    "model.embed_tokens.weight": (WORDS, HIDDEN),
    "model.layers.3.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
    "model.norm.weight": (HIDDEN,),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Fields alone in the first part, then thirty tensors each."""
    path = tmp_path_factory.mktemp("parts") / "Demo.gguf"
    demo(path, split_max_tensors=30, small_first_shard=True)
    found = sorted(path.parent.glob("*.gguf"))
    assert [part.name for part in found] == names_of("Demo-00001-of-00004.gguf")
    return found


@pytest.fixture
def own(parts: list[Path], tmp_path: Path) -> list[Path]:
    """Parts that a test may spoil."""
    return [Path(shutil.copy(part, tmp_path / part.name)) for part in parts]


def _checkpoint(folder: Path) -> GgufCheckpoint:
    found = GgufCheckpoint.find(folder, ModelConfig.read(folder))
    assert found is not None
    return found


def _no_hashes(path: Path, ranges: dict[str, tuple[int, int]]) -> dict[str, str]:
    raise AssertionError(f"{path} is small: its bytes count themselves")


@pytest.mark.parametrize("named", [0, 2])
def test_any_part_names_the_model_of_the_one_file(parts: list[Path], tmp_path: Path, named: int) -> None:
    whole, split = folder_of(demo(tmp_path / "Demo.gguf")), folder_of(parts[named])
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (split / name).read_bytes() == (whole / name).read_bytes()
    theirs, ours = _checkpoint(whole), _checkpoint(split)
    assert sorted(ours.names()) == sorted(theirs.names())
    for name, shape in WEIGHTS.items():
        found, wanted = ours.read(name, shape), theirs.read(name, shape)
        assert isinstance(found, torch.Tensor)
        assert isinstance(wanted, torch.Tensor)
        assert found.equal(wanted)
    assert split == folder_of(parts[0])
    bits = [from_config(str(file)).precision.linear for file in (parts[named], tmp_path / "Demo.gguf")]
    assert bits[0] == pytest.approx(bits[1], rel=1e-3)


def test_every_byte_of_every_part_counts(own: list[Path]) -> None:
    before = _checkpoint(folder_of(own[0])).fingerprint({}, _no_hashes)
    spoilt = bytearray(own[2].read_bytes())
    spoilt[-1] ^= 1
    own[2].write_bytes(spoilt)
    assert _checkpoint(folder_of(own[0])).fingerprint({}, _no_hashes) != before


def test_a_repositorys_parts_and_files_come_by_the_hubs_own_client(
    parts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub is played by a server, which the real client asks."""
    shelf = tmp_path / "shelf"
    (shelf / "BF16").mkdir(parents=True)
    for part in parts:
        shutil.copy(part, shelf / "BF16" / part.name.replace("Demo", "Demo-BF16"))
    quarter = demo(shelf / "Demo-Q4_0.gguf")
    (shelf / "README.md").write_text("# Demo")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with fake_hub({"acme/demo-GGUF": shelf}) as endpoint:
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        )
        for name in ("acme/demo-GGUF:BF16", "acme/demo-GGUF:Q4_0"):
            config = BatonConfig.model_validate({"worker": {"model": name}})
            assert resolve_model(config) == name
            assert text_directory(name) == locate(name)
        split, alone = locate("acme/demo-GGUF:BF16"), locate("acme/demo-GGUF:Q4_0")
        assert sorted(_checkpoint(split).names()) == sorted(_checkpoint(alone).names())
        assert (alone / "model.gguf").read_bytes() == quarter.read_bytes()
        with pytest.raises(CheckpointError, match=r"Q8_0 names none; it has BF16/Demo-BF16-00001-of-00004\.gguf"):
            locate("acme/demo-GGUF:Q8_0")
        with pytest.raises(CheckpointError, match="Demo names 5 files"):
            locate("acme/demo-GGUF:Demo")
        for finds in (locate, text_directory):
            with pytest.raises(CheckpointError, match=r"name one by acme/demo-GGUF:NAME, of .*, Demo-Q4_0\.gguf"):
                finds("acme/demo-GGUF")
        with pytest.raises(CheckpointError, match=r"no/where:Q4_0: the hub gave RepositoryNotFoundError"):
            locate("no/where:Q4_0")
    fetched.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert locate("acme/demo-GGUF:BF16") == split  # from the cache, with the hub out of reach


def test_a_part_that_is_missing_is_named(own: list[Path]) -> None:
    own[2].unlink()
    with pytest.raises(CheckpointError, match=r"Demo-00003-of-00004\.gguf: there is no such file; all 4 parts"):
        folder_of(own[0])


def test_a_part_by_another_ones_name_is_refused(own: list[Path]) -> None:
    shutil.copy(own[1], own[2])
    with pytest.raises(
        CheckpointError, match=r"00003-of-00004\.gguf is part 2 of 4 by its header, 3 of 4 by its name"
    ):
        folder_of(own[0])


def test_a_part_under_a_name_of_its_own_is_refused(own: list[Path]) -> None:
    alone = own[0].rename(own[0].with_name("alone.gguf"))
    with pytest.raises(CheckpointError, match=r"alone\.gguf is part 1 of 4 by its header, 1 of 1 by its name"):
        folder_of(alone)


def test_a_part_that_is_cut_short_is_named(own: list[Path]) -> None:
    own[3].write_bytes(own[3].read_bytes()[:300])
    with pytest.raises(CheckpointError, match=r"00004-of-00004\.gguf is damaged or no GGUF \(300 bytes\)"):
        folder_of(own[0])
