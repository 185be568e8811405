"""The engine process: loads the model, makes the KV pages, runs the step loop. No asyncio, no gRPC.

Knows nothing of routers or handoffs; it talks over one socket to its parent, and ends with its parent
(PR_SET_PDEATHSIG, and end of stream on the socket). It sends the file descriptor of the pages, then EngineReady,
and runs the loop; or EngineFailed, and exits with status 1.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

import msgspec

from baton.decode_worker.engine.async_loop import AsyncDecodeLoop
from baton.decode_worker.engine.limits import DecodeLimits
from baton.decode_worker.engine.loop import DecodeLoop
from baton.engine.abilities import adapters_of, async_steps_of, demand_of, internals_of, mirror_of, ranks_of, warm
from baton.engine.adapters.reading import AdapterReader, read_here
from baton.engine.adapters.table import AdapterTable
from baton.engine.checkpoints.hub import locate
from baton.engine.child import child_arguments
from baton.engine.config import EngineConfig
from baton.engine.grammar.running import GRACE_S, Grammars
from baton.engine.load import load_runner
from baton.engine.plan import Runner
from baton.engine.program.rank_program import kv_share
from baton.engine.speculate.draft import Speculator
from baton.engine.steps.loop import StepLoop
from baton.engine.steps.parts import EngineParts
from baton.engine.steps.succession import succession
from baton.engine.wide_pages import widened
from baton.kernels.abi.cores import LentCores, lend
from baton.kv.layout.bridge import with_codec
from baton.kv.layout.page import keeps_tokens
from baton.kv.layout.tables import table_count
from baton.kv.memory.host_pages import PageMemory
from baton.kv.pages.pool import PagePool
from baton.prefill_worker.engine.loop import PrefillLoop
from baton.process.endings import rank_status
from baton.process.heap import settle_heap
from baton.process.memory import available_bytes
from baton.protos.channel import AdapterPlace, EngineFailed, EngineReady
from baton.protos.errors import BatonError, ConfigError, RankLost, to_info
from baton.protos.measurements import StepSample
from baton.protos.nouns import BLOCK_TOKENS, KvLayout
from baton.tls.identity import TlsFiles
from baton.worker.channel import EngineChannel
from baton.worker.drafts import make_drafter, most_drafts
from baton.worker.kv_memory import copied_on_demand, kv_bytes
from baton.worker.spec import AdapterSpec, CacheSpec, EngineSpec, StepSpec, WorkerSpec, load_spec

log = logging.getLogger("baton.engine")

NO_ADAPTERS = AdapterSpec()
ENCODER_PAGES = 1 << 14  # of 64 bytes each, because as many as memory holds would be millions to keep books of


def main() -> int:
    """Runs the engine process; returns exit status 0 when it was told to end, 1 when it couldn't start."""
    args = child_arguments("baton.worker.engine_main", "WorkerSpec")
    channel = EngineChannel(socket.socket(fileno=args.fd))
    try:
        spec = load_spec(args.spec)
        logging.basicConfig(
            level=spec.observe.log_level.upper(), format=f"%(asctime)s {spec.slot} engine %(message)s"
        )
        kept: dict[str, Speculator] = {}
        loop = build(spec, channel, kept)
    except Exception as error:
        channel.send(EngineFailed(to_info(error)))
        return _leave(channel, 1)
    settle_heap()
    try:
        loop.run()
        while loop.next_role:
            loop = successor(spec.steps, spec.engine, loop, kept)
            loop.run()
    except RankLost as error:
        exit_rank_lost(error)
    if (ranks := ranks_of(loop.parts.runner)) is not None:
        ranks.leave()
    loop.parts.adapters.close()
    return _leave(channel, 0)


def _require_no_registration(spec: WorkerSpec) -> None:
    """Checks that no transport registers all pages, of which the host has some alone. Raises ConfigError."""
    if spec.server.kv_transport == "nixl":
        text = "worker.kv_mirror is demand, and nixl registers all pages; set it to whole, or another kv_transport"
        raise ConfigError(text, "worker.kv_mirror")


