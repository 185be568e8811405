"""Chooses by trial what computes an op on a card that torch's ops serve, and keeps the choice with its figures.

Knows nothing of checkpoints. A record is of one card, driver, torch, FlashInfer, these sources and shape of
attention: for anything else there is none, and the trial runs again. A library that fails, is wrong or is slower
than torch is not taken, and the record says so. Whatever it raises is a reason not to take it: it compiles its
kernels on the machine that it runs on. What a record takes is called once, small, before traffic.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from baton.engine.backends.cuda.gpu import Gpu
from baton.engine.backends.cuda.op_trials import OpTrial, compare_ops
from baton.engine.backends.torch.decode_tables import DecodeAttention, decode_tables
from baton.engine.backends.torch.flash_infer import (
    AttentionShape,
    FlashInferDecode,
    FlashInferDraw,
    imported,
)
from baton.engine.sampling import Draw
from baton.kernels.abi.build import cache_dir
from baton.kernels.paged_attention.job import AttentionJob
from baton.kernels.paged_attention.reference import paged_attention
from baton.kernels.sample.reference import probabilities, sample
from baton.protos.errors import ConfigError
from baton.protos.nouns import BLOCK_TOKENS

log = logging.getLogger("baton.engine")

TORCH, FLASHINFER = "torch", "flashinfer"
ATTENTION, DRAW = "decode attention", "filters of a draw"
FASTER = "it is faster"
WITHOUT = "flashinfer-python isn't installed (the extra [gpu])"
# An 8B's attention, for which `baton doctor --gpu` tries a card.
USUAL = AttentionShape(32, 8, 128, "bfloat16", 128**-0.5, ((0, 0.0),))
# An 8B's vocabulary and the filters of a draw, with which a card is tried.
VOCAB, TOP_K, TOP_P, MIN_P = 128_256, 50, 0.9, 0.02
NVCC = "/usr/local/cuda/bin/nvcc"  # where it is looked for last


class Sizes(NamedTuple):
    """The sizes of trials: (sequences, tokens of each) of decodes, rows of draws, tokens in the vocabulary."""

    decodes: tuple[tuple[int, int], ...] = ((1, 509), (16, 2045), (64, 1021))
    rows: tuple[int, ...] = (1, 64)
    vocab: int = VOCAB


SMALL = Sizes(((2, 37),), (2,), 1024)  # of the calls before traffic


class OpChoice(msgspec.Struct, frozen=True):
    """Says that ``op`` is computed by ``way``, why not by the other one, and what was measured: FlashInfer's time
    is a trial's own. Unless it ``lasts``, the reason is of this start alone, and the next one tries again.
    """

    op: str
    way: str
    why: str
    trials: tuple[OpTrial, ...] = ()
    lasts: bool = True

    @property
    def told(self) -> str:
        """Returns the choice in words, with the microseconds of all trials together."""
        own, peer = (sum(getattr(trial, name) for trial in self.trials) for name in ("own_us", "torch_us"))
        figures = f" ({FLASHINFER} {own:.0f} us, {TORCH} {peer:.0f} us)" if self.trials else ""
        return f"{self.op}: {self.way}{figures}" + (f", because {self.why}" if self.why else "")


class CardChoices(msgspec.Struct, frozen=True):
    """Holds what was chosen at Unix seconds ``at``, in the environment of that key."""

    card: str
    environment: str
    at: float
    choices: tuple[OpChoice, ...]

    def takes(self, op: str) -> bool:
        """Returns whether FlashInfer computes ``op``."""
        return any(choice.op == op and choice.way == FLASHINFER for choice in self.choices)


class CardOps(NamedTuple):
    """Names what computes a step's decodes and draws on a card; None where torch does."""

    attention: DecodeAttention | None = None
    draw: Draw | None = None


def ops_on(gpu: Gpu, shape: AttentionShape | None, device: str = "cuda", sizes: Sizes = Sizes()) -> CardOps:
    """Returns the ops for a program whose attention has ``shape`` (None: one that FlashInfer has no form for) on
    ``device``, by the record of this card or by a trial now. The log says what was chosen. What doesn't compile,
    fails or is wrong in a small call now is left to torch. Raises ConfigError if the card isn't usable any more.
    """
    found = choices_on(gpu, shape or USUAL, device, sizes)
    takes_attention, takes_draw = shape is not None and found.takes(ATTENTION), found.takes(DRAW)
    for choice in found.choices:
        if choice.op != ATTENTION or shape is not None:
            log.info("%s", choice.told)
    if not takes_attention and not takes_draw:
        return CardOps()
    try:
        ops = _ready(shape if takes_attention else None, takes_draw, device)
    except Exception as error:  # what was right once may lack its compiler or its compiled kernels today
        log.warning("torch computes what was chosen for %s: %s", FLASHINFER, _failure(error))
        ops = CardOps()
    _settle(gpu, shape or USUAL, device, found)
    return ops


