"""Puts a model's weights on a card that torch's ops serve, quantized ones in the forms that were found best there.

Knows nothing of checkpoints. Where a card has no room for all weights that would be dequantized, as many as fit
are; the others are dequantized for each product, which the log and `baton doctor` tell.
"""

from __future__ import annotations

import logging

import torch

from baton.engine.backends.cuda.gpu import ROOM_BYTES, Gpu, require
from baton.engine.backends.torch.card_products import FORMS
from baton.engine.backends.torch.card_room import Packed, weights_room
from baton.engine.backends.torch.dequantized import for_torch, packed_on
from baton.engine.backends.torch.kept_choices import TriedWay, keep, kept
from baton.engine.backends.torch.product_trials import DEQUANTIZED, KIND, ProductChooser
from baton.engine.checkpoints.weights import Weights
from baton.engine.config import EngineConfig
from baton.engine.program.program import Program
from baton.kernels.linear.packed import PackedWeight
from baton.protos.errors import ConfigError

log = logging.getLogger("baton.engine")


def weights_on_card(
    program: Program, weights: Weights, dtype: torch.dtype, fingerprint: str, config: EngineConfig, gpu: Gpu
) -> Weights:
    """Returns the weights as torch's ops take them on ``gpu``: quantized ones by the products that were found right
    and faster there, which is kept, else dequantized, ahead or, where room is short, for each product. Raises
    ConfigError if there is too little room even so, or if trying products left the card unusable.
    """
    device = config.device
    if not any(isinstance(weight, PackedWeight) for weight in weights.values()):
        return for_torch(program, weights, dtype, device)
    key = f"{fingerprint} {dtype}"
    chooser = ProductChooser(dtype, device, kept(gpu, KIND, key))
    packed = _packed(program, weights, dtype, chooser, config, gpu)
    made = for_torch(program, weights, dtype, device, chooser, packed.names)
    ways = packed.ways({name for name in packed.names if isinstance(made[name], FORMS)})
    for way in ways:
        log.warning("%s: %s; a larger card, or fewer workers on it, spare it", gpu.name, way.told)
    try:
        _settle(device)
    except RuntimeError as error:
        spoilt = [TriedWay(op, DEQUANTIZED, way.tried, way.tried, str(error)) for op, way in chooser.ways.items()]
        keep(gpu, KIND, key, spoilt)
        text = f"device {device}: torch's own products left the card unusable for this process: {error}"
        raise ConfigError(f"{text}; start again, which dequantizes", "device") from error
    keep(gpu, KIND, key, [*chooser.lasting, *ways])
    return made


def _packed(
    program: Program, weights: Weights, dtype: torch.dtype, chooser: ProductChooser, config: EngineConfig, gpu: Gpu
) -> Packed:
    """Returns which weights stay packed on ``gpu``. Raises ConfigError if all don't fit even so."""
    room = weights_room(gpu.memory_bytes, config.card_share, config.card_kv_bytes, ROOM_BYTES)
    found = packed_on(program, weights, dtype, chooser, room)
    require(found.bytes, lambda: gpu)
    return found


def _settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()  # raises what a kernel did, which stays with the process
        torch.cuda.empty_cache()
