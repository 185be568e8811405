"""A GGUF file alone is a model: its sizes, its text and its answers are those of the checkpoint it was made of."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import numpy as np
import pytest
import torch
import transformers
from huggingface_hub import constants
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from baton.cluster.config import BatonConfig
from baton.cluster.served_model import resolve_model, text_directory
from baton.engine.checkpoints.hub import locate
from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.engine.models import program_for
from baton.engine.program.config import ModelConfig
from baton.engine.program.rope import frequencies
from baton.gguf_files import hub
from baton.gguf_files.folder import folder_of
from baton.gguf_files.tokenizer import LLAMA3, QWEN2
from baton.launch.servable import servable_model
from baton.planner.costs.model_shape import from_config
from baton.protos.errors import CheckpointError
from baton.protos.nouns import Sampling
from baton.router.text.model import load_text
from tests.conformance.drive import Driver
from tests.gguf_files.files import DEMO, demo, header_of, text_fields

TEXTS = ("What is a river?", "  It's 2024, naïve œuvre 😀\n\n\tx = 3.14  ", "<|user|> hi <|end|>", "")
SIZES: dict[str, Any] = {
    "llama__block_count": 2,
    "llama__embedding_length": 64,
    "llama__feed_forward_length": 96,
    "llama__context_length": 512,
    "llama__attention__head_count": 4,
    "llama__vocab_size": 99,
}
GREEDY = Sampling(temperature=0.0, max_tokens=16, logprobs=1)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        kernels = Path(os.environ.get("BATON_CACHE_DIR") or Path.home() / ".cache" / "baton")
        own = tmp_path_factory.mktemp("cache")
        for made in kernels.glob("*"):
            (own / made.name).symlink_to(made) if made.name not in ("gguf", "weights") else None
        patch.setenv("BATON_CACHE_DIR", str(own))
        yield


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo(tmp_path_factory.mktemp("gguf") / "Demo-BF16.gguf")


def test_it_is_served_as_the_checkpoint_it_was_made_of(file: Path) -> None:
    ids = Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode("The river is").ids
    found = []
    for model in (str(DEMO), str(file)):
        config = EngineConfig(model, dtype="bfloat16", threads=1)
        driver = Driver(load_runner(config), pages=20)
        found.append((driver.answer([ids], GREEDY), [each.chosen.logprob for each in driver.logprobs[0]]))
    assert found[0][0] == found[1][0]
    assert found[1][1] == pytest.approx(found[0][1], abs=0.02)


def test_its_text_is_the_checkpoints(file: Path) -> None:
    theirs, ours = (load_text(text_directory(str(model)), 4096) for model in (DEMO, file))
    for text in TEXTS:
        assert ours.tokenizer.encode(text, True) == theirs.tokenizer.encode(text, True)
        ids = theirs.tokenizer.encode(text, False)
        assert ours.tokenizer.decode(ids) == theirs.tokenizer.decode(ids)
    said = [{"role": "user", "content": "hello"}]
    assert ours.render_chat(said) == theirs.render_chat(said)  # type: ignore[arg-type]
    assert ModelConfig.read(locate(str(file))).eos_token_ids == (1,)


def test_whoever_takes_a_model_takes_the_file(file: Path) -> None:
    config = BatonConfig.model_validate({"worker": {"model": str(file)}})
    assert resolve_model(config) == servable_model(config) == str(file)
    assert from_config(str(file)).num_hidden_layers == 8
    assert folder_of(file) == folder_of(str(file)), "made once"
    before = folder_of(file)
    os.utime(file, ns=(1, 1))
    assert folder_of(file) != before, "a file that changed is another model"


def trained(split: str) -> Tokenizer:
    """A byte-level tokenizer of the held-out text, cut by ``split``."""
    found = Tokenizer(models.BPE(ignore_merges="{1,3}" in split))
    cut = pre_tokenizers.Split(split_of(split), "isolated")
    found.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(False, use_regex=False)])
    found.decoder = decoders.ByteLevel()
    if "{1,3}" not in split:
        found.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=600, show_progress=False, special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    found.train_from_iterator([(DEMO / "heldout.txt").read_text()[:60000]], trainer)
    return found


def split_of(pattern: str) -> Any:
    return Regex(pattern)


def test_answers_end_at_every_special_token_that_ends_turns_or_texts(tmp_path: Path) -> None:
    """A header names the end of a text, as Llama 3's first files do, and conversations end at another token."""
    tokens = ["a", "<|end_of_text|>", "<|eot_id|>", "<|im_start|>", "<|endoftext|>", "<|end|>"]
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1, 3, 3, 3, 4, 1],  # the last one is a word like any other
        "tokenizer.ggml.merges": ["a a"],
        "tokenizer.ggml.eos_token_id": 1,
    }
    folder = folder_of(header_of(tmp_path / "t.gguf", **SIZES, **fields))
    assert ModelConfig.read(folder).eos_token_ids == (1, 2, 4)


