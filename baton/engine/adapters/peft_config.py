"""Reads a PEFT adapter_config.json: each module's rank and scale; refuses settings that aren't supported, by name.

Knows nothing of tensors. Fields as in PEFT's LoraConfig (Apache-2.0); one that is set and unknown is refused,
because it may change what the matrices mean.
"""

from __future__ import annotations

import math
import os
import re

import msgspec

from baton.engine.adapters.directory import PARAM, AdapterFiles
from baton.engine.program.spellings import spellings
from baton.protos.errors import AdapterRefused
from baton.protos.json import Json, JsonValue

FILE = "adapter_config.json"
MOST_BYTES = 1 << 20  # largest file
MOST_ALPHA = 1e30  # because scales are float32; a larger one means a damaged file
MOST_PATTERNS, MOST_PATTERN_CHARS = 4096, 512  # because patterns are regular expressions of whoever made the file
# Fields that are read, or that describe only the adapter's origin or training.
SILENT = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "eva_config",
    "exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform",
    "loftq_config", "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_core", "peft_type", "peft_version",
    "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config", "target_modules",
    "target_parameters", "task_type", "use_rslora",
}  # fmt: skip
REFUSED = {
    "use_dora": "DoRA isn't applied; merge it into its base, or train it without",
    "modules_to_save": "whole layers of an adapter aren't served; train it without, or merge it into its base",
    "trainable_token_indices": "trained rows of the embedding aren't served; merge it into its base",
    "lora_bias": "biases of adapters aren't applied; train it without",
    "layer_replication": "repeated layers are another model; merge it into its base",
    "fan_in_fan_out": "weights that lie the other way round are of other architectures",
}
# Initializations that leave the base's weights unchanged; the others move a part of them into the adapter.
KEEP_THE_BASE = (True, False, None, "gaussian", "eva", "orthogonal")


class LoraSettings(msgspec.Struct, frozen=True):
    """The ranks and scales in a config.

    ``ranks`` and ``alphas`` give exceptions by module name or by a regular expression that matches the name's end.
    """

    file: str  # path, for errors
    rank: int
    alpha: float
    rank_stabilised: bool
    ranks: dict[str, int]
    alphas: dict[str, float]
    stacked: bool = False  # it has target_parameters: a tensor may hold the matrices of all experts of a layer

    def rank_of(self, module: str) -> int:
        """Returns the rank that the matrices of ``module`` must have."""
        return _by_pattern(self.ranks, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Returns the scale of ``module``: alpha / r, or alpha / sqrt(r) if rank-stabilised
        (https://arxiv.org/abs/2312.03732).
        """
        rank = self.rank_of(module)
        return _by_pattern(self.alphas, module, self.alpha) / (math.sqrt(rank) if self.rank_stabilised else rank)


def read_config(files: AdapterFiles) -> LoraSettings:
    """Returns the ranks and scales of the directory's adapter_config.json. Raises AdapterRefused naming the file
    and the field.
    """
    with files.open(FILE) as (descriptor, size):
        if size > MOST_BYTES:
            raise AdapterRefused(f"{files.path}/{FILE} has {size} bytes; {MOST_BYTES} at most are read", PARAM)
        raw = os.pread(descriptor, size, 0)
    where = f"{files.path}/{FILE}"
    try:
        fields = msgspec.json.decode(raw, type=Json)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise AdapterRefused(f"{where} can't be read as a JSON object: {error}", PARAM) from None
    _require_plain(where, fields)
    return LoraSettings(
        where,
        _rank(where, "r", fields.get("r")),
        _alpha(where, "lora_alpha", fields.get("lora_alpha")),
        fields.get("use_rslora") is True,
        {name: _rank(where, f"rank_pattern {name}", r) for name, r in _patterns(where, "rank_pattern", fields)},
        {name: _alpha(where, f"alpha_pattern {name}", a) for name, a in _patterns(where, "alpha_pattern", fields)},
        bool(fields.get("target_parameters")),
    )


def _require_plain(where: str, fields: Json) -> None:
    if fields.get("peft_type") != "LORA":
        raise AdapterRefused(f"{where}: peft_type is {fields.get('peft_type')!r}; only LORA is served", "peft_type")
    if fields.get("bias", "none") != "none":
        raise AdapterRefused(f"{where}: bias is {fields['bias']!r}; only none is served", "bias")
    begun = fields.get("init_lora_weights")
    if begun not in KEEP_THE_BASE:
        text = "such an adapter belongs to a base whose weights it changed; save it converted to plain LoRA"
        raise AdapterRefused(f"{where}: init_lora_weights is {begun!r}: {text}", "init_lora_weights")
    for name, value in fields.items():
        if value and name not in SILENT:
            text = REFUSED.get(name, "nothing here knows what it changes")
            raise AdapterRefused(f"{where}: {name} is {_short(value)}: {text}", name)


def _patterns(where: str, name: str, fields: Json) -> list[tuple[str, JsonValue]]:
    found = fields.get(name) or {}
    if not isinstance(found, dict) or len(found) > MOST_PATTERNS:
        raise AdapterRefused(f"{where}: {name} must be an object of {MOST_PATTERNS} entries at most", name)
    for pattern in found:
        try:
            re.compile(pattern if len(pattern) <= MOST_PATTERN_CHARS else "(")
        except (re.error, RecursionError):
            raise AdapterRefused(
                f"{where}: {name} {_short(pattern)} is no pattern that can be used", name
            ) from None
    return list(found.items())


def _by_pattern(found: Json, module: str, default: JsonValue) -> JsonValue:
    names = spellings(module) if found else ()
    for pattern, value in found.items():
        if pattern in names or any(re.fullmatch(rf"(.*\.)?({pattern})", name) for name in names):
            return value
    return default


def _rank(where: str, name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise AdapterRefused(f"{where}: {name} is {_short(value)}; it must be a whole number above 0", name)
    return value


def _alpha(where: str, name: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= MOST_ALPHA:
        raise AdapterRefused(f"{where}: {name} is {_short(value)}; it must be a number", name)
    return float(value)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
