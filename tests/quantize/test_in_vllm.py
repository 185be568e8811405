"""Tests that vLLM answers from what ``baton quantize`` writes as this engine does, in each format.

Runs where vLLM's environment is set up (``python -m bench.peers.environments vllm``) and the CPU has AVX-512, which
its kernel for packed integers needs.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.engine.plan import SequenceStep, StepPlan
from baton.quantize.layers import has_experts
from baton.quantize.run import quantize
from baton.quantize.schemes import Recipe, needs_text
from baton.quantize.source import Source
from bench.peers.vllm_servers import HOST
from tests.conformance.checkpoints import make
from tests.engine.quant.test_original_libraries import SampleSpec, Sampling

DEMO = Path(__file__).parents[2] / "models" / "demo"
HOME = Path(os.environ.get("BATON_VLLM_HOME") or Path(__file__).parents[2] / "build" / "peers" / "vllm")
CPU = Path("/proc/cpuinfo").read_text()
RECIPES = {
    "compressed-tensors": Recipe("rtn"),
    "gptq": Recipe("gptq"),
    "gptq as compressed-tensors": Recipe("gptq", format="compressed-tensors"),
    "awq": Recipe("awq", symmetric=False),
    "smoothquant": Recipe("smoothquant"),
    "fp8": Recipe("fp8"),
}
REFUSED = {  # what vLLM's CPU build says of forms that it has no kernel for
    "nf4": (Recipe("nf4"), "Unknown quantization method: bitsandbytes"),
    "mxfp4": (Recipe("mxfp4"), "Failed to find a kernel that can implement the MXFP4 linear layer"),
    "rtn of 8 bits": (Recipe("rtn", bits=8), "Quant type (uint8b128) not supported by CPUWNA16"),
    "gptq --regroup": (Recipe("gptq", regroup=True), "GPTQ group activation ordering"),
}
EXPERTS = {  # the same of a model with experts, whose kernels take AMX
    "rtn": (Recipe("rtn", group=32), "No WNA16 MoE backend supports the deployment configuration"),
    "gptq": (Recipe("gptq", group=32, format="gptq"), "No WNA16 MoE backend supports the deployment configuration"),
    "awq": (Recipe("awq", group=32, symmetric=False), "No WNA16 MoE backend supports the deployment configuration"),
    "smoothquant": (Recipe("smoothquant"), "No Int8 MoE backend supports the deployment configuration"),
    "fp8": (Recipe("fp8"), "Unsupported FP8 MoE backend"),
}
NEAR = 0.15  # of the likeliest token's log-probability; activations are int8 here, bfloat16 there
LIMIT_S = 280
SAMPLES = [[(11 * i * i + 17 * row + 3) % 4000 + 10 for i in range(64)] for row in range(16)]
PROMPTS = [[(7 * i * i + 31 * row + 5) % 4000 + 10 for i in range(48)] for row in range(4)]

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.timeout(LIMIT_S + 60),
    pytest.mark.skipif(not (HOME / "bin" / "python").exists(), reason="no environment of vLLM's here"),
    pytest.mark.skipif("avx512f" not in CPU, reason="vLLM's kernels need AVX-512"),
]


def own(directory: Path, cache: Path) -> list[tuple[int, float]]:
    """Returns each prompt's likeliest token and its log-probability, by this engine."""
    runner = load_runner(EngineConfig(str(directory), threads=1, cache_dir=str(cache)))
    runner.bind(memoryview(bytearray(8 * runner.spec.layout.page_bytes)), 8)
    found = []
    for tokens in PROMPTS:
        ask = SampleSpec(Sampling(temperature=0.0, max_tokens=1, logprobs=1), 0, len(tokens), tokens, len(tokens))
        sampled = runner.run(StepPlan((SequenceStep(0, tokens, 0, range(8), ask),))).sampled[0]
        assert sampled.logprobs is not None
        found.append((sampled.token_id, sampled.logprobs.chosen.logprob))
    return found


def of_vllm(folders: list[Path], tmp_path: Path) -> dict[str, list[dict[int, float]] | str]:
    """Returns each prompt's likeliest tokens with their log-probabilities by checkpoint, by vLLM; of one that it
    refuses, what it says.
    """
    prompts, out = tmp_path / "prompts.json", tmp_path / "out.json"
    prompts.write_text(json.dumps(PROMPTS))
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": HOST, "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CACHE_ROOT": str(tmp_path / "vllm"),
    }  # fmt: skip
    settings["LD_PRELOAD"] = ":".join(map(str, HOME.rglob("libiomp5.so")))
    command = [HOME / "bin" / "python", Path(__file__).with_name("vllm_side.py"), prompts, out, *folders]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | settings
    subprocess.run([str(part) for part in command], check=True, env=environment, timeout=LIMIT_S)
    found = json.loads(out.read_text())
    read = {folder: of for folder, of in found.items() if isinstance(of, list)}
    return found | {folder: [dict(map(tuple, pairs)) for pairs in answers] for folder, answers in read.items()}


def made(model: Path, recipes: dict[str, Recipe], folder: Path) -> dict[str, Path]:
    """Quantizes ``model`` by each recipe; returns the checkpoints by name."""
    source = Source(str(model))
    for name, recipe in recipes.items():
        checked = recipe.checked(has_experts(source.program))
        quantize(source, checked, SAMPLES if needs_text(checked) else (), folder / name)
    return {name: folder / name for name in recipes}


def answers_alike(folder: Path, theirs: list[dict[int, float]] | str, cache: Path) -> None:
    """Asserts that this engine's likeliest tokens are among vLLM's, with log-probabilities near theirs."""
    assert isinstance(theirs, list), f"{folder.name}: {theirs}"
    for (token, logprob), found in zip(own(folder, cache), theirs, strict=True):
        assert token in found, folder.name
        assert max(found.values()) - found[token] < NEAR, folder.name
        assert logprob == pytest.approx(found[token], abs=NEAR), folder.name


def test_vllm_answers_as_this_engine_does(tmp_path: Path) -> None:
    folders = made(DEMO, RECIPES, tmp_path)
    theirs = of_vllm(list(folders.values()), tmp_path)
    for folder in folders.values():
        answers_alike(folder, theirs[str(folder)], tmp_path / "cache")


def test_what_vllm_has_no_kernel_for_is_what_the_docs_say(tmp_path: Path) -> None:
    experts = make(
        tmp_path / "experts", "mixtral", tokenizer=True, hidden_size=128, intermediate_size=128, vocab_size=4096
    )
    for model, cases in (
        (DEMO, REFUSED),
        (experts, EXPERTS),
    ):  # each in a process of its own: vLLM sets up experts once
        folder = tmp_path / f"of {model.name}"
        folders = made(model, {name: recipe for name, (recipe, _) in cases.items()}, folder)
        theirs = of_vllm(list(folders.values()), folder)
        for name, (_, said) in cases.items():
            found = theirs[str(folders[name])]
            if model == experts and "amx_tile" in CPU:
                assert isinstance(found, list)
            else:
                assert said in found, name