@pytest.mark.parametrize(("pre", "pattern"), [("llama-bpe", LLAMA3), ("qwen2", QWEN2)])
def test_byte_level_text_is_cut_as_the_header_names_it(tmp_path: Path, pre: str, pattern: str) -> None:
    theirs = trained(pattern)
    path = header_of(tmp_path / "t.gguf", **SIZES, **text_fields(theirs, pre, {"bos": 0, "eos": 1}))
    ours = Tokenizer.from_file(str(folder_of(path) / "tokenizer.json"))
    begins = [0] if pre == "llama-bpe" else []
    for text in (*TEXTS, "WE'LL count 12345 e\u0301"):
        ids = theirs.encode(text).ids
        assert ours.encode(text).ids == begins + ids
        assert ours.decode(ids) == theirs.decode(ids)


def test_sentencepiece_text_is_what_transformers_reads_from_the_same_file(tmp_path: Path) -> None:
    pieces = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    pieces.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=700, show_progress=False, special_tokens=first)
    pieces.train_from_iterator([(DEMO / "heldout.txt").read_text()[:60000]], trainer)
    tokens = [word for word, _ in sorted(pieces.get_vocab().items(), key=lambda item: item[1])]
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)]
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(tokens) - 259)],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    path = header_of(tmp_path / "t.gguf", general__file_type=1, **SIZES, **fields)
    ours = Tokenizer.from_file(str(folder_of(path) / "tokenizer.json"))
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path), gguf_file="t.gguf")
    for text in ("What is a river?", "naïve œuvre 😀 x = 3.14", "The  answer\nis 42."):
        ids = ours.encode(text).ids
        assert ids == theirs(text)["input_ids"]
        assert ours.decode(ids) == text


