"""A prefill and a decode worker on one card, which is a stand-in: real processes, kernels on the SIMT shim.

Every launch is a thousand times slower than a GPU's; the model is one that doesn't mind.
"""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from baton.kernels.cuda import build, library
from tests.conformance.checkpoints import make
from tests.e2e.fleet import Fleet, wait_for
from tests.kernels.compilers import needs_compiler
from tests.kv.transport.rigs import required_driver

SHAPE = {"num_hidden_layers": 2, "vocab_size": 200, "hidden_size": 64, "intermediate_size": 96,
         "num_attention_heads": 2, "num_key_value_heads": 1}  # fmt: skip
TOKENS = 5


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whoever is started from here finds the stand-in driver, and the shim instead of a library for a GPU."""
    (tmp_path / "libcuda.so.1").symlink_to(required_driver())
    with needs_compiler():
        build.simt()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv(library.SIMT_ENV, "1")


def asked(fleet: Fleet, prompt: list[int]) -> list[int]:
    body = {"model": fleet.name, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    reply = httpx.post(fleet.url + "/v1/completions", json=body | {"return_token_ids": True}, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["token_ids"]


def landed(fleet: Fleet) -> list[int]:
    """Returns how many blocks landed on the decode worker's card by each stream that has ended, ascending."""
    return sorted(map(int, re.findall(r"(\d+) blocks landed on the card", fleet.log("decode-0", 1 << 20))))


@pytest.mark.thorough
@pytest.mark.parametrize("mirror", ["whole", "demand"])
def test_kv_goes_from_one_engines_card_to_the_others_and_answers_are_those_of_one_engine(
    card: None, tmp_path: Path, mirror: str
) -> None:
    model = make(tmp_path / "model", "llama2", tokenizer=True, **SHAPE)
    worker = {"model": str(model), "device": "cuda", "pages": 48, "dtype": "bfloat16", "kv_mirror": mirror}
    worker |= {"kv_transport": "cuda_ipc"}  # by name: on the shim a preflight finds shm quicker
    router = {"local_prefill_max_tokens": 0}
    prompts = [[3 + i * 7 % 190 for i in range(70)], [3 + i * 11 % 190 for i in range(33)]]
    prompts.append([*prompts[0], *prompts[1]])  # its first blocks are cached at both
    told = {"log_level": "debug"}
    with Fleet(prefill=0, colocated=True, worker=worker) as alone:
        wanted = [asked(alone, prompt) for prompt in prompts]
    with Fleet(prefill=1, decode=1, worker=worker, router=router, telemetry=told) as fleet:
        assert [asked(fleet, prompt) for prompt in prompts] == wanted
        said = fleet.log("prefill-0", 1 << 20)
        assert re.search(r"KV to decode-0: cuda_ipc, \d", said)
        assert ("on the host while somebody reads them" in said) == (mirror == "demand")
        for log in (said, fleet.log("decode-0", 1 << 20)):
            assert "not shared" not in log
            assert "not from the card" not in log
        whole = "a preflight's no blocks, and what each prompt had beyond its prefix"
        wait_for(lambda: landed(fleet) == [0, 3, 3, 5], what=f"{whole} landing on the card")
        fleet.wait_for_baseline()
