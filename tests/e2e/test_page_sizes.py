"""Clusters whose workers have pages of different sizes answer as those that have one."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.e2e.fleet import DRAFT, Fleet, wait_for
from tests.e2e.paced import Oracle, slow_profile

KV_BYTES = 16384  # of a token
PREFILL_FIRST = {"local_prefill_max_tokens": 0, "policy": "round_robin"}


def mixed(prefill: int, decode: int, **sections) -> Fleet:
    """1P1D with pages of that many tokens."""
    pool = {"name": "wide", "role": "prefill", "count": 1, "worker": {"block_tokens": prefill}}
    worker = {"block_tokens": decode} | sections.pop("worker", {})
    return Fleet(0, 1, cluster={"pools": [pool]}, worker=worker, router=PREFILL_FIRST, **sections)


def ask(fleet: Fleet, prompt: list[int], **fields) -> tuple[list[int], int]:
    body = {"prompt": prompt, "temperature": 0, "ignore_eos": True, "return_token_ids": True} | fields
    reply = httpx.post(fleet.url + "/v1/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-baton-route"].startswith("way=prefill")
    answer = reply.json()
    return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.thorough  # tests/kv/transport/test_page_sizes.py
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [(64, 16), pytest.param(16, 64, marks=pytest.mark.thorough), pytest.param(48, 32, marks=pytest.mark.thorough)],
)
def test_a_conversation_over_pages_of_two_sizes_is_right_and_found_again(
    tmp_path: Path, prefill: int, decode: int
) -> None:
    profile = slow_profile(tmp_path, fixed=0.001, prefill=0.00002)
    with mixed(prefill, decode, worker={"device": f"paced:{profile}"}, redis={"beat_s": 0.05}) as fleet:
        oracle, prompt = Oracle(profile), Oracle(profile).prompt(1, 777)
        for turn in range(3):
            answer, cached = ask(fleet, prompt, max_tokens=100)
            assert answer == oracle.answer(prompt, 100)
            if turn:
                assert cached >= 700
                assert cached % prefill == 0, "what the prefill worker found is whole blocks of its own"
            prompt = [*prompt, *answer, *oracle.prompt(2 + turn, 33)]
        fleet.wait_for_baseline()


@pytest.mark.thorough
def test_the_demo_model_answers_the_same_whatever_the_pages(tmp_path: Path) -> None:
    prompt = [(7 * i) % 400 + 3 for i in range(150)]
    asked = {"max_tokens": 60, "n": 1, "logprobs": 2}
    with Fleet(1, 1, worker={"model": DRAFT}, router=PREFILL_FIRST) as fleet:
        expected = ask(fleet, prompt, **asked)[0]
    with mixed(64, 48, worker={"model": DRAFT}) as fleet:
        assert ask(fleet, prompt, **asked)[0] == expected
        fleet.wait_for_baseline()


@pytest.mark.thorough  # a kill by pages of one size: test_handoff_kills.py
def test_what_arrived_before_a_prefill_worker_was_killed_is_kept_in_pages_of_another_size(tmp_path: Path) -> None:
    profile = slow_profile(tmp_path, fixed=0.002, prefill=0.001, kv=KV_BYTES)
    pool = {"name": "narrow", "role": "prefill", "count": 2, "worker": {"device": f"paced:{profile}"}}
    wide = {"device": f"paced:{profile}", "block_tokens": 48, "prefill_chunk_tokens": 64}
    pool["worker"] |= {"block_tokens": 16}
    with Fleet(0, 1, cluster={"pools": [pool]}, worker=wide, router=PREFILL_FIRST) as fleet:
        oracle = Oracle(profile)
        prompt = oracle.prompt(5, 1500)
        with ThreadPoolExecutor(1) as threads:
            asked = threads.submit(ask, fleet, prompt, max_tokens=20)
            reader = wait_for(lambda: busy(fleet), what="a prompt being read")
            wait_for(lambda: fleet.snapshot(reader).steps >= 10, what="ten chunks")
            fleet.kill(reader, "engine")
            assert asked.result()[0] == oracle.answer(prompt, 20)
        fleet.wait_for_return(reader, "")
        fleet.wait_for_baseline()
        other = next(slot for slot in ("narrow-0", "narrow-1") if slot != reader)
        metrics = httpx.get(f"http://{fleet.record(other).metrics_address}/metrics", timeout=30).text
        shipped = sum(
            float(line.split()[-1])
            for line in metrics.splitlines()
            if line.startswith("baton_kv_transfer_bytes_total{")
        )
        whole = -(-1500 // 48) * 48 * KV_BYTES
        assert 0 < shipped < whole, "blocks that had arrived were sent again"


def busy(fleet: Fleet) -> str:
    """The prefill worker that computes."""
    return next((slot for slot in ("narrow-0", "narrow-1") if fleet.snapshot(slot).running), "")
