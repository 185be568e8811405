"""Clusters whose workers run as several ranks: widths mixed, what is cached, ranks that die or stand still."""

import os
import signal
import ssl
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest

from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.protos.nouns import Sampling
from tests.conformance.checkpoints import make
from tests.e2e.fleet import DRAFT, Fleet, wait_for
from tests.engine.backends.ranks.other_host import children, other_host
from tests.engine.backends.ranks.threads import SharedDriver
from tests.thorough import first_now
from tests.tls.papers import authority

RECEIVED = "baton_kv_received_bytes_total"
ROWS = "baton_expert_rows_total"
PREFILL_FIRST = {"local_prefill_max_tokens": 0, "policy": "round_robin"}


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 977 + 7 * i + i * i) % 4000 + 3 for i in range(length)]


def ask(fleet: Fleet, tokens: list[int], count: int) -> tuple[list[int], int]:
    """The answer's ids, and how many tokens of the prompt were cached."""
    body = {"prompt": tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True, "max_tokens": count}
    body["repetition_penalty"] = 1.0  # the model comes with one of its own
    reply = httpx.post(fleet.url + "/v1/completions", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def one_rank(tokens: list[int], count: int, model: str = DRAFT) -> list[int]:
    """Returns the answer of one rank, without a cluster."""
    driver = SharedDriver(load_runner(EngineConfig(model, threads=2)), -(-(len(tokens) + count) // 16))
    return driver.answer([tokens], Sampling(temperature=0.0, max_tokens=count, ignore_eos=True))[0]


def followers(fleet: Fleet, slot: str) -> list[int]:
    """The processes of a worker's other ranks."""
    engine = fleet.record(slot).engine_pid
    tasks = Path("/proc", str(engine), "task").iterdir()
    children = {int(pid) for task in tasks for pid in (task / "children").read_text().split()}
    return sorted(pid for pid in children if b"backends.ranks" in Path("/proc", str(pid), "cmdline").read_bytes())


def gone(pid: int) -> bool:
    """Returns whether a process has ended; a zombie counts as ended."""
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


WIDTHS: list[tuple[dict[str, int], list[int]]] = [
    ({"prefill_tp": 2}, [2, 1]),
    ({"prefill_tp": 2, "decode_tp": 3}, [2, 3]),
    ({"prefill_pp": 2, "decode_tp": 2}, [2, 2]),
    ({"decode_tp": 2}, [1, 2]),
    ({"prefill_tp": 4, "decode_tp": 2}, [4, 2]),
    ({"prefill_cp": 3}, [3, 1]),
    ({"prefill_cp": 2, "decode_tp": 4}, [2, 4]),
    ({"prefill_pp": 2}, [2, 1]),
    ({"prefill_tp": 2, "decode_pp": 2}, [2, 2]),
    ({"prefill_tp": 2, "prefill_pp": 2, "decode_tp": 2}, [4, 2]),
    ({"decode_tp": 2, "decode_pp": 2}, [1, 4]),
]


@pytest.mark.thorough  # tests/decode_worker/test_ranks_hand_over.py
@pytest.mark.parametrize(("widths", "ranks"), first_now(WIDTHS, 1), ids=str)
def test_widths_may_differ_and_a_block_that_one_cached_serves_the_other(
    widths: dict[str, int], ranks: list[int]
) -> None:
    tokens = prompt(1, 200)
    with Fleet(1, 1, cluster=widths, worker={"model": DRAFT}, router=PREFILL_FIRST) as fleet:
        assert [len(followers(fleet, f"{role}-0")) + 1 for role in ("prefill", "decode")] == ranks
        answer, _ = ask(fleet, tokens, 40)
        assert answer == one_rank(tokens, 40)
        more = [*tokens, *answer, *prompt(2, 30)]
        again, cached = ask(fleet, more, 20)
        assert again == one_rank(more, 20)
        assert cached >= 192
        fleet.wait_for_baseline()
        left = followers(fleet, "prefill-0") + followers(fleet, "decode-0")
    wait_for(lambda: all(gone(pid) for pid in left), what="the end of every rank, which no cluster outlives")


@pytest.mark.thorough
def test_experts_on_two_ranks_send_to_columns_on_three_and_say_what_they_did(tmp_path: Path) -> None:
    model = make(tmp_path, "mixtral", tokenizer=True, hidden_size=96, num_attention_heads=6, num_key_value_heads=6)
    tokens = [at * at % 200 + 3 for at in range(150)]
    widths, worker = {"prefill_ep": 2, "decode_tp": 3}, {"model": str(model), "expert_replicas": 1}
    with Fleet(1, 1, cluster=widths, worker=worker, router=PREFILL_FIRST) as fleet:
        assert [len(followers(fleet, f"{role}-0")) + 1 for role in ("prefill", "decode")] == [2, 3]
        assert ask(fleet, tokens, 20)[0] == one_rank(tokens, 20, str(model))
        rows = 150 + 1  # of the last layer the one that chooses a token
        wait_for(lambda: fleet.metric("prefill-0", ROWS) == rows * 2, what="every layer's rows and chosen experts")
        wait_for(lambda: fleet.metric("decode-0", ROWS) == 19 * 2 * 2, what="a row for each token but the first")
        for first in range(3, 9):  # rows of one token go to the same experts
            same = [first, *[77] * 800]
            assert ask(fleet, same, 4)[0] == one_rank(same, 4, str(model))
        wait_for(lambda: fleet.metric("prefill-0", "baton_expert_copies") > 0, what="copies of busy experts")
        assert fleet.metric("prefill-0", "baton_expert_moves_total") > 0
        fleet.wait_for_baseline()


@pytest.mark.thorough
def test_recurrent_states_of_stages_are_handed_off_cached_and_answer_as_one_rank(tmp_path: Path) -> None:
    model = str(make(tmp_path, "qwen3_next", tokenizer=True))
    tokens = [at * at % 200 + 3 for at in range(150)]
    alone = SharedDriver(load_runner(EngineConfig(model, threads=2)), 128)
    spoken = Sampling(temperature=0.0, max_tokens=20, ignore_eos=True)
    widths = {"prefill_pp": 2, "decode_pp": 3}
    with Fleet(1, 1, cluster=widths, worker={"model": model}, router=PREFILL_FIRST) as fleet:
        assert [len(followers(fleet, f"{role}-0")) + 1 for role in ("prefill", "decode")] == [2, 3]
        answer, _ = ask(fleet, tokens, 20)
        assert [answer] == alone.answer([tokens], spoken)
        more = [*tokens, *answer, *tokens[:40]]
        again, cached = ask(fleet, more, 20)
        assert [again] == alone.answer([more], spoken)
        assert cached >= 128
        fleet.wait_for_baseline()


@pytest.mark.thorough
def test_workers_of_two_hosts_each_hand_off_answer_as_one_rank_and_survive_a_rank_of_the_other_host(
    tmp_path: Path,
) -> None:
    tokens = prompt(1, 200)
    with other_host(tmp_path / "log") as (address, agent):
        worker = {"model": DRAFT, "pp": 2, "rank_hosts": [address]}
        with Fleet(1, 1, worker=worker, router=PREFILL_FIRST) as fleet:
            assert [followers(fleet, f"{role}-0") for role in ("prefill", "decode")] == [[], []]
            assert len(children(agent)) == 2
            answer, _ = ask(fleet, tokens, 40)
            assert answer == one_rank(tokens, 40)
            require_way(tmp_path / "log")
            wait_for(lambda: fleet.metric("decode-0", RECEIVED) > 0, what="a report of what came")
            require_own_halves(fleet)
            more = [*tokens, *answer, *prompt(2, 30)]
            again, cached = ask(fleet, more, 20)
            assert again == one_rank(more, 20)
            assert cached in (192, 224)  # the latter if two blocks of the answer are fetched sooner than computed
            before = {role: fleet.record(f"{role}-0") for role in ("prefill", "decode")}
            for session in children(agent):
                os.kill(children(session)[0], signal.SIGKILL)
            for role, record in before.items():
                fleet.wait_for_return(f"{role}-0", record.incarnation)
                assert "rank 1 " in fleet.log(f"{role}-0")
            assert ask(fleet, more, 20)[0] == one_rank(more, 20)
            fleet.wait_for_baseline()
        wait_for(lambda: not children(agent), what="the end of the other host's ranks")


@pytest.mark.thorough  # backends/ranks/test_divided_pages.py holds such pages without a cluster
@pytest.mark.parametrize("widths", [{"tp": 2}, {"pp": 2}], ids=str)
@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_next"])
def test_each_host_ships_its_own_part_of_pages_of_windows_and_of_recurrent_states(
    tmp_path: Path, kind: str, widths: dict[str, int]
) -> None:
    turns = {} if kind == "gpt_oss" else {"layer_types": ["linear_attention", "full_attention"] * 2}
    model = str(make(tmp_path / "model", kind, tokenizer=True, num_hidden_layers=4, **turns))
    tokens = [at * at % 200 + 3 for at in range(150)]
    with other_host(tmp_path / "log") as (address, _):
        worker = {"model": model, "rank_hosts": [address], **widths}
        with Fleet(1, 1, worker=worker, router=PREFILL_FIRST) as fleet:
            answer, _ = ask(fleet, tokens, 40)
            assert answer == one_rank(tokens, 40, model)
            require_way(tmp_path / "log")
            wait_for(lambda: fleet.metric("decode-0", RECEIVED) > 0, what="a report of what came")
            require_own_halves(fleet)
            more = [*tokens, *answer, *tokens[:30]]
            assert ask(fleet, more, 20)[0] == one_rank(more, 20, model)
            fleet.wait_for_baseline()


def require_way(log: Path) -> None:
    """Waits until the other host has a way to the decode worker; first handoffs may have gone without it."""
    wait_for(lambda: "KV to decode-0: " in log.read_text(), what="the other host's way to the decode worker")


def require_own_halves(fleet: Fleet) -> None:
    """Asserts that the decode worker's two hosts each took what their ranks read, half of every page."""
    found = dict[str, float]()
    text = httpx.get(f"http://{fleet.record('decode-0').metrics_address}/metrics", timeout=60).text
    for line in text.splitlines():
        if line.startswith(RECEIVED + "{"):
            found[line.partition('host="')[2].partition('"')[0]] = float(line.rpartition(" ")[2])
    assert len(found) == 2, found
    assert found.pop("lead") == next(iter(found.values())) > 0


@pytest.mark.thorough
def test_a_decode_worker_of_two_hosts_that_drains_takes_over_what_is_on_its_way(tmp_path: Path) -> None:
    with other_host(tmp_path / "log") as (address, _), ThreadPoolExecutor(1) as threads:
        worker = {"model": DRAFT, "pp": 2, "rank_hosts": [address], "prefill_chunk_tokens": 16}
        with Fleet(1, 1, worker=worker, router=PREFILL_FIRST) as fleet:
            before = fleet.record("decode-0")
            tokens, asked = until_it_runs(threads, fleet, "prefill-0", 30)
            os.kill(before.pid, signal.SIGTERM)
            wait_for(lambda: asked.done() or gone(before.pid), what="the answer, or the end of its worker")
            assert asked.done(), "no other worker has to compute it"
            assert asked.result()[0] == one_rank(tokens, 30)
            fleet.wait_for_return("decode-0", before.incarnation)


def kv_process(session: int) -> int:
    """The process that sends and receives KV beside the ranks of a session of ``baton ranks``."""
    (found,) = [
        pid for pid in children(session) if b"rank_sender" in Path("/proc", str(pid), "cmdline").read_bytes()
    ]
    return found


@pytest.mark.thorough  # tests/worker/test_rank_receiver_process.py holds it without a cluster
def test_hosts_whose_kv_processes_die_end_their_workers_and_no_answer_is_wrong(tmp_path: Path) -> None:
    with other_host(tmp_path / "log") as (address, agent), ThreadPoolExecutor(1) as threads:
        worker = {"model": DRAFT, "pp": 2, "rank_hosts": [address], "prefill_chunk_tokens": 64}
        with Fleet(1, 1, worker=worker, router=PREFILL_FIRST) as fleet:
            assert ask(fleet, prompt(1, 200), 5)[0] == one_rank(prompt(1, 200), 5)
            before, sessions = fleet.record("decode-0"), children(agent)
            tokens, asked = until_it_runs(threads, fleet, "prefill-0", 30)
            for session in sessions:  # of both workers
                os.kill(kv_process(session), signal.SIGKILL)
            expected = one_rank(tokens, 30)
            fleet.wait_for_return("decode-0", before.incarnation)
            wait_for(lambda: not {*children(agent)} & {*sessions}, what="the end of the other host's processes")
            assert "KV sender of rank 1's host ended by itself (signal 9)" in fleet.log("decode-0")
            if (ended := asked.exception()) is None:
                assert asked.result()[0] == expected
            else:  # both workers were gone for a while: it may have ended by that, in words
                assert "worker" in str(ended)
            assert ask(fleet, tokens, 30)[0] == expected
            fleet.wait_for_baseline()


@pytest.mark.thorough  # hosts/test_secured.py holds it without a cluster
def test_workers_of_two_hosts_answer_as_one_rank_in_a_cluster_that_encrypts(tmp_path: Path) -> None:
    tokens, folder = prompt(1, 200), str(authority().folder)
    body = {"prompt": tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True, "max_tokens": 30}
    with other_host(tmp_path / "log", BATON_TLS__DIR=folder) as (address, agent):
        worker = {"model": DRAFT, "pp": 2, "rank_hosts": [address]}
        with Fleet(1, 1, worker=worker, router=PREFILL_FIRST, tls={"dir": folder}) as fleet:
            assert len(children(agent)) == 2
            context = ssl.create_default_context(cafile=f"{folder}/ca.crt")
            url, wanted = fleet.url + "/v1/completions", body | {"repetition_penalty": 1.0}
            reply = httpx.post(url, json=wanted, timeout=120, verify=context)
            assert reply.status_code == 200, reply.text
            assert reply.json()["choices"][0]["token_ids"] == one_rank(tokens, 30)
            require_way(tmp_path / "log")


def until_it_runs(
    threads: ThreadPoolExecutor, fleet: Fleet, slot: str, count: int
) -> tuple[list[int], Future[tuple[list[int], int]]]:
    """Asks one prompt after the other until one runs on the slot's worker; returns that prompt and its request."""
    for seed in range(20):
        tokens = prompt(seed, 1500)  # that nobody has cached
        asked = threads.submit(ask, fleet, tokens, count)
        wait_for(partial(busy_or_done, asked, fleet, slot), what="a request that runs")
        if not asked.done():
            return tokens, asked
    raise AssertionError(f"{slot} had no turn")


def busy_or_done(asked: Future[tuple[list[int], int]], fleet: Fleet, slot: str) -> bool:
    return asked.done() or bool(fleet.snapshot(slot).running)


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_rank_that_dies_or_stands_still_ends_its_worker_and_the_answer_comes_from_elsewhere(
    role: str, number: signal.Signals
) -> None:
    count, worker = 400, {"model": DRAFT, "stall_s": 5.0, "prefill_chunk_tokens": 16}
    pools = [{"name": "other", "role": role, "count": 1}]
    with (
        Fleet(1, 1, cluster={f"{role}_tp": 2, "pools": pools}, worker=worker, router=PREFILL_FIRST) as fleet,
        ThreadPoolExecutor(1) as threads,
    ):
        slot, before = f"{role}-0", fleet.record(f"{role}-0")
        tokens, asked = until_it_runs(threads, fleet, slot, count)
        pid = followers(fleet, slot)[0]
        os.kill(pid, number)
        expected = one_rank(tokens, count)
        assert asked.result()[0] == expected
        fleet.wait_for_return(slot, before.incarnation)
        assert gone(before.engine_pid)
        wait_for(lambda: gone(pid), what="the rank's end")
        assert "rank 1 " in fleet.log(slot)
        assert ask(fleet, tokens, 20)[0] == expected[:20]
        fleet.wait_for_baseline()