def exit_rank_lost(error: RankLost) -> NoReturn:
    """Ends this process, and with it all ranks, at once; its exit status says which rank was lost."""
    logging.getLogger("baton.engine").error("%s: the worker ends", error.message)
    os._exit(rank_status(error.rank))


def build(spec: WorkerSpec, channel: EngineChannel, kept: dict[str, Speculator] | None = None) -> StepLoop:
    """Loads the model, makes the KV pages, announces both on ``channel``, and returns the step loop. ``kept`` is
    ``make_drafter``'s.

    Raises CheckpointError, ConfigError.
    """
    runner, profile_pages = make_runner(
        _with_window_pages(spec), spec.lora, spec.steps.stall_s, spec.server.tls, spec.cache
    )
    runner = widened(runner, spec.cache.block_tokens)
    profile_pages = profile_pages * BLOCK_TOKENS // spec.cache.block_tokens  # a profile counts pages of 16
    layout = with_codec(runner.spec.layout, spec.cache.kv_codec)
    runner.spec = msgspec.structs.replace(runner.spec, layout=layout)  # its fidelity is in every block's hash
    page_bytes = runner.spec.layout.page_bytes
    pages = _configured_pages(spec, layout) or profile_pages
    on_demand = demand_of(runner)
    held = _share_on_card(spec, layout)
    pages = pages or page_count(spec, page_bytes, runner.spec.weight_bytes, held, on_demand is None)
    copies = None
    if on_demand is not None:
        copies = copied_on_demand(spec.cache, spec.engine.device, available_bytes())
        if copies is not None:
            _require_no_registration(spec)
            on_demand(copies)
    memory = PageMemory.create(pages, page_bytes, sparse=copies is not None)
    runner.bind(memory.view(), pages)
    if (ranks := ranks_of(runner)) is not None:
        ranks.open_pages(memory.fd, memory.bytes, layout)
        ranks.watch(exit_rank_lost)
    sequences = spec.steps.max_batch
    drafts = most_drafts(spec.steps.speculation, sequences)
    warm(runner, sequences, spec.steps.prefill_chunk_tokens, drafts)
    model, mirror = runner.spec, mirror_of(runner)
    adapters = make_adapters(spec.lora, runner)
    pool = PagePool(pages, model.layout.block_tokens, eviction=spec.cache.eviction)
    if spec.cache.has_tiers:
        pool.watch_idle()
    grammars = Grammars(model, tokenizer_of(spec.engine), GRACE_S)
    grammars.warm()
    every = spec.steps.state_every_blocks
    parts = EngineParts.around(
        runner,
        pool,
        channel,
        time.monotonic,
        grammars,
        memory.view(),
        every,
        adapters,
        make_cores(spec.engine),
    )
    loop = make_loop(spec.role, spec.steps, spec.engine, parts, kept)
    channel.send_fd(memory.fd)  # nobody hears of an engine that can't be made
    channel.send(
        EngineReady(
            model.layout,
            model.fingerprint,
            model.max_model_len,
            model.vocab_size,
            model.eos_token_ids,
            pages,
            spec.steps.max_batch,
            runner.work,
            None if mirror is None else mirror.shared,
            adapters.ids,
            () if ranks is None else ranks.senders,
            () if ranks is None else ranks.receivers,
        )
    )
    return loop


def _with_window_pages(spec: WorkerSpec) -> EngineSpec:
    """Returns the engine's settings: with a wire codec, which codes whole blocks, "auto" means shared pages."""
    if spec.cache.kv_codec == "none" or spec.engine.window_pages != "auto":
        return spec.engine
    return msgspec.structs.replace(spec.engine, window_pages="shared")


def _configured_pages(spec: WorkerSpec, layout: KvLayout) -> int:
    """Returns the configured number of KV pages, 0 for none. Where the worker itself has chosen to divide blocks
    among several pages it counts blocks, so that the memory stays about the same.
    """
    return spec.cache.pages * (table_count(layout) if spec.engine.window_pages == "auto" else 1)


def _share_on_card(spec: WorkerSpec, layout: KvLayout) -> float:
    """Returns the memory that a card takes for each page, as a share of its bytes, at most: of several ranks' each
    has its own heads alone.
    """
    if spec.engine.tp == 1 or not layout.groups:
        return 1.0
    return max(kv_share(group.kv_heads, spec.engine.tp) for group in layout.groups)


