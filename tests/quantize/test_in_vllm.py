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
from baton.quantize.run import quantize
from baton.quantize.schemes import Recipe
from baton.quantize.source import Source
from bench.peers.vllm_servers import HOST
from tests.engine.quant.test_original_libraries import SampleSpec, Sampling

DEMO = Path(__file__).parents[2] / "models" / "demo"
HOME = Path(os.environ.get("BATON_VLLM_HOME") or Path(__file__).parents[2] / "build" / "peers" / "vllm")
RECIPES = {
    "compressed-tensors": Recipe("rtn"),
    "gptq": Recipe("rtn", format="gptq"),
    "awq": Recipe("rtn", symmetric=False, format="awq"),
    "fp8": Recipe("fp8"),
}
NEAR = 0.15  # of the likeliest token's log-probability; activations are int8 here, bfloat16 there
LIMIT_S = 280
PROMPTS = [[(7 * i * i + 31 * row + 5) % 4000 + 10 for i in range(48)] for row in range(4)]

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.timeout(LIMIT_S + 60),
    pytest.mark.skipif(not (HOME / "bin" / "python").exists(), reason="no environment of vLLM's here"),
    pytest.mark.skipif("avx512f" not in Path("/proc/cpuinfo").read_text(), reason="vLLM's kernels need AVX-512"),
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


def of_vllm(folders: list[Path], tmp_path: Path) -> dict[str, list[dict[int, float]]]:
    """Returns each prompt's likeliest tokens with their log-probabilities by checkpoint, by vLLM."""
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
    return {folder: [dict(map(tuple, pairs)) for pairs in answers] for folder, answers in found.items()}


def test_vllm_answers_as_this_engine_does(tmp_path: Path) -> None:
    for name, recipe in RECIPES.items():
        quantize(Source(str(DEMO)), recipe.checked(), (), tmp_path / name)
    theirs = of_vllm([tmp_path / name for name in RECIPES], tmp_path)
    for name in RECIPES:
        ours = own(tmp_path / name, tmp_path / "cache")
        for (token, logprob), found in zip(ours, theirs[str(tmp_path / name)], strict=True):
            assert token in found, name
            assert max(found.values()) - found[token] < NEAR, name
            assert logprob == pytest.approx(found[token], abs=NEAR), name
