"""Chooses what computes a model by the configuration, and loads its runner.

Knows nothing of schedulers, leases or of how a step is computed. The engine's own kernels compute a model wherever
they can; else torch's ops do.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import torch

from baton.engine.adapters.base import AdapterBase
from baton.engine.backends.cuda.card_locks import TakenCard, share
from baton.engine.backends.cuda.gpu import Gpu, identities, require
from baton.engine.backends.cuda.load import TORCH, kernels_or_none, on_kernels
from baton.engine.backends.encoder.load import load_encoder
from baton.engine.backends.native.runner import NativeRunner
from baton.engine.backends.ranks.cards.load import load_card, require_on_cards, take_cards
from baton.engine.backends.ranks.cards.runner import CardRanksRunner
from baton.engine.backends.ranks.followers import Followers
from baton.engine.backends.ranks.hosts.layout import most_on_one, ranks_on, require_hosts
from baton.engine.backends.ranks.hosts.lead import LeadHosts
from baton.engine.backends.ranks.load import load_rank, numbers_of, rank_config, require_possible
from baton.engine.backends.ranks.runner import RankRunner
from baton.engine.backends.torch.capture import CudaCapture
from baton.engine.backends.torch.card_ops import ops_on
from baton.engine.backends.torch.card_requirements import require_cuda_ops, require_torch_cuda, takes_kernels
from baton.engine.backends.torch.card_weights import weights_on_card
from baton.engine.backends.torch.decode_graphs import KIND, DecodeGraphs
from baton.engine.backends.torch.dequantized import for_torch
from baton.engine.backends.torch.flash_infer import shape_of
from baton.engine.backends.torch.kept_choices import keep
from baton.engine.backends.torch.runner import DTYPES, TorchRunner
from baton.engine.backends.work import of_cards, work_of, work_of_ranks
from baton.engine.checkpoints.hub import locate
from baton.engine.checkpoints.kv_scheme import asked_kv_dtype
from baton.engine.checkpoints.weights import (
    LoadedWeights,
    Opened,
    Weights,
    is_quantized,
    load_weights,
    open_checkpoint,
)
from baton.engine.config import EngineConfig
from baton.engine.models import program_for
from baton.engine.plan import ModelSpec, Runner
from baton.engine.program.config import ModelConfig
from baton.engine.program.ops import LatentAttention
from baton.engine.program.program import Program
from baton.engine.program.rope import LONGROPE, for_context
from baton.engine.program.sites import adaptable, others_of, sites_of, stacked_sites
from baton.kernels.abi import native
from baton.kernels.cuda.library import on_shim
from baton.kv.layout.page import layout_for
from baton.kv.layout.selection import ALL, SETTING, AttentionSelection, Selection, marked, parsed
from baton.kv.layout.tables import by_window
from baton.protos.errors import CheckpointError, ConfigError
from baton.protos.nouns import KvLayout

CHECK_ENV = "BATON_CHECK_STEP"
STEP_ENV, OPS = "BATON_STEP", "ops"  # value: run each op by itself, through torch.ops.baton, for profilers


def load(config: EngineConfig) -> Runner:
    """Returns the runner of ``config``'s model: the engine's own kernels if they can run it, else torch's ops.

    Starts further processes if several ranks are configured. Raises CheckpointError and ConfigError.
    """
    check, by_ops = _is_on(CHECK_ENV, "1"), _is_on(STEP_ENV, OPS)
    widths = config.widths
    require_hosts(config)
    if widths.count > 1:
        if check or by_ops:
            raise ConfigError(f"{CHECK_ENV} and {STEP_ENV} are of one rank, {widths}; unset them", widths.field)
        return _on_ranks(config)
    if config.threads is not None:
        _use_threads(config.threads)
    ask_gpu, own_kernels = config.device == "cuda" and not on_shim(), config.device == "cuda"
    if ask_gpu:
        own_kernels = takes_kernels(require())  # before a model is fetched for it
        if not config.is_draft:  # else it is on its model's card
            share(identities())  # until this process ends
        require_torch_cuda()
    directory = locate(config.model)
    model = ModelConfig.read(directory)
    config = with_asked_kv(config, model)
    dtype, planned = config.computed_dtype, for_context(program_for(model), config.max_model_len)
    if planned.is_encoder:
        return load_encoder(config, directory, model, planned)
    if config.device == "cuda":
        require_cuda_ops(model, planned)
    opened = open_checkpoint(directory, model)
    if ask_gpu:
        require(_least_bytes(config, opened, planned, dtype))
    read = partial(
        load_weights, directory=directory, model=model, program=planned, dtype=DTYPES[dtype], opened=opened
    )
    if own_kernels and (own := _on_own_kernels(config, directory, model, dtype, read, plain=check)) is not None:
        return own
    if config.device == "cuda" and config.adapters is not None:
        text = f"{TORCH}, as the log says why, and these apply no adapters; serve the base model there, or use cpu"
        raise ConfigError(text, "worker.adapters")
    program, weights, fingerprint, _ = read(config)
    if config.device == "cuda":
        weights = _on_card(program, weights, DTYPES[dtype], fingerprint, config)
    spec = _spec(config, model, program, dtype, fingerprint, weights)
    program, base = _with_adapters(config, program, dtype, directory)
    on_native = config.device == "cpu" and native.library() is not None
    work = work_of(program, weights, spec.layout, config.device, spares_rows=on_native)
    if on_native:
        return NativeRunner(spec, program, weights, check=check, by_ops=by_ops, work=work, adapters=base)
    if spec.layout.dtype != dtype:
        text = f"KV as {config.kv_cache_dtype} needs the native CPU kernels: install a C++ compiler, or use auto"
        if config.device == "cuda":
            text = f"device cuda: torch's ops, which the GPU runs here, have none for KV as {config.kv_cache_dtype}"
            text += "; the log says why the engine's own kernels don't run; use auto"
        raise ConfigError(text, "kv_cache_dtype")
    if config.device != "cuda" or on_shim():
        return TorchRunner(spec, program, weights, work, adapters=base)
    gpu = require()
    ops, capture = ops_on(gpu, shape_of(program, DTYPES[dtype])), None if check else CudaCapture()
    tell = partial(_keep_graphs, gpu, fingerprint)
    return TorchRunner(
        spec, program, weights, work, adapters=base, ops=ops, card=config.device, capture=capture, tell=tell
    )


def _on_card(
    program: Program, weights: Weights, dtype: torch.dtype, fingerprint: str, config: EngineConfig
) -> Weights:
    if on_shim():
        return for_torch(program, weights, dtype, config.device)
    return weights_on_card(program, weights, dtype, fingerprint, config, require())


def _least_bytes(config: EngineConfig, opened: Opened, planned: Program, dtype: str) -> int:
    """Returns the bytes that the weights of ``planned`` take at least: half of one for each number if some may be
    quantized.
    """
    elements = sum(math.prod(shape) for weight in planned.weights for shape in weight.shapes)
    return elements // 2 if is_quantized(config, opened) else elements * DTYPES[dtype].itemsize


def _keep_graphs(gpu: Gpu, fingerprint: str, graphs: DecodeGraphs) -> None:
    """Keeps for `baton doctor` whether decodes of a model run by graphs."""
    keep(gpu, KIND, fingerprint, [graphs.choice])


def with_asked_kv(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """Returns ``config`` with the KV dtype for which the checkpoint asks, unless another is configured or native
    CPU kernels are missing.
    """
    if config.kv_cache_dtype != "auto" or config.device != "cpu" or native.library() is None:
        return config
    return msgspec.structs.replace(config, kv_cache_dtype=asked_kv_dtype(model))


def _with_adapters(
    config: EngineConfig, program: Program, dtype: str, directory: Path
) -> tuple[Program, AdapterBase | None]:
    """Returns the program with adapter sites, and the requirements on adapters, if any are configured."""
    if config.adapters is None:
        return program, None
    program, limits = adaptable(program), config.adapters
    narrow = dtype == "bfloat16"
    sites, stacked = sites_of(program), stacked_sites(program)
    apart = program.idle, others_of(program)
    base = AdapterBase(sites, limits.max_rank, limits.max_bytes, narrow, stacked, *apart, model=str(directory))
    return program, base


def _use_threads(count: int) -> None:
    torch.set_num_threads(count)
    native.set_threads(count)


def _on_ranks(config: EngineConfig) -> Runner:
    """Returns the runner that leads several ranks, which load their weights concurrently."""
    directory = locate(config.model)
    model = ModelConfig.read(directory)
    own = rank_config(with_asked_kv(config, model), len(os.sched_getaffinity(0)))
    threads = own.threads
    assert threads is not None
    _use_threads(threads)
    planned = program_for(model)
    widths = own.widths
    require_possible(own, planned)  # before a process is started for it
    _selection(own, planned)
    own = msgspec.structs.replace(own, window_pages="own" if _takes_own_pages(own) else "shared")
    if own.device == "cuda":
        return _on_cards(own, model, take_cards(own, require_on_cards(own, model, planned)))
    hosts = LeadHosts(own) if own.rank_hosts else None
    followers: Followers | None = None
    try:
        followers = Followers(own, ranks_on(widths.count, own.hosts, 0)[1:], hosted=hosts is not None)
        loaded = load_rank(own, 0)
        followers.await_ready(loaded.fingerprint)
        if hosts is not None:
            hosts.await_ready(loaded.fingerprint)
        spec = _spec(own, model, loaded.program, own.computed_dtype, loaded.fingerprint, loaded.weights)
        _use_threads(threads * most_on_one(own))  # for what all cores can do: the other ranks wait
        last = widths.share(loaded.program, widths.count - 1)
        work = work_of_ranks(loaded.program, loaded.native.program, loaded.weights, spec.layout, last=last)
        _use_threads(threads)
        base = _with_adapters(config, loaded.program, own.computed_dtype, directory)[1]
        numbers = numbers_of(config)
        return RankRunner(
            spec, loaded, followers, own.rank_bound_s, work=work, adapters=base, most_adapters=numbers, hosts=hosts
        )
    except BaseException:
        if followers is not None:
            followers.kill()
        if hosts is not None:
            hosts.leave()
        raise


def _on_cards(config: EngineConfig, model: ModelConfig, taken: Sequence[TakenCard]) -> Runner:
    """Returns the runner that leads ranks on the cards ``taken``, which load their weights concurrently. Each rank
    holds the lock of its own card.
    """
    followers: Followers | None = None
    try:
        followers = Followers(config, cards=taken)
        for card in taken[1:]:
            card.release()
        loaded = load_card(config, 0, [card.index for card in taken])
        rooms = followers.await_ready(loaded.fingerprint)
        dtype = config.computed_dtype
        spec = _spec(config, model, loaded.program, dtype, loaded.fingerprint, loaded.weights)
        parts = loaded.program, loaded.own.program, loaded.weights, spec.layout
        work = work_of_ranks(*parts) if on_shim() else of_cards(work_of_ranks(*parts, "cuda"), config.tp)
        return CardRanksRunner(spec, loaded, followers, rooms, config.rank_bound_s, work=work, taken=taken[0])
    except BaseException:
        if followers is not None:
            followers.kill()
        for card in taken:
            card.release()
        raise


def _on_own_kernels(
    config: EngineConfig,
    directory: Path,
    model: ModelConfig,
    dtype: str,
    read: Callable[[EngineConfig], LoadedWeights],
    plain: bool,
) -> Runner | None:
    """Returns the runner on the engine's CUDA kernels, with the weights that ``read`` returns; None if they can't
    be used, with the reason in the log.
    """
    if (found := kernels_or_none()) is None:
        return None
    where = msgspec.structs.replace(config, device="cpu")  # weights are packed there, then copied
    program, weights, fingerprint, _ = read(where)
    if not on_shim():
        require(sum(weight.nbytes for weight in weights.values()))
    spec = _spec(config, model, program, dtype, fingerprint, weights)
    work = work_of(program, weights, spec.layout, "cpu" if on_shim() else "cuda")
    program, base = _with_adapters(config, program, dtype, directory)
    return on_kernels(spec, program, weights, found, work, plain, config.cuda_step, base)


def _is_on(name: str, on: str) -> bool:
    """Returns whether environment variable ``name`` is ``on``. Raises ConfigError for another value than that, 0 or
    nothing.
    """
    value = os.environ.get(name, "")
    if value not in ("", "0", on):
        raise ConfigError(f"{name} is {value!r}; set it to {on}, or unset it", name)
    return value == on


def _layout(config: EngineConfig, program: Program, dtype: str) -> KvLayout:
    """Returns the KV layout; its fidelity also names the precision of computation, longrope's factors and the
    selection.
    """
    stored = config.stored_kv_dtype
    extended = "+long" if program.rope.kind == LONGROPE and not program.plain_context else ""
    fidelity = stored if stored == dtype else f"{dtype}+{stored}"
    fidelity = marked(fidelity + extended, _selection(config, program))
    layout = layout_for(stored, program.groups, fidelity=fidelity, states=program.states)
    return by_window(layout) if _takes_own_pages(config) else layout


def _takes_own_pages(config: EngineConfig) -> bool:
    """Returns whether layers with a window are to have pages of their own. Raises ConfigError if "own" is asked for
    and they can't.
    """
    if config.window_pages == "shared":
        return False
    obstacles = [
        *([f"device {config.device}"] if config.device != "cpu" else ()),
        *([f"{SETTING} {config.kv_selection}"] if config.kv_selection != ALL else ()),
        *(["no native CPU kernels"] if native.library() is None else ()),
        *([CHECK_ENV] if _is_on(CHECK_ENV, "1") else ()),
        *([STEP_ENV] if _is_on(STEP_ENV, OPS) else ()),
    ]
    if obstacles and config.window_pages == "own":
        text = f"worker.window_pages own isn't known with {', '.join(obstacles)}; use auto or shared"
        raise ConfigError(text, "worker.window_pages")
    return not obstacles


def _selection(config: EngineConfig, program: Program) -> Selection | AttentionSelection | None:
    """Returns which part of a long context attention sees. Raises ConfigError if that isn't supported here."""
    selection = parsed(config.kv_selection)
    latent = any(isinstance(op, LatentAttention) for op in program.ops)
    windowed = isinstance(selection, AttentionSelection) and any(program.windows)
    obstacles = [
        *([f"device {config.device}"] if config.device != "cpu" else ()),
        *([f"{config.widths.field} {config.widths.count}"] if config.widths.count > 1 else ()),
        *(["layers that see a window"] if windowed else ()),
        *(["latent attention"] if latent else ()),
        *(["recurrent state"] if program.states else ()),
    ]
    if selection is not None and obstacles:
        text = f"{SETTING} {config.kv_selection} isn't known with {', '.join(obstacles)}; use all"
        raise ConfigError(text, SETTING)
    return selection


def _spec(
    config: EngineConfig, model: ModelConfig, program: Program, dtype: str, fingerprint: str, weights: Weights
) -> ModelSpec:
    most = program.plain_context or program.max_position
    longest = config.context(most, program.max_position)
    if any(not 0 <= token < program.vocab_size for token in model.eos_token_ids):
        raise CheckpointError(f"{model.path}: eos_token_id is outside the vocabulary", "eos_token_id")
    return ModelSpec(
        fingerprint=fingerprint,
        layout=_layout(config, program, dtype),
        max_model_len=longest,
        vocab_size=program.vocab_size,
        eos_token_ids=model.eos_token_ids,
        weight_bytes=sum(weight.nbytes for weight in weights.values()),
    )
