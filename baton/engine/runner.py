"""The real runner: a model's program over paged KV in shared memory.

Knows nothing of schedulers, leases or processes. KV always lies in host memory, where the I/O process sends it
from and writes it to; on a GPU a step moves what it reads and writes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from baton.engine.batch import BatchBuilder
from baton.engine.checkpoint import Checkpoint
from baton.engine.config import ModelConfig
from baton.engine.hub import locate
from baton.engine.interpreter import Interpreter, KvPages
from baton.engine.load import EngineConfig
from baton.engine.models import program_for
from baton.engine.plan import ModelSpec, StepPlan, StepResult
from baton.engine.program import Program
from baton.engine.sampling import choose
from baton.engine.validate import require_computable
from baton.kernels.registry import kernels
from baton.kv.layout import layout_for
from baton.protos.errors import CheckpointError, ConfigError
from baton.protos.nouns import BLOCK_TOKENS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load(config: EngineConfig) -> TorchRunner:
    """The runner of ``config``'s model. Raises CheckpointError naming the file."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch finds no GPU here; use cpu", "device")
    directory = locate(config.model)
    model = ModelConfig.read(directory)
    if "quantization_config" in model.fields:
        raise model.error("quantization_config", "is set; only float32, float16 and bfloat16 weights are known")
    program, checkpoint = program_for(model), Checkpoint(directory)
    dtype = _dtype_name(config)
    weights = checkpoint.weights(program.weights, DTYPES[dtype], config.device)
    spec = _spec(config, model, program, dtype, checkpoint.fingerprint(model.fields))
    return TorchRunner(spec, program, weights)


class TorchRunner:
    """Implements ``Runner``. One thread at a time; its tensors are its own except the bound pages."""

    def __init__(
        self,
        spec: ModelSpec,
        program: Program,
        weights: dict[str, Tensor],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.spec = spec
        self._program, self._clock = program, clock
        self._dtype = DTYPES[spec.layout.dtype]
        self._kernels = kernels()
        self._interpreter = Interpreter(program, weights, self._kernels)
        self._builder = BatchBuilder(program, self._dtype, weights["embed"].device.type)
        self._kv: KvPages | None = None
        self._pages = 0

    def bind(self, buffer: memoryview, pages: int) -> None:
        """Use ``buffer`` as the KV pages, [page][layer][k|v][16][kv_heads][head_dim]."""
        p = self._program
        count = pages * p.layers * 2 * BLOCK_TOKENS * p.kv_heads * p.head_dim
        flat = torch.frombuffer(buffer, dtype=self._dtype, count=count)
        rows = flat.view(-1, p.kv_heads * p.head_dim)
        self._kv = KvPages(flat.view(pages, -1), rows, flat.view(-1, BLOCK_TOKENS, p.kv_heads, p.head_dim))
        self._pages = pages

    def run(self, plan: StepPlan) -> StepResult:
        """Compute a step. Raises for the whole step and may be repeated: what it wrote, it writes again."""
        began = self._clock()
        for item in plan.items:
            require_computable(item, self.spec.vocab_size, self._pages)
        if not plan.items or self._kv is None:
            return StepResult((), self._clock() - began)
        with torch.inference_mode():
            return self._compute(plan, self._kv, began)

    def _compute(self, plan: StepPlan, kv: KvPages, began: float) -> StepResult:
        batch = self._builder.build(plan)
        logits = self._interpreter.logits(batch, kv)[: len(batch.sampled)]
        specs = [item.sample for item in batch.sampled if item.sample]
        found = choose(logits, [item.seq for item in batch.sampled], specs, self._kernels.sample) if specs else ()
        place = {id(item): at for at, item in enumerate(plan.items)}
        order = sorted(range(len(found)), key=lambda row: place[id(batch.sampled[row])])
        return StepResult(tuple(found[row] for row in order), self._clock() - began)


def _dtype_name(config: EngineConfig) -> str:
    if config.dtype != "auto":
        return config.dtype
    return "float32" if config.device == "cpu" else "bfloat16"


def _spec(config: EngineConfig, model: ModelConfig, program: Program, dtype: str, fingerprint: str) -> ModelSpec:
    longest = min(config.max_model_len or program.max_position, program.max_position)
    if any(not 0 <= token < program.vocab_size for token in model.eos_token_ids):
        raise CheckpointError(f"{model.path}: eos_token_id is outside the vocabulary", "eos_token_id")
    return ModelSpec(
        fingerprint=fingerprint,
        layout=layout_for(dtype, program.groups),
        max_model_len=longest,
        vocab_size=program.vocab_size,
        eos_token_ids=model.eos_token_ids,
    )
