"""Models that also accept images, saved whole by transformers: their text model answers as theirs does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.protos.nouns import Sampling
from tests.conformance.checkpoints import expected, prompts, quiet, vary
from tests.conformance.drive import Driver

VOCAB, TOKENS = 997, 24
TEXT = {"vocab_size": VOCAB, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3, "head_dim": 24,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}  # fmt: skip
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 96,
          "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 5e6, "mrope_interleaved": True, "mrope_section": [4, 4, 4]}


def saved(model: Any, directory: Path) -> Any:
    quiet()
    vary(model)
    model.save_pretrained(directory)
    return model.eval()


def test_qwen3_vls_text_is_answered_token_by_token(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.Qwen3VLConfig(
        text_config=TEXT | {"rope_parameters": ROPE}, vision_config=VISION, tie_word_embeddings=True
    )
    theirs = saved(transformers.Qwen3VLForConditionalGeneration(config).float(), tmp_path)
    ours = load_runner(EngineConfig(str(tmp_path), threads=1))
    asked = prompts(VOCAB, count=5)
    answers = Driver(ours, pages=120).answer(asked, Sampling(temperature=0.0, max_tokens=TOKENS))
    for prompt, answer in zip(asked, answers, strict=True):
        assert expected(theirs, prompt, answer).argmax(-1).tolist() == answer
