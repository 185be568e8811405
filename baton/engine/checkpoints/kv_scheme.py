"""Reads a quantized checkpoint's settings for KV: the dtype that it was calibrated for, and its scales.

Knows nothing of pages or of attention. ``quantization_config.kv_cache_scheme`` is compressed-tensors'. Its scales,
one number per layer for K and for V, are checked but not applied: fp8 and int8 KV has a scale per token and head
here, so that no number is clipped, as values beyond 448 x ``k_scale`` would be.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.engine.config import KvCacheDtype
from baton.engine.program.config import ModelConfig
from baton.engine.quant import Tensors

SCALES = (".k_scale", ".v_scale", ".kv_scale", ".k_proj.output_scale", ".v_proj.output_scale")
KNOWN: dict[tuple[object, object], KvCacheDtype] = {("float", 8): "fp8", ("int", 8): "int8"}


def asked_kv_dtype(model: ModelConfig) -> KvCacheDtype:
    """Returns the KV dtype that the checkpoint asks for, "auto" if it asks for none. Raises CheckpointError for an
    unsupported one.
    """
    settings = model.fields.get("quantization_config") or model.fields.get("compression_config")
    found = settings.get("kv_cache_scheme") if isinstance(settings, dict) else None
    if found is None:
        return "auto"
    kind = (found.get("type"), found.get("num_bits")) if isinstance(found, dict) else (None, None)
    if kind not in KNOWN:
        text = (
            f"is {found!r}; 8 bits of type float or int are known: set worker.kv_cache_dtype, which comes before it"
        )
        raise model.error("quantization_config.kv_cache_scheme", text)
    return KNOWN[kind]


def require_sound_scales(tensors: Tensors) -> None:
    """Raises CheckpointError if a scale of K or V isn't finite and above 0, as in a damaged file."""
    for name in tensors.names():
        if name.endswith(SCALES) and not _is_sound(found := tensors.tensor(name).float()):
            text = f"is {found.flatten()[:3].tolist()}; a scale of KV is one number above 0: get the model again"
            raise tensors.error(name, text)


def _is_sound(scale: Tensor) -> bool:
    return scale.numel() > 0 and bool((torch.isfinite(scale) & (scale > 0)).all())
