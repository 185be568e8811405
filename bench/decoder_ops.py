"""Measures decoders with ops of their own on torch's engine and on the native one: layers of real shapes.

Knows nothing of what a model says. Both engines have the same random bf16 weights, one thread each, and take turns;
time is the thread's CPU time. Weights repeat a stretch of numbers, which makes no difference to speed.

    python -m bench.decoder_ops [--kinds jamba,cohere2] [--batches 1,16] [--rounds 3] [--no-torch | --last-rows]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from baton.bench.rows import Row, median, table
from baton.engine.backends.native.batch import NativeBatch
from baton.engine.backends.native.runner import NativeRunner
from baton.engine.backends.torch.runner import TorchRunner
from baton.engine.models import program_for
from baton.engine.plan import ModelSpec, Runner, StepPlan
from baton.engine.program.config import ModelConfig
from baton.engine.program.program import Program
from baton.evaluate.workload import PROMPT, Workload
from baton.kernels.abi import native
from baton.kv.layout.page import layout_for
from baton.protos.json import Json

# Two or three layers of the shape that the model ``like`` has, narrower where experts would take gigabytes.
KINDS: dict[str, Json] = {
    "starcoder2": {"like": "StarCoder2 3B", "hidden_size": 3072, "intermediate_size": 12288, "num_hidden_layers": 2,
                   "num_attention_heads": 24, "num_key_value_heads": 2, "sliding_window": 4096},
    "cohere2": {"like": "Command R7B", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 2,
                "num_attention_heads": 32, "num_key_value_heads": 8, "sliding_window": 4096,
                "layer_types": ["sliding_attention", "full_attention"]},
    "glm4": {"like": "GLM-4 9B", "hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 2,
             "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "attention_bias": True},
    "hunyuan_v1_dense": {"like": "Hunyuan 1.8B", "hidden_size": 2048, "intermediate_size": 6144,
                         "num_hidden_layers": 3, "num_attention_heads": 16, "num_key_value_heads": 4,
                         "head_dim": 128},
    "nemotron_h": {"like": "Nemotron Nano 9B v2", "hidden_size": 4480, "intermediate_size": 15680,
                   "layer_types": ["linear_attention", "mlp", "full_attention"], "num_hidden_layers": 3,
                   "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "mamba_num_heads": 128,
                   "mamba_head_dim": 80, "n_groups": 8, "ssm_state_size": 128},
    "jamba": {"like": "Jamba 3B", "hidden_size": 2560, "intermediate_size": 8192, "num_hidden_layers": 3,
              "num_attention_heads": 20, "num_key_value_heads": 2, "attn_layer_period": 3, "attn_layer_offset": 1,
              "num_experts": 1, "num_experts_per_tok": 1, "mamba_dt_rank": 160, "mamba_d_state": 16},
    "phimoe": {"like": "Phi-3.5-MoE, half as wide", "hidden_size": 2048, "intermediate_size": 3200,
               "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 4, "num_local_experts": 16,
               "num_experts_per_tok": 2, "attention_bias": True, "lm_head_bias": True, "rms_norm_eps": 1e-5},
    "llama4_text": {"like": "Llama 4 Scout, 2/5 as wide", "hidden_size": 2048, "intermediate_size": 3200,
                    "intermediate_size_mlp": 6400, "num_hidden_layers": 2, "num_attention_heads": 16,
                    "num_key_value_heads": 4, "num_local_experts": 16, "num_experts_per_tok": 1,
                    "no_rope_layers": [1, 0]},
    "gemma3n_text": {"like": "Gemma 3n E4B, a fifth as deep", "hidden_size": 2048, "intermediate_size": 16384,
                     "num_hidden_layers": 7, "num_kv_shared_layers": 3, "num_attention_heads": 8,
                     "num_key_value_heads": 2, "head_dim": 256, "vocab_size_per_layer_input": 32000,
                     "layer_types": ["sliding_attention", "full_attention"] * 3 + ["sliding_attention"]},
    "llama": {"like": "Llama of 150M", "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
              "num_attention_heads": 12, "num_key_value_heads": 4},
}  # fmt: skip
SHARED: Json = {"vocab_size": 32000, "max_position_embeddings": 8192}
STRETCH = 1 << 20  # random numbers


def program_of(kind: str) -> Program:
    """Returns the program of ``kind``."""
    own = {name: value for name, value in KINDS[kind].items() if name != "like"}
    return program_for(ModelConfig(Path(kind), {"model_type": kind} | SHARED | own, ()))


def weights_of(program: Program) -> dict[str, torch.Tensor]:
    """Returns weights in bf16."""
    torch.manual_seed(0)
    stretch, found = torch.randn(STRETCH).mul_(0.02).bfloat16(), dict[str, torch.Tensor]()
    for weight in program.weights:
        shape = (sum(part[0] for part in weight.shapes), *weight.shapes[0][1:])
        count = torch.Size(shape).numel()
        value = stretch.repeat(-(-count // STRETCH))[:count].view(shape)
        found[weight.name] = value if len(shape) > 1 else value + 1
    return found


def engines(kind: str, with_torch: bool) -> dict[str, Runner]:
    """Returns runners by name, the native one first."""
    program = program_of(kind)
    layout = layout_for("bfloat16", program.groups, states=program.states)
    spec = ModelSpec(kind, layout, 8192, program.vocab_size, ())
    weights = weights_of(program)
    found: dict[str, Runner] = {"native": NativeRunner(spec, program, dict(weights))}
    if with_torch:
        found["torch"] = TorchRunner(spec, program, dict(weights))
    return found


def rows(kind: str, batches: list[int], rounds: int, with_torch: bool) -> Iterator[Row]:
    """Yields CPU milliseconds of a step on the native engine, and torch's over it."""
    works = {
        name: Workload(runner, max(batches), clock=time.thread_time)
        for name, runner in engines(kind, with_torch).items()
    }
    cases: dict[str, Callable[[Workload], float]] = {
        f"batch {each}": partial(_decode, batch=each) for each in batches
    }
    cases |= {f"prompt of {PROMPT}": Workload.prompt_seconds}
    for what, once in cases.items():
        took = [{name: once(work) for name, work in works.items()} for _ in range(rounds + 1)][1:]
        milliseconds = 1e3 * median([each["native"] for each in took])
        ratio = median([each["torch"] / each["native"] for each in took]) if with_torch else 0.0
        peer = "torch" if with_torch else ""
        yield Row(f"{KINDS[kind]['like']} ({kind}), {what}", milliseconds, "ms", peer=peer, ratio=ratio)