def page_count(spec: WorkerSpec, page_bytes: int, weight_bytes: int, held: float = 1.0, whole: bool = True) -> int:
    """Returns the number of KV pages of ``page_bytes`` that fit beside ``weight_bytes`` and all adapters that may
    be loaded, where a card holds the share ``held`` of each and the runner needs the host's pages ``whole``.

    Raises ConfigError if none does.
    """
    beside = weight_bytes + (spec.lora.max_adapter_bytes if spec.lora.wanted else 0)
    room = kv_bytes(spec.cache, spec.engine.device, beside, held=held, whole=whole)
    if room < page_bytes:
        text = f"{room} bytes don't hold one page of {page_bytes}; raise worker.kv_memory_bytes"
        raise ConfigError(text, "worker.kv_memory_bytes")
    return room // page_bytes


def successor(
    steps: StepSpec, engine: EngineSpec, loop: StepLoop, kept: dict[str, Speculator] | None = None
) -> StepLoop:
    """Returns the loop of the role that ``loop`` was told to change to, or of its present one if that can't begin;
    ``kept`` is ``make_drafter``'s. Raises RankLost.
    """
    return succession(loop, partial(make_loop, steps=steps, engine=engine, parts=loop.parts, kept=kept))


def make_adapters(spec: AdapterSpec, runner: Runner) -> AdapterTable:
    """Returns the table of adapters, those of the configuration loaded and pinned.

    Raises ConfigError naming one that fails, and RankLost.
    """
    host = adapters_of(runner)
    if host is None:
        return AdapterTable()
    reader = AdapterReader(host.base)
    if spec.limits.root:
        reader.warm()
    table = AdapterTable(host, spec.limits, reader.start)
    for name, path in spec.adapters.items():
        try:
            table.hold(read_here(AdapterPlace(name, path), host.base), pinned=True)
        except RankLost:
            raise
        except BatonError as error:
            raise ConfigError(f"worker.adapters {name}: {error.message}", "worker.adapters") from error
    table.announced()
    return table


def make_cores(spec: EngineSpec) -> LentCores:
    """Returns the object by which this machine's engines lend CPU cores to each other; one that does nothing where
    none are lent.
    """
    return lend(spec.cores_page, spec.threads, spec.all_cores) if spec.cores_page else LentCores()


def make_runner(
    spec: EngineSpec,
    lora: AdapterSpec = NO_ADAPTERS,
    stall_s: float = 0.0,
    tls: TlsFiles | None = None,
    cache: CacheSpec = CacheSpec(),
) -> tuple[Runner, int]:
    """Returns the model's runner, a paced or a real one, and the number of KV pages of 16 tokens that a paced
    profile or an encoder asks for (0: none).

    A rank that others wait for longer than ``stall_s`` seconds counts as stuck; 0: they wait without limit. With
    ``tls`` ranks of several hosts encrypt what they exchange. ``cache`` says what part of a card is this worker's.
    """
    if spec.paced_profile:
        require_one_rank(spec)
        return make_paced(spec, lora)
    config = EngineConfig(
        model=spec.model,
        dtype=spec.dtype,  # type: ignore[arg-type]  # load_runner checks it
        device=spec.device,  # type: ignore[arg-type]
        max_model_len=spec.max_model_len or None,
        threads=spec.threads or None,
        kv_cache_dtype=spec.kv_cache_dtype,  # type: ignore[arg-type]
        kv_selection=spec.kv_selection,
        window_pages=spec.window_pages,  # type: ignore[arg-type]
        quantization=spec.quantization,  # type: ignore[arg-type]
        quantization_overrides=spec.quantization_overrides,
        activations=spec.activations,  # type: ignore[arg-type]
        cache_dir=spec.cache_dir,
        cuda_step=spec.cuda_step,  # type: ignore[arg-type]
        adapters=lora.limits if lora.wanted else None,
        tp=spec.tp,
        cp=spec.cp,
        pp=spec.pp,
        ep=spec.ep,
        expert_replicas=spec.expert_replicas if max(spec.tp, spec.ep) > 1 else 0,
        rank_hosts=spec.rank_hosts,
        rank_key_file=spec.rank_key_file,
        rank_wait_s=spec.rank_wait_s,
        rank_bound_s=stall_s,
        tls=tls if spec.rank_hosts else None,
        card_share=cache.kv_memory_share / cache.card_sharers,
        card_kv_bytes=cache.kv_memory_bytes,
    )
    runner = load_runner(config)
    return runner, ENCODER_PAGES if keeps_tokens(runner.spec.layout) else 0