def choices_on(gpu: Gpu, shape: AttentionShape, device: str, sizes: Sizes = Sizes()) -> CardChoices:
    """Returns the record of this card and ``shape``; if there is none, that of a trial now, which is kept unless it
    ended for want of memory. Raises ConfigError if the trial left the card unusable.
    """
    if (known := _read(_path(gpu, shape))) is not None:
        return known
    found = CardChoices(gpu.name, environment(gpu), time.time(), try_library(shape, device, sizes))
    if all(choice.lasts for choice in found.choices):
        _keep(gpu, shape, found)
    _settle(gpu, shape, device, found)
    return found


def _ready(shape: AttentionShape | None, draws: bool, device: str) -> CardOps:
    """Returns FlashInfer's attention of ``shape``, unless None, and its draw, after a call of each. Raises what it
    raises, and RuntimeError if a result is wrong.
    """
    if (library := imported()) is None:
        raise ModuleNotFoundError(WITHOUT)
    attention = FlashInferDecode(library, shape, device) if shape is not None else None
    draw = FlashInferDraw(library.sampling) if draws else None
    with torch.inference_mode():
        trials = _decodes(attention, shape, device, SMALL, timed=False) if attention and shape else []
        trials += _draws(draw, device, SMALL, timed=False) if draw else []
    if wrong := [trial.op for trial in trials if not trial.right]:
        raise RuntimeError(f"wrong results: {', '.join(wrong)}")
    return CardOps(attention, draw)


def _settle(gpu: Gpu, shape: AttentionShape, device: str, found: CardChoices) -> None:
    """Frees what a trial took. Raises ConfigError if the card isn't usable any more, after which torch's ops are
    kept: an error of a kernel stays with the process.
    """
    try:
        _free(device)
    except Exception as error:
        why = _failure(error)
        spoilt = tuple(
            choice if choice.way == TORCH and choice.lasts else OpChoice(choice.op, TORCH, why, choice.trials)
            for choice in found.choices
        )
        noted = _keep(gpu, shape, msgspec.structs.replace(found, choices=spoilt))
        then = "it is noted, and the next start takes torch's ops" if noted else "it couldn't be noted"
        text = f"device {device}: the trial of {FLASHINFER} left the card unusable for this process: {why}; {then}"
        raise ConfigError(f"{text}; start again" + ("" if noted else f" without {FLASHINFER}"), "device") from error


