"""Benchmarks an engine's start, from after the imports to the first token; each start is a process of its own.

Knows nothing of clusters. The checkpoint has random bfloat16 weights in a temporary folder; the first start
quantizes them and writes the disk cache of packed weights, later ones map it and verify its checksums. Files are in
the host's page cache.

    python -m baton.bench.engine.start DIRECTORY SCHEME CACHE      one start, its seconds on stdout
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from baton.bench.engine.models import CONTEXT, SIZES
from baton.bench.rows import Row, median, spread
from baton.engine.backends.loading import load
from baton.engine.config import EngineConfig, Quantization
from baton.engine.models import program_for
from baton.engine.plan import SampleSpec, SequenceStep, StepPlan
from baton.engine.program.config import ModelConfig
from baton.protos.nouns import BLOCK_TOKENS, Sampling

MODULE = "baton.bench.engine.start"
TARGET_S = 2.0  # most seconds from the second start on, because weights are packed already
PROMPT = list(range(1, 2 * BLOCK_TOKENS + 1))


def rows(size: str, scheme: str, rounds: int) -> Iterator[Row]:
    """Yields the seconds of the first start, which quantizes the weights, and the median of ``rounds`` later
    starts.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), size)
        first, *later = (_in_a_process(folder, scheme) for _ in range(rounds + 1))
    yield Row(f"first start to first token, {size} {scheme}, weights rounded and cached", first, "s")
    name = f"start to first token after imports, {size} {scheme}, cached weights"
    yield Row(name, median(later), "s", spread=spread(later), target=TARGET_S, ceiling=True)


def write_checkpoint(folder: Path, size: str) -> None:
    """Writes a Llama checkpoint with random weights to ``folder``, in Hugging Face layout without a tokenizer."""
    fields = {"model_type": "llama", "max_position_embeddings": CONTEXT, "tie_word_embeddings": False} | SIZES[size]
    (folder / "config.json").write_text(json.dumps(fields))
    torch.manual_seed(0)
    tensors = {}
    for weight in program_for(ModelConfig.read(folder)).weights:
        for name, shape in zip(weight.sources, weight.shapes, strict=True):
            plain = torch.empty(shape, dtype=torch.bfloat16)
            tensors[name] = plain.normal_(0, 0.02) if len(shape) == 2 else plain.fill_(1)
    save_file(tensors, str(folder / "model.safetensors"))


def start_seconds(folder: str, scheme: Quantization, cache: str) -> float:
    """Returns the seconds to load the model and prefill a prompt of two blocks, in this process, after its imports.

    ``cache`` is the directory for packed weights.
    """
    began = time.perf_counter()
    runner = load(EngineConfig(folder, quantization=scheme, cache_dir=cache, kv_cache_dtype="bf16"))
    pages = list(range(len(PROMPT) // BLOCK_TOKENS + 1))
    runner.bind(memoryview(bytearray(len(pages) * runner.spec.layout.page_bytes)), len(pages))
    spec = SampleSpec(Sampling(temperature=0.0, max_tokens=1), 0, len(PROMPT), PROMPT, len(PROMPT))
    runner.run(StepPlan((SequenceStep(0, PROMPT, 0, pages, spec, is_prefill=True),)))
    return time.perf_counter() - began


def _in_a_process(folder: str, scheme: str) -> float:
    command = [sys.executable, "-m", MODULE, folder, scheme, folder]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


if __name__ == "__main__":
    print(start_seconds(*sys.argv[1:]))  # type: ignore[arg-type]
