"""Tiny random encoders in Hugging Face layout, and what transformers makes of a text.

Knows nothing of engines.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.conformance.checkpoints import quiet, vary

SMALL = {"num_hidden_layers": 2, "initializer_range": 0.2, "max_position_embeddings": 160}
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {
        "model_type": "bert", "vocab_size": 301, "hidden_size": 60, "num_attention_heads": 6,
        "intermediate_size": 100,
    },
    "xlm-roberta": {
        "model_type": "xlm-roberta", "vocab_size": 257, "hidden_size": 48, "num_attention_heads": 4,
        "intermediate_size": 72, "hidden_act": "gelu_new", "pad_token_id": 1, "type_vocab_size": 1,
        "max_position_embeddings": 162,
    },
    "modernbert": {
        "model_type": "modernbert", "vocab_size": 283, "hidden_size": 72, "num_attention_heads": 3,
        "intermediate_size": 88, "num_hidden_layers": 4, "local_attention": 24, "pad_token_id": 0,
    },
}  # fmt: skip


def make_encoder(directory: Path, kind: str, scores: bool = False, seed: int = 0, **changes: Any) -> Path:
    """Write the encoder ``kind``, or a cross-encoder of it, and return ``directory``."""
    quiet()
    fields = SMALL | ENCODERS[kind] | changes | ({"num_labels": 1} if scores else {})
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    torch.manual_seed(seed)
    auto = transformers.AutoModelForSequenceClassification if scores else transformers.AutoModel
    model = auto.from_config(config, dtype=torch.float32)
    vary(model)
    model.save_pretrained(directory)
    return directory


class Encoded:
    """Transformers' own computation over a checkpoint."""

    def __init__(self, directory: Path, scores: bool = False) -> None:
        auto = transformers.AutoModelForSequenceClassification if scores else transformers.AutoModel
        self._model = auto.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()

    def states(self, ids: list[int]) -> torch.Tensor:
        """(tokens, hidden) of the last layer."""
        with torch.inference_mode():
            return self._model(torch.tensor([ids])).last_hidden_state[0]

    def score(self, ids: list[int], types: list[int] | None = None) -> float:
        """The logit of a pair."""
        more = {} if types is None else {"token_type_ids": torch.tensor([types])}
        with torch.inference_mode():
            return float(self._model(torch.tensor([ids]), **more).logits[0, 0])


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]


def write_wordpiece(directory: Path, vocab_size: int) -> Tokenizer:
    """Writes a WordPiece tokenizer trained on this very file, which reads texts and pairs as BERT's does."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=WORDS)
    tokenizer.train_from_iterator(Path(__file__).read_text().splitlines(), trainer)
    special = [(word, tokenizer.token_to_id(word)) for word in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=special
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    return tokenizer
