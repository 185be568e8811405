"""Tests which way KV takes between real workers, and who is told."""

import asyncio
from pathlib import Path

import httpx
import pytest

from baton.console.cluster.workers import links_table
from baton.decode_worker.engine.loop import DecodeLoop
from baton.protos.channel import Admit
from baton.protos.nouns import EngineRequest, Sampling
from tests.conformance.checkpoints import make
from tests.decode_worker.test_windows import Side
from tests.e2e.fleet import DRAFT, Fleet, wait_for
from tests.e2e.paced import Oracle, slow_profile


def answer(fleet: Fleet, prompt: list[int], tokens: int = 8) -> list[int]:
    body = {"model": fleet.name, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True, "repetition_penalty": 1.0}  # the checkpoint's own default is another
    reply = httpx.post(fleet.url + "/v1/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["token_ids"]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("auto", "shm"),
        pytest.param("tcp", "tcp", marks=pytest.mark.thorough),
        pytest.param("nccl", "nccl", marks=pytest.mark.thorough),
    ],
)
async def test_kv_goes_by_the_best_way_or_the_one_that_is_set(tmp_path: Path, wanted: str, expected: str) -> None:
    profile = slow_profile(tmp_path, fixed=0.002, prefill=0.00002)
    worker = {"device": f"paced:{profile}", "kv_transport": wanted}
    with Fleet(prefill=1, decode=1, worker=worker, router={"local_prefill_max_tokens": 0}) as fleet:
        oracle = Oracle(profile)
        links = lambda: fleet.roster()["prefill-0"].load.kv_links  # noqa: E731
        (first,) = await asyncio.to_thread(wait_for, links, what="the pair being measured, before anybody asks")
        # A busy machine may make the best way slower than another for once: then the pair is measured again.
        best = lambda: links()[0].transport == expected  # noqa: E731
        await asyncio.to_thread(wait_for, best, 200, "the best way")
        entries = await asyncio.to_thread(fleet.roster)
        for seed in range(3):
            prompt = oracle.prompt(seed, 900)
            assert answer(fleet, prompt) == oracle.answer(prompt, 8)
        (link,) = entries["prefill-0"].load.kv_links
        assert (link.peer, link.transport, link.fallback) == ("decode-0", expected, "")
        assert link.bytes_per_s > 0
        shown = links_table(entries)
        assert shown is not None
        assert shown.row_count == 1
        metrics = httpx.get(f"http://{entries['prefill-0'].info.metrics_address}/metrics", timeout=60).text
        info = [line for line in metrics.splitlines() if line.startswith("baton_kv_transport_info{")]
        assert any(f'transport="{expected}"' in line and line.endswith(" 1.0") for line in info), info
        assert ("baton_kv_transport_fallbacks_total{" in metrics) == (first.transport != expected)
        assert entries["decode-0"].info.data_addresses.keys() == ({"shm", "tcp"} if wanted == "auto" else {wanted})
        fleet.wait_for_baseline()


def shipped_bytes(fleet: Fleet) -> float:
    """KV bytes of the one handoff there was: its sender counts them after the answer has begun."""
    return wait_for(lambda: fleet.metric("prefill-0", "baton_kv_transfer_bytes_total"), what="its bytes counted")


def read_and_written_here(selection: str, prompt: list[int], tokens: int) -> list[int]:
    """The answer of one engine that reads the prompt itself."""
    side = Side(DRAFT, DecodeLoop, kv_selection=selection)
    sampling = Sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    side.say(Admit(1, EngineRequest("r", tuple(prompt), len(prompt), sampling, 0), True, 30.0))
    side.finish()
    return side.tokens(1)


