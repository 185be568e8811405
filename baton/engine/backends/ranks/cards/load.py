"""Loads one rank's part of a model onto its card, for the lead and its followers alike.

Knows nothing of processes or of the memory that they share.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from baton.engine.backends.cuda.card_locks import TakenCard, take
from baton.engine.backends.cuda.gpu import identities, require
from baton.engine.backends.cuda.load import kernels_or_none, lacking, tried
from baton.engine.backends.cuda.runner import BY_GRAPH
from baton.engine.backends.ranks.cards.card import Card
from baton.engine.backends.ranks.cards.program import CardProgram
from baton.engine.backends.torch.card_requirements import require_cuda_ops, require_torch_cuda, takes_kernels
from baton.engine.backends.torch.runner import DTYPES
from baton.engine.checkpoints.hub import locate
from baton.engine.checkpoints.weights import Weights, load_weights
from baton.engine.config import EngineConfig
from baton.engine.models import program_for
from baton.engine.plan import ModelSpec
from baton.engine.program.config import ModelConfig
from baton.engine.program.program import Program
from baton.engine.program.rank_program import RankProgram
from baton.engine.program.rope import for_context
from baton.kernels.collective.cards import HALF_FLOATS, Rooms, cards, unreachable, use_card
from baton.kernels.cuda.library import CudaLibrary, DeviceError, on_shim
from baton.kv.layout.page import layout_for
from baton.protos.errors import ConfigError
from baton.protos.nouns import KvLayout


class LoadedCard(NamedTuple):
    """The model's whole program, and one rank's share of it on its card; ``weights`` are still in host memory."""

    program: Program
    own: RankProgram
    weights: Weights
    fingerprint: str
    card: Card


def require_on_cards(config: EngineConfig, model: ModelConfig, program: Program) -> CudaLibrary:
    """Returns the library by which ranks on cards run ``program``, of a checkpoint's ``model``.

    Raises ConfigError, naming the field and what works, if they can't: the model, the settings, or the machine's
    cards.
    """
    widths = config.widths
    widths.require_on_cards(program)
    refused = {
        "adapters": config.adapters is not None,
        "rank_hosts": bool(config.rank_hosts),
        "cuda_step": config.cuda_step == "mega",
    }
    if found := [name for name, is_set in refused.items() if is_set]:
        text = f"{widths}: ranks on cards run without worker.{found[0]}; leave it out, or use device cpu"
        raise ConfigError(text, found[0])
    if not on_shim():
        if not takes_kernels(require()):
            raise _without(config, "this GPU is another one than they are built for, as the log says")
        require_torch_cuda()
    require_cuda_ops(model, program)
    if said := lacking(program, config.stored_kv_dtype):
        raise ConfigError(f"{widths}: on cards {said}", "device")
    if (device := kernels_or_none()) is None:
        raise _without(config, "they can't be loaded, as the log says")
    if (have := cards(device)) < widths.count:
        text = f"{widths}: that is {widths.count} cards, and this process sees {have} (CUDA_VISIBLE_DEVICES)"
        raise ConfigError(f"{text}; use 1{f' to {have}' if have > 1 else ''}, or device cpu", widths.field)
    return device


def take_cards(config: EngineConfig, device: CudaLibrary) -> list[TakenCard]:
    """Returns the cards of ``config``'s ranks, by rank: the first ones that this process sees and no other worker
    has. Raises ConfigError if too few are free.
    """
    seen = tuple(f"shim-{index}" for index in range(cards(device))) if on_shim() else identities()
    return take(seen, config.widths.count)


def load_card(
    config: EngineConfig, index: int, places: Sequence[int], half_floats: int = HALF_FLOATS
) -> LoadedCard:
    """Returns rank ``index``'s share of the model on its card, which becomes the calling thread's; all ranks' cards
    have the indices ``places``.

    Raises CheckpointError and ConfigError.
    """
    directory = locate(config.model)
    model = ModelConfig.read(directory)
    planned = for_context(program_for(model), config.max_model_len)
    device = require_on_cards(config, model, planned)
    where = msgspec.structs.replace(config, device="cpu")  # weights are packed there, then copied
    share = partial(config.widths.share, index=index)
    program, weights, fingerprint, _ = load_weights(
        where, directory, model, planned, DTYPES[config.computed_dtype], share
    )
    own, layout = share(program), layout_for(config.stored_kv_dtype, program.groups)
    try:
        use_card(device, places[index])
        if far := unreachable(device, places):
            text = f"{config.widths}: card {places[index]} can't write to the memory of card {far[0]}"
            text = f"{text} (nvidia-smi topo -p2p w)"
            raise ConfigError(f"{text}; name cards of one NVLink or PCIe domain by CUDA_VISIBLE_DEVICES", "tp")
        _require_right(own, weights, layout, device)
        made = CardProgram(own, weights, device)
        card = Card(made, layout, Rooms(device, half_floats), device)
    except DeviceError as error:
        text = f"{config.widths}: card {places[index]} doesn't hold its part of the model: {error}"
        raise ConfigError(f"{text}; use more ranks, or a smaller model", "tp") from error
    return LoadedCard(program, own, weights, fingerprint, card)


def _require_right(own: RankProgram, weights: Weights, layout: KvLayout, device: CudaLibrary) -> None:
    """Tries the kernels on the calling thread's card. Raises ConfigError if they aren't right there."""
    first, end = own.own_kv
    mine = msgspec.structs.replace(own.program, kv_heads=end - first)
    spec = ModelSpec("", layout, mine.max_position, mine.vocab_size, ())
    if said := tried(spec, mine, weights, device, BY_GRAPH):
        raise ConfigError(f"rank {own.rank.index}: the engine's kernels aren't right on its card: {said}", "device")


def _without(config: EngineConfig, why: str) -> ConfigError:
    text = f"{config.widths}: ranks on cards need the engine's own kernels, and {why}; use 1, or device cpu"
    return ConfigError(text, config.widths.field)
