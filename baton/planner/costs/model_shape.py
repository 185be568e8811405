"""A model's sizes by its config.json: weights, KV per token, FLOPs. Torch-free.

Knows nothing of hardware, traces or schedulers. Dense decoders with K and V only; others are refused by name.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import msgspec

from baton.gguf_files.folder import folder_of, is_gguf
from baton.planner.costs.precision import Precision, of_checkpoint, of_gguf
from baton.protos.errors import ConfigError
from baton.protos.json import Json

KNOWN = Path(__file__).parent / "models.toml"
TIED = ("gemma2", "gemma3_text")  # architectures whose head is the table unless config.json says otherwise
UNMODELLED = {  # fields of config.json whose weights or KV the formulas below don't count
    "num_experts": "it is a mixture of experts",
    "num_local_experts": "it is a mixture of experts",
    "n_routed_experts": "it is a mixture of experts",
    "kv_lora_rank": "it keeps latents in place of K and V",
    "linear_num_value_heads": "some layers keep a recurrent state",
    "attn_layer_indices": "some layers keep a recurrent state",
}
TUNED = re.compile(r"(-(instruct|chat|it|base|hf|sft|dpo|bf16))+$")  # sizes stay what they were


class ModelShape(msgspec.Struct, frozen=True):
    """Holds the sizes of a dense decoder, named as in config.json.

    ``bytes_per_value`` is of activations and embedding tables (bf16: 2), ``precision`` of weights and KV.
    """

    name: str
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    gated_mlp: bool = True
    tied: bool = False
    bytes_per_value: int = 2
    precision: Precision = Precision()

    @property
    def layer_weights(self) -> int:
        """Returns the number of parameters in one layer's matrices."""
        heads = 2 * self.num_attention_heads + 2 * self.num_key_value_heads
        mlp = (3 if self.gated_mlp else 2) * self.intermediate_size
        return self.hidden_size * (heads * self.head_dim + mlp)

    @property
    def weights(self) -> int:
        """Returns the number of parameters, embeddings included."""
        tables = (1 if self.tied else 2) * self.vocab_size * self.hidden_size
        return self.num_hidden_layers * self.layer_weights + tables

    @property
    def weight_bytes(self) -> int:
        """Returns the bytes of all weights; a quantized head is stored apart from the embedding table, even if
        tied.
        """
        table, found = self.vocab_size * self.hidden_size, self.precision
        bits = self.num_hidden_layers * self.layer_weights * found.linear + table * 8 * self.bytes_per_value
        if found.own_head or not self.tied:
            bits += table * found.head
        return int(bits / 8)

    @property
    def kv_bytes_per_token(self) -> int:
        """Returns the bytes of one token's keys and values over all layers, with their scales."""
        head = self.head_dim * self.precision.kv + self.precision.kv_scale
        return int(2 * self.num_hidden_layers * self.num_key_value_heads * head / 8)


def from_config(path: str) -> ModelShape:
    """Returns the shape in the config.json of a model directory (or in that file). Raises ConfigError naming what
    is missing.

    If there are no safetensors but a .gguf beside it, weights take as many bits as that file has.
    """
    place = folder_of(path) if is_gguf(path) else Path(path)
    file = place / "config.json" if place.is_dir() else place
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        size = sum(f.stat().st_size for f in file.parent.glob("*.gguf"))
        plain = any(file.parent.glob("*.safetensors"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"can't read the model's sizes from {file}: {error}", "model") from error
    shape = _shape(config, file)
    return shape if plain or not size else msgspec.structs.replace(shape, precision=of_gguf(size, shape.weights))


def _shape(config: Json, file: Path) -> ModelShape:
    for field, what in UNMODELLED.items():
        if config.get(field):
            raise ConfigError(
                f"{file}: {field} says that {what}, which is not modelled; give a plain model", "model"
            )
    heads = config.get("num_attention_heads")
    try:
        return ModelShape(
            name=str(config.get("_name_or_path") or file.parent.name),
            num_hidden_layers=int(config["num_hidden_layers"]),
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config["intermediate_size"]),
            num_attention_heads=int(config["num_attention_heads"]),
            num_key_value_heads=int(config.get("num_key_value_heads") or config["num_attention_heads"]),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // int(heads or 1)),
            vocab_size=int(config["vocab_size"]),
            gated_mlp=config.get("hidden_act", "silu") in ("silu", "swiglu", "gelu_pytorch_tanh"),
            tied=bool(config.get("tie_word_embeddings", config.get("model_type") in TIED)),
            precision=of_checkpoint(config),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{file}: the field {error} is missing or no number", "model") from error


def known_models() -> dict[str, ModelShape]:
    """Returns the shapes of widely used models, by lower-case name without the organization."""
    tables = tomllib.loads(KNOWN.read_text(encoding="utf-8"))
    return {name: msgspec.convert({"name": name, **fields}, ModelShape) for name, fields in tables.items()}


def model_shape(name_or_path: str) -> ModelShape:
    """Returns the shape in a config.json, or of a known model by its Hugging Face name; suffixes of tuned models
    are ignored.

    Raises ConfigError listing the known models.
    """
    if any(path.is_file() for path in (Path(name_or_path), Path(name_or_path) / "config.json")):
        return from_config(name_or_path)
    known, name = known_models(), name_or_path.rsplit("/", 1)[-1].lower()
    found = known.get(name) or known.get(TUNED.sub("", name))
    if found is not None:
        return msgspec.structs.replace(found, name=name)
    choices = ", ".join(sorted(known_models()))
    raise ConfigError(f"model {name_or_path!r} is unknown; give a config.json, or one of {choices}", "model")