@pytest.mark.thorough  # tests/decode_worker/test_selection.py
@pytest.mark.parametrize(
    ("selection", "shipped_blocks", "tokens"),
    [
        ("sinks:16,window:32", 5, 8),
        pytest.param("snapkv:64,window:32", 2 + 3, 8, marks=pytest.mark.thorough),
        pytest.param("h2o:64,window:32", 2 + 3, 44, marks=pytest.mark.thorough),
    ],
)
async def test_a_cluster_that_selects_ships_what_is_seen_and_answers_as_one_worker(
    selection: str, shipped_blocks: int, tokens: int
) -> None:
    router = {"local_prefill_max_tokens": 0, "policy": "round_robin"}
    with Fleet(prefill=1, decode=1, worker={"model": DRAFT, "kv_selection": selection}, router=router) as fleet:
        prompt = list(range(3, 200))
        assert answer(fleet, prompt, tokens) == read_and_written_here(selection, prompt, tokens)
        entries = await asyncio.to_thread(fleet.roster)
        layout = entries["prefill-0"].info.layout
        assert layout.fidelity == f"float32@{selection}"
        shipped = await asyncio.to_thread(shipped_bytes, fleet)
        assert shipped < (shipped_blocks + 1) * layout.page_bytes, "of 13 blocks"
        fleet.wait_for_baseline()


@pytest.mark.thorough
async def test_a_cluster_whose_windows_have_pages_of_their_own_ships_what_they_show(tmp_path: Path) -> None:
    model = str(make(tmp_path / "gemma3", "gemma3", tokenizer=True))
    router = {"local_prefill_max_tokens": 0, "policy": "round_robin"}
    answers, shipped = list[list[int]](), list[float]()
    for pages in ("shared", "own"):
        worker = {"model": model, "dtype": "float32", "window_pages": pages}
        with Fleet(prefill=1, decode=1, worker=worker, router=router) as fleet:
            answers.append(answer(fleet, list(range(3, 200)), 40))
            entries = await asyncio.to_thread(fleet.roster)
            shipped.append(await asyncio.to_thread(shipped_bytes, fleet))
            assert entries["prefill-0"].info.layout.windows == (() if pages == "shared" else (0, 29, 29, 29))
            fleet.wait_for_baseline()
    assert answers[0] == answers[1]
    whole, divided = shipped
    assert divided == whole * (13 + 3 * 3) / (4 * 13)


@pytest.mark.thorough  # of loops in one process: tests/decode_worker/test_window_kinds.py
@pytest.mark.parametrize(("reads", "writes"), [("shared", "own"), ("own", "shared")])
async def test_a_cluster_of_both_kinds_of_pages_hands_over_and_answers_as_one_of_one_kind(
    tmp_path: Path, reads: str, writes: str
) -> None:
    model = str(make(tmp_path / "gemma3", "gemma3", tokenizer=True))
    router = {"local_prefill_max_tokens": 0, "policy": "round_robin"}
    worker, prompt = {"model": model, "dtype": "float32", "window_pages": writes}, list(range(3, 200))
    with Fleet(prefill=1, decode=1, worker=worker, router=router) as fleet:
        wanted = answer(fleet, prompt, 40)
    pool = {"name": "reader", "role": "prefill", "count": 1, "worker": {"window_pages": reads}}
    with Fleet(0, 1, cluster={"pools": [pool]}, worker=worker, router=router) as fleet:
        for turn in range(2):
            assert answer(fleet, prompt, 40) == wanted
            handed = fleet.metric("reader-0", "baton_kv_transfer_bytes_total")
            assert handed > 0, f"turn {turn} came by a handoff"
        fleet.wait_for_baseline()


async def test_a_cluster_with_a_wire_codec_answers_and_labels_its_kv(tmp_path: Path) -> None:
    router = {"local_prefill_max_tokens": 0, "policy": "round_robin"}
    with Fleet(prefill=1, decode=1, worker={"model": DRAFT, "kv_codec": "int8"}, router=router) as fleet:
        assert len(answer(fleet, list(range(3, 200)), 8)) == 8
        entries = await asyncio.to_thread(fleet.roster)
        layout = entries["prefill-0"].info.layout
        assert (layout.dtype, layout.fidelity) == ("float32", "float32~int8")
        shipped = await asyncio.to_thread(shipped_bytes, fleet)
        assert 0 < shipped < 0.35 * 13 * layout.page_bytes, "a quarter of float32, and the scales"
        fleet.wait_for_baseline()
