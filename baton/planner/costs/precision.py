"""Bits per value of a model's weights and KV, by a checkpoint's config.json or by the engine's quantization
settings.

Torch-free. Knows nothing of shapes or hardware. The bits include scales and minima, in the form that
``engine.quant`` keeps; what that doesn't read is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from baton.protos.errors import ConfigError
from baton.protos.json import Json

PLAIN = 16.0  # bits of bf16
GROUP_BITS = 32.0  # a float16 scale and minimum per group of inputs
SCALE_BITS = 16.0  # a float16 scale alone per group of inputs
NF4_BLOCK = 64  # weights; bitsandbytes' config.json doesn't say
# The methods of config.json; a GGUF file says itself what it holds.
METHODS = ("awq", "bitsandbytes", "compressed-tensors", "fp8", "gptq", "mxfp4", "torchao")
ON_LOAD = {"none": (PLAIN, PLAIN), "int8": (8.0, 8.0), "int4": (4.5, 8.0)}  # bits of linear layers, of the head
KV_BITS = {"auto": PLAIN, "float32": 32.0, "bf16": PLAIN, "fp16": PLAIN, "int8": 8.0, "fp8": 8.0}
KV_SCALED, SCALE = ("int8", "fp8"), 32.0  # bits of a scale per token and head


class Precision(msgspec.Struct, frozen=True):
    """Holds the bits per value of linear layers, head and KV, scales included; ``kv_scale``: further bits per token
    and head.

    ``packed``: the checkpoint is quantized already. ``own_head``: a tied head is stored apart from the embedding
    table. ``settings`` are the [worker] settings that make it so.
    """

    linear: float = PLAIN
    head: float = PLAIN
    kv: float = PLAIN
    kv_scale: float = 0.0
    own_head: bool = False
    packed: bool = False
    name: str = "bf16"
    settings: tuple[tuple[str, str], ...] = ()

    @property
    def plain(self) -> bool:
        """Returns whether weights and KV are unquantized bf16."""
        return self == Precision()


def of_checkpoint(config: Json) -> Precision:
    """Returns the precision by a config.json's ``quantization_config``.

    Raises ConfigError for what the engine can't read.
    """
    settings = config.get("quantization_config") or config.get("compression_config")
    if settings is None:
        return Precision()
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    if method not in METHODS:
        known = ", ".join(METHODS)
        raise ConfigError(f"quantization_config.quant_method is {method!r}; the engine reads {known}", "model")
    try:
        linear = _LINEAR_BITS.get(method, _grouped)(settings)
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        raise ConfigError(f"quantization_config of {method}: {error}", "model") from error
    head = linear if settings.get("lm_head") else PLAIN
    own = bool(settings.get("lm_head"))
    kv = 8.0 if settings.get("kv_cache_scheme") else PLAIN  # the engine takes int8 or fp8 where it says so
    scale = SCALE if settings.get("kv_cache_scheme") else 0.0
    return Precision(linear, head, kv, scale, own, packed=True, name=f"{method} weights")


def of_gguf(file_bytes: int, weights: int) -> Precision:
    """Returns the mean precision of a GGUF file of ``file_bytes`` that holds ``weights`` values, tables and head
    included.
    """
    bits = 8.0 * file_bytes / weights
    return Precision(linear=bits, head=bits, packed=True, name="GGUF weights")


def _grouped(settings: Json) -> float:
    """GPTQ's and AWQ's bits per weight."""
    bits = int(settings.get("bits") or settings.get("w_bit") or 0)
    if bits not in (2, 3, 4, 8):
        raise ValueError(f"bits is {bits}; 2, 3, 4 and 8 are known")
    bits = max(bits, 4)  # those of 2 and 3 are kept in 4
    group = int(settings.get("group_size") or settings.get("q_group_size") or 128)
    return bits + (GROUP_BITS / group if group > 0 else 0.0)


def _compressed(settings: Json) -> float:
    """compressed-tensors' bits per weight, of the widest of its groups of layers."""
    found = []
    for group in (settings.get("config_groups") or {}).values():
        weights = group.get("weights") or {}
        bits, size = int(weights.get("num_bits") or 0), int(weights.get("group_size") or 0)
        if bits not in (4, 8):
            raise ValueError(f"weights of {bits} bits; 4 and 8 are known")
        if block := weights.get("block_structure"):
            size = int(block[1])
        per_group = SCALE_BITS if weights.get("type") == "float" else GROUP_BITS
        found.append(bits + (per_group / size if size > 0 else 0.0))
    if not found:
        raise ValueError("config_groups is missing")
    return max(found)


def _bitsandbytes(settings: Json) -> float:
    """bitsandbytes' bits per weight: NF4's and FP4's blocks have a float16 scale each here."""
    return 8.0 if settings.get("load_in_8bit") else 4.0 + SCALE_BITS / NF4_BLOCK


def _fp8(settings: Json) -> float:
    """Bits per weight of e4m3, in blocks or not."""
    block = settings.get("weight_block_size")
    return 8.0 + (SCALE_BITS / int(block[1]) if block else 0.0)


def _mxfp4(settings: Json) -> float:
    """Returns the bits of experts, which are nearly all of the weights: 32 values of 4 bits share a scale of 8."""
    return 4.0 + 8.0 / 32.0


_LINEAR_BITS: dict[str, Callable[[Json], float]] = {
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "torchao": lambda settings: 8.0,  # int8 and float8 alike, with a scale per row
}


def as_set(found: Precision, quantization: str, kv_cache_dtype: str) -> Precision:
    """Returns a checkpoint's precision after worker.quantization and worker.kv_cache_dtype. Raises ConfigError."""
    for name, value, known in (
        ("quantization", quantization, tuple(ON_LOAD)), ("kv_cache_dtype", kv_cache_dtype, tuple(KV_BITS))
    ):  # fmt: skip
        if value not in known:
            raise ConfigError(f"{name} {value!r} is unknown; choose of {', '.join(known)}", "profile")
    if quantization != "none":
        if found.packed:
            text = f"quantization={quantization} rounds a plain checkpoint, and this one has {found.name}"
            raise ConfigError(f"{text}: leave it out", "profile")
        linear, head = ON_LOAD[quantization]
        found = msgspec.structs.replace(
            found, linear=linear, head=head, own_head=True, name=f"{quantization} weights",
            settings=(*found.settings, ("quantization", quantization)),
        )  # fmt: skip
    if kv_cache_dtype != "auto":
        found = msgspec.structs.replace(
            found,
            kv=KV_BITS[kv_cache_dtype],
            kv_scale=SCALE if kv_cache_dtype in KV_SCALED else 0.0,
            name=f"{found.name}, {kv_cache_dtype} KV",
            settings=(*found.settings, ("kv_cache_dtype", kv_cache_dtype)),
        )
    return found