def require_one_rank(spec: EngineSpec) -> None:
    """Checks that a paced engine has no ranks: its profile says how fast they are. Raises ConfigError."""
    widths = spec.widths
    if widths.count > 1:
        field = widths.field
        text = f"{widths}: a paced engine is one process; name a profile of so many ranks instead"
        raise ConfigError(f"{text}, as paced:{spec.paced_profile}@{field}{getattr(widths, field)}", field)


def make_paced(spec: EngineSpec, lora: AdapterSpec = NO_ADAPTERS) -> tuple[Runner, int]:
    """Returns a runner whose step times come from a profile instead of a model, and the number of KV pages that the
    profile asks for.
    """
    from baton.cost.curves import adapter_seconds, step_seconds
    from baton.cost.profiles import load_profile
    from baton.engine.backends.paced.adapters import PacedAdapters
    from baton.engine.backends.paced.runner import PacedRunner

    profile = load_profile(spec.paced_profile)

    def seconds(sample: StepSample) -> float:
        return step_seconds(profile.step, sample) + adapter_seconds(profile.adapters, sample.adapted)

    runner = PacedRunner(
        name=spec.paced_profile,
        kv_bytes_per_token=profile.kv_bytes_per_token,
        vocab_size=profile.vocab_size,
        max_model_len=spec.max_model_len or profile.max_model_len,
        step_seconds=seconds,
        work=profile.work,
        adapters=PacedAdapters(lora.max_adapter_rank, lora.max_adapter_bytes) if lora.wanted else None,
    )
    return runner, profile.pages


def tokenizer_of(spec: EngineSpec) -> Path | None:
    """Returns the path of the model's tokenizer.json; None if it has none, as a paced engine."""
    path = None if spec.paced_profile else locate(spec.model) / "tokenizer.json"
    return path if path is not None and path.is_file() else None


def make_loop(
    role: str, steps: StepSpec, engine: EngineSpec, parts: EngineParts, kept: dict[str, Speculator] | None = None
) -> StepLoop:
    """Returns the step loop of ``role``; ``kept`` is ``make_drafter``'s. Raises ConfigError and CheckpointError for
    a bad speculation setting.
    """
    parts.cores.begin_role(role)
    if role == "prefill":
        if (inside := internals_of(parts.runner)) is not None:
            inside.tap((), every_row=False)  # a decode worker's drafts looked at states; nobody does now
        return PrefillLoop(parts, steps.prefill_chunk_tokens, steps.max_batch)
    limits = DecodeLimits(
        steps.max_batch,
        steps.prefill_chunk_tokens,
        steps.lease_ttl_s,
        steps.itl_target_s,
        steps.pace_beside_prompts_s,
    )
    # entropy is never seeded: a lease of an earlier incarnation must not be valid again
    share, rejects = steps.speculation_control_share, steps.speculation_accept == "distribution"
    drafter = make_drafter(steps.speculation, engine, parts.runner, parts.pool.pages, share, rejects, kept)
    ahead = async_steps_of(parts.runner) if steps.async_steps == "auto" and drafter is None else None
    if ahead is None:
        return DecodeLoop(parts, limits, entropy=os.urandom, drafter=drafter)
    log.info("decode steps are planned while the one before them runs")
    return AsyncDecodeLoop(parts, limits, os.urandom, ahead)


def _leave(channel: EngineChannel, status: int) -> int:
    """Let the last words out: the I/O process reads them and closes its end, or a second passes."""
    with suppress(EOFError):
        channel.poll(1.0)
    channel.close()
    return status


if __name__ == "__main__":
    sys.exit(main())