def test_llama_3s_factors_per_frequency_are_those_of_its_config(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    sizes = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    rope = {"rope_theta": 5e5, "rope_scaling": scaling | {"original_max_position_embeddings": 1024}}
    fields = {"model_type": "llama", "num_attention_heads": 2, "max_position_embeddings": 4096, **sizes, **rope}
    wanted, _ = frequencies(ModelConfig(tmp_path, fields, ()).rope(), 32, 4096)
    plain = 1.0 / (5e5 ** (torch.arange(0, 32, 2).float() / 32))
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    for name, value in (SIZES | {"llama__attention__head_count": 2, "llama__context_length": 4096}).items():
        writer.add_uint32(name.replace("__", "."), value)
    writer.add_float32("llama.rope.freq_base", 5e5)
    writer.add_tensor("rope_freqs.weight", (plain / wanted).numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    program = program_for(ModelConfig.read(folder_of(tmp_path / "t.gguf")))
    found, factor = frequencies(program.rope, program.head_dim, program.max_position)
    assert factor == 1.0
    assert torch.allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"architecture": "gemma2"},
            r"general.architecture is 'gemma2'; known are llama, qwen2, .* use safetensors",
        ),
        ({"llama__block_count": 0}, r"llama.block_count is 0; one number above 0"),
        ({"llama__attention__head_count_kv": [1, 2]}, r"llama.attention.head_count_kv is \[1, 2\]"),
        ({"llama__rope__scaling__type": "spiral"}, r"rope.scaling.type is 'spiral'; none, linear and yarn"),
        (
            {"tokenizer__ggml__model": "gpt2", "tokenizer__ggml__tokens": ["a"], "tokenizer__ggml__pre": "new"},
            r"tokenizer.ggml.pre is 'new'; known are .* put the model's tokenizer.json beside the file",
        ),
        (
            {"tokenizer__ggml__model": "t5", "tokenizer__ggml__tokens": ["a"]},
            r"ggml.model is 't5'; known are gpt2, llama",
        ),
        (
            {"tokenizer__ggml__model": "llama", "tokenizer__ggml__tokens": ["a", "b"]},
            r"ggml.scores has 0 numbers for 2 tokens: put the model's tokenizer.json beside the file",
        ),
    ],
    ids=["architecture", "size", "varying", "rope", "pre", "kind", "scores"],
)
def test_a_header_that_is_not_known_is_refused_by_field(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    path = header_of(tmp_path / "t.gguf", **(SIZES | fields))
    with pytest.raises(CheckpointError, match=said):
        folder_of(path)


def test_a_tokenizer_beside_the_file_comes_before_its_header(tmp_path: Path) -> None:
    fields = {"tokenizer__ggml__model": "gpt2", "tokenizer__ggml__tokens": ["a"], "tokenizer__ggml__pre": "new"}
    path = header_of(tmp_path / "t.gguf", **SIZES, **fields)
    (tmp_path / "tokenizer.json").write_bytes((DEMO / "tokenizer.json").read_bytes())
    assert (folder_of(path) / "tokenizer.json").read_bytes() == (DEMO / "tokenizer.json").read_bytes()


def test_a_link_takes_the_tokenizer_beside_itself(tmp_path: Path) -> None:
    """The hub's cache is made of links: what belongs to a file lies beside its name."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    fields = {"tokenizer__ggml__model": "gpt2", "tokenizer__ggml__tokens": ["a"], "tokenizer__ggml__pre": "new"}
    (tmp_path / "snapshot" / "t.gguf").symlink_to(header_of(tmp_path / "blobs" / "0123", **SIZES, **fields))
    (tmp_path / "snapshot" / "tokenizer.json").symlink_to(DEMO / "tokenizer.json")
    found = folder_of(tmp_path / "snapshot" / "t.gguf")
    assert (found / "tokenizer.json").read_bytes() == (DEMO / "tokenizer.json").read_bytes()
    assert (found / "model.gguf").resolve() == tmp_path / "blobs" / "0123"


def test_a_file_that_is_none_or_is_cut_short_is_refused_by_name(tmp_path: Path, file: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no\.gguf: there is no such file"):
        folder_of(tmp_path / "no.gguf")
    (tmp_path / "cut.gguf").write_bytes(file.read_bytes()[:5000])
    with pytest.raises(CheckpointError, match=r"cut\.gguf is damaged or no GGUF"):
        folder_of(tmp_path / "cut.gguf")


NAMES = ("README.md", "m-Q4_K_M.gguf", "m-Q4_0.gguf", "m-BF16-00001-of-00002.gguf", "m-BF16-00002-of-00002.gguf")


def test_a_file_of_a_repository_is_named_by_what_tells_it_from_the_others() -> None:
    assert hub.chosen(NAMES, "Q4_K_M", "o/r") == hub.chosen(NAMES, "m-q4_k_m.gguf", "o/r") == ["m-Q4_K_M.gguf"]
    assert hub.chosen(NAMES, "q4_0", "o/r") == ["m-Q4_0.gguf"]
    assert hub.chosen(NAMES, "BF16", "o/r") == hub.chosen(NAMES, NAMES[4], "o/r") == list(NAMES[3:])
    with pytest.raises(CheckpointError, match=r"o/r: Q8_0 names none; it has .*m-Q4_0.gguf"):
        hub.chosen(NAMES, "Q8_0", "o/r")
    with pytest.raises(CheckpointError, match=r"BF16 has 2 parts, of which m-BF16-00001-of-00002\.gguf is missing"):
        hub.chosen(NAMES[:3] + NAMES[4:], "BF16", "o/r")
    with pytest.raises(CheckpointError, match="m names 4 files"):
        hub.chosen(NAMES, "m", "o/r")


def test_a_file_of_a_repository_comes_from_the_local_cache_where_the_hub_is_out_of_reach(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "models--org--demo-GGUF"
    snapshot = repository / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    snapshot.mkdir(parents=True)
    (snapshot / "Demo-BF16.gguf").symlink_to(file)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot.name)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model = "org/demo-GGUF:BF16"
    config = BatonConfig.model_validate({"worker": {"model": model}})
    assert resolve_model(config) == model
    assert locate(model) == text_directory(model) == folder_of(file)
    with pytest.raises(CheckpointError, match=r"Q8_0 names none; it has Demo-BF16.gguf"):
        locate("org/demo-GGUF:Q8_0")


def test_a_repositorys_tokenizer_comes_with_its_file(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub is played by a folder: what is asked of it, and where that lands, side by side."""
    fields = {"tokenizer__ggml__model": "gpt2", "tokenizer__ggml__tokens": ["a"], "tokenizer__ggml__pre": "new"}
    held = tmp_path / "q4"
    held.mkdir()
    header_of(held / "m-Q4_0.gguf", **SIZES, **fields)
    (held / "tokenizer.json").write_bytes((DEMO / "tokenizer.json").read_bytes())
    asked: list[str] = []

    def download(repo: str, name: str, etag_timeout: float) -> str:
        asked.append(name)
        return str(tmp_path / name)

    class Api:
        def list_repo_files(self, repo: str) -> list[str]:
            return ["README.md", "tokenizer.json", "q4/m-Q4_0.gguf", "q4/tokenizer.json"]

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert (locate("org/odd-GGUF:Q4_0") / "tokenizer.json").read_bytes() == (held / "tokenizer.json").read_bytes()
    assert asked == ["q4/tokenizer.json", "q4/m-Q4_0.gguf"]


def test_what_is_made_is_json_that_others_read(file: Path) -> None:
    folder = folder_of(file)
    config = transformers.AutoConfig.from_pretrained(str(folder))
    assert (config.model_type, config.num_hidden_layers, config.tie_word_embeddings) == ("llama", 8, True)
    assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": [1]}
