"""Compares quantization schemes on this machine: their size, speed, and loss in bits per byte.

Knows nothing of how a scheme rounds. Each is timed on the engine with real weights; the loss is on the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median

import msgspec

from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.engine.quant import ON_LOAD
from baton.evaluate.intervals import ratio_interval
from baton.evaluate.local import LocalSubject
from baton.evaluate.loss import bits
from baton.evaluate.text import cut
from baton.evaluate.workload import CONTEXT, PROMPT, STEPS, Workload
from baton.protos.errors import ConfigError

BATCHES = (1, 16)  # sequences of a decode step: one, which memory bounds, and a batch
ROUNDS = 5  # of each timing; the median counts, because others use the machine's memory too
CHECKPOINT = "checkpoint"  # the form of weights that come rounded
EXACT = "bfloat16"  # the row that the others' loss is held against


class SweptScheme(msgspec.Struct, frozen=True):
    """A named way of serving a model."""

    name: str
    config: EngineConfig
    weights: str = ""  # how its weights come; "": as ``config.quantization`` says


class SweepRow(msgspec.Struct, frozen=True):
    """The measurements of one scheme."""

    scheme: str
    gigabytes: float  # of weights that a decode step reads
    decode_one: float  # output tokens/s of one sequence
    decode_many: float  # of a batch of 16
    prompt: float  # tokens/s of prefill
    bits_per_byte: float
    added: float  # loss over the first row's, as a share; the true value is within ``low`` to ``high``
    low: float
    high: float
    quantization: str = "none"  # as in [worker]; "checkpoint" if the weights come quantized
    kv_cache_dtype: str = "auto"
    activations: str = "auto"  # as in [worker]; likewise ``kv_cache_dtype``


def schemes(
    model: str,
    also: Sequence[str],
    kvs: Sequence[str],
    cache_dir: str = "",
    threads: int | None = None,
    activations: Sequence[str] = ("auto",),
) -> list[SweptScheme]:
    """Returns the schemes to compare: bfloat16, each quantization on load, and the checkpoints ``also`` as they
    are.

    Each comes with every KV dtype of ``kvs``, quantized ones with every kind of ``activations``. The first is
    bfloat16 with the first KV dtype.
    """
    base = EngineConfig(model, dtype=EXACT, cache_dir=cache_dir, threads=threads)  # type: ignore[arg-type]
    return [each for kv in kvs for each in _with_kv(base, also, kv, activations)]


def _with_kv(plainest: EngineConfig, also: Sequence[str], kv: str, activations: Sequence[str]) -> list[SweptScheme]:
    base = msgspec.structs.replace(plainest, kv_cache_dtype=kv)
    named = "" if kv == "auto" else f", {kv} KV"
    plain = msgspec.structs.replace(base, dtype="auto")
    forms = [(f"{name}, on load", msgspec.structs.replace(plain, quantization=name), "") for name in ON_LOAD]
    forms += [(at, msgspec.structs.replace(plain, model=at), CHECKPOINT) for at in also]
    quantized = [
        SweptScheme(f"{name}{_beside(rows)}{named}", msgspec.structs.replace(config, activations=rows), weights)
        for name, config, weights in forms
        for rows in activations
    ]
    return [SweptScheme(f"{EXACT}{named}", base), *quantized]


def _beside(activations: str) -> str:
    return "" if activations == "auto" else f", {activations} activations"


def sweep(asked: Sequence[SweptScheme], texts: Sequence[str], say: Callable[[str], None]) -> Iterator[SweepRow]:
    """Yields the row of each scheme; the loss of the others is compared with that of the first."""
    known: list[float] = []
    for scheme in asked:
        say(f"{scheme.name}: speed and loss")
        local = LocalSubject(scheme.config)
        documents = cut(list(texts), local.encode, min(1024, local.context))
        found = bits(local, documents)
        known = known or found
        yield _row(scheme, local, found, known, sum(document.bytes for document in documents))


def _row(scheme: SweptScheme, local: LocalSubject, found: list[float], known: list[float], size: int) -> SweepRow:
    low, high = ratio_interval(found, known)
    one, many, prompt = _rates(scheme.config)
    work = local.runner.work
    if work is None:
        raise ConfigError(f"{scheme.name}: the engine doesn't say what its weights weigh", "model")
    return SweepRow(
        scheme=scheme.name,
        gigabytes=work.step_bytes / 1e9,
        decode_one=one,
        decode_many=many,
        prompt=prompt,
        bits_per_byte=sum(found) / size,
        added=sum(found) / sum(known) - 1,
        low=low - 1,
        high=high - 1,
        quantization=scheme.weights or scheme.config.quantization,
        kv_cache_dtype=scheme.config.kv_cache_dtype,
        activations=scheme.config.activations,
    )


def _rates(config: EngineConfig) -> tuple[float, float, float]:
    """Returns tokens per second of decoding one sequence, of decoding many, and of prefill."""
    runner = load_runner(config)
    if runner.spec.max_model_len < CONTEXT + STEPS + 1:
        have = runner.spec.max_model_len
        text = f"{config.model}: a sweep decodes after {CONTEXT} tokens; the model's context is {have}"
        raise ConfigError(text, "model")
    work = Workload(runner, max(BATCHES), runner.spec.vocab_size)
    one, many = (batch / median(work.decode_seconds(batch) for _ in range(ROUNDS)) for batch in BATCHES)
    return one, many, PROMPT / median(work.prompt_seconds() for _ in range(ROUNDS))
