"""Lower tiers in real workers: what the device evicted is found again, also after kill -9."""

import os
import signal
from contextlib import nullcontext

import httpx
import pytest

from tests.conformance.checkpoints import make
from tests.e2e.fleet import Fleet, wait_for
from tests.e2e.paced import Oracle, slow_profile
from tests.kv.tiers.buckets import served_bucket
from tests.thorough import first_now

PAGES, PROMPT = 80, 500  # room for two prompts at once
MANY = 5  # prompts of 32 blocks each: more than the device holds


def ask(fleet: Fleet, prompt: list[int]) -> tuple[list[int], int]:
    """Tokens, and how many of the prompt's were found."""
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = httpx.post(fleet.url + "/v1/completions", json=body, timeout=60).json()
    return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def tier_blocks(fleet: Fleet, slot: str, tier: str) -> float:
    """Returns how many blocks the worker's tier holds, by its metric."""
    text = httpx.get(f"http://{fleet.record(slot).metrics_address}/metrics", timeout=30).text
    lines = (x for x in text.splitlines() if x.startswith("baton_kv_tier_blocks{") and f'tier="{tier}"' in x)
    return sum(float(x.split()[-1]) for x in lines)


@pytest.mark.parametrize(
    "shape", first_now([{"prefill": 1, "decode": 1}, {"decode": 1, "colocated": True}]), ids=str
)
def test_what_the_device_evicted_is_found_in_the_tiers_also_after_a_kill(tmp_path, shape):
    profile = slow_profile(tmp_path, fixed=0.001, prefill=0.0001, kv=1024)
    worker = {
        "device": f"paced:{profile}",
        "pages": PAGES,
        "host_tier_bytes": 4 << 20,
        "disk_tier_bytes": 8 << 20,
        "disk_tier_dir": str(tmp_path / "tiers"),
    }
    slot = "decode-0" if shape.get("colocated") else "prefill-0"
    oracle = Oracle(profile)
    prompts = [oracle.prompt(seed, PROMPT) for seed in range(MANY)]
    with Fleet(**shape, worker=worker, redis={"beat_s": 0.05}) as fleet:
        for number, prompt in enumerate(prompts, 1):
            assert ask(fleet, prompt) == (oracle.answer(prompt, 4), 0)
            wanted = number * (PROMPT // 16)
            wait_for(lambda wanted=wanted: tier_blocks(fleet, slot, "disk") >= wanted, what="write-back")
        for prompt in prompts:
            fleet.wait_for_baseline()  # else pages of two answers may be on their way back
            assert ask(fleet, prompt) == (oracle.answer(prompt, 4), PROMPT // 16 * 16), fleet.log(slot)

        before = fleet.record(slot)
        os.kill(before.pid, signal.SIGKILL)
        fleet.wait_for_return(slot, before.incarnation)
        wait_for(lambda: tier_blocks(fleet, slot, "disk") >= MANY * (PROMPT // 16), what="the disk's blocks")
        for prompt in prompts:
            fleet.wait_for_baseline()  # else pages of two answers may be on their way back
            assert ask(fleet, prompt) == (oracle.answer(prompt, 4), PROMPT // 16 * 16), fleet.log(slot)
        fleet.wait_for_baseline()


def test_a_disk_tier_without_a_place_is_a_clear_mistake(tmp_path):
    from baton.cluster.config import load_config
    from baton.protos.errors import ConfigError

    with pytest.raises(ConfigError, match=r"set worker\.disk_tier_dir"):
        load_config(flags={"worker": {"disk_tier_bytes": 1 << 20}}, search=tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("store", ["folder", "bucket"])
def test_a_later_cluster_finds_in_the_shared_tier_what_an_earlier_one_computed(tmp_path, store):
    profile = slow_profile(tmp_path, fixed=0.001, prefill=0.0001, kv=1024)
    worker = {"device": f"paced:{profile}", "pages": PAGES, "shared_tier": str(tmp_path / "shared")}
    oracle = Oracle(profile)
    prompt = oracle.prompt(1, PROMPT)
    with served_bucket("blocks") if store == "bucket" else nullcontext() as url:
        worker |= {"shared_tier": "s3://blocks/cluster", "shared_tier_endpoint": url} if url else {}
        with Fleet(prefill=1, decode=1, worker=worker) as fleet:
            assert ask(fleet, prompt) == (oracle.answer(prompt, 4), 0)
            wait_for(lambda: tier_blocks(fleet, "prefill-0", "shared") >= PROMPT // 16, what="sharing")
        with Fleet(prefill=1, decode=1, worker=worker) as fleet:
            assert ask(fleet, prompt) == (oracle.answer(prompt, 4), PROMPT // 16 * 16)
            fleet.wait_for_baseline()


@pytest.mark.thorough  # tests/kv/exchange/test_own_windows.py holds it in make test
def test_a_prefix_of_layers_with_a_window_comes_back_from_the_host_tier(tmp_path):
    model = str(make(tmp_path / "gemma3", "gemma3", tokenizer=True))
    worker = {"model": model, "dtype": "float32", "window_pages": "own", "pages": 120, "host_tier_bytes": 64 << 20}
    prompts = [[3 + (seed * 31 + i * i) % 700 for i in range(300)] for seed in range(4)]
    with Fleet(decode=1, colocated=True, worker=worker, redis={"beat_s": 0.05}) as fleet:
        assert fleet.roster()["decode-0"].info.layout.windows
        answers = []
        for prompt in prompts:
            answers.append(ask(fleet, prompt)[0])
            stored = len(answers) * 18 * 4
            wait_for(lambda stored=stored: tier_blocks(fleet, "decode-0", "host") >= stored, what="write-back")
        for prompt, answer in zip(prompts, answers, strict=True):
            assert ask(fleet, prompt) == (answer, 18 * 16)
        fleet.wait_for_baseline()
