"""Chooses by trial what computes an op on a card that torch's ops serve, and keeps the choice with its figures.

Knows nothing of checkpoints. A record is of one card, driver, torch, FlashInfer, these sources and shape of
attention: for anything else there is none, and the trial runs again. A library that fails, is wrong or is slower
than torch is not taken, and the record says so. Whatever it raises is a reason not to take it: it compiles its
kernels on the machine that it runs on.
"""

from __future__ import annotations

import hashlib
import logging
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
    FlashInfer,
    FlashInferDecode,
    FlashInferDraw,
    imported,
)
from baton.engine.sampling import Draw
from baton.kernels.abi.build import cache_dir
from baton.kernels.paged_attention.job import AttentionJob
from baton.kernels.paged_attention.reference import paged_attention
from baton.kernels.sample.reference import probabilities, sample
from baton.protos.nouns import BLOCK_TOKENS

log = logging.getLogger("baton.engine")

TORCH, FLASHINFER = "torch", "flashinfer"
ATTENTION, DRAW = "decode attention", "filters of a draw"
FASTER = "it is faster"
WITHOUT = "flashinfer-python isn't installed (the extra [gpu])"
# An 8B's attention, for which `baton doctor --gpu` tries a card.
USUAL = AttentionShape(32, 8, 128, "bfloat16", 128**-0.5, ((0, 0.0),))
VOCAB, TOP_K, TOP_P, MIN_P = 128_256, 50, 0.9, 0.02


class Sizes(NamedTuple):
    """The sizes of trials: (sequences, tokens of each) of decodes, rows of draws, tokens in the vocabulary."""

    decodes: tuple[tuple[int, int], ...] = ((1, 509), (16, 2045), (64, 1021))
    rows: tuple[int, ...] = (1, 64)
    vocab: int = VOCAB


class OpChoice(msgspec.Struct, frozen=True):
    """Says that ``op`` is computed by ``way``, why not by the other one, and what was measured: FlashInfer's time
    is a trial's own.
    """

    op: str
    way: str
    why: str
    trials: tuple[OpTrial, ...] = ()

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
    ``device``, by the record of this card or by a trial now. The log says what was chosen.
    """
    found = choices_on(gpu, shape or USUAL, device, sizes)
    takes_attention, takes_draw = shape is not None and found.takes(ATTENTION), found.takes(DRAW)
    for choice in found.choices:
        if choice.op != ATTENTION or shape is not None:
            log.info("%s", choice.told)
    library = imported() if takes_attention or takes_draw else None
    if library is None:
        return CardOps()
    attention = FlashInferDecode(library, shape, device) if takes_attention and shape is not None else None
    return CardOps(attention, FlashInferDraw(library.sampling) if takes_draw else None)


def choices_on(gpu: Gpu, shape: AttentionShape, device: str, sizes: Sizes = Sizes()) -> CardChoices:
    """Returns the record of this card and ``shape``; if there is none, that of a trial now, which is kept."""
    if (known := _read(_path(gpu, shape))) is not None:
        return known
    found = CardChoices(gpu.name, environment(gpu), time.time(), try_library(shape, device, sizes))
    try:
        _path(gpu, shape).parent.mkdir(parents=True, exist_ok=True)
        _path(gpu, shape).write_bytes(msgspec.json.format(msgspec.json.encode(found)))
    except OSError as error:
        log.warning("the choice of ops is not kept, and the next start tries again: %s", error)
    return found


def earlier_choices(gpu: Gpu) -> CardChoices | None:
    """Returns the newest record of this card in this environment, of any shape; None if there is none."""
    return max(_records(gpu).values(), key=lambda record: record.at, default=None)


def forget_choices(gpu: Gpu) -> None:
    """Removes all records of this card in this environment, so that the next starts try again."""
    for path in _records(gpu):
        path.unlink(missing_ok=True)


def environment(gpu: Gpu) -> str:
    """Returns the key of what a choice depends on besides the shape: card, driver, libraries, these sources."""
    sources = b"".join((Path(__file__).parent / name).read_bytes() for name in ("card_ops.py", "flash_infer.py"))
    versions = [_version(name) for name in ("torch", "flashinfer-python")]
    text = repr((gpu.name, gpu.capability, gpu.driver, versions, hashlib.sha256(sources).hexdigest()))
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
        found = (
            _tried(ATTENTION, lambda: _decodes(library, shape, device, sizes)),
            _tried(DRAW, lambda: [_draw(library, device, rows, sizes.vocab) for rows in sizes.rows]),
        )
    if device == "cuda":
        torch.cuda.empty_cache()  # for the KV pages
    return found


def _tried(op: str, run: Callable[[], Sequence[OpTrial]]) -> OpChoice:
    try:
        trials = tuple(run())
    except Exception as error:  # its kernels are compiled here, by tools and for cards that we don't know
        return OpChoice(op, TORCH, _failure(error))
    if wrong := [trial.op for trial in trials if not trial.right]:
        return OpChoice(op, TORCH, f"{FLASHINFER}'s results are wrong on this card: {', '.join(wrong)}", trials)
    if sum(trial.own_us for trial in trials) > sum(trial.torch_us for trial in trials):
        return OpChoice(op, TORCH, FASTER, trials)
    return OpChoice(op, FLASHINFER, "", trials)


def _failure(error: Exception) -> str:
    return f"{FLASHINFER} failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def _decodes(library: FlashInfer, shape: AttentionShape, device: str, sizes: Sizes) -> list[OpTrial]:
    attention = FlashInferDecode(library, shape, device)
    return [
        _decode(attention, shape, device, form, batch, tokens)
        for batch, tokens in sizes.decodes
        for form in shape.forms
    ]


def _decode(
    attention: DecodeAttention, shape: AttentionShape, device: str, form: tuple[int, float], batch: int, tokens: int
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
    )


def _job(tables: Tensor, tokens: int, window: int, device: str) -> AttentionJob:
    keys = torch.arange(tables.shape[1] * BLOCK_TOKENS)
    hidden = (keys >= tokens) | ((keys < tokens - window) if window else False)
    mask = torch.zeros(keys.shape).masked_fill_(hidden, -torch.inf).expand(len(tables), 1, 1, -1)
    blocks = torch.cat((2 * tables.flatten(), 2 * tables.flatten() + 1))
    return AttentionJob(0, len(tables), 1, (blocks.to(device),), mask.to(device))


def _draw(library: FlashInfer, device: str, rows: int, vocab: int) -> OpTrial:
    logits = 4 * torch.randn((rows, vocab), device=device)
    heat, top_k, top_p, min_p = (torch.full((rows,), value, device=device) for value in (0.8, TOP_K, TOP_P, MIN_P))
    number, draw = torch.rand(rows, dtype=torch.float64, device=device), FlashInferDraw(library.sampling)
    kept = draw.kept(logits, heat, top_k, top_p, min_p)
    return compare_ops(
        f"draws of {rows} rows",
        lambda: draw(logits, heat, top_k, top_p, min_p, number),
        lambda: sample(logits, heat, top_k, top_p, min_p, number),
        probabilities(logits, heat, top_k, top_p, min_p),
        device,
        kept / kept.sum(-1, keepdim=True),
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


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