def _free(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()  # which raises what a kernel did
        torch.cuda.empty_cache()  # for the KV pages


def _keep(gpu: Gpu, shape: AttentionShape, found: CardChoices) -> bool:
    """Writes the record; returns whether it is written."""
    try:
        _path(gpu, shape).parent.mkdir(parents=True, exist_ok=True)
        _path(gpu, shape).write_bytes(msgspec.json.format(msgspec.json.encode(found)))
    except OSError as error:
        log.warning("the choice of ops is not kept, and the next start tries again: %s", error)
        return False
    return True


def earlier_choices(gpu: Gpu) -> CardChoices | None:
    """Returns the newest record of this card in this environment, of any shape; None if there is none."""
    return max(_records(gpu).values(), key=lambda record: record.at, default=None)


def forget_choices(gpu: Gpu) -> None:
    """Removes all records of this card in this environment, so that the next starts try again."""
    for path in _records(gpu):
        path.unlink(missing_ok=True)


def environment(gpu: Gpu) -> str:
    """Returns the key of what a choice depends on besides the shape: card, driver, libraries, whether there is a
    compiler, these sources.
    """
    sources = b"".join((Path(__file__).parent / name).read_bytes() for name in ("card_ops.py", "flash_infer.py"))
    versions = [_version(name) for name in ("torch", "flashinfer-python")]
    text = repr((gpu.name, gpu.capability, gpu.driver, versions, _has_nvcc(), hashlib.sha256(sources).hexdigest()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def try_library(shape: AttentionShape, device: str, sizes: Sizes) -> tuple[OpChoice, ...]:
    """Returns what is to compute each op on ``device``, with what was measured."""
    try:
        library = imported()
    except Exception as error:  # whatever a library says that doesn't fit this machine
        return tuple(OpChoice(op, TORCH, _failure(error)) for op in (ATTENTION, DRAW))
    if library is None:
        return tuple(OpChoice(op, TORCH, WITHOUT) for op in (ATTENTION, DRAW))
    with torch.inference_mode():
        torch.manual_seed(1)
        return (
            _tried(ATTENTION, lambda: _decodes(FlashInferDecode(library, shape, device), shape, device, sizes)),
            _tried(DRAW, lambda: _draws(FlashInferDraw(library.sampling), device, sizes)),
        )


def _tried(op: str, run: Callable[[], Sequence[OpTrial]]) -> OpChoice:
    try:
        trials = tuple(run())
    except Exception as error:  # its kernels are compiled here, by tools and for cards that we don't know
        return OpChoice(op, TORCH, _failure(error), lasts=not _is_full(error))
    if wrong := [trial.op for trial in trials if not trial.right]:
        return OpChoice(op, TORCH, f"{FLASHINFER}'s results are wrong on this card: {', '.join(wrong)}", trials)
    if sum(trial.own_us for trial in trials) > sum(trial.torch_us for trial in trials):
        return OpChoice(op, TORCH, FASTER, trials)
    return OpChoice(op, FLASHINFER, "", trials)


def _is_full(error: Exception) -> bool:
    """Returns whether memory was lacking, the reference's too, which says nothing of the library."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "out of memory" in str(error)


def _failure(error: Exception) -> str:
    if _is_full(error):
        return f"there was too little memory to try {FLASHINFER}: {(str(error).splitlines() or [''])[0][:200]}"
    return f"{FLASHINFER} failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def _decodes(
    attention: DecodeAttention, shape: AttentionShape, device: str, sizes: Sizes, timed: bool = True
) -> list[OpTrial]:
    return [
        _decode(attention, shape, device, form, batch, tokens, timed)
        for batch, tokens in sizes.decodes
        for form in shape.forms
    ]


def _decode(
    attention: DecodeAttention,
    shape: AttentionShape,
    device: str,
    form: tuple[int, float],
    batch: int,
    tokens: int,
    timed: bool,
) -> OpTrial:
    """Tries ``batch`` sequences of ``tokens`` tokens each, on pages in random order."""
    window, softcap = form
    each = -(-tokens // BLOCK_TOKENS)
    dtype, size = shape.torch_dtype, (BLOCK_TOKENS, shape.kv_heads, shape.head_dim)
    planes = torch.randn((batch * each, 2, *size), dtype=dtype, device=device)
    tables = torch.randperm(batch * each).view(batch, each)
    q = torch.randn((batch, shape.heads, shape.head_dim), dtype=dtype, device=device)
    job = _job(tables, tokens, window, device)
    last = [(tokens - 1) % BLOCK_TOKENS + 1] * batch
    seen = {one: decode_tables(tables.tolist(), last) for one, _ in shape.forms}

    def by_torch(q: Tensor, planes: Tensor) -> Tensor:
        jobs = [job._replace(mask=job.mask.to(q.dtype))]
        return paged_attention(q, planes.flatten(0, 1), jobs, 0, shape.scale, softcap).view(q.shape)

    attention.plan(seen)
    name = f"{batch} decodes of {tokens} tokens" + (f", window {window}" if window else "")
    keys, values = planes.unbind(1)
    return compare_ops(
        name,
        lambda: attention.attend(q, keys, values, window, softcap),
        lambda: by_torch(q, planes),
        by_torch(q.float(), planes.float()),
        device,
        timed=timed,
    )


def _job(tables: Tensor, tokens: int, window: int, device: str) -> AttentionJob:
    keys = torch.arange(tables.shape[1] * BLOCK_TOKENS)
    hidden = (keys >= tokens) | ((keys < tokens - window) if window else False)
    mask = torch.zeros(keys.shape).masked_fill_(hidden, -torch.inf).expand(len(tables), 1, 1, -1)
    blocks = torch.cat((2 * tables.flatten(), 2 * tables.flatten() + 1))
    return AttentionJob(0, len(tables), 1, (blocks.to(device),), mask.to(device))


def _draws(draw: FlashInferDraw, device: str, sizes: Sizes, timed: bool = True) -> list[OpTrial]:
    return [_draw(draw, device, rows, sizes.vocab, timed) for rows in sizes.rows]


def _draw(draw: FlashInferDraw, device: str, rows: int, vocab: int, timed: bool) -> OpTrial:
    logits = 4 * torch.randn((rows, vocab), device=device)
    heat, top_k, top_p, min_p = (torch.full((rows,), value, device=device) for value in (0.8, TOP_K, TOP_P, MIN_P))
    number = torch.rand(rows, dtype=torch.float64, device=device)
    kept = draw.kept(logits, heat, top_k, top_p, min_p)
    return compare_ops(
        f"draws of {rows} rows",
        lambda: draw(logits, heat, top_k, top_p, min_p, number),
        lambda: sample(logits, heat, top_k, top_p, min_p, number),
        probabilities(logits, heat, top_k, top_p, min_p),
        device,
        kept / kept.sum(-1, keepdim=True),
        timed,
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _has_nvcc() -> bool:
    """Returns whether the compiler is where FlashInfer looks for it."""
    if home := os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"):
        return shutil.which(f"{home}/bin/nvcc") is not None
    return (shutil.which("nvcc") or shutil.which(NVCC)) is not None


def _folder() -> Path:
    return cache_dir() / "cuda" / "choices"


def _path(gpu: Gpu, shape: AttentionShape) -> Path:
    key = hashlib.sha256(environment(gpu).encode() + msgspec.json.encode(shape)).hexdigest()[:16]
    return _folder() / f"{key}.json"


def _records(gpu: Gpu) -> dict[Path, CardChoices]:
    found = {path: record for path in _folder().glob("*.json") if (record := _read(path)) is not None}
    return {path: record for path, record in found.items() if record.environment == environment(gpu)}


def _read(path: Path) -> CardChoices | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=CardChoices)
    except (OSError, msgspec.MsgspecError):
        return None
