"""Runs the conformance suite once for each way in which this CPU can compute.

Knows nothing of what the suite holds. The native ops run in each ISA that the CPU has, and in AMX's by emulated
tiles where it has none. The references run on torch's BLAS, whose dispatch is forced down step by step, because a
BLAS rounds in other places on other CPUs. Prints a line for each way; exits with 1 if any failed. Run by ``make
conformance``; arguments go on to pytest.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from baton.kernels.abi import native

SUITES = (
    "tests/conformance/test_parity.py",
    "tests/conformance/test_prompt_states.py",
    "tests/kernels/test_dense_ops.py",
    "tests/kernels/test_attention_ops.py",
)
FORCED_DOWN = (
    {},
    {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41", "ATEN_CPU_CAPABILITY": "default"},
)


def ways() -> list[dict[str, str]]:
    """Returns the environment of each run: the ISAs of this CPU and an emulated AMX, then the references over each
    BLAS dispatch.
    """
    isas = [{native.ISA_ENV: isa} for isa in native.testable()]
    return [*isas, *({native.ISA_ENV: native.REFERENCE, **forced} for forced in FORCED_DOWN)]


def passes(way: dict[str, str], arguments: list[str]) -> bool:
    """Runs the suites in the environment ``way`` and prints whether they passed, and their time in seconds."""
    began = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-m", "not soak and not gpu", *SUITES, *arguments]
    done = subprocess.run(command, env={**os.environ, **way}, capture_output=True, text=True)
    name = " ".join(f"{key}={value}" for key, value in way.items())
    tail = done.stdout.strip().splitlines()[-1:] if done.returncode == 0 else [done.stdout, done.stderr]
    print(
        f"{'passed' if done.returncode == 0 else 'FAILED'}  {name}  {time.monotonic() - began:.0f} s",
        *tail,
        flush=True,
    )
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(0 if min(passes(way, sys.argv[1:]) for way in ways()) else 1)