class AllRows(NativeRunner):
    """Computes all rows to the end."""

    def _spares(self, plan: StepPlan, batch: NativeBatch) -> bool:
        return False


def last_rows(kind: str, rounds: int) -> Row:
    """Returns the CPU milliseconds of a prompt's step, and those of one that computes all rows of it over them."""
    some = engines(kind, with_torch=False)["native"]
    program = program_of(kind)
    works = [
        Workload(runner, 1, clock=time.thread_time)
        for runner in (some, AllRows(some.spec, program, dict(weights_of(program))))
    ]
    spared, whole = list[float](), list[float]()
    for _ in range(rounds + 1):
        spared.append(works[0].prompt_seconds())
        whole.append(works[1].prompt_seconds())
    ratio = median([all_of / some for some, all_of in zip(spared[1:], whole[1:], strict=True)])
    name = f"{KINDS[kind]['like']} ({kind}), prompt of {PROMPT}"
    return Row(name, 1e3 * median(spared[1:]), "ms", peer="all rows", ratio=ratio)


def _decode(work: Workload, batch: int) -> float:
    return work.decode_seconds(batch)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--last-rows", action="store_true", help="prompts beside those that compute all rows")
    args = parser.parse_args()
    torch.set_num_threads(1)
    native.set_threads(1)
    for kind in args.kinds.split(","):
        if args.last_rows:
            Console(highlight=False, width=130).print(table([last_rows(kind, args.rounds)]))
            continue
        found = rows(kind, [int(each) for each in args.batches.split(",")], args.rounds, not args.no_torch)
        Console(highlight=False, width=130).print(table(list(found)))


if __name__ == "__main__":
    main()
